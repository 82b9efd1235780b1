"""The training of one model on a text, and the measurement of its loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...training import Training

_ROWS = 64  # sequences that are measured at a time


class ByteTraining(Training):
    """The training of a model ids [B, L] -> logits [B, L, 256] for so many steps.

    A step takes `batch` sequences of `length` bytes. Which ones, only the seed says: models that share it see the same
    text in the same order.

    Args:
        text: uint8 [bytes].
        rate: the highest learning rate.
    """

    def __init__(
        self, model: nn.Module, text: Tensor, steps: int, *, length: int, batch: int, rate: float, seed: int
    ) -> None:
        super().__init__(dict(model.named_parameters()), rate, seed)
        self.model, self.text, self.total = model.train(), text, steps
        self._begins, self._offsets = (batch, 1), torch.arange(length + 1)

    def _loss(self) -> Tensor:
        begins = torch.randint(len(self.text) - len(self._offsets) + 1, self._begins, generator=self.generator)
        return loss_of(self.model, self.text[begins + self._offsets])

    def _progress(self) -> float:
        return self.steps / self.total

    @property
    def done(self) -> bool:
        return self.steps >= self.total


def loss_of(model: nn.Module, sequences: Tensor) -> Tensor:
    """Nats per byte of the sequences, uint8 [B, L + 1]."""
    ids = sequences.long()
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, sequences: Tensor) -> float:
    """Nats per byte of the model in evaluation, on uint8 [N, L + 1]."""
    model.eval()
    parts = sequences.split(_ROWS)
    return sum(loss_of(model, part).item() * len(part) for part in parts) / len(sequences)
