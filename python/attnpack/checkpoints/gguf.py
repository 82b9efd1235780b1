"""GGUF checkpoints: a file's metadata as CausalLM keywords, and its tensors under Llama's state_dict names."""

from __future__ import annotations

import math
import os
import re
from typing import Any

import torch

from .._C import checkpoints
from ..file_errors import brief
from .gguf_file import GgufFile

# GGUF architecture -> whether the rows of q and k are stored as interleaved RoPE pairs.
ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FREQS = "rope_freqs.weight"
# Settings of RoPE scaling that must have these values.
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
    "expert_count",
)


class GgufCheckpoint:
    """A GGUF file seen as a CausalLM: `config` (its keywords), `shapes` by state_dict name, `read(name, out)`."""

    def __init__(self, path: str | os.PathLike, max_positions: int | None = None) -> None:
        self.file = GgufFile(path)
        self.path = self.file.path
        self.arch = self.file.metadata.get("general.architecture")
        if self.arch not in ARCHITECTURES:
            raise ValueError(
                f"{self.path}: architecture {brief(repr(self.arch))} is not supported; from_gguf reads "
                + ", ".join(ARCHITECTURES)
            )
        self.sources = {self._state_name(name): name for name in self.file.tensors if name != _ROPE_FREQS}
        self.shapes = {state: self.file.tensors[name].shape for state, name in self.sources.items()}
        self.config = self._model_config(max_positions)

    def read(self, name: str, out: torch.Tensor) -> None:
        """Fills `out` with the tensor of state_dict name `name`, q and k rows in Hugging Face's order."""
        self.file.read(self.sources[name], out)
        heads = {"q_proj": "num_heads", "k_proj": "num_kv_heads"}.get(name.split(".")[-2])
        if heads and ARCHITECTURES[self.arch]:
            # The file stores the rows of a RoPE pair at (2i, 2i + 1) of a head, Hugging Face at (i, i + head_dim / 2).
            pairs = out.view(self.config[heads], self.config["head_dim"] // 2, 2, -1)
            out.copy_(pairs.transpose(1, 2).reshape(out.shape))

    def _state_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        if stem in _NAMES:
            return f"{_NAMES[stem]}.{kind}"
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if match and match[2] in _LAYER_NAMES:
            return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{kind}"
        raise ValueError(f"{self.path}: tensor {brief(name)} has no place in the architecture {self.arch}")

    def _setting(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.arch}.{key}", default)

    def _required_setting(self, key: str) -> Any:
        if not (value := self._setting(key)):
            raise ValueError(f"{self.path}: metadata lacks {self.arch}.{key}, or it is 0; the file is damaged")
        return value

    def _size(self, key: str, default: int | None = None) -> int:
        value = self._required_setting(key) if default is None else self._setting(key, default)
        if type(value) is not int or value < 1:
            raise ValueError(f"{self.path}: {self.arch}.{key} is {brief(repr(value))}, wants an int of at least 1")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._required_setting(key) if default is None else self._setting(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(f"{self.path}: {self.arch}.{key} is {brief(repr(value))}, wants a number above 0")
        return float(value)

    def _model_config(self, max_positions: int | None) -> dict[str, Any]:
        for key in _UNSUPPORTED_KEYS:
            if self._setting(key):
                raise ValueError(f"{self.path}: {self.arch}.{key} = {brief(self._setting(key))} is not supported yet")
        if (causal := self._setting("attention.causal", True)) is not True:
            raise ValueError(
                f"{self.path}: {self.arch}.attention.causal is {brief(repr(causal))}, wants True: every token sees "
                "only those before it here"
            )
        if any(isinstance(self._setting(f"attention.{key}"), list) for key in ("head_count", "head_count_kv")):
            raise ValueError(f"{self.path}: head counts that differ from layer to layer are not supported")
        embed_dim, num_heads = self._size("embedding_length"), self._size("attention.head_count")
        num_kv_heads = self._size("attention.head_count_kv", num_heads)
        head_dim = self._size("attention.key_length", embed_dim // num_heads)
        layers, heads = self._size("block_count"), max(num_heads, num_kv_heads)
        checkpoints.check_sizes(str(self.path), len(self.shapes), layers, heads, head_dim)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._setting(key, head_dim) != head_dim:
                raise ValueError(
                    f"{self.path}: {self.arch}.{key} is {brief(self._setting(key))}, head_dim is {head_dim}; "
                    "models where they differ are not supported"
                )
        positions = min(self._size("context_length"), max_positions or math.inf)
        shapes, eps = self.shapes, self._number("attention.layer_norm_rms_epsilon")
        return {
            "vocab_size": shapes.get("model.embed_tokens.weight", (0,))[0],
            "embed_dim": embed_dim,
            "num_layers": self._size("block_count"),
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "hidden_dim": self._size("feed_forward_length"),
            "max_positions": positions,
            "rope_base": self._number("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(head_dim),
            "eps": eps,
            "tie_embeddings": "lm_head.weight" not in shapes,
            "window": self._window(positions),
            "qk_norm": {"eps": eps} if "model.layers.0.self_attn.q_norm.weight" in shapes else False,
            "bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
            "out_bias": "model.layers.0.self_attn.o_proj.bias" in shapes,
            "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in shapes,
        }

    def _window(self, positions: int) -> tuple[int, int] | None:
        """The window of every layer: (W - 1, 0) for a sliding_window of W tokens, the token itself included."""
        key = f"{self.arch}.attention.sliding_window"
        width, pattern = self._setting("attention.sliding_window"), self._setting("attention.sliding_window_pattern")
        if not width:
            return None
        if type(width) is not int or width < 1:
            raise ValueError(f"{self.path}: {key} is {brief(repr(width))}, wants an int of at least 1 for all layers")
        if pattern is None:
            return width - 1, 0
        if width < positions:
            raise ValueError(
                f"{self.path}: {key} is {width} in some layers only, which is not supported yet, and shorter than the "
                f"context of {positions}; pass max_positions={width} or less"
            )
        return None

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        factor = self._setting("rope.scaling.factor", self._setting("rope.scale_linear", 1.0))
        kind = self._setting("rope.scaling.type", "linear" if factor != 1.0 else "none")
        for key, usual in _ROPE_DEFAULTS.items():
            if (value := self._setting(f"rope.scaling.{key}", usual)) != usual:
                raise ValueError(
                    f"{self.path}: {self.arch}.rope.scaling.{key} = {brief(repr(value))} is not supported yet"
                )
        if _ROPE_FREQS in self.file.tensors:
            return self._divided_frequencies(head_dim, kind, factor)
        if kind == "none" or (kind == "linear" and factor == 1.0):
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        if kind != "yarn":
            raise ValueError(
                f"{self.path}: {self.arch}.rope.scaling.type is {brief(repr(kind))}; readable are 'none', 'linear' and "
                "'yarn'"
            )
        names = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        given = {ours: self._setting(f"rope.scaling.{theirs}") for ours, theirs in names.items()}
        trained = self._setting("rope.scaling.original_context_length") or self._required_setting("context_length")
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": trained,
            **{name: value for name, value in given.items() if value},
        }

    def _divided_frequencies(self, head_dim: int, kind: str, factor: float) -> dict[str, Any]:
        """The scaling that rope_freqs.weight describes. It holds a divisor for each frequency, the result of Llama 3's
        scaling. This is LongRoPE with the same list for all lengths."""
        if kind not in ("none", "linear") or factor != 1.0:
            raise ValueError(
                f"{self.path}: has {_ROPE_FREQS} together with rope.scaling.type {brief(repr(kind))}, which is not "
                "supported"
            )
        shape, wanted = self.file.tensors[_ROPE_FREQS].shape, (head_dim // 2,)
        if shape != wanted:
            raise ValueError(
                f"{self.path}: {_ROPE_FREQS} has shape {list(shape)}, head_dim {head_dim} asks for {list(wanted)}"
            )
        divisors = torch.empty(shape)
        self.file.read(_ROPE_FREQS, divisors)
        values = divisors.flatten().tolist()
        return {"rope_type": "longrope", "short_factor": values, "long_factor": values, "attention_factor": 1.0}
