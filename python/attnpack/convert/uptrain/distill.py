"""Trains a converted model to give the outputs of its original: uptraining (Ainslie et al. 2023) by distillation."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...nn.causal_lm import CausalLM
from ...training import Training


def perplexity(model: CausalLM, ids: Tensor) -> float:
    """Perplexity of the model on ids [R, L]; each row is a text of its own."""
    with torch.no_grad():
        losses = [F.cross_entropy(model(row[None])[0, :-1].float(), row[1:]).item() for row in ids]
    return math.exp(min(700.0, sum(losses) / len(losses)))


class Distillation(Training):
    """The training of the student's layers for so many seconds.

    A step takes one sequence. Its loss is the sum of two terms: KL(teacher || student) of the next-token distributions,
    in nats per token, and the mean over layers of |student's states - teacher's|^2 / |teacher's|^2, which gives each
    layer its own signal.
    """

    def __init__(
        self, student: CausalLM, teacher: CausalLM, ids: Tensor, length: int, seconds: float, rate: float, seed: int
    ) -> None:
        self.student, self.teacher, self.ids, self.length = student.train(), teacher.eval(), ids, length
        self.seconds = seconds
        trained = {name: p for name, p in student.named_parameters() if name.startswith("model.layers.")}
        for name, parameter in student.named_parameters():
            parameter.requires_grad_(name in trained)
        super().__init__(trained, rate, seed)

    def train(self, after_step: Callable[[], None]) -> None:
        """Trains until the time is spent; `after_step` may save or raise."""
        while self.spent < self.seconds:
            self.train_step()
            after_step()

    def _progress(self) -> float:
        return self.spent / self.seconds

    def _loss(self) -> Tensor:
        first = int(torch.randint(len(self.ids) - self.length, (), generator=self.generator))
        ids = self.ids[None, first : first + self.length]
        with torch.no_grad():
            wanted, wanted_states = _with_states(self.teacher, ids)
        found, states = _with_states(self.student, ids)
        divergence = F.kl_div(
            found[0].log_softmax(-1), wanted[0].log_softmax(-1), reduction="batchmean", log_target=True
        )
        apart = [(a - b).pow(2).sum() / b.pow(2).sum() for a, b in zip(states, wanted_states, strict=True)]
        return divergence + torch.stack(apart).mean()


def _with_states(model: CausalLM, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The logits and the output of each layer."""
    states: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _, args, out: states.append(out)) for layer in model.layers]
    try:
        return model(ids), states
    finally:
        for hook in hooks:
            hook.remove()
