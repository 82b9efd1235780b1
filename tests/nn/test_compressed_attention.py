"""CompressedAttention against transformers' layers of DeepSeek-V4, its ops against plain PyTorch."""

import attnpack
import pytest
import torch
from attnpack import reference
from attnpack.ops import attend_entries, compress_tokens, name_entries, project_groups
from entries import attended
from module_cases import YARN
from torch.library import opcheck
from torch.testing import assert_close
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

E, HEADS, LENGTH = 24, 4, 19
SIZES = {"head_dim": 12, "q_lora_rank": 10, "o_lora_rank": 6, "o_groups": 2, "window": 5}
KINDS = {
    "sliding_attention": {},
    "heavily_compressed_attention": {"compress_rate": 4},
    "compressed_sparse_attention": {"compress_rate": 3, "top_k": 2, "index_heads": 16, "index_head_dim": 8},
}
EACH = pytest.mark.parametrize("kind", KINDS)


def make(kind, seed=0, scaling=None, **settings):
    torch.manual_seed(seed)
    rope = attnpack.RotaryEmbedding(4, base=100.0, interleaved=True, max_positions=64, scaling=scaling)
    module = attnpack.CompressedAttention(E, HEADS, rope=rope, **SIZES | KINDS[kind] | settings)
    return randomise(module)


def randomise(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) / parameter.size(-1) ** 0.5)
    return module.eval()


def deepseek(kind, scaling=None):
    """A layer of transformers with random parameters, and a function from x to its output."""
    rope = {"rope_theta": 100.0, "partial_rotary_factor": 4 / 12, **(scaling or {"rope_type": "default"})}
    config = DeepseekV4Config(
        hidden_size=E, num_attention_heads=HEADS, head_dim=12, q_lora_rank=10, o_lora_rank=6, o_groups=2,
        sliding_window=5, num_hidden_layers=3, layer_types=list(KINDS), max_position_embeddings=64,
        compress_rates={"heavily_compressed_attention": 4, "compressed_sparse_attention": 3},
        index_topk=2, index_n_heads=16, index_head_dim=8, rope_parameters={"main": rope, "compress": rope},
        attn_implementation="eager",
    )  # fmt: skip
    layer, rotary = hf.DeepseekV4Attention(config, list(KINDS).index(kind)), hf.DeepseekV4RotaryEmbedding(config)
    randomise(layer)

    def call(x):
        places = torch.arange(x.size(1))
        table = {name: rotary(x, places.unsqueeze(0), layer_type=name) for name in ("main", "compress")}
        behind = places.unsqueeze(1) - places
        mask = torch.zeros(behind.shape).masked_fill((behind < 0) | (behind >= 5), -torch.inf)
        mask = mask.expand(x.size(0), 1, -1, -1)
        return layer(x, table, places.expand(x.size(0), -1), mask)[0]

    return layer, call


@EACH
@pytest.mark.parametrize("scaling", [None, YARN], ids=["plain", "yarn"])
def test_equal_to_deepseek_v4_by_names_and_numbers(kind, scaling):
    torch.manual_seed(1)
    layer, call = deepseek(kind, scaling)
    ours, x = make(kind, scaling=scaling), torch.randn(2, LENGTH, E)
    ours.load_state_dict(layer.state_dict(), strict=True)
    wanted = call(x)
    for each in (ours, ours.cpp()):
        assert_close(each.forward(x), wanted, atol=2e-5, rtol=1e-5)
    wanted.square().sum().backward()
    ours(x).square().sum().backward()
    theirs = dict(layer.named_parameters())
    for name, parameter in ours.named_parameters():
        if ".indexer." in name:
            assert parameter.grad is None and theirs[name].grad is None
        else:
            assert_close(parameter.grad, theirs[name].grad, atol=2e-4, rtol=1e-4)


@EACH
def test_later_tokens_change_nothing(kind):
    """So padding goes to the right; and a sequence may be shorter than a window of an entry."""
    module, x = make(kind), torch.randn(2, LENGTH, E)
    whole = module(x)
    for each in (module, module.cpp()):
        for length in (1, 2, 7, 12):
            assert_close(each.forward(x[:, :length]), whole[:, :length], atol=1e-5, rtol=1e-5)


@EACH
@pytest.mark.parametrize("language", ["python", "C++"])
def test_nan_in_later_tokens_changes_no_earlier_row(kind, language):
    """Also where NaN in the scores of the indexer makes it name entries that a query does not see."""
    module = make(kind)
    call = module if language == "python" else module.cpp().forward
    x = torch.randn(1, LENGTH, E)
    poisoned = x.clone()
    poisoned[:, 11:] = torch.nan
    assert_close(call(poisoned)[:, :11], module(x)[:, :11])


@EACH
def test_every_part_of_the_layer_matters(kind):
    """A parameter that is set to other numbers changes the output: an entry, a sink or an indexer is not left out."""
    module, x = make(kind), torch.randn(1, LENGTH, E)
    wanted = module(x)
    for name, parameter in list(module.named_parameters()):
        with torch.no_grad():
            before = parameter.clone()
            parameter.copy_(torch.randn_like(parameter))
            assert not torch.allclose(module(x), wanted, atol=1e-4), name
            parameter.copy_(before)


