"""RMSNorm, and the choice between RMSNorm and torch's LayerNorm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import cpp, nested, ops
from .._C import checks
from ..errors import check_dtype, check_tokens
from .native import NativeModule


class RMSNorm(NativeModule):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang and Sennrich 2019); weight [dim] starts at 1."""

    _cpp_class = cpp.RMSNorm

    def __init__(
        self,
        dim: int,
        *,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._configure(locals())
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]"""
        if nested.is_nested(x):
            return nested.like(self.forward(nested.rows("x", x)), x)
        check_tokens("x", x, self.dim, None)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return F.rms_norm(x, (self.dim,), self.weight, self.eps)
        return ops.rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps:g}"


def make_norm(kind: str, dim: int, eps: float, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
    """RMSNorm for "rms", torch's LayerNorm for "layer"."""
    checks.norm_kind(kind)
    if kind == "rms":
        return RMSNorm(dim, eps=eps, device=device, dtype=dtype)
    check_dtype(dtype)
    return nn.LayerNorm(dim, eps=eps, device=device, dtype=dtype)


def arguments_of_norm(twin: Any) -> dict[str, Any]:
    """Kind and eps of a C++ norm, as arguments of blocks and stacks."""
    return {"norm": "layer" if isinstance(twin, cpp.LayerNorm) else "rms", "eps": twin.options()["eps"]}


def norm_settings(norms: Iterable[nn.Module]) -> dict[str, Any]:
    """Kind and eps that the norms share, as arguments of C++ blocks and stacks."""
    found = {("layer" if isinstance(norm, nn.LayerNorm) else "rms", norm.eps) for norm in norms}
    if len(found) > 1:
        raise TypeError(
            f"attnpack: norms: got {sorted(found)} side by side, C++ wants one kind and eps for all of them"
        )
    ((kind, eps),) = found
    return {"norm": kind, "eps": eps}
