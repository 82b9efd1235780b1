"""Latent attention over named keys, compared with a dense mask."""

import attnpack
import pytest
import torch
from attnpack.nn.sharded_attention import ShardedAttention, sharded_sequence
from torch.testing import assert_close

EMBED = 24


def make(path="auto", **settings):
    torch.manual_seed(0)
    usual = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "causal": True}
    rope = attnpack.RotaryEmbedding(4, interleaved=True)
    return attnpack.MultiHeadLatentAttention(
        EMBED, 3, **usual, rope=rope, path=path, dtype=torch.float64, **settings
    ).eval()


def names_of(batch, rows, keys, count):
    """[B, 1, L, n]: each row's own key and some of any number, one of them twice, and -1."""
    own = torch.arange(keys - rows, keys).view(1, 1, rows, 1).expand(batch, 1, rows, 1)
    others = torch.randint(0, keys, (batch, 1, rows, count))
    return torch.cat([others, own, others[..., :1], torch.full_like(own, -1)], -1)


def as_mask(index, keys):
    mask = torch.zeros(*index.shape[:3], keys + 1, dtype=torch.bool)
    return mask.scatter(3, torch.where(index < 0, keys, index), True)[..., :keys]


@pytest.mark.parametrize("path", ["auto", "expanded", "absorbed", "folded"])
@pytest.mark.parametrize("language", ["python", "c++"])
def test_named_keys_are_a_dense_mask(path, language):
    module = make().fold() if path == "folded" else make(path)
    called = module if language == "python" else module.cpp()
    x = torch.randn(2, 9, EMBED, dtype=torch.float64, requires_grad=True)
    index = names_of(2, 9, 9, 3)
    weight = torch.randn(2, 9, EMBED, dtype=torch.float64)
    wanted, weights = module(x, mask=as_mask(index, 9), need_weights=True)
    (grad,) = torch.autograd.grad((wanted * weight).sum(), x)
    out = called.forward(x, key_index=index)
    assert_close(out, wanted, atol=1e-11, rtol=1e-11)
    assert_close(torch.autograd.grad((out * weight).sum(), x)[0], grad, atol=1e-10, rtol=1e-10)
    assert_close(called.forward(x, key_index=index.int(), need_weights=True)[1], weights, atol=1e-11, rtol=1e-11)
    with torch.no_grad():
        cache, other = (attnpack if language == "python" else attnpack.cpp).LatentCache(), attnpack.LatentCache()
        for part, some in ((x[:, :6], 6), (x[:, 6:7], 1), (x[:, 7:], 2)):
            keys = len(cache) + some
            index = names_of(2, some, keys, 3)
            wanted = module(part, mask=as_mask(index, keys), cache=other)
            assert_close(called.forward(part, key_index=index, cache=cache), wanted, atol=1e-11, rtol=1e-11)


@torch.no_grad()
def test_a_replaced_projection_and_a_compiled_layer():
    module, x, index = make(), torch.randn(2, 9, EMBED, dtype=torch.float64), names_of(2, 9, 9, 2)
    wanted = module(x, key_index=index)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x, key_index=index), wanted, atol=1e-11, rtol=1e-11)
    module.kv_b_proj = torch.nn.Sequential(module.kv_b_proj)
    assert_close(module(x, key_index=index), wanted, atol=1e-11, rtol=1e-11)
    assert_close(module(x, key_index=index, need_weights=True)[0], wanted, atol=1e-11, rtol=1e-11)


def test_what_does_not_fit_is_refused():
    module, x = make(), torch.randn(2, 5, EMBED, dtype=torch.float64)
    for called, cache in ((module, attnpack.LatentCache()), (module.cpp(), attnpack.cpp.LatentCache())):
        for index in (names_of(1, 5, 5, 2), names_of(2, 4, 5, 2), names_of(2, 5, 5, 2).float()):
            with pytest.raises(ValueError, match="key_index"):
                called.forward(x, key_index=index, cache=cache)
        with pytest.raises(ValueError, match="key_index"):
            called.forward(x, key_index=torch.full((2, 1, 5, 1), 5), cache=cache)
        assert len(cache) == 0
    rows = torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
    with pytest.raises(ValueError, match="key_index"):
        module(rows, key_index=names_of(2, 5, 5, 2))
    for other in (attnpack.SelfAttention(EMBED), attnpack.DifferentialAttention(EMBED, 4, 2)):
        for called in (other, other.cpp()):
            with pytest.raises(TypeError, match="unexpected keyword argument 'key_index'"):
                called.forward(x.float(), key_index=names_of(2, 5, 5, 2))
    with (
        sharded_sequence(ShardedAttention()),
        pytest.raises(ValueError, match=r"key_index: got a tensor \[.*\], which is not supported over several"),
    ):
        attnpack.GroupedQueryAttention(EMBED, 4, 2)(x.float(), key_index=names_of(2, 5, 5, 2))


