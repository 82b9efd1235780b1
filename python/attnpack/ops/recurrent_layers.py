"""The mathematics of recurrent layers after their projections.

B batch, L length, N sequences (B, or those of cu_seqlens), C channels, K taps of the short convolution, Hk and Hv heads
of queries and keys, and of values, D and Dv their widths.
"""

from __future__ import annotations

import torch
from torch import Tensor


def delta_attend(
    mixed: Tensor,
    decay: Tensor,
    beta: Tensor,
    gate: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    *,
    num_k_heads: int,
    eps: float = 1e-6,
    gate_activation: str = "silu",
    beta_scale: float = 1.0,
    conv_state: Tensor | None = None,
    state: Tensor | None = None,
    kv_lens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gated DeltaNet and Kimi Delta Attention: a short convolution with SiLU over q, k and v; q and k of length 1;
    linear attention with the delta rule; then an RMSNorm of each head, times the activated gate.

    The log of what a state keeps is -exp(a_log) softplus(decay + dt_bias), and beta_scale * sigmoid(beta) how much of a
    difference is written.

    Args:
        mixed: [B, L, C], q, k and v side by side. decay: [B, L, Hv], or [B, L, Hv * D] for one per channel.
        beta: [B, L, Hv]. gate: [B, L, Hv * Dv].
        conv_weight: [C, 1, K]. a_log: Hv numbers. dt_bias: [Hv] or [Hv * D]. norm_weight: [Dv].
        num_k_heads: heads of queries and keys.
        eps: of the norm. gate_activation: "silu" or "sigmoid".
        conv_state, state: what an earlier call returned; None for zeros.
        kv_lens, cu_seqlens: as in `linear_attention`.

    Returns:
        (out [B, L, Hv * Dv], conv_state [N, C, K - 1], state [N, Hv, D, Dv]).

    Raises:
        ValueError: a shape does not fit.
    """
    return torch.ops.attnpack.delta_attend(
        mixed, decay, beta, gate, conv_weight, a_log, dt_bias, norm_weight, num_k_heads, eps, gate_activation,
        beta_scale, conv_state, state, kv_lens, cu_seqlens,
    )  # fmt: skip


def state_space_attend(
    mixed: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    a_log: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    norm_weight: Tensor,
    *,
    num_groups: int = 1,
    eps: float = 1e-5,
    conv_state: Tensor | None = None,
    state: Tensor | None = None,
    kv_lens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mamba-2: a short convolution with SiLU over values x, keys and queries (B and C in the paper); linear attention
    of the values dt * x with scale 1; skip * x is added; then the gate by SiLU, and an RMSNorm of each group.

    dt becomes softplus(dt + dt_bias), and the log of what a state keeps is -exp(a_log) dt.

    Args:
        mixed: [B, L, Hv * Dv + C + Hv], gate, values, keys, queries and dt side by side.
        conv_weight: [C, 1, K]. conv_bias: [C]. a_log, dt_bias, skip: [Hv]. norm_weight: [Hv * Dv].
        num_groups: heads of keys and queries, and parts of the norm.
        eps: of the norm.
        conv_state, state: what an earlier call returned; None for zeros.
        kv_lens, cu_seqlens: as in `linear_attention`.

    Returns:
        (out [B, L, Hv * Dv], conv_state [N, C, K - 1], state [N, Hv, D, Dv]).

    Raises:
        ValueError: a shape does not fit.
    """
    return torch.ops.attnpack.state_space_attend(
        mixed, conv_weight, conv_bias, a_log, dt_bias, skip, norm_weight, num_groups, eps, conv_state, state, kv_lens,
        cu_seqlens,
    )  # fmt: skip


def linear_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay_logits: Tensor | None = None,
    *,
    num_heads: int,
    feature_map: str = "identity",
    decay: str = "none",
    scale: float | None = None,
    state: Tensor | None = None,
    kv_lens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear attention of projected heads.

    Args:
        query, key: [B, L, H * D]. value: [B, L, H * Dv].
        decay_logits: [B, L, H * D], with decay "learned".
        num_heads: H.
        feature_map: "identity", or "elu": elu(x) + 1 of queries and keys; then outputs are divided by the sum of their
            weights, which is one more column of the state.
        decay: "none"; "fixed", log(1 - 2^(-5 - h)) for head h; "learned", a sixteenth of log sigmoid(decay_logits).
        scale: default 1 / sqrt(D); 1 with a feature map.
        state: what an earlier call returned; None for zeros.
        kv_lens, cu_seqlens: as in `linear_attention`.

    Returns:
        (out [B, L, H * Dv], state [N, H, D, Dv], with a feature map [N, H, D, Dv + 1]).

    Raises:
        ValueError: a shape or a word does not fit.
    """
    return torch.ops.attnpack.linear_attend(
        query, key, value, decay_logits, num_heads, feature_map, decay, scale, state, kv_lens, cu_seqlens
    )


def gated_convolution(
    mixed: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    conv_state: Tensor | None = None,
    kv_lens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """LFM2's layer: c * conv(b * x) of b, c and x side by side.

    Args:
        mixed: [B, L, 3 * E]. weight: [E, 1, K]. bias: [E].
        conv_state: what an earlier call returned; None for zeros.
        kv_lens, cu_seqlens: as in `causal_conv1d`.

    Returns:
        (out [B, L, E], conv_state [N, E, K - 1]).

    Raises:
        ValueError: a shape does not fit.
    """
    return torch.ops.attnpack.gated_convolution(mixed, weight, bias, conv_state, kv_lens, cu_seqlens)
