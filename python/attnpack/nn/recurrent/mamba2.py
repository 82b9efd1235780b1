"""Mamba-2: linear attention with a decay and a step size for each head and token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ... import cpp, ops
from ..linear import project
from ..norm import RMSNorm
from .base import RecurrentLayer, States, first_steps, log_of_uniform


class Mamba2(RecurrentLayer):
    """Mamba-2 (Dao and Gu 2024, arXiv 2405.21060), the layer of Mamba-2, Bamba and Granite 4: a short convolution over
    values, keys and queries; linear attention without the delta rule, with a decay and a step size for each head and
    token; a skip from the values; a gated norm.

    Its memory of a sequence is a state [state_dim, head_dim] for each head, and the last conv_kernel_size - 1 tokens,
    in a RecurrentCache. It takes the place of self-attention in blocks, stacks and CausalLM. Parameter names, shapes
    and row order are those of Mamba2Mixer in transformers.

    Children conv1d (an nn.Conv1d with a group for each channel), in_proj, norm, out_proj; parameters dt_bias, A_log and
    D [num_heads].

    Args:
        embed_dim: width of x and of the output.
        num_heads: heads of values.
        head_dim: their width; required.
        state_dim: width of keys and queries, which the paper calls B and C; required.
        num_groups: heads of keys and queries; each serves num_heads / num_groups consecutive heads of values, and
            the norm takes as many parts of the output by themselves.
        conv_kernel_size: tokens that the convolution sees.
        conv_bias: whether the convolution has a bias.
        bias: whether the projections have one.
        norm_eps: eps of the norm.
    """

    _cpp_class = cpp.Mamba2
    conv1d: nn.Conv1d
    in_proj: nn.Linear
    norm: RMSNorm
    out_proj: nn.Linear

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        head_dim: int,
        state_dim: int,
        num_groups: int = 1,
        conv_kernel_size: int = 4,
        conv_bias: bool = True,
        bias: bool = False,
        norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        twin = self._configure(locals())
        self.dt_bias = nn.Parameter(first_steps(num_heads, device, dtype))
        self.A_log = nn.Parameter(log_of_uniform((num_heads,), 1, 16, device, dtype))
        self.D = nn.Parameter(torch.ones(num_heads, device=device, dtype=dtype))
        self._make_children(twin, device, dtype)

    def _state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        channels = self.num_heads * self.head_dim + 2 * self.num_groups * self.state_dim
        return (channels, self.conv_kernel_size - 1), (self.num_heads, self.state_dim, self.head_dim)

    def _input_projection(self) -> nn.Module | None:
        return self.in_proj

    def _run(self, x: Tensor, states: States, lengths: dict[str, Tensor | None]) -> tuple[Tensor, States]:
        return self._attend(project(self.in_proj, x), states, lengths)

    def _attend(self, mixed: Tensor, states: States, lengths: dict[str, Tensor | None]) -> tuple[Tensor, States]:
        out, *after = ops.state_space_attend(
            mixed, self.conv1d.weight, self.conv1d.bias, self.A_log, self.dt_bias, self.D,
            self.norm.weight, num_groups=self.num_groups, eps=self.norm.eps, conv_state=states.conv, state=states.state,
            **lengths,
        )  # fmt: skip
        return project(self.out_proj, out), States(*after)
