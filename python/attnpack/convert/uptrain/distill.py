"""Trains a converted model to give the outputs of its original: uptraining (Ainslie et al. 2023) by distillation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...nn.causal_lm import CausalLM

_WARMUP = 0.03  # fraction of the time
_LAST_RATE = 0.1  # fraction of the learning rate at the end


def perplexity(model: CausalLM, ids: Tensor) -> float:
    """Perplexity of the model on ids [R, L]; each row is a text of its own."""
    with torch.no_grad():
        losses = [F.cross_entropy(model(row[None])[0, :-1].float(), row[1:]).item() for row in ids]
    return math.exp(min(700.0, sum(losses) / len(losses)))


class Distillation:
    """The training: the student's trainable parameters, their optimiser, and the progress in steps and seconds.

    A step takes one sequence. Its loss is the sum of two terms: KL(teacher || student) of the next-token distributions,
    in nats per token, and the mean over layers of |student's states - teacher's|^2 / |teacher's|^2, which gives each
    layer its own signal.
    """

    def __init__(
        self, student: CausalLM, teacher: CausalLM, ids: Tensor, length: int, seconds: float, rate: float, seed: int
    ) -> None:
        self.student, self.teacher, self.ids, self.length = student.train(), teacher.eval(), ids, length
        self.seconds, self.rate = seconds, rate
        self.spent, self.steps, self.losses = 0.0, 0, []
        self.trained = {name: p for name, p in student.named_parameters() if name.startswith("model.layers.")}
        for name, parameter in student.named_parameters():
            parameter.requires_grad_(name in self.trained)
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.generator = torch.Generator().manual_seed(seed)

    def state(self) -> dict[str, Any]:
        """The state of the training, from which `load_state` resumes."""
        return {
            "parameters": {name: parameter.detach() for name, parameter in self.trained.items()},
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "progress": {"spent": self.spent, "steps": self.steps, "losses": self.losses},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(state["parameters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        for name, value in state["progress"].items():
            setattr(self, name, value)

    def train(self, after_step: Callable[[], None]) -> None:
        """Trains until the time is spent; `after_step` may save or raise."""
        while self.spent < self.seconds:
            self.train_step()
            after_step()

    def train_step(self) -> float:
        """One step; returns the seconds it took, which count as spent."""
        begin = time.monotonic()
        first = int(torch.randint(len(self.ids) - self.length, (), generator=self.generator))
        loss = self._loss(self.ids[None, first : first + self.length])
        if not torch.isfinite(loss):
            raise ValueError(f"the loss is {loss.item()} after {self.steps} steps; choose a smaller --learning-rate")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * _schedule(self.spent / self.seconds)
        self.optimizer.step()
        self.losses.append(round(loss.item(), 4))
        self.steps += 1
        took = time.monotonic() - begin
        self.spent += took
        return took

    def _loss(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            wanted, wanted_states = _with_states(self.teacher, ids)
        found, states = _with_states(self.student, ids)
        divergence = F.kl_div(
            found[0].log_softmax(-1), wanted[0].log_softmax(-1), reduction="batchmean", log_target=True
        )
        apart = [(a - b).pow(2).sum() / b.pow(2).sum() for a, b in zip(states, wanted_states, strict=True)]
        return divergence + torch.stack(apart).mean()


def _schedule(spent: float) -> float:
    """Fraction of the learning rate when a fraction of the time is spent: a short rise, then a cosine."""
    rise = min(1.0, (spent + 0.002) / _WARMUP)
    return rise * (_LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, spent))))


def _with_states(model: CausalLM, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The logits and the output of each layer."""
    states: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _, args, out: states.append(out)) for layer in model.layers]
    try:
        return model(ids), states
    finally:
        for hook in hooks:
            hook.remove()
