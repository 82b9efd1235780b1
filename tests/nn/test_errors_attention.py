"""Wrong inputs of attention layers: one sentence with the argument's name and the fix, in both languages alike, before
anything is written."""

import attnpack
import pytest
import torch
from errors import A_TENSOR, X, attention, both, complains_of_keywords, complaint, decoder_block
from latent_cases import HEADS, PATHS, SIZES, E, make_layer

KEYWORDS = {
    "grouped": lambda m, **k: attention(m).forward(X, **k),
    "self": lambda m, **k: m.SelfAttention(24).forward(X, **k),
    "multi-query": lambda m, **k: m.MultiQueryAttention(24, 4).forward(X, **k),
    "multi-query, called": lambda m, **k: m.MultiQueryAttention(24, 4)(X, **k),
    "projected": lambda m, **k: m.ProjectedAttention(4, 4, 6).forward(X, X, X, **k),
}


@both("layer", KEYWORDS)
def test_other_names_of_the_cache(layer, m):
    complains_of_keywords(KEYWORDS[layer], m, r"DynamicCache\(\) or StaticCache")


LISTS = {
    r"x is \[\[1.0\]\] \(list\), wants a tensor": lambda m: attention(m).forward([[1.0]]),
    r"mask is \[True\] \(list\), wants a bool or float tensor": lambda m: attention(m).forward(X, mask=[True]),
    r"kv_lens is \[3, 4\] \(list\), wants an int32 or int64 tensor \[batch\]": lambda m: attention(m).forward(
        X, kv_lens=[3, 4]
    ),
    r"positions is \[0\] \(list\), wants an int64 tensor \[length\]": lambda m: attention(m).forward(X, positions=[0]),
}


@both("message", LISTS)
def test_a_list_where_a_tensor_is_wanted(message, m):
    complaint(TypeError, message + A_TENSOR, LISTS[message], m)


VALUES = {
    r"x: got shape \[5, 24\], want \[batch, length, 24\]": lambda m: attention(m).forward(X[0]),
    r"x: got shape \[2, 5, 20\]": lambda m: attention(m).forward(X[:, :, :20]),
    "x: got dtype .*, want the module's dtype": lambda m: attention(m).forward(X.double()),
    "x: got device meta, want the module's device cpu": lambda m: attention(m).forward(X.to("meta")),
    r"context: got shape \[2, 5, 20\]": lambda m: attention(m).forward(X, X[:, :, :20]),
    r"context: got shape \[\]": lambda m: attention(m).forward(X, torch.tensor(1.0)),
    "context: got batch 1, want 2": lambda m: attention(m).forward(X, X[:1]),
    "value_context: got a tensor without context": lambda m: attention(m).forward(X, value_context=X),
    "value_context: got length 3, want 5 as context has: each of its keys needs one": lambda m: attention(m).forward(
        X, X, value_context=X[:, :3]
    ),
    "cache: got one together with context": lambda m: attention(m).forward(X, X, cache=m.DynamicCache()),
    r"mask has shape \[3, 1, 5, 5\]": lambda m: attention(m).forward(X, mask=torch.ones(3, 1, 5, 5, dtype=torch.bool)),
    r"kv_lens\[0\] is -1": lambda m: attention(m).forward(X, kv_lens=torch.tensor([-1, 5])),
    r"kv_lens\[0\] is 6": lambda m: attention(m).forward(X, kv_lens=torch.tensor([6, 5])),
    r"positions has shape \[4\] and dtype .*, wants int64 \[length\] or \[batch, length\] with length 5": lambda m: (
        m.SelfAttention(24).forward(X, positions=torch.arange(4))
    ),
    r"positions has shape \[5\] and dtype .*, wants int64 \[length\]": lambda m: attention(m).forward(
        X, positions=torch.arange(5.0)
    ),
    r"positions has shape \[3, 5\]": lambda m: attention(m).forward(X, positions=torch.arange(5).expand(3, 5)),
    r"positions has shape \[6\]": lambda m: attention(m).project(X, positions=torch.arange(6)),
    r"positions has shape \[6\] .*, wants int64 .* length 5": lambda m: m.ProjectedAttention(4, 4, 6).forward(
        X, X, X, positions=torch.arange(6)
    ),
    r"positions has shape \[7\] .* length 5": lambda m: m.RotaryEmbedding(6).forward(
        torch.zeros(2, 4, 5, 6), torch.arange(7)
    ),
    r"positions has shape \[3\] .* length 5": lambda m: m.GroupedQueryAttention(
        24, 4, 2, query_scale={"type": "log", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8}
    ).forward(X, positions=torch.arange(3)),
    r"positions has shape \[3, 5\] and .* length 5": lambda m: m.GroupedQueryAttention(
        24, 4, 2, query_scale={"type": "log", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8}
    ).forward(X, positions=torch.arange(5).expand(3, 5)),
    r"positions has shape \[1\] .* length 2": lambda m: m.CausalLM(
        5, 24, 1, 4, position_embedding="learned", max_positions=8
    ).forward(torch.zeros(2, 2).long(), positions=torch.arange(1)),
    r"k: got shape \[2, 5, 24\], want \[batch, length, 12\]": lambda m: m.ProjectedAttention(4, 2, 6).forward(
        X, X, X[:, :, :12]
    ),
    r"v: got shape \[2, 3, 24\], want batch and length of k \[2, 5, 24\]": lambda m: m.ProjectedAttention(
        4, 4, 6
    ).forward(X, X, X[:, :3]),
    r"x, taken as context: got shape \[2, 5, 24\], want \[batch, length, 10\]": lambda m: m.MultiHeadAttention(
        24, 4, kdim=10
    ).forward(X),
    "x or context, taken as value_context: got shape": lambda m: m.MultiHeadAttention(24, 4, kdim=24, vdim=10).forward(
        X, X
    ),
}


