"""Modules whose linear layers are rounded to 8 or 4 bits in place."""

import copy
from functools import partial

import attnpack
import gguf
import pytest
import torch
from attnpack import StoredEmbedding, StoredLinear, ops
from attnpack.convert import quantize_
from stored_blocks import numbers_of
from torch import nn

SIZES = {"vocab_size": 96, "embed_dim": 64, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 96}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
IDS = torch.randint(96, (2, 9), generator=torch.Generator().manual_seed(4))


def make_model(**settings):
    torch.manual_seed(0)
    return attnpack.CausalLM(**SIZES | settings).eval()


def widened(rounded):
    """The same model with numbers in the place of the stored weights."""
    state = {
        name: ops.widen_stored(tensor) if tensor.dtype == torch.uint8 else tensor
        for name, tensor in rounded.state_dict().items()
    }
    twin = rounded.cpp()
    twin.assign_state_dict(state)
    return twin


@pytest.mark.parametrize("bits", (8, 4))
@pytest.mark.parametrize(
    "make",
    (
        lambda: attnpack.MultiHeadAttention(64, 4, bias=True),
        lambda: attnpack.GroupedQueryAttention(64, 4, 2, qk_norm=True),
        lambda: attnpack.FeedForward(64, 96, bias=True),
        lambda: attnpack.MixtureOfExperts(64, 32, num_experts=4, top_k=2),
        lambda: attnpack.DifferentialAttention(64, 4, 2),
        lambda: attnpack.MultiHeadLatentAttention(
            64, 4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16
        ),
    ),
)
def test_any_module_is_near_what_it_was(make, bits):
    torch.manual_seed(1)
    layer, x = make().eval(), torch.randn(2, 5, 64)
    exact = layer(x).detach()
    assert quantize_(layer, bits) is layer
    assert any(type(part) is StoredLinear for part in layer.modules())
    with torch.no_grad():
        found = layer(x)
    assert (found - exact).norm() < (0.02 if bits == 8 else 0.25) * exact.norm()
    assert torch.equal(layer.cpp().forward(x), found)
    near = widened(layer).forward(x)
    assert (found - near).norm() < 0.02 * near.norm()


@pytest.mark.parametrize("bits", (8, 4))
@pytest.mark.parametrize("tied", (True, False))
def test_a_language_model(tied, bits):
    plain = make_model(tie_embeddings=tied)
    exact = plain(IDS).detach()
    rounded = quantize_(copy.deepcopy(plain), bits=bits)
    assert type(rounded.model.embed_tokens) is (StoredEmbedding if tied else nn.Embedding)
    assert tied or type(rounded.lm_head) is StoredLinear
    kinds = {part.format for part in rounded.modules() if isinstance(part, StoredLinear | StoredEmbedding)}
    assert kinds == {"Q8_0" if bits == 8 else "Q4_0"}
    assert (rounded(IDS) - exact).norm() < (0.03 if bits == 8 else 0.4) * exact.norm()
    tokens = rounded.generate(IDS, max_new_tokens=5)
    assert torch.equal(tokens, rounded.cpp().generate(IDS, max_new_tokens=5))
    weight = plain.layers[1].mlp.up_proj.weight
    stored = rounded.layers[1].mlp.up_proj.weight
    kind = gguf.GGMLQuantizationType.Q8_0 if bits == 8 else gguf.GGMLQuantizationType.Q4_0
    theirs = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.detach().numpy(), kind), kind))
    # The package rounds by the scale before it is rounded to fp16: at most one code differs.
    own = numbers_of(stored, kind.name)
    assert (own - weight).norm() <= 1.001 * (theirs - weight).norm()
    with pytest.raises(RuntimeError, match="has no gradient"):
        rounded.layers[0](torch.randn(1, 3, 64, requires_grad=True))


def test_options_leave_layers_exact():
    model = partial(make_model, tie_embeddings=True)
    stored = {name for name, part in quantize_(model(), 4, exact_first=1, exact_last=2).named_modules()
              if isinstance(part, StoredLinear | StoredEmbedding)}  # fmt: skip
    assert stored == {
        *(f"model.layers.1.self_attn.{p}_proj" for p in "qkvo"),
        *(f"model.layers.1.mlp.{p}_proj" for p in ("gate", "up", "down")),
        "model.embed_tokens",
    }
    assert quantize_(model(), 4, head_bits=8).model.embed_tokens.format == "Q8_0"
    assert quantize_(model(tie_embeddings=False), 4, head_bits=8).lm_head.format == "Q8_0"
    assert type(quantize_(model(), 4, head_bits=0).model.embed_tokens) is nn.Embedding
    assert not [p for p in quantize_(model()).parameters() if p.requires_grad]


def test_rows_that_are_no_whole_blocks_stay():
    layer = quantize_(attnpack.FeedForward(64, 100))
    assert type(layer.down_proj) is nn.Linear and type(layer.up_proj) is StoredLinear
    x = torch.randn(2, 3, 64)
    assert torch.equal(layer.cpp().forward(x), layer(x))


