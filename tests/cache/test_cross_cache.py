"""CrossCache: a context is projected once; calls that read it give what calls with the context give."""

import copy
import pickle

import attnpack
import pytest
import torch
from marks import long

packages = pytest.mark.parametrize("package", [attnpack, attnpack.cpp], ids=["python", "cpp"])
ROPES = {
    "none": None,
    "plain": {},
    "dynamic": {"max_positions": 3, "scaling": {"rope_type": "dynamic", "factor": 2.0}},
}


def forbid(*projections):
    """Makes what these projections give wrong."""
    for projection in projections:
        projection.weight.data.fill_(torch.nan)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("settings", [{}, {"qk_norm": True, "softcap": 5.0}, {"causal": True, "sinks": True}], ids=str)
@torch.no_grad()
def test_later_calls_need_no_context(rope, settings):
    torch.manual_seed(0)
    if ROPES[rope] is not None:
        settings = {**settings, "rope": attnpack.RotaryEmbedding(6, **ROPES[rope])}
    layer = attnpack.GroupedQueryAttention(24, 4, 2, kdim=16, vdim=12, **settings).eval()
    context, values, lens = torch.randn(2, 7, 16), torch.randn(2, 7, 12), torch.tensor([7, 4])
    steps = torch.randn(2, 6, 24).split([3, 1, 2], 1)
    given = {"value_context": values, "kv_lens": lens}
    wanted = [layer(x, context, **given, positions=torch.arange(x.size(1)) + 5) for x in steps]
    for twin in (layer, layer.cpp()):
        cache = attnpack.CrossCache() if twin is layer else attnpack.cpp.CrossCache()
        for i, x in enumerate(steps):
            arguments = {"context": context, **given} if i == 0 else {}
            if i == 2:
                arguments = {"context": torch.full_like(context, torch.nan)}  # given again, not read
            out = twin.forward(x, cache=cache, positions=torch.arange(x.size(1)) + 5, **arguments)
            assert torch.equal(out, wanted[i])
        assert cache.filled and len(cache) == 7 and cache.lengths.tolist() == [7, 4]
        assert cache.k.shape == cache.v.shape == (2, 2, 7, 6)
        assert cache.nbytes == cache.nbytes_allocated == 2 * 2 * 7 * 12 * 4
        fewer = torch.tensor([3, 3])
        assert torch.equal(
            twin.forward(steps[0], cache=cache, kv_lens=fewer, positions=torch.arange(3)),
            layer(steps[0], context, value_context=values, kv_lens=fewer, positions=torch.arange(3)),
        )


@torch.no_grad()
def test_the_context_is_projected_once():
    layer, cache = attnpack.MultiHeadAttention(24, 4).eval(), attnpack.CrossCache()
    context, x = torch.randn(2, 5, 24), torch.randn(2, 1, 24)
    wanted, weights = layer(x, context, need_weights=True)
    assert torch.equal(layer(x, context, cache=cache), wanted)
    forbid(layer.k_proj, layer.v_proj)
    assert torch.equal(layer(x, context, cache=cache), wanted)
    assert torch.equal(layer(x, cache=cache, need_weights=True)[1], weights)
    mask = torch.tensor([True, False, True, True, False])
    assert torch.equal(layer(x, cache=cache, mask=mask), layer(x, cache=cache, mask=mask[None, None, None]))
    single, held = attnpack.SelfAttention(24).eval(), attnpack.CrossCache()
    wanted = single(x, context)
    single(x, context, cache=held)
    forbid(single.k_proj, single.v_proj)
    assert torch.equal(single(x, cache=held), wanted)


def test_gradients_flow_through_the_first_call_alone():
    torch.manual_seed(0)
    layer, cache = attnpack.GroupedQueryAttention(24, 4, 2), attnpack.CrossCache()
    context, x = torch.randn(2, 5, 24, requires_grad=True), torch.randn(2, 3, 24)
    wanted = torch.autograd.grad(layer(x, context).square().sum(), [context, *layer.parameters()])
    got = torch.autograd.grad(layer(x, context, cache=cache).square().sum(), [context, *layer.parameters()])
    torch.testing.assert_close(got, wanted)
    assert not cache.k.requires_grad
    layer(x, cache=cache).sum().backward()
    assert context.grad is None and layer.k_proj.weight.grad is None and layer.q_proj.weight.grad.any()


