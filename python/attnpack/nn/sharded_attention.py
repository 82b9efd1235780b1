"""Where keys and heads are sharded over several processes: the place at which attnpack.distributed comes in.

A module asks `sharded_attention(cache)` before it attends. A sharded cache answers itself; that a sequence is sharded,
under `attnpack.distributed.context_parallel`, is known by context. The shares of heads are known by what the
projections give: all heads of a module or, under tensor parallelism by torch's plan, those of one rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import _C, errors
from .._C import checks


class ShardedAttention:
    """Attends in place of a module's own op."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,  # [B, Hq, L, D], before rotation
        key: Tensor,  # [B, Hkv, Lkv, D]
        value: Tensor,  # [B, Hkv, Lkv, Dv]
        **inputs: Any,
    ) -> Tensor:  # [B, L, Hq * Dv]
        raise NotImplementedError

    def attend_latents(
        self,
        module: nn.Module,
        query: Tensor,  # [B, H, L, N + R], before rotation
        latent: Tensor,  # [B, Lkv, C]
        k_rope: Tensor,  # [B, Lkv, R]
        **inputs: Any,
    ) -> Tensor:  # [B, L, H * V], or [B, L, H * C] of a folded module
        raise NotImplementedError

    def positions(self, length: int, device: torch.device) -> Tensor | None:
        """The positions [length] of this process's rows in the whole sequence; None if it has all of them."""
        return None

    generate: Callable[..., Tensor] | None = None
    """The loop of `CausalLM.generate` over such a cache."""


class _ThreadSequences(threading.local):
    sequences: tuple[ShardedAttention, ...] = ()


_of_thread = _ThreadSequences()
_open: list[ShardedAttention] = []  # of all threads; dynamo guards on it, and knows no values of a thread


@contextmanager
def sharded_sequence(over: ShardedAttention) -> Iterator[None]:
    """A context in which the sequences of this thread are sharded."""
    before = _of_thread.sequences
    _of_thread.sequences = (*before, over)
    _open.append(over)
    _tell_cpp()
    try:
        yield
    finally:
        _of_thread.sequences = before
        _open.remove(over)
        _tell_cpp()


def _tell_cpp() -> None:
    """Modules of attnpack.cpp refuse to attend in this thread while its sequences are sharded."""
    if not torch.compiler.is_compiling():
        _C.context_parallel.set_active(bool(_of_thread.sequences))


def _sequence() -> ShardedAttention | None:
    if not _open:
        return None
    if torch.compiler.is_compiling():
        return _open[-1]
    return _of_thread.sequences[-1] if _of_thread.sequences else None


def sharded_attention(cache: object) -> ShardedAttention | None:
    """The object that attends over `cache`, or over a sequence without one; None if this process has all keys."""
    return cache if isinstance(cache, ShardedAttention) else _sequence()


def positions_here(length: int, device: torch.device) -> Tensor:
    """The positions [length] of the rows of a sequence that begins here, or of the part of it that is here."""
    over = _sequence()
    places = None if over is None else over.positions(length, device)
    return torch.arange(length, device=device) if places is None else places


def refuse_context_parallel(what: str, fix: str) -> None:
    """Raises under `context_parallel` for what is not supported there."""
    if _sequence() is not None:
        checks.refuse_under("under context_parallel", what, fix)


def refuse_named_keys(key_index: Tensor | None, key_block: int = 1) -> None:
    """Raises for names of keys where several processes hold the keys."""
    if key_index is not None or key_block != 1:  # else nothing is called, because graphs stop at it
        checks.named_keys_over_ranks(key_index, key_block)


def check_lengths(name: str, lengths: Tensor | None, x: Tensor) -> None:
    """`errors.check_lengths`, unless x is a part of a sequence: lengths are then those of whole sequences, and the
    operator checks them."""
    if _sequence() is None:
        errors.check_lengths(name, lengths, x)


