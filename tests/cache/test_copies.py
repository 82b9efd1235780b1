"""Copies of caches that hold something, by clone, copy, deepcopy and pickle: equal, of the same class, and with memory
of their own."""

import copy
import pickle

import attnpack
import pytest
import torch
from attnpack.tools.memory import peak_bytes

LAYER = {
    "dynamic": attnpack.DynamicCache,
    "static": lambda: attnpack.StaticCache(2, 2, 12, 6),
    "latent": attnpack.LatentCache,
    "latents and an indexer's keys": attnpack.LatentCache,
    "sliding": lambda: attnpack.SlidingWindowCache(8),
    "first kept": lambda: attnpack.SlidingWindowCache(8, keep_first=1),
    "paged": lambda: attnpack.PagedCache(2, 2, 6, num_pages=6, page_size=3),
    "sums of blocks": attnpack.SparseCache,
    "an indexer's keys": attnpack.SparseCache,
}
WAYS = {
    "clone": lambda cache: cache.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
}
LAYER_WAYS = WAYS | {"copy": copy.copy}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
layer_ways = pytest.mark.parametrize("way", LAYER_WAYS.values(), ids=LAYER_WAYS)


def layer_for(kind):
    torch.manual_seed(0)
    if kind == "latent":
        sizes = {"kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 0, "v_head_dim": 4}
        return attnpack.MultiHeadLatentAttention(24, 2, **sizes).eval()
    if kind == "latents and an indexer's keys":
        sizes = {"q_lora_rank": 6, "kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 0, "v_head_dim": 4}
        return attnpack.SparseLatentAttention(24, 2, top_k=3, causal=True, **sizes).eval()
    if kind == "sums of blocks":
        return attnpack.SparseAttention(24, 4, 2, selector="mean", top_k=2, key_block=2, causal=True).eval()
    if kind == "an indexer's keys":
        return attnpack.SparseAttention(24, 4, 2, top_k=3, causal=True).eval()
    window = (8, 0) if kind in ("sliding", "first kept") else None
    return attnpack.GroupedQueryAttention(24, 4, 2, causal=True, window=window).eval()


def content(cache):
    index = getattr(cache, "index", None)
    return cache.k, cache.v, cache.lengths, *([] if index is None else [index])


@torch.no_grad()
def test_a_clone_copies_what_is_held_and_not_the_room():
    cache, copies = attnpack.StaticCache(2, 2, 500_000, 6), []  # 96 MB
    layer_for("static")(torch.randn(2, 3, 24), cache=cache)
    grown = peak_bytes(lambda: copies.append(cache.clone()))
    assert grown is None or grown < 10e6
    assert torch.equal(copies[0].k, cache.k) and torch.equal(copies[0].v, cache.v) and len(copies[0]) == 3


def test_a_pickle_holds_tensors_and_numbers_by_name():
    cache, other = attnpack.LatentCache(), attnpack.LatentCache()
    keys, _ = cache.reserve_latents(torch.randn(2, 1, 3, 5), 4)
    cache.commit(3, None)
    state = cache.__getstate__()
    tensors, numbers = state["_tensors"], state["_numbers"]
    assert numbers == {"len": 3, "ready": 3, "kv_lora_rank": 4}
    assert tensors.keys() == {"lengths", "key", "value", "index"} and tensors["index"] is None
    assert tensors["lengths"] is cache.lengths and tensors["key"].data_ptr() == keys.data_ptr()
    in_any_order = {name: dict(reversed(part.items())) for name, part in (("_tensors", tensors), ("_numbers", numbers))}
    other.__setstate__(state | in_any_order)
    assert other.kv_lora_rank == 4 and len(other) == 3 and torch.equal(other.k, cache.k)
    for wrong in ([0, 5, 0], {"len": 0, "ready": 0}):
        with pytest.raises(ValueError, match="as the numbers .* want len, ready, kv_lora_rank: it is of another rel"):
            other.__setstate__(state | {"_numbers": wrong})
    for wrong in (list(tensors.values()), {"lengths": cache.lengths}):
        with pytest.raises(ValueError, match="as the tensors .* want lengths, key, value, index: it is of another rel"):
            other.__setstate__(state | {"_tensors": wrong})


@pytest.mark.parametrize("kind", LAYER)
def test_the_names_of_a_state_are_those_of_the_native_cache(kind):
    """`lengths` is what the name says in each class, whatever the order."""
    cache = LAYER[kind]()
    layer_for(kind)(torch.randn(2, 3, 24), cache=cache)
    tensors = cache.__getstate__()["_tensors"]
    assert tensors["lengths"].tolist() == [3, 3] and tensors["lengths"] is cache.lengths
    assert len(set(tensors)) == len(cache._tensors)


@layer_ways
@pytest.mark.parametrize("kind", LAYER)
@torch.no_grad()
def test_a_copy_goes_on_by_itself(kind, way):
    layer, cache = layer_for(kind), LAYER[kind]()
    for part in torch.randn(2, 5, 24).split([3, 2], 1):
        layer(part, cache=cache, kv_lens=torch.tensor([1, 2]))
    copied, before = way(cache), [x.clone() for x in content(cache)]
    assert type(copied) is type(cache) and repr(copied) == repr(cache) and copied.nbytes == cache.nbytes
    assert len(copied) == 4 and copied.lengths.tolist() == [2, 4]
    more = torch.randn(2, 3, 24)
    out = layer(more, cache=copied)
    assert len(copied) == 7 and len(cache) == 4
    for got, wanted in zip(content(cache), before, strict=True):
        assert torch.equal(got, wanted)
    assert torch.equal(layer(more, cache=cache), out)
    cache.crop(1)
    (cache.k_pool if kind == "paged" else cache.k).zero_()
    assert len(copied) == 7 and copied.k[0, :, 0].any()


@ways
@pytest.mark.parametrize("kind", LAYER)
def test_a_copy_of_an_empty_cache(kind, way):
    copied = way(LAYER[kind]())
    assert len(copied) == 0 and repr(copied) == repr(LAYER[kind]())
    with torch.no_grad():
        layer_for(kind)(torch.randn(2, 3, 24), cache=copied)
    assert len(copied) == 3


@ways
@torch.no_grad()
def test_a_copy_of_a_model_cache(way):
    torch.manual_seed(0)
    model, ids = attnpack.CausalLM(32, 24, 2, 4, 2, hidden_dim=32).eval(), torch.randint(32, (2, 4))
    cache = attnpack.ModelCache([attnpack.DynamicCache(), attnpack.StaticCache(2, 2, 12, 6)])
    model(ids, cache)
    copied = way(cache)
    assert [type(layer) for layer in copied] == [attnpack.DynamicCache, attnpack.StaticCache]
    assert repr(copied) == repr(cache)
    out = model(ids, copied)
    assert len(copied) == 8 and [len(layer) for layer in cache] == [4, 4]
    assert torch.equal(model(ids, cache), out)


@pytest.mark.parametrize("way", [WAYS["clone"], WAYS["deepcopy"], copy.copy], ids=["clone", "deepcopy", "copy"])
def test_a_copy_keeps_what_a_subclass_adds(way):
    class Named(attnpack.DynamicCache):
        name = "none"

    cache = Named()
    cache.name = "first"
    assert type(way(cache)) is Named and way(cache).name == "first"
