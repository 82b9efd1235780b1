"""QuantizedCache: which keys are exact, against attention in fp64 over the numbers that each query should see; what is
stored, in bytes and bits; and what it refuses."""

import attnpack
import pytest
import torch
from attnpack import ops, reference
from attnpack.ops import dequantize_rows, quantize_rows
from marks import long
from torch.testing import assert_close

CHUNKS = [7, 1, 1, 30, 1, 9]
EXACT = [(0, 0), (4, 0), (0, 1), (0, 6), (3, 6), (3, 100), (100, 2)]


def rounded(x, bits):
    """The cache's numbers for these rows."""
    return dequantize_rows(quantize_rows(x, bits), bits, x.size(-1), x.dtype)


def draw(heads, kv_heads, length, dims=(16, 24), batch=2, dtype=torch.float32):
    return [torch.randn(batch, *s, dtype=dtype) for s in ((heads, length, dims[0]), (kv_heads, length, dims[0]),
                                                          (kv_heads, length, dims[1]))]  # fmt: skip


def expected(query, key, value, bits, first, last, begin, **settings):
    """Attention of the queries that stand at begin and after it; each sees some keys as they were."""
    rows = []
    held = [rounded(x, bits) for x in (key, value)]
    mask = settings.pop("mask", None)
    for n in range(query.size(2)):
        place = begin + n
        j = torch.arange(key.size(2))
        exact = ((j < first) | ((place - j < last) & (j <= place))).view(1, 1, -1, 1)
        seen = [torch.where(exact, x, r)[:, :, : place + 1] for x, r in zip((key, value), held, strict=True)]
        own = None if mask is None else mask[..., n : n + 1 if mask.size(-2) > 1 else None, : place + 1]
        q = query[:, :, n : n + 1]
        rows.append(
            reference.attention(q.double(), *(x.double() for x in seen), own, q_offset=place, causal=True, **settings)
        )
    return torch.cat(rows, 2).transpose(1, 2).flatten(2)


def append(cache, key, value, query, kv_lens=None, **settings):
    with cache.rollback_on_error():
        result = ops.attend(query, key, value, cache=cache.reserve(key, value), kv_lens=kv_lens, **settings)
        cache.commit(key.size(2), kv_lens)
    return result


def run(cache, query, key, value, chunks, **settings):
    outs, at = [], 0
    for length in chunks:
        part = [x[:, :, at : at + length] for x in (key, value, query)]
        given = dict(settings)
        if "mask" in given:
            given["mask"] = given["mask"][..., at : at + length, : at + length]
        outs.append(append(cache, *part, causal=True, **given))
        at += length
    return torch.cat(outs, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("first", "last"), EXACT)
@torch.no_grad()
def test_each_query_sees_the_right_numbers(first, last, bits, dtype):
    torch.manual_seed(0)
    q, k, v = draw(6, 2, sum(CHUNKS), dtype=dtype)
    cache = attnpack.QuantizedCache(bits, exact_first=first, exact_last=last)
    got = run(cache, q, k, v, CHUNKS)
    wanted = expected(q, k, v, bits, first, last, 0)
    assert_close(got.double(), wanted, atol=3e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0)


