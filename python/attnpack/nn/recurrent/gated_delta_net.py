"""Gated DeltaNet: the delta rule with a decay for each head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ... import cpp, ops
from ..linear import project, project_all
from ..norm import RMSNorm
from .base import RecurrentLayer, States, first_steps, log_of_uniform


class GatedDeltaNet(RecurrentLayer):
    """Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464), the layer of Qwen3.5, Qwen3-Next and OLMo
    hybrid: a short convolution over q, k and v; q and k of length 1; linear attention with the delta rule and a decay
    for each head; a gated norm.

    Its memory of a sequence is a state [head_k_dim, head_v_dim] for each head of values, and the last
    conv_kernel_size - 1 tokens, in a RecurrentCache. It takes the place of self-attention in blocks, stacks and
    CausalLM. Parameter names, shapes and row order are those of Qwen3.5's layers in transformers.

    Children conv1d (an nn.Conv1d with a group for each channel), norm, out_proj, in_proj_qkv, in_proj_z, in_proj_b,
    in_proj_a; parameters dt_bias and A_log [num_v_heads].

    Args:
        embed_dim: width of x and of the output.
        num_k_heads: heads of queries and keys; each serves num_v_heads / num_k_heads consecutive heads of values.
        num_v_heads: heads of values.
        head_k_dim, head_v_dim: their widths; required.
        conv_kernel_size: tokens that the convolution sees.
        norm_eps: eps of the norm.
        allow_neg_eigval: whether beta goes up to 2, and not 1: a state may then turn around what it holds for a key
            (Grazzi et al. 2024, arXiv 2411.12537; OLMo hybrid).
    """

    _cpp_class = cpp.GatedDeltaNet
    conv1d: nn.Conv1d
    norm: RMSNorm
    out_proj: nn.Linear
    in_proj_qkv: nn.Linear
    in_proj_z: nn.Linear
    in_proj_b: nn.Linear
    in_proj_a: nn.Linear

    def __init__(
        self,
        embed_dim: int,
        num_k_heads: int,
        num_v_heads: int,
        *,
        head_k_dim: int,
        head_v_dim: int,
        conv_kernel_size: int = 4,
        norm_eps: float = 1e-6,
        allow_neg_eigval: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        twin = self._configure(locals())
        self.dt_bias = nn.Parameter(first_steps(num_v_heads, device, dtype))
        # Kept away from 0, whose log is -inf.
        self.A_log = nn.Parameter(log_of_uniform((num_v_heads,), 0.01, 16, device, dtype))
        self._make_children(twin, device, dtype)

    def _state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        channels = 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim
        return (channels, self.conv_kernel_size - 1), (self.num_v_heads, self.head_k_dim, self.head_v_dim)

    def _input_projection(self) -> nn.Module | None:
        return self.in_proj_qkv

    def _run(self, x: Tensor, states: States, lengths: dict[str, Tensor | None]) -> tuple[Tensor, States]:
        norm, out_proj = self._last_layers()
        mixed, decay, beta, gate = self._project_in(x)
        out, *after = ops.delta_attend(
            mixed, decay, beta, gate, self.conv1d.weight, self.A_log, self.dt_bias, norm.weight,
            num_k_heads=self.num_k_heads, eps=norm.eps, beta_scale=2.0 if self.allow_neg_eigval else 1.0,
            conv_state=states.conv, state=states.state, **lengths,
        )  # fmt: skip
        return project(out_proj, out), States(*after)

    def _project_in(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k and v side by side, the logits of decay and beta, and the gate."""
        return project_all((self.in_proj_qkv, self.in_proj_a, self.in_proj_b, self.in_proj_z), x)

    def _last_layers(self) -> tuple[RMSNorm, nn.Linear]:
        return self.norm, self.out_proj
