"""SparseAttention against a dense mask of the same keys, and its indexer's loss against plain PyTorch."""

import attnpack
import pytest
import torch
from attnpack import reference
from attnpack.ops import select_blocks, select_keys
from marks import some_long
from module_cases import EMBED
from torch.testing import assert_close

SELECTORS = {
    "indexer": {"top_k": 4, "index_heads": 3, "index_head_dim": 8},
    "indexer with local keys": {"top_k": 5, "num_local": 2},
    "mean": {"selector": "mean", "top_k": 2, "key_block": 3},
    "max": {"selector": "max", "top_k": 2, "key_block": 2, "num_local": 0},
}
by_selector = pytest.mark.parametrize("selector", SELECTORS)


def make(selector="indexer", seed=0, **settings):
    torch.manual_seed(seed)
    usual = {"causal": True, "rope": attnpack.RotaryEmbedding(6), "dtype": torch.float64}
    return attnpack.SparseAttention(EMBED, 4, 2, **usual | SELECTORS.get(selector, {}) | settings)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def indexer(module, x):
    """The indexer's rotated queries and key, and its weights, in plain PyTorch."""
    query = (x @ module.index_q_proj.weight.T).unflatten(-1, (module.index_heads, -1)).transpose(1, 2)
    key = module.index_k_norm(x @ module.index_k_proj.weight.T).unsqueeze(1)
    return module.rope(query), module.rope(key), x @ module.index_weights_proj.weight.T


