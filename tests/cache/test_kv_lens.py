"""Every way to a cache refuses wrong `kv_lens`, and leaves the cache as it was."""

import attnpack
import pytest
import torch

BATCH, HEADS, KV_HEADS, D, LEN = 2, 4, 2, 8, 3
E = HEADS * D

WRONG = {
    "of another batch": torch.tensor([1]),
    "a number": torch.tensor(1),
    "floats": torch.tensor([1.0, 2.0]),
    "bytes": torch.tensor([1, 2], dtype=torch.int8),
    "below 0": torch.tensor([1, -1]),
    "above the new tokens": torch.tensor([LEN + 1, 1], dtype=torch.int32),
}
CACHES = {
    "DynamicCache": lambda package: package.DynamicCache(),
    "StaticCache": lambda package: package.StaticCache(BATCH, KV_HEADS, 9, D),
    "SlidingWindowCache": lambda package: package.SlidingWindowCache(20),
    "QuantizedCache": lambda package: package.QuantizedCache(8, exact_first=1, exact_last=2),
    "PagedCache": lambda package: package.PagedCache(BATCH, KV_HEADS, D, page_size=2, num_pages=20),
    "SparseCache": lambda package: package.SparseCache(),
}
X = torch.randn(BATCH, LEN, E, generator=torch.Generator().manual_seed(0))


def heads(count: int) -> torch.Tensor:
    return X[..., : count * D].unflatten(-1, (count, D)).transpose(1, 2)


def refused(call, cache) -> None:
    """Checks that the call raises, and that the cache holds what it held."""
    held, keys = cache.lengths.clone(), None if cache.k is None else cache.k.clone()
    with pytest.raises(ValueError, match=r"(kv|new)_lens"):
        call()
    assert cache.lengths.equal(held)
    assert (cache.k is None) if keys is None else cache.k.equal(keys)


@pytest.mark.parametrize("filled", [False, True], ids=["empty", "filled"])
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("package", [attnpack, attnpack.cpp], ids=["python", "cpp"])
@torch.no_grad()
def test_modules_refuse_them(package, kind, filled):
    for rope in (None, package.RotaryEmbedding(D)):
        module = package.GroupedQueryAttention(E, HEADS, KV_HEADS, causal=True, window=(20, 0), rope=rope)
        cache = CACHES[kind](package)
        if filled:
            module(X, cache=cache)
        for wrong in WRONG.values():
            refused(lambda wrong=wrong: module(X, cache=cache, kv_lens=wrong), cache)  # noqa: B023


@pytest.mark.parametrize("package", [attnpack, attnpack.cpp], ids=["python", "cpp"])
@pytest.mark.parametrize("filled", [False, True], ids=["empty", "filled"])
@torch.no_grad()
def test_latent_attention_refuses_them(package, filled):
    sizes = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    module = package.MultiHeadLatentAttention(E, HEADS, causal=True, rope=package.RotaryEmbedding(4), **sizes)
    for cache in (package.LatentCache(), package.StaticCache(BATCH, 1, 9, 10, v_head_dim=0)):
        if filled:
            module(X, cache=cache)
        for wrong in WRONG.values():
            refused(lambda wrong=wrong, cache=cache: module(X, cache=cache, kv_lens=wrong), cache)


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("package", [attnpack, attnpack.cpp], ids=["python", "cpp"])
@torch.no_grad()
def test_layers_over_the_keys_of_another_refuse_them(package, wrong):
    first, second = (package.GroupedQueryAttention(E, HEADS, KV_HEADS, causal=True) for _ in range(2))
    cache = package.DynamicCache()
    first(X, cache=cache)
    refused(lambda: second(X, kv_from=cache, kv_lens=wrong), cache)


@pytest.mark.parametrize("kind", CACHES)
@torch.no_grad()
def test_the_op_of_layers_refuses_them(kind):
    cache = CACHES[kind](attnpack)
    query, key = heads(HEADS), heads(KV_HEADS)
    for rope in (None, attnpack.RotaryEmbedding(D).settings):
        room = cache.reserve(key, key)
        held = room.lengths.clone()
        for wrong in WRONG.values():
            for call in (attnpack.ops.attend, flat_attend):
                with pytest.raises(ValueError, match=r"(kv|new)_lens"):
                    call(query, key, key, cache=room, rope=rope, kv_lens=wrong, causal=True, window=(20, 0))
        assert room.lengths.equal(held)


def flat_attend(query, key, value, *, cache, rope, kv_lens, causal, window):
    """The op itself, as a traced graph calls it."""
    turned = {} if rope is None else {"rope_inv_freq": attnpack.RotaryEmbedding(D).inv_freq}
    held = {f"cache_{name}": part for name, part in cache._asdict().items()}
    sides = {"window_left": window[0], "window_right": window[1]}
    return torch.ops.attnpack.attend(query, key, value, **held, **turned, **sides, kv_lens=kv_lens, causal=causal)


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_the_operators_refuse_them(wrong):
    query, key = heads(HEADS), heads(KV_HEADS)
    room, lengths = torch.zeros(BATCH, KV_HEADS, 9, D), torch.zeros(BATCH, dtype=torch.int64)
    pool, table = torch.zeros(8, 2, KV_HEADS, D), torch.arange(8, dtype=torch.int32).view(BATCH, 4)
    calls = {
        "attention": lambda: attnpack.attention(query, key, key, kv_lens=wrong),
        "append": lambda: torch.ops.attnpack.kv_cache_append_(room, room.clone(), lengths, key, key, wrong, None),
        "append_rotated": lambda: torch.ops.attnpack.kv_cache_append_rotated_(
            room, room.clone(), lengths, query, key, key, [1.0], 1.0, False, wrong, None
        ),
        "append_paged": lambda: torch.ops.attnpack.kv_cache_append_paged_(
            pool, pool.clone(), table, lengths, key, key, wrong, None
        ),
        "paged reserve": lambda: CACHES["PagedCache"](attnpack).reserve(key, key, wrong),
    }
    full = torch.full((BATCH,), LEN)
    for op in (torch.ops.attnpack.attend_shared, torch.ops.attnpack.attend_shared_with_weights):
        calls[op.__name__] = lambda op=op: op(query, key, key, full, kv_lens=wrong)
    for name, call in calls.items():
        with pytest.raises(ValueError, match=r"(kv|new)_lens"):
            call()
        assert not lengths.any() and not room.any() and not pool.any(), name
