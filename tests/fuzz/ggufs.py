"""Random GGUF files of each family that CausalLM.from_gguf reads: the logits of transformers on the same weights, or
refused by a sentence. The metadata is what llama.cpp's converter writes of a random configuration. Keys whose default
is meant are at times left out, and at times a key is there that the file's model has not: then the file is refused, or
the key changes nothing.

`python scripts/fuzz.py ggufs --seconds 60`
"""

from __future__ import annotations

import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import gguf_hybrids
import gguf_models
import numpy as np
import torch
import transformers
from families import peer_from
from stored_blocks import FORMATS, check_rounded, random_blocks

from fuzz import loaded
from fuzz.gguf_draws import OLDER, Drawn
from fuzz.gguf_hybrid_draws import HYBRIDS
from fuzz.gguf_newer_draws import NEWER
from fuzz.loaded import TEXT, Outcome, compare_logits

FAMILIES = OLDER | NEWER | HYBRIDS


def all_keys() -> list[str]:
    """The keys of an architecture that the package gguf knows."""
    parts = (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope)
    found = {value for part in parts for value in vars(part).values() if isinstance(value, str)}
    return sorted(key.removeprefix("{arch}.") for key in found if key.startswith("{arch}.") and "{dense}" not in key)


# Keys that have a meaning in every architecture, or in this one: the file then describes another model.
HONOURED = {
    "attention.head_count_kv", "attention.key_length", "attention.sliding_window", "attention.sliding_window_pattern",
    "final_logit_softcapping", "rope.freq_base", "rope.scaling.factor", "rope.scaling.type",
}  # fmt: skip
# Keys that change no number of these architectures: they go with another key, or are of one other architecture, or
# the shapes of tensors say the same.
IDLE = {
    "activation_sparsity_scale", "altup.active_idx", "altup.num_inputs", "attention.decay_lora_rank",
    "attention.gate_lora_rank", "attention.group_norm_epsilon", "attention.group_norm_groups",
    "attention.iclr_lora_rank", "attention.key_length_mla", "attention.kv_lora_rank", "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon", "attention.q_lora_rank", "attention.temperature_length",
    "attention.value_length_mla", "attention.value_residual_mix_lora_rank", "decoder_block_count",
    "decoder_start_token_id", "embedding_length_out", "embedding_length_per_layer_input",
    "expert_chunk_feed_forward_length", "expert_feed_forward_length", "expert_group_count", "expert_group_scale",
    "expert_group_used_count", "expert_shared_count", "expert_shared_feed_forward_length", "expert_used_count",
    "expert_weights_scale", "experts_per_group", "features_length", "interleave_moe_layer_step",
    "leading_dense_block_count", "moe_every_n_layers", "moe_latent_size", "n_deepstack_layers", "pooling_type",
    "rescale_every_n_layers", "rope.scaling.finetuned", "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "tensor_data_layout", "time_decay_extra_dim",
    "time_mix_extra_dim", "token_shift_count", "vocab_size",
}  # fmt: skip
# Values that change nothing where a key does not demand another.
NEUTRAL = {
    "attention.causal": True,
    "rope.scaling.attn_factor": 1.0,
    "expert_gating_func": 1,
    "expert_weights_norm": True,
    "use_parallel_residual": True,
}
NEUTRAL |= {"rope.scaling.yarn_attn_factor": 1.0, "rope.scaling.yarn_ext_factor": 1.0}


def foreign_key(rng: random.Random, drawn: Drawn) -> dict[str, Any]:
    honoured = HONOURED | drawn.honoured
    key = rng.choice([key for key in all_keys() if key not in drawn.metadata and key not in honoured])
    return {key: rng.choice([0, 1, 2, 3, 7, 0.0, 0.5, 1.0, 2.0, True, False, "linear", "x", [1, 2], [0.5]])}


def may_change_nothing(foreign: dict[str, Any], file: Drawn) -> bool:
    """Whether a file with that key beside its own may be read as if the key were not there."""
    for key, value in foreign.items():
        of_experts = key.startswith("expert_") and "expert_count" not in file.metadata
        width = (
            file.settings.get("head_dim") or file.metadata["embedding_length"] // file.metadata["attention.head_count"]
        )
        neutral = {NEUTRAL.get(key), width if key.endswith(("_length", "_count", "_swa")) else None}
        neutral.add(file.metadata.get("rope.freq_base", 10000.0) if key == "rope.freq_base_swa" else None)
        if value and key not in IDLE and not of_experts and (type(value) is list or value not in neutral):
            return False
    return True


def drawn(seed: int) -> tuple[str, Drawn, dict[str, Any]]:
    """(family, model and file, a key that the model has not, if any)"""
    rng = random.Random(seed)
    name = rng.choice(sorted(FAMILIES))
    file = FAMILIES[name](rng)
    return name, file, foreign_key(rng, file) if rng.random() < 0.4 else {}


