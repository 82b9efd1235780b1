"""Layers around the short convolution, without a state of another kind."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ... import cpp, ops
from ..linear import project
from .base import RecurrentLayer, States


class GatedConvolution(RecurrentLayer):
    """LFM2's layer (Liquid AI 2025): out_proj(c * conv(b * x)) for b, c and x of in_proj. Its memory of a sequence is
    the last conv_kernel_size - 1 tokens, in a RecurrentCache.

    Children conv (an nn.Conv1d with a group for each channel), in_proj, out_proj.

    Args:
        embed_dim: width of x and of the output.
        conv_kernel_size: tokens that the convolution sees.
        bias: on both projections and the convolution.
    """

    _cpp_class = cpp.GatedConvolution
    conv: nn.Conv1d
    in_proj: nn.Linear
    out_proj: nn.Linear

    def __init__(
        self,
        embed_dim: int,
        *,
        conv_kernel_size: int = 3,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._make_children(self._configure(locals()), device, dtype)

    def _state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.embed_dim, self.conv_kernel_size - 1), ()

    def _input_projection(self) -> nn.Module | None:
        return self.in_proj

    def _run(self, x: Tensor, states: States, lengths: dict[str, Tensor | None]) -> tuple[Tensor, States]:
        out, conv_state = ops.gated_convolution(
            project(self.in_proj, x), self.conv.weight, self.conv.bias, conv_state=states.conv, **lengths
        )
        return project(self.out_proj, out), States(conv_state)
