"""The semantics of attnpack in plain PyTorch. Tests, notebooks and benchmarks compare the native code with it.

Nothing of attnpack is imported here. Everything computes in the dtype of its inputs. So the same lines give the fp64
truth, and the error that plain PyTorch makes in a low dtype. This code is made to be read and trusted, not to be fast.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

INF = float("inf")
FAR = 2**60  # beyond any length; sums of these do not overflow


# ---- the operator --------------------------------------------------------------------


@overload
def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *,
              return_lse: Literal[False] = False, **rules: Any) -> Tensor: ...  # fmt: skip
@overload
def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, return_lse: Literal[True],
              **rules: Any) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, return_lse: bool,
              **rules: Any) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    query: Tensor,  # [B, Hq, Lq, D]
    key: Tensor,  # [B, Hkv, Lkv, D]
    value: Tensor,  # [B, Hkv, Lkv, Dv]
    mask: Tensor | None = None,  # bool (True = may attend) or additive float, broadcastable to [B, Hq, Lq, Lkv]
    *,
    causal: bool = False,
    q_offset: int | Tensor | str = 0,
    window: tuple[int, int] = (-1, -1),
    chunk: int | None = None,
    kv_lens: Tensor | None = None,  # [B]
    softcap: float = 0.0,
    sinks: Tensor | None = None,  # [Hq]
    alibi_slopes: Tensor | None = None,  # [Hq]
    head_map: Sequence[int] | None = None,
    scale: float | None = None,
    query_scale: Tensor | None = None,  # [Lq] or [B, Lq], a factor on the scaled scores of each row
    key_index: Tensor | None = None,  # [B, 1 or Hkv, Lq, n], the blocks of keys that each row may attend, -1 for none
    key_block: int = 1,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention, `[B, Hq, Lq, Dv]`; with `return_lse` also the log of the softmax denominator, `[B, Hq, Lq]`.

    A key that a row may not attend never influences that row or any gradient, whatever it holds. A row without keys
    gives 0, and an lse of -inf or its head's sink.
    """
    heads = _head_map(query, key, head_map)
    key, value = key[:, heads], value[:, heads]
    allowed = _allowed(query, key, mask, causal, q_offset, window, chunk, kv_lens)
    if key_index is not None:
        allowed = allowed & _named(key_index, key_block, heads, key.shape[2])
    scores = _masked_scores(query, key, mask, allowed, q_offset, kv_lens, softcap, alibi_slopes, (scale, query_scale))
    probs, lse = _softmax(scores, sinks)
    out = _weighted_sum(probs, value, allowed)
    return (out, lse) if return_lse else out


def attention_scores(
    query: Tensor,  # [B, Hq, Lq, D]
    key: Tensor,  # [B, Hkv, Lkv, D]
    mask: Tensor | None = None,
    *,
    stage: str = "probs",
    causal: bool = False,
    q_offset: int | Tensor | str = 0,
    window: tuple[int, int] = (-1, -1),
    chunk: int | None = None,
    kv_lens: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    head_map: Sequence[int] | None = None,
    scale: float | None = None,
    query_scale: Tensor | None = None,  # [Lq] or [B, Lq], a factor on the scaled scores of each row
    key_index: Tensor | None = None,
    key_block: int = 1,
) -> Tensor:
    """`[B, Hq, Lq, Lkv]` after one stage: "scaled" or "capped" (all keys), "masked" (excluded: -inf), "probs"."""
    heads = _head_map(query, key, head_map)
    key = key[:, heads]
    everything = torch.ones((), dtype=torch.bool, device=query.device)
    if stage == "scaled":
        return _scaled_dot(query, key, everything, (scale, query_scale))
    if stage == "capped":
        return _cap(_scaled_dot(query, key, everything, (scale, query_scale)), softcap)
    allowed = _allowed(query, key, mask, causal, q_offset, window, chunk, kv_lens)
    if key_index is not None:
        allowed = allowed & _named(key_index, key_block, heads, key.shape[2])
    scores = _masked_scores(query, key, mask, allowed, q_offset, kv_lens, softcap, alibi_slopes, (scale, query_scale))
    if stage == "masked":
        return scores
    if stage == "probs":
        return _softmax(scores, sinks)[0]
    raise ValueError(f"stage: got {stage!r}, expected one of 'scaled', 'capped', 'masked', 'probs'")


