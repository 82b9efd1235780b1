"""Base of the layers that replace those of transformers: adopted parameters, and rotation by the model's tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..._C import checks
from ...cache import KVCache
from ...nn.linear import is_watched
from ...nn.norm import RMSNorm
from ...ops import apply_rope
from ..arguments import refuse_parts
from .families import HALVES, IN_TURN, ONCE


class Adopted:
    """Mixin, the first base before one of our attention modules. The constructor calls `_adopt_parts` at its end."""

    is_causal = True  # transformers reads it if it gives no mask

    def _adopt_parts(
        self, theirs: nn.Module, projections: Iterable[str], norms: Iterable[str], plus_one: bool = False
    ) -> None:
        """Takes children of `theirs` by name. Projections are taken as they are. Norms become our RMSNorm on the same
        weight, or on 1 + weight; a norm with hooks, as under tensor parallelism, is taken as it is."""
        for name in projections:
            setattr(self, name, getattr(theirs, name, None))
        for name in norms:
            norm = getattr(theirs, name, None)
            setattr(self, name, norm if norm is None or is_watched(norm) else norm_on_the_weight_of(norm, plus_one))
        self.is_causal = getattr(theirs, "is_causal", True)
        self.config = theirs.config
        self.layer_idx = theirs.layer_idx
        self.num_key_value_groups = theirs.num_key_value_groups
        self.train(theirs.training)

    def _make_cpp(self, device: str | None, dtype: torch.dtype | None = None) -> Any:
        if "layer_idx" not in self.__dict__:
            return super()._make_cpp(device, dtype)  # called by the constructor, so that C++ checks the arguments
        raise TypeError(
            "attnpack: a layer that replaces one of transformers has no C++ twin, because the model rotates for it; "
            "load the checkpoint with attnpack.CausalLM.from_hf for a model that runs in C++"
        )


def eps_of(norm: nn.Module) -> float:
    """The eps of an RMSNorm of transformers."""
    return norm.eps if hasattr(norm, "eps") else norm.variance_epsilon


def norm_on_the_weight_of(theirs: nn.Module, plus_one: bool) -> RMSNorm:
    norm = RMSNorm(theirs.weight.numel(), eps=eps_of(theirs), plus_one=plus_one, device="meta")
    norm.weight = theirs.weight
    return norm


_ANGLES: dict[str, Callable[[Tensor], Tensor]] = {
    HALVES: lambda part: part[..., : part.size(-1) // 2],
    ONCE: lambda part: part,
    IN_TURN: lambda part: part[..., ::2],
}


def cache_of_call(hidden_states: Tensor, past_key_values: Any, cache: Any) -> Any:
    """The cache of a call, or None: transformers names it `cache` from 5.24 on, and `past_key_values` before.

    Raises:
        ValueError: hidden_states is nested, both names are given, or the call is inside of `context_parallel`.
        TypeError: the cache is none of transformers.
    """
    refuse_parts()
    if hidden_states.is_nested:
        checks.padded("hidden_states", hidden_states)
    if past_key_values is not None and cache is not None:
        raise ValueError("attnpack: cache: got it and past_key_values, its name before transformers 5.24; give one")
    name, given = ("cache", cache) if past_key_values is None else ("past_key_values", past_key_values)
    if given is None or hasattr(given, "update"):
        return given
    kind = "an attnpack" if isinstance(given, KVCache) else "a"
    raise TypeError(
        f"attnpack: {name} is {kind} {type(given).__name__}, a replaced layer wants a cache of "
        "transformers: transformers.DynamicCache() or StaticCache"
    )


def rotated(
    x: Tensor,  # [B, H, L, R]
    table: tuple[Tensor, Tensor] | Tensor,
    interleaved: bool = False,
    kind: str = HALVES,
) -> Tensor:
    """x, of which the first R dims are rotated by a model's RoPE table: (cos, sin), each of a kind that `families.py`
    names, or cos + i sin as a complex [B, L, R / 2]."""
    if isinstance(table, Tensor):
        cos, sin = table.real, table.imag
    else:
        cos, sin = (_ANGLES[kind](part) for part in table)
    return apply_rope(x, cos.unsqueeze(1).float(), sin.unsqueeze(1).float(), interleaved=interleaved)
