"""Random weights in the formats of GGUF files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

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


def random_blocks(kind: str, rows: int, inputs: int, seed: int = 0, largest: float = 1.0) -> Tensor:
    """[rows, blocks, bytes] with any codes, and scales and offsets in (-largest, largest)."""
    numbers, size, halves = FORMATS[kind]
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (rows, inputs // numbers, size), dtype=torch.uint8, generator=generator)
    for at in halves:
        values = (torch.rand(rows, inputs // numbers, 1, generator=generator) * 2 - 1) * largest
        blocks[..., at : at + 2] = values.half().view(torch.uint8)
    return blocks


def numbers_of(blocks: Tensor, kind: str) -> Tensor:
    """The numbers that the package gguf reads, in fp32."""
    kind = gguf.GGMLQuantizationType[kind]
    return torch.from_numpy(np.array(gguf.quants.dequantize(blocks.flatten(-2).numpy(), kind)))


def exact_input(rows: int, inputs: int) -> Tensor:
    """Numbers that are integers of 8 bits times a power of two per 32 of them, so that rounding leaves them alone."""
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(-127, 128, (rows, inputs // 32, 32), generator=generator).float()
    codes[..., 5] = 127
    return (codes * 2.0 ** torch.randint(-9, 3, (rows, inputs // 32, 1), generator=generator)).flatten(1)


def check_rounded(x: Tensor, blocks: Tensor, kind: str, found: Tensor, bias: Tensor | None = None) -> None:
    """Checks that `found` is the product with rounded x: a number of x is moved by half a step at most."""
    weight = numbers_of(blocks, kind).double()
    exact = F.linear(x.double(), weight, None if bias is None else bias.double())
    step = x.double().unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
    half = (0.5001 * step).expand(*step.shape[:-1], 32).flatten(-2)
    rounding = torch.finfo(found.dtype).eps * (exact.abs() + 1e-30) + 1e-6 * x.double().abs() @ weight.abs().t()
    assert ((found.double() - exact).abs() <= half @ weight.abs().t() + rounding).all()


def llama_file(
    path: Path, kinds: Sequence[str], tied: bool = True, layers: int = 2, alignment: int | None = None
) -> Path:
    """A Llama whose matrices take turns in the formats, as llama.cpp writes it: 256 wide, 4 query heads, 2 of kv."""
    width, hidden, vocab, head_dim = 256, 512, 96, 64
    shapes = {"token_embd": (vocab, width)} | ({} if tied else {"output": (vocab, width)})
    for i in range(layers):
        shapes |= {
            f"blk.{i}.{name}": shape
            for name, shape in {
                "attn_q": (4 * head_dim, width),
                "attn_k": (2 * head_dim, width),
                "attn_v": (2 * head_dim, width),
                "attn_output": (width, 4 * head_dim),
                "ffn_gate": (hidden, width),
                "ffn_up": (hidden, width),
                "ffn_down": (width, hidden),
            }.items()
        }
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in {
        "embedding_length": width,
        "block_count": layers,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "context_length": 64,
        "feed_forward_length": hidden,
        "vocab_size": vocab,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_string("tokenizer.ggml.model", "none")  # which llama.cpp wants to know
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for i, (name, (rows, inputs)) in enumerate(shapes.items()):
        kind = kinds[i % len(kinds)]
        # Weights of about one size: those of Q4_K are products of scales of 6 bits and codes of 4.
        largest = {"Q8_0": 1e-3, "Q6_K": 3e-5}.get(kind, 3e-4 if kind.endswith("K") else 1e-2)
        blocks = random_blocks(kind, rows, inputs, seed=i, largest=largest).flatten(-2).numpy()
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
    norms = ["output_norm", *(f"blk.{i}.{part}_norm" for i in range(layers) for part in ("attn", "ffn"))]
    for i, name in enumerate(norms):
        writer.add_tensor(f"{name}.weight", np.linspace(0.5, 1.5 + i / 10, width, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