@pytest.mark.parametrize(("first", "last"), [(0, 0), (2, 0), (0, 5), (3, 6)])
@pytest.mark.parametrize(
    "settings",
    [
        {"window": (4, 0)},
        {"window": (11, 0)},
        {"chunk": 7},
        {
            "chunk": 20,
            "window": (9, 0),
            "mask": torch.rand(2, 1, 49, 49, generator=torch.Generator().manual_seed(1)) > 0.2,
        },
        {"softcap": 3.0},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"alibi_slopes": torch.tensor([0.1, 0.5, 0.02, 0.3])},
        {"alibi_slopes": torch.tensor([0.1, 0.5, 0.02, 0.3]), "window": (9, 0), "softcap": 4.0},
        {"head_map": [0, 0, 0, 1]},
        {"mask": torch.rand(2, 1, 49, 49, generator=torch.Generator().manual_seed(1)) > 0.2},
        {"mask": torch.randn(1, 4, 49, 49, generator=torch.Generator().manual_seed(1))},
        {"scale": 0.7},
    ],
    ids=str,
)
@torch.no_grad()
def test_settings(settings, first, last):
    torch.manual_seed(0)
    q, k, v = draw(4, 2, sum(CHUNKS))
    if settings.get("mask") is not None and settings["mask"].dtype == torch.bool:
        settings["mask"].diagonal(dim1=-2, dim2=-1).fill_(True)
    cache = attnpack.QuantizedCache(8, exact_first=first, exact_last=last)
    got = run(cache, q, k, v, CHUNKS, **settings)
    assert_close(got.double(), expected(q, k, v, 8, first, last, 0, **settings), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("first", "last"), [(0, 0), (2, 0), (0, 5), (3, 6)])
@torch.no_grad()
def test_ragged_appends_and_weights(first, last):
    torch.manual_seed(0)
    cache, held = attnpack.QuantizedCache(8, exact_first=first, exact_last=last), [[], []]
    for length, lens in [(9, [9, 4]), (1, [0, 1]), (600, [600, 3]), (5, [1, 5])]:
        q, k, v = draw(4, 2, length)
        out, weights = append(cache, k, v, q, torch.tensor(lens), causal=True, need_weights=True)
        for b, n in enumerate(lens):
            begin = sum(x[0].size(1) for x in held[b])
            held[b].append((k[b, :, :n], v[b, :, :n]))
            if n == 0:
                continue
            whole = [torch.cat([x[i] for x in held[b]], 1).unsqueeze(0) for i in (0, 1)]
            wanted = expected(q[b : b + 1, :, :n], *whole, 8, first, last, begin)
            assert_close(out[b : b + 1, :n].double(), wanted, atol=1e-5, rtol=0)
            seen = weights[b, :, n - 1]  # the weights of the last valid query
            assert_close(seen.sum(-1), torch.ones(4))
            assert seen[:, begin + n :].eq(0).all() and seen[:, begin + n - 1].gt(0).all()
    assert cache.lengths.tolist() == [610, 13]


@torch.no_grad()
def test_a_position_is_quantised_once():
    torch.manual_seed(0)
    for bits in (8, 4):
        cache, plain = attnpack.QuantizedCache(bits), attnpack.DynamicCache()
        for length in [5, *[1] * 40, 300, *[1] * 20]:
            q, k, v = draw(2, 2, length, dims=(64, 40), dtype=torch.bfloat16)
            append(cache, k, v, q)
            append(plain, k, v, q)
        for change in (lambda c: c.reorder([1, 0, 1]), lambda c: c.crop(333), lambda c: c.crop(90)):
            change(cache)
            change(plain)
            cache = cache.clone()
            assert torch.equal(cache.k, rounded(plain.k, bits)) and torch.equal(cache.v, rounded(plain.v, bits))


@torch.no_grad()
def test_bytes():
    for bits, rate in ((8, 8.5), (4, 4.5)):
        cache = attnpack.QuantizedCache(bits)
        q, k, v = draw(2, 2, 100, dims=(64, 128), dtype=torch.bfloat16)
        append(cache, k, v, q)
        assert cache.nbytes == (k.numel() + v.numel()) * rate / 8
        assert cache.nbytes <= cache.nbytes_allocated < 2 * cache.nbytes + 1
    exact = attnpack.QuantizedCache(8, exact_last=16)
    for _ in range(30):
        append(exact, *(x[:, :, :64] for x in (k, v, q)), causal=True)
    rows = 2 * 2 * 30 * 64 * (64 + 128) * 8.5 / 8
    assert rows < exact.nbytes <= rows + 2 * 2 * (64 + 128) * 2 * (16 + 256 + 64)


