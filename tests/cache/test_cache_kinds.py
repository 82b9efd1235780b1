"""A cache of the wrong kind is named, in one sentence."""

import attnpack
import pytest
import torch


@pytest.mark.parametrize("cache", (attnpack.ModelCache(2), "dynamic"), ids=("model", "text"))
def test_a_layer_wants_the_cache_of_a_layer(cache):
    with pytest.raises(TypeError, match="cache is a .*, MultiQueryAttention wants a DynamicCache or StaticCache"):
        attnpack.MultiQueryAttention(8, 2)(torch.randn(1, 3, 8), cache=cache)


def test_a_model_wants_the_cache_of_a_model():
    model = attnpack.CausalLM(vocab_size=11, embed_dim=8, num_layers=1, num_heads=2)
    ids = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(TypeError, match="cache is a DynamicCache, Decoder wants a ModelCache"):
        model(ids, attnpack.DynamicCache())
    with pytest.raises(TypeError, match="cache is a DynamicCache, generate wants a ModelCache"):
        model.generate(ids, max_new_tokens=1, cache=attnpack.DynamicCache())


def test_rope_scaling_wants_a_type():
    with pytest.raises(ValueError, match="scaling: got .* without rope_type"):
        attnpack.RotaryEmbedding(8, scaling={"factor": 2.0})
