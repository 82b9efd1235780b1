"""LatentCache: against tensors that are appended to by hand, in both languages; bytes; the state that failed calls
leave."""

import copy
import pickle

import attnpack
import pytest
import torch
from torch.testing import assert_close

RANK, ROPE = 5, 3


def append(cache, latents, new_lens=None):
    """Does to a cache what a module does, without attention."""
    keys, lengths = cache.reserve_latents(latents, RANK)
    attnpack.ops.latent_attend(
        latents.new_zeros(*latents.shape[:3], RANK + ROPE),
        latents[:, 0, :, :RANK],
        latents[:, 0, :, RANK:],
        None,
        RANK,
        "auto",
        cache=(keys, lengths),
        kv_lens=new_lens,
    )
    cache.commit(latents.size(2), new_lens)


def filled(length=4, batch=2):
    cache, latents = attnpack.LatentCache(), torch.randn(batch, 1, length, RANK + ROPE)
    append(cache, latents)
    return cache, latents


def test_grows_and_gives_views_of_one_buffer():
    cache, kept = attnpack.LatentCache(), []
    assert len(cache) == 0 and cache.nbytes == 0 and cache and cache.kv_lora_rank == 0
    assert cache.k is None and cache.v is None and cache.c is None and cache.k_rope is None
    for length in (3, 1, 7, 2):
        kept.append(torch.randn(2, 1, length, RANK + ROPE))
        append(cache, kept[-1])
        held = torch.cat(kept, 2)
        assert len(cache) == held.size(2) and cache.lengths.tolist() == [len(cache)] * 2
        assert torch.equal(cache.k, held)
        assert torch.equal(cache.v, held[..., :RANK]) and torch.equal(cache.c, cache.v)
        assert torch.equal(cache.k_rope, held[..., RANK:])
        assert cache.v.data_ptr() == cache.k.data_ptr() and cache.v.stride() == cache.k.stride()
        assert cache.nbytes == 2 * len(cache) * (RANK + ROPE) * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bytes_of_deepseek(dtype):
    """576 numbers per token in DeepSeek-V3's shape."""
    rope = attnpack.RotaryEmbedding(64, interleaved=True)
    sizes = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    module = attnpack.MultiHeadLatentAttention(32, 2, **sizes, rope=rope, causal=True, dtype=dtype)
    for caches in ((attnpack, module), (attnpack.cpp, module.cpp().forward)):
        cache = caches[0].LatentCache()
        with torch.no_grad():
            for length in (10, 1, 6):
                caches[1](torch.randn(3, length, 32, dtype=dtype), cache=cache)
        assert cache.nbytes == 3 * 17 * 576 * dtype.itemsize
        assert cache.k.shape == (3, 1, 17, 576) and cache.v.shape == (3, 1, 17, 512)


@pytest.mark.parametrize("how", ["clone", "deepcopy", "pickle"])
def test_copies_are_deep(how):
    cache, latents = filled()
    other = {
        "clone": lambda: cache.clone(),
        "deepcopy": lambda: copy.deepcopy(cache),
        "pickle": lambda: pickle.loads(pickle.dumps(cache)),
    }[how]()
    append(cache, torch.randn(2, 1, 2, RANK + ROPE))
    cache.k.zero_()
    assert type(other) is attnpack.LatentCache and len(other) == 4 and other.kv_lora_rank == RANK
    assert torch.equal(other.k, latents) and torch.equal(other.c, latents[..., :RANK])


def test_crop_reorder_reset_and_ragged_appends():
    cache, latents = filled(5)
    cache.crop(3)
    assert torch.equal(cache.k, latents[:, :, :3]) and cache.v.shape == (2, 1, 3, RANK)
    append(cache, latents[:, :, 3:], torch.tensor([2, 1]))
    assert cache.lengths.tolist() == [5, 4] and torch.equal(cache.k[0], latents[0]) and len(cache) == 5
    cache.reorder([1, 0, 0])
    assert cache.lengths.tolist() == [4, 5, 5] and torch.equal(cache.c[1], latents[0, ..., :RANK])
    cache.reset()
    assert len(cache) == 0 and cache.k is None and cache.kv_lora_rank == 0
    append(cache, torch.randn(1, 1, 2, RANK + ROPE, dtype=torch.float64))  # another shape and dtype
    assert cache.nbytes == 2 * (RANK + ROPE) * 8


def test_a_ragged_append_is_as_long_as_its_longest_row():
    sizes = {"kv_lora_rank": RANK, "qk_nope_head_dim": 4, "qk_rope_head_dim": ROPE, "v_head_dim": 4}
    cache = attnpack.LatentCache()
    attnpack.MultiHeadLatentAttention(24, 2, **sizes)(torch.randn(2, 5, 24), cache=cache, kv_lens=torch.tensor([1, 3]))
    assert cache.lengths.tolist() == [1, 3] and len(cache) == cache.c.size(2) == 3


def test_roll_back():
    cache, latents = filled()
    with pytest.raises(RuntimeError, match="stop"), attnpack.ModelCache([cache]).rollback_on_error():
        append(cache, torch.randn(2, 1, 9, RANK + ROPE))
        raise RuntimeError("stop")
    assert torch.equal(cache.k, latents) and torch.equal(cache.v, latents[..., :RANK])


