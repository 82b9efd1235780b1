"""The modules as torch.nn.Modules: their results, and everything that a user may do with an nn.Module."""

import copy
import math
import pickle

import attnpack
import pytest
import torch
import torch.nn.functional as F
from attnpack import reference
from marks import some_long
from module_cases import CASES, EMBED, make_case
from torch import nn

ATTENDING = [case for case in CASES if case.attends]
attending = pytest.mark.parametrize("case", ATTENDING, ids=lambda case: case.name)
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def heads(x, num_heads):
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def plain(module, x, context=None, *, positions=None, **arguments):
    """A family module's forward in plain PyTorch, from only its parameters."""
    source = x if context is None else context
    q = heads(F.linear(x, module.q_proj.weight, module.q_proj.bias), module.num_heads)
    k = heads(F.linear(source, module.k_proj.weight, module.k_proj.bias), module.num_kv_heads)
    v = heads(F.linear(source, module.v_proj.weight, module.v_proj.bias), module.num_kv_heads)
    if getattr(module, "q_norm", None) is not None:
        q, k = (
            t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6) * norm.weight
            for t, norm in ((q, module.q_norm), (k, module.k_norm))
        )
    if module.rope is not None:
        own = torch.arange(x.size(1)) if positions is None else positions
        theirs = own if context is None else torch.arange(context.size(1))
        q, k = rotated(module.rope, q, own), rotated(module.rope, k, theirs)
    if module.alibi:
        arguments["alibi_slopes"] = slopes(module.num_heads)
    out = reference.attention(
        q,
        k,
        v,
        window=module.window or (-1, -1),
        softcap=module.softcap,
        sinks=getattr(module, "sinks", None),
        head_map=module.head_map,
        scale=module.scale,
        **arguments,
    )
    joined = out.transpose(1, 2).flatten(2)
    return F.linear(joined, module.o_proj.weight, module.o_proj.bias) if hasattr(module, "o_proj") else joined


@pytest.mark.parametrize("native", [False, True], ids=["python", "cpp"])
@torch.no_grad()
def test_weights_know_every_setting(native):
    torch.manual_seed(0)
    settings = {"window": (3, 0), "softcap": 0.5, "scale": 2.0, "head_map": [0, 1, 1, 1]}
    module = attnpack.GroupedQueryAttention(EMBED, 4, 2, causal=True, sinks=True, alibi=True, **settings)
    module.sinks.normal_()
    x = torch.randn(2, 7, EMBED)
    query, key, _ = module.project(x)
    learned = {"sinks": module.sinks, "alibi_slopes": slopes(4)}
    wanted = reference.attention_scores(query, key, causal=True, **settings, **learned)
    out, weights = (module.cpp().forward if native else module)(x, need_weights=True)
    torch.testing.assert_close(weights, wanted.float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(out, module(x))


def test_keys_of_a_context_are_projected_at_its_own_positions():
    torch.manual_seed(0)
    module = attnpack.GroupedQueryAttention(EMBED, 4, 2, rope=attnpack.RotaryEmbedding(6))
    x, context, positions = torch.randn(2, 3, EMBED), torch.randn(2, 5, EMBED), torch.tensor([7, 2, 11])
    wanted = rotated(module.rope, heads(module.k_proj(context), 2), torch.arange(5))
    for each in (module, module.cpp()):
        query, key, _ = each.project(x, context, positions=positions)
        torch.testing.assert_close(key, wanted)
        torch.testing.assert_close(query, rotated(module.rope, heads(module.q_proj(x), 4), positions))


def slopes(num_heads):
    """ALiBi's slopes: for a power of two a geometric series; otherwise that of the next lower power, filled up from the
    next higher one."""
    n = 2 ** int(math.log2(num_heads))
    series = [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]
    between = [2.0 ** (-8.0 * (i + 1) / (2 * n)) for i in range(0, 2 * n, 2)]
    return torch.tensor(series + between[: num_heads - n], dtype=torch.float64)


def rotated(rope, x, positions):
    """x as complex numbers, times exp(i * position * theta), pair by pair."""
    dims = torch.arange(0, rope.dim, 2, dtype=torch.float64)
    stretch = (rope.scaling or {}).get("factor", 1.0)
    angles = positions.double().unsqueeze(-1) / stretch * rope.base ** (-dims / rope.dim)
    turned, rest = x[..., : rope.dim].double(), x[..., rope.dim :]
    shape = (-1, 2) if rope.interleaved else (2, -1)
    pairs = turned.unflatten(-1, shape)
    pairs = pairs if rope.interleaved else pairs.transpose(-1, -2)
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    )
    turned = turned if rope.interleaved else turned.transpose(-1, -2)
    return torch.cat([turned.flatten(-2).to(x.dtype), rest], -1)


