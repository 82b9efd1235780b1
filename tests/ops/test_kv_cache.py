"""The ops kv_cache_append_ and kv_cache_append_rotated_: the places that they write; a refused append writes
nothing."""

import attnpack
import pytest
import torch
from op_cases import DTYPES, draw, laid_out

append = torch.ops.attnpack.kv_cache_append_
append_rotated = torch.ops.attnpack.kv_cache_append_rotated_


def make_cache(batch=2, heads=3, capacity=8, dim=4, v_dim=5, dtype=torch.float32, filled=(2, 5)):
    """(key, value, lengths) whose free slots hold -1."""
    cache_key, cache_value = (torch.full((batch, heads, capacity, d), -1.0, dtype=dtype) for d in (dim, v_dim))
    for b, n in enumerate(filled[:batch]):
        cache_key[b, :, :n], cache_value[b, :, :n] = 7, 8
    return cache_key, cache_value, torch.tensor(filled[:batch], dtype=torch.int64)


def new(length=3, batch=2, heads=3, dim=4, v_dim=5, dtype=torch.float32):
    return draw(batch, heads, length, dim, dtype=dtype), draw(batch, heads, length, v_dim, dtype=dtype)


@pytest.mark.parametrize("new_lens", [None, torch.tensor([3, 0]), torch.tensor([1, 3], dtype=torch.int32)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "heads inside", "sliced", "columns outside"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writes_after_what_each_sequence_holds(dtype, layout, new_lens):
    cache_key, cache_value, lengths = make_cache(dtype=dtype)
    key, value = new(dtype=dtype)
    expected = cache_key.clone(), cache_value.clone()
    counts = [3, 3] if new_lens is None else new_lens.tolist()
    for cache, x in zip(expected, (key, value), strict=True):
        for b, (start, count) in enumerate(zip((2, 5), counts, strict=True)):
            cache[b, :, start : start + count] = x[b, :, :count]
    append(cache_key, cache_value, lengths, laid_out(key, layout), laid_out(value, layout), new_lens, None)
    assert torch.equal(cache_key, expected[0]) and torch.equal(cache_value, expected[1])
    assert lengths.tolist() == [2 + counts[0], 5 + counts[1]]


@pytest.mark.parametrize("layout", ["heads inside", "sliced", "columns outside"])
def test_layout_of_the_cache(layout):
    plain = make_cache()
    cache_key, cache_value = (laid_out(x, layout) for x in plain[:2])
    lengths = torch.stack([plain[2], plain[2]], 1)[:, 0]  # stride 2
    key, value = new()
    append(cache_key, cache_value, lengths, key, value, None, None)
    append(*plain, key, value, None, None)
    for got, expected in zip((cache_key, cache_value, lengths), plain, strict=True):
        assert torch.equal(got, expected)


def test_filling_to_the_brim_and_appending_nothing():
    cache = make_cache(filled=(5, 5))
    append(*cache, *new(3), None, None)
    assert cache[2].tolist() == [8, 8]
    append(*cache, *new(0), None, None)
    assert cache[2].tolist() == [8, 8]
    append(*make_cache(batch=0), *new(3, batch=0), None, None)


def test_stores_without_history_and_counts_as_a_write():
    cache_key, cache_value, lengths = make_cache()
    key, value = new()
    versions = [x._version for x in (cache_key, cache_value, lengths)]
    append(cache_key, cache_value, lengths, key.requires_grad_(), value, None, None)
    assert not cache_key.requires_grad
    assert [x._version for x in (cache_key, cache_value, lengths)] == [v + 1 for v in versions]


def test_inference_mode():
    cache = make_cache()
    with torch.inference_mode():
        append(*cache, *new(), None, None)
        append(*make_cache(), *new(), None, None)
    assert cache[2].tolist() == [5, 8]


REFUSED = {
    "full": (
        dict(new=new(4)),
        "cache is full: sequence 1 holds 5 of 8 positions and 4 are to be appended.*max_len.*crop",
    ),
    "over the mask": (dict(limit=7), "mask covers 7 keys, sequence 1 has 8 after the append"),
    "too many new": (dict(new_lens=torch.tensor([0, 4])), r"kv_lens\[1\] is 4, wants 0 to the number of new tokens, 3"),
    "negative new": (dict(new_lens=torch.tensor([-1, 0])), r"kv_lens\[0\] is -1, wants 0 to"),
    "lens of another batch": (
        dict(new_lens=torch.tensor([1])),
        r"kv_lens has shape \[1\].*wants int32 or int64 \[batch\]",
    ),
    "float lens": (dict(new_lens=torch.tensor([1.0, 2.0])), "kv_lens has .* dtype Float"),
    "other batch": (dict(new=new(batch=1)), "key has shape .* the cache holds .* must agree; call reset"),
    "other heads": (dict(new=new(heads=1)), "key has shape .* the cache holds"),
    "other head_dim": (dict(new=new(dim=5)), "key has shape .* the cache holds"),
    "other v_head_dim": (dict(new=new(v_dim=4)), "value has shape .* the cache holds"),
    "other dtype": (dict(new=new(dtype=torch.bfloat16)), "key has dtype BFloat16, the cache Float: make the cache"),
    "rank": (dict(new=(new()[0][0], new()[1])), r"key has shape \[3, 3, 4\].* both want \[batch"),
    "lengths differ": (dict(new=(new(3)[0], new(2)[1])), "key has length 3, value 2"),
    "device": (dict(new=(new()[0].to("meta"), new()[1])), "key is on meta, the cache on cpu"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_append_leaves_the_cache_as_it_was(case):
    changes, message = REFUSED[case]
    cache = make_cache()
    before = [x.clone() for x in cache]
    error = (ValueError, RuntimeError, NotImplementedError) if case == "device" else ValueError
    with pytest.raises(error, match=message if case != "device" else None):
        append(*cache, *changes.get("new", new()), changes.get("new_lens"), changes.get("limit"))
    for x, expected in zip(cache, before, strict=True):
        assert torch.equal(x, expected)


def test_lengths_must_be_int64_of_the_batch():
    cache_key, cache_value, lengths = make_cache()
    for wrong in (lengths.int(), lengths[:1], lengths.view(2, 1)):
        with pytest.raises(ValueError, match=r"the cache's lengths have shape .* wants int64 \[batch\]"):
            append(cache_key, cache_value, wrong, *new(), None, None)
    assert (cache_key[0, :, 2:] == -1).all()


@pytest.mark.parametrize("new_lens", [None, torch.tensor([1, 3], dtype=torch.int32)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "heads inside", "sliced", "columns outside"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inv_freq", [[1.0, 0.25, 0.01], [0.5], []], ids=len)
def test_rotating_is_rotation_and_append_bit_by_bit(inv_freq, interleaved, dtype, layout, new_lens):
    """Whole heads, a third of them, nothing."""
    ops = torch.ops.attnpack
    cache, plain = ([x.clone() for x in make_cache(dim=6, dtype=dtype)] for _ in range(2))
    cache[0] = laid_out(cache[0], layout)
    query = laid_out(draw(2, 6, 3, 6, dtype=dtype), layout)
    key, value = (laid_out(x, layout) for x in new(dim=6, dtype=dtype))
    positions = plain[2][:, None] + torch.arange(3)
    cos, sin = (table.unsqueeze(1) for table in ops.rope_table(positions, inv_freq, 1.5))
    append(*plain, ops.apply_rope(key, cos, sin, interleaved), value, new_lens, None)
    before = [x._version for x in cache]
    rotated = append_rotated(*cache, query, key, value, inv_freq, 1.5, interleaved, new_lens, None)
    assert torch.equal(rotated, ops.apply_rope(query, cos, sin, interleaved))
    for got, expected in zip(cache, plain, strict=True):
        assert torch.equal(got, expected)
    assert [x._version for x in cache] == [version + 1 for version in before]


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_rotating_append_leaves_the_cache_as_it_was(case):
    changes, message = REFUSED[case]
    cache = make_cache()
    before = [x.clone() for x in cache]
    key, value = changes.get("new", new())
    error = (ValueError, RuntimeError, NotImplementedError) if case == "device" else ValueError
    with pytest.raises(error, match=message if case != "device" else None):
        append_rotated(*cache, key, key, value, [1.0], 1.0, False, changes.get("new_lens"), changes.get("limit"))
    for x, expected in zip(cache, before, strict=True):
        assert torch.equal(x, expected)


BEYOND = "is -?[0-9]+, wants 0 to its 8 positions: call reset"


@pytest.mark.parametrize("held", [2**63 - 1, 2**63 - 2, 9, -1, -(2**63)])
@pytest.mark.parametrize("rotated", [False, True])
def test_lengths_that_no_cache_has_are_refused(held, rotated):
    cache_key, cache_value, lengths = make_cache()
    for b in range(2):
        wrong = lengths.clone()
        wrong[b] = held
        with pytest.raises(ValueError, match=rf"the cache's lengths\[{b}\] {BEYOND}"):
            append_of(rotated)(cache_key, cache_value, wrong, *new(), None)
        assert (cache_key[0, :, 2:] == -1).all() and wrong[b] == held


@pytest.mark.parametrize("held", [2**63 - 2, -1])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_module_refuses_them_too(held, gradients):
    wanted = r"lengths\[0\] is .* wants 0 to its [0-9]+ positions"
    rope = attnpack.RotaryEmbedding(8)
    layer = attnpack.GroupedQueryAttention(48, 6, 2, rope=rope, causal=True)
    latent = attnpack.MultiHeadLatentAttention(
        48, 6, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, rope=rope, causal=True
    )
    static = attnpack.StaticCache(2, 2, 9, 8)
    for module, cache in ((layer, attnpack.DynamicCache()), (layer, static), (latent, attnpack.LatentCache())):
        with torch.set_grad_enabled(gradients):
            module(torch.randn(2, 3, 48), cache=cache)
            cache.lengths.fill_(held)
            with pytest.raises(ValueError, match=wanted):
                module(torch.randn(2, 3, 48), cache=cache)


def append_of(rotated: bool):
    """Either op as a function of cache_key, cache_value, lengths, key, value, new_lens."""

    def rotate(cache_key, cache_value, lengths, key, value, new_lens):
        query = torch.zeros(key.shape)
        append_rotated(cache_key, cache_value, lengths, query, key, value, [1.0], 1.0, False, new_lens, None)

    return rotate if rotated else lambda *tensors: append(*tensors, None)


def overlapping():
    """Arguments that share memory, by the words of the error: (cache_key, cache_value, lengths, key, value)."""
    (cache_key, cache_value, lengths), (key, value) = make_cache(v_dim=4), new(v_dim=4)
    one = torch.zeros(1, 3, 8, 4)
    room = torch.zeros(2, 3, 16, 4)
    numbers = torch.zeros(2 * 3 * 8 * 4, dtype=torch.float32)
    return {
        "the cache's keys have .* strides .* clone": (one.expand(2, 3, 8, 4), cache_value, lengths, key, value),
        "the cache's values have .* strides .* clone": (cache_key, one.expand(2, 3, 8, 4), lengths, key, value),
        "the cache's lengths have .* clone": (cache_key, cache_value, torch.tensor([2]).expand(2), key, value),
        "values share memory with its keys.* clone": (cache_key, cache_key, lengths, key, value),
        "the cache's values share": (room[:, :, :8], room[:, :, :8], lengths, key, value),
        "lengths share memory with its keys": (
            numbers.view(2, 3, 8, 4), cache_value, numbers.view(torch.int64)[4:6], key, value
        ),
        "key shares memory with the cache's keys.* clone": (
            cache_key, cache_value, lengths, cache_key[:, :, 1:4], value
        ),
        "value shares memory with the cache's keys": (cache_key, cache_value, lengths, key, cache_key[:, :, :3]),
        "key shares memory with the cache's values": (cache_key, cache_value, lengths, cache_value[:, :, :3], value),
    }  # fmt: skip


@pytest.mark.parametrize("message", overlapping())
@pytest.mark.parametrize("rotated", [False, True])
def test_shared_memory_is_refused(message, rotated):
    tensors = overlapping()[message]
    before = [x.clone() for x in tensors]
    with pytest.raises(ValueError, match=message):
        append_of(rotated)(*tensors, None)
    for x, expected in zip(tensors, before, strict=True):
        assert torch.equal(x, expected)


@pytest.mark.parametrize("rotated", [False, True])
def test_memory_that_only_lies_near_is_taken(rotated):
    """Keys beside values in one tensor; keys and values of one tensor; values of width 0; the lengths as new_lens."""
    both = torch.zeros(2, 3, 8, 8)
    key, value = torch.stack(new(v_dim=4), 3).unbind(3)
    cache = both[..., :4], both[..., 4:], torch.tensor([0, 5])
    append_of(rotated)(*cache, key, value, None)
    assert torch.equal(cache[1][1, :, 5:], value[1]) and cache[2].tolist() == [3, 8]
    key, nothing = new(v_dim=0)
    cache = *make_cache(v_dim=0)[:2], torch.tensor([2, 3])
    append_of(rotated)(*cache, key, nothing, cache[2])
    assert cache[2].tolist() == [4, 6]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
def test_a_cache_that_is_a_lazy_minus_is_refused_and_such_keys_are_taken(rotated, inference):
    with torch.inference_mode(inference):
        (cache_key, cache_value, lengths), (key, value) = make_cache(), new()
        for cache in ((torch._neg_view(cache_key), cache_value), (cache_key, torch._neg_view(cache_value))):
            with pytest.raises(ValueError, match="lazy minus or conjugate.* resolve_neg"):
                append_of(rotated)(*cache, lengths, key, value, None)
            with pytest.raises(ValueError, match="lazy minus or conjugate.* resolve_neg"):
                attnpack.ops.attend(key, key, value, cache=(*cache, lengths))
        plain = [x.clone() for x in (cache_key, cache_value, lengths)]
        append_of(rotated)(*plain, key, value, None)
        append_of(rotated)(cache_key, cache_value, lengths, torch._neg_view(-key), torch._neg_view(-value), None)
        for got, expected in zip((cache_key, cache_value, lengths), plain, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("which", ["cache_value", "lengths", "new_lens"])
def test_all_of_a_cache_is_on_one_device(which):
    cache_key, cache_value, lengths = make_cache()
    tensors = {"cache_value": cache_value, "lengths": lengths, "new_lens": torch.tensor([1, 1])}
    tensors[which] = tensors[which].to("meta")
    with pytest.raises(ValueError, match="on meta"):
        append(cache_key, tensors["cache_value"], tensors["lengths"], *new(), tensors["new_lens"], None)


@pytest.mark.parametrize(
    ("query", "inv_freq", "message"),
    [
        (draw(2, 3, 2, 4), [1.0], r"query has shape \[2, 3, 2, 4\].*the new keys \[2, 3, 3, 4\]"),
        (draw(2, 3, 3, 4).double(), [1.0], "dtype Double.*must agree"),
        (draw(2, 3, 3, 4), [1.0] * 3, "inv_freq has 3 frequencies, wants at most half of head_dim 4"),
        (draw(2, 3, 3, 4).requires_grad_(), [1.0], "query or key want gradients"),
    ],
    ids=["length", "dtype", "frequencies", "gradients"],
)
def test_what_cannot_be_rotated_is_refused(query, inv_freq, message):
    cache = make_cache()
    before = [x.clone() for x in cache]
    with pytest.raises(ValueError, match=message):
        append_rotated(*cache, query, *new(), inv_freq, 1.0, False, None, None)
    for x, expected in zip(cache, before, strict=True):
        assert torch.equal(x, expected)


def profiled(call) -> set[str]:
    with torch.profiler.profile() as profile:
        call()
    return {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("length", [1, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_takes_it_without_gradients(dtype, length):
    torch.manual_seed(0)
    rope = attnpack.RotaryEmbedding(8, base=100.0)
    module = attnpack.GroupedQueryAttention(48, 6, 2, rope=rope, causal=True, dtype=dtype)
    x, outs, caches = torch.randn(2, length, 48, dtype=dtype), [], []
    for gradients in (False, True):
        cache = attnpack.DynamicCache()
        with torch.set_grad_enabled(gradients):
            seen = profiled(lambda: outs.append([module(x, cache=cache), module(x[:, :1], cache=cache)]))  # noqa: B023
        assert ("attnpack::kv_cache_append_rotated_" in seen) == (not gradients)
        caches.append(cache)
    for with_one, with_ops in zip(*outs, strict=True):
        torch.testing.assert_close(with_one, with_ops)
    torch.testing.assert_close(caches[0].k, caches[1].k)
    assert torch.equal(caches[0].lengths, caches[1].lengths)


def latent_attend(cache, *, width=4, latent_dim=3, kv_b=True, v_dim=5, path="auto", **settings):
    """The op on 3 query heads with one rotated dim; its cache is the keys of one head."""
    query, latent, k_rope = draw(2, 3, 3, width), draw(2, 3, latent_dim), draw(2, 3, 1)
    up = draw(24, latent_dim) if kv_b else None
    attnpack.ops.latent_attend(query, latent, k_rope, up, v_dim, path, cache=cache[::2], **settings)


def attend(cache, **settings):
    x = draw(2, 1, 3, 4)
    attnpack.ops.attend(x, x, x, cache=cache, **settings)


@pytest.mark.parametrize(
    ("layer", "settings", "message"),
    [
        (attend, {"dropout_p": 1.5}, "dropout_p is 1.5"),
        (latent_attend, {"dropout_p": -1.0}, "dropout_p is -1"),
        (latent_attend, {"path": "fast"}, "path: got 'fast'"),
        (latent_attend, {"v_dim": 6}, r"kv_b has shape \[24, 3\] for v_dim 6, wants .* \[27, 3\]"),
        (latent_attend, {"width": 5, "kv_b": False}, r"query has head_dim 5 without kv_b, wants 3 \+ 1"),
    ],
)
def test_a_refused_layer_leaves_the_cache_as_it_was(layer, settings, message):
    cache = make_cache(heads=1, v_dim=4)
    before = [x.clone() for x in cache]
    with pytest.raises(ValueError, match=message):
        layer(cache, **settings)
    for x, expected in zip(cache, before, strict=True):
        assert torch.equal(x, expected)
    layer(cache)
    assert cache[2].tolist() == [5, 8]
