"""Layers of stored weights: in compiled graphs, in state dicts, and their arguments."""

import copy

import attnpack
import pytest
import torch
from attnpack import StoredEmbedding, StoredLinear, ops
from attnpack.convert import quantize_
from stored_blocks import FORMATS, random_blocks
from torch import nn

SIZES = {"vocab_size": 96, "embed_dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 96}
IDS = torch.randint(96, (2, 9), generator=torch.Generator().manual_seed(4))


def make_model(**settings):
    torch.manual_seed(0)
    return attnpack.CausalLM(**SIZES | settings).eval()


def compiled(module):
    return torch.compile(module, backend="aot_eager", fullgraph=True)


@pytest.fixture(autouse=True)
def without_gradients():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


@pytest.mark.parametrize(
    "make",
    (
        lambda: attnpack.GroupedQueryAttention(64, 4, 2),
        lambda: attnpack.GroupedQueryAttention(64, 4, 2, bias=True),
        lambda: attnpack.FeedForward(64, 96),
        lambda: attnpack.MixtureOfExperts(64, 32, num_experts=4, top_k=2),
    ),
)
def test_layers_compile_as_one_graph(make):
    torch.manual_seed(0)
    layer, x = quantize_(make()).eval(), torch.randn(2, 3, 64)
    torch.testing.assert_close(compiled(layer)(x), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", (True, False))
def test_a_language_model_compiles_and_is_exported(tied):
    model = quantize_(make_model(tie_embeddings=tied)).double()
    whole = model(IDS)
    torch.testing.assert_close(compiled(model)(IDS), whole, rtol=0, atol=1e-12)
    exported = torch.export.export(model, (IDS,), strict=True)
    torch.testing.assert_close(exported.module()(IDS), whole, rtol=0, atol=1e-12)


def test_a_compiled_graph_runs_hooks():
    layer, x = quantize_(attnpack.GroupedQueryAttention(64, 4, 2)), torch.randn(2, 3, 64)
    layer.q_proj.register_forward_hook(lambda module, inputs, out: 2 * out)
    torch.testing.assert_close(compiled(layer)(x), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", (None, "meta"))
@pytest.mark.parametrize("tied", (True, False))
def test_a_state_dict_is_assigned_to_a_model_of_numbers(tied, device):
    stored = quantize_(make_model(tie_embeddings=tied), 4).to(torch.bfloat16)
    want = stored(IDS)
    blank = attnpack.CausalLM(**SIZES, tie_embeddings=tied, device=device).eval()
    blank.load_state_dict(stored.state_dict(), assign=True)
    assert torch.equal(blank(IDS), want)
    assert torch.equal(blank.cpp().forward(IDS), want)
    assert torch.equal(blank.generate(IDS, max_new_tokens=3), stored.generate(IDS, max_new_tokens=3))
    assert [type(part) for part in blank.modules()] == [type(part) for part in stored.modules()]
    assert not any(parameter.requires_grad for parameter in blank.parameters())
    layer = attnpack.FeedForward(64, 96, bias=True)
    other = quantize_(copy.deepcopy(layer))
    layer.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(layer(torch.ones(1, 1, 64)), other(torch.ones(1, 1, 64)))


def test_a_state_dict_that_does_not_fit_is_refused():
    state, blank = quantize_(make_model()).state_dict(), make_model()
    kept = {name: tensor.clone() for name, tensor in blank.state_dict().items()}
    with pytest.raises(ValueError, match=r"state dict: model\.layers\.0\..*weight is stored .* pass assign=True"):
        blank.load_state_dict(state)
    with pytest.raises(ValueError, match="state dict: .* want .* or the same weight in stored blocks, by assign_state"):
        blank.cpp().load_state_dict(state)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in blank.state_dict().items())
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(RuntimeError, match="size mismatch"):
        blank.load_state_dict(state | {name: state[name][:5]}, assign=True)


def test_wrong_blocks_are_named():
    for make in (StoredLinear.from_blocks, StoredEmbedding.from_blocks):
        for weight, words in (
            (torch.zeros(3, 2, 17, dtype=torch.uint8), r"weight: got blocks of 17 bytes, want 34 \(Q8_0\)"),
            (torch.zeros(3, 2, 34), r"weight: got .* of shape \[3, 2, 34\], want stored weights"),
            (torch.zeros(3, 34, dtype=torch.uint8), "weight: got .* want stored weights"),
        ):
            with pytest.raises(ValueError, match=words):
                make(weight)
        with pytest.raises(TypeError, match="weight"):
            make([1, 2])
    blocks = random_blocks("Q4_0", rows=3, inputs=64)
    with pytest.raises(ValueError, match=r"bias: got shape \(4,\), want \(3,\)"):
        StoredLinear.from_blocks(blocks, torch.zeros(4))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_layer_of_blocks_says_what_it_is(kind):
    layer = StoredLinear.from_blocks(random_blocks(kind, rows=5, inputs=512))
    assert (layer.in_features, layer.out_features, layer.format) == (512, 5, kind)
    assert type(layer.weight) is nn.Parameter and f"format={kind}" in repr(layer)
    assert torch.equal(layer(torch.eye(512).double()).t(), ops.widen_stored(layer.weight, torch.float64))
