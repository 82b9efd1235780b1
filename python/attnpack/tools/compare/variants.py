"""The kinds of attention that `attnpack compare` knows by name, each for the sizes of a `Scale`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

import attnpack

NUM_HEADS = 8
SHARED_HEADS = 2
"""Key-value heads of diff and sparse: those of gqa-2."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a layer of attention."""

    embed_dim: int
    head_dim: int
    length: int  # tokens of a training sequence


def _grouped(sizes: Sizes, num_kv_heads: int, **factory: Any) -> nn.Module:
    uneven = NUM_HEADS % num_kv_heads > 0
    head_map = [head * num_kv_heads // NUM_HEADS for head in range(NUM_HEADS)] if uneven else None
    return attnpack.GroupedQueryAttention(
        sizes.embed_dim, NUM_HEADS, num_kv_heads, head_map=head_map, **_usual(sizes), **factory
    )


def _latent(sizes: Sizes, **factory: Any) -> nn.Module:
    # The proportions of DeepSeek-V3, whose head_dim is 128: a latent of 512, a rotated key of 64.
    rotated = sizes.head_dim // 2
    return attnpack.MultiHeadLatentAttention(
        sizes.embed_dim,
        NUM_HEADS,
        kv_lora_rank=4 * sizes.head_dim,
        qk_nope_head_dim=sizes.head_dim,
        qk_rope_head_dim=rotated,
        v_head_dim=sizes.head_dim,
        rope=attnpack.RotaryEmbedding(rotated, interleaved=True),
        causal=True,
        **factory,
    )


def _differential(sizes: Sizes, **factory: Any) -> nn.Module:
    return attnpack.DifferentialAttention(
        sizes.embed_dim, NUM_HEADS, SHARED_HEADS, version=2, **_usual(sizes), **factory
    )


def _sparse(sizes: Sizes, **factory: Any) -> nn.Module:
    # A query reads a quarter of the keys of a training sequence, its own block among them.
    return attnpack.SparseAttention(
        sizes.embed_dim,
        NUM_HEADS,
        SHARED_HEADS,
        selector="mean",
        top_k=4,
        key_block=max(1, sizes.length // 16),
        **_usual(sizes),
        **factory,
    )


def _gated_delta_net(sizes: Sizes, **factory: Any) -> nn.Module:
    heads = {"head_k_dim": sizes.head_dim, "head_v_dim": sizes.head_dim}
    return attnpack.GatedDeltaNet(sizes.embed_dim, NUM_HEADS, NUM_HEADS, **heads, **factory)


def _usual(sizes: Sizes) -> dict[str, Any]:
    return {"head_dim": sizes.head_dim, "rope": attnpack.RotaryEmbedding(sizes.head_dim), "causal": True}


_MAKERS: dict[str, Callable[..., nn.Module]] = {
    "mha": lambda sizes, **factory: _grouped(sizes, NUM_HEADS, **factory),
    "mqa": lambda sizes, **factory: _grouped(sizes, 1, **factory),
    "mla": _latent,
    "diff": _differential,
    "sparse": _sparse,
    "gdn": _gated_delta_net,
}
NAMES = ("mha", "gqa-N", *(name for name in _MAKERS if name != "mha"))


def default_variants() -> list[str]:
    """Those that are compared if nobody names any."""
    return ["mha", "gqa-4", "gqa-2", *list(_MAKERS)[1:]]


def check_variants(names: Sequence[str]) -> None:
    """Raises ValueError, naming --variants, for a name that is not known, or is given twice."""
    for place, name in enumerate(names):
        if name not in _MAKERS and not _kv_heads(name):
            raise ValueError(
                f"--variants: got {name!r}, want some of {', '.join(NAMES)}, with N from 1 to {NUM_HEADS} "
                "key-value heads"
            )
        if name in names[:place]:
            raise ValueError(f"--variants: got {name!r} twice; name each variant once")


def make_attention(name: str, sizes: Sizes, **factory: Any) -> nn.Module:
    """A causal layer of attention; `factory` has its device and dtype."""
    make = _MAKERS.get(name)
    return _grouped(sizes, _kv_heads(name), **factory) if make is None else make(sizes, **factory)


def _kv_heads(name: str) -> int:
    """N of gqa-N; 0 for another name."""
    found = re.fullmatch(r"gqa-([1-9]\d*)", name)
    return int(found[1]) if found and int(found[1]) <= NUM_HEADS else 0