FAMILY = {
    "plain": dict(causal=True),
    "bias": dict(bias=True, out_bias=False),
    "out_bias": dict(out_bias=True, head_dim=5),
    "qk_norm": dict(qk_norm=True, causal=True, scale=0.7),
    "rope": dict(rope=attnpack.RotaryEmbedding(6, base=100.0), causal=True),
    "partial_rope": dict(rope=attnpack.RotaryEmbedding(4), causal=True),
    "interleaved": dict(rope=attnpack.RotaryEmbedding(6, interleaved=True)),
    "window": dict(window=(2, 1), rope=attnpack.RotaryEmbedding(6)),
    "window_causal": dict(window=(2, 0), causal=True, softcap=0.8),
    "sinks": dict(sinks=True, causal=True),
    "alibi": dict(alibi=True, causal=True),
    "alibi_both_ways": dict(alibi=True, softcap=3.0, sinks=True),
    "linear": dict(rope=attnpack.RotaryEmbedding(6, scaling={"rope_type": "linear", "factor": 4.0, "rope_theta": 1.0})),
}


@pytest.mark.parametrize("kind", ["multi_head", "grouped", "uneven", "multi_query"])
@pytest.mark.parametrize("settings", FAMILY.values(), ids=FAMILY)
def test_family_is_the_plain_formula(kind, settings):
    torch.manual_seed(0)
    settings = settings | {"dtype": torch.float64}
    module = {
        "multi_head": lambda: attnpack.MultiHeadAttention(EMBED, 4, **settings),
        "grouped": lambda: attnpack.GroupedQueryAttention(EMBED, 4, 2, **settings),
        "uneven": lambda: attnpack.GroupedQueryAttention(EMBED, 4, 3, head_map=[2, 0, 2, 2], **settings),
        "multi_query": lambda: attnpack.MultiQueryAttention(EMBED, 4, **settings),
    }[kind]()
    if module.sinks is not None:
        nn.init.normal_(module.sinks)
    x = torch.randn(2, 6, EMBED, dtype=torch.float64)
    torch.testing.assert_close(module(x), plain(module, x, causal=module.causal), rtol=1e-6, atol=1e-7)
    context = torch.randn(2, 3, EMBED, dtype=torch.float64)
    torch.testing.assert_close(module(x, context), plain(module, x, context), rtol=1e-6, atol=1e-7)


def test_dropout_acts_in_training_and_alike_in_both_languages():
    torch.manual_seed(0)
    module = attnpack.MultiQueryAttention(EMBED, 4, dropout=0.4, sinks=True, bias=True)
    x = torch.randn(2, 30, EMBED)
    twin, calm = module.cpp(), module.eval()(x)
    assert torch.equal(calm, module(x)) and torch.equal(calm, twin.eval().forward(x))
    module.train(), twin.train()
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        draws.append(module(x))
    torch.manual_seed(3)
    assert torch.equal(draws[0], draws[1]) and torch.equal(draws[0], twin.forward(x))
    many = torch.stack([module(x) for _ in range(400)])
    assert not torch.equal(many[0], many[1])
    torch.testing.assert_close(many.mean(0), calm, rtol=0, atol=6 * float(many.std(0).max()) / 20)
    _, weights = module(x, need_weights=True)
    torch.testing.assert_close(weights, module.eval()(x, need_weights=True)[1])  # the weights before dropout


def test_window_and_alibi_by_steps_equal_the_whole():
    torch.manual_seed(0)
    for settings in ({"window": (2, 0)}, {"alibi": True}, {"window": (3, 0), "sinks": True, "softcap": 2.0}):
        module = attnpack.GroupedQueryAttention(EMBED, 4, 2, causal=True, **settings).eval()
        x, cache = torch.randn(2, 7, EMBED), attnpack.DynamicCache()
        with torch.no_grad():
            steps = torch.cat([module(part, cache=cache) for part in x.split([3, 1, 2, 1], 1)], 1)
            torch.testing.assert_close(steps, module(x))


