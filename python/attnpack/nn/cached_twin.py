"""Keeps the C++ twin of a model between calls, as long as the model stays as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Set
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..cache import ModelCache
from .linear import is_watched
from .native import NativeModule, refuse_global_hooks

_VALUES = frozenset({int, float, bool, str, type(None)})

# The list of _settings_of, the twin, and the tensors without memory that it holds between calls.
_Entry = tuple[list[Any], Any, dict[str, Tensor]]
_cache: WeakKeyDictionary[NativeModule, _Entry] = WeakKeyDictionary()


@contextlib.contextmanager
def cached_twin(model: NativeModule) -> Iterator[Any]:
    """The twin of a model on its present parameters, for the time of a ``with`` block.

    Each block gives the twin the parameters and takes them away again. So a kept twin has no weights that could be old,
    and keeps no tensor alive. It is made anew by ``model.cpp()``, with all its checks, if anything else of the model
    has changed. Two blocks at a time, in two threads or one in the other, get a twin each.
    """
    parameters: dict[str, Tensor] = {}
    settings = _settings_of(model, parameters)
    before, twin, blanks = _cache.pop(model, ([], None, {}))
    if before == settings:
        refuse_global_hooks()
        twin.assign_state_dict(parameters)
    else:
        twin, blanks = model.cpp(), {name: _blank(parameter) for name, parameter in parameters.items()}
    try:
        yield twin
    finally:
        twin.assign_state_dict(blanks)
        _cache[model] = settings, twin, blanks


def generate_by_twin(model: NativeModule, *inputs: Tensor, cache: str | ModelCache, **arguments: Any) -> Tensor:
    """``generate`` of the model's twin; the twin of a cache stays the memory of the cache."""
    stops = arguments["stop_tokens"]
    arguments["stop_tokens"] = list(stops) if isinstance(stops, Set | Iterator) else stops
    with contextlib.ExitStack() as stack:
        native_cache = stack.enter_context(cache.lent()) if isinstance(cache, ModelCache) else cache
        twin = stack.enter_context(cached_twin(model))
        return twin.generate(*inputs, cache=native_cache, **arguments)


def _blank(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="meta", requires_grad=like.requires_grad)


def _settings_of(model: nn.Module, parameters: dict[str, Tensor]) -> list[Any]:
    """All that a twin depends on, but for the parameters, which are added to the dict `parameters` by name.

    These are types, children, public attributes and hooks of all modules in their order. Two equal lists mean that
    nothing was changed. The sizes that an nn.Linear notes do not count: those of its weight do.
    """
    found: list[Any] = []

    def visit(module: nn.Module, prefix: str) -> None:
        kind, attributes = type(module), vars(module)
        of_module, children = attributes["_parameters"], attributes["_modules"]
        watched = is_watched(module) and object()  # which is like no other
        found.extend((kind, kind.forward, watched))
        for names in (attributes, of_module, children):
            found.extend(names)
        if kind is not nn.Linear:
            for name, value in attributes.items():
                if name[0] != "_":
                    found.append(value if type(value) in _VALUES else _frozen(value))
        for name, parameter in of_module.items():
            if parameter is not None:
                parameters[prefix + name] = parameter
        for name, child in children.items():
            if child is None:
                found.append(None)
            else:
                visit(child, f"{prefix}{name}.")

    visit(model, "")
    return found


def _frozen(value: Any) -> Any:
    """The value so that it can be compared with what it is later: containers as tuples, unknown objects by identity."""
    if type(value) in _VALUES:
        return value
    if isinstance(value, tuple | list):
        return tuple(value) if _VALUES.issuperset(map(type, value)) else tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((name, _frozen(item)) for name, item in value.items())
    return id(value)
