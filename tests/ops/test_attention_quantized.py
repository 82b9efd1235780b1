"""Attention over quantised keys and values, against attention in fp64 over the numbers that they hold."""

import attnpack
import pytest
import torch
from attnpack import reference
from attnpack.ops import dequantize_rows, flat_rules, quantize_rows
from torch.testing import assert_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def call(query, key, value, bits, v_head_dim, **rules):
    return torch.ops.attnpack.attention_quantized(query, key, value, bits, v_head_dim, **flat_rules(query, rules)[1])


def draw(heads, kv_heads, q_len, kv_len, dims, dtype, bits, batch=2):
    """query, quantised key and value, and the fp64 numbers of these two."""
    query = torch.randn(batch, heads, q_len, dims[0]).to(dtype)
    held = [quantize_rows(torch.randn(batch, kv_heads, kv_len, dim), bits) for dim in dims]
    return (
        query,
        *held,
        *(dequantize_rows(rows, bits, dim, torch.float64) for rows, dim in zip(held, dims, strict=True)),
    )


def check(heads, kv_heads, q_len, kv_len, dims, dtype, bits, **settings):
    query, k, v, key, value = draw(heads, kv_heads, q_len, kv_len, dims, dtype, bits)
    out, lse = call(query, k, v, bits, dims[1], **settings)
    given = {name: x for name, x in settings.items() if name != "q_offsets"}
    if "q_offsets" in settings:
        given["q_offset"] = settings["q_offsets"]
    want, want_lse = reference.attention(query.double(), key, value, return_lse=True, **given)
    assert out.dtype == dtype
    bound = TOLERANCE[dtype] * max(1, want.abs().max().item())
    assert_close(out.double(), want, atol=bound, rtol=0)
    assert_close(lse.double(), want_lse, atol=10 * bound, rtol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "q_len", "kv_len", "dims"),
    [
        (4, 4, 1, 300, (64, 64)),
        (6, 2, 1, 77, (80, 48)),
        (8, 2, 1, 1025, (128, 128)),
        (9, 1, 1, 40, (64, 33)),
        (4, 2, 3, 700, (32, 96)),
        (4, 4, 130, 150, (64, 64)),  # many rows: the keys are expanded
        (2, 2, 1, 5, (1, 31)),
        (2, 2, 2, 64, (576, 512)),
    ],
)
def test_shapes(heads, kv_heads, q_len, kv_len, dims, bits, dtype):
    check(heads, kv_heads, q_len, kv_len, dims, dtype, bits)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {"causal": True, "q_offset": 200},
        {"causal": True, "q_offsets": torch.tensor([50, 180]), "kv_lens": torch.tensor([53, 183])},
        {"window": (20, 0), "q_offset": 150},
        {"softcap": 5.0},
        {"sinks": torch.randn(4)},
        {"alibi_slopes": torch.rand(4), "q_offset": 10},
        {"mask": torch.rand(2, 1, 3, 203) > 0.3},
        {"mask": torch.randn(2, 4, 3, 203)},
        {"head_map": [0, 0, 0, 1]},
        {"scale": -0.3},
    ],
)
def test_settings(settings, bits):
    check(4, 2, 3, 203, (64, 64), torch.float32, bits, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_excluded_is_not_read(bits, dtype):
    query, k, v, *_ = draw(4, 2, 1, 90, (64, 64), dtype, bits)
    lens = torch.tensor([33, 64])
    want = call(query, k, v, bits, 64, kv_lens=lens)
    for b, n in enumerate(lens):
        k[b, :, n:], v[b, :, n:] = 255, 255  # scales of 255 twice are NaN
    assert dequantize_rows(v, bits, 64)[0, :, 33:].isnan().any()
    for got, expected in zip(call(query, k, v, bits, 64, kv_lens=lens), want, strict=True):
        assert torch.equal(got, expected)
    mask = torch.arange(90) < lens[:, None]
    shuffled = torch.randperm(90)
    masked = call(query, k[:, :, shuffled], v[:, :, shuffled], bits, 64, mask=mask[:, None, None, shuffled])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert_close(masked[0], want[0], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "kv_len", "dims"),
    [
        (3, 3, 700, (64, 64)),
        (9, 1, 333, (80, 48)),
        (8, 2, 129, (200, 136)),
        (4, 4, 63, (33, 129)),
        (6, 2, 256, (7, 40)),
    ],
)
def test_a_query_of_16_bits_loses_little_beside_the_rounding_of_its_output(heads, kv_heads, kv_len, dims, bits):
    """Integers round the query and the weights to 16 bits of their largest number: 3e-5 of it each."""
    query, k, v, key, value = draw(heads, kv_heads, 1, kv_len, dims, torch.float16, bits)
    value[:, :, 0] /= 64  # a first key that has most of the weight, and hardly a value
    v = quantize_rows(value.float(), bits)
    key[:, :, 0] = 6 * query.double().unflatten(1, (kv_heads, -1))[:, :, 0, 0] / dims[0] ** 0.5
    k = quantize_rows(key.float(), bits)
    key, value = (dequantize_rows(x, bits, dim, torch.float64) for x, dim in zip((k, v), dims, strict=True))
    want, want_lse = reference.attention(query.double(), key, value, return_lse=True)
    out, lse = call(query, k, v, bits, dims[1])
    assert_close(out.double(), want, atol=4e-4 * want.abs().max().item(), rtol=2**-11)
    assert_close(lse.double(), want_lse, atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("bits", [8, 4])
def test_not_a_number_stays_one(bits):
    query, k, v, *_ = draw(4, 2, 1, 90, (64, 64), torch.bfloat16, bits)
    v[0, 1, 70] = 255  # scales that are NaN
    out = call(query, k, v, bits, 64)[0]
    assert out[0, 2:].isnan().all() and not out[0, :2].isnan().any() and not out[1].isnan().any()
    query[1, 3, 0, 5] = float("nan")
    out = call(query, k, v, bits, 64)[0]
    assert out[1, 3].isnan().all() and not out[1, :3].isnan().any()


@pytest.mark.parametrize("bits", [8, 4])
def test_strides_and_capacity(bits):
    query, k, v, *_ = draw(6, 3, 2, 70, (64, 64), torch.bfloat16, bits)
    want = call(query, k, v, bits, 64)
    rows = torch.empty(2, 3, 128, k.size(-1), dtype=torch.uint8)
    rows[:, :, :70] = k
    turned = query.transpose(1, 2).contiguous().transpose(1, 2)
    for got, expected in zip(call(turned, rows[:, :, :70], v, bits, 64), want, strict=True):
        assert torch.equal(got, expected)
    spread = v.transpose(2, 3).contiguous().transpose(2, 3)  # rows whose bytes are apart
    assert torch.equal(call(query, k, spread, bits, 64)[0], want[0])


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_of_the_batch_alone_has_the_same_bits(bits):
    query, k, v, *_ = draw(8, 2, 1, 3000, (64, 64), torch.float32, bits)
    both = call(query, k, v, bits, 64)[0]
    assert torch.equal(both[1:], call(query[1:], k[1:], v[1:], bits, 64)[0])


@pytest.mark.parametrize("bits", [8, 4])
def test_gradients_reach_query_mask_and_sinks(bits):
    query, k, v, key, value = draw(4, 2, 2, 20, (32, 32), torch.float64, bits)
    leaves = [query.requires_grad_(), torch.randn(2, 4, 2, 20, dtype=torch.float64, requires_grad=True),
              torch.randn(4, dtype=torch.float64, requires_grad=True)]  # fmt: skip
    out, _ = call(query, k, v, bits, 32, mask=leaves[1], sinks=leaves[2])
    want = reference.attention(query, key, value, mask=leaves[1], sinks=leaves[2])
    grad = torch.randn_like(out)
    for got, expected in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(want, leaves, grad), strict=True
    ):
        assert_close(got, expected, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("bits", [8, 4])
def test_opcheck_and_compile(bits):
    query, k, v, *_ = draw(4, 2, 1, 40, (64, 64), torch.float32, bits)
    place = {"causal": True, "q_offset": 39}
    torch.library.opcheck(torch.ops.attnpack.attention_quantized.default, (query, k, v, bits, 64), place)
    compiled = torch.compile(lambda q: call(q, k, v, bits, 64, causal=True, q_offset=39)[0], fullgraph=True)
    assert_close(compiled(query), call(query, k, v, bits, 64, causal=True, q_offset=39)[0])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"bits": 5}, "bits: got 5"),
        ({"v_head_dim": 65}, "for 65 numbers of 8 bits"),
        ({"key": torch.zeros(2, 2, 40, 64, dtype=torch.uint8)}, r"wants \[..., 68\]"),
        ({"value": torch.zeros(2, 2, 40, 68)}, "wants uint8"),
        ({"query": torch.zeros(4, 1, 64)}, r"each wants \[batch, heads, length, width\]"),
        ({"kv_lens": torch.tensor([41, 3])}, "kv_lens"),
    ],
)
def test_wrong_arguments(change, sentence):
    query, k, v, *_ = draw(4, 2, 1, 40, (64, 64), torch.float32, 8)
    given = {"query": query, "key": k, "value": v, "bits": 8, "v_head_dim": 64} | change
    with pytest.raises(ValueError, match=sentence):
        call(**given)


@pytest.mark.parametrize("bits", [8, 4])
def test_errors_are_those_of_the_rounding(bits):
    """Nothing is lost beside what quantize_rows rounds: both paths give what attention over the numbers gives."""
    query, k, v, key, value = draw(3, 3, 1, 500, (64, 64), torch.float32, bits)
    few = call(query, k, v, bits, 64)[0]
    many = call(query.expand(2, 3, 200, 64), k, v, bits, 64)[0]
    want = attnpack.attention(query, key.float(), value.float())
    assert_close(few, want, atol=2e-6, rtol=2e-6)
    assert_close(many, want.expand(2, 3, 200, 64), atol=2e-6, rtol=2e-6)
