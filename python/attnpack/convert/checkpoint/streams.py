"""Passes some text through a checkpoint and its converted twin at once, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...checkpoints.tokenizer import load_tokenizer
from ...nn.block import DecoderBlock
from ...nn.causal_lm import CausalLM

LONGEST = 512  # tokens of one sequence, as uptraining takes them
_ROWS = 256  # rows of logits at a time
_CHARACTERS = 16  # upper estimate of the characters per token, except in odd texts


def text_name(path: Path | None) -> str:
    return "Python's help topics" if path is None else str(path)


def load_text(path: Path | None) -> str:
    """The text of the file, or by default the standard library's help topics: English prose that every machine has."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))
    if not path.exists():
        raise ValueError(f"{path}: no such file; give a text file")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as UTF-8 text ({error}); give a text file") from error


def load_tokens(
    model: Path, text: Path | None, count: int, calibrate: bool, max_positions: int, notes: list[str]
) -> tuple[Tensor | None, Tensor | None]:
    """(tokens to measure on, tokens to calibrate on), each [rows, length]; None if not wanted or no tokenizer loads."""
    content = load_text(text)
    if count == 0:
        notes.append("perplexity is left out as asked" + (", calibration too" if calibrate else ""))
        return None, None
    try:
        tokenizer = load_tokenizer(model)
    except (ImportError, ValueError) as error:
        left_out = "perplexity and calibration are" if calibrate else "perplexity is"
        notes.append(f"{left_out} left out: {error}")
        return None, None
    ids = tokenizer.encode(content[: 2 * count * _CHARACTERS])
    half = min(count, len(ids) // 2) if calibrate else min(count, len(ids))
    if half < 2:
        least = 4 if calibrate else 2
        raise ValueError(f"{text_name(text)}: has {len(ids)} tokens, want at least {least} to measure on")
    length = min(half, max_positions, LONGEST)
    rows = half // length
    measured = torch.tensor(ids[: rows * length]).view(rows, length)
    if not calibrate:
        return measured, None
    return measured, torch.tensor(ids[half : half + rows * length]).view(rows, length)


class Streams:
    """Hidden states of the measured tokens in the original and in the converted model, and of the calibration tokens in
    the original.

    Without tokens the methods do nothing. config and converted are the models' keywords; the number of kv heads is
    that of the tensors.
    """

    def __init__(
        self,
        config: dict[str, Any],
        measured: Tensor | None,
        calibration: Tensor | None,
        converted: dict[str, Any] | None = None,
    ) -> None:
        self._config, self._converted = config, converted or config
        self._measured, self._calibration = measured, calibration
        self._old = self._new = self._seen = None
        self.tokens = 0 if measured is None else measured.numel()
        self.learns = calibration is not None

    def embed_tokens(self, table: Tensor, converted: Tensor | None = None) -> None:  # [vocab_size, E]
        if self._measured is not None:
            self._old = _embed(self._config, self._measured, table)
            self._new = self._old if converted is None else _embed(self._converted, self._measured, converted)
        if self._calibration is not None:
            self._seen = _embed(self._config, self._calibration, table)

    @torch.no_grad()
    def attention_input(self, prefix: str, layer: dict[str, Tensor]) -> Tensor | None:
        """The input of the layer's attention for the calibration tokens, [tokens, E]."""
        if self._seen is None:
            return None
        return _block(self._config, prefix, layer).input_layernorm(self._seen).flatten(0, 1)

    @torch.no_grad()
    def pass_layer(self, prefix: str, old: dict[str, Tensor], new: dict[str, Tensor] | None) -> None:
        """Passes the states through one layer; `old` and `new` hold its tensors, whose names begin with `prefix`.
        Without `new` only those of the calibration tokens."""
        if self._old is None and self._seen is None:
            return
        block = _block(self._config, prefix, old)
        if self._seen is not None:
            self._seen = block(self._seen)
        if self._old is not None and new is not None:
            self._old = block(self._old)
            self._new = _block(self._converted, prefix, new)(self._new)

    @torch.no_grad()
    def perplexities(
        self, read: Callable[[str], Tensor], converted: Callable[[str], Tensor] | None = None
    ) -> tuple[float | None, float | None]:
        """Perplexity of the original and of the converted model; the functions read the tensors outside of layers."""
        if self._old is None:
            return None, None
        ends = _last_weights(self._config, read)
        before = self._perplexity(self._config, self._old, *ends)
        if converted is not None:
            del ends  # memory holds one head
            ends = _last_weights(self._converted, converted)
        return before, self._perplexity(self._converted, self._new, *ends)

    def _perplexity(self, config: dict[str, Any], states: Tensor, weight: Tensor, head: Tensor) -> float:
        normed = F.rms_norm(states[:, :-1], weight.shape, weight, config["eps"]).flatten(0, 1) * config["logit_scale"]
        wanted = self._measured[:, 1:].flatten()
        losses = [
            F.cross_entropy(rows @ head.T, ids, reduction="sum").double()
            for rows, ids in zip(normed.split(_ROWS), wanted.split(_ROWS), strict=True)
        ]
        return math.exp(min(700.0, (sum(losses) / wanted.numel()).item()))


def _last_weights(config: dict[str, Any], read: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
    """The weights of the last norm and of the head, in fp32."""
    head = read("model.embed_tokens.weight" if config["tie_embeddings"] else "lm_head.weight")
    return read("model.norm.weight").float(), head.float()


def _embed(config: dict[str, Any], ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(ids, table).float() * config["embed_scale"]


def _block(config: dict[str, Any], prefix: str, tensors: dict[str, Tensor]) -> DecoderBlock:
    """The layer as a DecoderBlock in fp32."""
    tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    sizes: dict[str, Any] = {"num_layers": 1, "vocab_size": 1}
    if config["latent"] is None:
        sizes["num_kv_heads"] = tensors["self_attn.k_proj.weight"].shape[0] // config["head_dim"]
    block: nn.Module = CausalLM(**(config | sizes), device="meta").layers[0]
    block.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)
    return block.eval()
