"""DeepSeek-V4's compressed attention, whose queries attend entries made of several tokens.

B batch, H heads, L length, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compress_tokens(value: Tensor, gate: Tensor, bias: Tensor, overlap: bool = False) -> Tensor:
    """The entries of DeepSeek-V4's compressed attention: of each full window the sum of softmax(gate + bias) * value
    over its tokens, for each dim.

    Args:
        value, gate: [B, L, D], or with overlap [B, L, 2 * D]: the first D belong to the window's successor.
        bias: [tokens of a window, D or 2 * D].
        overlap: an entry is made of two windows, the one before and its own.

    Returns:
        [B, L / tokens, D].

    Raises:
        ValueError: a shape does not fit.
    """
    return torch.ops.attnpack.compress_tokens(value, gate, bias, overlap)


def name_entries(
    query: Tensor,
    entries: Tensor,
    weights: Tensor,
    top_k: int,
    *,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = True,
    rate: int,
) -> Tensor:
    """The entries that each query attends: the top_k by sum_h weights_h * relu(query_h key), of those that it sees.

    Args:
        query: [B, H, L, D], before rotation.
        entries: [B, 1, n, D], before rotation; entry i stands where token i * rate does.
        weights: [B, L, H].
        top_k: how many.
        cos, sin: [L, r/2], the angles of the tokens, which rotate the last r dims.
        interleaved: pairs (2i, 2i + 1) instead of (i, i + r/2).
        rate: tokens of an entry. A query sees an entry from the last of these tokens on.

    Returns:
        int32 [B, 1, L, min(top_k, n)], -1 for none.

    Raises:
        ValueError: a shape does not fit.
    """
    return torch.ops.attnpack.name_entries(query, entries, weights, top_k, cos, sin, interleaved, rate)


def attend_entries(
    query: Tensor,
    key: Tensor,
    entries: Tensor | None,
    named: Tensor | None,
    sinks: Tensor,
    *,
    window: int,
    scale: float | None = None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = True,
    rate: int,
) -> Tensor:
    """Attention over the last `window` tokens and over entries, in one softmax. The keys are the values too, and their
    rotation is undone at the position of the query.

    Args:
        query: [B, H, L, D], before rotation.
        key: [B, 1, L, D], before rotation.
        entries: [B, 1, n, D], before rotation, or None.
        named: of `name_entries`; None for all that a query sees.
        sinks: [H], logits that join the denominator.
        window: a token sees so many tokens: itself, and those right before it.
        scale: default 1 / sqrt(D).
        cos, sin, interleaved, rate: as in `name_entries`.

    Returns:
        [B, L, H * D].

    Raises:
        ValueError: a shape does not fit.
    """
    return torch.ops.attnpack.attend_entries(
        query, key, entries, named, sinks, window, scale, cos, sin, interleaved, rate
    )


def project_groups(joined: Tensor, weight: Tensor, groups: int) -> Tensor:
    """Each group of heads projected by rows of its own: [B, L, groups * W] by weight [groups * R, W] -> [B, L, groups *
    R].

    Raises:
        ValueError: a shape does not fit.
    """
    return torch.ops.attnpack.project_groups(joined, weight, groups)
