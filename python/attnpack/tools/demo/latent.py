"""Latent attention in the demo's table: the layer in plain PyTorch, and a decode step with PyTorch's SDPA."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import LatentCache, MultiHeadLatentAttention, RotaryEmbedding, reference


def build(embed_dim: int, num_heads: int) -> MultiHeadLatentAttention:
    """A layer with DeepSeek-V2's proportions: latents as wide as four heads, a rotated key as wide as half a head."""
    head_dim = embed_dim // num_heads
    return MultiHeadLatentAttention(
        embed_dim,
        num_heads,
        kv_lora_rank=4 * head_dim,
        qk_nope_head_dim=head_dim,
        qk_rope_head_dim=head_dim // 2,
        v_head_dim=head_dim,
        rope=RotaryEmbedding(head_dim // 2, interleaved=True),
        causal=True,
    )


def plain_forward(module: MultiHeadLatentAttention, x: Tensor) -> Tensor:
    """The module's projections and the plain PyTorch reference, in the dtype of module and x."""
    query, latent, k_rope = _parts(module, x, 0)
    rows = module.kv_b_proj.weight.unflatten(0, (module.num_heads, -1))
    w_uk, w_uv = rows.split([module.qk_nope_head_dim, module.v_head_dim], 1)
    scale = module.softmax_scale
    out = reference.latent_attention(query, latent, k_rope, w_uk, w_uv, causal=True, scale=scale)
    return module.o_proj(out.transpose(1, 2).flatten(2))


def cached_steps(module: MultiHeadLatentAttention, prompt: Tensor, steps: int) -> tuple[Callable, Callable, int]:
    """(a decode step with attnpack, the same step with SDPA, bytes per token of the cache).

    As in transformers, the step with SDPA makes the keys and values from all latents anew.
    """
    cache = LatentCache()
    module(prompt, cache=cache)
    used, kv_bytes = len(cache), cache.nbytes // len(cache)
    latents, keys = (F.pad(part[:, 0], (0, 0, 0, steps)).contiguous() for part in (cache.c, cache.k_rope))

    def sdpa_step(token: Tensor) -> Tensor:
        nonlocal used
        query, latents[:, used : used + 1], keys[:, used : used + 1] = _parts(module, token, used)
        used += 1
        kv = module.kv_b_proj(latents[:, :used]).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
        key, value = kv.split([module.qk_nope_head_dim, module.v_head_dim], -1)
        key = torch.cat([key, keys[:, None, :used].expand(-1, module.num_heads, -1, -1)], -1)
        out = F.scaled_dot_product_attention(query, key, value, scale=module.softmax_scale)
        return module.o_proj(out.transpose(1, 2).flatten(2))

    return lambda token: module(token, cache=cache), sdpa_step, kv_bytes


def _parts(module: MultiHeadLatentAttention, x: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [B, H, L, N + R], latents [B, L, C] and the rotated key [B, L, R] of tokens from `start` on."""
    query = module.q_proj(x).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
    latent, k_rope = module.kv_a_proj_with_mqa(x).split([module.kv_lora_rank, module.qk_rope_head_dim], -1)
    nope, rotated = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    positions = torch.arange(start, start + x.size(1))
    cos, sin = reference.rope_table(positions, module.rope.dim, base=module.rope.base, dtype=x.dtype)
    rotated, k_rope = (reference.apply_rope(t, cos, sin, interleaved=True) for t in (rotated, k_rope))
    norm = module.kv_a_layernorm
    latent = F.rms_norm(latent, (module.kv_lora_rank,), norm.weight, norm.eps)
    return torch.cat([nope, rotated], -1), latent, k_rope
