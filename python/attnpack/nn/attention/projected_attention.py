"""Attention over queries, keys and values that the caller has projected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch import Tensor

from ... import cpp
from ..._C import checks
from ...cache import CrossCache, KVCache
from ...errors import check_input, reject_keywords
from ...ops import nested
from ...signatures import SharedInputs, types_of
from ..rope import RotaryEmbedding
from .base import NativeAttention, packed_inputs, split_heads


class ProjectedAttention(NativeAttention):
    """Attention over q, k and v, which the caller has projected. It has no parameters.

    Args:
        num_heads, num_kv_heads, head_dim: number and width of the heads in the last dim of q, k and v.
        head_map, causal, rope, scale, dropout, window, softcap: as in GroupedQueryAttention.
    """

    _cpp_class = cpp.ProjectedAttention

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        head_map: Sequence[int] | None = None,
        dropout: float = 0.0,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        softcap: float = 0.0,
        rope: RotaryEmbedding | None = None,
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.rope = rope
        self._configure(locals())
        self.head_map = None if head_map is None else tuple(head_map)

    @overload
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, need_weights: Literal[False] = False,
                **inputs: Unpack[SharedInputs[KVCache]]) -> Tensor: ...  # fmt: skip
    @overload
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, need_weights: Literal[True],
                **inputs: Unpack[SharedInputs[KVCache]]) -> tuple[Tensor, Tensor]: ...  # fmt: skip
    @overload
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, need_weights: bool,
                **inputs: Unpack[SharedInputs[KVCache]]) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        kv_lens: Tensor | None = None,
        kv_from: KVCache | None = None,
        need_weights: bool = False,
        **unknown: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """out [B, L, Hq * D], or (out, weights [B, Hq, L, keys]).

        Args:
            q: [B, L, Hq * D], or all three are jagged nested tensors [B, L*, Hq * D].
            k, v: [B, Lkv, Hkv * D]. Without a cache, keys whose length differs from that of q belong to another
                sequence: RoPE rotates them at 0..Lkv-1.
            kv_from: refused: k and v are given.

        The other arguments are those of GroupedQueryAttention.forward.
        """
        reject_keywords(unknown)
        if kv_from is not None:
            checks.no_kv_from("ProjectedAttention", True)
        if isinstance(cache, CrossCache):
            checks.projected_cache(True)
        causal = self.causal if causal is None else causal
        if nested.is_nested(q):
            nested.refuse(mask=mask, cache=cache, kv_lens=kv_lens, need_weights=need_weights)
            heads = self._heads(*packed_inputs(q, k, v, ("q", "k", "v")))
            return self._attend_nested(q, None if nested.same_sequences(q, k) else k, *heads, positions, causal)
        query, key, value = self._heads(q, k, v)
        return self._attend(
            None,
            query,
            key,
            value,
            cache,
            kv_lens,
            need_weights,
            positions=positions,
            cross=cache is None and q.size(1) != k.size(1),
            mask=mask,
            causal=causal,
        )

    if TYPE_CHECKING:

        @types_of(forward)
        def __call__(self) -> Any: ...  # type: ignore[override]

    def project(
        self, q: Tensor, k: Tensor, v: Tensor, *, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(q [B, Hq, L, D], k [B, Hkv, Lkv, D], v [B, Hkv, Lkv, D]), rotated, as the operator gets them."""
        query, key, value = self._heads(q, k, v)
        query, key = self._rotate(query, key, positions, q.size(1) != k.size(1))
        return query, key, value

    def _heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        check_input("q", q, self.num_heads * self.head_dim, None)
        check_input("k", k, self.num_kv_heads * self.head_dim, None)
        check_input("v", v, self.num_kv_heads * self.head_dim, None)
        if not torch.compiler.is_compiling():
            checks.keys_and_values(q, k, v)
        return (
            split_heads(q, self.num_heads),
            split_heads(k, self.num_kv_heads),
            split_heads(v, self.num_kv_heads),
        )
