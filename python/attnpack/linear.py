"""A linear layer that is torch's own, but streams its weight at the speed of memory where decoding needs it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import ops


class Linear(nn.Linear):
    """``nn.Linear``: the same arguments, parameters, hooks and repr. Up to 16 rows of input without gradients go
    through ``attnpack.ops.linear``, everything else through torch's."""

    def forward(self, input: Tensor) -> Tensor:  # [..., in_features] -> [..., out_features]
        return linear(input, self.weight, self.bias)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input [..., in] times weight [out, in] plus bias [out]; what is not a plain tensor (a quantised weight, say) and
    what is compiled goes to torch's linear, which knows it."""
    plain = type(weight) in (Tensor, nn.Parameter) and type(input) is Tensor
    if not plain or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return F.linear(input, weight, bias)
    return ops.linear(input, weight, bias)
