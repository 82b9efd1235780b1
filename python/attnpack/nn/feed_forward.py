"""The feed-forward of a block, and a mixture of them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import cpp
from ..errors import check_tokens
from ..ops import nested, swiglu
from .linear import project, project_all
from .native import NativeModule, dropped


class FeedForward(NativeModule):
    """Computes down(f(gate(x)) * up(x)) (Shazeer 2020), or down(f(up(x))) without a gate.

    Args:
        embed_dim, hidden_dim: widths outside and inside.
        activation: with a gate (children gate_proj, up_proj, down_proj) "swiglu" (f is silu), "geglu" (the exact gelu),
            "geglu_tanh" (its tanh form, as in Gemma) or "clamped_swiglu" (gpt-oss: with g = min(gate(x), 7) and
            u = up(x) within -7 to 7, down(g sigmoid(1.702 g) (u + 1))); without one (up_proj, down_proj) "gelu",
            "gelu_tanh" (GPT-2), "relu" or its square "relu2" (Arcee).
        bias: on all projections.
        dropout: of what goes into down, in training.
    """

    _cpp_class = cpp.FeedForward
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._make_children(self._configure(locals()), device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., embed_dim] -> [..., embed_dim]"""
        if nested.is_nested(x):
            return nested.like(self.forward(nested.rows("x", x)), x)
        check_tokens("x", x, self.embed_dim, self.up_proj)
        if self.activation in _GATED:
            gate, up = project_all((self.gate_proj, self.up_proj), x)
            inner = gated_by(self.activation, gate, up)
        else:
            inner = _PLAIN[self.activation](project(self.up_proj, x))
        return project(self.down_proj, dropped(inner, self))


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    alpha, limit = 1.702, 7.0  # of gpt-oss
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`ops.swiglu`, and torch's operators, whose derivatives it has, where a gradient flows or a graph is traced."""
    flows = torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad)
    if flows or torch.compiler.is_compiling():
        return F.silu(gate) * up
    return swiglu(gate, up)


_PLAIN = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
_GATED = {
    "swiglu": _swiglu,
    "geglu": lambda gate, up: F.gelu(gate) * up,
    "geglu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "clamped_swiglu": _clamped_swiglu,
}


