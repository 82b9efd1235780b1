"""The functions of `attnpack.ops` that layers compute beside `attend`, under the name that programs may know."""

from .ops import (
    attend_entries,
    attend_shared,
    compress_tokens,
    delta_attend,
    gate_heads,
    gated_convolution,
    index_keys,
    indexer_loss,
    linear_attend,
    name_entries,
    pair_values,
    project_groups,
    select_blocks,
    select_keys,
    subtract_halves,
    subtract_pairs,
)

__all__ = [
    "attend_entries",
    "attend_shared",
    "compress_tokens",
    "delta_attend",
    "gate_heads",
    "gated_convolution",
    "index_keys",
    "indexer_loss",
    "linear_attend",
    "name_entries",
    "pair_values",
    "project_groups",
    "select_blocks",
    "select_keys",
    "subtract_halves",
    "subtract_pairs",
]
