"""SparseAttention: grouped-query attention over the keys that a selector names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch import Tensor, nn

from ... import cpp, ops
from ...cache import KVCache, SparseCache, unchanged_on_error
from ...errors import check_input, reject_keywords
from ...ops import indexer_loss
from ...signatures import Inputs, types_of
from ..linear import project
from ..rope import RotaryEmbedding
from .base import ContextAttention, split_heads
from .selection import IndexCache, check_flag, check_index_cache, check_norm, check_selects, name_keys, refuse


class SparseAttention(ContextAttention):
    """Grouped-query attention in which a query reads the keys that a selector names, and no others.

    The selector "indexer" is the lightning indexer of DeepSeek-V3.2: small heads score every key by sum_h w_h relu(q_h
    k), and a query attends the top_k best. Children index_q_proj, index_k_proj, index_k_norm (a LayerNorm, eps 1e-6)
    and index_weights_proj. Its choice has no gradient, so `indexer_loss` trains it. With "mean" (MoBA, Lu et al. 2025,
    arXiv 2502.13189) or "max" there is nothing to train: a query attends the top_k blocks of keys of the best mean, or
    of the greatest product. Each kv head chooses for its query heads. (MiniMax-M3 takes the greatest product too, but
    of projections of their own: `ops.select_blocks` and a GroupedQueryAttention make its layer.)

    Where all keys are selected, the call is that of GroupedQueryAttention. Children q_proj, k_proj, v_proj, o_proj.

    Args:
        embed_dim: width of x and of the output.
        num_heads, num_kv_heads: query and kv heads; consecutive query heads share a kv head.
        selector: "indexer", "mean" or "max".
        top_k: how many keys ("indexer") or blocks a query attends; required.
        key_block: keys of a block, for "mean" and "max"; default 64.
        num_local: how many of the newest keys or blocks are among the top_k in any case, the query's own first; default
            0 keys, 1 block. A causal "mean" wants at least 1.
        index_heads, index_head_dim: heads of the indexer and their width; default num_heads and head_dim.
        head_dim: default embed_dim / num_heads.
        bias: on q_proj, k_proj, v_proj; out_bias: on o_proj, default as bias.
        causal: each token sees itself and the tokens before it.
        rope: a RotaryEmbedding, or None for no rotation. It rotates the first dims of the indexer's heads too.
        dropout, softcap, scale: as in GroupedQueryAttention.
    """

    _cpp_class = cpp.SparseAttention
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    index_q_proj: nn.Linear
    index_k_proj: nn.Linear
    index_k_norm: nn.LayerNorm
    index_weights_proj: nn.Linear

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        selector: str = "indexer",
        top_k: int,
        key_block: int | None = None,
        num_local: int | None = None,
        index_heads: int | None = None,
        index_head_dim: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        dropout: float = 0.0,
        causal: bool = False,
        softcap: float = 0.0,
        rope: RotaryEmbedding | None = None,
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.rope = rope
        self._make_children(self._configure(locals()), device, dtype)
        self.kdim = self.vdim = embed_dim

    @overload
    def forward(self, x: Tensor, *, index_cache: IndexCache = None, need_weights: Literal[False] = False,
                **inputs: Unpack[Inputs[KVCache]]) -> Tensor: ...  # fmt: skip
    @overload
    def forward(self, x: Tensor, *, index_cache: IndexCache = None, need_weights: Literal[True],
                **inputs: Unpack[Inputs[KVCache]]) -> tuple[Tensor, Tensor]: ...  # fmt: skip
    @overload
    def forward(self, x: Tensor, *, index_cache: IndexCache = None, need_weights: bool,
                **inputs: Unpack[Inputs[KVCache]]) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool | None = None,
        cache: KVCache | None = None,
        index_cache: IndexCache = None,
        positions: Tensor | None = None,
        kv_lens: Tensor | None = None,
        need_weights: bool = False,
        **unknown: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of x [B, L, embed_dim] over the keys of x, and those of the cache, that the selector names.

        Args:
            mask: as in GroupedQueryAttention. The selector adds it to its scores, as `ops.select_keys` says.
                Blocks begin at key 0, so padding on the left moves their bounds.
            causal: default the module's own setting.
            cache: the call first appends the new keys and values. A SparseCache holds what the selector needs too, so
                that a step does not read all keys to choose among them (but for "max"). A SlidingWindowCache, a
                QuantizedCache and a CrossCache are refused. With a PagedCache each call copies the pages.
            index_cache: a LatentCache for the indexer's keys beside a cache that is no SparseCache, index_head_dim
                numbers per position; or a StaticCache of one head with v_head_dim 0.
            positions: int64 [L] or [B, L], for RoPE only; default the positions after the cached ones, or 0..L-1.
            kv_lens: [B], the number of valid new tokens of each sequence.
            need_weights: also return the probabilities before dropout, 0 for keys that are not named.

        Returns:
            out [B, L, embed_dim], or (out, weights [B, Hq, L, keys]).

        Raises:
            ValueError: a shape, dtype, device or length does not fit, or one of the caches is missing; nothing has been
                written to the caches then.
        """
        reject_keywords(unknown)
        self._check_call(x, cache, index_cache)
        causal = self.causal if causal is None else causal
        place = {"positions": positions, "causal": causal, "kv_lens": kv_lens, "mask": mask}
        sparse_cache = cache if isinstance(cache, SparseCache) else None
        with unchanged_on_error(index_cache), unchanged_on_error(sparse_cache):
            key_index = self._named(x, sparse_cache, index_cache, place) if self._indexes else None
            query, key, value = self._heads(x, None, None)
            if sparse_cache is not None and self._keeps_sums:
                sparse_cache.keep_sums(self.key_block, x.size(1))
            inputs = {"positions": positions, "cross": False, "mask": mask, "causal": causal}
            return self._attend(
                x, query, key, value, cache, kv_lens, need_weights, **inputs, **self._selection(key_index)
            )

    if TYPE_CHECKING:

        @types_of(forward)
        def __call__(self) -> Any: ...  # type: ignore[override]

    def new_cache(self) -> SparseCache:
        return SparseCache()

    def indexer_loss(
        self,
        x: Tensor,
        *,
        sparse: bool = False,
        mask: Tensor | None = None,
        causal: bool | None = None,
        positions: Tensor | None = None,
        kv_lens: Tensor | None = None,
    ) -> Tensor:
        """The loss that trains the indexer (DeepSeek-V3.2, section 2.1): the mean of KL(p || softmax(I)) over queries.

        Queries of padding, and those that may attend no key, do not count.
        p is the attention's probabilities, summed over the heads and divided by their sum; I are the indexer's scores.
        Gradients flow only into the indexer, whose parameters have names that begin with `index_`.

        Args:
            x: [B, L, embed_dim].
            sparse: p is that of attention over the keys that the indexer names, and I covers only these: for the time
                when the model is trained on its own choice. Otherwise both are over all keys: for warming up. Memory
                grows with x.size(1) * top_k then, and otherwise, as in a compiled graph, with the square of x.size(1).
            mask, causal, positions, kv_lens: as in forward.

        Returns:
            A number [], in fp32 at least.

        Raises:
            ValueError: the selector is "mean" or "max", or x does not fit.
        """
        if not self._indexes:
            raise ValueError(
                f"attnpack: indexer_loss: got selector '{self.selector}', which has nothing to train; want selector "
                "'indexer'"
            )
        self._check_call(x, None, None)
        check_flag("sparse", sparse)
        causal = self.causal if causal is None else causal
        place = {"positions": positions, "causal": causal, "kv_lens": kv_lens, "mask": mask}
        with torch.no_grad():
            key_index = self._named(x, None, None, place) if sparse else None
            settings = self._settings(x) | {"dropout_p": 0.0} | self._selection(key_index)
            settings |= {"rope": self._rope_settings, "need_weights": True, "at_names": key_index is not None}
            _, weights = ops.attend(*self._heads(x, None, None), **place, **settings)
        place |= {"rope": self._rope_settings, "at_names": key_index is not None}
        return indexer_loss(*self._indexer(x.detach()), weights, key_index, **place)

    def project(self, x: Tensor, *, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(q [B, Hq, L, D], k [B, Hkv, L, D], v [B, Hkv, L, D]), rotated, as the operator gets them."""
        return super().project(x, None, positions=positions)

    @property
    def _indexes(self) -> bool:
        return self.selector == "indexer"

    @property
    def _keeps_sums(self) -> bool:
        """Whether a SparseCache keeps the sums of blocks: of keys that are stored as they are read."""
        return self.selector == "mean" and not (self.rope is not None and self.rope.settings.raw_keys)

    @property
    def _rope_settings(self) -> Any:
        return None if self.rope is None else self.rope.settings

    def _selection(self, key_index: Tensor | None) -> dict[str, Any]:
        """Keywords of `ops.attend`."""
        if self._indexes:
            return {"key_index": key_index}
        blocks = {"key_block": self.key_block, "top_blocks": self.top_k, "local_blocks": self.num_local}
        return blocks | {"scorer": self.selector}

    def _indexer(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The indexer's queries [B, H, L, D] and keys [B, 1, L, D], not rotated, and weights [B, L, H]."""
        query = split_heads(project(self.index_q_proj, x), self.index_heads)
        key = self.index_k_norm(project(self.index_k_proj, x)).unsqueeze(1)
        return query, key, project(self.index_weights_proj, x)

    @torch.no_grad()
    def _named(
        self, x: Tensor, sparse_cache: SparseCache | None, index_cache: IndexCache, place: dict[str, Any]
    ) -> Tensor | None:
        """The keys that the indexer names, None for all. Its keys go into `sparse_cache`, or `index_cache`."""
        settings = place | {"rope": self._rope_settings}
        sizes = self.top_k, self.num_local, self.index_head_dim
        return name_keys(self._indexer(x), *sizes, sparse_cache, index_cache, settings)

    def _check_call(self, x: Tensor, cache: KVCache | None, index_cache: IndexCache) -> None:
        check_selects("SparseAttention", x, cache, "a DynamicCache or StaticCache")
        check_input("x", x, self.embed_dim, self.q_proj)
        if self._indexes:
            check_index_cache("SparseAttention", cache, index_cache, SparseCache)
        elif index_cache is not None:
            refuse("index_cache", "got one, but a selector of blocks has no keys of its own; leave it out")

    def _make_cpp(self, device: str | None, dtype: torch.dtype | None = None) -> Any:
        check_norm("index_k_norm", getattr(self, "index_k_norm", None))
        return super()._make_cpp(device, dtype)

    def _output(self, joined: Tensor, x: Tensor) -> Tensor:
        return project(self.o_proj, joined)
