"""Stretched rotary embeddings: frequencies against transformers and by hand, tables in fp64, caches, bad dicts."""

import math

import attnpack
import pytest
import torch
from attnpack.ops import rope_table, rope_table_by_length
from torch.testing import assert_close
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LONG = {
    "short_factor": [1.0 + 0.02 * i for i in range(32)],
    "long_factor": [1.0 + 0.5 * i for i in range(32)],
    "original_max_position_embeddings": 4096,
}
# (dim, base, max_positions, scaling)
CASES = {
    "linear": (128, 1e4, 4096, {"rope_type": "linear", "factor": 3.0}),
    "dynamic": (128, 1e4, 2048, {"rope_type": "dynamic", "factor": 2.0}),
    "yarn llama": (128, 1e4, 16384, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}),
    "yarn qwen": (128, 1e6, 131072, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    "yarn deepseek": (
        64,
        1e4,
        163840,
        {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
        },
    ),
    "yarn gpt-oss": (
        64,
        150000.0,
        131072,
        {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    ),
    "llama3": (
        128,
        5e5,
        131072,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "longrope": (64, 1e4, 131072, {"rope_type": "longrope", **LONG}),
    "longrope factor": (64, 1e4, 131072, {"rope_type": "longrope", "factor": 8.0, "attention_factor": 1.5, **LONG}),
}
by_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def make(dim, base, max_positions, scaling, **settings):
    return attnpack.RotaryEmbedding(dim, base=base, max_positions=max_positions, scaling=scaling, **settings)


def theirs(dim, base, max_positions, scaling, seq_len=None):
    """inv_freq and attention factor of transformers."""
    kind = scaling.get("rope_type") or scaling["type"]
    known = {key: value for key, value in scaling.items() if key != "type"}
    if kind == "longrope":
        known["factor"] = known.get("factor") or max_positions / scaling["original_max_position_embeddings"]
    parameters = known | {"rope_type": kind, "rope_theta": base}
    config = LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        head_dim=dim,
        max_position_embeddings=max_positions,
        rope_parameters=parameters,
    )
    return ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=seq_len)


def in_ulps(ours, wanted):
    wanted = wanted.to(torch.float64)
    return float(((torch.tensor(ours, dtype=torch.float64) - wanted).abs() / (wanted * 2.0**-23)).max())


@by_case
def test_frequencies_are_those_of_transformers(case):
    rope, (inv_freq, factor) = make(*case), theirs(*case)
    assert in_ulps(rope.inv_freq, inv_freq) <= 8
    assert rope.factor == pytest.approx(factor, rel=1e-6)
    assert rope.cpp().inv_freq == list(rope.inv_freq) and rope.cpp().factor == rope.factor


@pytest.mark.parametrize("length", [1, 2048, 2049, 4096, 100_000])
def test_dynamic_frequencies_follow_the_length_as_in_transformers(length):
    rope = make(*CASES["dynamic"])
    inv_freq, _ = theirs(*CASES["dynamic"], seq_len=length)
    # The angle at position 1 is the frequency itself.
    _, sin = rope_table_by_length(torch.tensor([1]), torch.tensor([length]), *by_length(rope))
    assert_close(sin[0, 0].double(), inv_freq.double().sin(), rtol=1e-6, atol=1e-7)


def by_length(rope):
    return rope.inv_freq, rope.factor, rope.long_inv_freq, rope.growth, rope.trained_len


def test_longrope_switches_where_transformers_does():
    rope = make(*CASES["longrope"])
    assert in_ulps(rope.long_inv_freq, theirs(*CASES["longrope"], seq_len=4097)[0]) <= 8
    for length, wanted in ((4096, rope.inv_freq), (4097, rope.long_inv_freq)):
        cos, _ = rope_table_by_length(torch.tensor([5]), torch.tensor([length]), *by_length(rope))
        assert_close(cos[0, 0].double(), (5 * torch.tensor(wanted, dtype=torch.float64)).cos() * rope.factor)
    assert rope.factor == pytest.approx(1.19024, abs=1e-5)


