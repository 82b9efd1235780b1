"""Differential attention: one softmax minus another."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ... import cpp
from ...ops import pair_values, subtract_halves, subtract_pairs
from ..linear import project
from ..rope import RotaryEmbedding
from .base import ContextAttention, split_heads

_LAMBDA_DEVIATION = 0.1  # of the lambdas at first (Ye et al. 2024, section 2.1)


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
