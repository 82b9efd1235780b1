"""Modules whose linear layers are rounded to 8 or 4 bits in place."""

import copy
import json
from functools import partial

import attnpack
import gguf
import pytest
import torch
from attnpack import StoredEmbedding, StoredLinear, ops
from attnpack.convert import quantize_
from attnpack.tools import cli
from stored_blocks import llama_file, numbers_of
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


@pytest.mark.parametrize(("kind", "bits"), (("Q8_0", 8), ("Q4_0", 4)))
def test_a_file_is_written_again(tmp_path, kind, bits, capsys):
    source, out = llama_file(tmp_path / "source.gguf", ["Q5_K", "Q6_K"]), tmp_path / "out.gguf"
    assert cli.main(["convert", str(source), str(out), "--to-gguf", kind]) == 0
    assert f"matrices in {kind}" in capsys.readouterr().out
    numbers = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(source).tensors}
    for tensor in gguf.GGUFReader(out).tensors:
        own = torch.from_numpy(numbers[tensor.name])
        found = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        assert tensor.tensor_type.name == (kind if own.ndim == 2 else "F32")
        assert (found - own).norm() < (0.01 if bits == 8 else 0.12) * own.norm()
    before, after = (attnpack.CausalLM.from_gguf(p)(IDS).detach() for p in (source, out))
    assert (after - before).norm() < (0.05 if bits == 8 else 0.6) * before.norm()
    stored = attnpack.CausalLM.from_gguf(out, weights="stored")
    assert (stored(IDS) - after).norm() < 0.03 * after.norm()
    assert cli.main(["convert", str(source), str(tmp_path / "again.gguf"), "--to-gguf", kind, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["format"] == kind and report["bytes"] == (tmp_path / "again.gguf").stat().st_size
    assert cli.main(["convert", str(tmp_path), str(tmp_path / "x.gguf"), "--to-gguf", kind]) == 2
    assert "is a directory" in capsys.readouterr().err
    assert cli.main(["convert", str(source), str(source), "--to-gguf", kind]) == 2
    assert cli.main(["convert", str(source), str(tmp_path / "y.gguf"), "--to-gguf", kind, "--dtype", "bf16"]) == 2
    assert "--dtype: got together with --to-gguf" in capsys.readouterr().err


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
