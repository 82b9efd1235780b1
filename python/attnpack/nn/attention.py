"""Attention modules: projections, which are plain ``nn.Linear``s, and one native op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from .. import cpp
from .._C import checks
from ..ops import alibi_slopes, pair_values, subtract_halves, subtract_pairs
from .attention_base import ContextAttention, split_heads
from .linear import low_rank, project
from .norm import RMSNorm, rms_norm
from .rope import RotaryEmbedding

_QK_NORM = {"all_heads": False, "plus_one": False, "eps": 1e-6, "values": None}
_LATENT_EPS = 1e-6  # of q_a_layernorm
_LAMBDA_DEVIATION = 0.1  # of the lambdas at first (Ye et al. 2024, section 2.1)


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
    softcap: float
    sinks: bool
    alibi: bool
    qk_norm: bool | dict[str, Any]
    keys_as_values: bool
    q_lora_rank: int | None
    gate: str | None
    gate_activation: str
    rope: RotaryEmbedding | None
    scale: float | None
    query_scale: dict[str, Any] | None
    device: torch.device | str | None
    dtype: torch.dtype | None


class SelfAttention(ContextAttention):
    """One head and no output projection: x [B, L, embed_dim] -> [B, L, head_dim] (Vaswani et al. 2017, section 3.2.1).

    Args:
        embed_dim: width of x.
        head_dim: width of the head; default embed_dim.
        bias: on q_proj, k_proj, v_proj.
        causal: each token sees itself and the tokens before it.
    """

    _cpp_class = cpp.SelfAttention
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear

    def __init__(
        self,
        embed_dim: int,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.rope = None
        self._make_children(self._configure(locals()), device, dtype)
        self.kdim = self.vdim = embed_dim
        self.num_heads = self.num_kv_heads = 1

    def _attend_shared(self, *_: Any, **__: Any) -> Any:
        checks.no_kv_from("SelfAttention", True)

    @property
    def out_dim(self) -> int:
        return self.head_dim


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
            `values` (RMSNorm without weights on v too, as in Gemma 4; default: with keys_as_values).
        keys_as_values: there is no v_proj; v is what k_proj gives, before its norm and rotation (Gemma 4). With qk_norm
            v is normed without weights.
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
    k_proj: nn.Linear
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
        softcap: float = 0.0,
        sinks: bool = False,
        alibi: bool = False,
        qk_norm: bool | dict[str, Any] = False,
        keys_as_values: bool = False,
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
        if self.q_norm is not None:
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

    def _reads_x(self) -> nn.Module | None:
        return self.q_a_proj if self.q_proj is None else self.q_proj

    def _project_queries(self, x: Tensor) -> Tensor:
        return low_rank(self, x) if self.q_proj is None else project(self.q_proj, x)

    def _queries(self, x: Tensor, key: Tensor) -> Tensor:
        query = super()._queries(x, key)
        return query if self.q_norm is None else self._normed(self.q_norm, query)

    def _normed(self, norm: nn.Module, heads: Tensor) -> Tensor:  # [B, H, L, D]
        if not self._norm_settings()["all_heads"]:
            return norm(heads)
        return split_heads(norm(heads.transpose(1, 2).flatten(2)), heads.size(1))

    def _normed_values(self, value: Tensor) -> Tensor:  # [B, Hkv, L, D]
        if self.k_norm is None:
            return value
        values, eps = self._norm_settings()["values"], self._norm_settings()["eps"]
        on = self.keys_as_values if values is None else values
        return rms_norm(value, value.new_ones(self.head_dim), eps) if on else value

    def _output(self, joined: Tensor, x: Tensor) -> Tensor:
        return project(self.o_proj, self._gated(joined, x, self.head_dim))


def _reject_settings(name: str, settings: AttentionSettings) -> None:
    """Raises TypeError for keywords that `name` does not have."""
    for setting in settings.keys() - AttentionSettings.__annotations__.keys():
        checks.unexpected_keyword(name, setting, ["num_heads"], "")


class MultiHeadAttention(GroupedQueryAttention):
    """Every query head has its own kv head (Vaswani et al. 2017). Arguments as in GroupedQueryAttention, without
    num_kv_heads and head_map."""

    _cpp_class = cpp.MultiHeadAttention
    _not_of_twin = frozenset({"num_kv_heads", "head_map"})

    def __init__(self, embed_dim: int, num_heads: int, **settings: Unpack[AttentionSettings]) -> None:
        _reject_settings("MultiHeadAttention", settings)
        super().__init__(embed_dim, num_heads, num_heads, **settings)


class MultiQueryAttention(GroupedQueryAttention):
    """All query heads share one kv head (Shazeer 2019). Arguments as in GroupedQueryAttention, without num_kv_heads and
    head_map."""

    _cpp_class = cpp.MultiQueryAttention
    _not_of_twin = frozenset({"num_kv_heads", "head_map"})

    def __init__(self, embed_dim: int, num_heads: int, **settings: Unpack[AttentionSettings]) -> None:
        _reject_settings("MultiQueryAttention", settings)
        super().__init__(embed_dim, num_heads, 1, **settings)


class DifferentialAttention(ContextAttention):
    """The difference of two softmaxes over the same values, in one call of the operator.

    Version 1 (Ye et al. 2024, arXiv 2410.05258; DiffLlama): query heads h and h + num_heads / 2 are a pair, with keys
    of their own and the values of two kv heads. The output is (1 - lambda_init) * norm(out_h - lambda * out_(h +
    num_heads / 2)). Parameters lambda_q1, lambda_k1, lambda_q2, lambda_k2 [head_dim]. A cache holds values of twice
    head_dim: a StaticCache wants v_head_dim = 2 * head_dim.

    Version 2 (Ye et al. 2026): query heads 2 h and 2 h + 1 are a pair, and the output is out_(2 h) - sigmoid(lambda_h)
    * out_(2 h + 1), where lambda is lambda_proj(x). It has no norm.

    Children q_proj, k_proj, v_proj, o_proj (lambda_proj).

    Args:
        embed_dim: width of x, of a context and of the output.
        num_heads: as the published code counts: the query heads of version 1, an even number; the outputs of version 2,
            each of two query heads.
        num_kv_heads: kv heads, an even number for version 1.
        version: 1 or 2.
        head_dim: default embed_dim / num_heads.
        lambda_init: of version 1, 0.8 - 0.6 exp(-0.3 layer) in the paper; default 0.8.
        eps: of version 1, that of the norm; default 1e-5.
        bias: on q_proj, k_proj, v_proj; out_bias: on o_proj, default as bias.
        dropout: on the probabilities of each query head, in training only.
        causal, window, softcap, rope, scale: as in GroupedQueryAttention.
    """

    _cpp_class = cpp.DifferentialAttention
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    lambda_proj: nn.Linear | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        version: int = 2,
        head_dim: int | None = None,
        lambda_init: float | None = None,
        eps: float | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
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
        self._make_children(self._configure(locals()), device, dtype)
        self.kdim = self.vdim = embed_dim
        if version == 1:
            for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
                values = torch.empty(self.head_dim, device=device, dtype=dtype)
                setattr(self, name, nn.Parameter(values if values.is_meta else values.normal_(0, _LAMBDA_DEVIATION)))

    @property
    def query_heads(self) -> int:
        """The number of query heads that q_proj gives."""
        return self.num_heads * (1 if self.version == 1 else 2)

    def _heads(self, x: Tensor, context: Tensor | None, value_context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self._projected(x, context, value_context)
        heads, kv_heads = self.query_heads, self.num_kv_heads
        widths = [p.size(-1) for p in (query, key, value)]
        wanted = [n * self.head_dim for n in (heads, kv_heads, kv_heads)]
        if widths != wanted:
            raise ValueError(
                f"attnpack: q_proj, k_proj and v_proj give widths {widths}, want {wanted}: leave this layer whole"
            )
        value = split_heads(value, kv_heads)
        value = pair_values(value) if self.version == 1 else value
        return split_heads(query, heads), split_heads(key, kv_heads), value

    def _queries(self, x: Tensor, key: Tensor) -> Tensor:
        return split_heads(project(self.q_proj, x), self.query_heads)

    def _output(self, joined: Tensor, x: Tensor) -> Tensor:
        if self.version == 2:
            return project(self.o_proj, subtract_pairs(joined, project(self.lambda_proj, x)))
        lambdas = self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2
        return project(self.o_proj, subtract_halves(joined, self.num_heads, *lambdas, self.lambda_init, self.eps))

    @property
    def _value_dim(self) -> int:
        return self.head_dim * (2 if self.version == 1 else 1)
