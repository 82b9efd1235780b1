"""RMSNorm, and the choice between RMSNorm and torch's LayerNorm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from .. import cpp, ops
from .._C import checks
from ..errors import check_dtype, check_tokens
from ..ops import nested
from .linear import is_watched
from .native import NativeModule


class RMSNorm(NativeModule):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang and Sennrich 2019); weight [dim] starts at 1.

    With `plus_one` it multiplies by 1 + weight, as Gemma does, and weight starts at 0.
    """

    _cpp_class = cpp.RMSNorm

    def __init__(
        self,
        dim: int,
        *,
        eps: float = 1e-6,
        plus_one: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._configure(locals())
        start = torch.zeros if plus_one else torch.ones
        self.weight = nn.Parameter(start(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]"""
        if nested.is_nested(x):
            return nested.like(self.forward(nested.rows("x", x)), x)
        check_tokens("x", x, self.dim, None)
        if self.plus_one:  # 16-bit numbers near 1 are too coarse for 1 + weight
            wide = torch.promote_types(x.dtype, torch.float32)
            return F.rms_norm(x.to(wide), (self.dim,), self.weight.to(wide) + 1, self.eps).to(x.dtype)
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps:g}" + (", plus_one=True" if self.plus_one else "")


def norm_of_sum(norm: nn.Module, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """(x + added, norm of this sum). A plain RMSNorm without hooks does both at once, unless gradients are on."""
    plain = type(norm) is RMSNorm and not norm.plus_one and type(x) is Tensor and type(added) is Tensor
    alike = plain and x.shape == added.shape and x.dtype == added.dtype
    if alike and not (
        torch.is_grad_enabled() or torch.compiler.is_compiling() or is_watched(norm) or _has_any_global_hook()
    ):
        check_tokens("x", x, norm.dim, None)
        return ops.add_rms_norm(x, added, norm.weight, norm.eps)
    total = x + added
    return total, norm(total)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [..., dim], [dim]
    """`ops.rms_norm`, and torch's, whose derivative it has, where gradients are on or a graph is traced."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return F.rms_norm(x, (weight.size(0),), weight, eps)
    return ops.rms_norm(x, weight, eps)


def make_norm(kind: str, dim: int, eps: float, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
    """RMSNorm for "rms" and, with plus_one, for "rms_plus_one"; torch's LayerNorm for "layer" and, without a bias, for
    "layer_no_bias"."""
    checks.norm_kind(kind)
    if kind.startswith("layer"):
        check_dtype(dtype)
        return nn.LayerNorm(dim, eps=eps, bias=kind == "layer", device=device, dtype=dtype)
    return RMSNorm(dim, eps=eps, plus_one=kind == "rms_plus_one", device=device, dtype=dtype)


def arguments_of_norm(twin: Any) -> dict[str, Any]:
    """Kind and eps of a C++ norm, as arguments of blocks and stacks."""
    options = twin.options()
    return {"norm": _kind(options.get("bias"), options.get("plus_one")), "eps": options["eps"]}


def norm_settings(norms: Iterable[nn.Module]) -> dict[str, Any]:
    """Kind and eps that the norms share, as arguments of C++ blocks and stacks."""
    found = {(_kind_of(norm), norm.eps) for norm in norms}
    if len(found) > 1:
        raise TypeError(
            f"attnpack: norms: got {sorted(found)} side by side, C++ wants one kind and eps for all of them"
        )
    ((kind, eps),) = found
    return {"norm": kind, "eps": eps}


def _kind_of(norm: nn.Module) -> str:
    layer = isinstance(norm, nn.LayerNorm)
    return _kind(norm.bias is not None if layer else None, getattr(norm, "plus_one", False))


def _kind(bias: bool | None, plus_one: bool | None) -> str:
    """bias: whether a LayerNorm has one; None for an RMSNorm."""
    if bias is not None:
        return "layer" if bias else "layer_no_bias"
    return "rms_plus_one" if plus_one else "rms"
