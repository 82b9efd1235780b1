"""Caches that are made or cropped wrongly, or of the wrong kind: one sentence says what the call wants."""

import attnpack
import pytest
import torch
from errors import IDS, both, complaint, model

CACHES = {
    "max_len is 3.5 .*, wants an int": (TypeError, lambda m: m.StaticCache(1, 2, 3.5, 4)),
    "batch: got -1, want 0 or more": (ValueError, lambda m: m.StaticCache(-1, 2, 3, 4)),
    "max_len: got 0, want at least 1": (ValueError, lambda m: m.StaticCache(1, 2, 0, 4)),
    "v_head_dim: got -1, want": (ValueError, lambda m: m.StaticCache(1, 2, 3, 4, v_head_dim=-1)),
    "dtype is .*, wants a floating one": (ValueError, lambda m: m.StaticCache(1, 2, 3, 4, dtype=torch.int64)),
    "(layers|num_layers) is 2.0 .*, wants": (TypeError, lambda m: m.ModelCache(2.0)),
    r"layers\[0\] is 1 .*, wants": (TypeError, lambda m: m.ModelCache([1, 2])),
    r"layers\[1\]: got the cache of an earlier layer": (ValueError, lambda m: m.ModelCache([m.DynamicCache()] * 2)),
    "n is 1.5 .*, wants an int": (TypeError, lambda m: m.DynamicCache().crop(1.5)),
    "n is None .*, wants an int": (TypeError, lambda m: m.StaticCache(1, 2, 3, 4).crop(None)),
    "n is 'a' .*, wants an int": (TypeError, lambda m: m.ModelCache(2).crop("a")),
}


@both("message", CACHES)
def test_caches(message, m):
    kind, call = CACHES[message]
    complaint(kind, message, call, m)


@pytest.mark.parametrize("cache", [attnpack.DynamicCache(), attnpack.SlidingWindowCache(4), attnpack.QuantizedCache(8)])
def test_lengths_in_a_list(cache):
    layer = attnpack.GroupedQueryAttention(8, 2, 2, causal=True, window=(4, 0))
    with pytest.raises(TypeError, match=r"kv_lens is \[1, 1\] \(list\), wants .* torch.tensor\(\) makes one"):
        layer(torch.zeros(2, 3, 8), cache=cache, kv_lens=[1, 1])
    cross = attnpack.GroupedQueryAttention(8, 2, 2)
    with pytest.raises(TypeError, match=r"kv_lens is \[1, 1\] \(list\), wants"):
        cross(torch.zeros(2, 3, 8), torch.zeros(2, 3, 8), cache=attnpack.CrossCache(), kv_lens=[1, 1])


@pytest.mark.parametrize("cache", [attnpack.DynamicCache(), attnpack.SlidingWindowCache(4), attnpack.QuantizedCache(8)])
def test_reserve_wants_heads_of_floats(cache):
    heads = torch.ones(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"key: got shape \[2, 3, 4\] and dtype Float, want a float tensor"):
        cache.reserve(heads[0], heads)
    with pytest.raises(ValueError, match="value: got shape .* and dtype Long, want a float tensor"):
        cache.reserve(heads, heads.long())


@pytest.mark.parametrize("cache", (attnpack.ModelCache(2), "dynamic"), ids=("model", "text"))
def test_a_layer_wants_the_cache_of_a_layer(cache):
    with pytest.raises(TypeError, match="cache is a .*, MultiQueryAttention wants a DynamicCache or StaticCache"):
        attnpack.MultiQueryAttention(8, 2)(torch.randn(1, 3, 8), cache=cache)


def test_a_model_wants_the_cache_of_a_model():
    language_model = model(attnpack)
    with pytest.raises(TypeError, match="cache is a DynamicCache, Decoder wants a ModelCache"):
        language_model(IDS, attnpack.DynamicCache())
    with pytest.raises(TypeError, match="cache is a DynamicCache, generate wants a ModelCache"):
        language_model.generate(IDS, max_new_tokens=1, cache=attnpack.DynamicCache())


def test_a_cache_of_the_other_language():
    with pytest.raises(TypeError, match=r"cache is an attnpack.cpp.ModelCache, Decoder wants a ModelCache"):
        model(attnpack)(IDS, attnpack.cpp.ModelCache(2))
    with pytest.raises(TypeError, match=r"cache is .*ModelCache.*, wants an attnpack.cpp.ModelCache"):
        model(attnpack.cpp).forward(IDS, attnpack.ModelCache(2))


