"""Static caches under torch.compile: one graph for all steps."""

import attnpack
import torch


def test_static_cache_compiles_once_for_all_steps():
    torch.manual_seed(0)
    layer = attnpack.GroupedQueryAttention(24, 4, 2, causal=True, rope=attnpack.RotaryEmbedding(6))
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    x, cache, eager = torch.randn(2, 12, 24), attnpack.StaticCache(2, 2, 12, 6), attnpack.StaticCache(2, 2, 12, 6)
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        for token in x.split(1, 1):
            torch.testing.assert_close(compiled(token, cache=cache), layer(token, cache=eager), rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert len(cache) == 12 and torch.equal(cache.lengths, eager.lengths)


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