def grouped_share(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int]:
    """Numbers of query and kv heads in query, key and value, each [B, L, H * D].

    ValueError if a rank's share of the heads would give other results than one process.
    """
    dim, widths = module.head_dim, (query.size(-1), key.size(-1), value.size(-1))
    heads, kv_heads = widths[0] // dim, widths[1] // dim
    if (heads, kv_heads) == (module.num_heads, module.num_kv_heads) and widths == (heads * dim, *[kv_heads * dim] * 2):
        return heads, kv_heads
    alike = kv_heads > 0 and heads * module.num_kv_heads == kv_heads * module.num_heads
    if not alike or module.num_heads % heads or widths != (heads * dim, kv_heads * dim, kv_heads * dim):
        raise ValueError(
            f"attnpack: q_proj, k_proj and v_proj give widths {', '.join(map(str, widths))}, want num_heads "
            f"{module.num_heads} and num_kv_heads {module.num_kv_heads} of head_dim {dim}, or the same share of both "
            "in whole heads: divide all three among a number of ranks that divides num_kv_heads, or leave the layer "
            "whole"
        )
    slopes = module._slopes if module.alibi else None
    for name, values in {
        "sinks": getattr(module, "sinks", None),
        "alibi": slopes,
        "head_map": module.head_map,
    }.items():
        _check_share(name, values, heads)
    norm = getattr(module, "q_norm", None)
    if norm is not None and getattr(norm, "dim", dim) != dim:
        _check_share("qk_norm", range(module.num_heads), heads)
    if norm is not None:
        _refuse_partial_gradient("q_norm.weight", norm.weight)
    return heads, kv_heads


def latent_share(module: nn.Module, queries: Tensor, head_dim: int, k_rope: Tensor) -> int:
    """Number of heads in queries [B, L, H * head_dim] of latent attention; ValueError as in `grouped_share`."""
    heads = queries.size(-1) // head_dim
    if heads == module.num_heads and queries.size(-1) == heads * head_dim:
        return heads
    if heads == 0 or queries.size(-1) != heads * head_dim or module.num_heads % heads:
        raise ValueError(
            f"attnpack: the query projection gives width {queries.size(-1)}, want num_heads {module.num_heads} of "
            f"{head_dim} dims, or a share of them in whole heads: divide it among a number of ranks that divides "
            "num_heads, or leave the layer whole"
        )
    if k_rope.size(-1):
        _refuse_partial_gradient("kv_a_proj_with_mqa.weight", k_rope)
    return heads


def check_mask_share(module: nn.Module, mask: Tensor | None, heads: int) -> None:
    """ValueError for a mask [B, H, L, Lkv] of all the module's heads where `heads`, a rank's share, are there. (Version
    2 of differential attention has more query heads than num_heads.)"""
    if heads < module.num_heads and isinstance(mask, Tensor) and mask.dim() == 4 and mask.size(1) == module.num_heads:
        raise ValueError(
            f"attnpack: mask has shape {list(mask.shape)}, one for each of num_heads {module.num_heads} heads, but the "
            f"projections give {heads}, a rank's share: pass the part mask[:, i : i + {heads}] of this rank's "
            "heads, or leave the layer whole"
        )


def _check_share(name: str, values: Sized | None, heads: int) -> None:
    if values is not None and len(values) != heads:
        raise ValueError(
            f"attnpack: {name}: got it for {len(values)} heads, but the projections give {heads}, a rank's share: "
            "leave the layer whole"
        )


def _refuse_partial_gradient(name: str, tensor: Tensor) -> None:
    """Raises ValueError if `tensor` needs a gradient: the heads of every rank read it, and no code would add up the
    ranks' gradients."""
    if torch.is_grad_enabled() and tensor.requires_grad and type(tensor) in (Tensor, nn.Parameter):
        raise ValueError(
            f"attnpack: {name}: its gradient would be that of only this rank's heads, want that of all: call the "
            "layer under torch.no_grad(), or leave it whole"
        )