@pytest.mark.parametrize("language", ["python", "c++"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_modules_attend_named_keys(kv_heads, language):
    """Keys for all heads or for each kv head, with a cache and over that of another layer."""
    torch.manual_seed(0)
    rope = attnpack.RotaryEmbedding(6)
    module = attnpack.GroupedQueryAttention(EMBED, 4, 2, causal=True, window=(5, 0), rope=rope, dtype=torch.float64)
    called, classes = (module, attnpack) if language == "python" else (module.cpp(), attnpack.cpp)
    x = torch.randn(2, 9, EMBED, dtype=torch.float64, requires_grad=True)

    def names(rows, keys):
        index = torch.cat([names_of(2, rows, keys, 3) for _ in range(kv_heads)], 1)
        return index, as_mask(index, keys).repeat_interleave(4 // kv_heads, 1)

    (index, mask), weight = names(9, 9), torch.randn(2, 9, EMBED, dtype=torch.float64)
    wanted, weights = module(x, mask=mask, need_weights=True)
    (grad,) = torch.autograd.grad((wanted * weight).sum(), x)
    out = called.forward(x, key_index=index)
    assert_close(out, wanted, atol=1e-11, rtol=1e-11)
    assert_close(torch.autograd.grad((out * weight).sum(), x)[0], grad, atol=1e-10, rtol=1e-10)
    assert_close(called.forward(x, key_index=index.int(), need_weights=True)[1], weights, atol=1e-11, rtol=1e-11)
    with torch.no_grad():
        cache, other = classes.DynamicCache(), attnpack.DynamicCache()
        for part in x.split([6, 1, 2], 1):
            index, mask = names(part.size(1), len(cache) + part.size(1))
            wanted = module(part, mask=mask, cache=other)
            assert_close(called.forward(part, key_index=index, cache=cache), wanted, atol=1e-11, rtol=1e-11)
        index, mask = names(2, 9)
        wanted = module(x[:, 7:], mask=mask, kv_from=other)
        assert_close(called.forward(x[:, 7:], key_index=index, kv_from=cache), wanted, atol=1e-11, rtol=1e-11)
        context = torch.randn(2, 7, EMBED, dtype=torch.float64)
        index = torch.randint(0, 7, (2, kv_heads, 9, 3))
        mask = as_mask(index, 7).repeat_interleave(4 // kv_heads, 1)
        assert_close(called.forward(x, context, key_index=index), module(x, context, mask=mask), atol=1e-11, rtol=1e-11)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        index, mask = names(9, 9)
        assert_close(compiled(x, key_index=index), module(x, mask=mask), atol=1e-11, rtol=1e-11)
        with pytest.raises(ValueError, match="key_index"):
            called.forward(x, key_index=index + 18, cache=cache)
        with pytest.raises(ValueError, match="cache: got a SlidingWindowCache for attention over named keys"):
            called.forward(x, key_index=index, cache=classes.SlidingWindowCache(5))
        assert len(cache) == 9


@pytest.mark.parametrize("language", ["python", "c++"])
def test_grouped_modules_attend_named_blocks(language):
    """The keys of the blocks, by number, give the same; the last block is shorter."""
    torch.manual_seed(0)
    settings = {"causal": True, "sinks": True, "rope": attnpack.RotaryEmbedding(6), "dtype": torch.float64}
    module = attnpack.GroupedQueryAttention(EMBED, 4, 2, **settings)
    called, classes = (module, attnpack) if language == "python" else (module.cpp(), attnpack.cpp)
    x = torch.randn(2, 8, EMBED, dtype=torch.float64)

    def names(rows, keys):
        """Two of the blocks of 3 keys for each row and kv head, its own among them, and their keys."""
        own = torch.arange(keys - rows, keys).div(3, rounding_mode="floor").view(1, 1, -1, 1)
        other = (own - 1 - torch.randint(0, 2, (2, 2, rows, 1))).clamp(min=-1)
        blocks = torch.cat([own.expand_as(other), other], -1)
        named = blocks.unsqueeze(-1) * 3 + torch.arange(3)
        return blocks, named.masked_fill((blocks.unsqueeze(-1) < 0) | (named >= keys), -1).flatten(-2)

    with torch.no_grad():
        blocks, keys = names(8, 8)
        wanted, weights = module(x, key_index=keys, need_weights=True)
        assert not torch.equal(wanted, module(x))
        out = called.forward(x, key_index=blocks, key_block=3, need_weights=True)
        assert_close(out, (wanted, weights), atol=1e-12, rtol=1e-12)
        cache, other = classes.DynamicCache(), attnpack.DynamicCache()
        for part in x.split([5, 1, 2], 1):
            blocks, keys = names(part.size(1), len(cache) + part.size(1))
            wanted = module(part, key_index=keys, cache=other)
            found = called.forward(part, key_index=blocks, key_block=3, cache=cache)
            assert_close(found, wanted, atol=1e-12, rtol=1e-12)
        shared = called.forward(x[:, 6:], key_index=blocks, key_block=3, kv_from=cache)
        assert_close(shared, module(x[:, 6:], key_index=keys, kv_from=other), atol=1e-12, rtol=1e-12)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        blocks, keys = names(8, 8)
        found = compiled(x, key_index=blocks, key_block=3)
        assert_close(found, module(x, key_index=keys), atol=1e-12, rtol=1e-12)
        with pytest.raises(ValueError, match="key_block is 3 without key_index, wants 1"):
            called.forward(x, key_block=3)
        with pytest.raises(ValueError, match=r"key_index\[0, 0, 0, 0\] is 3, wants 0 to 2, the blocks of 3 keys in 8"):
            called.forward(x, key_index=torch.full((2, 1, 8, 1), 3), key_block=3)
    single = attnpack.SelfAttention(EMBED, 8)
    for refuses in (single, make().float()):
        for each in (refuses, refuses.cpp()):
            with pytest.raises(TypeError, match="unexpected keyword argument 'key_block'"):
                each.forward(x.float(), key_block=3)
    with (
        sharded_sequence(ShardedAttention()),
        pytest.raises(ValueError, match="key_block: got 3, which is not supported over several processes"),
    ):
        attnpack.GroupedQueryAttention(EMBED, 4, 2)(x.float(), key_block=3)
    rows = torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
    with pytest.raises(ValueError, match="key_block is given with nested tensors"):
        module(rows, key_block=3)
