"""Models and tokenizers from GGUF files and Hugging Face directories, and safetensors files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from ..errors import as_path
from .build import smollm2_path
from .safetensors import load_safetensors, save_safetensors
from .tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import attnpack

__all__ = ["Tokenizer", "load", "load_safetensors", "load_tokenizer", "save_safetensors", "smollm2_path"]


def load(
    path: str | bytes | os.PathLike, dtype: torch.dtype = torch.float32, weights: str = "expanded"
) -> attnpack.CausalLM:
    """The `attnpack.CausalLM` of a Hugging Face directory or a GGUF file, in evaluation mode, in `dtype`.

    weights: "stored" keeps the quantised weights of a GGUF file as they are, see `CausalLM.from_gguf`. Raises the
    errors of `CausalLM.from_hf` and `CausalLM.from_gguf`.
    """
    from ..nn.causal_lm import CausalLM

    path = as_path("path", path)
    if path.is_dir() and weights == "expanded":
        return CausalLM.from_hf(path, dtype=dtype)
    return CausalLM.from_gguf(path, dtype=dtype, weights=weights)
