"""Stored weights: their formats against the package gguf, and their products in fp64."""

import pytest
import torch
from attnpack import reference
from stored_blocks import FORMATS, numbers_of, random_blocks

EACH = pytest.mark.parametrize("kind", FORMATS)


@EACH
def test_the_reference_reads_blocks_as_gguf_does(kind):
    blocks = random_blocks(kind, rows=7, inputs=768)
    assert torch.equal(reference.stored_numbers(blocks, kind), numbers_of(blocks, kind))


def test_the_reference_rounds_each_32_numbers_to_127_steps():
    x = torch.cat([torch.linspace(-1, 1, 32), torch.linspace(0, 100, 32), torch.zeros(32)]).double()
    rounded = reference.round_rows(x)
    steps = rounded[:32] * 127
    assert torch.allclose(steps, steps.round()) and rounded[31] == 1 and rounded[0] == -1
    assert (rounded[:32] - x[:32]).abs().max() <= 0.5 / 127 + 1e-12
    assert (rounded[32:64] - x[32:64]).abs().max() <= 50 / 127 + 1e-12
    assert not rounded[64:].any()
