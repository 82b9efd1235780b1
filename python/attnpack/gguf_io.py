"""GGUF checkpoints: the header, the tensors, and what they mean as CausalLM keywords and Llama state_dict names.

The format is the one of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is read here rather than
by `gguf.GGUFReader`, which keeps every token of the vocabulary as a NumPy view (5 s and 160 MB for SmolLM2, more than
loading may cost); the package `gguf` still knows the quantised types and undoes them.
"""

from __future__ import annotations

import math
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from .sizes import as_path

# GGUF architecture -> whether q and k rows are stored with the two RoPE halves interleaved.
ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEEPEST = 16  # arrays in arrays
_CHUNK_BYTES = 1 << 20  # of dequantised fp32 at a time

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FREQS = "rope_freqs.weight"
# Settings of RoPE scaling that are read at these values only.
_ROPE_DEFAULTS = {
    "alpha": 0.0,
    "attn_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_log_multiplier": 0.0,
    "yarn_ext_factor": 1.0,
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# Settings that change the mathematics and that the loaded model would silently lack.
_UNSUPPORTED_KEYS = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "attention.scale",
    "attention.temperature_scale",
    "attention.max_alibi_bias",
    "expert_count",
)


@dataclass(frozen=True)
class GgufTensor:
    shape: tuple[int, ...]  # rows first, as in torch
    type: int  # a gguf.GGMLQuantizationType
    offset: int  # from the start of the file
    row_bytes: int


