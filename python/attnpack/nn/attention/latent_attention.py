"""Multi-head latent attention (DeepSeek-V2, 2024): one cached latent per token gives the keys and values of all heads.

B batch, L / Lkv lengths of x and context, H heads, C kv_lora_rank. A head has N dims that are not rotated, R that are
rotated, and V dims of values.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch import Tensor, nn

from ... import _C, cpp, ops
from ..._C import checks
from ...cache import KVCache, LatentCache, check_kind, unchanged_on_error
from ...errors import check_inputs, reject_keywords
from ...ops import nested
from ...signatures import LatentInputs, types_of
from ..linear import plain_weight, project, query_latent
from ..norm import RMSNorm
from ..rope import RotaryEmbedding, rotate_rows
from ..sharded_attention import (
    check_mask_share,
    latent_share,
    refuse_context_parallel,
    refuse_named_keys,
    sharded_attention,
)
from .base import NativeAttention, packed_inputs, split_heads

_NORM_EPS = 1e-6


class MultiHeadLatentAttention(NativeAttention):
    """One latent per token gives keys and values, and the cache holds only the latents. Parameter names, shapes and
    row order are those of DeepSeek-V2 and V3 checkpoints.

    Children: q_proj, or q_a_proj, q_a_layernorm, q_b_proj; kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj, o_proj. Rows
    of a head in q_proj or q_b_proj: N, then R. Rows of kv_a_proj_with_mqa: C, then R (one rotated key for all heads).
    Rows of a head in kv_b_proj: N of W_UK, then V of W_UV.

    Two paths give the same numbers. "expanded" computes keys and values from all latents, and attends. "absorbed" folds
    W_UK into the queries and W_UV into the outputs. It reads only the latents, as one kv head of C + R dims, whose
    first C dims are the values too. L queries over K keys cost, in multiply-adds per head,
    K C (N + V) + L K (N + R + V) expanded and L C (N + V) + L K (2 C + R) absorbed. So "auto" takes the absorbed path
    if (K - L) C (N + V) > L K (2 C - N - V), which holds in decoding, but not in prefill or training. If kv_b_proj was
    replaced (LoRA, a quantised linear) or has a hook, the expanded path runs.

    Args:
        embed_dim, num_heads: width of x and of the output; number of heads.
        kv_lora_rank: C.
        q_lora_rank: width of the latent of the queries; None projects queries without a latent.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: N, R (0 is legal) and V.
        rope: a RotaryEmbedding over at most R dims (DeepSeek's is interleaved). With None no dim is rotated, not even
            those of qk_rope_head_dim, and the repr says so. YaRN settings of the rope also multiply the scale by
            m(factor, mscale_all_dim)^2, where m(s, a) = 0.1 a ln s + 1.
        latent_norm: RMSNorm on both latents, eps 1e-6; False for none.
        bias: on q_a_proj, kv_a_proj_with_mqa and o_proj.
        dropout: on the probabilities, in training only.
        causal: each token sees itself and the tokens before it.
        scale: factor on the scores; default 1 / sqrt(N + R).
        query_scale: as in GroupedQueryAttention (Mistral 4).
        gate, gate_activation: as in GroupedQueryAttention; "element" has one factor per number of the values.
        path: "auto", "expanded" or "absorbed"; an attribute that may be set later.
        folded: the query projection contains W_UK and o_proj contains W_UV, so there is no kv_b_proj; see `fold`.
    """

    _cpp_class = cpp.MultiHeadLatentAttention
    q_proj: nn.Linear | None
    q_a_proj: nn.Linear | None
    q_a_layernorm: RMSNorm | None
    q_b_proj: nn.Linear | None
    kv_a_proj_with_mqa: nn.Linear
    kv_a_layernorm: RMSNorm | None
    kv_b_proj: nn.Linear | None
    o_proj: nn.Linear
    gate_proj: nn.Linear | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_lora_rank: int,
        q_lora_rank: int | None = None,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        rope: RotaryEmbedding | None = None,
        latent_norm: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        causal: bool = False,
        scale: float | None = None,
        query_scale: dict[str, Any] | None = None,
        path: str = "auto",
        folded: bool = False,
        gate: str | None = None,
        gate_activation: str = "sigmoid",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.rope = rope
        self._make_children(self._configure(locals()), device, dtype)

    @property
    def softmax_scale(self) -> float:
        """Factor on the scores: `scale` or its default, times the rope's softmax factor."""
        scale = 1.0 / math.sqrt(self.qk_nope_head_dim + self.qk_rope_head_dim) if self.scale is None else self.scale
        return scale if self.rope is None else scale * self.rope.softmax_factor

    @property
    def out_dim(self) -> int:
        """Width of the output of forward."""
        return self.embed_dim

    @overload
    def forward(self, x: Tensor, context: Tensor | None = None, *, need_weights: Literal[False] = False,
                **inputs: Unpack[LatentInputs[KVCache]]) -> Tensor: ...  # fmt: skip
    @overload
    def forward(self, x: Tensor, context: Tensor | None = None, *, need_weights: Literal[True],
                **inputs: Unpack[LatentInputs[KVCache]]) -> tuple[Tensor, Tensor]: ...  # fmt: skip
    @overload
    def forward(self, x: Tensor, context: Tensor | None = None, *, need_weights: bool,
                **inputs: Unpack[LatentInputs[KVCache]]) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        value_context: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        kv_lens: Tensor | None = None,
        kv_from: KVCache | None = None,
        key_index: Tensor | None = None,
        need_weights: bool = False,
        **unknown: object,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Self-attention of x or, if a context is given, attention of x over the context.

        Args:
            x: [B, L, embed_dim], or a jagged nested tensor as in GroupedQueryAttention.forward.
            context: [B, Lkv, embed_dim], the source of the latents; RoPE rotates its keys at 0..Lkv-1.
            value_context: refused: one latent gives keys and values.
            kv_from: refused.
            key_index: int32 or int64 [B, 1, L, n], the numbers of the keys that each query may attend, as in
                `attention`; with a cache they are positions of the cache (DeepSeek-V3.2). Latents that no query names
                are not read in decoding.
            cache: a LatentCache, or a QuantizedCache(8). A DynamicCache or StaticCache(batch, 1, max_len, C + R,
                v_head_dim=0) can hold latents as its keys.

        The other arguments and the result are those of GroupedQueryAttention.forward.
        """
        reject_keywords(unknown)
        if kv_from is not None:
            checks.no_kv_from("MultiHeadLatentAttention", True)
        if nested.is_nested(x):
            nested.refuse(mask=mask, cache=cache, kv_lens=kv_lens, key_index=key_index, need_weights=need_weights)
            of_module = self.causal and context is None
            return self._forward_nested(x, context, value_context, positions, of_module if causal is None else causal)
        self._check(x, context, value_context, cache)
        check_kind(cache, KVCache, type(self).__name__, "a LatentCache, one per layer")
        inputs = {"positions": positions, "cross": context is not None, "mask": mask, "kv_lens": kv_lens}
        inputs["causal"] = (self.causal and context is None) if causal is None else causal
        with unchanged_on_error(cache):
            return self._attend_tokens(x, self._latents(x, context), cache, key_index, need_weights, **inputs)

    if TYPE_CHECKING:

        @types_of(forward)
        def __call__(self) -> Any: ...  # type: ignore[override]

    def _attend_tokens(
        self,
        x: Tensor,
        tokens: tuple[Tensor, Tensor, Tensor, Tensor],  # of `_latents`
        cache: KVCache | None,
        key_index: Tensor | None,
        need_weights: bool,
        **inputs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        query, latent, k_rope, joined = tokens
        check_mask_share(self, inputs["mask"], query.size(1))
        over = sharded_attention(cache)
        if over is not None:
            refuse_named_keys(key_index)
            inputs |= {"cache": cache, "need_weights": need_weights}
            return self._output(over.attend_latents(self, query, latent, k_rope, **inputs), x)
        past = None if cache is None or cache.lengths.size(0) != x.size(0) else cache.lengths
        inputs["query_scale"] = self._query_scale(query, inputs["positions"], past)
        room = None if cache is None else cache.reserve_latents(joined, self.kv_lora_rank)
        inputs |= {"cache": room, "key_index": key_index, "dropout_p": self.dropout if self.training else 0.0}
        result = self._attend_heads(query, latent, k_rope, need_weights, **inputs)
        if cache is not None:
            cache.commit(x.size(1), inputs["kv_lens"])
        return self._outputs(result, need_weights, x)

    def _attend_heads(
        self, query: Tensor, latent: Tensor, k_rope: Tensor, need_weights: bool, **settings: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The joined heads, and the probabilities if they are asked for."""
        settings |= {"rope": None if self.rope is None else self.rope.settings, "scale": self.softmax_scale}
        weight = None if self.folded else plain_weight(self.kv_b_proj)
        if self.folded or weight is not None:
            tokens = query, latent, k_rope, weight, self.v_head_dim, self.path
            return ops.latent_attend_by(settings, tokens, need_weights)
        return self._attend_replaced(query, latent, k_rope, settings, need_weights)

    def new_cache(self) -> LatentCache:
        return LatentCache()

    def project(
        self, x: Tensor, context: Tensor | None = None, *, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(q, k, v) as the operator gets them. The factor on the scores is `softmax_scale`.

        Shapes on the expanded path: [B, H, L, N + R], [B, H, Lkv, N + R], [B, H, Lkv, V]. Shapes with path "absorbed"
        and for a folded layer: [B, H, L, C + R], [B, 1, Lkv, C + R], [B, 1, Lkv, C]. Under tensor
        parallelism H is the number of this rank's heads.
        """
        self._check(x, context, None, None)
        query, latent, k_rope, _ = self._latents(x, context)
        rope = None if self.rope is None else self.rope.settings
        weight = None if self.folded else plain_weight(self.kv_b_proj)
        if self.folded or weight is not None:
            return _C.latent_project(
                query, latent, k_rope, weight, self.v_head_dim, self.path, rope, positions, context is not None
            )
        place = {"rope": rope, "positions": positions, "cross": context is not None}
        query, latents, _, _ = ops.latent_append(query, latent, k_rope, **place)
        return query, *self._expand(latents, query.size(1))

    def _forward_nested(
        self,
        x: Tensor,
        context: Tensor | None,
        value_context: Tensor | None,
        positions: Tensor | None,
        causal: bool,
    ) -> Tensor:
        refuse_context_parallel("x is a nested tensor", "pass padded tensors and kv_lens")
        packed, packed_context, _ = packed_inputs(x, context, None)
        self._check(packed, packed_context, value_context, None)
        query, latent, k_rope, _ = self._latents(packed, packed_context)
        source = x if context is None else context
        if self.rope is not None and self.qk_rope_head_dim:
            plain, rotating = query.split([query.size(-1) - self.qk_rope_head_dim, self.qk_rope_head_dim], -1)
            query = torch.cat([plain, rotate_rows(self.rope, rotating, *nested.positions_of(x, positions))], -1)
            place = nested.positions_of(source, positions if context is None else None)
            k_rope = rotate_rows(self.rope, k_rope.unsqueeze(1), *place)[:, 0]
        heads = self._expanded(query, latent, k_rope)
        out = ops.attend_packed(
            *(each[0].transpose(0, 1) for each in heads),
            x.offsets(),
            source.offsets(),
            causal=causal,
            q_offset=0,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.softmax_scale,
            query_scale=self._packed_query_scale(x, positions),
        )
        return nested.like(self._output(out.flatten(1).unsqueeze(0), packed)[0], x)

    def _expanded(self, query: Tensor, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(q, k, v) of rotated parts, each [1, heads, T, dims]: those of the latents for a folded layer."""
        latents = torch.cat([latent, k_rope], -1).unsqueeze(1)
        if self.folded:
            return query, latents, latents[..., : self.kv_lora_rank]
        return query, *self._expand(latents, query.size(1))

    def _output(self, joined: Tensor, x: Tensor) -> Tensor:
        return project(self.o_proj, self._gated(joined, x, self.kv_lora_rank if self.folded else self.v_head_dim))

    def fold(self) -> MultiHeadLatentAttention:
        """A module of equal outputs without kv_b_proj: nothing besides the latents is ever made.

        The query projection takes in W_UK (W_UQK [C, inputs] per head, in place of W_UQ [N, inputs]), and o_proj takes
        in W_UV. This pays if C is small: a folded projection has C numbers per head and input in place of N or V.
        """
        if self.folded:
            raise TypeError("attnpack: fold(): got a layer that is folded already; take it as it is")
        plain = {
            "the query projection": plain_weight(self.q_proj or self.q_b_proj) is not None,
            "kv_b_proj": plain_weight(self.kv_b_proj) is not None,
            "o_proj": type(self.o_proj) is nn.Linear,
        }
        for name, is_plain in plain.items():
            if not is_plain:
                raise TypeError(
                    f"attnpack: {name} is no plain nn.Linear, fold() wants the weight of one: merge or unwrap it"
                )
        return type(self).from_cpp(self._twin().fold())

    def _check(
        self,
        x: Tensor,
        context: Tensor | None,
        value_context: Tensor | None,
        cache: object | None,
    ) -> None:
        if value_context is not None:
            checks.one_latent(True)
        for name in ("window", "softcap", "alibi", "head_map"):
            if getattr(self, name):
                raise ValueError(
                    f"attnpack: {name} is {getattr(self, name)}, a setting that latent attention does not have: unset "
                    "it"
                )
        latents = (self.embed_dim, self.kv_a_proj_with_mqa)
        query = (self.embed_dim, self.q_proj if self.q_a_proj is None else self.q_a_proj)
        check_inputs(x, context, None, cache, query, latents, latents)

    def _query_input(self, x: Tensor) -> Tensor:
        """The input of the query projection: the latent after its norm, or x itself."""
        return x if self.q_a_proj is None else query_latent(self, x)

    def _latents(
        self, x: Tensor, context: Tensor | None, low: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries [B, H, L, N + R], latents [B, Lkv, C] after their norm, k_rope [B, Lkv, R] before rotation, and a
        tensor of the cache's shape [B, 1, Lkv, C + R], from which the cache takes shape, dtype and device. `low` is
        `_query_input(x)` if it is known."""
        queries = project(
            self.q_b_proj if self.q_proj is None else self.q_proj, self._query_input(x) if low is None else low
        )
        both = project(self.kv_a_proj_with_mqa, x if context is None else context)
        latent, k_rope = both.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        if self.kv_a_layernorm is not None:
            latent = self.kv_a_layernorm(latent)
        dims = (self.kv_lora_rank if self.folded else self.qk_nope_head_dim) + self.qk_rope_head_dim
        heads = latent_share(self, queries, dims, k_rope)
        return split_heads(queries, heads), latent, k_rope, both.unsqueeze(1)

    def _expand(self, latents: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
        """Keys and values of latents [B, 1, K, C + R], computed by the module in the place of kv_b_proj."""
        kv = self.kv_b_proj(latents[:, 0, :, : self.kv_lora_rank])
        width = self.qk_nope_head_dim + self.v_head_dim
        if kv.size(-1) != num_heads * width:
            raise ValueError(
                f"attnpack: kv_b_proj gives width {kv.size(-1)}, want {num_heads} heads of {width} dims, as many heads "
                "as the query projection gives: divide both alike among the ranks"
            )
        return torch.ops.attnpack.latent_expand(latents, kv, self.kv_lora_rank, num_heads, self.v_head_dim)

    def _attend_replaced(
        self, query: Tensor, latent: Tensor, k_rope: Tensor, settings: dict, need_weights: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The expanded path for a kv_b_proj that is no plain linear."""
        place = {name: settings[name] for name in ("rope", "positions", "cross", "cache", "mask", "causal", "kv_lens")}
        query, latents, past, lens = ops.latent_append(query, latent, k_rope, **place)
        trimmed = need_weights and settings["cache"] is not None and settings["mask"] is None
        if trimmed and lens.numel() and not torch.compiler.is_compiling():
            latents = latents[:, :, : int(lens.max())]
        key, value = self._expand(latents, query.size(1))
        scores = {"causal": settings["causal"], "q_offset": past, "kv_lens": lens, "scale": settings["scale"]}
        scores |= {name: settings.get(name) for name in ("key_index", "query_scale")}
        out = ops.attention(query, key, value, settings["mask"], dropout_p=settings["dropout_p"], **scores)
        joined = out.transpose(1, 2).flatten(2)
        if not need_weights:
            return joined
        stage = "named" if settings.get("at_names") else "probs"
        return joined, ops.attention_scores(query, key, settings["mask"], stage=stage, **scores)

    def extra_repr(self) -> str:
        unrotated = self.rope is None and self.qk_rope_head_dim > 0
        return super().extra_repr() + (", rope=None: no dim is rotated" if unrotated else "")

    def _make_cpp(self, device: str | None, dtype: torch.dtype | None = None) -> object:
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            norm = getattr(self, name, None)
            if norm is not None and (not isinstance(norm, RMSNorm) or norm.eps != _NORM_EPS):
                raise TypeError(
                    f"attnpack: {name} is {norm}, C++ has RMSNorm with eps {_NORM_EPS:g} there. Set that eps, or call "
                    "the Python module"
                )
        return super()._make_cpp(device, dtype)
