"""Linear attention: attention without the softmax."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ... import cpp, ops
from ..linear import project, project_all
from .base import RecurrentLayer, States


class LinearAttention(RecurrentLayer):
    """Attention without the softmax (Katharopoulos et al. 2020, arXiv 2006.16236): the state of a head is the sum of
    the outer products of its keys and values.

    Its memory of a sequence is a state [head_dim, head_dim] for each head, in a RecurrentCache. It takes the place of
    self-attention in blocks and stacks.

    Children q_proj, k_proj, v_proj, o_proj (decay_a_proj, decay_b_proj).

    Args:
        embed_dim: width of x and of the output.
        num_heads: heads of queries, keys and values.
        head_dim: default embed_dim / num_heads.
        feature_map: "identity", or "elu": elu(x) + 1 of queries and keys, which are then above 0, and each output is
            divided by the sum of its weights.
        decay: "none"; "fixed": head h keeps 1 - 2^(-5 - h) of its state per token (RetNet, Sun et al. 2023); or
            "learned": what a channel keeps is made of x, by decay_a_proj and decay_b_proj (GLA, Yang et al. 2024).
        decay_rank: width between these two.
        bias: on q_proj, k_proj, v_proj; out_bias: on o_proj, default as bias.
        scale: factor on the queries; default 1 / sqrt(head_dim), and 1 with a feature map.
    """

    _cpp_class = cpp.LinearAttention
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    decay_a_proj: nn.Linear | None
    decay_b_proj: nn.Linear | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        feature_map: str = "identity",
        decay: str = "none",
        decay_rank: int = 16,
        bias: bool = False,
        out_bias: bool | None = None,
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._make_children(self._configure(locals()), device, dtype)

    def _state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (), (self.num_heads, self.head_dim, self.head_dim + (self.feature_map == "elu"))

    def _input_projection(self) -> nn.Module | None:
        return self.q_proj

    def _run(self, x: Tensor, states: States, lengths: dict[str, Tensor | None]) -> tuple[Tensor, States]:
        query, key, value = project_all((self.q_proj, self.k_proj, self.v_proj), x)
        logits = None if self.decay_a_proj is None else project(self.decay_b_proj, project(self.decay_a_proj, x))
        out, state = ops.linear_attend(
            query, key, value, logits, num_heads=self.num_heads, feature_map=self.feature_map, decay=self.decay,
            scale=self.scale, state=states.state, **lengths,
        )  # fmt: skip
        return project(self.o_proj, out), States(None, state)