def test_slopes_are_those_of_the_paper():
    for num_heads in (1, 2, 6, 8, 12, 16, 25):
        assert attnpack.ops.alibi_slopes(num_heads) == pytest.approx(slopes(num_heads).tolist(), rel=1e-12)
    assert attnpack.ops.alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))  # Press et al. 2022, section 3


def test_self_attention_is_the_plain_formula():
    torch.manual_seed(0)
    module = attnpack.SelfAttention(EMBED, 16, causal=True)
    x = torch.randn(4, 8, EMBED)
    assert module(x).shape == (4, 8, 16)
    torch.testing.assert_close(module(x), plain(module, x, causal=True))


def test_projected_attention_is_the_plain_formula():
    torch.manual_seed(0)
    module = attnpack.ProjectedAttention(4, 2, 6, head_map=[0, 1, 1, 1], causal=True)
    q, k, v = torch.randn(2, 5, 24), torch.randn(2, 5, 12), torch.randn(2, 5, 12)
    wanted = reference.attention(heads(q, 4), heads(k, 2), heads(v, 2), head_map=[0, 1, 1, 1], causal=True)
    torch.testing.assert_close(module(q, k, v), wanted.transpose(1, 2).flatten(2))


def test_masks_lengths_positions_and_weights():
    torch.manual_seed(0)
    module = attnpack.GroupedQueryAttention(EMBED, 4, 2, rope=attnpack.RotaryEmbedding(6), causal=True)
    x, mask = torch.randn(2, 6, EMBED), torch.rand(2, 1, 1, 6) > 0.4
    positions, lens = torch.tensor([[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]]), torch.tensor([4, 6])
    close = torch.testing.assert_close
    close(module(x, mask=mask), plain(module, x, mask=mask, causal=True))
    close(module(x, kv_lens=lens), plain(module, x, kv_lens=lens, causal=True))
    close(
        module(x, positions=positions, causal=False),
        plain(module, x, positions=positions.unsqueeze(1), causal=False),
    )
    out, weights = module(x, mask=mask, need_weights=True)
    assert torch.equal(out, module(x, mask=mask)) and weights.shape == (2, 4, 6, 6)
    q, k, _ = module.project(x)
    close(weights, attnpack.attention_scores(q, k, mask, causal=True))


def test_positions_are_for_rope_alone():
    """Causality, windows and ALiBi use the place in the sequence, not the positions."""
    torch.manual_seed(0)
    x, backwards = torch.randn(1, 5, EMBED), torch.arange(5).flip(0)
    settings = {"causal": True, "window": (2, 0), "alibi": True}
    module = attnpack.MultiHeadAttention(EMBED, 4, **settings)
    assert torch.equal(module(x, positions=backwards), module(x))
    module = attnpack.MultiHeadAttention(EMBED, 4, rope=attnpack.RotaryEmbedding(6), **settings)
    weights, turned = (module(x, positions=given, need_weights=True)[1] for given in (None, backwards))
    assert torch.equal(weights > 0, turned > 0) and not torch.allclose(weights, turned, rtol=1e-3)


def test_relative_positions_alone_matter_to_rope():
    torch.manual_seed(0)
    module = attnpack.MultiHeadAttention(EMBED, 4, rope=attnpack.RotaryEmbedding(6), causal=True, dtype=torch.float64)
    x = torch.randn(1, 5, EMBED, dtype=torch.float64)
    shifted = module(x, positions=torch.arange(100, 105))
    torch.testing.assert_close(shifted, module(x), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(module(x, positions=torch.tensor([0, 2, 4, 6, 8])), module(x), rtol=1e-3)


@attending
def test_native_op_runs(case):
    module, inputs = make_case(case)
    module(*inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        module(*inputs)
    assert "attnpack::attention" in {event.name for event in profile.events()}


@by_name
def test_state_dict_copy_and_pickle(case):
    module, inputs = make_case(case)
    out = module(*inputs)
    other, _ = make_case(case, seed=1)
    other.load_state_dict(module.state_dict(), strict=True)
    assert torch.equal(other(*inputs), out)
    assigned, _ = make_case(case, seed=2)
    assigned.load_state_dict(copy.deepcopy(module.state_dict()), strict=True, assign=True)
    assert torch.equal(assigned(*inputs), out)
    assert torch.equal(copy.deepcopy(module)(*inputs), out)
    assert torch.equal(pickle.loads(pickle.dumps(module))(*inputs), out)


@by_name
def test_bfloat16(case):
    module, inputs = make_case(case)
    out = module(*inputs)
    module.to(torch.bfloat16)
    low = module(*(x.to(torch.bfloat16) if x.is_floating_point() else x for x in inputs))
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), out, rtol=0.1, atol=0.1 * out.abs().max().item())


