"""The text of a comparison, as bytes: a part to train on, and pieces of all of it to measure on."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...convert.checkpoint.streams import load_text, text_name

_PIECE = 64  # sequences of a piece of the text
_EVERY = 10  # one piece in so many is measured on
_MOST = 256  # sequences that are measured on
_MOST_BYTES = 4 << 20  # of the default text


@dataclass(frozen=True)
class Text:
    name: str
    sha256: str
    train: Tensor  # uint8 [bytes]
    held_out: Tensor  # uint8 [sequences, length + 1]


def read_text(path: Path | None, length: int) -> Text:
    """The text of the file for sequences of `length` bytes; by default Python's help topics and the sources of its
    standard library. Raises ValueError if it is too short."""
    content = load_text(path).encode()
    name = text_name(path)
    if path is None:
        name += " and sources"
        for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            content += source.read_bytes()
        content = content[:_MOST_BYTES]
    piece = min(_PIECE, len(content) // (2 * _EVERY * (length + 1))) * (length + 1)
    if piece == 0:
        least = 2 * _EVERY * (length + 1)
        raise ValueError(f"--text: {name} has {len(content):,} bytes, want at least {least:,}; give a longer text")
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    pieces = data[: len(data) // piece * piece].view(-1, piece)
    measured = torch.arange(len(pieces)) % _EVERY == _EVERY - 1
    sequences = pieces[measured].view(-1, length + 1)
    chosen = torch.linspace(0, len(sequences) - 1, min(_MOST, len(sequences))).long()
    return Text(name, hashlib.sha256(content).hexdigest(), pieces[~measured].flatten(), sequences[chosen])


def guessing_loss(text: Text) -> float:
    """Nats per byte of a guess that knows nothing but how often each byte is in the training text."""
    counts = text.train.long().bincount(minlength=256) + 1.0
    return -(counts / counts.sum()).log()[text.held_out[:, 1:].long()].mean().item()
