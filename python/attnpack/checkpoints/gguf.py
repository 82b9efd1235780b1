"""GGUF checkpoints: a file's metadata as CausalLM keywords, and its tensors under Llama's state_dict names."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..file_errors import excerpt
from .gguf_pieces import GgufPieces, Made
from .gguf_rope import rope_scaling

# Widths of a head that must be head_dim.
_WIDTHS = (
    "attention.value_length",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "rope.dimension_count",
    "rope.dimension_count_swa",
)


class GgufCheckpoint(GgufPieces):
    """A GGUF file seen as a CausalLM: `config` (its keywords), `shapes` by state_dict name, `read(name, out)`."""

    def __init__(self, path: str | os.PathLike, max_positions: int | None = None) -> None:
        super().__init__(path)
        self.config = self._model_config(max_positions)
        self._last: tuple[Any, Sequence[torch.Tensor] | None] = None, None

    def read(self, name: str, out: torch.Tensor) -> None:
        """Fills `out` with the tensor of state_dict name `name`, q and k rows in Hugging Face's order."""
        piece = self.pieces[name]
        if isinstance(piece, Made):
            out.copy_(self._made(piece, self._numbers))
            return
        self.file.read(piece.tensor, out, piece.first)
        if heads := self._interleaved_heads(name):
            pairs = out.view(heads, self.config["head_dim"] // 2, 2, -1)
            out.copy_(pairs.transpose(1, 2).reshape(out.shape))

    def blocks(self, name: str) -> torch.Tensor | None:
        """The weight of state_dict name `name` as the file holds it (`GgufFile.blocks`), q and k rows in Hugging Face's
        order: only these are copied. None if the file holds it otherwise."""
        piece = self.pieces[name]
        if len(piece.shape) != 2:
            return None
        if isinstance(piece, Made):
            found = self._made(piece, self._all_blocks) if piece.recipe.rows else None
            return None if found is None else found.contiguous()
        found = self.file.blocks(piece.tensor, piece.first, piece.shape[0])
        heads = self._interleaved_heads(name)
        if found is None or not heads:
            return found
        return found.view(heads, -1, 2, *found.shape[1:]).transpose(1, 2).reshape(found.shape)

    def _made(self, piece: Made, load: Callable[[str], torch.Tensor | None]) -> torch.Tensor | None:
        """The tensor that the recipe makes of its sources, as `load` gives them; None if it gives None. The recipe's
        other tensors are kept until another recipe is asked for, so that each source is read once."""
        key = piece.sources, load
        if self._last[0] != key:
            stored = [load(source) for source in piece.sources]
            self._last = key, None if any(each is None for each in stored) else piece.recipe.make(*stored)
        made = self._last[1]
        return None if made is None else made[piece.which]

    def _numbers(self, source: str) -> torch.Tensor:
        numbers = torch.empty(self.file.tensors[source].shape, dtype=torch.float32, device="cpu")
        self.file.read(source, numbers)
        return numbers

    def _all_blocks(self, source: str) -> torch.Tensor | None:
        return self.file.blocks(source, 0, self.file.tensors[source].shape[0])

    def _interleaved_heads(self, name: str) -> int | None:
        """How many heads a weight has whose rows the file stores by RoPE pairs, (2i, 2i + 1) of a head, where Hugging
        Face has (i, i + head_dim / 2)."""
        heads = {"q_proj": "num_heads", "k_proj": "num_kv_heads"}.get(name.split(".")[-2])
        return self.config[heads] if heads and self.family.interleaved else None

    def _model_config(self, max_positions: int | None) -> dict[str, Any]:
        family, shapes, head_dim = self.family, self.shapes, self._sizes["head_dim"]
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
            "hidden_dim": self._hidden_dim(),
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

    def _hidden_dim(self) -> int:
        """The width inside the feed-forwards; where layers differ in it, that of the first. A file of only experts may
        lack it."""
        key = "feed_forward_length"
        if key in self.family.listed and isinstance(self.setting(key), list):
            return self.by_layer(key, self._sizes["num_layers"])[0]
        return self.size(key, self.setting("expert_feed_forward_length"))

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
