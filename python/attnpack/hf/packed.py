"""Sequences packed into one row, as transformers' DataCollatorWithFlattening packs them. L tokens, B rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import values_of, wrong_kind

_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k")
_SHAPES = {**dict.fromkeys(_LENGTHS, "[sequences + 1]"), "seq_idx": "[batch, length]"}


def named_sequences(others: Mapping[str, Any], query: Tensor, key: Tensor) -> Tensor | None:
    """The number of each token's sequence; None if `others` does not mention packing.

    Args:
        others: keywords of an attention function; `cu_seq_lens_q`, `cu_seq_lens_k` and `seq_idx` are read.
        query, key: [B, H, L, D].

    Returns:
        integers [1 or B, L].

    Raises:
        TypeError: one of the three is no tensor.
        ValueError: the sequences are not those of these queries and keys.
    """
    lengths = {name: others[name] for name in _LENGTHS if others.get(name) is not None}
    index = others.get("seq_idx")
    if not lengths and index is None:
        return None
    for name, value in (lengths or {"seq_idx": index}).items():
        if not isinstance(value, Tensor):
            raise wrong_kind(
                name, value, f"an int32 or int64 tensor {_SHAPES[name]}: torch.tensor() makes one of a list"
            )
    rows, length = query.size(0), query.size(2)
    if key.size(2) != length:
        raise ValueError(
            f"attnpack: {next(iter(lengths), 'seq_idx')}: got {length} queries and {key.size(2)} keys, wants as many "
            "keys as queries: give packed sequences to the model whole, without a static cache or one that holds tokens"
        )
    if lengths:
        for name, ends in lengths.items():
            _check_lengths(name, ends, rows, length)
        _check_equal(**lengths)
        # Sequence n owns the tokens from ends[n] to ends[n + 1], and both lengths say the same.
        tokens = torch.arange(length, device=query.device)
        index = torch.bucketize(tokens, ends[1:].to(query.device), right=True).unsqueeze(0)
    elif index.dim() != 2 or index.size(0) not in (1, rows) or index.size(1) != length:
        raise ValueError(
            f"attnpack: seq_idx has shape {list(index.shape)}, wants [{rows}, {length}]: the number of each token's "
            "sequence"
        )
    return index


def same_sequence(
    sequences: Tensor,  # [1 or B, L]
) -> Tensor:
    """The mask of the keys that belong to each query's own sequence, bool [1 or B, 1, L, L]."""
    return (sequences[:, :, None] == sequences[:, None, :]).unsqueeze(1)


def ends_of(
    sequences: Tensor,  # [1 or B, L]
    rows: int,
) -> Tensor | None:
    """cu_seqlens [N + 1] of all rows' tokens, one row after the other; None if a sequence is in several pieces."""
    length = sequences.size(1)
    if length == 0:
        return None
    starts = torch.ones_like(sequences, dtype=torch.bool)
    starts[:, 1:] = sequences[:, 1:] != sequences[:, :-1]
    for row, begins in zip(sequences, starts, strict=True):
        if row[begins].unique().numel() != begins.sum():
            return None
    first = starts.expand(rows, -1).flatten().nonzero().squeeze(1)
    return torch.cat([first, first.new_tensor([rows * length])])


def _check_lengths(name: str, ends: Tensor, rows: int, length: int) -> None:
    if ends.dim() != 1 or ends.size(0) < 2 or ends.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"attnpack: {name} has shape {list(ends.shape)} and dtype {ends.dtype}, wants int32 or int64 "
            "[sequences + 1]: where each sequence starts, and the end of the last"
        )
    if rows != 1:
        raise ValueError(f"attnpack: {name}: got a batch of {rows} rows, wants one that holds all sequences: join them")
    values = values_of(ends)
    if values is not None and (values[0] != 0 or values[-1] != length or values != sorted(values)):
        raise ValueError(
            f"attnpack: {name} is {values}, wants numbers from 0 to {length} that never fall: where each sequence "
            "starts, and the end of the last"
        )


def _check_equal(cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None) -> None:
    if cu_seq_lens_q is None or cu_seq_lens_k is None or cu_seq_lens_q is cu_seq_lens_k:
        return
    queries, keys = values_of(cu_seq_lens_q), values_of(cu_seq_lens_k)
    if None not in (queries, keys) and queries != keys:
        raise ValueError(
            f"attnpack: cu_seq_lens_k is {keys}, wants {queries} as cu_seq_lens_q: keys and queries are the same tokens"
        )
