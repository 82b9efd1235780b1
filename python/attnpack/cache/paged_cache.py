"""The cache whose sequences share the pages of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _C
from .kv_cache import KVCache

# torch.compiler.disable would import torch._dynamo with attnpack, which takes a second. Torch's own form of it waits
# for the first call.
_eager = torch._disable_dynamo


class PagedCache(KVCache):
    """Keys and values in pages of a pool that is allocated once (PagedAttention, Kwon et al. 2023).

    A sequence takes pages as it grows. Sequences share pages: `fork` and `reorder` copy none, and a page that several
    sequences hold is copied when one of them writes to it. A page that no sequence holds any more is free again, also
    when a cache ends. An append that finds too few free pages raises and changes nothing. Results have the bits that a
    DynamicCache gives.

    `k` and `v` are copies, gathered from the pages. `nbytes` counts the positions that the cache's sequences hold, and
    those that they share once. `nbytes_allocated` is the whole pool. A call with a mask, `need_weights`, dropout or
    gradients copies the pages into one piece. Latent attention raises. The batch is that of the constructor, of
    `reorder` or of `fork`; `reset()` keeps it. torch.compile breaks its graph at the cache. On CUDA a call waits for
    the device.

    Not thread-safe: appends of two threads to one cache may be lost without an error. Give each thread its own. Caches
    that share a pool (`fork`) may append in several threads, each cache in one thread.

    Args:
        batch, num_kv_heads, head_dim: the shape of the keys.
        page_size: positions of a page.
        num_pages: pages of the pool, which all sequences share.
        v_head_dim: width of the values; default head_dim.
        dtype, device: those of the module that uses the cache; default torch's defaults.
    """

    _kind = "PagedCache"

    @_eager
    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        page_size: int = 16,
        num_pages: int,
        v_head_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        sizes = batch, num_kv_heads, head_dim, page_size, num_pages, v_head_dim
        self._tensors, self._numbers = _C.cpp.paged_cache(*sizes, dtype, device)

    @_eager
    def _call_rule(self, rule: str, *arguments: Any) -> Any:
        return super()._call_rule(rule, *arguments)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Counts the pages of a copy anew: the other caches of the pool are not in it."""
        super().__setstate__(state)
        self._change("clone")

    def fork(self, index: Tensor | Sequence[int]) -> PagedCache:
        """A cache of len(index) sequences on the same pool; sequence i holds what sequence index[i] holds here.

        It copies no page. Each of the two caches can go on by itself, be changed and end.
        """
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._change("fork", index)
        return other

    def release(self, rows: Tensor | Sequence[int]) -> None:
        """These sequences become empty and give their pages back."""
        self._change("release", rows)

    def _after_rollback(self) -> None:
        self._change("give_back")

    @property
    def block_table(self) -> Tensor:
        """The pages of each sequence in order, then -1; int32 [B, num_pages] on the CPU."""
        return self._part("block_table")

    @property
    def k_pool(self) -> Tensor:
        """Keys [num_pages, page_size, Hkv, D]."""
        return self._part("k_pool")

    @property
    def v_pool(self) -> Tensor:
        """Values [num_pages, page_size, Hkv, Dv]."""
        return self._part("v_pool")

    @property
    def page_size(self) -> int:
        return self._part("page_size")

    @property
    def num_pages(self) -> int:
        return self._part("num_pages")

    @property
    def free_pages(self) -> int:
        """How many pages of the pool no sequence of any cache holds."""
        return self._part("free_pages")
