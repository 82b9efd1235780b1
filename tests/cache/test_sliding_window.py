"""SlidingWindowCache: the bits of a full cache under the same window, memory that stays flat, and what it refuses."""

import attnpack
import pytest
import torch
from marks import grid

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ROPES = {
    "none": lambda dim: None,
    "plain": attnpack.RotaryEmbedding,
    "interleaved": lambda dim: attnpack.RotaryEmbedding(dim, interleaved=True),
    "half": lambda dim: attnpack.RotaryEmbedding(dim // 2),
    # Frequencies follow the length, so the cache holds keys unrotated and rotates them at their true positions.
    "dynamic": lambda dim: attnpack.RotaryEmbedding(
        dim, max_positions=64, scaling={"rope_type": "dynamic", "factor": 2.0}
    ),
}


def layer_for(heads, kv_heads, window, *, rope="plain", dim=8, dtype=torch.float32, **settings):
    torch.manual_seed(0)
    layer = attnpack.GroupedQueryAttention(
        24, heads, kv_heads, head_dim=dim, causal=True, window=(window, 0), rope=ROPES[rope](dim), **settings
    )
    return layer.to(dtype).eval()


def steady_positions(window, keep_first=0):
    return keep_first + window + 256 + max(64, window // 16)


@torch.no_grad()
def compare(layer, window, chunks, *, batch=2, ragged=None, dtype=torch.float32, **arguments):
    """Runs the chunks with a full cache and with a ring, and compares all bits of the valid rows."""
    full, ring = attnpack.DynamicCache(), attnpack.SlidingWindowCache(window)
    random = torch.Generator().manual_seed(1)
    for step, length in enumerate(chunks):
        x = torch.randn(batch, length, 24, generator=random).to(dtype)
        lens = None
        if ragged is not None:
            lens = torch.tensor([min(length, ragged[(step + b) % len(ragged)]) for b in range(batch)])
        wanted = layer(x, cache=full, kv_lens=lens, **arguments)
        got = layer(x, cache=ring, kv_lens=lens, **arguments)
        for b in range(batch):
            valid = length if lens is None else int(lens[b])
            assert torch.equal(got[b, :valid], wanted[b, :valid]), (step, b)
    assert torch.equal(ring.lengths, full.lengths) and len(ring) == len(full)
    for b, (length, gone) in enumerate(zip(ring.lengths.tolist(), ring.dropped.tolist(), strict=True)):
        assert torch.equal(ring.k[b, :, : length - gone], full.k[b, :, gone:length])
        assert torch.equal(ring.v[b, :, : length - gone], full.v[b, :, gone:length])
    return ring


LONG = [300, 1, 1, 40, 700, *[1] * 90, 5, 64, *[2] * 40, 900, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (6, 1)])
def test_bits_of_a_full_cache(dtype, heads, kv_heads):
    ring = compare(layer_for(heads, kv_heads, 70, dtype=dtype), 70, LONG, dtype=dtype)
    assert ring.dropped.min() >= 1024


@pytest.mark.parametrize("rope", ROPES)
def test_bits_with_every_rotation(rope):
    assert compare(layer_for(4, 2, 33, rope=rope), 33, LONG).dropped.min() > 0


@pytest.mark.parametrize("seed", range(12))
def test_bits_with_random_windows_and_ragged_appends(seed):
    random = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=random))

    window = [0, 1, 15, 16, 255, 256, 300][draw(0, 7)] if seed % 2 else draw(0, 400)
    chunks = [draw(1, 500) if draw(0, 4) == 0 else draw(1, 9) for _ in range(40)]
    ragged = None if seed % 3 == 0 else [draw(0, 500) for _ in range(7)]
    settings = {"softcap": 20.0} if seed % 4 == 1 else {"sinks": True} if seed % 4 == 2 else {}
    compare(layer_for(4, 2, window, **settings), window, chunks, batch=3, ragged=ragged)


@pytest.mark.parametrize("length", [1, 2, 5, 12])
def test_bits_do_not_depend_on_the_keys_before_the_window(length):
    """Few keys in the window, many before it: kernels choose by what a call sees, not by what the full cache holds."""
    compare(layer_for(16, 1, 10, dim=4), 10, [2000, *[length] * 30], batch=1)
    compare(layer_for(16, 16, 600, dim=4), 600, [9000, *[length] * 20], batch=1)


