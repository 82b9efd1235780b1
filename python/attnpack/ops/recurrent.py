"""Linear attention, whose memory of a sequence is a state of fixed size, and the short convolution before it.

B batch, Hk heads of query and key, Hv heads of values, L length, D head dim of queries and keys, Dv of values, C
channels, K taps of a channel.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from .. import _C
from . import nested
from .fast_path import fast_path


@overload
def linear_attention(query: Tensor, key: Tensor, value: Tensor, *, log_decay: Tensor | None = None,
                     beta: Tensor | None = None, initial_state: Tensor | None = None, kv_lens: Tensor | None = None,
                     cu_seqlens: Tensor | None = None, scale: float | None = None,
                     return_state: Literal[False] = False) -> Tensor: ...  # fmt: skip
@overload
def linear_attention(query: Tensor, key: Tensor, value: Tensor, *, log_decay: Tensor | None = None,
                     beta: Tensor | None = None, initial_state: Tensor | None = None, kv_lens: Tensor | None = None,
                     cu_seqlens: Tensor | None = None, scale: float | None = None,
                     return_state: Literal[True]) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_attention(query: Tensor, key: Tensor, value: Tensor, *, log_decay: Tensor | None = None,
                     beta: Tensor | None = None, initial_state: Tensor | None = None, kv_lens: Tensor | None = None,
                     cu_seqlens: Tensor | None = None, scale: float | None = None,
                     return_state: bool) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@fast_path("linear_attention")
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    kv_lens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Linear attention, with decay and the delta rule: work linear in the length, and a state of fixed size.

    For each value head h, which reads key head h // (Hv // Hk), with S its state [D, Dv]::

        S   <- exp(log_decay_t) S
        d_t  = beta_t (v_t - S^T k_t), or v_t without beta
        S   <- S + k_t d_t^T
        o_t  = scale S^T q_t

    All tensors have gradients, from the output and from the returned state. On the CPU each chunk of 64 tokens is
    computed by matrix products. The backward pass takes one head after the other, and keeps one state per chunk of that
    head. Bits do not depend on threads or batch. On CUDA it is a composition of torch's ops.

    Args:
        query, key: [B, Hk, L, D], value: [B, Hv, L, Dv], float64, float32, bfloat16 or float16; any strides; Hv is a
            multiple of Hk. All of them, log_decay and beta may be jagged nested tensors [B, H, L*, ...].
        log_decay: the log of what is kept of the state, at most 0 (above it raises on the CPU): [B, Hv, L] for one per
            head (Gated DeltaNet, Mamba-2, RetNet), [B, Hv, L, D] for one per channel (KDA, GLA). A decay that
            underflows is an exact 0. None: all is kept.
        beta: [B, Hv, L], how much of the difference from what the state holds for a key is written. None: values are
            added to the state.
        initial_state: [B, Hv, D, Dv], or one for each packed sequence; default zeros.
        kv_lens: int32 or int64 [B], the tokens of each sequence. Those after them give 0 and leave the state alone,
            whatever they hold.
        cu_seqlens: int32 or int64 [N + 1]: N packed sequences stand one after the other in a batch of one; sequence n
            has the tokens cu_seqlens[n] to cu_seqlens[n + 1].
        scale: default 1 / sqrt(D).
        return_state: also return the states after the last tokens. Given as initial_state to the next call they
            continue the sequences.

    Returns:
        out [B, Hv, L, Dv], or (out, state [B or N, Hv, D, Dv] in fp32, fp64 for fp64 inputs).

    Raises:
        ValueError: a shape, dtype, device or length does not fit, or log_decay is above 0; the message names it.

    Katharopoulos et al. 2020; delta rule in chunks: Yang et al. 2024 (arXiv 2406.06484); with decay: Yang, Kautz,
    Hatamizadeh 2024 (arXiv 2412.06464); decay per channel: Kimi Linear 2025 (arXiv 2510.26692).
    """
    if nested.is_nested(query):
        return _of_nested(query, key, value, log_decay, beta, initial_state, kv_lens, cu_seqlens, scale, return_state)
    if torch.compiler.is_compiling():
        given = log_decay, beta, initial_state, kv_lens, cu_seqlens, scale
        result = torch.ops.attnpack.linear_attention(query, key, value, *given)
        return result if return_state else result[0]
    rules = {"log_decay": log_decay, "beta": beta, "initial_state": initial_state, "kv_lens": kv_lens}
    rules |= {"cu_seqlens": cu_seqlens, "scale": scale, "return_state": return_state}
    return _C.linear_attention(query, key, value, rules)


