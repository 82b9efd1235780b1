"""Sentences for wrong inputs of the Python modules; wrong constructor arguments are found by their C++ twins."""

from typing import Any

import torch
from torch import Tensor, nn

from .linear import Linear


def check_input(name: str, tensor: Tensor, width: int, projection: nn.Module | None) -> None:
    """Raises unless `tensor` is [B, L, width] in the dtype and on the device of a plain linear `projection`."""
    if tensor.dim() != 3 or tensor.size(-1) != width:
        raise ValueError(f"attnpack: {name}: got shape {list(tensor.shape)}, want [batch, length, {width}]")
    if type(projection) not in (nn.Linear, Linear):
        return
    weight = projection.weight
    if tensor.device != weight.device:
        raise ValueError(
            f"attnpack: {name}: got device {tensor.device}, want the module's device {weight.device}; "
            "move one of them with .to()"
        )
    if tensor.dtype != weight.dtype and not torch.is_autocast_enabled(tensor.device.type):
        raise ValueError(
            f"attnpack: {name}: got dtype {tensor.dtype}, want the module's dtype {weight.dtype}; "
            "convert one of them with .to()"
        )


def check_context(x: Tensor, context: Tensor | None, value_context: Tensor | None, cache: object | None) -> None:
    """Context and cache exclude each other, value_context needs a context, and batches agree."""
    for name, other in (("context", context), ("value_context", value_context)):
        if other is not None and other.size(0) != x.size(0):
            raise ValueError(f"attnpack: {name}: got batch {other.size(0)}, want {x.size(0)} as in x")
    if value_context is not None and context is None:
        raise ValueError(
            "attnpack: value_context: got a tensor without context; give context, where the keys come from, too"
        )
    if context is not None and cache is not None:
        raise ValueError(
            "attnpack: cache: got one together with context; a cache holds self-attention's keys, leave it out"
        )


def reject_keywords(unknown: dict[str, Any]) -> None:
    """Raises TypeError for keywords that forward does not have."""
    if not unknown:
        return
    name = next(iter(unknown))
    hint = (
        "; use cache= with an attnpack.DynamicCache() or StaticCache" if name in ("kv_cache", "past_key_value") else ""
    )
    raise TypeError(f"forward() got an unexpected keyword argument '{name}'{hint}")
