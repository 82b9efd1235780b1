"""Weights in FP8 and MXFP4, in both languages: the numbers of their formats, and the models of transformers."""

import json
import math
from pathlib import Path

import attnpack
import pytest
import torch
import transformers
from attnpack._C import checkpoints
from attnpack.tools import cli
from families import FAMILIES, SIZES
from hf_checkpoints import edit_config, edit_weights, from_hf_in_cpp, refused
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

TEXT = torch.randint(SIZES["vocab_size"], (2, 20), generator=torch.Generator().manual_seed(1))
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP Microscaling Formats 1.0, table 2


def write_model(name: str, directory: Path, **changed) -> None:
    torch.manual_seed(0)
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**family.theirs | changed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(directory)


def as_fp8(plain: dict, block: tuple[int, int], scale_dtype=torch.float32) -> tuple[dict, dict]:
    """(the tensors with matrices of layers in FP8, the same with the numbers that these stand for), by loops."""
    stored, numbers = {}, {}
    for name, tensor in plain.items():
        if tensor.ndim != 2 or "layers" not in name or name.endswith("mlp.gate.weight"):
            stored[name] = numbers[name] = tensor
            continue
        rows, columns = (math.ceil(size / each) for size, each in zip(tensor.shape, block, strict=True))
        values, scales = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
        numbers[name] = torch.empty(tensor.shape)
        for i in range(rows):
            for j in range(columns):
                piece = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
                scale = 2.0 ** math.ceil(math.log2(tensor[piece].abs().max().item() / 448))
                scale *= 1.0 if scale_dtype == torch.float8_e8m0fnu else 1.25
                scales[i, j], values[piece] = scale, (tensor[piece] / scale).to(torch.float8_e4m3fn)
                numbers[name][piece] = values[piece].float() * scale
        stored |= {name: values, f"{name}_scale_inv": scales.to(scale_dtype)}
    return stored, numbers


def quantize(source: Path, directory: Path, stored: dict, config: dict) -> None:
    directory.mkdir()
    save_file(stored, directory / "model.safetensors")
    given = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(given | {"quantization_config": config}))


def fp8_config(block) -> dict:
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}


@pytest.fixture
def fp8(tmp_path):
    """Writes a model of that family in FP8: (its directory, the numbers of its tensors)."""

    def write(name: str, block=(16, 16), scale_dtype=torch.float32, **changed):
        write_model(name, tmp_path / "plain", **changed)
        stored, numbers = as_fp8(load_file(tmp_path / "plain/model.safetensors"), block, scale_dtype)
        quantize(tmp_path / "plain", tmp_path / "fp8", stored, fp8_config(block))
        return tmp_path / "fp8", numbers

    return write


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "phi3"])
@pytest.mark.parametrize("block", [(16, 16), (20, 12), (128, 128), (2**63 - 1, 2**62)])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_is_values_times_scales(name, block, scale_dtype, fp8, tmp_path):
    directory, numbers = fp8(name, block, scale_dtype)
    save_file(numbers, tmp_path / "plain/model.safetensors")
    wanted = attnpack.CausalLM.from_hf(tmp_path / "plain").state_dict()
    for model in (attnpack.CausalLM.from_hf(directory), from_hf_in_cpp(directory)):
        found = dict(model.state_dict() if isinstance(model, torch.nn.Module) else model.named_parameters())
        assert found.keys() == wanted.keys()
        for weight, tensor in found.items():
            torch.testing.assert_close(tensor, wanted[weight], rtol=0, atol=0)


# Multiples of the block, as transformers wants them.
OF_FAMILY = {
    "llama": {},
    "qwen3_moe": {"moe_intermediate_size": 16, "head_dim": 16},
    "deepseek_v3": {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 16,
        "v_head_dim": 8,
        "moe_intermediate_size": 16,
    },
}


@pytest.mark.parametrize("name", OF_FAMILY)
def test_fp8_is_the_model_of_transformers(name, fp8):
    directory, _ = fp8(name, **OF_FAMILY[name])
    peer = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = peer(TEXT).logits
        found = attnpack.CausalLM.from_hf(directory)(TEXT)
    assert wanted.abs().max() > 0.1
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