def gated_by(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    """f(gate) * up of an activation with a gate."""
    return _GATED[activation](gate, up)


class ExpertGate(NativeModule):
    """Chooses the experts of each token: a linear layer in fp32 (fp64 for fp64), then the rule `route_experts`. It is
    made by a MixtureOfExperts, whose settings `route` are its own."""

    def __init__(
        self,
        embed_dim: int,
        num_experts: int,
        route: dict[str, Any],
        bias: bool,
        correction: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self._config = {}
        self.route = route
        self.weight = nn.Parameter(torch.empty(num_experts, embed_dim, **factory))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as nn.Linear
        self.register_parameter("bias", nn.Parameter(torch.zeros(num_experts, **factory)) if bias else None)
        frozen = nn.Parameter(torch.zeros(num_experts, **factory), requires_grad=False) if correction else None
        self.register_parameter("e_score_correction_bias", frozen)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, embed_dim] -> weights [T, top_k] and int64 numbers [T, top_k] of experts"""
        wide = torch.promote_types(x.dtype, torch.float32)
        bias, correction = (None if p is None else p.to(wide) for p in (self.bias, self.e_score_correction_bias))
        logits = F.linear(x.to(wide), self.weight.to(wide), bias)
        return torch.ops.attnpack.route_experts(logits, correction, **self.route)


class MixtureOfExperts(NativeModule):
    """Each token goes through the `top_k` of `num_experts` feed-forwards that a gate chooses for it, and through a
    shared one if there is one (Shazeer et al. 2017; DeepSeekMoE, Dai et al. 2024).

    Children: gate (weight [num_experts, embed_dim]), experts and shared_experts (FeedForwards). A compiled graph runs
    all experts on all tokens, because its shapes must not depend on the choice.

    Args:
        embed_dim, hidden_dim: widths outside, and inside each expert.
        num_experts, top_k: how many experts there are, and how many each token takes.
        scores: "softmax" of all experts' logits, or "sigmoid" of each one's.
        normalize: the scores of the chosen experts are divided by their sum.
        scaling: factor on the weights of the experts.
        num_groups, top_groups: experts in groups of equal size; the experts outside the best groups drop out
            (DeepSeek). A group is as good as its best expert for "softmax", as its two best together for "sigmoid".
        correction: a parameter gate.e_score_correction_bias [num_experts] is added to the scores for the choice, but
            not for the weights. It is 0 at first and frozen: a rule that balances the load sets it (DeepSeek-V3, 2024,
            section 2.1.2).
        gate_bias: a bias on the gate's logits.
        activation, bias: of the experts, as in FeedForward.
        weigh_inputs: the weights multiply what goes into the experts, and not what comes out (Llama 4).
        shared_dim: width inside an expert for all tokens; None for no such expert.
        shared_gate: sigmoid(shared_expert_gate(x)), one number for each token, is a factor on that expert (Qwen 2).
    """

    _cpp_class = cpp.MixtureOfExperts

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int,
        *,
        scores: str = "softmax",
        normalize: bool = False,
        scaling: float = 1.0,
        num_groups: int = 1,
        top_groups: int = 1,
        correction: bool = False,
        gate_bias: bool = False,
        activation: str = "swiglu",
        bias: bool = False,
        weigh_inputs: bool = False,
        shared_dim: int | None = None,
        shared_gate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._configure(locals())
        factory = {"device": device, "dtype": dtype}
        route = {
            "scores": scores,
            "top_k": top_k,
            "normalize": normalize,
            "scaling": scaling,
            "num_groups": num_groups,
            "top_groups": top_groups,
        }
        self.gate = ExpertGate(embed_dim, num_experts, route, gate_bias, correction, **factory)

        def expert(hidden: int) -> FeedForward:
            return FeedForward(embed_dim, hidden, activation=activation, bias=bias, **factory)

        self.experts = nn.ModuleList(expert(hidden_dim) for _ in range(num_experts))
        self.shared_experts = None if shared_dim is None else expert(shared_dim)
        self.shared_expert_gate = nn.Linear(embed_dim, 1, bias=False, **factory) if shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., embed_dim] -> [..., embed_dim]"""
        if nested.is_nested(x):
            return nested.like(self.forward(nested.rows("x", x)), x)
        check_tokens("x", x, self.embed_dim, None)
        rows = x.reshape(-1, self.embed_dim)
        weights, index = self.gate(rows)
        unknown = torch.compiler.is_compiling() or rows.is_meta  # what is chosen
        mixed = self._dense_forward(rows, weights, index) if unknown else self._sparse_forward(rows, weights, index)
        out = mixed.view_as(x)
        if self.shared_experts is None:
            return out
        shared = self.shared_experts(x)
        gate = self.shared_expert_gate
        return out + (shared if gate is None else project(gate, x).sigmoid() * shared)

    def _sparse_forward(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        """Each expert on the tokens that chose it."""
        # Choices in the order of their experts: choice c is one of token c // top_k.
        chosen = index.flatten()
        order, weights = chosen.argsort(stable=True), weights.flatten()
        counts = chosen.bincount(minlength=self.num_experts).tolist()
        out = torch.zeros_like(rows)
        for expert, choices in zip(self.experts, order.split(counts), strict=True):
            if choices.numel():
                tokens = choices // self.top_k
                out = out.index_add(0, tokens, self._run_scaled(expert, rows[tokens], weights[choices].unsqueeze(-1)))
        return out

    def _run_scaled(self, expert: nn.Module, rows: Tensor, weights: Tensor) -> Tensor:  # [T, embed_dim], [T, 1]
        if self.weigh_inputs:
            return expert((rows * weights).to(rows.dtype))
        return (expert(rows) * weights).to(rows.dtype)

    def _dense_forward(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        """Every expert on every token."""
        shares = weights.new_zeros(rows.size(0), self.num_experts).scatter(1, index, weights)
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            out = out + self._run_scaled(expert, rows, shares[:, i : i + 1])
        return out