@pytest.mark.parametrize(("first", "last"), [(0, 0), (3, 6)])
@torch.no_grad()
def test_crop_with_exact_positions(first, last):
    """More or fewer positions may be exact after it, but each number is the exact or the rounded one."""
    torch.manual_seed(0)
    q, k, v = draw(2, 2, 900)
    cache = attnpack.QuantizedCache(8, exact_first=first, exact_last=last)
    append(cache, k, v, q, causal=True)
    cache.crop(500)
    assert len(cache) == 500
    assert ((cache.k == k[:, :, :500]) | (cache.k == rounded(k, 8)[:, :, :500])).all()
    assert torch.equal(cache.k[:, :, :first], k[:, :, :first])
    got = append(cache, *(x[:, :, 500:501] for x in (k, v, q)), causal=True)
    assert_close(got, expected(q[:, :, 500:501], k[:, :, :501], v[:, :, :501], 8, first, last, 500).float(), atol=1e-2,
                 rtol=0)  # fmt: skip


@pytest.mark.parametrize(("first", "last"), [(0, 0), (3, 6)])
def test_gradients_flow_as_if_new_rows_were_exact(first, last):
    torch.manual_seed(0)
    q, k, v = (x.double().requires_grad_() for x in draw(4, 2, 12))
    q2, k2, v2 = (x.double().requires_grad_() for x in draw(4, 2, 12))
    cache = attnpack.QuantizedCache(8, exact_first=first, exact_last=last)
    past = [x[:, :, :5] for x in (k, v, q)]
    append(cache, *(x.detach() for x in past), causal=True)
    out = append(cache, k[:, :, 5:], v[:, :, 5:], q[:, :, 5:], causal=True)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    with torch.no_grad():
        for a, b in ((q2, q), (k2, k), (v2, v)):
            a.copy_(b)

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return rounded(x, 8)

        @staticmethod
        def backward(ctx, grad):
            return grad

    whole, kept = [[torch.cat([x[:, :, :5].detach(), x[:, :, 5:]], 2) for x in (k2, v2)] for _ in (0, 1)]
    rows = []
    for n in range(7):
        place, j = 5 + n, torch.arange(12)
        exact = ((j < first) | ((place - j < last) & (j <= place))).view(1, 1, -1, 1)
        seen = [torch.where(exact, x, Rounded.apply(y))[:, :, : place + 1] for x, y in zip(whole, kept, strict=True)]
        rows.append(reference.attention(q2[:, :, place : place + 1], *seen))
    (torch.cat(rows, 2).transpose(1, 2).flatten(2) * weight).sum().backward()
    for ours, theirs in ((q, q2), (k, k2), (v, v2)):
        assert_close(ours.grad, theirs.grad, atol=1e-9, rtol=1e-7)
    assert k.grad[:, :, :5].eq(0).all()


@torch.no_grad()
def test_modules_and_both_languages():
    torch.manual_seed(0)
    layer = attnpack.GroupedQueryAttention(64, 4, 2, causal=True, rope=attnpack.RotaryEmbedding(16), window=(40, 0))
    native = attnpack.cpp.QuantizedCache(8, exact_first=2, exact_last=4)
    cache, full = attnpack.QuantizedCache(8, exact_first=2, exact_last=4), attnpack.DynamicCache()
    twin = layer.cpp()
    for length in (30, 1, 1, 70, 1):
        x = torch.randn(2, length, 64)
        got = layer(x, cache=cache)
        assert_close(got, layer(x, cache=full), atol=2e-3, rtol=0)
        assert torch.equal(twin.forward(x, cache=native), got)
    assert (native.bits, native.exact_first, native.exact_last) == (8, 2, 4)


