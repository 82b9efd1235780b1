"""Multi-head, grouped-query and multi-query attention: projections, which are plain ``nn.Linear``s, and one native
op."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from ... import cpp
from ..._C import checks
from ...ops import alibi_slopes
from ...signatures import Function
from ..linear import low_rank, project
from ..norm import RMSNorm, rms_norm
from ..rope import RotaryEmbedding
from .base import ContextAttention, split_heads

_QK_NORM = {
    "all_heads": False,
    "plus_one": False,
    "eps": 1e-6,
    "after_rope": False,
    "weights": True,
    "values": None,
}
_LATENT_EPS = 1e-6  # of q_a_layernorm


class AttentionSettings(TypedDict, total=False):
    """Keyword arguments of GroupedQueryAttention that MultiHeadAttention and MultiQueryAttention take too."""

    head_dim: int | None
    kdim: int | None
    vdim: int | None
    bias: bool
    out_bias: bool | None
    dropout: float
    causal: bool
    window: tuple[int, int] | None
    chunk: int | None
    softcap: float
    sinks: bool
    alibi: bool
    qk_norm: bool | dict[str, Any]
    keys_as_values: bool
    own_keys: bool
    q_lora_rank: int | None
    gate: str | None
    gate_activation: str
    rope: RotaryEmbedding | None
    scale: float | None
    query_scale: dict[str, Any] | None
    device: torch.device | str | None
    dtype: torch.dtype | None


class GroupedQueryAttention(ContextAttention):
    """Groups of query heads share a kv head (Ainslie et al. 2023). Children q_proj, k_proj, v_proj, o_proj.

    Args:
        embed_dim: width of x and of the output.
        num_heads, num_kv_heads: query and kv heads; without head_map consecutive query heads share a kv head.
        head_map: the kv head that each query head reads, num_heads ints, for uneven groups.
        head_dim: default embed_dim / num_heads.
        kdim, vdim: widths of context and value_context; default embed_dim.
        bias: on q_proj, k_proj, v_proj; out_bias: on o_proj, default as bias.
        causal: each token sees itself and the tokens before it.
        qk_norm: RMSNorm over head_dim on q and k before RoPE, eps 1e-6 (children q_norm, k_norm). A dict changes what
            it names: `all_heads` (one norm over all heads together, as in OLMo 2), `plus_one` (as in RMSNorm), `eps`,
            `after_rope` (the norms stand behind the rotation, as in HunYuan), `weights` (False: without weights and
            children, as in Llama 4), `values` (RMSNorm without weights on v too, as in Gemma 4; default: with
            keys_as_values).
        keys_as_values: there is no v_proj; v is what k_proj gives, before its norm and rotation (Gemma 4). With qk_norm
            v is normed without weights.
        own_keys: False: there are no k_proj, v_proj and k_norm; forward reads the keys and values of kv_from (Gemma 4).
        q_lora_rank: queries come of a latent of this width: children q_a_proj, q_a_layernorm (eps 1e-6) and q_b_proj in
            the place of q_proj (MFA, Hu et al. 2024, arXiv 2412.19255). bias is then on q_a_proj, not on q_b_proj.
        gate: "head" or "element": the heads' outputs are multiplied by f(gate_proj(x)) before o_proj, one factor per
            head or one per number (Qiu et al. 2025, arXiv 2505.06708). gate_proj has no bias.
        gate_activation: f, "sigmoid" or "softplus".
        rope: a RotaryEmbedding, or None for no rotation.
        scale: factor on the scores; default 1 / sqrt(head_dim).
        query_scale: a factor on the scores that grows with the query's position p. dict(type="llama4", floor_scale=,
            attn_scale=): log1p(floor((p + 1) / floor_scale)) * attn_scale + 1 (Llama 4's layers without RoPE), where p
            counts the tokens before in the cache (in cross-attention from 0). dict(type="log", llama_4_scaling_beta=,
            original_max_position_embeddings=n): 1 + beta * log(1 + floor(p / n)) (Ministral 3), where p is the position
            that RoPE takes. See `attention`.
        dropout: on the probabilities, in training only.
        window: (left, right), how many keys before and after its own position each token sees; -1 for all, None for
            no window. A sliding window of W tokens, the token itself included, is (W - 1, 0).
        chunk: each token sees the keys of its own chunk of so many positions (Llama 4).
        softcap: c > 0: scores become c * tanh(score / c).
        sinks: one learned logit per head that joins the softmax denominator only (parameter sinks [num_heads], 0 at
            first; gpt-oss has the same name).
        alibi: subtract the head's slope times the distance from each score (Press et al. 2022; `ops.alibi_slopes`).
    """

    _cpp_class = cpp.GroupedQueryAttention
    _names_keys = True
    _no_attributes = frozenset({"sinks"})  # the name of the parameter
    q_proj: nn.Linear | None
    q_a_proj: nn.Linear | None
    q_a_layernorm: RMSNorm | None
    q_b_proj: nn.Linear | None
    k_proj: nn.Linear | None
    v_proj: nn.Linear | None
    o_proj: nn.Linear
    gate_proj: nn.Linear | None
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        head_map: Sequence[int] | None = None,
        head_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        dropout: float = 0.0,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        chunk: int | None = None,
        softcap: float = 0.0,
        sinks: bool = False,
        alibi: bool = False,
        qk_norm: bool | dict[str, Any] = False,
        keys_as_values: bool = False,
        own_keys: bool = True,
        q_lora_rank: int | None = None,
        gate: str | None = None,
        gate_activation: str = "sigmoid",
        rope: RotaryEmbedding | None = None,
        scale: float | None = None,
        query_scale: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.rope = rope
        twin = self._configure(locals())
        self.num_kv_heads = num_kv_heads
        self.head_map = None if head_map is None else tuple(head_map)
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = self.kdim if keys_as_values else embed_dim if vdim is None else vdim
        self._slopes = alibi_slopes(num_heads)
        first = torch.zeros(num_heads, device=device, dtype=dtype) if sinks else None
        self.register_parameter("sinks", None if first is None else nn.Parameter(first))
        self._make_children(twin, device, dtype)

    def _norm_settings(self) -> dict[str, Any]:
        return _QK_NORM | self.qk_norm if isinstance(self.qk_norm, dict) else _QK_NORM

    @property
    def _norms_rotated(self) -> bool:
        """Whether the heads are rotated here and then normed; otherwise the op rotates them."""
        return bool(self.qk_norm) and self._norm_settings()["after_rope"]

    def _rotated(
        self, query: Tensor, key: Tensor | None, at: Tensor | None, keys_at: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self._normed_behind(*super()._rotated(query, key, at, keys_at))

    def _normed_behind(self, query: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if not self._norms_rotated:
            return query, key
        return self._normed(self.q_norm, query), None if key is None else self._normed(self.k_norm, key)

    def _make_cpp(self, device: str | None, dtype: torch.dtype | None = None) -> Any:
        for name in ("q_norm", "k_norm", "q_a_layernorm"):
            norm = getattr(self, name, None)
            if norm is None:
                continue
            latent = name == "q_a_layernorm"
            eps, shown = (_LATENT_EPS, name) if latent else (self._norm_settings()["eps"], "q_norm or k_norm")
            if not isinstance(norm, RMSNorm) or norm.eps != eps:
                raise TypeError(
                    f"attnpack: {shown} is {norm}, C++ has RMSNorm with eps {eps:g} there. Set that eps, or call the "
                    "Python module"
                )
        return super()._make_cpp(device, dtype)

    def _heads(self, x: Tensor, context: Tensor | None, value_context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super()._heads(x, context, value_context)
        if self.qk_norm and not self._norms_rotated:
            query, key = self._normed(self.q_norm, query), self._normed(self.k_norm, key)
        return query, key, self._normed_values(value)

    def _check(self, x: Tensor, context: Tensor | None, value_context: Tensor | None, cache: Any) -> None:
        if self.v_proj is None and value_context is not None:
            checks.keys_are_values(True)
        super()._check(x, context, value_context, cache)

    def _projected(
        self, x: Tensor, context: Tensor | None, value_context: Tensor | None
    ) -> Sequence[Tensor]:  # as the base class
        if self.q_proj is not None and self.v_proj is not None:
            return super()._projected(x, context, value_context)
        source = x if context is None else context
        key = project(self.k_proj, source)
        if self.v_proj is None:
            return self._project_queries(x), key, key
        return self._project_queries(x), key, project(self.v_proj, source if value_context is None else value_context)

    def _input_projection(self) -> nn.Module | None:
        return self.q_a_proj if self.q_proj is None else self.q_proj

    def _project_queries(self, x: Tensor) -> Tensor:
        return low_rank(self, x) if self.q_proj is None else project(self.q_proj, x)

    def _queries(self, x: Tensor, key: Tensor) -> Tensor:
        query = super()._queries(x, key)
        return self._normed(self.q_norm, query) if self.qk_norm and not self._norms_rotated else query

    def _normed(self, norm: nn.Module | None, heads: Tensor) -> Tensor:  # [B, H, L, D]
        if norm is None:
            return rms_norm(heads, heads.new_ones(self.head_dim), self._norm_settings()["eps"])
        if not self._norm_settings()["all_heads"]:
            return norm(heads)
        return split_heads(norm(heads.transpose(1, 2).flatten(2)), heads.size(1))

    def _normed_values(self, value: Tensor) -> Tensor:  # [B, Hkv, L, D]
        values = self._norm_settings()["values"]
        on = self.qk_norm and (self.keys_as_values if values is None else values)
        return self._normed(None, value) if on else value

    def _output(self, joined: Tensor, x: Tensor) -> Tensor:
        return project(self.o_proj, self._gated(joined, x, self.head_dim))


_OF_GROUPS = frozenset({"num_kv_heads", "head_map"})


def _spelled_out(init: Function) -> Function:
    """`init` with the arguments of GroupedQueryAttention in its signature and its types, without those of groups."""
    whole = inspect.signature(GroupedQueryAttention.__init__)
    shown = [parameter for parameter in whole.parameters.values() if parameter.name not in _OF_GROUPS]
    init.__signature__ = whole.replace(parameters=shown)
    init.__annotations__ = {parameter.name: parameter.annotation for parameter in shown if parameter.name != "self"}
    return init


def _reject_settings(name: str, settings: AttentionSettings) -> None:
    """Raises TypeError for keywords that `name` does not have."""
    for setting in settings.keys() - AttentionSettings.__annotations__.keys():
        checks.unexpected_keyword(name, setting, ["num_heads"], "")


class MultiHeadAttention(GroupedQueryAttention):
    """Every query head has its own kv head (Vaswani et al. 2017). Arguments as in GroupedQueryAttention, without
    num_kv_heads and head_map."""

    _cpp_class = cpp.MultiHeadAttention
    _not_of_twin = _OF_GROUPS

    @_spelled_out
    def __init__(self, embed_dim: int, num_heads: int, **settings: Unpack[AttentionSettings]) -> None:
        _reject_settings("MultiHeadAttention", settings)
        super().__init__(embed_dim, num_heads, num_heads, **settings)


class MultiQueryAttention(GroupedQueryAttention):
    """All query heads share one kv head (Shazeer 2019). Arguments as in GroupedQueryAttention, without num_kv_heads and
    head_map."""

    _cpp_class = cpp.MultiQueryAttention
    _not_of_twin = _OF_GROUPS

    @_spelled_out
    def __init__(self, embed_dim: int, num_heads: int, **settings: Unpack[AttentionSettings]) -> None:
        _reject_settings("MultiQueryAttention", settings)
        super().__init__(embed_dim, num_heads, 1, **settings)
