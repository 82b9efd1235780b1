"""The feed-forward of a block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import cpp, nested
from ..errors import check_tokens
from .linear import project, project_all
from .native import NativeModule


class FeedForward(NativeModule):
    """Computes down(silu(gate(x)) * up(x)) for "swiglu" (Shazeer 2020), or down(gelu(up(x))) for "gelu".

    Args:
        embed_dim, hidden_dim: widths outside and inside.
        activation: "swiglu" (children gate_proj, up_proj, down_proj) or "gelu" (up_proj, down_proj; the exact gelu).
        bias: on all projections.
    """

    _cpp_class = cpp.FeedForward

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._configure(locals())
        if activation == "swiglu":
            self.gate_proj = nn.Linear(embed_dim, hidden_dim, bias=bias, device=device, dtype=dtype)
        self.up_proj = nn.Linear(embed_dim, hidden_dim, bias=bias, device=device, dtype=dtype)
        self.down_proj = nn.Linear(hidden_dim, embed_dim, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., embed_dim] -> [..., embed_dim]"""
        if nested.is_nested(x):
            return nested.like(self.forward(nested.rows("x", x)), x)
        check_tokens("x", x, self.embed_dim, self.up_proj)
        if self.activation == "swiglu":
            gate, up = project_all((self.gate_proj, self.up_proj), x)
            return project(self.down_proj, F.silu(gate) * up)
        return project(self.down_proj, F.gelu(project(self.up_proj, x)))