@packages
@torch.no_grad()
def test_what_does_not_fit_is_named_and_changes_nothing(package):
    layer, cache = package.GroupedQueryAttention(24, 4, 2), package.CrossCache()
    context, x = torch.randn(2, 5, 24), torch.randn(2, 3, 24)
    with pytest.raises(ValueError, match="context: got none with an empty CrossCache"):
        layer.forward(x, cache=cache)
    with pytest.raises(ValueError, match=r"kv_lens\[1\] is 6"):
        layer.forward(x, context=context, cache=cache, kv_lens=torch.tensor([1, 6]))
    assert not cache.filled and cache.k is None and len(cache) == 0 and cache.nbytes == 0
    out = layer.forward(x, context=context, cache=cache)
    for other in (torch.randn(2, 6, 24), torch.randn(1, 5, 24)):
        with pytest.raises(ValueError, match=r"context: got shape .* reads no other; reset\(\) it"):
            layer.forward(x, context=other, cache=cache)
    with pytest.raises(ValueError, match="x: got batch 1, want 2 as the CrossCache holds"):
        layer.forward(x[:1], cache=cache)
    with pytest.raises(ValueError, match="n: got 3, but a CrossCache holds a whole context"):
        cache.crop(3)
    with pytest.raises(ValueError, match="cache: got one together with context"):
        layer.forward(x, context=context, cache=package.DynamicCache())
    projected = package.ProjectedAttention(2, 2, 12)
    with pytest.raises(ValueError, match="ProjectedAttention is given its keys"):
        projected.forward(x, x, x, cache=cache)
    sizes = {"kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 0, "v_head_dim": 4}
    with pytest.raises(ValueError, match="cache: got a CrossCache, want a LatentCache"):
        package.MultiHeadLatentAttention(24, 2, **sizes).forward(x, cache=cache)
    assert torch.equal(layer.forward(x, cache=cache), out)
    cache.reset()
    assert not cache.filled
    layer.forward(x, context=torch.randn(2, 9, 24), cache=cache)
    assert len(cache) == 9
    if package is attnpack:
        with pytest.raises(ValueError, match="got a CrossCache, want one that appends"):
            cache.reserve(x[:, None], x[:, None])
        with pytest.raises(ValueError, match="to which nothing is appended"):
            cache.commit(1, None)


@torch.no_grad()
def test_copies_and_reorder():
    layer, cache = attnpack.GroupedQueryAttention(24, 4, 2).eval(), attnpack.CrossCache()
    x, context = torch.randn(2, 3, 24), torch.randn(2, 5, 24)
    assert not pickle.loads(pickle.dumps(cache)).filled
    out = layer(x, context, cache=cache, kv_lens=torch.tensor([5, 2]))
    for copied in (cache.clone(), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert type(copied) is attnpack.CrossCache and repr(copied) == repr(cache)
        assert torch.equal(layer(x, cache=copied), out)
        copied.k.zero_()
    assert torch.equal(layer(x, cache=cache), out)
    cache.reorder([1, 0, 1])
    torch.testing.assert_close(layer(x[[1, 0, 1]], cache=cache), out[[1, 0, 1]])
    assert cache.lengths.tolist() == [2, 5, 2]


def decoder(package, layers=2):
    def attention():
        return package.MultiHeadAttention(24, 4)

    return package.Decoder(
        [
            package.DecoderBlock(attention(), package.FeedForward(24, 32), cross_attention=attention())
            for _ in range(layers)
        ]
    )


@packages
@torch.no_grad()
def test_a_decoder_reads_its_context_once(package):
    torch.manual_seed(0)
    model, context, x = decoder(package), torch.randn(2, 5, 24), torch.randn(2, 6, 24)
    wanted = model.forward(x, context=context, context_lens=torch.tensor([5, 3]))
    self_cache = package.ModelCache(2)
    cross = package.ModelCache([package.CrossCache(), package.CrossCache()])
    for i, part in enumerate(x.split([3, 1, 2], 1)):
        arguments = {"context": context, "context_lens": torch.tensor([5, 3])} if i == 0 else {}
        out = model.forward(part, cache=self_cache, cross_cache=cross, **arguments)
        begin = (0, 3, 4)[i]
        torch.testing.assert_close(out, wanted[:, begin : begin + part.size(1)], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="context: got none, but this block has cross-attention"):
        model.forward(x, cross_cache=package.ModelCache([package.CrossCache(), package.CrossCache()]))
    with pytest.raises(ValueError, match="cross_cache: got a cache that appends, want a CrossCache"):
        model.forward(x, context=context, cross_cache=package.ModelCache(2))
    with pytest.raises(ValueError, match="cache: got a CrossCache, want the cache of self-attention"):
        model.forward(x, context=context, cache=cross)
    with pytest.raises(ValueError, match="cache: got one of 1 layers, want 2"):
        model.forward(x, cross_cache=package.ModelCache([package.CrossCache()]))
    plain = package.DecoderBlock(package.MultiHeadAttention(24, 4), package.FeedForward(24, 32))
    with pytest.raises(ValueError, match="this block has no cross-attention"):
        plain.forward(x, cross_cache=package.CrossCache())


@torch.no_grad()
def test_a_failed_decoder_call_leaves_both_caches():
    torch.manual_seed(0)
    model, context, x = decoder(attnpack), torch.randn(2, 5, 24), torch.randn(2, 6, 24)
    self_cache, cross = attnpack.ModelCache(2), attnpack.ModelCache([attnpack.CrossCache(), attnpack.CrossCache()])
    broken = model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x, context, cache=self_cache, cross_cache=cross)
    broken.remove()
    assert [held.filled for held in cross] == [False, False] and len(self_cache) == 0


@packages
@torch.no_grad()
def test_an_encoder_decoder_runs_its_encoder_once(package):
    torch.manual_seed(0)
    encoder = package.Encoder([package.EncoderBlock(package.MultiHeadAttention(24, 4), package.FeedForward(24, 32))])
    model = package.EncoderDecoder(encoder, decoder(package))
    source, target, lens = torch.randn(2, 5, 24), torch.randn(2, 4, 24), torch.tensor([5, 2])
    wanted = model.forward(source, target, source_lens=lens)
    self_cache = package.ModelCache(2)
    cross = package.ModelCache([package.CrossCache(), package.CrossCache()])
    for i, part in enumerate(target.split(1, 1)):
        arguments = {"source": source, "source_lens": lens} if i == 0 else {"source": None}
        out = model.forward(target=part, cache=self_cache, cross_cache=cross, **arguments)
        torch.testing.assert_close(out, wanted[:, i : i + 1], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="source: got none"):
        model.forward(None, target)


@pytest.mark.parametrize("backend", ["aot_eager", long("inductor")])
@torch.no_grad()
def test_a_compiled_layer_fills_and_reads_it(backend):
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer = attnpack.GroupedQueryAttention(24, 4, 2, rope=attnpack.RotaryEmbedding(6)).eval()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    cache, eager, context = attnpack.CrossCache(), attnpack.CrossCache(), torch.randn(2, 5, 24)
    torch._dynamo.utils.counters.clear()
    for i, x in enumerate(torch.randn(2, 4, 24).split(1, 1)):
        arguments = {"context": context} if i == 0 else {}
        wanted = layer(x, cache=eager, **arguments)
        torch.testing.assert_close(compiled(x, cache=cache, **arguments), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(cache.k, eager.k) and torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def rotating_block(package, kind, **settings):
    """A decoder block whose cross-attention rotates, or has other settings."""
    rope = package.RotaryEmbedding(6)
    if kind == "latent":
        cross = package.MultiHeadLatentAttention(
            24, 4, kv_lora_rank=10, qk_nope_head_dim=5, qk_rope_head_dim=6, v_head_dim=7, rope=rope
        )
    else:
        cross = package.MultiHeadAttention(24, 4, **(settings or {"rope": rope}))
    own = package.MultiHeadAttention(24, 4, rope=rope)
    return package.DecoderBlock(own, package.FeedForward(24, 32), cross_attention=cross)


@packages
@pytest.mark.parametrize("kind", ["heads", "latent"])
@torch.no_grad()
def test_a_cache_keeps_the_positions_of_rotated_queries(package, kind):
    """Cross-attention knows nothing of the tokens before x: the block gives it their positions."""
    torch.manual_seed(0)
    block, context, x = rotating_block(package, kind), torch.randn(2, 5, 24), torch.randn(2, 6, 24)
    wanted = block.forward(x, context)
    first = block.forward(x[:, 3:4], context, positions=torch.tensor([3]))
    assert not torch.allclose(first, block.forward(x[:, 3:4], context), atol=1e-3), "positions do not matter"
    for cache in (package.DynamicCache(), package.StaticCache(2, 4, 6, 6)):
        for i, part in enumerate(x.split([3, 1, 2], 1)):
            out = block.forward(part, context, cache=cache)
            begin = (0, 3, 4)[i]
            torch.testing.assert_close(out, wanted[:, begin : begin + part.size(1)], rtol=1e-5, atol=1e-5)


@packages
@torch.no_grad()
def test_rotated_queries_of_ragged_rows_keep_their_positions(package):
    torch.manual_seed(0)
    block, context, x = rotating_block(package, "heads"), torch.randn(2, 5, 24), torch.randn(2, 6, 24)
    wanted, cache, lens = block.forward(x, context), package.DynamicCache(), torch.tensor([4, 2])
    block.forward(x[:, :4], context, cache=cache, kv_lens=lens)
    following = torch.stack([x[b, n : n + 2] for b, n in enumerate(lens.tolist())])
    out = block.forward(following, context, cache=cache)
    for b, n in enumerate(lens.tolist()):
        torch.testing.assert_close(out[b], wanted[b, n : n + 2], rtol=1e-5, atol=1e-5)


@packages
@pytest.mark.parametrize("settings", [{"window": (2, 2)}, {"alibi": True}], ids=str)
@torch.no_grad()
def test_a_cache_beside_cross_attention_that_counts_distances_is_refused(package, settings):
    torch.manual_seed(0)
    block, context, x = rotating_block(package, "heads", **settings), torch.randn(2, 5, 24), torch.randn(2, 3, 24)
    block.forward(x, context)
    cache = package.DynamicCache()
    with pytest.raises(ValueError, match="cache: got one for a block whose cross-attention has a window or ALiBi"):
        block.forward(x, context, cache=cache)
    assert len(cache) == 0
