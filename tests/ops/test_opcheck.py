"""The ops under PyTorch's own tools: opcheck, torch.compile without graph breaks, torch.export."""

import attnpack
import pytest
import torch
from attnpack import apply_rope, attention, attention_scores, merge_states
from attnpack.ops import rope_table
from marks import long, some_long
from op_cases import AXES, COVERING, NAMES, check_against_reference, describe, draw, laid_out, make_inputs
from schemas import operator_keywords
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim
from torch.library import opcheck
from torch.testing import assert_close

ops = torch.ops.attnpack


def keywords(inputs, dropout_p=0.0):
    """The arguments after the tensors in torch.ops.attnpack.attention, by name."""
    flat = operator_keywords(inputs.query, inputs.key, inputs.mask, inputs.settings)
    return flat | ({"dropout_p": dropout_p, "dropout_seed": torch.tensor([5])} if dropout_p else {})


# An op is registered for all dtypes at once, and opcheck is slow.
ONE_DTYPE = pytest.mark.parametrize("dtype", some_long(AXES["dtype"], [torch.bfloat16]), ids=str)


def leaf(x):
    return x.detach().requires_grad_() if x is not None and x.is_floating_point() else x


# Every value of dtype, layout and mask, but not every pair of values, because opcheck is slow.
CHECKED = [
    {
        "dtype": AXES["dtype"][n % 4],
        "heads": ["gqa", "uneven"][n // 4 % 2],
        "lengths": [(3, 5), (40, 9)][n // 2 % 2],
        "mask": AXES["mask"][n % 9],
        "positions": [{}, {"causal": True, "q_offset": "tensor"}, {"window": (2, -1), "q_offset": "end"}][n % 3],
        "kv_lens": [None, torch.int32][n // 3 % 2],
        "scores": [{}, {"softcap": 2.0, "sinks": True, "alibi": True}][n % 2],
        "layout": AXES["layout"][n % 7],
    }
    for n in range(12)
]


@pytest.mark.parametrize("case", some_long(CHECKED, CHECKED[::3]), ids=describe)
def test_opcheck_attention(case):
    inputs = make_inputs(**case)
    inputs.settings = {k: leaf(x) if k == "sinks" else x for k, x in inputs.settings.items()}
    inputs.mask = leaf(inputs.mask)
    tensors = map(leaf, (inputs.query, inputs.key, inputs.value))
    opcheck(ops.attention.default, (*tensors,), keywords(inputs))


@pytest.mark.parametrize(
    "empty", [{"batch": 0}, {"lengths": (0, 5)}, {"lengths": (3, 0)}, {"dims": (0, 4)}, {"dims": (4, 0)}]
)
def test_opcheck_attention_without_elements(empty):
    inputs = make_inputs(**{"lengths": (3, 5), **empty})
    opcheck(ops.attention.default, (inputs.query, inputs.key, inputs.value), keywords(inputs))


@ONE_DTYPE
def test_opcheck_attention_backward(dtype):
    inputs = make_inputs(dtype, mask="own", scores={"sinks": True}, layout="columns outside")
    tensors = inputs.query, inputs.key, inputs.value
    out, lse = ops.attention(*tensors, **keywords(inputs, 0.3))
    for mask_gradient, sinks_gradient in ((True, False), (False, True)):
        rest = keywords(inputs, 0.3) | {"mask_gradient": mask_gradient, "sinks_gradient": sinks_gradient}
        opcheck(ops.attention_backward.default, (inputs.grad_out, inputs.grad_lse, *tensors, out, lse), rest)
        opcheck(ops.attention_backward.default, (inputs.grad_out, None, *tensors, out, lse), rest)


@pytest.mark.parametrize("names", some_long(NAMES, ["blocks of 64, of heads"]))
def test_opcheck_named_keys(names):
    inputs = make_inputs(mask="own", positions={"causal": True}, scores={"sinks": True}, names=names)
    tensors = [leaf(x) for x in (inputs.query, inputs.key, inputs.value)]
    opcheck(ops.attention.default, (*tensors,), keywords(inputs))
    for stage in ("probs", "named"):
        opcheck(ops.attention_scores.default, (*tensors[:2],), keywords(inputs) | {"stage": stage})
    out, lse = ops.attention(*tensors, **keywords(inputs))
    tensors += [out.detach(), lse.detach()]
    rest = keywords(inputs) | {"mask_gradient": True, "sinks_gradient": True}
    opcheck(ops.attention_backward.default, (inputs.grad_out, inputs.grad_lse, *tensors), rest)


@pytest.mark.parametrize("stage", ["masked", "probs"])
@ONE_DTYPE
def test_opcheck_attention_scores(dtype, stage):
    inputs = make_inputs(dtype, mask="bool", positions={"causal": True}, scores={"softcap": 2.0, "alibi": True})
    opcheck(ops.attention_scores.default, (leaf(inputs.query), leaf(inputs.key)), keywords(inputs) | {"stage": stage})


@ONE_DTYPE
def test_opcheck_merge_states(dtype):
    lse = torch.float64 if dtype == torch.float64 else torch.float32
    parts = (draw(2, 3, 5, 4, dtype=dtype), draw(2, 3, 5, dtype=lse)) * 2
    opcheck(ops.merge_states.default, tuple(leaf(x) for x in parts))


@pytest.mark.parametrize("interleaved", [False, long(True)])
@pytest.mark.parametrize(
    "dtype, layout",
    [case if n < 3 else long(*case) for n, case in enumerate(zip(AXES["dtype"] * 2, AXES["layout"], strict=False))],
)
def test_opcheck_apply_rope(dtype, layout, interleaved):
    angle = draw(5, 3)
    x = leaf(laid_out(draw(2, 3, 5, 8, dtype=dtype), layout))
    opcheck(ops.apply_rope.default, (x, angle.cos(), angle.sin(), interleaved))


def test_opcheck_rope_table_and_null():
    opcheck(ops.rope_table.default, (torch.arange(6).view(2, 3), [1.0, 0.5], 1.5))
    x = draw(3, 4).t()
    opcheck(ops.null.default, (x,))
    assert torch.equal(ops.null(x), x) and ops.null(x).data_ptr() != x.data_ptr()


@ONE_DTYPE
def test_opcheck_kv_cache_append(dtype):
    cache = [torch.zeros(2, 3, 8, 4, dtype=dtype), torch.zeros(2, 3, 8, 5, dtype=dtype), torch.tensor([2, 5])]
    new = draw(2, 3, 3, 4, dtype=dtype), draw(2, 3, 3, 5, dtype=dtype)
    for lens in (None, torch.tensor([1, 3], dtype=torch.int32)):
        opcheck(ops.kv_cache_append_.default, (*cache, *new, lens, None))


def test_opcheck_of_caches_that_drop_positions():
    key, value, lengths, dropped = draw(2, 3, 8, 4), draw(2, 3, 8, 5), torch.tensor([303, 5]), torch.tensor([300, 0])
    opcheck(ops.kv_window_slide.default, (key, value, lengths, dropped, 12, 2, 1))
    opcheck(ops.kv_window_crop.default, (lengths, dropped, 302, 1, 0))
    new = draw(2, 3, 3, 4), draw(2, 3, 3, 5)
    opcheck(ops.kv_cache_append_.default, (key, value, lengths, *new, None, None, dropped))
    rotation = [1.0, 0.5], 1.0, False
    query = draw(2, 6, 3, 4)
    opcheck(ops.kv_cache_append_rotated_.default, (key, value, lengths, query, *new, *rotation, None, None, dropped))


@ONE_DTYPE
def test_opcheck_kv_cache_append_rotated(dtype):
    cache = [torch.zeros(2, 3, 8, 4, dtype=dtype), torch.zeros(2, 3, 8, 5, dtype=dtype), torch.tensor([2, 5])]
    new = draw(2, 6, 3, 4, dtype=dtype), draw(2, 3, 3, 4, dtype=dtype), draw(2, 3, 3, 5, dtype=dtype)
    for lens in (None, torch.tensor([1, 3], dtype=torch.int32)):
        opcheck(ops.kv_cache_append_rotated_.default, (*cache, *new, [1.0, 0.5], 1.0, False, lens, None))


@pytest.mark.parametrize("op", [ops.attend.default, ops.attend_with_weights.default], ids=str)
@pytest.mark.parametrize("cached", [long(False), True])
def test_opcheck_attend(cached, op):
    """The layer op, which writes its cache."""
    inputs = make_inputs(torch.bfloat16, lengths=(3, 3), dims=(8, 8))
    cache = (None,) * 3
    if cached:
        cache = *(torch.zeros(2, 2, 9, 8, dtype=torch.bfloat16) for _ in range(2)), torch.tensor([2, 5])
    mask = torch.ones(9 if cached else 3, dtype=torch.bool)
    rest = {"rope_inv_freq": [1.0, 0.1], "mask": mask, "causal": True}
    opcheck(op, (inputs.query, inputs.key, inputs.value, *cache), rest)


# ---- torch.compile -------------------------------------------------------------------


@pytest.mark.parametrize("case", some_long(COVERING[::16], COVERING[::48]), ids=describe)
def test_compiled_without_graph_breaks_meets_the_reference(case):

    def call(*tensors, **settings):
        return attention(*tensors, **settings)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    check_against_reference(make_inputs(**case), attend=compiled)


@pytest.mark.parametrize("names", ["keys", "blocks of 64, of heads"])
def test_compiled_named_keys_meet_the_reference(names):
    compiled = torch.compile(lambda *x, **settings: attention(*x, **settings), fullgraph=True, backend="aot_eager")
    check_against_reference(make_inputs(lengths=(3, 200), names=names), attend=compiled)
    inputs = make_inputs(lengths=(3, 200), names=names, positions={"causal": True, "q_offset": 150})
    scores = torch.compile(lambda *x: attention_scores(*x, **inputs.settings), fullgraph=True, backend="aot_eager")
    expected = attention_scores(inputs.query, inputs.key, **inputs.settings)
    assert_close(scores(inputs.query, inputs.key), expected)


def test_exported_named_keys_are_for_any_number_of_keys_and_names():
    class Attend(torch.nn.Module):
        def forward(self, query, key, index):
            return attention(query, key, key, key_index=index, key_block=2)

    keys, names = Dim("keys", min=8, max=500), Dim("names", max=100)
    example = draw(1, 4, 3, 8), draw(1, 2, 40, 8, seed=1), torch.arange(9).expand(1, 1, 3, 9)
    program = torch.export.export(Attend(), example, dynamic_shapes=({}, {2: keys}, {3: names}))
    other = draw(1, 4, 3, 8), draw(1, 2, 99, 8, seed=2), torch.tensor([40, -1, 3]).expand(1, 1, 3, 3)
    assert torch.equal(program.module()(*other), Attend()(*other))


def test_inductor_takes_all_ops_in_one_graph():
    inputs = make_inputs(lengths=(3, 9))
    inv_freq = [1.0, 0.1, 0.01]

    def layer(q, k, v):
        cos, sin = rope_table(torch.arange(3) + 6, inv_freq)
        q = apply_rope(q, cos, sin)
        near = attention(q, k[:, :, 4:], v[:, :, 4:], causal=True, q_offset="end", return_lse=True)
        out, lse = merge_states(*attention(q, k[:, :, :4], v[:, :, :4], return_lse=True), *near)
        return out, lse, attention_scores(q, k, causal=True, q_offset="end")

    results = []
    for call in (layer, torch.compile(layer, fullgraph=True)):
        leaves = [leaf(x) for x in (inputs.query, inputs.key, inputs.value)]
        out, lse, probs = call(*leaves)
        grads = torch.autograd.grad((out, lse), leaves, (inputs.grad_out, inputs.grad_lse))
        results.append((out, lse, probs, *grads))
    assert_close(*results)


@pytest.mark.parametrize(
    "settings", [{"q_offset": "end"}, {"q_offset": "end", "kv_lens": torch.tensor([4, 2])}, {"q_offset": 1}]
)
@pytest.mark.parametrize("trained", [long(False), True])
def test_lengths_may_change_without_new_graphs(settings, trained):
    counter = CompileCounterWithBackend("aot_eager")

    def call(q, k, v):
        return attention(q, k, v, causal=True, **settings)

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for q_len, kv_len in ((3, 5), (4, 8), (7, 13), (9, 40), (41, 60)):
        inputs = make_inputs(lengths=(q_len, kv_len))
        tensors = [leaf(x) if trained else x for x in (inputs.query, inputs.key, inputs.value)]
        expected, got = call(*tensors), compiled(*tensors)
        assert_close(got, expected)
        if trained:
            assert_close(*(torch.autograd.grad(out, tensors, inputs.grad_out) for out in (got, expected)))
    assert counter.frame_count <= 2  # the first lengths, then any


def test_compiled_dropout_draws_from_torchs_generator():
    inputs = make_inputs(lengths=(40, 60))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q, k, v):
        return attention(q, k, v, dropout_p=0.5)

    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(call(inputs.query, inputs.key, inputs.value))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_checks_speak_while_tracing():
    inputs = make_inputs()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="key has head_dim 7, query 8"):
        compiled(inputs.query, inputs.key[..., :7], inputs.value)


@pytest.mark.parametrize("dims", [(2, 3), (1, 2), (0, 0)], ids=["columns outside", "heads inside", "contiguous"])
def test_meta_tensors_have_the_kernels_shapes_and_strides(dims):
    inputs = make_inputs(torch.bfloat16)
    laid = [x.transpose(*dims).contiguous().transpose(*dims) for x in (inputs.query, inputs.key, inputs.value)]
    real = attention(*laid, return_lse=True)
    meta = attention(*(x.to("meta") for x in laid), return_lse=True)
    for a, b in zip(real, meta, strict=True):
        assert a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype and b.is_meta


# ---- torch.export --------------------------------------------------------------------


class Layer(torch.nn.Module):
    def forward(self, q, k, v, lens):
        out, lse = attention(q, k, v, causal=True, q_offset="end", kv_lens=lens, window=(4, -1), return_lse=True)
        return out * lse.exp().unsqueeze(-1).clamp(max=2)


def test_export_with_dynamic_lengths_saved_and_loaded(tmp_path):
    def arguments(q_len, kv_len):
        inputs = make_inputs(lengths=(q_len, kv_len))
        return inputs.query, inputs.key, inputs.value, torch.tensor([kv_len, kv_len - 1])

    q_len, kv_len = Dim("q_len", min=2, max=64), Dim("kv_len", min=2, max=64)
    dynamic = {"q": {2: q_len}, "k": {2: kv_len}, "v": {2: kv_len}, "lens": None}
    program = torch.export.export(Layer(), arguments(5, 7), dynamic_shapes=dynamic)
    assert [n.target for n in program.graph.nodes if "attnpack" in str(n.target)] == [ops.attention.default]
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    for lengths in ((5, 7), (3, 50), (50, 60)):
        assert_close(loaded(*arguments(*lengths)), Layer()(*arguments(*lengths)))


def test_ops_need_no_python_of_ours():
    """torch.ops gives the same as the Python function."""
    inputs = make_inputs(mask="own", scores={"sinks": True})
    out, lse = ops.attention(inputs.query, inputs.key, inputs.value, **keywords(inputs))
    again = attention(inputs.query, inputs.key, inputs.value, inputs.mask, return_lse=True, **inputs.settings)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    assert attnpack.attention is attention


def kept(x, keep):
    """[1, heads, kept rows, width] of x [rows, heads * width]: a size that depends on data."""
    return x[keep].unflatten(-1, (4, 8)).transpose(0, 1)[None]


OF_UNKNOWN_LENGTH = {
    "plain": lambda y: attention(y, y, y),
    "causal": lambda y: attention(y, y, y, causal=True, window=(3, 0), return_lse=True),
    "mask": lambda y: attention(y, y, y, torch.ones(y.size(2), y.size(2), dtype=torch.bool).tril()),
    "a batch": lambda y: attention(*(y.transpose(0, 2),) * 3),
    "probabilities": lambda y: attention_scores(y, y, causal=True, window=(3, 0)),
    "rope": lambda y: apply_rope(y, *(t.expand(y.size(2), 4) for t in torch.ones(2, 1, 4))),
}


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(call, id=name, marks=pytest.mark.long if name in ("causal", "a batch") else ())
        for name, call in OF_UNKNOWN_LENGTH.items()
    ],
)
def test_a_size_that_depends_on_data(call):
    """As torch's own attention: one graph for any number of kept rows, compiled and exported."""

    class Module(torch.nn.Module):
        def forward(self, x, keep):
            return call(kept(x, keep))

    x, keep, module = draw(9, 32, dtype=torch.float32), torch.arange(9) % 3 > 0, Module()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        for some in (keep, ~keep):
            assert_close(compiled(x, some), module(x, some))
    assert_close(torch.export.export(module, (x, keep)).module()(x, ~keep), module(x, ~keep))
