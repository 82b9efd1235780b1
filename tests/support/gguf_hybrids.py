"""Models of transformers with recurrent layers as tensors of GGUF files, as llama.cpp's converter writes them: beside
`gguf_models`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
from gguf_models import _experts, _latent_halves, _named, split_at_experts
from torch import Tensor, cat


def hybrid_tensors(model: Any, arch: str) -> dict[str, np.ndarray]:
    config = model.config
    table = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch], config.num_hidden_layers)
    tensors: dict[str, np.ndarray] = {}
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        layer, _, last = split_at_experts(key)
        if last:
            for part, tensor in _experts(arch, last, value, bias=False).items():
                tensors[f"blk.{layer.removeprefix('model.layers.')}.ffn_{part}_exps.weight"] = tensor
            continue
        for name, part in CHANGES[arch](config, key, value):
            found = table.get_name(name, try_suffixes=(".weight", ".bias"))
            assert found, name
            tensors[found] = np.ascontiguousarray(part.numpy())
    return tensors


def _decay(key: str, value: Tensor) -> tuple[str, Tensor]:
    """What every recurrent family of the converter changes."""
    if key.endswith(".A_log"):
        return key, -value.exp()
    if key.endswith(".dt_bias"):
        return key.replace(".dt_bias", ".dt_proj.bias"), value
    return key, value.squeeze(1) if key.endswith(("conv1d.weight", "conv.conv.weight")) else value


def _lfm2(config: Any, key: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield _decay(key, value)


def _granite(config: Any, key: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    name, value = _decay(key, value)
    if key.endswith((".A_log", ".D")):
        value = value.unsqueeze(-1)
    elif key.endswith("mamba.norm.weight"):
        value = value.view(config.mamba_n_groups, -1)
    elif "q_proj" in key or "k_proj" in key:
        heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
        value = value.view(heads, 2, -1, value.shape[-1]).transpose(1, 2).reshape(value.shape)
    yield from _named("granitemoe", config, name, value)


def _qwen3_next(config: Any, key: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    name, value = _decay(key, value)
    if key.endswith("norm.weight") and not key.endswith("linear_attn.norm.weight"):
        value = value + 1
    if "in_proj_qkvz" not in key:
        yield name, value
        return
    heads, each = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    keys, values = config.linear_key_head_dim, each * config.linear_value_head_dim
    q, k, v, z = (part.flatten(0, 1) for part in value.unflatten(0, (heads, -1)).split([keys, keys, values, values], 1))
    yield name.replace("qkvz", "qkv"), cat([q, k, v])
    yield name.replace("qkvz", "z"), z


def _qwen3_5(config: Any, key: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    ((name, value),) = _qwen3_next(config, key, value)
    groups, keys = config.linear_num_key_heads, 2 * config.linear_num_key_heads * config.linear_key_head_dim

    def by_turns(x: Tensor, dim: int = 0) -> Tensor:
        grouped = x.unflatten(dim, (groups, config.linear_num_value_heads // groups, -1))
        return grouped.transpose(dim, dim + 1).flatten(dim, dim + 2)

    if name.endswith(("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", ".A_log", "dt_proj.bias")):
        value = by_turns(value)
    elif name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        value = cat([value[:keys], by_turns(value[keys:])])
    elif name.endswith("linear_attn.out_proj.weight"):
        value = by_turns(value, 1)
    yield name, value


def _lfm2_moe(config: Any, key: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    name, value = _decay(key, value)
    yield name.replace(".expert_bias", ".expert_bias.bias"), value


def _kimi_linear(config: Any, key: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    name, value = _decay(key.replace(".forget_gate.", "."), value)
    name = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
    if name.endswith("conv1d.weight"):
        for which, part in zip("qkv", value.chunk(3), strict=True):
            yield name.replace("conv1d", f"{which}_conv1d"), part[None, :, None]
    elif name.endswith("kv_b_proj.weight"):
        for which, part in zip("kv", _latent_halves(config, value), strict=True):
            yield name.replace("kv_b", f"{which}_b"), part
    else:
        yield name.replace("e_score_correction_bias", "e_score_correction.bias"), value


CHANGES = {
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "granitehybrid": _granite,
    "qwen3next": _qwen3_next,
    "qwen35": _qwen3_5,
    "qwen35moe": _qwen3_5,
    "kimi-linear": _kimi_linear,
}
