"""SparseAttention over a SparseCache: the numbers of the whole sequence, and those of caches that keep nothing beside
the keys."""

import attnpack
import pytest
import torch
from attnpack.ops import select_blocks
from module_cases import EMBED
from torch.testing import assert_close

SELECTORS = {
    "indexer": {"top_k": 4, "index_heads": 3, "index_head_dim": 8},
    "indexer with local keys": {"top_k": 5, "num_local": 2},
    "mean": {"selector": "mean", "top_k": 2, "key_block": 3},
    "mean of large blocks": {"selector": "mean", "top_k": 1, "key_block": 8},
    "max": {"selector": "max", "top_k": 2, "key_block": 2, "num_local": 0},
}
by_selector = pytest.mark.parametrize("selector", SELECTORS)
by_language = pytest.mark.parametrize("language", ["python", "c++"])


def make(selector, dtype=torch.float64, **settings):
    torch.manual_seed(0)
    usual = {"causal": True, "rope": attnpack.RotaryEmbedding(6), "dtype": dtype}
    return attnpack.SparseAttention(EMBED, 4, 2, **usual | SELECTORS[selector] | settings)


def called(module, language):
    """The module to call, and the classes of its caches."""
    return (module, attnpack) if language == "python" else (module.cpp(), attnpack.cpp)


def other_caches(module, classes):
    caches = {"cache": classes.DynamicCache()}
    return caches | ({"index_cache": classes.LatentCache()} if module.selector == "indexer" else {})


@by_selector
@by_language
@torch.no_grad()
def test_by_tokens_and_chunks_as_the_whole_sequence(selector, language):
    module = make(selector)
    x = torch.randn(2, 29, EMBED, dtype=torch.float64)
    whole = module(x)
    each, classes = called(module, language)
    for parts in ([1] * 29, [4, 1, 3, 9, 12], [20, *[1] * 9]):
        cache = classes.SparseCache()
        outs = [each.forward(part, cache=cache) for part in x.split(parts, 1)]
        assert_close(torch.cat(outs, 1), whole, atol=1e-12, rtol=1e-12)


@by_selector
@by_language
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_sparse_cache_has_the_bits_of_other_caches(selector, language, dtype):
    """Ragged appends, weights, crop and reorder on the way."""
    module = make(selector, dtype)
    each, classes = called(module, language)
    sparse, others = classes.SparseCache(), other_caches(module, classes)

    def both(x, lens=None, **settings):
        kv_lens = None if lens is None else torch.tensor(lens)
        wanted = each.forward(x, kv_lens=kv_lens, **others, **settings)
        out = each.forward(x, kv_lens=kv_lens, cache=sparse, **settings)
        pairs = [(out, wanted)] if isinstance(out, torch.Tensor) else zip(out, wanted, strict=True)
        for ours, theirs in pairs:
            for b, n in enumerate([x.size(1)] * 2 if lens is None else lens):
                assert torch.equal(ours[b, ..., :n, :], theirs[b, ..., :n, :])

    def change(name, argument):
        for cache in (sparse, *others.values()):
            getattr(cache, name)(argument)

    torch.manual_seed(1)
    both(torch.randn(2, 17, EMBED, dtype=dtype), [17, 10])
    for _ in range(5):
        both(torch.randn(2, 1, EMBED, dtype=dtype))
    both(torch.randn(2, 4, EMBED, dtype=dtype), [0, 4])
    both(torch.randn(2, 1, EMBED, dtype=dtype), need_weights=True)
    change("crop", 14)
    for _ in range(4):
        both(torch.randn(2, 3, EMBED, dtype=dtype), [3, 1])
    change("reorder", torch.tensor([1, 0]))
    both(torch.randn(2, 1, EMBED, dtype=dtype))
    change("crop", 12)  # a whole number of blocks of 3
    for _ in range(9):
        both(torch.randn(2, 1, EMBED, dtype=dtype))
    sparse = sparse.clone()
    both(torch.randn(2, 30, EMBED, dtype=dtype))


def test_a_step_by_sums_does_not_read_the_keys_of_other_blocks():
    """The selection takes the sums, whatever the keys are; attention reads only the chosen blocks."""
    module = make("mean", top_k=2)
    cache = attnpack.SparseCache()
    with torch.no_grad():
        module(torch.randn(1, 30, EMBED, dtype=torch.float64), cache=cache)
        x = torch.randn(1, 1, EMBED, dtype=torch.float64)
        _, weights = module(x, cache=cache.clone(), need_weights=True)
        unread = (weights[0] == 0).unflatten(0, (2, 2)).all(1)  # [Hkv, keys]
        assert unread.sum() >= 2 * 20
        wanted = module(x, cache=cache.clone())
        cache.k[0].masked_fill_(unread[:, 0, :30].unsqueeze(-1), torch.nan)
        assert torch.equal(module(x, cache=cache), wanted)


