"""The rules of scores as the ops under ``torch.ops`` take them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def scale_queries(query: Tensor, query_scale: Tensor | None) -> Tensor:
    """The query times the factors of its rows, if there are any."""
    return query if query_scale is None else torch.ops.attnpack.scale_queries(query, query_scale)


def flat_rules(query: Tensor, rules: Any) -> tuple[Tensor, dict[str, Any]]:
    """The query, and keywords among which the rules are, as the ops under torch.ops take them: queries are scaled, and
    the window is two numbers."""
    flat = dict(rules)
    query = scale_queries(query, flat.pop("query_scale", None))
    window = flat.pop("window", (-1, -1))
    if len(window) != 2:
        raise TypeError(f"attnpack: window is {window}, wants two ints (left, right), -1 for unbounded")
    flat["window_left"], flat["window_right"] = window
    return query, flat


def check_keywords(function: str, given: Any, taken: Any) -> None:
    """Raises for a keyword that the function does not have. Only traced calls ask: eager ones are checked in C++."""
    for name in given:
        if name not in taken:
            raise TypeError(f"attnpack: {function}() got an unexpected keyword argument '{name}'")


def draw_seed(dropout_p: float) -> Tensor | None:
    """A seed [1] from torch's generator on the CPU, where there is dropout."""
    return torch.randint(2**63 - 1, (1,), device="cpu") if dropout_p > 0 else None
