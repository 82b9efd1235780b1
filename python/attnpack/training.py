"""The training that `attnpack uptrain` and `attnpack compare` share: steps, their learning rate, the saved state."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .atomic_write import atomic_file

_WARMUP = 0.03  # fraction of the training
_LAST_RATE = 0.1  # fraction of the learning rate at the end


class Training:
    """Parameters in training, their optimiser, the generator of the order of the text, and the progress so far.

    A subclass says what the loss of a step is, and how far the training is.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter], rate: float, seed: int) -> None:
        self.trained, self.rate = dict(trained), rate
        self.spent, self.steps, self.losses = 0.0, 0, []
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.generator = torch.Generator().manual_seed(seed)

    def _loss(self) -> Tensor:
        """The loss of the next step, a number with a gradient."""
        raise NotImplementedError

    def _progress(self) -> float:
        """The fraction of the training that is done."""
        raise NotImplementedError

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

    def train_step(self) -> float:
        """One step; returns the seconds it took, which count as spent."""
        begin = time.monotonic()
        loss = self._loss()
        if not torch.isfinite(loss):
            raise ValueError(f"the loss is {loss.item()} after {self.steps} steps; choose a smaller --learning-rate")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * _schedule(self._progress())
        self.optimizer.step()
        self.losses.append(round(loss.item(), 4))
        self.steps += 1
        took = time.monotonic() - begin
        self.spent += took
        return took


def _schedule(done: float) -> float:
    """Fraction of the learning rate when a fraction of the training is done: a short rise, then a cosine."""
    rise = min(1.0, (done + 0.002) / _WARMUP)
    return rise * (_LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Writes a state of tensors and plain values, whole or not at all."""
    # Given a name, torch.save hides the error of a full disk; given an open file, it does not.
    with atomic_file(path) as partial, partial.open("xb") as file:
        torch.save(dict(state), file)


def read_state(path: Path, fix: str) -> dict[str, Any]:
    """The state that `save_state` wrote, with its key "about"; raises ValueError with the `fix` for another file."""
    try:
        state = torch.load(path, weights_only=True)
        state["about"].items()
        return state
    except Exception as error:
        raise ValueError(f"{path}: cannot be read ({type(error).__name__}); {fix}") from error
