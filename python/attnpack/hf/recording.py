"""A record of what the attention layers of a transformers model compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import AttentionInterface


class Call(NamedTuple):
    """One call of `attention_forward`, as `attnpack.attention_scores` takes it, and its probabilities."""

    module: nn.Module
    query: Tensor  # [B, Hq, Lq, D]
    key: Tensor  # [B, Hkv, Lkv, D]
    mask: Tensor | None
    settings: dict[str, Any]
    weights: Tensor  # [B, Hq, Lq, Lkv]


calls_seen: ContextVar[list[Call] | None] = ContextVar("calls_seen", default=None)
"""Where `attention_forward` notes its calls, or None."""


@contextmanager
def recording(model: Any) -> Iterator[list[Call]]:
    """Inside, the model runs on attnpack, and the list that this gives gets each call of its attention. After that the
    model has the attn_implementation of before."""
    from . import NAME, register, unregister

    known = NAME in AttentionInterface._global_mapping
    before = [(config, config._attn_implementation_internal) for config in _configs(model)]
    token = calls_seen.set([])
    try:
        register()
        model.set_attn_implementation(NAME)
        yield calls_seen.get()
    finally:
        calls_seen.reset(token)
        for config, implementation in before:
            config._attn_implementation_internal = implementation
        if not known:
            unregister()


def _configs(model: nn.Module) -> list[Any]:
    """The configurations of the model and of its parts, each once."""
    found, waiting = {}, [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if id(config) not in found and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())
