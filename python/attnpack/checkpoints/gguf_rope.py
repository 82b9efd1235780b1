"""How a GGUF file scales the angles of RoPE."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..file_errors import excerpt
from .gguf_settings import GgufSettings

ROPE_FREQS = "rope_freqs.weight"
# Settings of RoPE scaling that must have these values.
_ROPE_DEFAULTS = {
    "alpha": 0.0,
    "attn_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_log_multiplier": 0.0,
    "yarn_ext_factor": 1.0,
}


def rope_scaling(file: GgufSettings, head_dim: int, read: Collection[str]) -> dict[str, Any] | None:
    """The rope_scaling of a CausalLM; None if its angles are not scaled. Settings in `read` are the family's."""
    factor = file.setting("rope.scaling.factor", file.setting("rope.scale_linear", 1.0))
    kind = file.setting("rope.scaling.type", "linear" if factor != 1.0 else "none")
    for key, usual in _ROPE_DEFAULTS.items():
        if f"rope.scaling.{key}" in read:
            continue
        if (value := file.setting(f"rope.scaling.{key}", usual)) != usual:
            raise ValueError(
                f"{file.path}: {file.arch}.rope.scaling.{key} = {excerpt(repr(value))} is not supported yet"
            )
    if ROPE_FREQS in file.file.tensors:
        return _divided_frequencies(file, head_dim, kind, factor)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ValueError(
            f"{file.path}: {file.arch}.rope.scaling.type is {excerpt(repr(kind))}; readable are 'none', 'linear' "
            "and 'yarn'"
        )
    names = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    given = {ours: file.setting(f"rope.scaling.{theirs}") for ours, theirs in names.items()}
    trained = file.setting("rope.scaling.original_context_length") or file.required_setting("context_length")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": trained,
        **{name: value for name, value in given.items() if value},
    }


def _divided_frequencies(file: GgufSettings, head_dim: int, kind: str, factor: float) -> dict[str, Any]:
    """The scaling that rope_freqs.weight describes. It holds a divisor for each frequency, the result of Llama 3's
    scaling. This is LongRoPE with the same list for all lengths."""
    if kind not in ("none", "linear") or factor != 1.0:
        raise ValueError(
            f"{file.path}: has {ROPE_FREQS} together with rope.scaling.type {excerpt(repr(kind))}, which is not "
            "supported"
        )
    values = file.vector(ROPE_FREQS, head_dim // 2)
    return {"rope_type": "longrope", "short_factor": values, "long_factor": values, "attention_factor": 1.0}
