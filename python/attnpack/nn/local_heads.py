"""The number of heads that the projections give: all heads of a module or, under tensor parallelism by torch's plan,
the share of one rank."""

from __future__ import annotations

from collections.abc import Sized

import torch
from torch import Tensor, nn


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
    for name, held in {"sinks": getattr(module, "sinks", None), "alibi": slopes, "head_map": module.head_map}.items():
        _check_share(name, held, heads)
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
    """ValueError for a mask [B, H, L, Lkv] of all the module's heads where `heads`, a rank's share, are there."""
    if heads != module.num_heads and isinstance(mask, Tensor) and mask.dim() == 4 and mask.size(1) == module.num_heads:
        raise ValueError(
            f"attnpack: mask has shape {list(mask.shape)}, one for each of num_heads {module.num_heads} heads, but the "
            f"projections give {heads}, a rank's share: pass the part mask[:, i : i + {heads}] of this rank's "
            "heads, or leave the layer whole"
        )


def _check_share(name: str, held: Sized | None, heads: int) -> None:
    if held is not None and len(held) != heads:
        raise ValueError(
            f"attnpack: {name}: got it for {len(held)} heads, but the projections give {heads}, a rank's share: leave "
            "the layer whole"
        )


def _refuse_partial_gradient(name: str, tensor: Tensor) -> None:
    """Raises ValueError if `tensor` needs a gradient: the heads of every rank read it, and no code would add up the
    ranks' gradients."""
    if torch.is_grad_enabled() and tensor.requires_grad and type(tensor) in (Tensor, nn.Parameter):
        raise ValueError(
            f"attnpack: {name}: its gradient would be that of this rank's heads alone, want that of all: call the "
            "layer under torch.no_grad(), or leave it whole"
        )
