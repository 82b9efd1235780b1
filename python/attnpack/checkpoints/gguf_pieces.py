"""Which tensors of a GGUF file make a CausalLM's, under Llama's state_dict names."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from .._C import checkpoints
from ..file_errors import excerpt
from .gguf_experts import MOST_EXPERTS
from .gguf_families import ARCHITECTURES
from .gguf_file import GgufFile
from .gguf_gemma4 import GEMMA4
from .gguf_hybrid_families import HYBRIDS
from .gguf_newer_families import NEWER
from .gguf_parts import Recipe
from .gguf_rope import ROPE_FREQS
from .gguf_settings import GgufSettings

_NAMES = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_NO_WEIGHTS = {ROPE_FREQS, "rope_factors_short.weight", "rope_factors_long.weight"}
# Projections whose rows follow each other, in some architectures or by the converter's --fuse-qkv and
# --fuse-gate-up-exps.
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_FUSED_EXPERTS = ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj")
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


class Piece(NamedTuple):
    """The rows of a file's tensor that make a tensor of the state dict."""

    tensor: str
    first: int
    shape: tuple[int, ...]


class Made(NamedTuple):
    """A tensor of the state dict that a recipe makes: target number `which` of the file's tensors `sources`."""

    recipe: Recipe
    sources: tuple[str, ...]
    which: int
    shape: tuple[int, ...]


class GgufPieces(GgufSettings):
    """The settings of a file that is a model of a known architecture, and `pieces`: where its tensors lie in the
    file."""

    def __init__(self, path: str | os.PathLike) -> None:
        super().__init__(GgufFile(path))
        self.file.check_model()
        known = ARCHITECTURES | NEWER | GEMMA4 | HYBRIDS
        if self.arch not in known:
            raise ValueError(
                f"{self.path}: architecture {excerpt(repr(self.arch))} is not supported; from_gguf reads "
                + ", ".join(known)
            )
        self.family = known[self.arch]
        self.refuse(*(key for key in _UNSUPPORTED_KEYS if key not in self.family.settings))
        self._sizes = self._checked_sizes()
        self._recipes = {source: recipe for recipe in self.family.recipes(self) for source in recipe.sources}
        names = self.family.layer_names(self.file.tensors)
        self.pieces: dict[str, Piece | Made] = {}
        unread = (*self._further_layers_names(), *self.family.unread(self))
        for name in sorted(self.file.tensors.keys() - _NO_WEIGHTS):
            if not name.startswith(unread):
                self.pieces |= self._pieces_of(name, names)
        self.shapes = {name: piece.shape for name, piece in self.pieces.items()}

    def _pieces_of(self, name: str, names: dict[str, str]) -> Mapping[str, Piece | Made]:
        """The tensors of the state dict that the file's tensor `name` holds, by their names."""
        stem, _, kind = name.rpartition(".")
        shape = self.file.tensors[name].shape
        whole = re.fullmatch(r"(?:blk\.(\d+)\.)?(.+)", name)
        if whole and whole[2] in self._recipes:
            return self._pieces_made(name, self._recipes[whole[2]], whole[1])
        if stem in _NAMES:
            return {f"{_NAMES[stem]}.{kind}": Piece(name, 0, shape)}
        match = re.fullmatch(r"blk\.(\d+)\.([\w.]+)", stem)
        layer, part = (f"model.layers.{match[1]}.", match[2]) if match else ("", "")
        fused_rows = _QKV if part == "attn_qkv" and part not in names else None
        if targets := self.family.fused.get(part, fused_rows):
            return self._split(name, [f"{layer}{target}.{kind}" for target in targets], shape)
        fused = part == "ffn_gate_up_exps" and "ffn_gate_exps" in names and len(shape) == 3
        if not fused and part not in names:
            raise ValueError(f"{self.path}: tensor {excerpt(name)} has no place in the architecture {self.arch}")
        targets = _FUSED_EXPERTS if fused else (names[part],)
        if "*" in targets[0]:
            return self._by_expert(name, [f"{layer}{target}.{kind}" for target in targets], shape)
        whole = targets[0].endswith(("sinks", "correction_bias"))  # a parameter of the module, not of a child
        return {f"{layer}{targets[0]}" if whole else f"{layer}{targets[0]}.{kind}": Piece(name, 0, shape)}

    def _pieces_made(self, name: str, recipe: Recipe, layer: str | None) -> dict[str, Made]:
        """The tensors that the recipe makes in that layer. They come with the first of its sources; the others, which
        the file's tensor `name` may be, give none."""
        theirs, ours = ("", "") if layer is None else (f"blk.{layer}.", f"model.layers.{layer}.")
        sources = tuple(f"{theirs}{source}" for source in recipe.sources)
        if lacking := [source for source in sources if source not in self.file.tensors]:
            raise ValueError(
                f"{self.path}: {excerpt(name)} comes with {excerpt(lacking[0])}, which the file lacks; get it again"
            )
        if name != sources[0]:
            return {}
        shapes = recipe.shapes(self.path, sources, [self.file.tensors[source].shape for source in sources])
        made = enumerate(zip(recipe.targets, shapes, strict=True))
        return {f"{ours}{target}": Made(recipe, sources, which, shape) for which, (target, shape) in made}

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

    def _by_expert(self, name: str, targets: list[str], shape: tuple[int, ...]) -> dict[str, Piece]:
        if len(shape) < 2 or shape[0] > MOST_EXPERTS or (len(targets) > 1 and shape[1] % len(targets)):
            raise ValueError(
                f"{self.path}: {excerpt(name)} has shape {list(shape)}, wants the experts first, at most {MOST_EXPERTS}"
            )
        each, rows = math.prod(shape[1:-1]), math.prod(shape[1:-1]) // len(targets)
        own = shape[1:] if len(targets) == 1 else (rows, shape[-1])
        return {
            target.replace("*", str(e)): Piece(name, e * each + i * rows, own)
            for e in range(shape[0])
            for i, target in enumerate(targets)
        }

    def _checked_sizes(self) -> dict[str, int]:
        if isinstance(self.setting("attention.head_count"), list):
            raise ValueError(f"{self.path}: head counts that differ from layer to layer are not supported")
        embed_dim, num_heads = self.size("embedding_length"), self.size("attention.head_count")
        num_layers = self.size("block_count") - self._further_layers()
        sizes = {
            "embed_dim": embed_dim,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_kv_heads": self._num_kv_heads(num_layers, num_heads),
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

    def _further_layers_names(self) -> list[str]:
        return [f"blk.{self._sizes['num_layers'] + i}." for i in range(self._further_layers())]

    def _num_kv_heads(self, num_layers: int, num_heads: int) -> int:
        """The heads of keys; where layers differ in them, the most of a layer."""
        key = "attention.head_count_kv"
        if not isinstance(self.setting(key), list):
            return self.size(key, num_heads)
        if key not in self.family.listed or max(counts := self.by_layer(key, num_layers, least=0)) < 1:
            raise ValueError(f"{self.path}: head counts that differ from layer to layer are not supported")
        return max(counts)