def test_anchors():
    """Numbers computed by hand from the published configurations."""
    ntk = make(128, 1e4, 4096, {"rope_type": "ntk", "factor": 8.0})
    assert ntk.inv_freq[1] == pytest.approx(82684.62 ** (-2 / 128), rel=1e-8)
    theta = torch.tensor(make(*CASES["dynamic"]).inv_freq, dtype=torch.float64)
    grown = theta * (2 * 4096 / 2048 - 1) ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 126)
    assert float(grown[1]) == pytest.approx(30527.74 ** (-2 / 128), rel=1e-8)

    def kept_and_divided(case):
        dim, base, _, scaling = CASES[case]
        ratio = [base ** (-2 * i / dim) / f for i, f in enumerate(make(*CASES[case]).inv_freq)]
        kept = sum(abs(r - 1) < 1e-9 for r in ratio)
        return kept, sum(abs(r - scaling["factor"]) < 1e-6 for r in ratio)

    # A ramp from low to high keeps pairs 0..low and divides those from high on.
    assert kept_and_divided("yarn deepseek") == (10 + 1, 32 - 23)
    assert kept_and_divided("yarn llama") == (20 + 1, 64 - 46)
    assert kept_and_divided("yarn qwen") == (23 + 1, 64 - 40)
    assert kept_and_divided("yarn gpt-oss") == (9, 32 - 18)  # 8.0928 to 17.3980, not truncated
    assert kept_and_divided("llama3") == (29, 29)
    assert make(*CASES["yarn gpt-oss"]).factor == pytest.approx(1.34657, abs=1e-5)
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
    assert make(64, 1e4, 4096, yarn | {"factor": 4.0}).factor == pytest.approx(1.13863, abs=1e-5)
    assert make(64, 1e4, 4096, yarn | {"factor": 40.0}).factor == pytest.approx(1.36889, abs=1e-5)
    v2 = make(64, 1e4, 4096, yarn | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707})
    assert v2.factor == 1.0 and 192**-0.5 * v2.softmax_factor == pytest.approx(0.1147214, abs=5e-8)
    v3 = make(64, 1e4, 4096, yarn | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0})
    assert v3.factor == 1.0 and 192**-0.5 * v3.softmax_factor == pytest.approx(0.1352338, abs=5e-8)


