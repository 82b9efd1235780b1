"""The cache of attention over selected keys."""

from __future__ import annotations

from torch import Tensor

from .kv_cache import DynamicCache


class SparseCache(DynamicCache):
    """The keys and values of a SparseAttention, and what its selector keeps beside them. It grows as DynamicCache does.

    For the selector "indexer" that is the indexer's key of each position, and for "mean" the sum of each block of
    keys, so that a decode step reads these, and then the keys that it attends. "max" keeps nothing. A sum counts where
    its block is whole; the block in which a sequence ends is summed anew in each call.

    The module that fills it first says what it keeps, until `reset()`; another layer is refused. `nbytes` counts the
    selector's part too.

    Not thread-safe: appends of two threads to one cache may be lost without an error. Give each thread its own.
    """

    _kind = "SparseCache"

    def reserve_index(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """(keys, lengths) with room for new keys [B, 1, L, D] of an indexer; `lengths` is a copy. The next append must
        bring the keys and values of these positions, and counts them."""
        room = self._room("reserve_index", key)
        return room.key, room.lengths

    def keep_sums(self, block: int, new_len: int) -> None:
        """Lets the next append, of new_len positions, bring the sums of blocks of `block` keys up to date: `reserve`
        gives them as `block_sums`."""
        self._change("keep_sums", block, new_len)

    @property
    def index(self) -> Tensor | None:
        """The selector's state, a view: the indexer's keys [B, 1, len, D], or the sums [B, Hkv, blocks, D] of blocks
        of keys, in fp32 at least; None where it keeps nothing. Entries after the end of a sequence are unspecified, and
        so is the sum of a block that is not whole."""
        return self._part("index")

    @property
    def block(self) -> int:
        """Keys of a block of the sums; 0: `index` holds an indexer's keys, or nothing."""
        return self._part("block")
