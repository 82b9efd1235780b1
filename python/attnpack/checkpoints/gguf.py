"""GGUF checkpoints: a file's metadata as CausalLM keywords, and its tensors under Llama's state_dict names."""

from __future__ import annotations

import math
import os
import re
from typing import Any, NamedTuple

import torch

from .._C import checkpoints
from ..file_errors import excerpt
from .gguf_families import ARCHITECTURES
from .gguf_file import GgufFile
from .gguf_hybrid_families import HYBRIDS
from .gguf_newer_families import NEWER
from .gguf_parts import Part
from .gguf_rope import ROPE_FREQS, rope_scaling
from .gguf_settings import GgufSettings

_NAMES = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_NO_WEIGHTS = {ROPE_FREQS, "rope_factors_short.weight", "rope_factors_long.weight"}
_MOST_EXPERTS = 4096
_ABSORBED_KEYS, _ABSORBED_VALUES = ".attn_k_b.weight", ".attn_v_b.weight"
# Settings that change the mathematics and that CausalLM does not have: loading would silently drop them.
_UNSUPPORTED_KEYS = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "attention.scale",
    "attention.temperature_scale",
    "attention.max_alibi_bias",
    "attention.clamp_kqv",
    "attention.output_scale",
    "attention.relative_buckets_count",
    "attention.shared_kv_layers",
    "expert_count",
    "full_attention_interval",
    "nextn_predict_layers",
    "rope.dimension_sections",
    "router_logit_softcapping",
    "swiglu_clamp_exp",
    "swiglu_clamp_shexp",
    "swin_norm",
    "use_parallel_residual",
)
# Widths of a head that must be head_dim.
_WIDTHS = (
    "attention.value_length",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "rope.dimension_count",
    "rope.dimension_count_swa",
)


class Piece(NamedTuple):
    """The rows of a file's tensor that make a tensor of the state dict; where there is a `part`, it makes the tensor of
    all rows."""

    tensor: str
    first: int
    shape: tuple[int, ...]
    part: Part | None = None


