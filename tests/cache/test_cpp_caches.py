"""Caches of attnpack.cpp under the layers of attnpack.cpp."""

import attnpack
import pytest
import torch


def native_layer(kind):
    """A layer of attnpack.cpp and an empty cache for two sequences of up to 8 positions."""
    torch.manual_seed(0)
    if kind == "latent":
        sizes = {"kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 0, "v_head_dim": 4}
        return attnpack.cpp.MultiHeadLatentAttention(24, 2, **sizes), attnpack.cpp.LatentCache()
    cache = attnpack.cpp.DynamicCache() if kind == "dynamic" else attnpack.cpp.StaticCache(2, 2, 8, 6)
    return attnpack.cpp.GroupedQueryAttention(24, 4, 2), cache


native_kinds = pytest.mark.parametrize("kind", ["dynamic", "static", "latent"])


@native_kinds
def test_a_cpp_clone_has_memory_of_its_own(kind):
    layer, cache = native_layer(kind)
    layer.forward(torch.randn(2, 6, 24), cache=cache)
    copied, kept = cache.clone(), cache.k.clone()
    cache.crop(2)
    layer.forward(torch.randn(2, 4, 24), cache=cache)  # written in the place of the old rows
    assert len(copied) == 6 and torch.equal(copied.k, kept) and not torch.equal(cache.k, kept)


@native_kinds
def test_a_cpp_cache_counts_what_its_longest_sequence_holds(kind):
    layer, cache = native_layer(kind)
    layer.forward(torch.randn(2, 5, 24), cache=cache, kv_lens=torch.tensor([1, 4]))
    assert cache.lengths.tolist() == [1, 4] and len(cache) == cache.k.size(2) == 4
    cache.crop(7)
    assert cache.lengths.tolist() == [1, 4] and len(cache) == 4
    cache.crop(3)
    assert cache.lengths.tolist() == [1, 3] and len(cache) == 3
    cache.reorder([0, 0])
    assert cache.lengths.tolist() == [1, 1] and len(cache) == cache.k.size(2) == 1


def test_cpp_layers_are_taken_back_together():
    torch.manual_seed(0)
    model = attnpack.cpp.CausalLM(16, 24, 3, 4)
    layers = [attnpack.cpp.DynamicCache(), attnpack.cpp.DynamicCache(), attnpack.cpp.StaticCache(1, 4, 4, 6)]
    cache, ids = attnpack.cpp.ModelCache(layers), torch.randint(16, (1, 3))
    with torch.no_grad():
        model.forward(ids, cache=cache)
        with pytest.raises(ValueError, match="cache is full"):
            model.forward(ids, cache=cache)
        assert [len(layer) for layer in cache.layers] == [3, 3, 3]
        assert [layer.lengths.tolist() for layer in cache.layers] == [[3]] * 3
        step = model.forward(ids[:, :1], cache=cache)
        torch.testing.assert_close(step[:, 0], model.forward(torch.cat([ids, ids[:, :1]], 1))[:, 3])


@torch.no_grad()
def test_cpp_pages_of_a_failed_call_are_given_back():
    """The second layer's pool is full after the first layer has taken a page."""
    model = attnpack.CausalLM(32, 24, 2, 6, 2, hidden_dim=32).eval().cpp()
    pools = [attnpack.cpp.PagedCache(2, 2, 4, page_size=4, num_pages=pages) for pages in (9, 4)]
    cache, ids = attnpack.cpp.ModelCache(pools), torch.randint(32, (2, 6))
    model.forward(ids, cache)
    tables = [pool.block_table.clone() for pool in pools]
    for _ in range(2):
        with pytest.raises(ValueError, match="the pool is full"):
            model.forward(ids, cache)
        assert [pool.free_pages for pool in pools] == [5, 0]
        for pool, table in zip(pools, tables, strict=True):
            assert torch.equal(pool.block_table, table) and pool.lengths.tolist() == [6, 6]
    model.forward(ids[:, :2], cache)