@by_selector
def test_gradients_with_a_cache(selector):
    module = make(selector)
    x = torch.randn(1, 9, EMBED, dtype=torch.float64)
    cache = attnpack.SparseCache()
    with torch.no_grad():
        module(x[:, :5], cache=cache)
    new = x[:, 5:].clone().requires_grad_()
    (grad,) = torch.autograd.grad(module(new, cache=cache).square().sum(), new)
    alone = x[:, 5:].clone().requires_grad_()
    (wanted,) = torch.autograd.grad(module(torch.cat([x[:, :5], alone], 1))[:, 5:].square().sum(), alone)
    assert_close(grad, wanted, atol=1e-11, rtol=1e-11)
    assert cache.index is None or not cache.index.requires_grad


@pytest.mark.long
@pytest.mark.parametrize("selector", SELECTORS)
@torch.no_grad()
def test_compiled(selector):
    module = make(selector, torch.float32)
    x, cache = torch.randn(2, 20, EMBED), attnpack.SparseCache()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    parts = [compiled(part, cache=cache) for part in x.split([7, 1, 1, 1, 5, 1, 4], 1)]
    assert_close(torch.cat(parts, 1), module(x), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_rope_that_rotates_stored_keys_again_keeps_no_sums():
    rope = attnpack.RotaryEmbedding(6, max_positions=8, scaling={"rope_type": "dynamic", "factor": 2.0})
    module, cache = make("mean", rope=rope), attnpack.SparseCache()
    x = torch.randn(2, 20, EMBED, dtype=torch.float64)
    other = attnpack.DynamicCache()
    for part in x.split([7, *[1] * 13], 1):
        assert torch.equal(module(part, cache=cache), module(part, cache=other))
    assert cache.index is None


def blocks_of(selector):
    """Two decoder blocks in a stack."""
    layers = [
        attnpack.DecoderBlock(make(selector), attnpack.FeedForward(EMBED, 32, dtype=torch.float64)) for _ in range(2)
    ]
    return attnpack.Decoder(layers)


@by_selector
@by_language
@torch.no_grad()
def test_a_decoder_step_by_step_is_the_whole_call(selector, language):
    stack = blocks_of(selector)
    x = torch.randn(2, 26, EMBED, dtype=torch.float64)
    whole = stack(x)
    made = stack if language == "python" else stack.cpp()
    cache, forward = made.new_cache(), made.forward
    outs = [forward(part, cache=cache) for part in x.split([5, *[1] * 21], 1)]
    assert_close(torch.cat(outs, 1), whole, atol=1e-12, rtol=1e-12)
    assert type(cache.layers[0]).__name__ == "SparseCache"
    cache.crop(9)
    assert_close(forward(x[:, 9:12], cache=cache), whole[:, 9:12], atol=1e-12, rtol=1e-12)


@by_selector
@torch.no_grad()
def test_encoder_decoder_generates_step_by_step(selector):
    """The tokens of `generate`, whose caches the modules make, are those of whole calls."""
    torch.manual_seed(0)
    dtype = {"dtype": torch.float64}
    encoder = attnpack.Encoder(
        [
            attnpack.EncoderBlock(
                attnpack.MultiHeadAttention(EMBED, 4, **dtype), attnpack.FeedForward(EMBED, 32, **dtype)
            )
        ]
    )
    block = attnpack.DecoderBlock(
        make(selector),
        attnpack.FeedForward(EMBED, 32, **dtype),
        cross_attention=attnpack.MultiHeadAttention(EMBED, 4, **dtype),
    )
    decoder = attnpack.Decoder([block], embed_tokens=torch.nn.Embedding(19, EMBED, **dtype))
    model, head = attnpack.EncoderDecoder(encoder, decoder), torch.nn.Linear(EMBED, 19, **dtype)
    source, ids = torch.randn(2, 5, EMBED, **dtype), torch.tensor([[1], [2]])
    for _ in range(14):
        ids = torch.cat([ids, head(model(source, ids))[:, -1:].argmax(-1)], 1)
    made = model.generate(source, ids[:, :1], max_new_tokens=14, head=head)
    assert torch.equal(made, ids)


@by_language
@torch.no_grad()
def test_a_failed_call_leaves_the_cache_as_it_was(language):
    for selector in ("indexer", "mean"):
        module = make(selector, torch.float32)
        each, classes = called(module, language)
        x, cache = torch.randn(2, 7, EMBED), classes.SparseCache()
        with pytest.raises(ValueError, match="mask"):
            each.forward(x, mask=torch.ones(3, 3).bool(), cache=cache)
        assert len(cache) == 0 and cache.index is None and cache.nbytes_allocated == 0
        each.forward(x, cache=cache)
        before, sizes = cache.clone(), cache.nbytes_allocated
        for _ in range(2):
            with pytest.raises(ValueError, match="mask"):
                each.forward(x, mask=torch.ones(3, 3).bool(), cache=cache)
        assert cache.nbytes_allocated == sizes and cache.lengths.tolist() == [7, 7]
        wanted = each.forward(x[:, :1], cache=before)
        assert torch.equal(each.forward(x[:, :1], cache=cache), wanted)


@by_language
@torch.no_grad()
def test_another_layer_is_refused_the_cache(language):
    classes = attnpack if language == "python" else attnpack.cpp
    x = torch.randn(2, 7, EMBED)

    def layer(name, **settings):
        module = make(name, torch.float32, **settings)
        return module if language == "python" else module.cpp()

    grouped = classes.GroupedQueryAttention(EMBED, 4, 2)
    indexer, mean, larger = layer("indexer"), layer("mean"), layer("mean", key_block=4)
    for first, then, message in (
        (indexer, mean, "cache: got one that keeps no sums of blocks of 3 keys"),
        (grouped, mean, "cache: got one that keeps no sums of blocks of 3 keys"),
        (mean, larger, "cache: got one that keeps no sums of blocks of 4 keys"),
        (mean, indexer, "cache: got one whose positions have no keys of an indexer"),
        (grouped, indexer, "cache: got one whose positions have no keys of an indexer"),
        (mean, grouped, "cache: got a SparseCache that serves a selector"),
        (indexer, grouped, "cache: got a SparseCache that serves a selector"),
    ):
        cache = classes.SparseCache()
        first.forward(x, cache=cache)
        with pytest.raises(ValueError, match=message):
            then.forward(x, cache=cache)
        assert cache.lengths.tolist() == [7, 7]
        cache.reset()
        then.forward(x, cache=cache)
    with pytest.raises(ValueError, match="index_cache: got one beside a SparseCache"):
        indexer.forward(x, cache=classes.SparseCache(), index_cache=classes.LatentCache())
    max_of_blocks, cache = layer("max"), classes.SparseCache()
    max_of_blocks.forward(x, cache=cache)
    grouped.forward(x, cache=cache)  # "max" keeps nothing


def test_block_sums_must_fit():
    query, key = torch.randn(2, 4, 1, 6), torch.randn(2, 2, 9, 6)
    sums = torch.stack([part.sum(2) for part in key.split(4, 2)], 2)
    wanted = select_blocks(query, key, 4, 2)
    assert torch.equal(select_blocks(query, torch.full_like(key, torch.nan), 4, 2, block_sums=sums), wanted)
    for wrong in (sums[:, :, :2], sums[:, :1], sums.double(), sums[0]):
        with pytest.raises(ValueError, match="block_sums has shape"):
            select_blocks(query, key, 4, 2, block_sums=wrong)
    with pytest.raises(ValueError, match="block_sums: got some for scorer 'max'"):
        select_blocks(query, key, 4, 2, scorer="max", block_sums=sums)


def test_attend_refuses_sums_that_it_would_leave_behind():
    x, lengths = torch.randn(1, 2, 3, 6), torch.zeros(1, dtype=torch.int64)
    room = attnpack.ops.CacheTensors(x.clone(), x.clone(), lengths, block_sums=torch.zeros(1, 2, 4, 6))
    with pytest.raises(ValueError, match="cache_block_sums: got a tensor, but this call does not choose blocks"):
        attnpack.ops.attend(x, x, x, cache=room)
    with pytest.raises(ValueError, match="cache_block_sums has shape"):
        short = room._replace(block_sums=torch.zeros(1, 2, 1, 6))
        attnpack.ops.attend(x, x, x, cache=short, key_block=3, top_blocks=1, local_blocks=1)
    with pytest.raises(ValueError, match="block is 0, wants at least 1 key"):
        attnpack.ops.attend(x, x, x, cache=room, key_block=0, top_blocks=1, local_blocks=1)
    assert lengths.tolist() == [0]
