"""Whether all ranks mean the same call. Ranks that do not would wait for each other, or give wrong results."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import _C


class Numbers:
    """The numbers of a tensor, for `agree`, which reads them only where it compares."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __str__(self) -> str:
        return f"with hash {_hash_of(self.x):x}"


def agree(what: str, group: dist.ProcessGroup, device: torch.device, /, **values: Any) -> None:
    """Raises ValueError, on every rank, unless all ranks give the same values for the call `what`.

    On the CPU this is one small collective, which ATTNPACK_CHECK=0 leaves out. On other devices it waits for the
    device, so it runs only under ATTNPACK_CHECK=1; while a graph is traced it does not run.
    """
    if not torch.compiler.is_compiling():
        _C.distributed.agree(what, group.group_name, device, values)


def state_of_draws(module: nn.Module, device: torch.device) -> str | None:
    """A word for the generator's state, if the module draws from it: what ranks drop of states that they all have must
    be the same. On CUDA, reading it would wait for the device."""
    if device.type != "cpu" or not module.training or torch.compiler.is_compiling():
        return None
    if not any(getattr(part, "dropout", 0) or isinstance(part, nn.Dropout) for part in module.modules()):
        return None
    return f"at {_hash_of(torch.get_rng_state()):x}: call torch.manual_seed alike"


def _hash_of(x: Tensor) -> int:
    return _C.distributed.hash_of(x.cpu().numpy().tobytes())
