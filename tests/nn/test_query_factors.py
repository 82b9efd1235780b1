"""The query_scale of modules: factors by position, with caches, in both languages, and as transformers has them."""

import math

import attnpack
import pytest
import torch
from attnpack import DynamicCache, GroupedQueryAttention, MultiHeadLatentAttention, RotaryEmbedding, reference
from op_cases import draw
from torch.testing import assert_close

LLAMA4 = {"type": "llama4", "floor_scale": 2, "attn_scale": 0.5}
LOG = {"type": "log", "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 3}
KINDS = {"llama4": LLAMA4, "log": LOG}
LATENT = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}


def expected_factors(scale, positions):
    """Each type in Python's own numbers."""
    grown = {
        "llama4": lambda p: math.log1p(math.floor((p + 1) / 2)) * 0.5 + 1,
        "log": lambda p: 1 + 0.5 * math.log(1 + math.floor(p / 3)),
    }[scale["type"]]
    return torch.tensor([grown(p) for p in positions.tolist()], dtype=torch.float64)


def grouped(scale, **options):
    torch.manual_seed(0)
    rope = RotaryEmbedding(8)
    return GroupedQueryAttention(32, 4, 2, causal=True, rope=rope, query_scale=scale, dtype=torch.float64, **options)


def latent(scale, **options):
    torch.manual_seed(0)
    rope = RotaryEmbedding(4, interleaved=True)
    return MultiHeadLatentAttention(
        32, 4, **LATENT, causal=True, rope=rope, query_scale=scale, dtype=torch.float64, **options
    )


MODULES = {"grouped": grouped, "latent": latent}


