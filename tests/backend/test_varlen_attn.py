"""torch.nn.attention.varlen on CPU tensors: the kernels that attnpack.backend.enable("varlen") registers."""

import pytest
import torch
from attnpack import attention_varlen, backend
from attnpack.backend import varlen
from op_cases import draw
from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out
from torch.testing import assert_close

TORCH_TAKES_TWO_WIDTHS = "backend" in str(torch.ops.torch_attn._varlen_attn.default._schema)


@pytest.fixture
def enabled():
    held = backend.enable("varlen")
    yield
    held.disable()


def ends(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def call(dtype=torch.float32, heads=2):
    tensors = [draw(n, h, 8, dtype=dtype, seed=n + h) for n, h in ((9, 4), (12, heads), (12, heads))]
    return tensors, (ends(0, 4, 9), ends(0, 7, 12), 5, 7)


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_varlen_attn_is_ours(dtype, window):
    tensors, where = call(dtype)
    settings = {"window": window, "causal": window == (-1, 0), "scale": 0.3}
    theirs = {"window_size": window, "scale": 0.3, "enable_gqa": True, "return_aux": AuxRequest(lse=True)}
    results = []
    for function in (
        lambda *x: varlen_attn(*x, *where, **theirs),
        lambda *x: attention_varlen(*x, *where[:2], return_lse=True, **settings),
    ):  # fmt: skip
        leaves = [x.clone().requires_grad_() for x in tensors]
        out, lse = function(*leaves)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves), lse.float()])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.usefixtures("enabled")
def test_a_given_output():
    tensors, where = call()
    out = torch.empty(9, 4, 8)
    result = varlen_attn_out(out, *tensors, *where, enable_gqa=True, num_splits=1)
    assert result.data_ptr() == out.data_ptr()
    assert torch.equal(out, attention_varlen(*tensors, *where[:2]))


@pytest.mark.usefixtures("enabled")
def test_used_keys():
    (q, k, v), where = call()
    k[5:7] = v[5:7] = float("nan")
    out = varlen_attn(q, k, v, *where, enable_gqa=True, window_size=(-1, 0), seqused_k=ends(5, 5))
    index = torch.tensor([0, 1, 2, 3, 4, 7, 8, 9, 10, 11])
    assert torch.equal(out, attention_varlen(q, k[index], v[index], where[0], ends(0, 5, 10), causal=True))
    for wrong in (ends(8, 5), ends(5), ends(-1, 5)):
        with pytest.raises(ValueError, match="seqused_k is .*, wants one number for each sequence, from 0 to its keys"):
            varlen_attn(q, k, v, *where, enable_gqa=True, seqused_k=wrong)


@pytest.mark.usefixtures("enabled")
def test_used_keys_under_another_default_device():
    (q, k, v), where = call()
    used = ends(5, 5)
    expected = varlen_attn(q, k, v, *where, enable_gqa=True, seqused_k=used)
    with torch.device("meta"):
        assert torch.equal(varlen_attn(q, k, v, *where, enable_gqa=True, seqused_k=used), expected)


@pytest.mark.usefixtures("enabled")
def test_what_is_not_there_is_named():
    (q, k, v), where = call()
    with pytest.raises(ValueError, match="block_table is given, and keys in pages are not built yet"):
        varlen_attn(q, k[None], v[None], *where, enable_gqa=True, block_table=ends(0, 0).view(2, 1))
    with pytest.raises(ValueError, match="cu_seq_k is None, wants an int32 tensor"):
        varlen_attn(q, k, v, where[0], None, 5, 7, enable_gqa=True)
    if not TORCH_TAKES_TWO_WIDTHS:
        with pytest.raises(ValueError, match="value has head_dim 5, query 8"):
            varlen_attn(q, k, v[..., :5], *where, enable_gqa=True)
    with pytest.raises(ValueError, match="cu_seqlens_k ends at 11, wants 12"):
        varlen_attn(q, k, v, where[0], ends(0, 7, 11), 5, 7, enable_gqa=True)


@pytest.mark.parametrize("turned", [False, True])
def test_the_kernels_of_torch_2_15(turned, monkeypatch):
    """Its ops name a backend, and take values of another width than the queries. The kernels are called as it calls
    them, and the strides are those that its traced graphs expect."""
    monkeypatch.setattr(varlen, "_check_width", lambda *_: None)
    (q, k, v), where = call()
    v = v[..., :5]
    if turned:
        q = q.transpose(0, 1).contiguous().transpose(0, 1)
    out, lse, state = varlen._varlen_attn(q, k, v, *where, False, None, [-1, 0], True, None, None, None, 1)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted, wanted_lse = attention_varlen(*leaves, *where[:2], causal=True, return_lse=True)
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    assert out.stride() == ((5, 45, 1) if turned else (20, 5, 1))
    grads = varlen._varlen_attn_backward(
        torch.ones_like(out), q, k, v, out, lse, *where, False, state, None, [-1, 0], 1
    )
    for got, expected in zip(grads, torch.autograd.grad(wanted.sum(), leaves), strict=True):
        assert torch.equal(got, expected)
    given = torch.empty(9, 4, 5)
    varlen._varlen_attn_out(given, q, k, v, *where, False, None, [-1, 0], True, None, None, None, 1)
    assert torch.equal(given, wanted)


if TORCH_TAKES_TWO_WIDTHS:  # from 2.15 on

    @pytest.mark.usefixtures("enabled")
    def test_two_widths_through_torch():
        (q, k, v), where = call()
        leaves = [x.clone().requires_grad_() for x in (q, k, v[..., :5])]
        for function in (varlen_attn, torch.compile(varlen_attn, fullgraph=True, backend="aot_eager")):
            out = function(*leaves, *where, enable_gqa=True)
            expected = attention_varlen(*leaves, *where[:2])
            assert torch.equal(out, expected)
            for got, grad in zip(*(torch.autograd.grad(x.sum(), leaves) for x in (out, expected)), strict=True):
                assert_close(got, grad)


@pytest.mark.usefixtures("enabled")
def test_compiles_with_other_strides():
    tensors, where = call()
    compiled = torch.compile(lambda *x: varlen_attn(*x, *where, enable_gqa=True), fullgraph=True)
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in tensors]
    out = compiled(*turned)
    expected = attention_varlen(*turned, *where[:2])
    assert_close(out, expected)
    for got, grad in zip(*(torch.autograd.grad(x.sum(), turned) for x in (out, expected)), strict=True):
        assert_close(got, grad)


def test_registrations_are_counted_and_undone():
    tensors, where = call()
    first, second = backend.enable("varlen"), backend.enable("varlen")
    first.disable()
    first.disable()
    assert second.enabled and not first.enabled
    varlen_attn(*tensors, *where, enable_gqa=True)
    second.disable()
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        varlen_attn(*tensors, *where, enable_gqa=True)
    again = backend.enable("varlen")
    varlen_attn(*tensors, *where, enable_gqa=True)
    again.disable()
