"""Attention layers as latent attention: when it is exact, and its error otherwise, in both languages."""

import attnpack
import pytest
import torch
from attnpack import _C, convert
from kv_heads import share_heads

EMBED, HEADS, DIM = 24, 4, 6


def rope(**settings):
    return attnpack.RotaryEmbedding(DIM, base=100.0, **settings)


def build(kv_heads: int = 2, dtype=torch.float64, **settings) -> attnpack.GroupedQueryAttention:
    torch.manual_seed(1)
    module = attnpack.GroupedQueryAttention(EMBED, HEADS, kv_heads, dtype=dtype, **settings)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module


def inputs(dtype=torch.float64, length: int = 40) -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(2, length, EMBED, dtype=dtype)


EXACT = {
    "plain": {},
    "causal-scale": {"causal": True, "scale": 0.2, "dropout": 0.1},
    "bias": {"bias": True, "out_bias": False},
    "out-bias": {"out_bias": True},
    "uneven": {"head_map": [1, 0, 1, 1]},
    "all-heads": {"kv_heads": HEADS},
    "wide-heads": {"head_dim": 8},
}


@pytest.mark.parametrize("name", EXACT)
def test_without_rope_the_full_rank_is_exact(name):
    module = build(**EXACT[name]).eval()
    x = inputs()
    full = 2 * module.num_kv_heads * module.head_dim
    for rank, calibration in ((full, None), (full, x), (full + 5, x)):
        made = convert.to_mla(module, rank, calibration=calibration)
        torch.testing.assert_close(made(x), module(x), rtol=1e-8, atol=1e-8)
        assert not made.training and made.dropout == module.dropout and made.qk_rope_head_dim == 0
        if calibration is not None:
            assert made.conversion_error < 1e-8
        torch.testing.assert_close(made(x, x[:, :7]), module(x, x[:, :7]), rtol=1e-8, atol=1e-8)


def test_the_cache_holds_the_latents_alone():
    module = build(causal=True)
    made = convert.to_mla(module, 24)
    x, cache = inputs(length=9), attnpack.LatentCache()
    with torch.no_grad():
        steps = torch.cat([made(token, cache=cache) for token in x.split(1, 1)], 1)
    torch.testing.assert_close(steps, module(x))
    assert cache.nbytes == 2 * 9 * 24 * 8


@pytest.mark.parametrize("lost", ["k_proj", "v_proj"])
def test_a_bias_of_keys_or_of_values_alone(lost):
    module, x = build(bias=True), inputs()
    getattr(module, lost).bias = None
    torch.testing.assert_close(convert.to_mla(module, 24, calibration=x)(x), module(x), rtol=1e-8, atol=1e-8)


def factorise(weights, kv_lora_rank, **settings):
    """The latent form of a layer's weights and biases: q, its bias, kv_a, its bias, kv_b."""
    defaults = {"head_map": None, "inv_freq": [], "interleaved": False, "rope_factor": 1.0}
    defaults |= {"length": 512, "causal": True, "calibration": []}
    sizes = {"num_heads": HEADS, "num_kv_heads": 2, "kv_lora_rank": kv_lora_rank}
    return _C.convert.factorise_latent(list(weights), **sizes, **defaults | settings)