@pytest.mark.parametrize("package", [attnpack, attnpack.cpp], ids=["python", "cpp"])
def test_other_attention_is_refused(package):
    module = package.MultiQueryAttention(24, 4)
    cache = package.LatentCache()
    with pytest.raises(ValueError, match="cache: got a LatentCache, want one of keys and values"):
        module.forward(torch.randn(1, 3, 24), cache=cache)
    assert len(cache) == 0


@pytest.mark.parametrize("package", [attnpack, attnpack.cpp], ids=["python", "cpp"])
def test_latents_of_another_shape_are_refused(package):
    def layer(rank, rope, **settings):
        sizes = dict(kv_lora_rank=rank, qk_nope_head_dim=4, qk_rope_head_dim=rope, v_head_dim=4)
        return package.MultiHeadLatentAttention(24, 2, **sizes, **settings)

    cache, x = package.LatentCache(), torch.randn(1, 3, 24)
    layer(6, 2).forward(x, cache=cache)
    with pytest.raises(ValueError, match="cache: got latents of kv_lora_rank 4, want 6"):
        layer(4, 4).forward(x, cache=cache)
    with pytest.raises(ValueError, match=r"cache: got keys of shape \[1, 1, 3, 10\], want \[1, 1, L, 8\]"):
        layer(6, 4).forward(x, cache=cache)
    with pytest.raises(ValueError, match="cache: got keys in .*(float64|Double)"):
        layer(6, 2, dtype=torch.float64).forward(x.double(), cache=cache)
    assert len(cache) == 3


def test_exchange_with_other_layouts():
    cache, latents = filled()
    c, k_rope = cache.to_latents()
    assert torch.equal(torch.cat([c, k_rope], -1), latents)
    wide = torch.arange(8.0).view(1, 1, 1, 8)
    cache = attnpack.LatentCache.from_latents(torch.zeros(1, 1, 1, 2), wide)
    assert cache.to_latents(half_split=True)[1].flatten().tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    again = attnpack.LatentCache.from_latents(*cache.to_latents(half_split=True), half_split=True)
    assert torch.equal(again.k, cache.k) and again.kv_lora_rank == 2 and len(again) == 1
    ragged = attnpack.LatentCache.from_latents(torch.zeros(2, 1, 3, 2), torch.zeros(2, 1, 3, 4), torch.tensor([1, 3]))
    assert ragged.lengths.tolist() == [1, 3] and len(ragged) == 3
    with pytest.raises(ValueError, match=r"k_rope: got shape \[1, 2, 1, 8\], want \[batch, 1, length, width\]"):
        attnpack.LatentCache.from_latents(torch.zeros(1, 1, 1, 2), wide.expand(1, 2, 1, 8))
    with pytest.raises(ValueError, match="cache: got an empty one"):
        attnpack.LatentCache().to_latents()


def test_repr_and_model_cache():
    cache, _ = filled()
    model = attnpack.ModelCache([cache, attnpack.LatentCache()])
    assert "LatentCache(batch=2, num_kv_heads=1, len=4, head_dim=8" in repr(model) and "bytes=256" in repr(cache)
    with model.lent() as lent:
        assert isinstance(lent.layers[0], attnpack.cpp.LatentCache) and len(lent.layers[1]) == 0
        assert torch.equal(lent.layers[0].c, cache.c) and torch.equal(lent.layers[0].k_rope, cache.k_rope)
        assert repr(lent.layers[0]) == repr(cache)
        copied = lent.layers[0].clone()
    assert isinstance(copied, attnpack.cpp.LatentCache) and copied.kv_lora_rank == RANK
    assert_close(cache.k, copied.k)
    assert "LatentCache(len=0)" in repr(attnpack.LatentCache())


def test_static_caches_hold_latents_as_keys():
    for package in (attnpack, attnpack.cpp):
        cache = package.StaticCache(2, 1, 6, RANK + ROPE, v_head_dim=0)
        assert cache.nbytes == 2 * 6 * (RANK + ROPE) * 4
        with pytest.raises(ValueError, match="v_head_dim: got -1"):
            package.StaticCache(2, 1, 6, 8, v_head_dim=-1)


@pytest.mark.parametrize(
    ("k_rope", "settings", "sentence"),
    [
        (torch.zeros(2, 1, 5, 4), {"lengths": torch.tensor([99, -4])}, r"lengths\[0\] is 99, wants 0 to 5"),
        (torch.zeros(2, 1, 5, 4), {"lengths": torch.tensor([5])}, r"lengths has shape \[1\], wants \[batch\] = \[2\]"),
        (torch.zeros(2, 1, 5, 4), {"lengths": [5, 3]}, "lengths.*wants an int32 or int64 tensor"),
        (torch.zeros(2, 1, 5, 3), {"half_split": True}, "k_rope: got torch.float32 of width 3"),
        (torch.zeros(2, 1, 5, 4).double(), {}, "k_rope: got torch.float64 of width 4, want torch.float32"),
    ],
)
def test_latents_that_make_no_cache_are_named(k_rope, settings, sentence):
    with pytest.raises((ValueError, TypeError), match=f"^attnpack: {sentence}"):
        attnpack.LatentCache.from_latents(torch.zeros(2, 1, 5, 2), k_rope, **settings)
