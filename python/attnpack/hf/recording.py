"""A record of what the attention layers of a transformers model compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import AttentionInterface

from . import NAME, register, unregister
from .calls import Call, calls_seen


@contextmanager
def recording(model: Any) -> Iterator[list[Call]]:
    """Inside, the model runs on attnpack, and the list that this gives gets each call of its attention. After that the
    model has the attn_implementation of before."""
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
