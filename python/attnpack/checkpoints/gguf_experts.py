"""Mixtures of experts in GGUF files: the names of their tensors, and their settings as CausalLM's `experts`."""

from __future__ import annotations

from typing import Any

from .._C import checkpoints
from .gguf_settings import GgufSettings

EXPERTS = {"ffn_gate_inp": "mlp.gate"} | {
    f"ffn_{name}_exps": f"mlp.experts.*.{name}_proj" for name in ("gate", "up", "down")
}
SHARED = {f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
CORRECTION = {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
MOST_EXPERTS: int = checkpoints.MOST_EXPERTS
SOFTMAX, SIGMOID = 1, 2
"""Values of expert_gating_func."""


def experts(file: GgufSettings, normalize: bool, **more: Any) -> dict[str, Any]:
    used, count = file.size("expert_used_count"), file.size("expert_count")
    if count > MOST_EXPERTS:
        raise ValueError(f"{file.path}: {file.arch}.expert_count is {count}, wants at most {MOST_EXPERTS}")
    width = file.setting("expert_feed_forward_length") or max(file.size("feed_forward_length") // used, 1)
    return {
        "hidden_dim": file.size("expert_feed_forward_length", width),
        "num_experts": count,
        "top_k": used,
        "normalize": normalize,
        **more,
    }


def plain_experts(file: GgufSettings, normalize: bool, **more: Any) -> dict[str, Any]:
    """Experts that softmax scores, without groups."""
    file.refuse("expert_gating_func", usual=(SOFTMAX, 3))  # of all experts, or of those chosen
    return _without_groups(file, normalize, **more)


def sigmoid_experts(file: GgufSettings, normalize: bool, **more: Any) -> dict[str, Any]:
    """Experts that sigmoid scores, without groups; those of MiniMax-M2 and LFM2 have corrections."""
    file.refuse("expert_gating_func", usual=(SIGMOID,))
    return _without_groups(file, normalize, scores="sigmoid", **more)


def _without_groups(file: GgufSettings, normalize: bool, **more: Any) -> dict[str, Any]:
    file.refuse("expert_shared_count", "expert_group_count", "expert_group_used_count", usual=(0, 1))
    file.refuse("expert_weights_scale", usual=(0.0, 1.0))
    if file.setting("expert_weights_norm", normalize) is not normalize:
        raise ValueError(f"{file.path}: {file.arch}.expert_weights_norm is not {normalize}, which is not supported yet")
    return experts(file, normalize, **more)


def wide_experts(file: GgufSettings, **more: Any) -> dict[str, Any]:
    """Experts each as wide as feed_forward_length: llama.cpp writes no width of theirs for these architectures."""
    width = file.size("expert_feed_forward_length", file.size("feed_forward_length"))
    return plain_experts(file, normalize=True, **more) | {"hidden_dim": width}


def grouped_experts(file: GgufSettings, normalize: bool, gating: int) -> dict[str, Any]:
    """The experts of DeepSeek and its relatives; `normalize` and `gating` are what a file that says nothing means."""
    file.refuse("expert_gating_func", usual=(SOFTMAX, SIGMOID))
    if type(normalize := file.setting("expert_weights_norm", normalize)) is not bool:
        raise ValueError(f"{file.path}: {file.arch}.expert_weights_norm is {normalize!r:.80}, wants True or False")
    width, shared = file.size("expert_feed_forward_length"), file.setting("expert_shared_count")
    return experts(
        file,
        normalize=normalize,
        scores="sigmoid" if file.size("expert_gating_func", gating) == SIGMOID else "softmax",
        scaling=file.number("expert_weights_scale", 1.0),
        num_groups=file.size("expert_group_count", 1),
        top_groups=file.size("expert_group_used_count", 1),
        shared_dim=width * file.size("expert_shared_count") if shared else None,
        correction=corrected(file),
    )


def corrected(file: GgufSettings) -> bool:
    """Whether the choice of experts has corrections."""
    return any(name.endswith("e_score_correction_bias") for name in file.shapes)


def dense_first(file: GgufSettings, layers: int) -> list[dict[str, Any]]:
    """Settings by layer: the first leading_dense_block_count have no experts."""
    dense = file.size("leading_dense_block_count") if file.setting("leading_dense_block_count") else 0
    return [{"experts": i >= dense} for i in range(layers)]


def join_layers(options: dict[str, Any], layers: list[dict[str, Any]]) -> dict[str, Any]:
    """The options with further settings for each layer."""
    given = options.get("layer_settings") or [{}] * len(layers)
    return options | {"layer_settings": [a | b for a, b in zip(given, layers, strict=True)]}