def exact(dim, base, max_positions, scaling, length):
    """Frequencies in fp64 by the formulas of the papers, and the factor on cos and sin."""
    s = dict(scaling)
    kind, factor = s.get("rope_type") or s["type"], s.get("factor")
    trained = s.get("original_max_position_embeddings", max_positions)
    i = torch.arange(dim // 2, dtype=torch.float64)
    if kind == "dynamic" and length > trained:
        base *= (factor * length / trained - (factor - 1)) ** (dim / (dim - 2))
    theta = base ** (-2 * i / dim)
    if kind == "linear":
        return theta / factor, 1.0
    if kind == "llama3":
        wavelength = 2 * math.pi / theta
        smooth = (trained / wavelength - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
        blended = (1 - smooth) * theta / factor + smooth * theta
        high, low = trained / s["high_freq_factor"], trained / s["low_freq_factor"]
        return torch.where(wavelength < high, theta, torch.where(wavelength > low, theta / factor, blended)), 1.0
    if kind == "longrope":
        theta = theta / torch.tensor(s["long_factor" if length > trained else "short_factor"], dtype=torch.float64)
        stretch = factor or max_positions / trained
        return theta, s.get("attention_factor") or math.sqrt(1 + math.log(stretch) / math.log(trained))
    if kind == "yarn":
        low, high = (
            dim * math.log(trained / (2 * math.pi * s.get(beta, usual))) / (2 * math.log(base))
            for beta, usual in (("beta_fast", 32), ("beta_slow", 1))
        )
        if s.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        ramp = ((i - low) / (high - low)).clamp(0, 1)

        def m(a):
            return 0.1 * a * math.log(factor) + 1

        ratio = m(s["mscale"]) / m(s["mscale_all_dim"]) if "mscale" in s else m(1.0)
        return theta * (1 - ramp) + theta / factor * ramp, ratio
    return theta, 1.0


@by_case
def test_cos_and_sin_far_out(case):
    """Within 1e-6 of fp64 up to position 1e6, whatever dtype the module is moved to."""
    rope = make(*case).to(torch.bfloat16)
    positions = torch.tensor([0, 1, 17, 4095, 4096, 131_071, 999_999, 1_000_000])
    theta, factor = exact(*case, length=1_000_001)
    angle = positions.double().unsqueeze(-1) * theta
    by_lengths = rope.growth or rope.long_inv_freq
    table = (
        rope_table_by_length(positions, None, *by_length(rope))
        if by_lengths
        else rope_table(positions, rope.inv_freq, rope.factor)
    )
    for got, wanted in zip(table, (angle.cos() * factor, angle.sin() * factor), strict=True):
        assert float((got.double() - wanted).abs().max()) <= 1e-6
    # The module rotates a unit vector by the same table.
    unit = torch.zeros(1, 1, len(positions), 2 * theta.numel())
    unit[..., : theta.numel()] = 1
    assert torch.equal(rope(unit, positions)[0, 0, :, : theta.numel()], table[0])


@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rotation_leaves_the_rest(interleaved):
    rope = make(8, 1e4, 64, {"rope_type": "dynamic", "factor": 2.0}, interleaved=interleaved)
    x, positions = torch.randn(2, 3, 5, 12), torch.tensor([[3, 4, 5, 6, 99]])
    turned = rope(x, positions)
    assert torch.equal(turned[..., 8:], x[..., 8:]) and torch.equal(turned, rope.cpp().forward(x, positions))
    halves = x[..., :8].unflatten(-1, (4, 2)).transpose(-1, -2).flatten(-2) if interleaved else x[..., :8]
    theta, _ = exact(8, 1e4, 64, rope.scaling, length=100)
    angle = (positions[0].double().unsqueeze(-1) * theta).float()
    first = halves[..., :4] * angle.cos() - halves[..., 4:] * angle.sin()
    got = turned[..., :8:2] if interleaved else turned[..., :4]
    assert_close(got, first, rtol=1e-4, atol=1e-5)


# ---- caches ----------------------------------------------------------------------------

STRETCHED = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [3.0, 5.0, 7.0, 9.0],
        "factor": 4.0,
    },
}


def layer(kind, raw_keys=None, **settings):
    torch.manual_seed(0)
    rope = attnpack.RotaryEmbedding(8, max_positions=8, scaling=STRETCHED[kind], raw_keys=raw_keys)
    return attnpack.GroupedQueryAttention(32, 4, 2, causal=True, rope=rope, **settings).eval()


@pytest.mark.parametrize(
    "cache", [attnpack.DynamicCache, lambda: attnpack.StaticCache(2, 2, 32, 8)], ids=["grows", "fixed"]
)
@pytest.mark.parametrize("kind", STRETCHED)
@torch.no_grad()
def test_raw_keys_by_steps_equal_a_full_recompute(kind, cache):
    """Past the trained length of 8, the last row of each step equals that of a call without a cache."""
    module, x = layer(kind), torch.randn(2, 20, 32)
    twin, held, native = module.cpp(), cache(), None
    for start, stop in ((0, 3), (3, 7), (7, 9), *((i, i + 1) for i in range(9, 20))):
        step = module(x[:, start:stop], cache=held)
        whole = module(x[:, :stop])
        assert_close(step[:, -1], whole[:, -1], rtol=1e-5, atol=1e-6)
        assert torch.equal(whole, twin.forward(x[:, :stop]))
    native = attnpack.cpp.DynamicCache()
    assert torch.equal(twin.forward(x, cache=native), module(x, cache=attnpack.DynamicCache()))
    unrotated = module.k_proj(x).unflatten(-1, (2, 8)).transpose(1, 2)
    assert_close(held.k, unrotated)


