"""Kimi Delta Attention: the delta rule with a decay for each channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ... import cpp, ops
from ..linear import project, project_all
from ..native import NativeModule
from ..norm import RMSNorm
from .base import RecurrentLayer, States, first_steps, log_of_uniform


class ForgetGate(NativeModule):
    """Computes the logits of the decays of a KimiDeltaAttention. Children f_a_proj, f_b_proj; parameters dt_bias
    [num_heads * head_dim] and A_log [1, 1, num_heads, 1]."""

    _cpp_class = cpp.ForgetGate
    f_a_proj: nn.Linear
    f_b_proj: nn.Linear

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        twin = self._configure(locals())
        self.dt_bias = nn.Parameter(first_steps(num_heads * head_dim, device, dtype))
        self.A_log = nn.Parameter(log_of_uniform((1, 1, num_heads, 1), 1, 16, device, dtype))
        self._make_children(twin, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, embed_dim] -> [B, L, num_heads * head_dim], without dt_bias and A_log"""
        return project(self.f_b_proj, project(self.f_a_proj, x))


class KimiDeltaAttention(RecurrentLayer):
    """Kimi Delta Attention (Kimi Linear 2025, arXiv 2510.26692): a GatedDeltaNet with a decay for each channel of the
    keys, and a gate by sigmoid.

    Its memory of a sequence is a state [head_dim, head_dim] for each head, and the last conv_kernel_size - 1 tokens, in
    a RecurrentCache. It takes the place of self-attention in blocks, stacks and CausalLM. Parameter names, shapes and
    row order are those of Kimi-Linear's layers in transformers.

    Children q_proj, k_proj, v_proj, conv1d (an nn.Conv1d with a group for each channel), forget_gate, b_proj, g_a_proj,
    g_b_proj, o_norm, o_proj.

    Args:
        embed_dim: width of x and of the output.
        num_heads: heads of queries, keys and values.
        head_dim: their width; required.
        conv_kernel_size: tokens that the convolution sees.
        norm_eps: eps of the norm; the configs of Kimi-Linear have 1e-5.
    """

    _cpp_class = cpp.KimiDeltaAttention
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    conv1d: nn.Conv1d
    forget_gate: ForgetGate
    b_proj: nn.Linear
    g_a_proj: nn.Linear
    g_b_proj: nn.Linear
    o_norm: RMSNorm
    o_proj: nn.Linear

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        head_dim: int,
        conv_kernel_size: int = 4,
        norm_eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._make_children(self._configure(locals()), device, dtype)

    def _state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        width = self.num_heads * self.head_dim
        return (3 * width, self.conv_kernel_size - 1), (self.num_heads, self.head_dim, self.head_dim)

    def _input_projection(self) -> nn.Module | None:
        return self.q_proj

    def _run(self, x: Tensor, states: States, lengths: dict[str, Tensor | None]) -> tuple[Tensor, States]:
        *mixed, beta = project_all((self.q_proj, self.k_proj, self.v_proj, self.b_proj), x)
        gate = project(self.g_b_proj, project(self.g_a_proj, x))
        forget = self.forget_gate
        out, *after = ops.delta_attend(
            torch.cat(mixed, -1), forget(x), beta, gate, self.conv1d.weight, forget.A_log, forget.dt_bias,
            self.o_norm.weight, num_k_heads=self.num_heads, eps=self.o_norm.eps, gate_activation="sigmoid",
            conv_state=states.conv, state=states.state, **lengths,
        )  # fmt: skip
        return project(self.o_proj, out), States(*after)