def test_wrong_arguments_are_named_and_change_nothing():
    layer = attnpack.FeedForward(64, 96)
    for arguments, words in (
        ({"bits": 5}, "bits: got 5, want 8 or 4"),
        ({"exact_first": -1}, "exact_first: got -1"),
        ({"head_bits": 3}, "head_bits: got 3"),
    ):
        with pytest.raises(ValueError, match=words):
            quantize_(layer, **arguments)
    with torch.no_grad():
        layer.down_proj.weight[0, 0] = float("inf")
    with pytest.raises(ValueError, match="not finite"):
        quantize_(layer)
    assert not [part for part in layer.modules() if isinstance(part, StoredLinear)]


def test_what_cannot_be_rounded_in_place_is_refused():
    layer = attnpack.FeedForward(64, 96)
    for model, words in (
        (nn.Linear(64, 64), r"model is .*attnpack\.StoredLinear\.from_blocks"),
        (nn.Embedding(64, 64), r"model is .*attnpack\.StoredEmbedding\.from_blocks"),
        ({}, "model is .*wants a module in Python"),
        (layer.cpp(), r"model is .*wants a module in Python: quantize it, and then call \.cpp\(\)"),
    ):
        with pytest.raises(TypeError, match=words):
            quantize_(model)
    for spoil in (
        lambda part: part.register_forward_hook(lambda *_: None),
        lambda part: part.register_forward_pre_hook(lambda *_: None),
        lambda part: setattr(part, "forward", lambda x: x),
    ):
        hooked = attnpack.FeedForward(64, 96)
        spoil(hooked.up_proj)
        with pytest.raises(ValueError, match="model: up_proj has hooks or a forward of its own"):
            quantize_(hooked)
        assert not [part for part in hooked.modules() if isinstance(part, StoredLinear)]
    with torch.no_grad():
        layer.down_proj.weight.mul_(1e-8)
    with pytest.raises(ValueError, match="too small for a scale of fp16"):
        quantize_(layer)
    assert type(layer.up_proj) is nn.Linear and layer.up_proj.weight.requires_grad


def test_bits_that_are_stored_already():
    model = make_model()
    kept = {name: id(part) for name, part in quantize_(model, 4, head_bits=8).named_modules()}
    assert {name: id(part) for name, part in quantize_(model, 4, head_bits=8).named_modules()} == kept
    with pytest.raises(ValueError, match="model: .* is stored in Q4_0 already, and rounding it to Q8_0"):
        quantize_(model, 8)
    mixed = make_model()
    quantize_(mixed.layers[0], 8)
    with pytest.raises(ValueError, match=r"model: model\.layers\.0\..* is stored in Q8_0 already"):
        quantize_(mixed, 4)
    assert type(quantize_(mixed, 4, exact_first=1).layers[1].mlp.up_proj) is StoredLinear


def test_a_layer_in_two_places_stays_one():
    model = make_model()
    model.layers[2].mlp = model.layers[0].mlp
    model.layers[3].mlp.up_proj = model.layers[0].mlp.gate_proj
    exact = model(IDS).detach()
    quantize_(model)
    assert model.layers[2].mlp.up_proj is model.layers[0].mlp.up_proj
    assert model.layers[3].mlp.up_proj is model.layers[0].mlp.gate_proj
    assert (model(IDS) - exact).norm() < 0.03 * exact.norm()


def test_a_distributed_weight_is_refused(tmp_path):
    distributed = pytest.importorskip("attnpack.distributed")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/x", rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        model = distributed.tensor_parallel(make_model(), mesh)
        with pytest.raises(ValueError, match="model: .* is a DTensor"):
            quantize_(model)
        assert any(parameter.requires_grad for parameter in model.parameters())
    finally:
        torch.distributed.destroy_process_group()


def test_torchao_quantises_the_layers_in_python():
    torchao = pytest.importorskip("torchao.quantization")
    plain = make_model()
    with torch.no_grad():
        exact = plain(IDS)
        torchao.quantize_(plain, torchao.Int8WeightOnlyConfig())
        found = plain(IDS)
        cache = attnpack.ModelCache(4)
        steps = [plain(token, cache=cache) for token in IDS.split(1, 1)]
    assert (found - exact).norm() < 0.03 * exact.norm()
    torch.testing.assert_close(torch.cat(steps, 1), found, rtol=1e-4, atol=1e-4)
    with pytest.raises(TypeError, match=r"has a weight of the class Int8Tensor.*attnpack\.convert\.quantize_"):
        plain.generate(IDS, max_new_tokens=2)


def test_tensor_parallelism_refuses():
    distributed = pytest.importorskip("attnpack.distributed")
    from torch.distributed.device_mesh import DeviceMesh

    mesh = object.__new__(DeviceMesh)
    with pytest.raises(ValueError, match="holds stored weights .* which tensor parallelism cannot cut"):
        distributed.tensor_parallel(quantize_(make_model()), mesh)
