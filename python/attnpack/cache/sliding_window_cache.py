"""The cache of a window of the positions."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _C
from .kv_cache import KVCache


class SlidingWindowCache(KVCache):
    """Keeps what a causal window leaves to the positions to come, so that its memory is the same for any length.

    Its memory has room for `keep_first + left + 256 + max(64, left // 16)` positions, and for the new ones while a call
    appends more. For modules that are causal with a window no wider than this one; others raise. Results have the bits
    that a DynamicCache gives under the module's window. It takes shape, dtype and device from the first append, and
    again from the first append after `reset()`.

    `len(cache)` and `lengths` are the true lengths, with what has been dropped. `k` and `v` are what is stored: of
    sequence b the first `keep_first` positions, and then those from `keep_first + dropped[b]` on. A mask covers all
    positions, the dropped ones too, as with a DynamicCache, and may cover more than there are. The weights of
    `need_weights` are those of the stored positions. `crop` raises where a sequence has dropped positions that the
    window before the new end has; the last append can be taken back if it had at most 64 positions. On CUDA, `len`,
    `k`, `v`, `nbytes` and `crop` wait for the device.

    Not thread-safe: appends of two threads to one cache may be lost without an error. Give each thread its own.

    Args:
        window: how many positions before its own each position sees: an int, or the module's window (left, 0).
        keep_first: how many first positions stay. Every later position sees them too, whatever the module's window says
            (attention sinks, Xiao et al. 2023, section 3.2). Positions for RoPE are the true ones.
    """

    _kind = "SlidingWindowCache"

    def __init__(self, window: int | tuple[int, int], *, keep_first: int = 0) -> None:
        if torch.compiler.is_compiling():
            left, right = (window, 0) if isinstance(window, int) else window
            self._tensors, self._numbers = torch.ops.attnpack.sliding_window_cache(left, right, keep_first)
        else:
            self._tensors, self._numbers = _C.cpp.sliding_window_cache(window, keep_first)

    @property
    def window(self) -> tuple[int, int]:
        return self._part("window"), 0

    @property
    def keep_first(self) -> int:
        return self._part("keep_first")

    @property
    def dropped(self) -> Tensor:
        """How many positions of each sequence are no longer stored, int64 [B]."""
        return self._part("dropped")
