"""Whether all ranks mean the same call. Ranks that do not would wait for each other, or give wrong results."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .collectives import all_gather

_WIDTH = 512
_SEPARATOR = "\n"


def shown(value: Any) -> str:
    """The text on which ranks must agree: a tensor's shape, dtype and whether it wants a gradient; else the value."""
    if isinstance(value, Tensor):
        wants = ", with gradient" if value.requires_grad and torch.is_grad_enabled() else ""
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{wants}"
    return str(value)


class Numbers:
    """The numbers of a tensor, for `agree`, which reads them only where it compares."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __str__(self) -> str:
        return f"with hash {hash_of(self.x.cpu().numpy().tobytes()):x}"


def agree(what: str, group: dist.ProcessGroup, device: torch.device, /, **values: Any) -> None:
    """Raises ValueError, on every rank, unless all ranks give the same values for the call `what`.

    On the CPU this is one small collective, which ATTNPACK_CHECK=0 leaves out. On other devices it waits for the
    device, so it runs only under ATTNPACK_CHECK=1; while a graph is traced it does not run.
    """
    if group.size() == 1 or torch.compiler.is_compiling():
        return
    asked = os.environ.get("ATTNPACK_CHECK")
    if asked == "0" or (device.type != "cpu" and asked != "1"):
        return
    said = [what, *(f"{name} {shown(value)}" for name, value in values.items() if value is not None)]
    text = _SEPARATOR.join(said).encode()
    if len(text) > _WIDTH:
        text = text[: _WIDTH - 24] + f"...{hash_of(text):020d}".encode()
    row = torch.zeros(1, _WIDTH, dtype=torch.uint8, device="cpu")
    row[0, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = all_gather(row.to(device), group).cpu()
    differing = (rows != rows[:1]).any(1).nonzero().flatten().tolist()
    if not differing:
        return
    first, other = (
        bytes(rows[rank].tolist()).rstrip(b"\0").decode(errors="replace").split(_SEPARATOR)
        for rank in (0, differing[0])
    )
    here, there = (
        "; ".join(each for each in mine if each not in theirs) for mine, theirs in ((first, other), (other, first))
    )
    raise ValueError(
        f"attnpack: the ranks of a group give {what} different arguments: rank 0 has {here or 'none of these'}, rank "
        f"{differing[0]} has {there or 'none of these'}, want the same on all ranks: give each the same shapes and "
        "settings"
    )


def state_of_draws(module: nn.Module, device: torch.device) -> str | None:
    """A word for the generator's state, if the module draws from it: what ranks drop of states that they all have must
    be the same. On CUDA, reading it would wait for the device."""
    if device.type != "cpu" or not module.training or torch.compiler.is_compiling():
        return None
    if not any(getattr(part, "dropout", 0) or isinstance(part, nn.Dropout) for part in module.modules()):
        return None
    return f"at {hash_of(torch.get_rng_state().numpy().tobytes()):x}: call torch.manual_seed alike"


def hash_of(text: bytes) -> int:
    """A number of the text that is the same in all processes, unlike `hash`."""
    import hashlib

    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