@EACH
def test_both_languages_round_trips_and_graphs(kind):
    module, x = make(kind), torch.randn(2, LENGTH, E)
    other = make(kind, seed=5)
    assert not torch.allclose(other(x), module(x))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x), module(x))
    twin = other.cpp()
    again = attnpack.CompressedAttention.from_cpp(twin)
    assert torch.equal(twin.clone().forward(x), module(x)) and torch.equal(again(x), module(x))
    assert list(dict(twin.named_parameters())) and set(dict(twin.named_parameters())) == set(module.state_dict())
    assert again._live_config() == module._live_config()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), module(x), atol=1e-5, rtol=1e-5)
    grads = []
    for each in (module, module.cpp()):
        module.zero_grad()
        each.forward(x).square().sum().backward()
        grads.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        assert_close(grads[1][name], grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("overlap", [False, True])
def test_entries_are_their_formula(overlap):
    value, gate, bias = (
        torch.randn(*size, 6, dtype=torch.float64, requires_grad=True) for size in ((2, 8), (2, 8), (3,))
    )
    inputs = (value, gate, bias, overlap)
    assert_close(compress_tokens(*inputs), reference.compress_tokens(*inputs))
    assert compress_tokens(value[:, :2], gate[:, :2], bias, overlap).shape == (2, 0, 3 if overlap else 6)
    torch.autograd.gradcheck(lambda *tensors: compress_tokens(*tensors, overlap), inputs[:3])
    opcheck(torch.ops.attnpack.compress_tokens.default, inputs)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("select", [True, False])
def test_attention_over_entries_is_one_softmax(select, interleaved):
    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    query, key, entries, sinks = draw(2, 3, 9, 8), draw(2, 1, 9, 8), draw(2, 1, 4, 8), draw(3)
    cos, sin = attnpack.ops.rope_table(torch.arange(9), [1.0, 0.1])
    rotation = {"cos": cos.double(), "sin": sin.double(), "interleaved": interleaved, "rate": 2}
    named = None
    if select:
        weights = torch.randn(2, 9, 3, dtype=torch.float64)
        named = name_entries(query.detach(), entries.detach(), weights, 2, **rotation)
        assert (named >= 0).sum(-1).tolist() == [[[0, 1, 1, 2, 2, 2, 2, 2, 2]]] * 2
        opcheck(torch.ops.attnpack.name_entries.default,
                (query.detach(), entries.detach(), weights, 2, *rotation.values()))  # fmt: skip
    out = attend_entries(query, key, entries, named, sinks, window=3, **rotation)
    wanted = attended(query, key, entries, named, sinks, 3, **rotation)
    assert_close(out, wanted, atol=1e-12, rtol=1e-12)
    leaves = (query, key, entries, sinks)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    grads = (torch.autograd.grad((each * weight).sum(), leaves) for each in (out, wanted))
    for ours, theirs in zip(*grads, strict=True):
        assert_close(ours, theirs, atol=1e-11, rtol=1e-11)
    call = (*(t.detach() for t in (query, key, entries)), named, sinks.detach(), 3, None, *rotation.values())
    opcheck(torch.ops.attnpack.attend_entries.default, call)


def test_groups_are_projected_by_rows_of_their_own():
    joined, weight = torch.randn(2, 5, 12), torch.randn(6, 4)
    wanted = torch.cat([joined[..., 4 * g : 4 * g + 4] @ weight[2 * g : 2 * g + 2].T for g in range(3)], -1)
    assert_close(project_groups(joined, weight, 3), wanted)
    opcheck(torch.ops.attnpack.project_groups.default, (joined, weight, 3))


WRONG = {
    "head_dim: got none|missing .*head_dim": {"head_dim": None},
    "o_groups: got 3, which does not divide num_heads 4": {"o_groups": 3},
    "window: got 0": {"window": 0},
    "compress_rate: got 0": {"compress_rate": 0},
    "top_k: got 2 without compress_rate": {"top_k": 2},
    "index_heads, index_head_dim: got one without top_k": {"compress_rate": 2, "index_heads": 2},
    "rope: got dim 16, want at most": {"rope": 16},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_options(message):
    for classes in (attnpack, attnpack.cpp):
        settings = {"rope": 4} | SIZES | WRONG[message]
        settings["rope"] = classes.RotaryEmbedding(settings["rope"])
        with pytest.raises((ValueError, TypeError), match=message):
            classes.CompressedAttention(E, HEADS, **settings)


def test_wrong_ropes_and_inputs():
    growing = {"rope_type": "dynamic", "factor": 2.0}
    for classes in (attnpack, attnpack.cpp):
        with pytest.raises(ValueError, match="rope: got frequencies that follow the length"):
            classes.CompressedAttention(E, HEADS, rope=classes.RotaryEmbedding(4, scaling=growing), **SIZES)
    with pytest.raises(TypeError, match="rope is .*None.*wants an attnpack.RotaryEmbedding"):
        attnpack.CompressedAttention(E, HEADS, rope=None, **SIZES)
    module = make("heavily_compressed_attention")
    for each in (module, module.cpp()):
        with pytest.raises(ValueError, match="x: got shape"):
            each.forward(torch.randn(2, 5, E + 1))
        for name in ("cache", "mask", "kv_lens"):
            with pytest.raises(TypeError, match=name):
                each.forward(torch.randn(2, 5, E), **{name: None})
    for each in (module, module.cpp()):
        with pytest.raises(TypeError, match=r"x is \[1\] \(list\), wants a tensor"):
            each([1])
    rows = torch.nested.nested_tensor([torch.zeros(2, E), torch.zeros(3, E)], layout=torch.jagged)
    with pytest.raises(ValueError, match="x is a nested tensor"):
        module(rows)
    module.kv_norm = attnpack.RMSNorm(12, eps=1e-3)
    with pytest.raises(TypeError, match="kv_norm is"):
        module.cpp()
    with pytest.raises(ValueError, match="value has shape|gate has shape"):
        compress_tokens(torch.zeros(1, 4, 2), torch.zeros(1, 4, 3), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="joined has shape"):
        project_groups(torch.zeros(1, 2, 5), torch.zeros(4, 2), 2)
