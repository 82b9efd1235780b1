"""Attention with one head and no output projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ... import cpp
from ..._C import checks
from .base import ContextAttention


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