@pytest.mark.parametrize("keep_first", [0, 4])
@torch.no_grad()
def test_chunks_are_those_of_the_whole_sequence(keep_first):
    """Positions are dropped in multiples of 256, chunks have 50."""
    layer, plain = layer_for(4, 2, 70, chunk=50), layer_for(4, 2, 10**6)
    plain.load_state_dict(layer.state_dict())
    ring, full = attnpack.SlidingWindowCache(70, keep_first=keep_first), attnpack.DynamicCache()
    random, at = torch.Generator().manual_seed(1), 0
    for length in [300, 1, 1, 40, 500, *[1] * 30]:
        x = torch.randn(2, length, 24, generator=random)
        row, column = torch.arange(at, at + length).unsqueeze(1), torch.arange(at + length)
        near = (row - column <= 70) | (column < keep_first)
        wanted = plain(x, cache=full, mask=near & (row // 50 == column // 50))
        torch.testing.assert_close(layer(x, cache=ring), wanted)
        torch.testing.assert_close(layer(x[:, -1:], cache=ring.clone(), need_weights=True)[0],
                                   layer(x[:, -1:], cache=ring.clone()))  # fmt: skip
        at += length
    assert ring.dropped.min() > 0


@torch.no_grad()
def test_a_module_with_a_narrower_window():
    layer, random = layer_for(4, 2, 20), torch.Generator().manual_seed(1)
    full, ring = attnpack.DynamicCache(), attnpack.SlidingWindowCache((90, 0))
    for length in LONG:
        x = torch.randn(2, length, 24, generator=random)
        assert torch.equal(layer(x, cache=ring), layer(x, cache=full))


@torch.no_grad()
def test_rows_that_differ_much_in_length():
    """Each row drops by itself; the memory is that of one window."""
    layer, cache, full = layer_for(4, 2, 50), attnpack.SlidingWindowCache(50), attnpack.DynamicCache()
    for step in range(60):
        x, lens = torch.randn(3, 60, 24), torch.tensor([60, 1, 20 * (step % 2)])
        out, wanted = layer(x, cache=cache, kv_lens=lens), layer(x, cache=full, kv_lens=lens)
        for b in range(3):
            assert torch.equal(out[b, : lens[b]], wanted[b, : lens[b]])
        assert cache.nbytes_allocated <= 3 * 2 * 16 * 4 * steady_positions(50)
    assert cache.lengths.tolist() == [3600, 60, 600]
    assert cache.dropped[0] >= 3000 and cache.dropped[1] == 0 and cache.dropped[2] >= 256


@torch.no_grad()
def test_memory_is_flat_over_100_000_positions():
    layer, cache = layer_for(2, 1, 100, dim=4), attnpack.SlidingWindowCache(100)
    position = (4 + 4) * 4
    seen = set()
    for length in [1000] * 98 + [1] * 2000:
        layer(torch.randn(1, length, 24), cache=cache)
        seen.add(cache.nbytes_allocated)
        assert cache.nbytes <= cache.nbytes_allocated
    assert len(cache) == 100_000
    assert seen == {position * steady_positions(100)}
    assert cache._tensors[1].untyped_storage().nbytes() == position // 2 * steady_positions(100)


@torch.no_grad()
def test_short_sequences_take_little_memory():
    layer, cache = layer_for(2, 1, 4000, dim=4), attnpack.SlidingWindowCache(4000)
    for _ in range(5):
        layer(torch.randn(1, 1, 24), cache=cache)
    assert cache.nbytes_allocated == 8 * 32 and cache.nbytes == 5 * 32


@grid(3, keep_first=[1, 4, 300], settings=[{}, {"softcap": 20.0}, {"sinks": True}, {"alibi": True}])
@torch.no_grad()
def test_first_positions_stay_and_are_seen(keep_first, settings):
    """Equals a full cache under the mask "in the window, or one of the first"."""
    window, rope = 40, "none" if "alibi" in settings else "dynamic" if "softcap" in settings else "plain"
    layer = layer_for(4, 2, window, rope=rope, dtype=torch.float64, **settings)
    if layer.sinks is not None:
        layer.sinks.copy_(torch.randn(4))
    open_layer = layer_for(4, 2, window, rope=rope, dtype=torch.float64, **settings)
    open_layer.load_state_dict(layer.state_dict())
    open_layer.window = None
    full, ring = attnpack.DynamicCache(), attnpack.SlidingWindowCache(window, keep_first=keep_first)
    past, lens = torch.zeros(2, dtype=torch.int64), torch.tensor([1.0, 0.6])
    for length in [2, 1, 60, 400, 1, 1, 33, 500, 1, 1]:
        x = torch.randn(2, length, 24, dtype=torch.float64)
        valid = (lens * length).ceil().long()
        position = past[:, None] + torch.arange(length)  # [B, L]
        column = torch.arange(len(full) + length)
        seen = (column >= position[..., None] - window) | (column < keep_first)
        arguments = {"kv_lens": valid, "need_weights": True}
        wanted, all_weights = open_layer(x, cache=full, mask=seen[:, None], **arguments)
        got, weights = layer(x, cache=ring, **arguments)
        past += valid
        plain = layer(x, cache=ring.clone())
        assert plain.shape == got.shape
        for b in range(2):
            torch.testing.assert_close(got[b, : valid[b]], wanted[b, : valid[b]], rtol=1e-9, atol=1e-9)
            at = torch.arange(int(past[b] - ring.dropped[b]))
            at = torch.where(at < keep_first, at, at + ring.dropped[b])
            stored = weights[b, :, : valid[b]]
            if stored.size(-1) >= len(at):  # dropped after this call otherwise
                assert stored.size(-1) >= 1
            assert torch.allclose(weights[b, :, : valid[b]].sum(-1), all_weights[b, :, : valid[b]].sum(-1))
    for b, gone in enumerate(ring.dropped.tolist()):
        stored = int(past[b]) - gone
        assert gone > 0 and torch.equal(ring.k[b, :, :keep_first], full.k[b, :, :keep_first])
        rest = full.k[b, :, keep_first + gone : past[b]]
        assert torch.equal(ring.k[b, :, keep_first:stored], rest)


@pytest.mark.parametrize("keep_first", [0, 3])
@torch.no_grad()
def test_a_mask_covers_all_positions(keep_first):
    """Also those that were dropped, so that one mask serves the layers of a model with windows in some of them."""
    window, layer = 30, layer_for(4, 2, 30)
    full, ring = attnpack.DynamicCache(), attnpack.SlidingWindowCache(window, keep_first=keep_first)
    layer.window = None if keep_first else layer.window
    ringed = layer_for(4, 2, 30)
    for step, length in enumerate([50, 1, 600, 1, 300, 1]):
        x, total = torch.randn(2, length, 24), len(full) + length
        mask = torch.rand(2, 1, 1, total) > 0.4 if step % 2 else torch.randn(2, 4, length, total)
        seen = torch.ones(length, total, dtype=torch.bool)
        if keep_first:
            position, column = len(full) + torch.arange(length), torch.arange(total)
            seen = (column >= position[:, None] - window) | (column < keep_first)
        both = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)
        wanted = layer(x, cache=full, mask=both)
        got = ringed(x, cache=ring, mask=mask)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        with pytest.raises(ValueError, match="mask covers"):
            ringed(x, cache=ring, mask=torch.ones(1, 1, 1, total, dtype=torch.bool))
        assert len(ring) == total
    with pytest.raises(ValueError, match="mask"):
        ringed(x, cache=ring, mask=torch.ones(3, 1, 1, len(ring) + 1, dtype=torch.bool))


@pytest.mark.parametrize("keep_first", [0, 3])
def test_gradients_are_those_of_a_full_cache(keep_first):
    window, layer, opened = 30, layer_for(4, 2, 30, dtype=torch.float64), layer_for(4, 2, 30, dtype=torch.float64)
    opened.window = None
    full, ring = attnpack.DynamicCache(), attnpack.SlidingWindowCache(window, keep_first=keep_first)
    for length in [400, 3, 200, 5]:
        x = torch.randn(2, length, 24, dtype=torch.float64, requires_grad=True)
        position, column = len(full) + torch.arange(length), torch.arange(len(full) + length)
        seen = (column >= position[:, None] - window) | (column < keep_first)
        wanted = torch.autograd.grad(opened(x, cache=full, mask=seen).sin().sum(), [x, *opened.parameters()])
        got = torch.autograd.grad(layer(x, cache=ring).sin().sum(), [x, *layer.parameters()])
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)
    assert ring.dropped.min() > 0 and not ring.k.requires_grad