@by_name
def test_functional_call_takes_the_given_parameters(case):
    module, inputs = make_case(case)
    other, _ = make_case(case, seed=1)
    out = torch.func.functional_call(module, dict(other.named_parameters()), inputs)
    assert torch.equal(out, other(*inputs))


@by_name
def test_meta_device(case):
    with torch.device("meta"):
        by_context = case.build()
    by_argument = case.build(device="meta", dtype=torch.bfloat16)
    for module in (by_context, by_argument):
        assert all(parameter.is_meta for parameter in module.parameters())
    assert all(parameter.dtype == torch.bfloat16 for parameter in by_argument.parameters())
    inputs = [x.to("meta") for x in case.inputs()]
    assert by_context(*inputs).shape == case.build()(*case.inputs()).shape


@by_name
def test_optimiser_moves_python_and_cpp_alike(case):
    module, inputs = make_case(case)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        assert case.name in ("projected", "projected_windowed", "rotary", "layer_tail_factor")
        return
    twin = module.cpp()
    before = twin.forward(*inputs)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    twin.forward(*inputs).square().sum().backward()
    optimiser.step()
    assert not torch.equal(module(*inputs), before)
    assert torch.equal(module(*inputs), twin.forward(*inputs))


class LowRank(nn.Module):
    """A linear with a low-rank addition, as LoRA puts it in place of a projection."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


def test_replaced_projections_run_and_learn():
    torch.manual_seed(0)
    module = attnpack.GroupedQueryAttention(EMBED, 4, 2, causal=True)
    merged = copy.deepcopy(module)
    module.v_proj = LowRank(module.v_proj)
    with torch.no_grad():
        merged.v_proj.weight += module.v_proj.up @ module.v_proj.down
    x = torch.randn(2, 5, EMBED)
    torch.testing.assert_close(module(x), merged(x), rtol=1e-4, atol=1e-4)
    module(x).sum().backward()
    assert module.v_proj.up.grad.abs().sum() > 0
    with pytest.raises(TypeError, match="v_proj is a LowRank, which C"):
        module.cpp()


def test_hooks_run():
    module, seen = attnpack.MultiHeadAttention(EMBED, 4), []
    module.q_proj.register_forward_hook(lambda *args: seen.append("projection"))
    module.register_forward_pre_hook(lambda *args: seen.append("module"))
    module(torch.randn(1, 2, EMBED))
    assert seen == ["module", "projection"]
    with pytest.raises(TypeError, match="has hooks"):
        module.cpp()


def test_parametrised_projection_is_refused_by_cpp():
    module = attnpack.MultiHeadAttention(EMBED, 4)
    nn.utils.parametrizations.weight_norm(module.q_proj)
    module(torch.randn(1, 2, EMBED))
    with pytest.raises(TypeError, match="ParametrizedLinear"):
        module.cpp()


@pytest.mark.parametrize(("name", "norm"), [("q_norm", attnpack.RMSNorm(6, eps=0.5)), ("k_norm", nn.LayerNorm(6))])
def test_norms_of_queries_and_keys_that_cpp_does_not_have(name, norm):
    module = attnpack.MultiHeadAttention(24, 4, qk_norm=True)
    module.cpp()
    setattr(module, name, norm)
    with pytest.raises(TypeError, match="q_norm or k_norm is .*, C.. has RMSNorm with eps 1e-06 there"):
        module.cpp()


@pytest.mark.parametrize("case", some_long(ATTENDING, ATTENDING[::2]), ids=lambda case: case.name)
def test_compiles_whole_and_settles(case):
    """There is one graph, and no further one after the second length."""
    module, inputs = make_case(case)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="eager")  # the tests below cover other backends
    torch._dynamo.utils.counters.clear()
    graphs = []
    for length in (4, 6, 9):
        torch.manual_seed(length)
        data = [
            torch.randint(32, (2, length)) if not x.is_floating_point() else torch.randn(2, length, x.size(2))
            for x in inputs
        ]
        torch.testing.assert_close(compiled(*data), module(*data))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == 1 and graphs[2] == graphs[1] <= 2


def test_compiled_weights_and_scores_settle_too():
    module = attnpack.GroupedQueryAttention(EMBED, 4, 2, causal=True, rope=attnpack.RotaryEmbedding(6)).eval()

    def weights(x):
        return module(x, need_weights=True)[1]

    def scores(x):
        query, key, _ = module.project(x)
        return attnpack.attention_scores(query, key, causal=True, softcap=3.0)

    for function in (weights, scores):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        torch._dynamo.utils.counters.clear()
        for length in (4, 6, 9, 11):
            x = torch.randn(2, length, EMBED)
            torch.testing.assert_close(compiled(x), function(x))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_compiled_with_inductor_trains():
    torch.manual_seed(0)
    module = attnpack.GroupedQueryAttention(EMBED, 4, 2, causal=True, qk_norm=True, rope=attnpack.RotaryEmbedding(6))
    x = torch.randn(2, 5, EMBED, requires_grad=True)
    module(x).square().sum().backward()
    wanted = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    module.zero_grad()
    torch._dynamo.reset()
    torch.compile(module, fullgraph=True)(x).square().sum().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-4)


def test_autocast():
    torch.manual_seed(0)
    module, x = attnpack.MultiHeadAttention(EMBED, 4, causal=True), torch.randn(2, 5, EMBED)
    with torch.autocast("cpu", torch.bfloat16):
        low, native = module(x), module.cpp().forward(x)
    assert low.dtype == torch.bfloat16 and torch.equal(low, native)
    torch.testing.assert_close(low.float(), module(x), rtol=0.05, atol=0.05)


def test_rope_keeps_its_precision():
    rope = attnpack.RotaryEmbedding(64, base=1e5)
    before = rope.inv_freq
    assert not rope.to(torch.bfloat16).state_dict() and rope.inv_freq == before
    assert before[1] == 1e5 ** (-2 / 64) and len(before) == 32
    x, positions = torch.randn(2, 3, 4, 64), torch.tensor([[0, 1, 2, 3], [4096, 4097, 4098, 4099]])
    torch.testing.assert_close(rope(x, positions), rotated(rope, x, positions.unsqueeze(1)), rtol=1e-4, atol=1e-5)


def test_names_are_those_of_hugging_face():
    module = attnpack.GroupedQueryAttention(EMBED, 4, 2, bias=True, out_bias=False, qk_norm=True)
    projections = {f"{name}.{kind}" for name in ("q_proj", "k_proj", "v_proj") for kind in ("weight", "bias")}
    assert set(module.state_dict()) == projections | {"o_proj.weight", "q_norm.weight", "k_norm.weight"}
    assert module.k_proj.weight.shape == (12, EMBED)
    assert all(isinstance(getattr(module, name), nn.Linear) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))


@pytest.mark.parametrize("classes", [None, ["DecoderBlock"], ["GroupedQueryAttention"], ["Decoder"]], ids=str)
def test_weights_that_accelerate_offloads(classes):
    """Its hooks bring a layer's weights when the layer is called: until then they are on the device "meta"."""
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model, ids = attnpack.CausalLM(32, 24, 2, 4, 2, hidden_dim=32).eval(), torch.randint(32, (1, 5))
    with torch.no_grad():
        wanted = model(ids)
        accelerate.cpu_offload(model, preload_module_classes=classes)
        torch.testing.assert_close(model(ids), wanted)


@pytest.mark.parametrize("kind", ["layer", "model"])
def test_a_size_that_depends_on_data(kind):
    layer = attnpack.GroupedQueryAttention(EMBED, 4, 2, causal=True, rope=attnpack.RotaryEmbedding(6)).eval()
    model = attnpack.CausalLM(32, 24, 1, 4, 2, hidden_dim=32).eval()
    x, ids, keep = torch.randn(9, EMBED), torch.arange(9), torch.arange(9) % 3 > 0
    calls = {"layer": lambda keep: layer(x[keep][None]), "model": lambda keep: model(ids[keep][None])}
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(calls[kind], fullgraph=True, backend="aot_eager")
        for some in (keep, ~keep):
            torch.testing.assert_close(compiled(some), calls[kind](some))
