"""Models of transformers as GGUF files, as llama.cpp's converter writes them. The package gguf has the tensors' names;
what the converter changes of each architecture stands here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attnpack
import gguf
import numpy as np
import pytest
import torch
from attnpack._C import checkpoints
from torch import Tensor

LAYER_NORM = ("gpt2", "starcoder", "starcoder2", "falcon", "cohere2", "phi2", "gptneox", "stablelm")
PERMUTED = ("llama", "smollm3", "granite", "granitemoe", "arcee", "mistral3")  # q and k as interleaved pairs
_BUFFERS = (".attn.bias", ".attn.masked_bias")


def tensors_of(model: Any, arch: str, absorbed: bool = False) -> dict[str, np.ndarray]:
    """The tensors of the file. `absorbed`: DeepSeek's kv_b_proj as two halves, for absorbed heads."""
    config = model.config
    table = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch], config.num_hidden_layers)
    tensors: dict[str, np.ndarray] = {}

    def put(key: str, value: Tensor) -> None:
        found = table.get_name(key, try_suffixes=(".weight", ".bias"))
        assert found, key
        tensors[found] = _array(value)

    for key, value in model.state_dict().items():
        if key.endswith(_BUFFERS) or (key == "lm_head.weight" and config.tie_word_embeddings):
            continue
        value = _changed(arch, config, key, value)
        if key.endswith("kv_b_proj.weight") and absorbed:
            keys, values = _latent_halves(config, value)
            put(key.replace("kv_b", "k_b"), keys)
            put(key.replace("kv_b", "v_b"), values)
            continue
        layer, _, last = split_at_experts(key)
        if last:
            block = layer.removeprefix("model.layers.")
            for part, tensor in _experts(arch, last.removesuffix("_bias"), value, last.endswith("_bias")).items():
                tensors[f"blk.{block}.ffn_{part}_exps.{'bias' if last.endswith('_bias') else 'weight'}"] = tensor
        elif key.endswith("self_attn.sinks"):
            tensors[f"blk.{key.split('.')[2]}.attn_sinks.weight"] = _array(value)
        elif ".mlp.router." in key:
            tensors[f"blk.{key.split('.')[2]}.ffn_gate_inp.{key.rpartition('.')[2]}"] = _array(value)
        else:
            for name, part in _named(arch, config, key, value):
                put(name, part)
    return tensors | _frequencies(config)


def write(
    path: Path,
    arch: str,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    blocks: Mapping[str, tuple[str, np.ndarray]] = MappingProxyType({}),
) -> Path:
    """Metadata of the value None is left out; lists are arrays. blocks: (format, bytes) of tensors that have one."""
    writer = gguf.GGUFWriter(path, arch)
    kinds = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        if value is not None:
            kinds[type(value)](f"{arch}.{key}", value)
    for name, array in tensors.items():
        if name in blocks:
            kind, stored = blocks[name]
            writer.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@torch.no_grad()
def check_against(theirs: Any, path: Path) -> None:
    """Checks that the model of the file has the logits and the greedy tokens of a model of transformers, and that C++
    loads the same model."""
    ours = attnpack.CausalLM.from_gguf(path)
    state, native = ours.state_dict(), native_model(path).state_dict()
    assert state.keys() == native.keys() and all(torch.equal(state[key], native[key]) for key in state)
    ids = torch.randint(96, (2, 24))
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=0, atol=1e-4)
    tokens = ours.generate(ids[:, :6], max_new_tokens=10)
    wanted = theirs.generate(ids[:, :6], max_new_tokens=10, do_sample=False, use_cache=False)
    assert torch.equal(tokens, wanted)


def native_model(path: Path, dtype: torch.dtype = torch.float32, weights: str = "expanded") -> Any:
    """The model that C++ loads."""
    return checkpoints.causal_lm_from_gguf(str(path), dtype, None, weights)


def refused(path: Path, *words: str, **keywords: Any) -> None:
    """Checks that from_gguf refuses the file by a sentence that names it, has these words, and ends with the fix."""
    with pytest.raises(ValueError) as caught:
        attnpack.CausalLM.from_gguf(path, **keywords)
    message = str(caught.value)
    for word in (str(path), *words):
        assert word in message, message
    assert re.search(r"[:;,] (get|give|use|pass|join|convert|from_gguf reads) [^:;]*$", message), message


