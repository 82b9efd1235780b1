"""Checkpoints that can be converted: their tensors and their attention layers."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoints.build import check_checkpoint_tensors
from ...checkpoints.companions import CONVERTIBLE, config_json
from ...checkpoints.gguf import GgufCheckpoint
from ...checkpoints.hf_directory import HfCheckpoint
from ...checkpoints.safetensors import SafetensorsFile, open_files
from ...checkpoints.strict_json import read_json
from ...checkpoints.writer import require_finite
from ...nn.causal_lm import CausalLM

# The keywords of CausalLM that a GGUF file leaves alone.
_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(CausalLM).parameters.items()
    if parameter.default is not parameter.empty and name not in ("device", "dtype")
}


@dataclass(frozen=True)
class Attention:
    """One attention layer: its tensors' names begin with `prefix`."""

    prefix: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    key_norm: bool = False


class Source:
    """Reads the tensors of a checkpoint one by one, in the dtype of the output. Each kind of model has a subclass."""

    path: Path
    config: dict[str, Any]  # of the decoder: num_layers, num_heads, num_kv_heads, head_dim ...
    files: dict[str, SafetensorsFile]  # by name of tensor; empty for GGUF
    shapes: dict[str, tuple[int, ...]]

    def __init__(self, path: Path, dtype: torch.dtype | None) -> None:
        self.path, self._dtype = path, dtype

    def attentions(self, layer: str) -> list[Attention]:
        """The attention layers to convert among the tensors whose names begin with `layer`."""
        raise NotImplementedError

    def layers(self) -> dict[str, list[str]]:
        """Names of tensors by layer, in the order of the layers' numbers; "" has the tensors outside of layers."""
        found: dict[str, list[str]] = {"": []}
        for name in sorted(self.shapes, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
            match = re.match(r".*?\.layers\.\d+\.", name)
            found.setdefault(match[0] if match else "", []).append(name)
        return found

    def config_json(self, num_kv_heads: int) -> dict[str, Any]:
        raise NotImplementedError

    def stored_dtype(self, name: str) -> torch.dtype:
        return self.files[name].dtype(name) if self.files else torch.float32

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype or self.stored_dtype(name)

    def read(self, name: str) -> Tensor:
        """The tensor in the dtype of the output; raises ValueError if it is not finite in the stored dtype or in that
        one."""
        tensor = torch.empty(self.shapes[name], dtype=self.stored_dtype(name))
        self._read(name, tensor)
        require_finite(self.path, name, tensor)
        converted = tensor.to(self.dtype(name))
        if not torch.isfinite(converted).all():
            raise ValueError(f"{self.path}: tensor {name} holds numbers that {converted.dtype} cannot; choose bf16")
        return converted

    def by_file(self) -> dict[str, list[str]]:
        """Names of tensors by output file. Each shard becomes a file of the same name."""
        if not self.files:
            return {"model.safetensors": list(self.shapes)}
        files: dict[str, list[str]] = {}
        for name in self.shapes:
            files.setdefault(self.files[name].path.name, []).append(name)
        return files

    def _read(self, name: str, out: Tensor) -> None:
        self.files[name].read(name, out)


class DecoderOnly(Source):
    """A checkpoint that CausalLM reads: Hugging Face directory or GGUF file of one of these families, or of any."""

    def __init__(self, path: Path, dtype: torch.dtype | None, families: tuple[str, ...] | None = CONVERTIBLE) -> None:
        super().__init__(path, dtype)
        self.checkpoint = HfCheckpoint(path) if path.is_dir() else GgufCheckpoint(path)
        if families and isinstance(self.checkpoint, GgufCheckpoint) and self.checkpoint.arch not in families:
            known = ", ".join(families)
            raise ValueError(f"{path}: architecture {self.checkpoint.arch} is not supported; conversion knows {known}")
        check_checkpoint_tensors(self.checkpoint)
        self.config, self.shapes = _DEFAULTS | self.checkpoint.config, self.checkpoint.shapes
        self.files = self.checkpoint.files if isinstance(self.checkpoint, HfCheckpoint) else {}

    def attentions(self, layer: str) -> list[Attention]:
        c = self.config
        sizes = (c["num_heads"], c["num_kv_heads"], c["head_dim"], c["qk_norm"])
        return [Attention(layer + "self_attn.", *sizes)]

    def config_json(self, num_kv_heads: int) -> dict[str, Any]:
        return config_json(self.checkpoint, num_kv_heads)

    def stored_dtype(self, name: str) -> torch.dtype:
        return self.checkpoint.dtype(name) if isinstance(self.checkpoint, HfCheckpoint) else torch.float32

    def _read(self, name: str, out: Tensor) -> None:
        self.checkpoint.read(name, out)


class EncoderDecoder(Source):
    """T5Gemma. Self-attention and cross-attention of the decoder are converted. The encoder is converted on request: it
    runs once per text and reads no cache (Ainslie et al. 2023, section 3.1)."""

    _PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
    _NAMES = (
        r"model\.(encoder|decoder)\.(embed_tokens|norm)\.weight|lm_head\.out_proj\.weight"
        r"|model\.(encoder|decoder)\.layers\.\d{1,9}\.((self|cross)_attn\.[qkvo]_proj\.(weight|bias)"
        r"|mlp\.(gate|up|down)_proj\.weight|(pre|post)_(self_attn|cross_attn|feedforward)_layernorm\.weight)"
    )

    def __init__(self, path: Path, dtype: torch.dtype | None, encoder: bool) -> None:
        super().__init__(path, dtype)
        self._json = read_json(path / "config.json")
        self._sizes = {part: self._part(part) for part in ("encoder", "decoder")}
        self._encoder = encoder
        self.config = self._sizes["decoder"]
        self.files = {name: file for file in open_files(path) for name in file.shapes}
        self.shapes = {name: file.shapes[name] for name, file in self.files.items()}
        for name in self.shapes:
            if not re.fullmatch(self._NAMES, name):
                raise ValueError(f"{path}: has unexpected {name}, which no T5Gemma has")
        for part, sizes in self._sizes.items():
            for layer in range(sizes["num_layers"]):
                self._check_layer(part, f"model.{part}.layers.{layer}.", sizes)

    def attentions(self, layer: str) -> list[Attention]:
        part = layer.split(".")[1]
        if part == "encoder" and not self._encoder:
            return []
        names = ("self_attn.", "cross_attn.") if part == "decoder" else ("self_attn.",)
        c = self._sizes[part]
        return [Attention(layer + name, c["num_heads"], c["num_kv_heads"], c["head_dim"]) for name in names]

    def config_json(self, num_kv_heads: int) -> dict[str, Any]:
        changed = ("encoder", "decoder") if self._encoder else ("decoder",)
        return self._json | {part: self._json[part] | {"num_key_value_heads": num_kv_heads} for part in changed}

    def _part(self, part: str) -> dict[str, Any]:
        config = self._json.get(part)
        keys = {
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "num_kv_heads": "num_key_value_heads",
            "head_dim": "head_dim",
        }
        sizes = {name: config.get(key) if isinstance(config, dict) else None for name, key in keys.items()}
        for name, size in sizes.items():
            if type(size) is not int or size < 1:
                raise ValueError(f"{self.path}: {keys[name]} of the {part} in config.json is {size!r}, wants an int")
        return sizes

    def _check_layer(self, part: str, layer: str, sizes: dict[str, Any]) -> None:
        for kind in ("self_attn", "cross_attn") if part == "decoder" else ("self_attn",):
            for projection in sorted(self._PROJECTIONS):
                name = f"{layer}{kind}.{projection}.weight"
                if name not in self.shapes:
                    raise ValueError(f"{self.path}: lacks {name}; its configuration asks for it")
                heads = sizes["num_kv_heads" if projection in ("k_proj", "v_proj") else "num_heads"]
                side = 1 if projection == "o_proj" else 0
                if len(self.shapes[name]) != 2 or self.shapes[name][side] != heads * sizes["head_dim"]:
                    raise ValueError(
                        f"{self.path}: {name} has shape {list(self.shapes[name])}, its configuration asks for "
                        f"{heads * sizes['head_dim']} {'columns' if side else 'rows'}"
                    )


def _check_exists(path: Path) -> None:
    if not path.exists():
        raise ValueError(f"{path}: no such file or directory; give a Hugging Face directory or a GGUF file")


def open_decoder(path: Path, dtype: torch.dtype | None) -> DecoderOnly:
    """The checkpoint at `path`, of any family that CausalLM reads; ValueError as `open_source` raises it."""
    _check_exists(path)
    return DecoderOnly(path, dtype, families=None)


def open_source(path: Path, dtype: torch.dtype | None, encoder: bool) -> Source:
    """The checkpoint at `path`; ValueError if its kind is not known, or if it is damaged or incomplete."""
    _check_exists(path)
    config = path / "config.json"
    model_type = read_json(config).get("model_type") if config.is_file() else None
    if model_type == "t5gemma":
        return EncoderDecoder(path, dtype, encoder)
    if model_type is not None and model_type not in CONVERTIBLE:
        known = ", ".join((*CONVERTIBLE, "t5gemma"))
        raise ValueError(f"{path}: model_type {model_type!r} is not supported; conversion knows {known}")
    if encoder:
        raise ValueError(f"--encoder: {path} is no encoder-decoder model (attnpack knows t5gemma); leave it out")
    return DecoderOnly(path, dtype)
