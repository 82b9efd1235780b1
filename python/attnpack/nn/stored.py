"""Layers whose weights stay as GGUF files hold them, 8 or 4 bits per number: for inference, without gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import ops
from .._C import checkpoints
from ..ops.stored import STORED_LAYOUTS, format_of, inputs_of, is_stored, to_stored

__all__ = ["STORED_LAYOUTS", "StoredEmbedding", "StoredLinear", "is_stored", "storable_layers", "to_stored"]


class StoredLinear(nn.Module):
    """x W^T + b with a weight in blocks, as `attnpack.ops.stored_linear` multiplies it.

    Args:
        in_features: a multiple of the numbers of a block, 32 or (in Q4_K, Q5_K and Q6_K) 256.
        out_features: rows of the weight.
        bias: with a bias of numbers.
        format: "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K" or "Q6_K".
        dtype: of the bias. The result has the dtype of x.
    """

    weight: nn.Parameter  # [out_features, blocks, bytes] uint8

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        format: str = "Q8_0",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        offset = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        self._set_blocks(_zero_blocks(out_features, in_features, format, device), offset)

    def _set_blocks(self, weight: Tensor, bias: Tensor | None) -> StoredLinear:
        self.in_features = inputs_of(weight)
        self.out_features = weight.shape[0]
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(
                f"attnpack: bias: got shape {tuple(bias.shape)}, want ({self.out_features},): a number for each row of "
                "weight"
            )
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))
        return self

    @classmethod
    def from_blocks(cls, weight: Tensor, bias: Tensor | None = None) -> StoredLinear:
        """The layer on a stored weight [out, blocks, bytes], which is not copied."""
        return _without_init(cls)._set_blocks(weight, bias)

    @property
    def format(self) -> str:
        return format_of(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        return ops.stored_linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, format={self.format}"


class StoredEmbedding(nn.Module):
    """Rows of a table in blocks by token id, widened to `dtype`. A tied head multiplies by the same blocks.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: a multiple of the numbers of a block.
        format: as in `StoredLinear`.
        dtype: of the rows; ``.to(dtype)`` changes it.
    """

    weight: nn.Parameter  # [num_embeddings, blocks, bytes] uint8

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        format: str = "Q8_0",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._set_blocks(_zero_blocks(num_embeddings, embedding_dim, format, device), dtype)

    def _set_blocks(self, weight: Tensor, dtype: torch.dtype | None) -> StoredEmbedding:
        self.embedding_dim = inputs_of(weight)
        self.num_embeddings = weight.shape[0]
        self.weight = nn.Parameter(weight, requires_grad=False)
        # It has the dtype of the rows, and moves with the module.
        self.register_buffer("_like", torch.empty(0, dtype=dtype, device=weight.device), persistent=False)
        return self

    @classmethod
    def from_blocks(cls, weight: Tensor, dtype: torch.dtype | None = None) -> StoredEmbedding:
        """The embedding on a stored table [rows, blocks, bytes], which is not copied."""
        return _without_init(cls)._set_blocks(weight, dtype)

    @property
    def format(self) -> str:
        return format_of(self.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """[...] int32 or int64 -> [..., embedding_dim]"""
        return ops.stored_rows(self.weight, ids, self._like.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.format}, dtype={self._like.dtype}"


def storable_layers(model: nn.Module) -> list[str]:
    """The names of the linear layers and token embeddings of a model whose weights may be stored."""
    names = []
    for name, module in model.named_modules(remove_duplicate=False):
        leaf = name.rpartition(".")[2]
        is_table = type(module) is nn.Embedding
        if not is_table and type(module) is not nn.Linear:
            continue
        if checkpoints.may_be_stored(leaf, is_table) and type(module.weight) in (Tensor, nn.Parameter):
            names.append(name)
    return names


def _without_init(kind: type):
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    return layer


def _zero_blocks(rows: int, inputs: int, format: str, device: torch.device | str | None) -> Tensor:
    if format not in STORED_LAYOUTS:
        raise ValueError(f"attnpack: format: got {format!r}, want one of {', '.join(STORED_LAYOUTS)}")
    numbers, size = STORED_LAYOUTS[format]
    if inputs % numbers or inputs < 1:
        raise ValueError(f"attnpack: got rows of {inputs} numbers, want a multiple of {numbers}, a block of {format}")
    return torch.zeros(rows, inputs // numbers, size, dtype=torch.uint8, device=device)