def split_at_experts(key: str) -> tuple[str, str, str]:
    """The layer, and the expert's tensor in it, whatever the family calls its mixture."""
    for theirs in (".block_sparse_moe.experts.", ".feed_forward.experts."):
        key = key.replace(theirs, ".mlp.experts.")
    return key.partition(".mlp.experts.")


def _array(value: Tensor) -> np.ndarray:
    return np.ascontiguousarray(value.numpy())


def _changed(arch: str, config: Any, key: str, value: Tensor) -> Tensor:
    """A tensor as the converter writes it."""
    heads, width = config.num_attention_heads, config.hidden_size
    if arch == "gpt2" and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return value.T
    if arch in ("gemma2", "gemma3") and key.endswith("norm.weight"):
        return value + 1
    if arch in PERMUTED and ("q_proj" in key or "k_proj" in key):
        of = heads if "q_proj" in key else config.num_key_value_heads
        return value.view(of, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
    if arch == "gptneox" and "query_key_value" in key:
        return value.view(heads, 3, -1, *value.shape[1:]).transpose(0, 1).reshape(value.shape)
    if arch == "falcon" and "query_key_value" in key:
        kv = config.num_kv_heads if config.new_decoder_architecture else 1 if config.multi_query else heads
        grouped = value.view(kv, heads // kv + 2, width // heads, *value.shape[1:])
        parts = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
        return torch.cat([part.reshape(-1, *value.shape[1:]) for part in parts])
    return value


def _named(arch: str, config: Any, key: str, value: Tensor) -> list[tuple[str, Tensor]]:
    """The tensor by the names that the converter gives the table."""
    if arch == "minimax-m2":
        key = key.replace(".mlp.gate.", ".block_sparse_moe.gate.").replace(".mlp.e_score", ".block_sparse_moe.e_score")
    if ".shared_mlp.input_linear." in key:
        halves = zip(("gate", "up"), value.chunk(2), strict=True)
        stem = key.partition("shared_mlp")[0] + ("mlp.shared_experts" if config.num_local_experts else "mlp")
        return [(f"{stem}.{name}_proj.weight", half) for name, half in halves]
    if ".shared_mlp." in key:
        shared = "mlp.shared_experts" if config.num_local_experts else "mlp"
        return [(key.replace("shared_mlp.output_linear", f"{shared}.down_proj"), value)]
    if key.endswith(".layer_scalar"):
        return [(f"{key}.weight", value)]
    key = key.replace(".block_sparse_moe.router.", ".mlp.gate.") if arch == "granitemoe" else key
    return [(key.replace("e_score_correction_bias", "e_score_correction.bias"), value)]


def _latent_halves(config: Any, value: Tensor) -> tuple[Tensor, Tensor]:
    nope, v_dim = config.qk_nope_head_dim, config.v_head_dim
    keys, values = value.view(config.num_attention_heads, nope + v_dim, -1).split([nope, v_dim], 1)
    return keys.transpose(1, 2), values


def _experts(arch: str, stem: str, value: Tensor, bias: bool) -> dict[str, np.ndarray]:
    value = value.transpose(1, 2) if arch in ("gpt-oss", "llama4") and not bias else value
    if stem == "gate_up_proj" and arch == "mistral4":
        return {"gate_up": _array(value)}
    if stem == "gate_up_proj":
        halves = (value[:, ::2], value[:, 1::2]) if arch == "gpt-oss" else value.chunk(2, 1)
        return {name: _array(half) for name, half in zip(("gate", "up"), halves, strict=True)}
    return {stem.removesuffix("_proj"): _array(value)}


def _frequencies(config: Any) -> dict[str, np.ndarray]:
    """The divisors of the frequencies that LongRoPE has, and those that come of Llama 3's scaling."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if rope.get("rope_type") == "proportional":  # most dims stay as they are
        half = config.per_layer_config[config.layer_types.index("full_attention")].head_dim // 2
        rotated = int(half * rope["partial_rotary_factor"])
        return {"rope_freqs.weight": np.array([1.0] * rotated + [1e30] * (half - rotated), np.float32)}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{n}.weight": np.array(rope[f"{n}_factor"], np.float32) for n in ("short", "long")}
    if rope.get("rope_type") != "llama3":
        return {}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((rope["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)}