def chosen(module, x, causal=True):
    """bool [B, 1 or Hkv, L, L]: the keys that each query is to attend."""
    q, k, _ = module.project(x)
    if module.selector == "indexer":
        index = select_keys(*indexer(module, x), module.top_k, causal=causal, local_keys=module.num_local)
    else:
        settings = {"local_blocks": module.num_local, "scorer": module.selector, "causal": causal}
        index = select_blocks(q, k, module.key_block, module.top_k, **settings)
    blocks = -(-x.size(1) // module.key_block)
    named = torch.zeros(*index.shape[:3], blocks + 1, dtype=torch.bool)
    named = named.scatter(3, torch.where(index < 0, blocks, index).long(), True)[..., :blocks]
    return named.repeat_interleave(module.key_block, -1)[..., : x.size(1)]


def dense(module, x, causal=True):
    """The module's output with its selection as a dense mask."""
    q, k, v = module.project(x)
    mask = chosen(module, x, causal)
    mask = mask.repeat_interleave(4 // mask.size(1), 1)
    out = reference.attention(q, k, v, mask, causal=causal)
    return module.o_proj(out.transpose(1, 2).flatten(2))


@by_selector
@pytest.mark.parametrize("causal", [True, False])
def test_output_and_gradients_are_those_of_a_dense_mask(selector, causal):
    module, x = make(selector, bias=True), draw(2, 11, EMBED).requires_grad_()
    leaves = [x, *(p for name, p in module.named_parameters() if not name.startswith("index_"))]
    wanted = dense(module, x, causal)
    weight = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view_as(wanted)
    wanted_grads = torch.autograd.grad((wanted * weight).sum(), leaves)
    for each in (module, module.cpp()):
        out = each.forward(x, causal=causal)
        assert_close(out, wanted, atol=1e-12, rtol=1e-12)
        grads = torch.autograd.grad((out * weight).sum(), leaves)
        for ours, theirs in zip(grads, wanted_grads, strict=True):
            assert_close(ours, theirs, atol=1e-11, rtol=1e-11)
    assert not torch.allclose(wanted, module(x, mask=torch.ones(11, 11).bool().tril(), causal=False)) or causal


@by_selector
def test_weights_are_zero_where_no_key_is_named(selector):
    module, x = make(selector), draw(2, 11, EMBED)
    allowed = chosen(module, x) & torch.ones(11, 11).bool().tril()
    for each in (module, module.cpp()):
        out, weights = each.forward(x, need_weights=True)
        assert_close(out, module(x), atol=1e-12, rtol=1e-12)
        assert weights.shape == (2, 4, 11, 11)
        assert torch.equal(weights > 0, allowed.repeat_interleave(4 // allowed.size(1), 1))


@pytest.mark.parametrize("selector", ["indexer", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_keys_are_exactly_grouped_query_attention(selector, dtype):
    module = make(selector, top_k=11, dtype=dtype)
    grouped = attnpack.GroupedQueryAttention(EMBED, 4, 2, causal=True, rope=attnpack.RotaryEmbedding(6), dtype=dtype)
    grouped.load_state_dict({n: t for n, t in module.state_dict().items() if not n.startswith("index_")})
    x = torch.randn(2, 11, EMBED, dtype=dtype)
    for each, other in ((module, grouped), (module.cpp(), grouped.cpp())):
        assert torch.equal(each.forward(x), other.forward(x))


def caches_of(selector, classes=attnpack):
    if "indexer" not in selector:
        return {"cache": classes.DynamicCache()}
    return {"cache": classes.DynamicCache(), "index_cache": classes.LatentCache()}


@by_selector
@pytest.mark.parametrize("language", ["python", "c++"])
@torch.no_grad()
def test_by_tokens_and_chunks_as_the_whole_sequence(selector, language):
    module, x = make(selector), draw(2, 11, EMBED)
    whole = module(x)
    called, classes = (module, attnpack) if language == "python" else (module.cpp(), attnpack.cpp)
    for parts in ([1] * 11, [4, 1, 3, 3]):
        caches = caches_of(selector, classes)
        outs = [called.forward(part, **caches) for part in x.split(parts, 1)]
        assert_close(torch.cat(outs, 1), whole, atol=1e-12, rtol=1e-12)
        if "index_cache" in caches:
            assert caches["index_cache"].nbytes == 2 * 11 * module.index_head_dim * 8


@by_selector
@torch.no_grad()
def test_padded_sequences_and_other_caches(selector):
    module, x, lens = make(selector), draw(2, 11, EMBED), torch.tensor([11, 7])
    whole, short = module(x), module(x[1:, :7])
    out = module(x, kv_lens=lens)
    assert_close(out[:1], whole[:1], atol=1e-12, rtol=1e-12)
    assert_close(out[1:, :7], short, atol=1e-12, rtol=1e-12)
    for cache in (
        attnpack.StaticCache(2, 2, 13, 6, dtype=torch.float64),
        attnpack.PagedCache(2, 2, 6, num_pages=8, page_size=4, dtype=torch.float64),
    ):
        caches = caches_of(selector) | {"cache": cache}
        first = module(x, kv_lens=lens, **caches)
        assert_close(first[1:, :7], short, atol=1e-12, rtol=1e-12)
        after = module(x[:, :2], **caches)
        rows = [torch.cat([x[:1], x[:1, :2]], 1), torch.cat([x[1:, :7], x[1:, :2]], 1)]
        for b, row in enumerate(rows):
            assert_close(after[b], module(row)[0, -2:], atol=1e-12, rtol=1e-12)


@by_selector
def test_gradients_with_a_cache(selector):
    """The new tokens' gradients, with positions in the cache that have none."""
    module, x = make(selector), draw(1, 9, EMBED)
    caches = caches_of(selector)
    with torch.no_grad():
        module(x[:, :5], **caches)
    new = x[:, 5:].clone().requires_grad_()
    (grad,) = torch.autograd.grad(module(new, **caches).square().sum(), new)
    alone = x[:, 5:].clone().requires_grad_()
    (wanted,) = torch.autograd.grad(module(torch.cat([x[:, :5], alone], 1))[:, 5:].square().sum(), alone)
    assert_close(grad, wanted, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_the_loss_trains_the_indexer_alone(sparse, causal):
    module, x = make(causal=causal), draw(2, 9, EMBED).requires_grad_()
    q, k, v = module.project(x)
    allowed = torch.ones(2, 9, 9, dtype=torch.bool)
    allowed = allowed.tril() if causal else allowed
    if sparse:
        allowed = allowed & chosen(module, x, causal)[:, 0]
    probs = reference.attention_scores(q, k, allowed.unsqueeze(1)).detach()
    scores = reference.index_scores(*indexer(module, x.detach())) / (3 * 8) ** 0.5
    wanted = reference.indexer_loss(scores, probs, allowed)
    own = {n: p for n, p in module.named_parameters() if n.startswith("index_")}
    grads = torch.autograd.grad(wanted, own.values())
    for each in (module, module.cpp()):
        module.zero_grad()
        x.grad = None
        loss = each.indexer_loss(x, sparse=sparse)
        assert_close(loss, wanted, atol=1e-12, rtol=1e-12)
        loss.backward()
        for parameter, grad in zip(own.values(), grads, strict=True):
            assert_close(parameter.grad, grad, atol=1e-11, rtol=1e-11)
        others = [p.grad for n, p in module.named_parameters() if n not in own]
        assert x.grad is None and all(g is None for g in others)
    module.zero_grad()
    module(x).sum().backward()
    assert all(p.grad is None for p in own.values())


def test_the_loss_of_padded_sequences():
    """Rows after the end of a sequence count for nothing, whatever they hold."""
    module, x = make(), draw(2, 9, EMBED)
    lens = torch.tensor([9, 4])
    x[1, 4:] = torch.nan
    for sparse in (False, True):
        wanted = (
            9 * module.indexer_loss(x[:1], sparse=sparse) + 4 * module.indexer_loss(x[1:, :4], sparse=sparse)
        ) / 13
        for each in (module, module.cpp()):
            module.zero_grad()
            loss = each.indexer_loss(x.nan_to_num(0), sparse=sparse, kv_lens=lens)
            assert_close(loss, wanted, atol=1e-12, rtol=1e-12)
            loss.backward()
            assert all(p.grad.isfinite().all() for n, p in module.named_parameters() if n.startswith("index_"))


def test_training_by_the_loss_finds_the_keys_of_attention():
    """Warmed up, the indexer names keys that hold more of the attention than the keys that it named before."""
    module, x = make(dtype=torch.float32, seed=1), torch.randn(4, 32, EMBED)
    with torch.no_grad():
        module.q_proj.weight.mul_(4)  # sharp attention: there is something to find
    optimiser = torch.optim.Adam([p for n, p in module.named_parameters() if n.startswith("index_")], lr=1e-2)

    @torch.no_grad()
    def held():
        q, k, _ = module.project(x)
        probs = reference.attention_scores(q, k, causal=True)
        return float((probs * chosen(module, x)).sum(-1).mean())

    before, first = held(), float(module.indexer_loss(x))
    for _ in range(150):
        optimiser.zero_grad()
        loss = module.indexer_loss(x)
        loss.backward()
        optimiser.step()
    assert loss < 0.7 * first
    assert held() > before + 0.1


@pytest.mark.parametrize("selector", some_long(SELECTORS, ["indexer"]))
def test_state_dict_round_trip_and_compile(selector):
    module, x = make(selector, dtype=torch.float32), torch.randn(2, 11, EMBED)
    other = make(selector, dtype=torch.float32, seed=5)
    assert not torch.equal(other(x), module(x))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x), module(x))
    twin = other._make_cpp("cpu")
    assert twin.load_state_dict(module.state_dict()) == ([], [])
    assert torch.equal(twin.forward(x), module(x))
    assert torch.equal(attnpack.SparseAttention.from_cpp(twin)(x), module(x))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), module(x), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        caches = caches_of(selector)
        parts = [compiled(part, **caches) for part in x.split([5, 1, 5], 1)]
    assert_close(torch.cat(parts, 1), module(x), atol=1e-5, rtol=1e-5)


def test_a_block_takes_selectors_of_blocks():
    block = attnpack.DecoderBlock(make("mean", dtype=torch.float32), attnpack.FeedForward(EMBED, 32))
    x = torch.randn(2, 11, EMBED)
    assert torch.equal(block(x), block.cpp().forward(x))
    with torch.no_grad():
        cache = attnpack.DynamicCache()
        parts = torch.cat([block(part, cache=cache) for part in x.split(1, 1)], 1)
    assert_close(parts, block(x), atol=1e-5, rtol=1e-5)


WRONG_OPTIONS = {
    "selector: got 'best', want 'indexer', 'mean' or 'max'": {"selector": "best"},
    "top_k: got 0": {"top_k": 0},
    "key_block: got 4 for selector 'indexer', which names single keys": {"key_block": 4},
    "index_heads, index_head_dim: got one for selector 'mean'": {"selector": "mean", "index_heads": 2},
    "num_local: got 5, want 0 to 4, top_k": {"num_local": 5},
    "num_local: got 0, want 1 to 4, top_k; a causal 'mean'": {"selector": "mean", "num_local": 0, "causal": True},
    "rope: got dim 6, want at most 4": {"index_head_dim": 4, "rope": 6},
    "num_kv_heads: got 3, which does not divide num_heads 4": {"num_kv_heads": 3},
}


@pytest.mark.parametrize("message", WRONG_OPTIONS)
def test_wrong_options(message):
    for classes in (attnpack, attnpack.cpp):
        settings = {"num_kv_heads": 2, "top_k": 4} | WRONG_OPTIONS[message]
        if "rope" in settings:
            settings["rope"] = classes.RotaryEmbedding(settings["rope"])
        with pytest.raises(ValueError, match=message):
            classes.SparseAttention(EMBED, 4, **settings)
        with pytest.raises(TypeError, match="top_k"):
            classes.SparseAttention(EMBED, 4, 2)


@pytest.mark.parametrize("language", ["python", "c++"])
def test_wrong_calls_leave_the_caches_as_they_were(language):
    module, x = make(dtype=torch.float32), torch.randn(2, 5, EMBED)
    blocks = make("mean", dtype=torch.float32)
    ours = language == "python"
    classes = attnpack if ours else attnpack.cpp
    if not ours:
        module, blocks = module.cpp(), blocks.cpp()
    kept = caches_of("indexer", classes)
    with torch.no_grad():
        module.forward(x, **kept)
    longer, empty = kept["cache"], classes.LatentCache()
    wrong = [
        ("index_cache: got none beside cache", module, {"cache": longer}),
        ("index_cache: got one without cache", module, {"index_cache": empty}),
        ("index_cache: holds 0 positions, cache 5", module, {"cache": longer, "index_cache": empty}),
        ("index_cache: got one, but a selector of blocks", blocks, {"index_cache": empty}),
        ("cache: got a SlidingWindowCache .*named keys", blocks, {"cache": classes.SlidingWindowCache(8)}),
        ("cache: got a QuantizedCache .*named keys", blocks, {"cache": classes.QuantizedCache(8)}),
        ("cache: got a CrossCache", blocks, {"cache": classes.CrossCache()}),
    ]
    for message, called, inputs in wrong:
        with pytest.raises(ValueError, match=message):
            called.forward(x, **inputs)
    with pytest.raises(ValueError, match="mask"):
        module.forward(x, mask=torch.ones(3, 3).bool(), **kept)
    assert all(cache.lengths.tolist() == [5, 5] for cache in kept.values())
    with pytest.raises(ValueError, match="x: got shape"):
        module.indexer_loss(x[..., 1:])
    with pytest.raises(ValueError, match="indexer_loss: got selector 'mean', which has nothing to train"):
        blocks.indexer_loss(x)
    with pytest.raises((ValueError, TypeError), match="index_cache"):
        module.forward(x, cache=longer, index_cache=classes.DynamicCache())
    with pytest.raises(TypeError, match="unexpected keyword argument 'context'"):
        module.forward(x, context=x)


@by_selector
def test_positions_are_for_rope_alone(selector):
    """All positions moved by as much: the same distances, so the same choice, and causality as without them."""
    module, x = make(selector), draw(2, 11, EMBED)
    moved = torch.arange(11) + 5
    for each in (module, module.cpp()):
        assert_close(each.forward(x, positions=moved), module(x), atol=1e-6, rtol=1e-6)
        assert not torch.allclose(each.forward(x, positions=moved * 3), module(x), atol=1e-3)


def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.randn(3, EMBED), torch.randn(5, EMBED)], layout=torch.jagged)
    with pytest.raises(ValueError, match="x: got a nested tensor, SparseAttention wants a padded one"):
        make(dtype=torch.float32)(nested)