@pytest.mark.parametrize("scale", KINDS.values(), ids=KINDS)
def test_the_formula(scale):
    layer, x = grouped(scale, softcap=5.0), draw(2, 9, 32, dtype=torch.float64)
    factors = expected_factors(scale, torch.arange(9))
    out = reference.attention(*layer.project(x), causal=True, softcap=5.0, query_scale=factors)
    assert_close(layer(x), layer.o_proj(out.transpose(1, 2).flatten(2)), atol=1e-6, rtol=1e-6)
    latents = latent(scale)
    heads = latents.project(x)
    out = reference.attention(*heads, causal=True, scale=latents.softmax_scale, query_scale=factors)
    assert_close(latents(x), latents.o_proj(out.transpose(1, 2).flatten(2)), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("scale", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_a_cache_continues_the_positions(make, scale):
    layer, x = make(scale), draw(2, 9, 32, dtype=torch.float64)
    cache = layer.new_cache()
    parts = [layer(part, cache=cache) for part in x.split([4, 1, 4], 1)]
    assert_close(torch.cat(parts, 1), layer(x), atol=1e-9, rtol=1e-9)
    twin = layer.cpp()
    cpp_cache = attnpack.cpp.LatentCache() if make is latent else attnpack.cpp.DynamicCache()
    assert torch.equal(twin(x), layer(x))
    for part, own in zip(x.split([4, 1, 4], 1), parts, strict=True):
        assert torch.equal(twin(part, cache=cpp_cache), own)


@pytest.mark.parametrize("scale", KINDS.values(), ids=KINDS)
def test_positions_that_are_given_count_for_one_type(scale):
    layer, x = grouped(scale), draw(1, 4, 32, dtype=torch.float64)
    positions = torch.tensor([5, 6, 7, 8])
    counted = positions if scale is LOG else torch.arange(4)
    query, key, value = layer.project(x, positions=positions)
    out = reference.attention(query, key, value, causal=True, query_scale=expected_factors(scale, counted))
    expected = layer.o_proj(out.transpose(1, 2).flatten(2))
    assert_close(layer(x, positions=positions), expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(layer.cpp()(x, positions=positions), layer(x, positions=positions))


def test_queries_over_the_cache_of_another_layer():
    first, second = grouped(LLAMA4), grouped(LLAMA4)
    x, cache = draw(2, 6, 32, dtype=torch.float64), DynamicCache()
    for part in x.split([5, 1], 1):
        first(part, cache=cache)
        got = second(part, kv_from=cache)
    assert_close(got, first(x)[:, -1:], atol=1e-9, rtol=1e-9)
    assert_close(second.cpp()(x[:, -1:], kv_from=first_cache(first, x)), got, atol=1e-9, rtol=1e-9)


def first_cache(layer, x):
    """A cache of C++ that holds x."""
    twin = layer.cpp()
    cache = attnpack.cpp.DynamicCache()
    twin(x, cache=cache)
    return cache


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_ragged_appends_and_nested_tensors(make):
    layer = make(LLAMA4)
    rows = [draw(n, 32, dtype=torch.float64, seed=n) for n in (5, 3)]
    padded = torch.stack([torch.nn.functional.pad(row, (0, 0, 0, 5 - len(row))) for row in rows])
    cache = layer.new_cache()
    layer(padded, cache=cache, kv_lens=torch.tensor([5, 3]))
    step = draw(2, 1, 32, dtype=torch.float64, seed=7)
    got = layer(step, cache=cache)
    for b, row in enumerate(rows):
        whole = layer(torch.cat([row, step[b]]).unsqueeze(0))
        assert_close(got[b], whole[0, -1:], atol=1e-9, rtol=1e-9)
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    for got_row, row in zip(layer(nested).unbind(), rows, strict=True):
        assert_close(got_row, layer(row.unsqueeze(0))[0], atol=1e-9, rtol=1e-9)


def test_compiles():
    layer, x = grouped(LLAMA4).float(), draw(2, 6, 32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), layer(x))


def test_a_replaced_projection_takes_it_too():
    layer, x = latent(LOG), draw(1, 7, 32, dtype=torch.float64)
    expected = layer(x)
    layer.kv_b_proj = torch.nn.Sequential(layer.kv_b_proj)
    assert_close(layer(x), expected, atol=1e-9, rtol=1e-9)


def test_as_ministral_3():
    transformers = pytest.importorskip("transformers")
    ministral3 = pytest.importorskip("transformers.models.ministral3.modeling_ministral3")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.5}
    config = transformers.Ministral3Config(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=1,
        rope_parameters=rope | {"original_max_position_embeddings": 3}, attn_implementation="eager",
    )  # fmt: skip
    theirs = ministral3.Ministral3Attention(config, 0).double()
    layer = grouped(LOG)
    layer.load_state_dict(theirs.state_dict())
    x, positions = draw(1, 9, 32, dtype=torch.float64), torch.arange(2, 11).unsqueeze(0)
    angles = ministral3.Ministral3RotaryEmbedding(config)(x, positions)
    mask = torch.full((9, 9), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    expected, _ = theirs(x, angles, mask, positions)
    assert_close(layer(x, positions=positions), expected, atol=1e-5, rtol=1e-5)


def test_as_mistral_4():
    transformers = pytest.importorskip("transformers")
    mistral4 = pytest.importorskip("transformers.models.mistral4.modeling_mistral4")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.5}
    config = transformers.Mistral4Config(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=1, q_lora_rank=20, **LATENT,
        rope_parameters=rope | {"original_max_position_embeddings": 3}, attn_implementation="eager",
    )  # fmt: skip
    theirs = mistral4.Mistral4Attention(config, 0).double()
    layer = latent(LOG, q_lora_rank=20)
    layer.load_state_dict(theirs.state_dict())
    config.head_dim = LATENT["qk_rope_head_dim"]  # of the rotation
    x, positions = draw(1, 9, 32, dtype=torch.float64), torch.arange(2, 11).unsqueeze(0)
    angles = mistral4.Mistral4RotaryEmbedding(config)(x, positions)
    mask = torch.full((9, 9), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    assert_close(layer(x, positions=positions), theirs(x, angles, mask, positions)[0], atol=1e-5, rtol=1e-5)


def test_as_llama_4_without_rope():
    transformers = pytest.importorskip("transformers")
    llama4 = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    config = transformers.Llama4TextConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=1,
        no_rope_layers=[0], attn_temperature_tuning=True, floor_scale=2, attn_scale=0.5, attn_implementation="eager",
    )  # fmt: skip
    theirs = llama4.Llama4TextAttention(config, 0).double()
    layer = grouped(LLAMA4)
    layer.rope = None
    layer.load_state_dict(theirs.state_dict())
    x = draw(1, 9, 32, dtype=torch.float64)
    mask = torch.full((9, 9), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    expected = theirs(x, None, mask)[0]
    assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)


def test_a_position_below_0_counts_as_0():
    layer, x = grouped(LOG), draw(1, 3, 32, dtype=torch.float64)
    query, key, value = layer.project(x, positions=torch.tensor([-4, -1, 0]))
    out = reference.attention(query, key, value, causal=True)
    expected = layer.o_proj(out.transpose(1, 2).flatten(2))
    assert_close(layer(x, positions=torch.tensor([-4, -1, 0])), expected, atol=1e-6, rtol=1e-6)


WRONG = {
    "type": ({"type": "linear"}, "query_scale: type is 'linear', wants 'llama4' or 'log'"),
    "missing": (
        {"type": "llama4", "floor_scale": 3},
        "query_scale: type 'llama4' wants floor_scale and attn_scale, and",
    ),
    "of the other": (LOG | {"attn_scale": 1.0}, "query_scale: type 'log' wants original_max_position_embeddings and"),
    "no positions": (
        LLAMA4 | {"floor_scale": 0},
        "floor_scale and attn_scale are 0 and 0.5, want a number of positions",
    ),
    "unknown": (LLAMA4 | {"beta": 1.0}, "query_scale: got 'beta', want type with floor_scale and attn_scale"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_errors(make, case):
    scale, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        make(scale)
    with pytest.raises(TypeError, match=r"query_scale is 2.0 \(float\), wants None or a dict such as"):
        make(2.0)


def test_pickles_and_shows_itself():
    import pickle

    layer = grouped(LLAMA4)
    again = pickle.loads(pickle.dumps(layer))
    assert again.query_scale == LLAMA4 and "llama4" in repr(layer) and "llama4" in str(layer.cpp())
    assert attnpack.GroupedQueryAttention.from_cpp(layer.cpp()).query_scale == LLAMA4
