"""The cache of latent attention.

B batch, L length, C kv_lora_rank, R qk_rope_head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import check_lengths, wrong_kind
from .kv_cache import DynamicCache


class LatentCache(DynamicCache):
    """The latents of a MultiHeadLatentAttention. The cache grows as DynamicCache does.

    A position holds c after its norm and then the rotated k_rope: C + R numbers (576 in DeepSeek-V3). All positions lie
    in one buffer that the absorbed path reads as it is. `k` is [c | k_rope], [B, 1, len, C + R]; `v` is c,
    [B, 1, len, C], a view of `k`. The absorbed path takes them as keys and values. `nbytes` is B * len * (C + R) *
    element size. Under a SparseLatentAttention it holds `index` too, and `nbytes` counts it.

    Not thread-safe: appends of two threads to one cache may be lost without an error. Give each thread its own.
    """

    _kind = "LatentCache"

    @property
    def kv_lora_rank(self) -> int:
        """C; 0 before the first append."""
        return self._part("kv_lora_rank")

    def reserve_index(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """(keys, lengths) with room for new keys [B, 1, L, D] of an indexer, as that of a SparseCache. The next append
        must bring the latents of these positions."""
        room = self._room("reserve_index", key)
        return room.key, room.lengths

    @property
    def index(self) -> Tensor | None:
        """The keys of the indexer of a SparseLatentAttention, [B, 1, len, D], a view; None without an indexer."""
        return self._part("index")

    @property
    def c(self) -> Tensor | None:
        """The latents c, [B, 1, len, C], a view of `k`; None before the first append. The same as `v`."""
        return self.v

    @property
    def k_rope(self) -> Tensor | None:
        """The rotated keys that all heads share, [B, 1, len, R], a view of `k`; None before the first append."""
        return None if self.k is None else self.k[..., self.kv_lora_rank :]

    def to_latents(self, *, half_split: bool = False) -> tuple[Tensor, Tensor]:
        """Copies (c [B, 1, len, C], k_rope [B, 1, len, R]), as the DeepSeek layers of transformers cache them, without
        the keys of an indexer.

        With half_split, the rotated pairs (2i, 2i + 1) of an interleaved RotaryEmbedding move to (i, i + R/2).
        DeepseekV3Attention rotates interleaved pairs and caches them in this order; DeepseekV2Attention leaves them in
        place. Scores are the same in both orders, but caches are not.
        """
        if self.k is None:
            raise ValueError("attnpack: cache: got an empty one, want latents to give; run a forward with it first")
        rotated = self.k_rope
        if half_split:
            rotated = rotated.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return self.c.clone(), rotated.clone()

    @classmethod
    def from_latents(
        cls, c: Tensor, k_rope: Tensor, lengths: Tensor | None = None, *, half_split: bool = False
    ) -> LatentCache:
        """A cache that holds copies of c [B, 1, L, C] and k_rope [B, 1, L, R]; the opposite of `to_latents`.

        Args:
            lengths: int64 [B], valid positions of each sequence; default L.
            half_split: k_rope has the order that transformers' DeepseekV3Attention writes.
        """
        for name, tensor in (("c", c), ("k_rope", k_rope)):
            if not isinstance(tensor, Tensor):
                raise wrong_kind(name, tensor, "a tensor [batch, 1, length, width]")
        for name, tensor in (("c", c), ("k_rope", k_rope)):
            if tensor.dim() != 4 or tensor.shape[:3] != c.shape[:3] or tensor.size(1) != 1:
                raise ValueError(
                    f"attnpack: {name}: got shape {list(tensor.shape)}, want [batch, 1, length, width] with batch and "
                    f"length of c {list(c.shape)}"
                )
        if k_rope.dtype != c.dtype or (half_split and k_rope.size(-1) % 2):
            raise ValueError(
                f"attnpack: k_rope: got {k_rope.dtype} of width {k_rope.size(-1)}, want {c.dtype} as c has, of an even "
                "width: pairs rotate"
            )
        check_lengths("lengths", lengths, c[:, 0])
        if half_split:
            k_rope = k_rope.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        cache = cls()
        latents = torch.cat([c, k_rope], -1).detach()
        if latents.size(2) == 0:
            return cache
        keys, cache_lengths = cache.reserve_latents(latents, c.size(-1))
        keys.copy_(latents)
        cache_lengths.copy_(torch.full_like(cache_lengths, c.size(2)) if lengths is None else lengths)
        cache.commit(c.size(2), lengths)
        return cache
