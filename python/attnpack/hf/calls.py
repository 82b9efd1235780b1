"""The calls of `attention_forward` that a program wants to see; `recording.py` runs a model and gives them."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor, nn


class Call(NamedTuple):
    """One call of `attention_forward`, as `attnpack.attention` takes it, and its probabilities."""

    module: nn.Module
    query: Tensor  # [B, Hq, Lq, D]
    key: Tensor  # [B, Hkv, Lkv, D]
    value: Tensor  # [B, Hkv, Lkv, Dv]
    mask: Tensor | None
    settings: dict[str, Any]
    weights: Tensor  # [B, Hq, Lq, Lkv]


calls_seen: ContextVar[list[Call] | None] = ContextVar("calls_seen", default=None)
"""Where `attention_forward` notes its calls, or None."""
