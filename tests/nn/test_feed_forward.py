"""Activations and the choice of experts against plain formulas, in both languages."""

import attnpack
import pytest
import torch
import torch.nn.functional as F

EMBED, HIDDEN = 6, 10
GATED = {
    "swiglu": lambda g, u: F.silu(g) * u,
    "geglu": lambda g, u: 0.5 * g * (1 + torch.erf(g / 2**0.5)) * u,
    "geglu_tanh": lambda g, u: 0.5 * g * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3))) * u,
    "clamped_swiglu": lambda g, u: g.clamp(max=7) / (1 + torch.exp(-1.702 * g.clamp(max=7))) * (u.clamp(-7, 7) + 1),
}
PLAIN = {
    "gelu": lambda u: 0.5 * u * (1 + torch.erf(u / 2**0.5)),
    "gelu_tanh": lambda u: 0.5 * u * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (u + 0.044715 * u**3))),
    "relu": lambda u: u.clamp(min=0),
}


def both(module, x):
    return module(x), module.cpp().forward(x)


@pytest.mark.parametrize("activation", [*GATED, *PLAIN])
def test_activations(activation):
    torch.manual_seed(0)
    layer = attnpack.FeedForward(EMBED, HIDDEN, activation=activation, bias=True, dtype=torch.float64)
    x = 30 * torch.randn(2, 9, EMBED, dtype=torch.float64)  # far past the clamps
    up = F.linear(x, layer.up_proj.weight, layer.up_proj.bias)
    assert up.abs().max() > 8
    if activation in GATED:
        inner = GATED[activation](F.linear(x, layer.gate_proj.weight, layer.gate_proj.bias), up)
    else:
        inner = PLAIN[activation](up)
        assert not hasattr(layer, "gate_proj")
    wanted = F.linear(inner, layer.down_proj.weight, layer.down_proj.bias)
    for out in both(layer, x):
        torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-10)


def chosen_by_hand(logits, *, scores, top_k, normalize, scaling, num_groups, top_groups, correction):
    """(expert, weight) pairs of one token, by loops over plain numbers."""
    values = logits.sigmoid() if scores == "sigmoid" else logits.softmax(-1)
    worth = (values + correction).tolist()
    size = len(worth) // num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(num_groups)]
    best = 2 if scores == "sigmoid" else 1

    def value_of(group):
        return sum(sorted((worth[e] for e in group), reverse=True)[:best])

    kept = [e for group in sorted(groups, key=value_of, reverse=True)[:top_groups] for e in group]
    chosen = sorted(kept, key=lambda e: worth[e], reverse=True)[:top_k]
    weights = [values[e].item() for e in chosen]
    total = sum(weights) if normalize else 1.0
    return [(e, scaling * w / total) for e, w in zip(chosen, weights, strict=True)]


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("groups", [(1, 1), (3, 2)], ids=["no groups", "groups"])
def test_experts_are_a_loop_over_tokens(scores, normalize, groups):
    torch.manual_seed(3)
    route = {
        "scores": scores,
        "normalize": normalize,
        "scaling": 1.5,
        "num_groups": groups[0],
        "top_groups": groups[1],
    }
    layer = attnpack.MixtureOfExperts(
        EMBED, HIDDEN, 6, 2, correction=True, gate_bias=True, shared_dim=4, dtype=torch.float64, **route
    )
    with torch.no_grad():
        layer.gate.weight.mul_(4)
        layer.gate.bias.normal_()
        layer.gate.e_score_correction_bias.normal_(std=0.3)
    x = torch.randn(3, 7, EMBED, dtype=torch.float64)
    rows = x.reshape(-1, EMBED)
    logits = F.linear(rows, layer.gate.weight, layer.gate.bias)
    wanted = []
    for row, scores_of_row in zip(rows, logits, strict=True):
        pairs = chosen_by_hand(scores_of_row, top_k=2, correction=layer.gate.e_score_correction_bias, **route)
        wanted.append(sum(w * layer.experts[e](row) for e, w in pairs) + layer.shared_experts(row))
    wanted = torch.stack(wanted).view_as(x)
    for out in both(layer, x):
        torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), wanted, rtol=1e-9, atol=1e-9)


def test_experts_that_nobody_chose_are_not_run_and_get_no_gradient():
    layer = attnpack.MixtureOfExperts(EMBED, HIDDEN, 3, 1, gate_bias=True)
    with torch.no_grad():
        layer.gate.bias.copy_(torch.tensor([0.0, 1e4, 0.0]))
        layer.experts[0].up_proj.weight.fill_(float("nan"))
    layer(torch.randn(4, EMBED)).sum().backward()
    assert layer.experts[0].up_proj.weight.grad is None and layer.experts[1].up_proj.weight.grad is not None
    assert layer.cpp().forward(torch.randn(4, EMBED)).isfinite().all()


def test_no_tokens():
    layer = attnpack.MixtureOfExperts(EMBED, HIDDEN, 3, 1)
    assert all(out.shape == (2, 0, EMBED) for out in both(layer, torch.empty(2, 0, EMBED)))


def test_sixteen_bits_of_a_norm_around_one():
    """1 + weight is not rounded to bf16: weights below its spacing near 1 count."""
    torch.manual_seed(0)
    norm = attnpack.RMSNorm(64, plus_one=True, dtype=torch.bfloat16)
    torch.nn.init.constant_(norm.weight, 0.003)
    x = torch.randn(50, 64, dtype=torch.bfloat16)
    exact = F.rms_norm(x.double(), (64,), 1 + norm.weight.double(), 1e-6).to(torch.bfloat16)
    for out in both(norm, x):
        assert (out == exact).double().mean() > 0.99