@torch.no_grad()
def test_given_positions_and_weights():
    layer = layer_for(4, 2, 30)
    full, ring = attnpack.DynamicCache(), attnpack.SlidingWindowCache(30)
    for length in [300, 1, 300, 2]:
        x, positions = torch.randn(2, length, 24), torch.randint(0, 999, (2, length))
        wanted, all_weights = layer(x, cache=full, positions=positions, need_weights=True)
        got, weights = layer(x, cache=ring, positions=positions, need_weights=True)
        assert torch.equal(got, wanted)
        stored = weights.size(-1)
        assert torch.equal(weights, all_weights[..., -stored:])
        assert not all_weights[..., :-stored].any()


REFUSED = {
    "no window": {"window": None},
    "a wider window": {"window": (41, 0)},
    "an open window": {"window": (-1, 0)},
    "later keys": {"window": (40, 1)},
    "not causal": {"causal": False, "window": (40, 0)},
}


@pytest.mark.parametrize("package", [attnpack, attnpack.cpp], ids=["python", "cpp"])
@pytest.mark.parametrize("name", REFUSED)
@torch.no_grad()
def test_a_module_that_sees_more_is_refused(package, name):
    settings = {"causal": True, **REFUSED[name]}
    layer, fits = (
        package.GroupedQueryAttention(24, 4, 2, **s) for s in (settings, {"causal": True, "window": (40, 0)})
    )
    cache = package.SlidingWindowCache(40)
    fits.forward(torch.randn(2, 300, 24), cache=cache)
    before = [cache.k.clone(), cache.v.clone(), cache.lengths.clone(), cache.dropped.clone(), cache.nbytes_allocated]
    with pytest.raises(ValueError, match=r"cache: got a SlidingWindowCache of window \(40, 0\) for attention with"):
        layer.forward(torch.randn(2, 300, 24), cache=cache)
    for got, wanted in zip((cache.k, cache.v, cache.lengths, cache.dropped), before, strict=False):
        assert torch.equal(got, wanted)
    assert cache.nbytes_allocated == before[-1]
    with pytest.raises(ValueError, match=r"cache: got a SlidingWindowCache"):
        layer.forward(torch.randn(2, 3, 24), cache=package.SlidingWindowCache(40))