@pytest.mark.parametrize("lost", ["k_bias", "v_bias"])
def test_weights_with_one_bias_alone(lost):
    """A module of C++ has both biases or none, but the weights of a layer may lack one: it counts as zero."""
    weights = convert.heads.layer_weights(build(bias=True))._replace(**{lost: None})
    _, _, _, kv_a_bias, kv_b = factorise(weights, 24)
    heads = [torch.zeros(2, DIM) if bias is None else bias.view(2, DIM) for bias in (weights.k_bias, weights.v_bias)]
    wanted = torch.cat(heads, 1).double().repeat_interleave(HEADS // 2, 0)
    torch.testing.assert_close((kv_b @ kv_a_bias).view(HEADS, 2 * DIM), wanted.detach())


@pytest.mark.parametrize("causal", [False, True])
def test_unrotated_queries_are_turned_as_in_the_mean_pair(causal):
    """The score of a query at i and a key at j is Re(q e^(i theta (i - j)) conj(k)), times the tables' factor
    squared."""
    length, scaling = 7, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    module = build(causal=causal, rope=rope(scaling=scaling))
    made = convert.to_mla(module, 24, length=length)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    distance = distance[distance >= 0] if causal else distance.flatten()
    turn = torch.exp(1j * torch.tensor(module.rope.inv_freq, dtype=torch.float64) * distance[:, None]).mean(0)
    assert module.rope.factor != 1
    old = module.q_proj.weight.unflatten(0, (HEADS, 2, DIM // 2))
    wanted = torch.complex(old[:, 0], old[:, 1]) * (turn * module.rope.factor**2)[:, None]
    still = made.q_proj.weight.unflatten(0, (HEADS, -1))[:, :DIM]
    torch.testing.assert_close(still, torch.cat([wanted.real, wanted.imag], 1))


def test_a_latent_as_wide_as_keys_and_values_have_rank_is_exact():
    module = build(HEADS)
    with torch.no_grad():
        both = torch.cat([module.k_proj.weight, module.v_proj.weight])
        u, s, vh = torch.linalg.svd(both, full_matrices=False)
        both = u[:, :5] * s[:5] @ vh[:5]
        module.k_proj.weight.copy_(both[: len(both) // 2])
        module.v_proj.weight.copy_(both[len(both) // 2 :])
    x = inputs()
    torch.testing.assert_close(convert.to_mla(module, 5, calibration=x)(x), module(x))
    assert convert.to_mla(module, 4, calibration=x).conversion_error > 1e-3


@pytest.mark.parametrize("settings", [{}, {"rope": rope()}], ids=["plain", "rope"])
def test_the_error_falls_with_the_rank_and_is_reported(settings):
    module, x = build(HEADS, causal=True, **settings), inputs()
    errors = []
    for rank in (4, 12, 20, 32, 48):
        made = convert.to_mla(module, rank, calibration=x)
        assert made.conversion_error == convert.layer_error(module, made, x)
        errors.append(made.conversion_error)
    assert all(more > less for more, less in zip(errors, errors[1:], strict=False)) or settings
    assert errors[0] > 1.5 * errors[3] > 0
    assert (errors[-1] > 1e-3) == bool(settings)  # with RoPE no rank is exact, and the conversion reports an error
    assert convert.to_mla(module, 12).conversion_error is None
    tokens = convert.to_mla(module, 12, calibration=x[0])
    assert tokens.conversion_error == convert.layer_error(module, tokens, x[:1])


def test_calibration_spends_the_rank_where_the_text_is():
    module = build(HEADS)
    x = inputs() * torch.linspace(0, 2, EMBED, dtype=torch.float64) ** 3
    blind, seeing = convert.to_mla(module, 10), convert.to_mla(module, 10, calibration=x)
    assert seeing.conversion_error < 0.8 * convert.layer_error(module, blind, x)


ONE_HEAD = {
    "half": {"rope": rope()},
    "interleaved-bias": {"rope": rope(interleaved=True), "bias": True},
    "partial": {"rope": attnpack.RotaryEmbedding(4), "head_dim": 8},
    "yarn": {
        "rope": attnpack.RotaryEmbedding(
            DIM,
            max_positions=8,
            scaling={"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0, "mscale": 0.5},
        )
    },
}


@pytest.mark.parametrize("name", ONE_HEAD)
def test_one_kv_head_is_exact_with_rope(name):
    """The shared rotating key is that head. The latent holds the dims that do not rotate, and the values."""
    module = build(1, causal=True, **ONE_HEAD[name])
    x = inputs()
    rank = 2 * module.head_dim - module.rope.dim
    made = convert.to_mla(module, rank, calibration=x)
    torch.testing.assert_close(made(x), module(x), rtol=1e-7, atol=1e-7)
    assert made.qk_rope_head_dim == module.rope.dim


def test_equal_key_heads_are_exact_with_rope():
    module = build(HEADS, causal=True, rope=rope(), bias=True)
    share_heads(module, [[0, 1, 2, 3]])
    x = inputs()
    torch.testing.assert_close(convert.to_mla(module, DIM)(x), module(x))


def test_what_does_not_rotate_meets_the_mean_rotation():
    """The least squares constant for e^(i theta distance) over a causal text, by hand."""
    module, length = build(2, causal=True, rope=rope()), 11
    weights = convert.heads.layer_weights(module)
    made = factorise(weights, 24, inv_freq=module.rope.inv_freq, length=length)
    still = made[0].view(HEADS, 2 * DIM, EMBED)[:, :DIM]
    distances = torch.tensor([i - j for i in range(length) for j in range(i + 1)], dtype=torch.float64)
    rows = module.q_proj.weight.view(HEADS, 2, DIM // 2, EMBED)
    for p, theta in enumerate(module.rope.inv_freq):
        turn = torch.polar(torch.ones_like(distances), distances * theta).mean()
        wanted = turn * torch.complex(rows[:, 0, p], rows[:, 1, p])
        torch.testing.assert_close(torch.complex(still[:, p], still[:, p + DIM // 2]), wanted)


@pytest.mark.parametrize("settings", [{}, {"bias": True, "rope": rope()}, {"out_bias": True}], ids=str)
def test_cpp_modules_give_the_same_bits(settings):
    module = build(2, torch.float32, causal=True, **settings)
    x = inputs(torch.float32)
    for calibration in (None, x):
        ours = convert.to_mla(module, 16, calibration=calibration)
        theirs = convert.to_mla(module.cpp(), 16, calibration=calibration, length=40 if calibration is None else None)
        ours = ours if calibration is not None else convert.to_mla(module, 16, length=40)
        tensors = dict(theirs.named_parameters())
        assert set(tensors) == set(ours.state_dict())
        for key, tensor in ours.state_dict().items():
            assert torch.equal(tensors[key], tensor), key
        assert torch.equal(theirs.forward(x), ours(x)) and torch.equal(ours.cpp().forward(x), ours(x))


def test_the_layer_stays_and_the_result_trains():
    module = build(causal=True, rope=rope())
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    made = convert.to_mla(module, 12)
    made(inputs()).sum().backward()
    assert all(parameter.grad is not None for parameter in made.parameters())
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": (3, 0)}, "window: got a layer with it"),
        ({"softcap": 2.0}, "softcap: got"),
        ({"sinks": True}, "sinks: got"),
        ({"alibi": True}, "alibi: got"),
        ({"qk_norm": True}, "qk_norm: got"),
        ({"chunk": 3}, "chunk: got"),
        ({"keys_as_values": True}, "keys_as_values: got"),
        ({"own_keys": False}, "own_keys: got a layer without"),
        ({"vdim": 10}, "kdim, vdim: got a layer with 10, want embed_dim 24"),
    ],
    ids=str,
)
def test_what_latent_attention_has_not_is_named(settings, message):
    module = build(**settings)
    for given in (module, module.cpp()):
        with pytest.raises(ValueError, match=f"^attnpack: {message}"):
            convert.to_mla(given, 8)
    with pytest.raises(ValueError, match="kv_lora_rank: got 0, want at least 1"):
        convert.to_mla(build(), 0)
    with pytest.raises(TypeError, match="module is"):
        convert.to_mla(torch.nn.Linear(2, 2), 4)
    with pytest.raises(TypeError, match="module is .*wants a single MultiHeadAttention"):
        convert.to_mla(attnpack.FeedForward(8, 16), 4)
    with pytest.raises(TypeError, match="calibration is 1"):
        convert.to_mla(build(), 4, calibration=[1])


def test_frequencies_of_ones_own_are_refused():
    module = build(rope=rope())
    module.rope.inv_freq = (1.0, 0.3, 0.1)
    with pytest.raises(TypeError, match="RotaryEmbedding's inv_freq is not that of its base and scaling"):
        convert.to_mla(module, 8)


def test_weights_that_are_no_numbers_are_refused():
    module = attnpack.MultiHeadAttention(16, 4)
    with torch.no_grad():
        module.v_proj.weight[3, 3] = torch.inf
    for given in (module, module.cpp()):
        with pytest.raises(ValueError, match="^attnpack: v: got a weight that holds NaN or Inf"):
            convert.to_mla(given, 8)


@pytest.mark.parametrize(("name", "value"), [("kv_lora_rank", 1.5), ("length", "a")])
def test_a_size_of_the_wrong_kind_is_named(name, value):
    with pytest.raises(TypeError, match=f"^attnpack: {name}.*an int"):
        convert.to_mla(attnpack.MultiHeadAttention(16, 4), **{"kv_lora_rank": 8, name: value})