@pytest.fixture
def mxfp4(tmp_path):
    """A gpt-oss whose experts are random bytes of MXFP4, as OpenAI releases it."""
    write_model("gpt_oss", tmp_path / "plain", hidden_size=64, intermediate_size=32)
    stored = load_file(tmp_path / "plain/model.safetensors")
    generator = torch.Generator().manual_seed(2)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inside, outside = stored.pop(name).shape
        shape = (experts, outside, inside // 32, 16)
        stored[f"{name}_blocks"] = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        stored[f"{name}_scales"] = torch.randint(119, 126, shape[:-1], dtype=torch.uint8, generator=generator)
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    quantize(tmp_path / "plain", tmp_path / "mxfp4", stored, config)
    return tmp_path / "mxfp4"


def test_mxfp4_is_its_format(mxfp4):
    stored = load_file(mxfp4 / "model.safetensors")
    edit_weights(mxfp4, lambda tensors: tensors["model.layers.0.mlp.experts.down_proj_scales"][0, 0, :].fill_(255))
    state = attnpack.CausalLM.from_hf(mxfp4).state_dict()
    in_cpp = dict(from_hf_in_cpp(mxfp4).named_parameters())
    assert state["model.layers.0.mlp.experts.0.down_proj.weight"][0].isnan().all()  # 255 is NaN
    for fused, names in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        blocks, scales = (stored[f"model.layers.1.mlp.experts.{fused}_{part}"] for part in ("blocks", "scales"))
        for expert in range(len(blocks)):
            for which, name in enumerate(names):
                key = f"model.layers.1.mlp.experts.{expert}.{name}.weight"
                assert torch.equal(in_cpp[key], state[key])
                for row in (0, 3, len(state[key]) - 1):
                    theirs = row * len(names) + which
                    wanted = [
                        (-1) ** (half >> 3) * E2M1[half & 7] * 2.0 ** (int(scale) - 127)
                        for block, scale in zip(blocks[expert, theirs], scales[expert, theirs], strict=True)
                        for byte in block.tolist()
                        for half in (byte & 15, byte >> 4)
                    ]
                    assert state[key][row].tolist() == wanted


def test_mxfp4_is_the_model_of_transformers(mxfp4):
    peer = AutoModelForCausalLM.from_pretrained(mxfp4, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        wanted = peer(TEXT).logits
        found = attnpack.CausalLM.from_hf(mxfp4)(TEXT)
    assert wanted.abs().max() > 0.1
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


def test_conversion_of_fp8_writes_plain_weights(fp8, tmp_path):
    directory, numbers = fp8("llama", num_key_value_heads=4)
    save_file({name: tensor.bfloat16() for name, tensor in numbers.items()}, tmp_path / "plain/model.safetensors")
    for source, out in ((directory, "of_fp8"), (tmp_path / "plain", "of_plain")):
        assert cli.main(["convert", str(source), str(tmp_path / out), "--kv-heads", "2"]) == 0
    found, wanted = (load_file(tmp_path / out / "model.safetensors") for out in ("of_fp8", "of_plain"))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name].bfloat16(), tensor, rtol=0, atol=0)
    assert found["model.layers.0.self_attn.k_proj.weight"].dtype == torch.bfloat16
    assert "quantization_config" not in json.loads((tmp_path / "of_fp8/config.json").read_text())


KEY = "model.layers.1.self_attn.q_proj.weight"
WRONG = {
    "a scale too few": (lambda t: t.update({f"{KEY}_scale_inv": t[f"{KEY}_scale_inv"][1:].clone()}), "want [2, 2]"),
    "integer scales": (lambda t: t.update({f"{KEY}_scale_inv": t[f"{KEY}_scale_inv"].int()}), "want F32"),
    "no scales": (lambda t: t.pop(f"{KEY}_scale_inv"), "is F8_E4M3; readable are"),
    "no values": (lambda t: t.pop(KEY), "lacks model.layers.1.self_attn.q_proj.weight"),
    "another FP8": (lambda t: t.update({KEY: t[KEY].to(torch.float8_e5m2)}), "wants F8_E4M3"),
    "scales of plain weights": (lambda t: t.update({KEY: t[KEY].float()}), "wants F8_E4M3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_scales_are_refused(name, fp8):
    directory, _ = fp8("llama")
    change, words = WRONG[name]
    edit_weights(directory, change)
    refused(directory, words, "layers.1.self_attn.q_proj.weight")


@pytest.mark.parametrize("part", ["blocks", "scales"])
def test_wrong_blocks_are_refused(part, mxfp4):
    name = f"model.layers.1.mlp.experts.down_proj_{part}"
    edit_weights(mxfp4, lambda tensors: tensors.update({name: tensors[name][:, :-1].clone()}))
    refused(mxfp4, "layers.1.mlp.experts")


@pytest.mark.parametrize("part", ["blocks", "scales"])
def test_one_part_alone_is_refused(part, mxfp4):
    edit_weights(mxfp4, lambda tensors: tensors.pop(f"model.layers.1.mlp.experts.down_proj_{part}"))
    refused(mxfp4, "layers.1.mlp.experts")


SETTINGS = {
    "quant_method = 'gptq'": {"quant_method": "gptq", "bits": 4},
    "quantization_config = True": True,
    "fmt = 'e5m2'": fp8_config((16, 16)) | {"fmt": "e5m2"},
    "weight_block_size = [16]": fp8_config((16,)),
    "weight_block_size = [16, 0]": fp8_config((16, 0)),
    "weight_block_size = None": {"quant_method": "fp8"},
    "rotation = 'hadamard'": fp8_config((16, 16)) | {"rotation": "hadamard"},
}


@pytest.mark.parametrize("words", SETTINGS)
def test_other_settings_are_refused_by_name(words, fp8):
    directory, _ = fp8("llama")
    edit_config(directory, quantization_config=SETTINGS[words])
    name, _, value = words.partition(" = ")
    refused(directory, "config.json", name, value.strip("'"))


def test_a_setting_that_changes_nothing_is_taken(fp8):
    directory, _ = fp8("llama")
    edit_config(directory, quantization_config=fp8_config((16, 16)) | {"scale_fmt": "ue8m0", "packed": None})
    assert checkpoints.HfCheckpoint(str(directory), None).dtype(KEY) == torch.bfloat16
    assert attnpack.CausalLM.from_hf(directory, dtype=torch.bfloat16)(TEXT).dtype == torch.bfloat16