def _head_map(query: Tensor, key: Tensor, head_map: Sequence[int] | None) -> list[int]:
    """The kv head that each query head reads; by default consecutive heads share one."""
    if head_map is not None:
        return list(head_map)
    group = query.shape[1] // max(key.shape[1], 1)
    return [head // group for head in range(query.shape[1])]


def _offset(query: Tensor, key: Tensor, q_offset: int | Tensor | str, kv_lens: Tensor | None) -> Tensor:
    """Where row 0 stands, int64 `[B or 1, 1, 1, 1]`."""
    if isinstance(q_offset, str):
        valid = key.shape[2] if kv_lens is None else kv_lens
        q_offset = valid - query.shape[2]
    return torch.as_tensor(q_offset, device=query.device).long().view(-1, 1, 1, 1)


def _positions(
    query: Tensor, key: Tensor, q_offset: int | Tensor | str, kv_lens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Positions of the query rows, `[B or 1, 1, Lq, 1]`, and of the key columns, `[Lkv]`."""
    columns = torch.arange(key.shape[2], device=query.device)
    rows = torch.arange(query.shape[2], device=query.device).view(1, 1, -1, 1)
    return rows + _offset(query, key, q_offset, kv_lens).clamp(-FAR, FAR), columns


def _in_window(query: Tensor, key: Tensor, offset: Tensor, window: tuple[int, int]) -> Tensor:
    """Which keys lie in the window around each row, `[B or 1, 1, Lq, Lkv]`; Python's integers do not overflow."""
    ahead = torch.arange(query.shape[2]).view(-1, 1) - torch.arange(key.shape[2])  # of a row without its offset

    def at_most(bounds: list[int]) -> Tensor:
        return torch.tensor([min(max(bound, -FAR), FAR) for bound in bounds]).view(-1, 1, 1, 1)

    inside = torch.ones(1, 1, *ahead.shape, dtype=torch.bool)
    left, right = window
    offsets = offset.flatten().tolist()
    if left >= 0:
        inside = inside & (ahead <= at_most([left - start for start in offsets]))
    if right >= 0:
        inside = inside & (-ahead <= at_most([right + start for start in offsets]))
    return inside.to(offset.device)


def _allowed(query, key, mask, causal, q_offset, window, chunk, kv_lens) -> Tensor:
    """Bool `[B, Hq, Lq, Lkv]`: True for a key that a row may attend by all rules."""
    rows, columns = _positions(query, key, q_offset, kv_lens)
    allowed = torch.ones(*query.shape[:3], key.shape[2], dtype=torch.bool, device=query.device)
    if causal:
        allowed = allowed & (columns <= rows)
    if max(window) >= 0:
        allowed = allowed & _in_window(query, key, _offset(query, key, q_offset, kv_lens), window)
    if chunk is not None:
        allowed = allowed & (rows // chunk == columns // chunk)
    if kv_lens is not None:
        allowed = allowed & (columns < kv_lens.view(-1, 1, 1, 1))
    if mask is not None:
        keep = mask if mask.dtype == torch.bool else mask.to(torch.promote_types(query.dtype, torch.float32)) != -INF
        allowed = allowed & keep
    return allowed


def _named(key_index: Tensor, key_block: int, heads: list[int], kv_len: int) -> Tensor:
    """Bool `[B, 1 or Hq, Lq, Lkv]`: True for a key whose block the row names for the head."""
    blocks = torch.arange(kv_len, device=key_index.device) // key_block
    named = (key_index.unsqueeze(-1) == blocks).any(-2)  # [B, 1 or Hkv, Lq, Lkv]
    return named[:, heads] if named.shape[1] > 1 else named


def _masked_scores(query, key, mask, allowed, q_offset, kv_lens, softcap, alibi_slopes, scales) -> Tensor:
    """Scores after scale, softcap, ALiBi and mask, in this order."""
    scores = _cap(_scaled_dot(query, key, allowed, scales), softcap)
    if alibi_slopes is not None:
        rows, columns = _positions(query, key, q_offset, kv_lens)
        scores = scores - alibi_slopes.to(scores).view(-1, 1, 1) * (rows - columns).abs().to(scores)
    if mask is not None and mask.dtype != torch.bool:
        bias = mask.to(scores.dtype).clamp(min=torch.finfo(scores.dtype).min)
        scores = scores + torch.where(allowed, bias, 0)
    return scores.masked_fill(~allowed, -INF)


def _scaled_dot(query, key, allowed, scales: tuple[float | None, Tensor | None]) -> Tensor:
    """scale * query_scale * q.k. If there is a NaN or Inf, excluded pairs count as 0, so that no value and no gradient
    spreads it."""
    scale, query_scale = scales
    scale = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    if query_scale is not None:
        scale = scale * query_scale.to(query.dtype).unsqueeze(-2).unsqueeze(-1)  # [1, Lq, 1] or [B, 1, Lq, 1]
    if query.isfinite().all() and key.isfinite().all():
        return query @ key.transpose(-2, -1) * scale
    pairs = allowed.unsqueeze(-1)  # [B, Hq, Lq, Lkv, 1]
    products = torch.where(pairs, query.unsqueeze(3), 0) * torch.where(pairs, key.unsqueeze(2), 0)
    return products.sum(-1) * scale


def _cap(scores: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(scores / softcap) if softcap > 0 else scores


def _softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities and lse over the last dimension. The sink is one more column, which reads no value."""
    batch, num_heads, q_len, _ = scores.shape
    sink = scores.new_full((num_heads,), -INF) if sinks is None else sinks.to(scores.dtype)
    logits = torch.cat([scores, sink.view(1, -1, 1, 1).expand(batch, -1, q_len, 1)], dim=-1)
    peak = logits.detach().amax(-1, keepdim=True)
    peak = torch.where(peak == -INF, 0, peak)
    terms = torch.exp(logits - peak)
    total = terms.sum(-1, keepdim=True)
    empty = total == 0
    total = torch.where(empty, 1, total)
    lse = torch.where(empty, -INF, peak + total.log()).squeeze(-1)
    return terms[..., :-1] / total, lse.to(torch.promote_types(lse.dtype, torch.float32))


def _weighted_sum(probs: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    """probs @ value. If there is a NaN or Inf, the values of excluded pairs count as 0."""
    if value.isfinite().all():
        return probs @ value
    chosen = torch.where(allowed.unsqueeze(-1), value.unsqueeze(2), 0)  # [B, Hq, Lq, Lkv, Dv]
    return (probs.unsqueeze(-1) * chosen).sum(-2)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Joins the results over two disjoint sets of keys: out `[B, H, L, Dv]`, lse `[B, H, L]`."""
    peak = torch.maximum(lse_a, lse_b)
    peak = torch.where(peak == -INF, 0, peak)
    weight_a, weight_b = torch.exp(lse_a - peak), torch.exp(lse_b - peak)
    total = weight_a + weight_b
    empty = total == 0
    total = torch.where(empty, 1, total)
    out = out_a * (weight_a / total).unsqueeze(-1) + out_b * (weight_b / total).unsqueeze(-1)
    return out.to(out_a.dtype), torch.where(empty, -INF, peak + total.log())


# ---- rotary position embedding -------------------------------------------------------


def linear_attention(
    query: Tensor,  # [B, Hk, L, D]
    key: Tensor,  # [B, Hk, L, D]
    value: Tensor,  # [B, Hv, L, Dv]
    *,
    log_decay: Tensor | None = None,  # [B, Hv, L] or [B, Hv, L, D], at most 0
    beta: Tensor | None = None,  # [B, Hv, L]
    initial_state: Tensor | None = None,  # [B, Hv, D, Dv]
    kv_lens: Tensor | None = None,  # [B]
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear attention token by token: out `[B, Hv, L, Dv]` and the state after the last token, `[B, Hv, D, Dv]`.

    Each token decays the state, replaces what it holds for the key by the value (with beta; else adds the value), and
    reads it by the query. Tokens past `kv_lens` change nothing and give 0. The state has the dtype of the accumulation.
    """
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    group = value.shape[1] // max(key.shape[1], 1)
    q, k = (x.to(wide).repeat_interleave(group, dim=1) for x in (query, key))
    v, scale = value.to(wide), query.shape[-1] ** -0.5 if scale is None else scale
    state = q.new_zeros(*v.shape[:2], q.shape[-1], v.shape[-1]) if initial_state is None else initial_state.to(wide)
    outs = [v[:, :, :0]]
    for t in range(q.shape[2]):
        kept = state
        if log_decay is not None:
            decay = log_decay[:, :, t].to(wide).exp()
            kept = state * (decay[..., None] if decay.dim() == 3 else decay[..., None, None])
        delta = v[:, :, t]
        if beta is not None:
            predicted = (kept * k[:, :, t, :, None]).sum(dim=2)
            delta = beta[:, :, t, None].to(wide) * (delta - predicted)
        new = kept + k[:, :, t, :, None] * delta[:, :, None]
        out = scale * (new * q[:, :, t, :, None]).sum(dim=2)
        if kv_lens is not None:
            valid = (t < kv_lens)[:, None, None]
            new, out = torch.where(valid[..., None], new, state), torch.where(valid, out, torch.zeros_like(out))
        state = new
        outs.append(out[:, :, None])
    return torch.cat(outs, dim=2).to(query.dtype), state


def causal_conv1d(
    x: Tensor,  # [B, L, C]
    weight: Tensor,  # [C, K]
    bias: Tensor | None = None,  # [C]
    *,
    activation: str | None = None,  # "silu"
    initial_state: Tensor | None = None,  # [B, C, K - 1]
    kv_lens: Tensor | None = None,  # [B]
) -> tuple[Tensor, Tensor]:
    """The sum over a token and the K - 1 tokens before it, each channel by itself: out `[B, L, C]` and the last K - 1
    inputs, `[B, C, K - 1]`. Tokens past `kv_lens` give 0 and are not among them."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    (batch, length, channels), past = x.shape, weight.shape[1] - 1
    lens = [length] * batch if kv_lens is None else kv_lens.tolist()
    outs, states = [], []
    for b, valid in enumerate(lens):
        before = x.new_zeros(past, channels) if initial_state is None else initial_state[b].T.to(x.dtype)
        inputs = torch.cat([before, x[b, :valid]])
        out = sum(inputs[k : k + valid].to(wide) * weight[:, k].to(wide) for k in range(past + 1))
        out = out if bias is None else out + bias.to(wide)
        out = out * out.sigmoid() if activation == "silu" else out
        outs.append(torch.cat([out, out.new_zeros(length - valid, channels)]))
        states.append(inputs[valid:].T)
    return torch.stack(outs).to(x.dtype), torch.stack(states)


def rope_table(
    positions: Tensor,  # [..., L]
    dim: int,
    *,
    base: float = 10000.0,
    factor: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """cos, sin `[..., L, dim/2]` of (position / factor) * base^(-2i/dim), from fp64 angles. Source: Su et al. 2021."""
    frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    angles = (positions.double() / factor).unsqueeze(-1) * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def latent_attention(
    query: Tensor, latent: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor, **settings: Any
) -> Tensor:
    """Latent attention `[B, H, Lq, V]` of rotated queries `[B, H, Lq, N + R]` over latents `[B, Lkv, C]` and one
    rotated key `[B, Lkv, R]` for all heads. w_uk `[H, N, C]` and w_uv `[H, V, C]` turn a latent into each head's key
    and value. The settings are those of `attention`. Source: DeepSeek-V2 2024, equations 9 to 19.
    """
    key = torch.einsum("blc,hnc->bhln", latent, w_uk)
    shared = k_rope.unsqueeze(1).expand(-1, w_uk.shape[0], -1, -1)
    return attention(query, torch.cat([key, shared], -1), torch.einsum("blc,hvc->bhlv", latent, w_uv), **settings)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotates the first r dims of x `[..., L, D]` by cos, sin `[..., L, r/2]`, in at least fp32; the layout is kept.

    Pairs are (i, i + r/2), or (2i, 2i + 1) with `interleaved`.
    """
    half = cos.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    turned, rest = x[..., : 2 * half].to(wide), x[..., 2 * half :]
    cos, sin = cos.to(wide), sin.to(wide)
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.split(half, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def gate_heads(joined: Tensor, gate: Tensor, num_heads: int, activation: str = "sigmoid") -> Tensor:
    """joined `[B, L, H * D]` times f(gate), with gate `[B, L, H]` or `[B, L, H * D]`."""
    factor = gate.sigmoid() if activation == "sigmoid" else (1 + gate.exp()).log()
    heads = joined.unflatten(-1, (num_heads, -1))
    return (heads * factor.unflatten(-1, (num_heads, -1))).flatten(-2)


def differential_attention(
    query: Tensor,  # [B, Hq, Lq, D]
    key: Tensor,  # [B, Hkv, Lkv, D]
    value: Tensor,  # [B, Hkv, Lkv, D]
    factor: Tensor,  # broadcastable to the result
    *,
    version: int,
    **settings: Any,
) -> Tensor:
    """The difference out_1 - factor * out_2 of the heads of a pair, before its norm.

    Version 1: heads h and h + Hq / 2, each with two kv heads' values side by side, `[B, Hq / 2, Lq, 2 D]`. Version 2:
    heads 2 h and 2 h + 1, `[B, Hq / 2, Lq, D]`.
    """
    if version == 1:
        read = torch.arange(query.shape[1]) // (query.shape[1] // key.shape[1])
        wide = torch.cat(value.chunk(2, dim=1), dim=-1)
        first, second = (attention_scores(query, key, **settings) @ wide[:, read % wide.shape[1]]).chunk(2, dim=1)
    else:
        out = attention(query, key, value, **settings)
        first, second = out[:, 0::2], out[:, 1::2]
    return first - factor * second


def index_scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """Scores `[B, L, Lkv]` of the lightning indexer (DeepSeek-V3.2 2025): sum_h weights_h relu(query_h key).

    query `[B, H, L, D]` and key `[B, 1, Lkv, D]` are rotated; weights `[B, L, H]`.
    """
    return torch.einsum("bhlk,blh->blk", (query @ key.transpose(-2, -1)).relu(), weights)


def indexer_loss(scores: Tensor, probs: Tensor, allowed: Tensor) -> Tensor:
    """The mean over the queries of KL(p || softmax(scores)), over the keys that are `allowed`, bool `[B, L, Lkv]`.

    p are the probabilities `[B, Hq, L, Lkv]`, summed over the heads and divided by their sum. Each query has a key.
    """
    target = probs.sum(1) / probs.sum((1, 3)).unsqueeze(-1)
    log_guess = scores.masked_fill(~allowed, -INF).log_softmax(-1)
    seen = target > 0
    return (target[seen] * (target[seen].log() - log_guess[seen])).sum() / (scores.shape[0] * scores.shape[1])


def compress_tokens(value: Tensor, gate: Tensor, bias: Tensor, overlap: bool = False) -> Tensor:
    """The entries `[B, L / rate, D]` of full windows: softmax(gate + bias) over a window's tokens, times value. With
    `overlap` (2 D numbers per token) an entry also reads the first D numbers of the window before."""
    rate, half, entries = bias.shape[0], value.shape[2] // 2, []
    for start in range(0, value.shape[1] - rate + 1, rate):
        tokens, scores = value[:, start : start + rate], gate[:, start : start + rate] + bias
        if overlap:
            tokens, scores = tokens[..., half:], scores[..., half:]
            before = slice(start - rate, start)
            if start:
                tokens = torch.cat([value[:, before, :half], tokens], dim=1)
                scores = torch.cat([gate[:, before, :half] + bias[:, :half], scores], dim=1)
        entries.append((scores.softmax(dim=1) * tokens).sum(dim=1))
    return torch.stack(entries, dim=1)


def tied_attention(query: Tensor, tied: Tensor, k_rope: Tensor, **settings: Any) -> Tensor:
    """Grouped tied attention (Zadouri et al. 2025, arXiv 2505.21487, GTA): one state `[B, G, L, D]` is the value, and
    its first half the first half of the key. The second half is one rotated key `[B, 1, L, D / 2]` for all heads.
    """
    half = tied.shape[-1] // 2
    return attention(
        query, torch.cat([tied[..., :half], k_rope.expand(-1, tied.shape[1], -1, -1)], -1), tied, **settings
    )


def grouped_latent_attention(
    query: Tensor, latents: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor, **settings: Any
) -> Tensor:
    """`latent_attention` with several latents `[B, groups, L, C]`, each for a share of the heads (GLA, same paper)."""
    groups = latents.shape[1]
    shares = zip(query.chunk(groups, 1), latents.unbind(1), w_uk.chunk(groups), w_uv.chunk(groups), strict=True)
    return torch.cat([latent_attention(q, c, k_rope, uk, uv, **settings) for q, c, uk, uv in shares], 1)


def merge_latents(latent: Tensor, weights: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """Multi-head temporal latent attention (Deng and Woodland 2025, arXiv 2505.13544, MTLA): `stride` tokens share a
    latent, the sum of theirs `[B, L, C]` by weights `[B, L]`.

    Returns the sums as far as each token, `[B, L, C]`, and the mask `[L, L]` of causal attention over them: a token
    reads its own unfinished sum, and the last one of each part before its own.
    """
    length = latent.shape[1]
    place = torch.arange(length, device=latent.device)
    earlier = (place // stride == place.unsqueeze(1) // stride) & (place <= place.unsqueeze(1))
    merged = earlier.to(latent.dtype) @ (weights.unsqueeze(-1) * latent)
    finished = (place % stride == stride - 1) & (place < place.unsqueeze(1))
    return merged, finished | torch.eye(length, dtype=torch.bool, device=latent.device)


def tensor_product(a: Tensor, b: Tensor) -> Tensor:
    """Heads `[B, H, L, D]` as the mean of R products of a `[B, L, R, H]` and b `[B, L, R, D]` (Zhang et al. 2025, arXiv
    2501.06425, TPA). Queries, keys and values are all made so, and a and b of keys and values are cached."""
    return torch.einsum("blrh,blrd->bhld", a, b) / a.shape[2]


# ---- weights as GGUF files store them -------------------------------------------------


def stored_numbers(blocks: Tensor, kind: str) -> Tensor:
    """The numbers `[..., blocks * N]` of rows of blocks `[..., blocks, bytes]` uint8, N in a block, in fp32.

    A number is scale * code + offset, with scales in fp16. Q4_0 and Q5_0 have the offset -8 or -16 scales, Q4_1 and
    Q5_1 one of their own. In Q4_K and Q5_K each 32 of 256 numbers have a scale and an offset of 6 bits, which two
    numbers in fp16 multiply; in Q6_K each 16 have a scale of 8 bits.
    """
    if kind == "Q8_0":
        return (_half(blocks, 0) * _signed(blocks[..., 2:])).flatten(-2)
    if kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        has_offset, five = kind.endswith("1"), kind.startswith("Q5")
        first = 4 if has_offset else 2
        codes = _nibbles(blocks[..., -16:])
        if five:
            codes = codes + 16 * _bits(blocks[..., first : first + 4], range(8)).transpose(-1, -2).flatten(-2)
        scale = _half(blocks, 0)
        return (scale * codes + _half(blocks, 2) if has_offset else scale * (codes - (16 if five else 8))).flatten(-2)
    if kind in ("Q4_K", "Q5_K"):
        return _six_bit_scales(blocks, five=kind == "Q5_K").flatten(-2)
    if kind != "Q6_K":
        raise ValueError(f"no such format: {kind}")
    low = torch.cat([_nibbles(half) for half in blocks[..., :128].split(64, -1)], -1)
    high = torch.cat([(half.unsqueeze(-2) >> _shifts(0, 2, 4, 6) & 3).flatten(-2)
                      for half in blocks[..., 128:192].split(32, -1)], -1)  # fmt: skip
    scale = _half(blocks, 208) * _signed(blocks[..., 192:208])
    return (scale.unsqueeze(-1) * (low + 16 * high - 32.0).unflatten(-1, (16, 16))).flatten(-3)


def round_rows(x: Tensor) -> Tensor:
    """x [..., dim] with each 32 numbers rounded to integers of 8 bits times their largest size / 127.

    The largest number of a block stays as it is if its size is more than 4 root mean squares of x's row and more than
    1.3 times the size of the others: they are rounded without it. The CPU's kernels take blocks whose other numbers are
    all below 2^-100 as zeros.
    """
    parts = x.unflatten(-1, (-1, 32))
    sizes = parts.abs()
    largest, second = (size.unsqueeze(-1) for size in sizes.topk(2, -1).values.unbind(-1))
    row = x.square().mean(-1).sqrt()[..., None, None]
    kept = (sizes == largest) & (largest > 4 * row) & (largest > 1.3 * second)
    scale = torch.where(kept.any(-1, keepdim=True), second, largest) / 127
    return torch.where(kept, parts, torch.where(scale == 0, 0, (parts / scale).round() * scale)).flatten(-2)


def stored_linear(
    input: Tensor, blocks: Tensor, kind: str, bias: Tensor | None = None, round_input: bool = True
) -> Tensor:
    """input `[..., in]` times the numbers of blocks `[out, ...]`, plus bias `[out]`. round_input: by `round_rows`."""
    weight = stored_numbers(blocks, kind).to(input.dtype)
    return nn.functional.linear(round_rows(input) if round_input else input, weight, bias)


def _half(blocks: Tensor, at: int) -> Tensor:  # [..., bytes] -> [..., 1]
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _signed(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.int8).float()


def _shifts(*counts: int) -> Tensor:
    return torch.tensor(counts, dtype=torch.uint8).unsqueeze(-1)


def _nibbles(packed: Tensor) -> Tensor:  # the lower halves of all bytes, then the upper ones
    return torch.cat([packed & 15, packed >> 4], -1).int()


def _bits(packed: Tensor, which: Sequence[int]) -> Tensor:  # [..., bytes] -> [..., bits, bytes]
    return (packed.unsqueeze(-2) >> _shifts(*which) & 1).int()


def _six_bit_scales(blocks: Tensor, five: bool) -> Tensor:
    a, b, c = blocks[..., 4:16].split(4, -1)
    scales = _half(blocks, 0) * torch.cat([a & 63, (c & 15) | (a >> 2 & 48)], -1)
    offsets = _half(blocks, 2) * torch.cat([b & 63, (c >> 4) | (b >> 2 & 48)], -1)
    codes = _nibbles(blocks[..., -128:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    if five:
        codes = codes + 16 * _bits(blocks[..., 16:48], range(8))
    return (scales.unsqueeze(-1) * codes - offsets.unsqueeze(-1)).flatten(-2)


# ---- layers --------------------------------------------------------------------------


class GQA(nn.Module):
    """Grouped-query attention over `[B, L, d_model]`: `num_groups` key-value heads, each read by some query heads."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_groups: int,
        *,
        bias: bool = False,
        head_map: Sequence[int] | None = None,
    ):
        super().__init__()
        self.d_head = d_model // num_heads
        self.head_map = head_map
        self.W_q = nn.Linear(d_model, num_heads * self.d_head, bias=bias)
        self.W_k = nn.Linear(d_model, num_groups * self.d_head, bias=bias)
        self.W_v = nn.Linear(d_model, num_groups * self.d_head, bias=bias)
        self.W_o = nn.Linear(num_heads * self.d_head, d_model, bias=bias)

    def forward(
        self, x: Tensor, context: Tensor | None = None, *, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """`context` `[B, Lkv, d_model]` makes it cross-attention."""
        source = x if context is None else context
        q, k, v = self._heads(self.W_q(x)), self._heads(self.W_k(source)), self._heads(self.W_v(source))
        out = attention(q, k, v, mask, causal=causal, head_map=self.head_map)
        return self.W_o(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.d_head)).transpose(1, 2)  # [B, H, L, d_head]


class MHA(GQA):
    """Multi-head attention: every head has its own keys and values."""

    def __init__(self, d_model: int, num_heads: int, *, bias: bool = False):
        super().__init__(d_model, num_heads, num_heads, bias=bias)


class MQA(GQA):
    """Multi-query attention: all heads read one key and one value head."""

    def __init__(self, d_model: int, num_heads: int, *, bias: bool = False):
        super().__init__(d_model, num_heads, 1, bias=bias)


# ---- the multi-query notebook's three versions -------------------------------------------------------------------
# They report intermediate results through `say`, one text per call: print in the notebook, a list's append in tests


def _silent(text: str) -> None:
    pass


class MQAV1(nn.Module):
    """Version 1: neither cache nor mask. Tells the row sums of the attention matrix, all 1 if the softmax is right."""

    def __init__(self, d_model: int, num_heads: int, *, say: Callable[[str], None] = _silent):
        super().__init__()
        self.num_heads, self.d_kv, self.say = num_heads, d_model // num_heads, say
        self.W_q = nn.Linear(d_model, d_model, bias=False)
        self.W_k = nn.Linear(d_model, self.d_kv, bias=False)
        self.W_v = nn.Linear(d_model, self.d_kv, bias=False)
        self.W_o = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        probs = (q @ k.transpose(-2, -1) / math.sqrt(self.d_kv)).softmax(dim=-1)
        self.say(f"should be 1 if correct: {probs.sum(dim=-1)}")
        return self.combine(probs, v)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q `[B, H, L, d_kv]` and the one head of k and v `[B, 1, L, d_kv]`."""
        q = self.W_q(x).unflatten(-1, (self.num_heads, self.d_kv)).transpose(1, 2)
        return q, self.W_k(x).unsqueeze(1), self.W_v(x).unsqueeze(1)

    def combine(self, probs: Tensor, v: Tensor) -> Tensor:
        """The heads' weighted values side by side, through W_o: `[B, L, d_model]`."""
        out = self.W_o((probs @ v).transpose(1, 2).flatten(2))
        self.say(f"shape of out : {out.shape}")
        return out


Cache = tuple[Tensor, Tensor]  # keys and values so far, detached, each [B, 1, past, d_kv]


class MQAV2(MQAV1):
    """Version 2: with a cache. No mask, so it is causal only when the tokens come one at a time."""

    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        q, k, v = self.project(x)
        if cache is not None:
            k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
        self.say(f"Q shape : {q.shape}\nK.shape: {k.shape}\nV.shape: {v.shape}")
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_kv)
        probs = self.hide_future(scores).softmax(dim=-1)
        return self.combine(probs, v), (k.detach(), v.detach())

    def hide_future(self, scores: Tensor) -> Tensor:
        return scores


class MQAV3(MQAV2):
    """Version 3: cache and causal mask, so that tokens may come in chunks. Here True means hidden."""

    def hide_future(self, scores: Tensor) -> Tensor:
        new, total = scores.shape[-2:]
        hidden = torch.ones(new, total, dtype=torch.bool, device=scores.device).triu(diagonal=total - new + 1)
        return scores.masked_fill(hidden, -INF)