KEY, LENGTHS = torch.zeros(1, 2, 3, 4), torch.tensor([1])
STATES = {
    "tensors: got 0, want 3 for a cache of this class: lengths, key, value": ("StaticCache", [], []),
    "tensors: got no key and value, want those of a StaticCache": ("StaticCache", [LENGTHS, None, None], []),
    "tensors: got only one of key and value, want both": ("DynamicCache", [LENGTHS, KEY, None], [1]),
    "tensors: got no lengths, want": ("DynamicCache", [None, KEY, KEY], [1]),
    "tensors: got 4, want 3 for a cache of this class: lengths, conv_state, state": (
        "RecurrentCache",
        [LENGTHS, KEY, KEY, KEY],
        [1],
    ),
    "tensors: got key without dropped, want both or none": ("SlidingWindowCache", [LENGTHS, KEY, KEY, None], [2, 0, 1]),
    r"window: got \(-1, 0\), want \(left, 0\)": ("SlidingWindowCache", [LENGTHS, None, None, None], [-1, 0, 0]),
    "bits: got 7, want 8 or 4": ("QuantizedCache", [LENGTHS] + 5 * [None], [7, 0, 0, 0, 0, 0, 0, 6, 0]),
    "dtype: got the number 300, want one": ("QuantizedCache", [LENGTHS] + 5 * [None], [8, 0, 0, 0, 0, 0, 0, 300, 0]),
    "tensors: got some of exact_key, exact_value and exact_dropped, want none": (
        "QuantizedCache",
        [LENGTHS, KEY, KEY, KEY, None, None],
        [8, 0, 0, 1, 4, 4, 0, 6, 1],
    ),
    "tensors: got key of a PagedCache as none": ("PagedCache", [LENGTHS] + 4 * [None], []),
    "numbers: got 1, want 3 for a cache of this class: len, ready, kv_lora_rank": (
        "LatentCache",
        [LENGTHS, KEY, KEY, None],
        [1],
    ),
    "kind: got Cache, want a class of caches": ("Cache", [LENGTHS, KEY, KEY], [1, 2]),
    r"lengths\[0\] is 1, wants 0 to its 0 positions": ("StaticCache", [LENGTHS, KEY[:, :, :0], KEY], []),
}


@pytest.mark.parametrize("message", STATES)
def test_a_state_that_no_cache_has_is_refused_by_the_ops(message):
    with pytest.raises(ValueError, match=message):
        torch.ops.attnpack.cache_views(*STATES[message])


@pytest.mark.parametrize("kind", ["StaticCache", "SlidingWindowCache", "QuantizedCache", "PagedCache"])
def test_a_new_cache_of_a_class_with_settings_is_refused(kind):
    with pytest.raises(ValueError, match=f"kind: got {kind}, which has settings, want a class of caches without"):
        torch.ops.attnpack.new_cache(kind)


@pytest.mark.parametrize("dtype", [-7, -1, 100])
def test_a_number_that_is_no_dtype_is_refused(dtype):
    """torch.zeros reads outside of a table, and may crash."""
    with pytest.raises(ValueError, match=f"dtype: got the number {dtype}, want one of torch's dtypes"):
        torch.ops.attnpack.static_cache(1, 2, 3, 4, None, dtype, None)


CLASSES = [value for value in vars(attnpack).values() if isinstance(value, type) and "Cache" in value.__name__]


@pytest.mark.parametrize("kind", CLASSES)
def test_help_says_that_a_cache_is_for_one_thread(kind):
    """Two threads that append at once lose positions, mostly without an error."""
    assert "thread-safe" in kind.__doc__


def test_a_cache_that_two_threads_fill_advises_nothing_that_it_lacks():
    """The rows of a DynamicCache that another thread has taken: its `max_len` cannot be larger, it has none."""
    cache = attnpack.DynamicCache()
    layer = attnpack.MultiHeadAttention(8, 2)
    layer(torch.randn(1, 3, 8), cache=cache)
    room = cache.reserve(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4))
    cache.lengths.add_(1)
    with pytest.raises(ValueError, match="make a StaticCache with a larger max_len.*a DynamicCache grows, but not for"):
        torch.ops.attnpack.kv_cache_append_(*room[:3], *2 * [torch.zeros(1, 2, 1, 4)], None, None)


@both("message", ["lengths are on meta, where they hold no numbers"])
def test_a_cache_on_meta_knows_no_length(message, m):
    cache = m.StaticCache(1, 4, 8, 6, device="meta")
    complaint(ValueError, message, lambda m: len(cache), m)
    assert repr(cache) == "StaticCache(device=meta)"
    complaint(ValueError, "device: got meta", lambda m: m.PagedCache(1, 4, 6, num_pages=4, device="meta"), m)