@pytest.mark.parametrize("kind", STRETCHED)
@torch.no_grad()
def test_rotated_keys_do_not(kind):
    module, x, held = layer(kind, raw_keys=False), torch.randn(2, 20, 32), attnpack.DynamicCache()
    errors = []
    for i in range(20):
        step = module(x[:, i : i + 1], cache=held)
        errors.append(float((step[:, 0] - module(x[:, : i + 1])[:, -1]).abs().max()))
    assert max(errors[:8]) < 1e-5 < 1e-3 < errors[8] and errors[19] > 1e-3


@torch.no_grad()
def test_each_sequence_follows_its_own_length():
    module, x, held = layer("dynamic"), torch.randn(2, 20, 32), attnpack.DynamicCache()
    module(x[:, :12], cache=held, kv_lens=torch.tensor([4, 12]))
    out = module(x[:, 12:14], cache=held)
    for b, length in enumerate((4, 12)):
        alone = torch.cat([x[b : b + 1, :length], x[b : b + 1, 12:14]], 1)
        assert_close(out[b], module(alone)[0, -2:], rtol=1e-5, atol=1e-6)
    padded = module(x[:, :12], kv_lens=torch.tensor([4, 12]))
    assert_close(padded[0, :4], module(x[:1, :4])[0], rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_fixed_frequencies_may_be_kept_raw_too():
    x = torch.randn(2, 9, 32)
    scaling = {"rope_type": "linear", "factor": 2.0}
    outs = []
    for raw_keys in (None, True):
        torch.manual_seed(0)
        rope = attnpack.RotaryEmbedding(8, scaling=scaling, raw_keys=raw_keys)
        module, held = attnpack.MultiQueryAttention(32, 4, causal=True, rope=rope), attnpack.DynamicCache()
        outs.append(torch.cat([module(part, cache=held) for part in x.split([4, 1, 4], 1)], 1))
        keys = module.k_proj(x).unsqueeze(1)
        assert_close(held.k, keys if raw_keys else rope(keys))
    assert_close(*outs)


def test_gradients_reach_this_calls_keys_through_a_raw_cache():
    module, x, held = layer("dynamic").double(), torch.randn(1, 12, 32, dtype=torch.float64), attnpack.DynamicCache()
    with torch.no_grad():
        module(x[:, :9], cache=held)
    new = x[:, 9:].clone().requires_grad_()
    module(new, cache=held).square().sum().backward()
    whole = torch.cat([x[:, :9], x[:, 9:].clone().requires_grad_()], 1).detach().requires_grad_()
    module(whole)[:, 9:].square().sum().backward()
    assert_close(new.grad, whole.grad[:, 9:], rtol=1e-6, atol=1e-8)


def test_positions_and_a_raw_cache_exclude_each_other():
    module, held = layer("dynamic"), attnpack.DynamicCache()
    module(torch.randn(1, 3, 32), cache=held)
    for call in (module, module.cpp().forward):
        cache = held if call is module else attnpack.cpp.DynamicCache()
        with pytest.raises(ValueError, match="positions: got a tensor with a cache of unrotated keys"):
            call(torch.randn(1, 2, 32), cache=cache, positions=torch.tensor([5, 6]))
    assert len(held) == 3


@pytest.mark.parametrize("kind", STRETCHED)
@torch.no_grad()
def test_compiled_with_a_static_cache(kind):
    module, x = layer(kind), torch.randn(2, 14, 32)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    held, plain = attnpack.StaticCache(2, 2, 16, 8), attnpack.StaticCache(2, 2, 16, 8)
    torch._dynamo.utils.counters.clear()
    for token in x.split(1, 1):
        assert_close(compiled(token, cache=held), module(token, cache=plain))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert_close(compiled(x), module(x))


def test_opcheck():
    op, rope = torch.ops.attnpack.rope_table_by_length.default, make(*CASES["dynamic"])
    settings = [list(rope.inv_freq), 1.0, [], 2.0, 4]
    for positions, lengths in (
        (torch.arange(6), None),
        (torch.arange(6), torch.tensor([3, 9])),
        (torch.arange(6).view(2, 3), torch.tensor([3, 9], dtype=torch.int32)),
        (torch.arange(6).view(1, 6), torch.tensor([3, 9])),
        (torch.arange(6).view(2, 3), None),
        (torch.empty(2, 0, dtype=torch.int64), None),
    ):
        torch.library.opcheck(op, (positions, lengths, *settings))


# ---- bad dicts --------------------------------------------------------------------------

BAD = {
    "got rope_type 'su', want 'default', 'linear'": {"rope_type": "su"},
    "'ntk' needs 'factor'": {"rope_type": "ntk"},
    "'yarn' needs 'factor'": {"rope_type": "yarn", "factor": None},
    "got factor 0, want a number above 0": {"rope_type": "dynamic", "factor": 0},
    "got factor nan, want a number above 0": {"rope_type": "llama3", "factor": float("nan")},
    "got 3 numbers as short_factor, want 4": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 3,
        "long_factor": [1.0] * 4,
    },
    "got 0 numbers as long_factor, want 4": {"rope_type": "longrope", "short_factor": [1.0] * 4},
    "got long_factor -1, want a number above 0": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 1.0, 1.0, -1.0],
    },
    "got original_max_position_embeddings 0": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 0,
    },
    "got beta_fast 1, want a number above beta_slow 32": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 1,
        "beta_slow": 32,
    },
    "got rope_type 'linear' and type 'yarn', leave one of them out": {
        "rope_type": "linear",
        "type": "yarn",
        "factor": 4.0,
    },
    "got high_freq_factor 1, want a number above low_freq_factor 2": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 1.0,
    },
    "got beta_fast -32": {"rope_type": "yarn", "factor": 2.0, "beta_fast": -32},
    "got attention_factor 0": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.0},
    "got 'mrope_section', which no rope_type here knows": {"rope_type": "default", "mrope_section": [1, 1, 2]},
}


