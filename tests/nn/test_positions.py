"""Fixed and learned positions: the formula, stacks and language models that add them, both languages."""

import math

import attnpack
import pytest
import torch
from attnpack import ops
from torch import nn

E = 24


def formula(positions, dim, base=10000.0):
    """Section 3.5 of Vaswani et al. 2017, number by number."""
    table = torch.empty(positions, dim, dtype=torch.float64)
    for p in range(positions):
        for i in range(dim // 2):
            angle = p / base ** (2 * i / dim)
            table[p, 2 * i], table[p, 2 * i + 1] = math.sin(angle), math.cos(angle)
    return table


@pytest.mark.parametrize("positions, dim, base", [(1, 2, 10000.0), (50, 24, 10000.0), (9, 6, 100.0)])
def test_the_table_is_the_formula(positions, dim, base):
    table = ops.sinusoidal_positions(positions, dim, base=base)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table, formula(positions, dim, base).float(), rtol=0, atol=1e-7)


def test_a_stack_adds_fixed_rows():
    torch.manual_seed(0)
    block = attnpack.EncoderBlock(attnpack.MultiHeadAttention(E, 4), attnpack.FeedForward(E, 32))
    table = nn.Embedding.from_pretrained(ops.sinusoidal_positions(9, E))
    plain, placed = attnpack.Encoder([block]), attnpack.Encoder([block], embed_positions=table)
    x = torch.randn(2, 5, E)
    for module in (placed, placed.cpp()):
        torch.testing.assert_close(module.forward(x), plain(x + table.weight[:5]))
    assert not dict(placed.cpp().named_parameters())["embed_positions.weight"].requires_grad


def model(**settings):
    torch.manual_seed(0)
    return attnpack.CausalLM(
        32, E, 2, 4, hidden_dim=32, max_positions=16, position_embedding="sinusoidal", **settings
    ).eval()


@torch.no_grad()
def test_a_language_model_with_fixed_positions():
    ours = model()
    assert torch.equal(ours.model.embed_positions.weight, ops.sinusoidal_positions(16, E))
    assert not ours.model.embed_positions.weight.requires_grad and ours.layers[0].self_attn.rope is None
    ids = torch.randint(32, (2, 6))
    whole, cache = ours(ids), attnpack.ModelCache(2)
    steps = torch.cat([ours(part, cache) for part in ids.split([3, 1, 2], 1)], 1)
    torch.testing.assert_close(steps, whole, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours.cpp().forward(ids), whole)
    own = attnpack.cpp.CausalLM(32, E, 2, 4, hidden_dim=32, max_positions=16, position_embedding="sinusoidal")
    assert torch.equal(own.state_dict()["model.embed_positions.weight"], ops.sinusoidal_positions(16, E))
    tokens = ours.generate(ids, max_new_tokens=8)
    greedy = ids
    for _ in range(8):
        greedy = torch.cat([greedy, ours(greedy)[:, -1:].argmax(-1)], 1)
    assert torch.equal(tokens, greedy)


def test_training_leaves_fixed_positions():
    ours = model().train()
    before = ours.model.embed_positions.weight.clone()
    optimiser = torch.optim.SGD([p for p in ours.parameters() if p.requires_grad], lr=0.1)
    ours(torch.randint(32, (2, 6))).pow(2).sum().backward()
    optimiser.step()
    assert torch.equal(ours.model.embed_positions.weight, before)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((0, 4), "positions: got 0, want at least 1"),
        ((4, 5), "dim: got 5, want an even number"),
        ((4, 0), "dim: got 0, want an even number"),
        ((4, 4, float("inf")), "base: got inf, want a number above 0"),
        ((2**40, 2**30), "positions and dim make a tensor"),
    ],
)
def test_wrong_tables_are_refused(arguments, words):
    positions, dim, *base = arguments
    with pytest.raises(ValueError, match=words):
        ops.sinusoidal_positions(positions, dim, **({"base": base[0]} if base else {}))


@pytest.mark.parametrize("package", [attnpack, attnpack.cpp], ids=["python", "cpp"])
def test_unknown_positions_are_refused(package):
    with pytest.raises(ValueError, match="position_embedding: got 'x', want 'rope', 'learned', 'sinusoidal' or 'none'"):
        package.CausalLM(32, E, 1, 4, position_embedding="x")