@pytest.mark.parametrize("package", [attnpack, attnpack.cpp], ids=["python", "cpp"])
def test_latent_attention_is_refused(package):
    sizes = {"kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 0, "v_head_dim": 4}
    layer = package.MultiHeadLatentAttention(24, 2, causal=True, **sizes)
    with pytest.raises(ValueError, match="latent attention sees all positions"):
        layer.forward(torch.randn(2, 3, 24), cache=package.SlidingWindowCache(4))


@pytest.mark.parametrize("package", [attnpack, attnpack.cpp], ids=["python", "cpp"])
def test_wrong_windows_are_named(package):
    for window in (-1, (-1, 0), (4, 1), (4, -1), 2**60):
        with pytest.raises(ValueError, match=r"window: got \(.*\), want \(left, 0\)"):
            package.SlidingWindowCache(window)
    with pytest.raises(ValueError, match="keep_first: got -1"):
        package.SlidingWindowCache(4, keep_first=-1)
    for window in (None, "4", (4,), 4.0, True):
        with pytest.raises(TypeError, match="window is .*, wants how many positions before its own"):
            package.SlidingWindowCache(window)
    cache = package.SlidingWindowCache((4, 0), keep_first=2)
    assert cache.window == (4, 0) and cache.keep_first == 2 and len(cache) == 0 and cache
    assert cache.k is None and cache.nbytes == 0 and cache.nbytes_allocated == 0 and cache.dropped.numel() == 0
    assert repr(cache) == "SlidingWindowCache(len=0)"


@torch.no_grad()
def test_crop_goes_back_to_what_is_stored():
    layer, cache, full = layer_for(4, 2, 50), attnpack.SlidingWindowCache(50), attnpack.DynamicCache()
    for length in [700, 64]:
        x = torch.randn(2, length, 24)
        layer(x, cache=cache), layer(x, cache=full)
    cache.crop(700), full.crop(700)  # the last append can always be taken back
    x = torch.randn(2, 9, 24)
    assert torch.equal(layer(x, cache=cache), layer(x, cache=full))
    gone = cache.dropped[0].item()
    cache.crop(10_000)
    assert len(cache) == 709
    before = cache.lengths.clone()
    for n in (gone + 49, gone - 1, 1):
        with pytest.raises(ValueError, match=rf"n: got {n}, but sequence 0 of length 709 has dropped .* to {gone - 1}"):
            cache.crop(n)
        assert torch.equal(cache.lengths, before)
    cache.crop(gone + 50), full.crop(gone + 50)
    assert torch.equal(layer(x, cache=cache), layer(x, cache=full))
    cache.crop(0)
    assert len(cache) == 0 and cache.k is None and cache.nbytes_allocated == 0


@torch.no_grad()
def test_crop_to_kept_first_positions():
    layer, cache = layer_for(4, 2, 50), attnpack.SlidingWindowCache(50, keep_first=4)
    fresh = attnpack.SlidingWindowCache(50, keep_first=4)
    first = torch.randn(1, 3, 24)
    for x in (first, torch.randn(1, 700, 24)):
        layer(x, cache=cache)
    layer(first, cache=fresh)
    with pytest.raises(ValueError, match="n: got 5"):
        cache.crop(5)
    cache.crop(3)
    assert cache.dropped.tolist() == [0]
    x = torch.randn(1, 400, 24)
    torch.testing.assert_close(layer(x, cache=cache), layer(x, cache=fresh), rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_a_model_crops_all_layers_or_none():
    layer = layer_for(4, 2, 50)
    cache = attnpack.ModelCache([attnpack.DynamicCache(), attnpack.SlidingWindowCache(50)])
    for held in cache:
        layer(torch.randn(1, 700, 24), cache=held)
    with pytest.raises(ValueError, match="n: got 60"):
        cache.crop(60)
    assert [len(held) for held in cache] == [700, 700] and cache[0].k.size(2) == 700
    cache.crop(690)
    assert [len(held) for held in cache] == [690, 690]


@torch.no_grad()
def test_a_failed_append_is_undone_also_after_a_slide():
    layer, cache = layer_for(4, 2, 50), attnpack.SlidingWindowCache(50)
    layer(torch.randn(2, 300, 24), cache=cache)
    layer(torch.randn(2, 10, 24), cache=cache)
    for wrong in (torch.tensor([5, 501]), torch.tensor([-1, 0])):
        before, memory = cache.clone(), cache.nbytes_allocated
        with pytest.raises(ValueError, match="kv_lens"):
            layer(torch.randn(2, 500, 24), cache=cache, kv_lens=wrong)
        assert cache.nbytes_allocated == memory
        for name in ("k", "v", "lengths", "dropped"):
            assert torch.equal(getattr(cache, name), getattr(before, name))
    broken = layer.o_proj.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # after the commit
        layer(torch.randn(2, 500, 24), cache=cache)
    broken.remove()
    assert torch.equal(cache.k, before.k) and torch.equal(cache.dropped, before.dropped)
    x = torch.randn(2, 3, 24)
    assert torch.equal(layer(x, cache=cache), layer(x, cache=before))


@torch.no_grad()
def test_a_model_with_windows_in_some_layers():
    torch.manual_seed(0)
    blocks = [
        attnpack.DecoderBlock(
            attnpack.GroupedQueryAttention(24, 4, 2, window=window, rope=attnpack.RotaryEmbedding(6)),
            attnpack.FeedForward(24, 32),
        )
        for window in ((40, 0), None, (40, 0))
    ]
    model = attnpack.Decoder(blocks).eval()

    def ring():
        return attnpack.SlidingWindowCache(40)

    mixed, full = attnpack.ModelCache([ring(), attnpack.DynamicCache(), ring()]), attnpack.ModelCache(3)
    for length in [500, 1, 1, 300, 1]:
        x = torch.randn(2, length, 24)
        assert torch.equal(model(x, cache=mixed), model(x, cache=full))
    assert mixed.nbytes_allocated < 0.75 * full.nbytes_allocated and mixed.nbytes < full.nbytes
    assert mixed[0].nbytes_allocated == 2 * 2 * 12 * 4 * steady_positions(40)
    copied = mixed.clone()
    mixed.reorder([1, 1]), full.reorder([1, 1])
    x = torch.randn(2, 2, 24)
    assert torch.equal(model(x, cache=mixed), model(x, cache=full))
    assert copied[0].lengths.tolist() == [803, 803]


@pytest.mark.parametrize("window", [(20, 0), None])
@torch.no_grad()
def test_generate_with_sliding_caches(window):
    torch.manual_seed(0)
    model = attnpack.CausalLM(64, 24, 2, 4, 2, hidden_dim=32, window=window).eval()
    ids, lengths = torch.randint(64, (2, 300)), torch.tensor([300, 120])
    for arguments in ({}, {"lengths": lengths}):
        wanted = model.generate(ids, max_new_tokens=90, **arguments)
        assert torch.equal(model.generate(ids, max_new_tokens=90, cache="sliding", **arguments), wanted)
        if window:
            own = attnpack.ModelCache([attnpack.SlidingWindowCache(20), attnpack.SlidingWindowCache(25)])
            assert torch.equal(model.generate(ids, max_new_tokens=90, cache=own, **arguments), wanted)
            assert len(own) == 389 and own.nbytes_allocated < 2 * 2 * 2 * 12 * 4 * 360
