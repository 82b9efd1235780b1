"""Caches under torch.compile(fullgraph=True): a StaticCache takes one graph for all steps, a DynamicCache few."""

import attnpack
import pytest
import torch
from marks import long


def grouped_layer():
    return attnpack.GroupedQueryAttention(24, 4, 2, causal=True, rope=attnpack.RotaryEmbedding(6))


def sparse_layer():
    return attnpack.SparseAttention(24, 4, 2, selector="mean", top_k=2, key_block=2, causal=True)


def latent_layer():
    sizes = {"kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    return attnpack.MultiHeadLatentAttention(24, 2, **sizes, rope=attnpack.RotaryEmbedding(4), causal=True)


def sparse_latent_layer():
    sizes = {"q_lora_rank": 6, "kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    rope = attnpack.RotaryEmbedding(4, interleaved=True)
    return attnpack.SparseLatentAttention(24, 2, top_k=4, **sizes, rope=rope, causal=True)


def windowed_layer():
    return attnpack.GroupedQueryAttention(24, 4, 2, causal=True, rope=attnpack.RotaryEmbedding(6), window=(20, 0))


def sliding_cache():
    return attnpack.SlidingWindowCache(20)


def static_cache():
    return attnpack.StaticCache(2, 2, 16, 6)


def static_latents():
    return attnpack.StaticCache(2, 1, 16, 9, v_head_dim=0)


def graphs_of(call, make, inputs, backend):
    """The number of graphs of a compiled call on a cache, whose results and cache are compared with the eager ones."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    cache, eager = make(), make()
    with torch.no_grad():
        for x in inputs:
            torch.testing.assert_close(compiled(cache, x), call(eager, x), rtol=1e-5, atol=1e-6)
            assert torch.equal(cache.lengths, eager.lengths) and len(cache) == len(eager)
            assert cache.nbytes == eager.nbytes
            torch.testing.assert_close((cache.k, cache.v), (eager.k, eager.v), rtol=1e-5, atol=1e-6)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("backend", "graphs"),
    # The first append, the second (its length is still a constant), then one where there is room and one where the
    # cache grows. The last backends also tell a call whose outputs are its inputs from one whose outputs are new.
    [long("eager", 4), ("aot_eager", 5), long("inductor", 5)],
)
@pytest.mark.parametrize(
    ("layer", "make"),
    [
        (grouped_layer, attnpack.DynamicCache),
        (latent_layer, attnpack.LatentCache),
        long(sparse_layer, attnpack.SparseCache),
        long(sparse_latent_layer, attnpack.LatentCache),
    ],
)
def test_a_cache_that_grows_compiles_to_few_graphs(layer, make, backend, graphs):
    torch.manual_seed(0)
    layer, steps = layer().eval(), [torch.randn(2, 3, 24), *torch.randn(2, 20, 24).split(1, 1)]
    assert graphs_of(lambda cache, x: layer(x, cache=cache), make, steps, backend) <= graphs


@pytest.mark.parametrize(("backend", "graphs"), [long("eager", 6), ("aot_eager", 8), long("inductor", 8)])
@pytest.mark.parametrize("keep_first", [long(0), 2])
def test_a_sliding_cache_compiles_to_few_graphs(backend, graphs, keep_first):
    """Those of a cache that grows, and one where it slides."""
    torch.manual_seed(0)
    layer, steps = windowed_layer().eval(), [torch.randn(2, 250, 24), *torch.randn(2, 160, 24).split(1, 1)]
    made = graphs_of(
        lambda cache, x: layer(x, cache=cache),
        lambda: attnpack.SlidingWindowCache(20, keep_first=keep_first),
        steps,
        backend,
    )
    assert made <= graphs


@pytest.mark.parametrize(
    ("layer", "make", "backend"),
    [
        (grouped_layer, static_cache, "inductor"),
        (latent_layer, static_latents, "aot_eager"),
        long(grouped_layer, static_cache, "aot_eager"),
        long(latent_layer, static_latents, "inductor"),
    ],
)
def test_static_cache_compiles_once_for_all_steps(layer, make, backend):
    torch.manual_seed(0)
    layer, steps = layer().eval(), torch.randn(2, 12, 24).split(1, 1)
    assert graphs_of(lambda cache, x: layer(x, cache=cache), make, steps, backend) == 1


def test_static_model_cache_compiles_once_for_all_steps():
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = attnpack.CausalLM(32, 24, 2, 4, 2, hidden_dim=32).eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    cache = attnpack.ModelCache([attnpack.StaticCache(1, 2, 8, 6) for _ in range(2)])
    ids = torch.randint(32, (1, 8))
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        steps = torch.cat([compiled(token, cache) for token in ids.split(1, 1)], 1)
        torch.testing.assert_close(steps, model(ids), rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# Changes that a compiled function makes to its cache, in addition to calls of forward.
CHANGES = {
    "crop": lambda cache: cache.crop(3),
    "crop to nothing": lambda cache: cache.crop(0),
    "reset": lambda cache: cache.reset(),
    "reorder": lambda cache: cache.reorder(torch.tensor([1, 0])),
    "reorder by a list": lambda cache: cache.reorder([1, 0]),
    "clone": lambda cache: cache.clone().reset(),
}


# A DynamicCache reads its new length when it is reordered, which one graph cannot do.
@pytest.mark.parametrize(
    ("make", "change"),
    [(static_cache, name) if name in ("crop", "reorder", "clone") else long(static_cache, name) for name in CHANGES]
    + [(sliding_cache, name) if name == "reorder" else long(sliding_cache, name) for name in CHANGES]
    + [
        (attnpack.DynamicCache, "crop"),
        *(long(attnpack.DynamicCache, name) for name in ("crop to nothing", "reset", "clone")),
    ],
)
def test_a_compiled_function_changes_its_cache(make, change):
    torch.manual_seed(0)
    layer = windowed_layer().eval()

    def call(cache, x):
        out = layer(x, cache=cache)
        CHANGES[change](cache)
        return out + layer(x, cache=cache)

    steps = torch.randn(2, 5, 24).split(1, 1)
    assert graphs_of(call, make, steps, "aot_eager") <= (1 if make is static_cache else 5)


@pytest.mark.parametrize("change", ["reorder", long("reorder by a list")])
def test_a_static_cache_is_reordered_in_the_graph_that_wrote_it(change):
    """By inductor, which fuses a copy in place with what it reads."""
    torch.manual_seed(0)
    layer = grouped_layer().eval()

    def call(cache, x):
        out = layer(x, cache=cache)
        CHANGES[change](cache)
        return out

    assert graphs_of(call, static_cache, torch.randn(2, 5, 24).split([3, 1, 1], 1), "inductor") <= 2


@pytest.mark.parametrize("make", [attnpack.DynamicCache, long(static_cache), long(sliding_cache)])
def test_a_compiled_function_makes_its_own_cache(make):
    torch.manual_seed(0)
    layer = windowed_layer().eval()

    def call(cache, x):
        own = make()
        layer(x, cache=own)
        layer(x, cache=cache)
        return layer(x, cache=own)

    assert graphs_of(call, static_cache, torch.randn(2, 3, 24).split(1, 1), "aot_eager") == 1


@torch.no_grad()
def test_ragged_appends_of_a_compiled_layer():
    """Their longest sequence is read: the call falls into several graphs, and is right."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer, lens = grouped_layer().eval(), torch.tensor([1, 2])
    compiled = torch.compile(layer, backend="aot_eager")
    cache, eager = attnpack.DynamicCache(), attnpack.DynamicCache()
    for x in torch.randn(2, 6, 24).split(2, 1):
        wanted = layer(x, cache=eager, kv_lens=lens)
        torch.testing.assert_close(compiled(x, cache=cache, kv_lens=lens), wanted, rtol=1e-5, atol=1e-6)
        assert len(cache) == len(eager) and torch.equal(cache.lengths, eager.lengths)