@pytest.mark.parametrize("module", [attnpack, attnpack.cpp], ids=["python", "cpp"])
@pytest.mark.parametrize("message", BAD)
def test_bad_dicts_raise_a_sentence(module, message):
    with pytest.raises(ValueError, match=f"^attnpack: scaling: .*{message}") as error:
        module.RotaryEmbedding(8, scaling=BAD[message])
    assert "\n" not in str(error.value)


def test_rope_scaling_wants_a_type():
    with pytest.raises(ValueError, match="scaling: got .* without rope_type"):
        attnpack.RotaryEmbedding(8, scaling={"factor": 2.0})


@pytest.mark.parametrize("module", [attnpack, attnpack.cpp], ids=["python", "cpp"])
def test_other_bad_settings_raise_a_sentence(module):
    with pytest.raises(TypeError, match="scaling: truncate is 1 .*, wants True or False"):
        module.RotaryEmbedding(8, scaling={"rope_type": "yarn", "factor": 2.0, "truncate": 1})
    with pytest.raises(TypeError, match="scaling: short_factor is 2.0 .*, wants a list of numbers"):
        module.RotaryEmbedding(8, scaling={"rope_type": "longrope", "short_factor": 2.0})
    with pytest.raises(ValueError, match="dim: got 2, want at least 4 for rope_type 'ntk'"):
        module.RotaryEmbedding(2, scaling={"rope_type": "ntk", "factor": 2.0})
    with pytest.raises(ValueError, match="base: got 1, want a number above 1 for rope_type 'yarn'"):
        module.RotaryEmbedding(8, base=1.0, scaling={"rope_type": "yarn", "factor": 2.0})


@torch.no_grad()
def test_a_context_is_as_long_as_its_valid_keys():
    """The lengths count, without padding; with padding they would exceed the trained length."""
    torch.manual_seed(0)
    rope = attnpack.RotaryEmbedding(8, max_positions=8, scaling={"rope_type": "dynamic", "factor": 4.0})
    module = attnpack.MultiHeadAttention(32, 4, rope=rope)
    x, context = torch.randn(1, 3, 32), torch.randn(1, 12, 32)
    for each in (module, module.cpp().forward):
        assert_close(each(x, context, kv_lens=torch.tensor([6])), each(x, context[:, :6]))