def make_model(file: Drawn) -> Any:
    """transformers' model on random weights, or None where it has none of these settings."""
    torch.manual_seed(0)
    try:
        config = getattr(transformers, file.config)(**file.settings)
        model = peer_from(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            logits = model(TEXT).logits
    except Exception:  # of any kind: transformers checks little
        return None
    return model if logits.isfinite().all() else None


def tensors_of(model: Any, file: Drawn) -> dict[str, np.ndarray]:
    if file.arch in gguf_hybrids.CHANGES:
        return gguf_hybrids.hybrid_tensors(model, file.arch)
    return gguf_models.tensors_of(model, file.arch, file.absorbed)


def quantised(array: np.ndarray, kind: str) -> np.ndarray:
    """The array in a format. gguf has no quantiser of K types: there they are random numbers of about its size."""
    if not kind.endswith("_K"):
        return gguf.quants.quantize(array.astype(np.float32), gguf.GGMLQuantizationType[kind])
    *rows, inputs = array.shape
    largest = 2 * float(np.abs(array).mean()) / (127 * 31 if kind == "Q6_K" else 31 * 15)
    blocks = random_blocks(kind, math.prod(rows), inputs, seed=array.size, largest=largest)
    return blocks.flatten(1).view(*rows, -1).numpy()


@torch.no_grad()
def rounds_by_half_a_step(path: Path, dtype: torch.dtype) -> str:
    """Which layer of stored weights does more to its input, if any does, or whether logits are not finite."""
    import attnpack

    model, wrong = attnpack.CausalLM.from_gguf(path, weights="stored", dtype=dtype), []

    def check(name: str, layer: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        try:
            check_rounded(inputs[0], layer.weight, layer.format, out, layer.bias)
        except AssertionError:
            wrong.append(f"{name} in {layer.format} errs by more than half a step of its input in {dtype}")

    plain = model(TEXT)
    for name, layer in model.named_modules():
        if isinstance(layer, attnpack.StoredLinear):
            layer.register_forward_hook(partial(check, name))
    model(TEXT)
    return "" if plain.isfinite().all() and not wrong else wrong[0] if wrong else "logits are not finite"


def compare_stored(file: Drawn, foreign: dict[str, Any], tensors: dict[str, np.ndarray], path: Path) -> str:
    """What is wrong with the file whose matrices are quantised, if they stay so: in fp64 it has the logits of the
    expanded weights; in another dtype each layer moves its input by half a step. A scale that is not finite is refused
    or gives no finite logits."""
    import attnpack

    rng = random.Random(len(tensors) + sum(tensor.size for tensor in tensors.values()))
    blocks = {}
    for name, array in tensors.items():
        kinds = [kind for kind, (numbers, *_) in FORMATS.items() if array.shape[-1] % numbers == 0]
        if array.ndim >= 2 and kinds and rng.random() < 0.8:
            kind = rng.choice(kinds)
            blocks[name] = kind, quantised(array, kind)
    gguf_models.write(path, file.arch, file.metadata | foreign, tensors, blocks)
    with torch.no_grad():
        expanded = attnpack.CausalLM.from_gguf(path, dtype=torch.float64)(TEXT)
        found = attnpack.CausalLM.from_gguf(path, dtype=torch.float64, weights="stored")(TEXT)
        if not torch.allclose(found, expanded, rtol=1e-8, atol=1e-8):
            return f"stored weights move the logits by {float((found - expanded).abs().max()):.3g}"
    if complaint := rounds_by_half_a_step(path, rng.choice([torch.float32, torch.float32, torch.bfloat16])):
        return complaint
    if not blocks:
        return ""
    name = rng.choice(sorted(blocks))
    kind, stored = blocks[name]
    at = FORMATS[kind][2][0]
    damage = np.array([rng.choice([np.nan, np.inf])], np.float16).view(np.uint8)
    stored.reshape(-1, stored.shape[-1])[0, at : at + 2] = damage
    gguf_models.write(path, file.arch, file.metadata | foreign, tensors, blocks)
    try:
        with torch.no_grad():
            damaged = attnpack.CausalLM.from_gguf(path, weights="stored")(TEXT)
    except ValueError as error:
        return "" if "not finite" in str(error) else f"a damaged scale of {name} gives {error}"
    # Other tensors may be widened: latent attention's, and the router's.
    kept = name.endswith(("attn_output.weight", "ffn_down.weight"))
    return f"a damaged scale of {name} was taken" if kept and damaged.isfinite().all() else ""


def compare(name: str, file: Drawn, foreign: dict[str, Any], path: Path) -> Outcome:
    import attnpack

    model = make_model(file)
    if model is None:
        return "no model", ""
    what = f"{name} {foreign or ''} {file.metadata} {file.settings}"
    with torch.no_grad():
        wanted = model(TEXT).logits
        tensors = tensors_of(model, file)
    gguf_models.write(path, file.arch, file.metadata | foreign, tensors)
    outcome, wrong = compare_logits(attnpack.CausalLM.from_gguf, path, wanted, what)
    if outcome == "equal" and not wrong and (complaint := compare_stored(file, foreign, tensors, path)):
        return outcome, f"{what}: {complaint}"
    if outcome == "equal" and not may_change_nothing(foreign, file):
        return outcome, f"{what}: the key is ignored"
    return outcome, wrong


def run(seed: int, count: int, seconds: float) -> tuple[dict[str, int], list[str]]:
    """As `loaded.run`."""
    return loaded.run(lambda number, folder: compare(*drawn(number), folder / "model.gguf"), seed, count, seconds)


def main(seed: int, seconds: float) -> int:
    return loaded.report("ggufs", seed, run(seed, 10**9 if seconds else 1, seconds))