@both("message", VALUES)
def test_a_tensor_that_does_not_fit(message, m):
    complaint(ValueError, message, VALUES[message], m)


# ---- latent attention --------------------------------------------------------------------

SET_LATER = {"window": (3, 0), "softcap": 5.0, "alibi": True, "head_map": (0, 0, 1, 1)}


@pytest.mark.parametrize("name", SET_LATER)
def test_settings_that_latent_attention_does_not_have(name):
    module = make_layer()
    setattr(module, name, SET_LATER[name])
    for call in (module, module.project):
        message = f"attnpack: {name} is .*, a setting that latent attention does not have"
        complaint(ValueError, message, call, torch.randn(1, 3, E))


ONE = torch.zeros(1, 3, E)
LATENT = {
    r"x: got shape \[3, 48\]": lambda call, cache: call(ONE[0]),
    r"context: got shape \[1, 3, 7\]": lambda call, cache: call(ONE, torch.zeros(1, 3, 7)),
    "x: got dtype .*, want the module's dtype": lambda call, cache: call(ONE.double()),
    "value_context: got a tensor, but latent attention": lambda call, cache: call(ONE, ONE, value_context=ONE),
    "cache: got one together with context": lambda call, cache: call(ONE, ONE, cache=cache),
    "mask": lambda call, cache: call(ONE, mask=torch.ones(5, 7, dtype=torch.bool), cache=cache),
    r"positions has shape \[2\]": lambda call, cache: call(ONE, positions=torch.arange(2), cache=cache),
    r"kv_lens\[0\] is 4": lambda call, cache: call(ONE, kv_lens=torch.tensor([4]), cache=cache),
    r"cache: got keys of shape \[2, 1, 3, 24\], want \[1, 1, L, 24\]": lambda call, cache: call(
        torch.zeros(2, 3, E), cache=cache
    ),
}


@both("message", LATENT)
@pytest.mark.parametrize("path", PATHS)
def test_bad_inputs_of_latent_attention_leave_the_cache_as_it_was(m, message, path):
    ours = make_layer(path=path)
    call = ours if m is attnpack else ours.cpp().forward
    cache = m.LatentCache()
    call(torch.randn(1, 5, E), cache=cache)
    held = cache.k.clone()
    complaint(ValueError, message, LATENT[message], call, cache)
    assert len(cache) == 5 and cache.lengths.tolist() == [5] and torch.equal(cache.k, held)


# A traced call runs no check of the modules. The operators see shapes; these rules no operator sees.
UNSEEN = {
    "value_context: got a tensor without context": lambda: (attention(attnpack), {"value_context": X}),
    "value_context: got a tensor, but latent attention": lambda: (
        attnpack.MultiHeadLatentAttention(E, HEADS, **SIZES),
        {"value_context": torch.randn(2, 5, E)},
    ),
    "context: got a tensor, but this block has no cross-attention": lambda: (decoder_block(attnpack), {"context": X}),
    "positions has shape": lambda: (attention(attnpack), {"positions": torch.tensor([3])}),
    "cache is given together with a context": lambda: (
        attention(attnpack),
        {"context": X, "cache": attnpack.StaticCache(2, 2, 8, 6)},
    ),
}


@pytest.mark.parametrize("message", UNSEEN)
def test_compiled_calls_refuse_what_no_operator_would_read(message):
    module, inputs = UNSEEN[message]()
    x = torch.randn(2, 5, module.embed_dim)
    with pytest.raises(Exception, match=message):
        torch.compile(module, backend="eager")(x, **inputs)
