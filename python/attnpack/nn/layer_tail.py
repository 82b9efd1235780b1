"""The tail of a layer of Gemma 4, and the table of its inputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .. import cpp
from .._C import checks
from ..errors import check_tokens
from ..ops import nested
from .feed_forward import gated_by
from .linear import project
from .native import NativeModule
from .norm import RMSNorm


class LayerTail(NativeModule):
    """scalar * (x + norm(projection(f(gate(x)) * input))), or scalar * x without an input (Gemma 4).

    Args:
        embed_dim: width of x.
        input_dim: width of the layer's own input for each token; None for none. With it there are children gate,
            projection and norm.
        activation: f, that of an activation of FeedForward with a gate.
        eps: eps of the norm.

    The parameter scalar [1] is 1 at first and frozen.
    """

    _cpp_class = cpp.LayerTail
    gate: nn.Linear | None
    projection: nn.Linear | None
    norm: RMSNorm | None

    def __init__(
        self,
        embed_dim: int,
        *,
        input_dim: int | None = None,
        activation: str = "geglu_tanh",
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        twin = self._configure(locals())
        self.scalar = nn.Parameter(torch.ones(1, device=device, dtype=dtype), requires_grad=False)
        self._make_children(twin, device, dtype)

    def forward(self, x: Tensor, input: Tensor | None = None) -> Tensor:
        """[B, L, embed_dim] and [B, L, input_dim] -> [B, L, embed_dim]; of a jagged nested x the rows of input."""
        if nested.is_nested(x):
            return nested.like(self.forward(nested.rows("x", x), input), x)
        check_tokens("x", x, self.embed_dim, None)
        if (input is None) != (self.input_dim is None):
            checks.layer_input(input is not None, self.input_dim is not None)
        if input is None:
            return x * self.scalar
        mixed = gated_by(self.activation, project(self.gate, x), input)
        return (x + self.norm(project(self.projection, mixed))) * self.scalar


class LayerInputTable(NativeModule):
    """The inputs of the layers' tails (Gemma 4): for each layer the mean, times sqrt(2), of
    norm(model_projection(embedding) / sqrt(embed_dim)) and of the token's row of embed_tokens, times sqrt(input_dim).

    Args:
        vocab_size: rows of embed_tokens.
        embed_dim: width of the embeddings.
        num_layers, input_dim: how many layers there are, and the width of each one's input.
        eps: eps of the norm.
    """

    _cpp_class = cpp.LayerInputTable
    model_projection: nn.Linear
    projection_norm: RMSNorm

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        num_layers: int,
        input_dim: int,
        *,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        twin = self._configure(locals())
        self.embed_tokens = nn.Embedding(vocab_size, num_layers * input_dim, device=device, dtype=dtype)
        self._make_children(twin, device, dtype)

    def forward(self, ids: Tensor, embedding: Tensor) -> Tensor:
        """int64 [..., L] and [..., L, embed_dim] -> [..., L, num_layers, input_dim]; of nested ids those of their
        rows."""
        if nested.is_nested(ids):
            return self.forward(nested.rows("ids", ids), nested.rows("embedding", embedding))
        shape = (self.num_layers, self.input_dim)
        projected = project(self.model_projection, embedding) / math.sqrt(self.embed_dim)
        token_rows = self.embed_tokens(ids)
        factor = torch.full((), math.sqrt(self.input_dim), dtype=token_rows.dtype, device=token_rows.device)
        by_layer = self.projection_norm(projected.unflatten(-1, shape)) + (token_rows * factor).unflatten(-1, shape)
        return by_layer * math.sqrt(0.5)