def linear_attention_(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    *,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    kv_lens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """`linear_attention` with states that the caller owns: those before the first tokens are read from ``state``, and
    those after the last tokens are written there. So a step reads and writes them once.

    Args:
        query, key, value, log_decay, beta, kv_lens, cu_seqlens, scale: as in `linear_attention`.
        state: [B or N, Hv, D, Dv] in fp32, fp64 for fp64 inputs, contiguous; written.

    Returns:
        out [B, Hv, L, Dv].

    Raises:
        ValueError: as in `linear_attention`, before anything is written.
        RuntimeError: a tensor wants a gradient, which this function does not have.
    """
    call = torch.ops.attnpack if torch.compiler.is_compiling() else _C
    return call.linear_attention_(query, key, value, state, log_decay, beta, kv_lens, cu_seqlens, scale)


def _of_nested(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Any, beta: Any, initial_state: Any, kv_lens: Any,
    cu_seqlens: Any, scale: float | None, return_state: bool,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    nested.refuse(kv_lens=kv_lens, cu_seqlens=cu_seqlens)
    given = {"query": query, "key": key, "value": value, "log_decay": log_decay, "beta": beta}
    by_rows = {name: nested.by_rows(name, x) for name, x in given.items() if x is not None}
    packed = {name: nested.rows(name, x).transpose(0, 1).unsqueeze(0) for name, x in by_rows.items()}  # [1, H, T, ...]
    for name, x in by_rows.items():
        nested.check_same_sequences(name, x, "query", by_rows["query"])
    out, state = linear_attention(**packed, initial_state=initial_state, cu_seqlens=by_rows["query"].offsets(),
                                  scale=scale, return_state=True)  # fmt: skip
    out = nested.like(out.squeeze(0).transpose(0, 1), by_rows["query"]).transpose(1, 2)
    return (out, state) if return_state else out


@overload
def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None,
                  initial_state: Tensor | None = None, kv_lens: Tensor | None = None,
                  cu_seqlens: Tensor | None = None, return_state: Literal[False] = False) -> Tensor: ...  # fmt: skip
@overload
def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None,
                  initial_state: Tensor | None = None, kv_lens: Tensor | None = None,
                  cu_seqlens: Tensor | None = None,
                  return_state: Literal[True]) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None,
                  initial_state: Tensor | None = None, kv_lens: Tensor | None = None,
                  cu_seqlens: Tensor | None = None,
                  return_state: bool) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@fast_path("causal_conv1d")
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    kv_lens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The short convolution of recurrent layers: each channel by itself, over a token and the K - 1 tokens before it.

    out_t = act(bias + sum over j of weight_j x_(t - K + 1 + j)). x, weight, bias and initial_state have gradients, from
    the output and from the returned state. Bits of the output do not depend on threads or batch. On CUDA it is a
    composition of torch's ops.

    Args:
        x: [B, L, C], float64, float32, bfloat16 or float16, any strides, or a jagged nested tensor [B, L*, C]. A tensor
            [B, C, L] is one by `.transpose(1, 2)`, without a copy; the output is laid as x.
        weight: [C, K]; that of an nn.Conv1d is one by `.squeeze(1)`. bias: [C].
        activation: "silu", or None.
        initial_state: [B, C, K - 1], or one for each packed sequence: the inputs before the first token, the last one
            last; default zeros.
        kv_lens: int32 or int64 [B], the tokens of each sequence. Those after them give 0 and leave the state alone,
            whatever they hold.
        cu_seqlens: int32 or int64 [N + 1]: N packed sequences stand one after the other in a batch of one; sequence n
            has the tokens cu_seqlens[n] to cu_seqlens[n + 1].
        return_state: also return the last K - 1 inputs of each sequence. Given as initial_state to the next call they
            continue the sequences: a decode step is a call of one token.

    Returns:
        out [B, L, C], or (out, state [B or N, C, K - 1] in x's dtype).

    Raises:
        ValueError: a shape, dtype, device or length does not fit; the message names it.
    """
    if nested.is_nested(x):
        nested.refuse(kv_lens=kv_lens, cu_seqlens=cu_seqlens)
        packed = nested.rows("x", x).unsqueeze(0)
        out, state = causal_conv1d(packed, weight, bias, activation=activation, initial_state=initial_state,
                                   cu_seqlens=x.offsets(), return_state=True)  # fmt: skip
        out = nested.like(out.squeeze(0), x)
        return (out, state) if return_state else out
    if torch.compiler.is_compiling():
        if activation not in (None, "silu"):
            raise ValueError(f"attnpack: activation: got {activation!r}, want 'silu', or none")
        result = torch.ops.attnpack.causal_conv1d(
            x, weight, bias, initial_state, kv_lens, cu_seqlens, activation == "silu"
        )
        return result if return_state else result[0]
    rules = {"activation": activation, "initial_state": initial_state, "kv_lens": kv_lens, "cu_seqlens": cu_seqlens}
    return _C.causal_conv1d(x, weight, bias, rules | {"return_state": return_state})