@pytest.mark.parametrize("settings", [{"bits": 4, "exact_first": 2, "exact_last": 3}, long({"bits": 8})], ids=str)
@torch.no_grad()
def test_compiled(settings):
    torch.manual_seed(0)
    layer = attnpack.GroupedQueryAttention(64, 4, 2, causal=True, rope=attnpack.RotaryEmbedding(16)).eval()
    compiled = torch.compile(layer, backend="aot_eager")
    ours, eager = attnpack.QuantizedCache(**settings), attnpack.QuantizedCache(**settings)
    for length in (12, 1, 1, 5):
        x = torch.randn(2, length, 64)
        assert_close(compiled(x, cache=ours), layer(x, cache=eager), atol=1e-5, rtol=0)
    assert torch.equal(ours.lengths, eager.lengths)
    assert_close(ours.k, eager.k, atol=0.5, rtol=0)  # a sum in another order may round to the next integer


@torch.no_grad()
def test_generate():
    torch.manual_seed(0)
    model = attnpack.CausalLM(101, 64, 2, 4, num_kv_heads=2).eval()
    ids = torch.randint(0, 101, (2, 9))
    for name, settings in (("int8", {"bits": 8}), ("int4", {"bits": 4, "exact_first": 4, "exact_last": 128})):
        caches = attnpack.ModelCache([attnpack.QuantizedCache(**settings) for _ in range(2)])
        assert torch.equal(
            model.generate(ids, max_new_tokens=12, cache=name), model.generate(ids, max_new_tokens=12, cache=caches)
        )
        assert len(caches) == 20
        assert caches.nbytes == sum(layer.nbytes for layer in caches)


@pytest.mark.parametrize("cpp", [False, True], ids=["python", "cpp"])
@pytest.mark.parametrize(("first", "last"), [(0, 0), (2, 0), (2, 3)])
@torch.no_grad()
def test_a_first_append_of_no_tokens(first, last, cpp):
    layer = attnpack.GroupedQueryAttention(32, 4, 2, causal=True, sinks=True)
    package = attnpack.cpp if cpp else attnpack
    cache = package.QuantizedCache(8, exact_first=first, exact_last=last)
    module = layer.cpp() if cpp else layer
    assert module(torch.zeros(2, 0, 32), cache=cache).shape == (2, 0, 32) and len(cache) == 0
    x = torch.randn(2, 4, 32)
    fresh = package.QuantizedCache(8, exact_first=first, exact_last=last)
    assert torch.equal(module(x, cache=cache), module(x, cache=fresh))


@torch.no_grad()
def test_refused():
    q, k, v = draw(4, 2, 3)
    for bits in (0, 16, -8):
        with pytest.raises(ValueError, match=f"bits: got {bits}, want 8 or 4"):
            attnpack.QuantizedCache(bits)
    with pytest.raises(ValueError, match="exact_last: got -1"):
        attnpack.QuantizedCache(8, exact_last=-1)
    cache = attnpack.QuantizedCache(8, exact_first=1)
    with pytest.raises(ValueError, match="want causal attention"):
        append(cache, k, v, q)
    assert len(cache) == 0
    append(cache, k, v, q, causal=True)
    before = cache.k.clone()
    for change, sentence in [
        (lambda: append(cache, k[..., :8], v, q[..., :8], causal=True), "cache: got keys of shape"),
        (lambda: append(cache, k.double(), v.double(), q.double(), causal=True), "cache: got keys in Double"),
        (lambda: append(cache, k, v, q, torch.tensor([1, 9]), causal=True), "kv_lens"),
        (lambda: append(cache, k, v, q, causal=True, head_map=[0, 0, 0, 2]), "head_map"),
        (lambda: cache.reserve_latents(k[:, :1], 8), "or a LatentCache"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            change()
        assert torch.equal(cache.k, before) and cache.lengths.tolist() == [3, 3]
    rope = attnpack.RotaryEmbedding(16, max_positions=8, scaling={"rope_type": "dynamic", "factor": 2.0})
    layer = attnpack.GroupedQueryAttention(64, 4, 2, causal=True, rope=rope)
    with pytest.raises(ValueError, match="RoPE that rotates all stored keys"):
        layer(torch.randn(2, 3, 64), cache=attnpack.QuantizedCache(8))
