"""Random weights in the formats of GGUF files."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from torch import Tensor

# Numbers and bytes of a block, and where its numbers in fp16 stand: scales, then offsets.
FORMATS = {
    "Q8_0": (32, 34, (0,)),
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q5_0": (32, 22, (0,)),
    "Q5_1": (32, 24, (0, 2)),
    "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)),
    "Q6_K": (256, 210, (208,)),
}


def random_blocks(kind: str, rows: int, inputs: int, seed: int = 0) -> Tensor:
    """[rows, blocks, bytes] with any codes, and scales and offsets in (-1, 1)."""
    numbers, size, halves = FORMATS[kind]
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (rows, inputs // numbers, size), dtype=torch.uint8, generator=generator)
    for at in halves:
        values = torch.rand(rows, inputs // numbers, 1, generator=generator) * 2 - 1
        blocks[..., at : at + 2] = values.half().view(torch.uint8)
    return blocks


def numbers_of(blocks: Tensor, kind: str) -> Tensor:
    """The numbers that the package gguf reads, in fp32."""
    kind = gguf.GGMLQuantizationType[kind]
    return torch.from_numpy(np.array(gguf.quants.dequantize(blocks.flatten(-2).numpy(), kind)))
