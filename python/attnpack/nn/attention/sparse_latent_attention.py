"""SparseLatentAttention: latent attention over the keys that DeepSeek-V3.2's indexer names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch import Tensor, nn

from ... import _C, cpp
from ...cache import KVCache, LatentCache, unchanged_on_error
from ...errors import reject_keywords
from ...ops import indexer_loss
from ...signatures import Inputs, types_of
from ..linear import project
from ..native import NativeModule
from ..rope import RopeSettings, RotaryEmbedding
from .base import split_heads
from .latent_attention import MultiHeadLatentAttention
from .selection import NORM_EPS, IndexCache, check_flag, check_index_cache, check_norm, check_selects, name_keys


class LightningIndexer(NativeModule):
    """The queries, keys and weights by which a SparseLatentAttention, which makes it, chooses keys. Children wq_b, wk,
    k_norm (a LayerNorm, eps 1e-6) and weights_proj."""

    def __init__(
        self,
        embed_dim: int,
        q_lora_rank: int,
        num_heads: int,
        head_dim: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self._config = {}
        self.num_heads = num_heads
        self.wq_b = nn.Linear(q_lora_rank, num_heads * head_dim, bias=False, **factory)
        self.wk = nn.Linear(embed_dim, head_dim, bias=False, **factory)
        self.k_norm = nn.LayerNorm(head_dim, eps=NORM_EPS, **factory)
        self.weights_proj = nn.Linear(embed_dim, num_heads, bias=False, **factory)

    def forward(self, low: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """low [B, L, q_lora_rank], x [B, L, embed_dim] -> queries [B, H, L, D] and keys [B, 1, L, D], not rotated, and
        weights [B, L, H]"""
        query = split_heads(project(self.wq_b, low), self.num_heads)
        return query, self.k_norm(project(self.wk, x)).unsqueeze(1), project(self.weights_proj, x)


class SparseLatentAttention(MultiHeadLatentAttention):
    """Latent attention in which a query reads the top_k keys that an indexer names, and no others (DeepSeek-V3.2).

    The child `indexer` is DeepSeek-V3.2's: small heads score every key by sum_h w_h relu(q_h k). Its queries are made
    of the latent of the queries, q_a_layernorm(q_a_proj(x)), and its keys of x. The choice has no gradient, so
    `indexer_loss` trains it. Where all keys are selected, the call is that of MultiHeadLatentAttention. Parameter
    names, shapes and row order are those of DeepSeek-V3.2's checkpoints.

    Args:
        top_k: how many keys a query attends; required.
        index_heads, index_head_dim: heads of the indexer and their width; default num_heads and qk_nope_head_dim +
            qk_rope_head_dim.
        index_interleaved: the indexer rotates pairs (2i, 2i + 1), as GLM-5's does; default pairs (i, i + dim/2), as
            DeepSeek's does.
        q_lora_rank: required, for the indexer reads the latent of the queries.
        rope: it rotates the first dims of the indexer's heads too, there in the pairs of `index_interleaved`.

    The other arguments are those of MultiHeadLatentAttention.
    """

    _cpp_class = cpp.SparseLatentAttention

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        top_k: int,
        index_heads: int | None = None,
        index_head_dim: int | None = None,
        index_interleaved: bool = False,
        kv_lora_rank: int,
        q_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        rope: RotaryEmbedding | None = None,
        latent_norm: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        causal: bool = False,
        scale: float | None = None,
        path: str = "auto",
        folded: bool = False,
        gate: str | None = None,
        gate_activation: str = "sigmoid",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.rope = rope
        self._make_children(self._configure(locals()), device, dtype)
        sizes = embed_dim, q_lora_rank, self.index_heads, self.index_head_dim
        self.indexer = LightningIndexer(*sizes, device, dtype)

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
        """Attention of x [B, L, embed_dim] over the keys of x, and those of the cache, that the indexer names.

        Args:
            mask: as in GroupedQueryAttention. The indexer adds it to its scores, as `ops.select_keys` says.
            cache: the call first appends the new latents. A LatentCache holds the indexer's keys too.
            index_cache: a LatentCache for the indexer's keys beside a cache that is no LatentCache, index_head_dim
                numbers per position; or a StaticCache of one head with v_head_dim 0.

        The other arguments, the result and the errors are those of SparseAttention.forward.
        """
        reject_keywords(unknown)
        self._check_call(x, cache)
        check_index_cache("SparseLatentAttention", cache, index_cache, LatentCache)
        latent_cache = cache if isinstance(cache, LatentCache) else None
        causal = self.causal if causal is None else causal
        inputs = {"positions": positions, "causal": causal, "kv_lens": kv_lens, "mask": mask}
        with unchanged_on_error(index_cache), unchanged_on_error(cache):
            low = self._query_input(x)
            key_index = self._named(x, low, latent_cache, index_cache, inputs)
            inputs["cross"] = False
            return self._attend_tokens(x, self._latents(x, None, low), cache, key_index, need_weights, **inputs)

    if TYPE_CHECKING:

        @types_of(forward)
        def __call__(self) -> Any: ...  # type: ignore[override]

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
        """SparseAttention.indexer_loss for this layer. Gradients flow only into `indexer`."""
        self._check_call(x, None)
        check_flag("sparse", sparse)
        causal = self.causal if causal is None else causal
        inputs = {"positions": positions, "causal": causal, "kv_lens": kv_lens, "mask": mask}
        with torch.no_grad():
            low = self._query_input(x)
            key_index = self._named(x, low, None, None, inputs) if sparse else None
            query, latent, k_rope, _ = self._latents(x, None, low)
            settings = {"cross": False, "cache": None, "dropout_p": 0.0, "key_index": key_index}
            settings["at_names"] = key_index is not None
            _, weights = self._attend_heads(query, latent, k_rope, True, **settings, **inputs)
        inputs |= {"rope": self._index_rope, "at_names": key_index is not None}
        return indexer_loss(*self.indexer(low, x.detach()), weights, key_index, **inputs)

    def project(self, x: Tensor, *, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(q, k, v) as the operator gets them, with the shapes of MultiHeadLatentAttention.project."""
        return super().project(x, None, positions=positions)

    @property
    def _index_rope(self) -> RopeSettings | _C.RopeSettings | None:
        """The rope of the indexer, which pairs dims as `index_interleaved` says."""
        if self.rope is None:
            return None
        if self.rope.interleaved == self.index_interleaved:
            return self.rope.settings
        numbers = self.rope._numbers()._replace(interleaved=self.index_interleaved)
        return numbers if torch.compiler.is_compiling() else _C.RopeSettings(*numbers)

    @torch.no_grad()
    def _named(
        self,
        x: Tensor,
        low: Tensor,  # `_query_input(x)`
        latent_cache: LatentCache | None,
        index_cache: IndexCache,
        place: dict[str, Any],
    ) -> Tensor | None:
        """The keys that the indexer names, None for all. Its keys go into `latent_cache`, or `index_cache`."""
        return name_keys(
            self.indexer(low, x),
            self.top_k,
            0,
            self.index_head_dim,
            latent_cache,
            index_cache,
            place | {"rope": self._index_rope},
        )

    def _check_call(self, x: Tensor, cache: KVCache | None) -> None:
        check_selects("SparseLatentAttention", x, cache, "a LatentCache")
        self._check(x, None, None, cache)

    def _make_cpp(self, device: str | None, dtype: torch.dtype | None = None) -> Any:
        check_norm("indexer.k_norm", getattr(getattr(self, "indexer", None), "k_norm", None))
        return super()._make_cpp(device, dtype)