class _Header:
    """Reads values one after the other and refuses to run past the end of the file."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path, self.size = file, path, os.fstat(file.fileno()).st_size

    def take(self, count: int) -> bytes:
        if count > self.size - self.file.tell():
            raise ValueError(
                f"{self.path}: the GGUF header ends early (the file has {self.size} bytes); "
                "the file is truncated or damaged, get it again"
            )
        return self.file.read(count)

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            if depth == _DEEPEST:
                raise ValueError(f"{self.path}: metadata with arrays in arrays, {depth} deep; the file is damaged")
            item, count = self.scalar("I"), self.scalar("Q")
            if item in _SCALARS:
                code = _SCALARS[item]
                data = self.take(count * struct.calcsize("<" + code))
                return list(struct.unpack(f"<{count}{code}", data))
            return [self.value(item, depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"{self.path}: metadata of type {kind}, which GGUF does not define; the file is damaged")
        return self.scalar(_SCALARS[kind])


class GgufFile:
    """The header of a GGUF file: `metadata`, `tensors` by name; `read` gives one tensor.

    Raises ValueError, naming the file, for anything that is not a whole little-endian GGUF file of version 2 or 3.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = as_path("path", path)
        if self.path.is_dir():
            raise ValueError(f"{self.path}: is a directory; give the path of a .gguf file, or use from_hf")
        if not self.path.is_file():
            raise ValueError(f"{self.path}: no such file; give the path of a .gguf file")
        with self.path.open("rb") as file:
            header = _Header(file, self.path)
            magic = file.read(4)
            if magic != b"GGUF":
                raise ValueError(f"{self.path}: begins with {magic!r}, not with b'GGUF'; give a GGUF file")
            version = header.scalar("I")
            if version not in (2, 3):
                raise ValueError(f"{self.path}: GGUF version {version}; readable are little-endian versions 2 and 3")
            num_tensors, num_values = header.scalar("Q"), header.scalar("Q")
            self.metadata: dict[str, Any] = {}
            for _ in range(num_values):
                key = header.string()
                self.metadata[key] = header.value(header.scalar("I"))
            infos = [self._tensor_info(header) for _ in range(num_tensors)]
            alignment = self.metadata.get("general.alignment", 32)
            start = -(-file.tell() // alignment) * alignment
        blocks = _block_sizes(self.path, {kind for _, _, kind, _ in infos})
        self.tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, at in infos:
            elements, block_bytes = blocks[kind]
            self.tensors[name] = GgufTensor(shape, kind, start + at, shape[-1] // elements * block_bytes)
        self._check_size(header.size)

    @staticmethod
    def _tensor_info(header: _Header) -> tuple[str, tuple[int, ...], int, int]:
        name = header.string()
        dims = [header.scalar("Q") for _ in range(header.scalar("I"))]
        return name, tuple(reversed(dims)), header.scalar("I"), header.scalar("Q")

    def _check_size(self, size: int) -> None:
        for name, tensor in self.tensors.items():
            end = tensor.offset + math.prod(tensor.shape[:-1]) * tensor.row_bytes
            if end > size:
                raise ValueError(
                    f"{self.path}: tensor {name} ends at byte {end}, but the file has {size}; "
                    "the file is truncated, get it again"
                )

    def read(self, name: str, out: torch.Tensor) -> None:
        """Dequantises tensor `name` into `out` (same shape, any floating dtype and device), few megabytes at a time."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
        from numpy import fromfile, uint8

        tensor = self.tensors[name]
        rows = out.view(-1, tensor.shape[-1])
        step = max(1, _CHUNK_BYTES // (4 * tensor.shape[-1]))
        with self.path.open("rb") as file:
            file.seek(tensor.offset)
            for first in range(0, rows.shape[0], step):
                chunk = rows[first : first + step]
                data = fromfile(file, dtype=uint8, count=chunk.shape[0] * tensor.row_bytes)
                values = dequantize(data.reshape(chunk.shape[0], -1), GGMLQuantizationType(tensor.type))
                chunk.copy_(torch.from_numpy(values))


def _block_sizes(path: Path, kinds: set[int]) -> dict[int, tuple[int, int]]:
    """Elements and bytes of one block of each tensor type; raises where one cannot be dequantised."""
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize
        from numpy import uint8, zeros
    except ImportError as error:
        raise ImportError(f"{path}: reading GGUF needs the package gguf; run `pip install gguf`") from error
    sizes = {}
    for kind in kinds:
        try:
            sizes[kind] = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            dequantize(zeros((1, sizes[kind][1]), dtype=uint8), GGMLQuantizationType(kind))
        except (ValueError, NotImplementedError) as error:
            raise ValueError(
                f"{path}: has tensors of a type the package gguf cannot dequantise ({error}); "
                "use a file of another type, such as Q8_0 or F16, or a newer gguf"
            ) from error
    return sizes


class GgufCheckpoint:
    """A GGUF file seen as a CausalLM: `config` (its keywords), `shapes` by state_dict name, `read(name, out)`."""

    def __init__(self, path: str | os.PathLike, max_positions: int | None = None) -> None:
        self.file = GgufFile(path)
        self.path = self.file.path
        self.arch = self.file.metadata.get("general.architecture")
        if self.arch not in ARCHITECTURES:
            raise ValueError(
                f"{self.path}: architecture {self.arch!r} is not supported; from_gguf reads {', '.join(ARCHITECTURES)}"
            )
        self.sources = {self._state_name(name): name for name in self.file.tensors if name != _ROPE_FREQS}
        self.shapes = {state: self.file.tensors[name].shape for state, name in self.sources.items()}
        self.config = self._config(max_positions)

    def read(self, name: str, out: torch.Tensor) -> None:
        """Fills `out` with the tensor of state_dict name `name`, q and k rows in Hugging Face's order."""
        self.file.read(self.sources[name], out)
        heads = {"q_proj": "num_heads", "k_proj": "num_kv_heads"}.get(name.split(".")[-2])
        if heads and ARCHITECTURES[self.arch]:
            # Stored pairs (2i, 2i + 1) of a head turn by one angle; Hugging Face's pairs are (i, i + head_dim / 2).
            pairs = out.view(self.config[heads], self.config["head_dim"] // 2, 2, -1)
            out.copy_(pairs.transpose(1, 2).reshape(out.shape))

    def _state_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        if stem in _NAMES:
            return f"{_NAMES[stem]}.{kind}"
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if match and match[2] in _LAYER_NAMES:
            return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{kind}"
        raise ValueError(f"{self.path}: tensor {name} has no place in the architecture {self.arch}")

    def _get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.arch}.{key}", default)

    def _need(self, key: str) -> Any:
        if not (value := self._get(key)):
            raise ValueError(f"{self.path}: metadata lacks {self.arch}.{key}, or it is 0; the file is damaged")
        return value

    def _config(self, max_positions: int | None) -> dict[str, Any]:
        for key in _UNSUPPORTED_KEYS:
            if self._get(key):
                raise ValueError(f"{self.path}: {self.arch}.{key} = {self._get(key)} is not supported yet")
        embed_dim, num_heads = self._need("embedding_length"), self._need("attention.head_count")
        num_kv_heads = self._get("attention.head_count_kv", num_heads)
        if not isinstance(num_heads, int) or not isinstance(num_kv_heads, int):
            raise ValueError(f"{self.path}: head counts that differ from layer to layer are not supported")
        head_dim = self._get("attention.key_length", embed_dim // num_heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._get(key, head_dim) != head_dim:
                raise ValueError(f"{self.path}: {self.arch}.{key} is {self._get(key)}, head_dim is {head_dim}; "
                                 "models where they differ are not supported")  # fmt: skip
        positions = min(self._need("context_length"), max_positions or math.inf)
        shapes = self.shapes
        return {
            "vocab_size": shapes.get("model.embed_tokens.weight", (0,))[0],
            "embed_dim": embed_dim,
            "num_layers": self._need("block_count"),
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "hidden_dim": self._need("feed_forward_length"),
            "max_positions": positions,
            "rope_base": float(self._get("rope.freq_base", 10000.0)),
            "rope_scaling": self._rope_scaling(),
            "eps": self._need("attention.layer_norm_rms_epsilon"),
            "tie_embeddings": "lm_head.weight" not in shapes,
            "window": self._window(positions),
            "qk_norm": "model.layers.0.self_attn.q_norm.weight" in shapes,
            "bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
            "out_bias": "model.layers.0.self_attn.o_proj.bias" in shapes,
            "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in shapes,
        }

    def _window(self, positions: int) -> tuple[int, int] | None:
        """The window of every layer for a sliding_window of W tokens, their own included."""
        key = f"{self.arch}.attention.sliding_window"
        width, pattern = self._get("attention.sliding_window"), self._get("attention.sliding_window_pattern")
        if not width:
            return None
        if not isinstance(width, int):
            raise ValueError(f"{self.path}: {key} that differs from layer to layer is not supported")
        if pattern is None:
            return width - 1, 0
        if width < positions:
            raise ValueError(
                f"{self.path}: {key} is {width} in some layers only, which is not supported yet, and shorter than the "
                f"context of {positions}; pass max_positions={width} or less"
            )
        return None

    def _rope_scaling(self) -> dict[str, Any] | None:
        factor = self._get("rope.scaling.factor", self._get("rope.scale_linear", 1.0))
        kind = self._get("rope.scaling.type", "linear" if factor != 1.0 else "none")
        for key, usual in _ROPE_DEFAULTS.items():
            if (value := self._get(f"rope.scaling.{key}", usual)) != usual:
                raise ValueError(f"{self.path}: {self.arch}.rope.scaling.{key} = {value} is not supported yet")
        if _ROPE_FREQS in self.file.tensors:
            return self._divided_frequencies(kind, factor)
        if kind == "none" or (kind == "linear" and factor == 1.0):
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        if kind != "yarn":
            raise ValueError(
                f"{self.path}: {self.arch}.rope.scaling.type is {kind!r}; readable are 'none', 'linear' and 'yarn'"
            )
        names = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        given = {ours: self._get(f"rope.scaling.{theirs}") for ours, theirs in names.items()}
        trained = self._get("rope.scaling.original_context_length") or self._need("context_length")
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": trained,
            **{name: value for name, value in given.items() if value},
        }

    def _divided_frequencies(self, kind: str, factor: float) -> dict[str, Any]:
        """rope_freqs.weight holds a divisor of each frequency, what Llama 3's scaling comes to: LongRoPE with one list
        for every length."""
        if kind not in ("none", "linear") or factor != 1.0:
            raise ValueError(
                f"{self.path}: has {_ROPE_FREQS} beside rope.scaling.type {kind!r}, which is not supported"
            )
        divisors = torch.empty(self.file.tensors[_ROPE_FREQS].shape)
        self.file.read(_ROPE_FREQS, divisors)
        values = divisors.flatten().tolist()
        return {"rope_type": "longrope", "short_factor": values, "long_factor": values, "attention_factor": 1.0}