class GgufCheckpoint(GgufSettings):
    """A GGUF file seen as a CausalLM: `config` (its keywords), `shapes` by state_dict name, `read(name, out)`."""

    def __init__(self, path: str | os.PathLike, max_positions: int | None = None) -> None:
        super().__init__(GgufFile(path))
        self.file.check_model()
        known = ARCHITECTURES | NEWER | HYBRIDS
        if self.arch not in known:
            raise ValueError(
                f"{self.path}: architecture {excerpt(repr(self.arch))} is not supported; from_gguf reads "
                + ", ".join(known)
            )
        self.family = known[self.arch]
        self._sizes = self._checked_sizes()
        self.parts = self.family.parts(self)
        names = self.family.layer_names(self.file.tensors)
        self.pieces: dict[str, Piece] = {}
        further = tuple(f"blk.{self._sizes['num_layers'] + i}." for i in range(self._further_layers()))
        for name in self.file.tensors.keys() - _NO_WEIGHTS:
            if further and name.startswith(further):
                continue
            self.pieces |= self._pieces_of(name, names)
        self.shapes = {name: piece.shape for name, piece in self.pieces.items()}
        self.config = self._model_config(max_positions)

    def read(self, name: str, out: torch.Tensor) -> None:
        """Fills `out` with the tensor of state_dict name `name`, q and k rows in Hugging Face's order."""
        piece = self.pieces[name]
        if piece.tensor.endswith(_ABSORBED_KEYS):
            self._read_latent_heads(piece.tensor, out)
            return
        if piece.part is not None:
            stored = torch.empty(self.file.tensors[piece.tensor].shape, device="cpu")
            self.file.read(piece.tensor, stored)
            out.copy_(piece.part.make(stored))
            return
        self.file.read(piece.tensor, out, piece.first)
        if heads := self._interleaved_heads(name):
            pairs = out.view(heads, self.config["head_dim"] // 2, 2, -1)
            out.copy_(pairs.transpose(1, 2).reshape(out.shape))

    def blocks(self, name: str) -> torch.Tensor | None:
        """The weight of state_dict name `name` as the file holds it (`GgufFile.blocks`), q and k rows in Hugging Face's
        order: only these are copied. None if the file holds it otherwise."""
        piece = self.pieces[name]
        if piece.tensor.endswith((_ABSORBED_KEYS, _ABSORBED_VALUES)) or len(piece.shape) != 2:
            return None
        if piece.part is not None:
            found = self.file.blocks(piece.tensor, 0, self.file.tensors[piece.tensor].shape[0])
            return piece.part.make(found).contiguous() if piece.part.rows and found is not None else None
        found = self.file.blocks(piece.tensor, piece.first, piece.shape[0])
        heads = self._interleaved_heads(name)
        if found is None or not heads:
            return found
        return found.view(heads, -1, 2, *found.shape[1:]).transpose(1, 2).reshape(found.shape)

    def _interleaved_heads(self, name: str) -> int | None:
        """How many heads a weight has whose rows the file stores by RoPE pairs, (2i, 2i + 1) of a head, where Hugging
        Face has (i, i + head_dim / 2)."""
        heads = {"q_proj": "num_heads", "k_proj": "num_kv_heads"}.get(name.split(".")[-2])
        return self.config[heads] if heads and self.family.interleaved else None

    def _pieces_of(self, name: str, names: dict[str, str]) -> dict[str, Piece]:
        """The tensors of the state dict that the file's tensor `name` holds, by their names."""
        stem, _, kind = name.rpartition(".")
        shape = self.file.tensors[name].shape
        whole = re.fullmatch(r"(?:blk\.(\d+)\.)?(.+)", name)
        if whole and whole[2] in self.parts:
            layer = f"model.layers.{whole[1]}." if whole[1] else ""
            made = self.parts[whole[2]]
            return {f"{layer}{part.name}": Piece(name, 0, part.shape(self.path, name, shape), part) for part in made}
        if stem in _NAMES:
            return {f"{_NAMES[stem]}.{kind}": Piece(name, 0, shape)}
        match = re.fullmatch(r"blk\.(\d+)\.([\w.]+)", stem)
        layer, part = (f"model.layers.{match[1]}.", match[2]) if match else ("", "")
        if part in self.family.fused:
            targets = self.family.fused[part]
            return self._split(name, [f"{layer}{target}.{kind}" for target in targets], shape)
        if (latent := self._latent_heads(name, layer)) is not None:
            return latent
        if part not in names:
            raise ValueError(f"{self.path}: tensor {excerpt(name)} has no place in the architecture {self.arch}")
        target = names[part]
        if "*" in target:
            return self._by_expert(name, f"{layer}{target}.{kind}", shape)
        whole = target.endswith(("sinks", "correction_bias"))  # a parameter of the module, not of a child
        return {f"{layer}{target}" if whole else f"{layer}{target}.{kind}": Piece(name, 0, shape)}

    def _latent_heads(self, name: str, layer: str) -> dict[str, Piece] | None:
        """kv_b_proj from a file that holds its two halves for absorbed heads: W_UK as attn_k_b, transposed, and W_UV as
        attn_v_b. None if `name` is neither."""
        if self.arch != "deepseek2" or not name.endswith((_ABSORBED_KEYS, _ABSORBED_VALUES)):
            return None
        keys = name.replace(_ABSORBED_VALUES, _ABSORBED_KEYS)
        values = name.replace(_ABSORBED_KEYS, _ABSORBED_VALUES)
        shapes = [self.file.tensors[half].shape if half in self.file.tensors else () for half in (keys, values)]
        if not (len(shapes[0]) == len(shapes[1]) == 3 and shapes[0][:2] == (shapes[1][0], shapes[1][2])):
            raise ValueError(
                f"{self.path}: {excerpt(keys)} and attn_v_b have shapes {list(shapes[0])} and {list(shapes[1])}, want "
                "[heads, rank, qk_nope_head_dim] and [heads, v_head_dim, rank]"
            )
        heads, rank, nope = shapes[0]
        return {f"{layer}self_attn.kv_b_proj.weight": Piece(keys, 0, (heads * (nope + shapes[1][1]), rank))}

    def _read_latent_heads(self, keys: str, out: torch.Tensor) -> None:
        values = keys.replace(_ABSORBED_KEYS, _ABSORBED_VALUES)
        halves = {name: out.new_empty(self.file.tensors[name].shape) for name in (keys, values)}
        for name, half in halves.items():
            self.file.read(name, half)
        out.copy_(torch.cat([halves[keys].transpose(1, 2), halves[values]], 1).view(out.shape))

    def _split(self, name: str, targets: list[str], shape: tuple[int, ...]) -> dict[str, Piece]:
        heads, kv_heads, head_dim = (self._sizes[size] for size in ("num_heads", "num_kv_heads", "head_dim"))
        rows = (
            [shape[0] // 2] * 2 if len(targets) == 2 else [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        )
        if sum(rows) != shape[0]:
            raise ValueError(
                f"{self.path}: {excerpt(name)} has {shape[0]} rows, its configuration asks for {sum(rows)}: "
                + ", ".join(target.split(".")[-2] for target in targets)
            )
        firsts = [sum(rows[:i]) for i in range(len(rows))]
        return {t: Piece(name, at, (n, *shape[1:])) for t, at, n in zip(targets, firsts, rows, strict=True)}

    def _by_expert(self, name: str, target: str, shape: tuple[int, ...]) -> dict[str, Piece]:
        if len(shape) < 2 or shape[0] > _MOST_EXPERTS:
            raise ValueError(
                f"{self.path}: {excerpt(name)} has shape {list(shape)}, wants the experts first, at most "
                f"{_MOST_EXPERTS}"
            )
        rows = math.prod(shape[1:-1])
        return {target.replace("*", str(e)): Piece(name, e * rows, shape[1:]) for e in range(shape[0])}

    def _checked_sizes(self) -> dict[str, int]:
        if isinstance(self.setting("attention.head_count"), list):
            raise ValueError(f"{self.path}: head counts that differ from layer to layer are not supported")
        embed_dim, num_heads = self.size("embedding_length"), self.size("attention.head_count")
        sizes = {
            "embed_dim": embed_dim,
            "num_layers": self.size("block_count") - self._further_layers(),
            "num_heads": num_heads,
            "num_kv_heads": self._num_kv_heads(num_heads),
            "head_dim": self.size("attention.key_length", embed_dim // num_heads),
        }
        most = max(num_heads, sizes["num_kv_heads"])
        checkpoints.check_sizes(str(self.path), len(self.file.tensors), sizes["num_layers"], most, sizes["head_dim"])
        return sizes

    def _further_layers(self) -> int:
        """Layers behind the last that only draft tokens: they are not read."""
        if "nextn_predict_layers" not in self.family.settings or not self.setting("nextn_predict_layers"):
            return 0
        count, all_layers = self.size("nextn_predict_layers"), self.size("block_count")
        if count >= all_layers:
            raise ValueError(
                f"{self.path}: {self.arch}.nextn_predict_layers is {count}, wants less than block_count, {all_layers}"
            )
        return count

    def _num_kv_heads(self, num_heads: int) -> int:
        listed = self.setting("attention.head_count_kv")
        if not isinstance(listed, list):
            return self.size("attention.head_count_kv", num_heads)
        counts = sorted({*listed} - {0}) if self.family.hybrid else []
        if len(counts) != 1 or type(counts[0]) is not int or counts[0] < 1:
            raise ValueError(f"{self.path}: head counts that differ from layer to layer are not supported")
        return counts[0]

    def _model_config(self, max_positions: int | None) -> dict[str, Any]:
        family, shapes, head_dim = self.family, self.shapes, self._sizes["head_dim"]
        self.refuse(*(key for key in _UNSUPPORTED_KEYS if key not in family.settings))
        if (causal := self.setting("attention.causal", True)) is not True:
            raise ValueError(
                f"{self.path}: {self.arch}.attention.causal is {excerpt(repr(causal))}, wants True: every token sees "
                "only those before it here"
            )
        for key in _WIDTHS:
            if key not in family.settings and self.setting(key, head_dim) != head_dim:
                raise ValueError(
                    f"{self.path}: {self.arch}.{key} is {excerpt(self.setting(key))}, head_dim is {head_dim}; "
                    "models where they differ are not supported"
                )
        positions = min(self.size("context_length"), max_positions or math.inf)
        base = self.number("rope.freq_base", 10000.0)
        if "rope.freq_base_swa" not in family.settings:
            self.refuse("rope.freq_base_swa", usual=(base,))
        eps = self.number("attention.layer_norm_epsilon" if family.layer_norm else "attention.layer_norm_rms_epsilon")
        attends = min((name for name in shapes if name.endswith("self_attn.q_proj.weight")), default="model.layers.0.")
        first = attends.removesuffix("self_attn.q_proj.weight")
        config = self._sizes | {
            "vocab_size": shapes.get("model.embed_tokens.weight", (0,))[0],
            "hidden_dim": self.size("feed_forward_length"),
            "max_positions": positions,
            "rope_base": base,
            "rope_scaling": rope_scaling(self, head_dim, family.settings),
            "eps": eps,
            "norm": "layer" if family.layer_norm else "rms",
            "tie_embeddings": "lm_head.weight" not in shapes,
            "window": None if family.windows else self._window(positions),
            "qk_norm": {"eps": eps} if f"{first}self_attn.q_norm.weight" in shapes else False,
            "bias": f"{first}self_attn.q_proj.bias" in shapes,
            "out_bias": f"{first}self_attn.o_proj.bias" in shapes,
            "mlp_bias": f"{first}mlp.up_proj.bias" in shapes,
        }
        config |= family.options(self, config)
        if config.get("position_embedding") == "learned" and max_positions is not None:
            config["max_positions"] = shapes.get("model.embed_positions.weight", (positions,))[0]
        return config

    def _window(self, positions: int) -> tuple[int, int] | None:
        """The window of every layer: (W - 1, 0) for a sliding_window of W tokens, the token itself included."""
        key = f"{self.arch}.attention.sliding_window"
        width, pattern = self.setting("attention.sliding_window"), self.setting("attention.sliding_window_pattern")
        if not width:
            return None
        if type(width) is not int or width < 1:
            raise ValueError(f"{self.path}: {key} is {excerpt(repr(width))}, wants an int of at least 1 for all layers")
        if pattern is None:
            return width - 1, 0
        if width < positions:
            raise ValueError(
                f"{self.path}: {key} is {width} in some layers only, which is not supported yet, and shorter than the "
                f"context of {positions}; pass max_positions={width} or less"
            )
        return None
