"""flash-attn 2's functions on CPU and CUDA tensors: for ``from attnpack import flash as flash_attn``.

The signatures are those of flash-attn 2.8. Tensors are [batch, length, heads, head_dim], or [tokens, heads, head_dim]
for packed sequences, in float64, float32, bfloat16 or float16. Causality and windows are bottom-right: query i stands
at i + Lk - Lq. A row without keys gives 0, and its lse is -inf, where flash-attn has inf. Results are deterministic, so
`deterministic` changes nothing. All functions but `flash_attn_with_kvcache` have gradients. Dao 2023,
"FlashAttention-2".
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .errors import DTYPES, values_of, wrong_kind
from .ops import apply_rope, attention, attention_varlen
from .signatures import with_lse, with_probs

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func",
           "flash_attn_with_kvcache"]  # fmt: skip


@with_probs
def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                    alibi_slopes: Tensor | None = None, deterministic: bool = False,
                    return_attn_probs: bool = False) -> Tensor | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Attention of q [B, Lq, Hq, D] over k [B, Lk, Hkv, D] and v [B, Lk, Hkv, Dv].

    Args:
        dropout_p: dropout on the probabilities.
        softmax_scale: factor on the scores; default 1 / sqrt(D).
        causal: keep keys j <= i + Lk - Lq.
        window_size: (left, right): keep i + Lk - Lq - left <= j <= i + Lk - Lq + right; -1 = unbounded.
        softcap: c > 0: scores become c * tanh(score / c).
        alibi_slopes: [Hq] or [B, Hq], adds -slope * abs(i + Lk - Lq - j); no gradient.
        deterministic: has no effect: every result is deterministic.
        return_attn_probs: also return lse and S_dmask; refused with dropout.

    Returns:
        out [B, Lq, Hq, Dv], or (out, softmax_lse [B, Hq, Lq], S_dmask), where S_dmask is empty, as flash-attn's without
        dropout.

    Raises:
        ValueError: a shape, dtype, device or value does not fit.
    """
    _check_shapes(q=q, k=k, v=v)
    _check_fit(q, k, v)
    _check_probs(return_attn_probs, dropout_p)
    settings = _settings(dropout_p, softmax_scale, causal, window_size, softcap)
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse = _attend(*heads, _slopes(alibi_slopes, q.size(0), q.size(2)), **settings)
    return _results(out.transpose(1, 2), lse, return_attn_probs)


@with_probs
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                             causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                             alibi_slopes: Tensor | None = None, deterministic: bool = False,
                             return_attn_probs: bool = False) -> Tensor | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`flash_attn_func` of q [B, Lq, Hq, D] and kv [B, Lk, 2, Hkv, D]."""
    k, v = _unpack("kv", kv, 2, "[batch, length, 2, heads, head_dim]", 5)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                           return_attn_probs)  # fmt: skip


@with_probs
def flash_attn_qkvpacked_func(qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                              causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                              alibi_slopes: Tensor | None = None, deterministic: bool = False,
                              return_attn_probs: bool = False) -> Tensor | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`flash_attn_func` of qkv [B, L, 3, H, D]."""
    q, k, v = _unpack("qkv", qkv, 3, "[batch, length, 3, heads, head_dim]", 5)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                           return_attn_probs)  # fmt: skip


@with_probs
def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                           max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                           softmax_scale: float | None = None, causal: bool = False,
                           window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                           alibi_slopes: Tensor | None = None, deterministic: bool = False,
                           return_attn_probs: bool = False,
                           block_table: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`flash_attn_func` of packed sequences, q [T, Hq, D], k [S, Hkv, D], v [S, Hkv, Dv].

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 or int64 [B + 1]: where each sequence begins, and the end of the last.
        max_seqlen_q, max_seqlen_k: hints, by which no memory is read.
        alibi_slopes: [Hq] or [B, Hq]; with [B, Hq] each sequence is a call of its own.
        block_table: int32 [B, pages]: k and v are then pools [num_pages, page_size, Hkv, D] of any page_size, and
            cu_seqlens_k counts the keys of each sequence. Pools have no gradients.

    Returns:
        out [T, Hq, Dv], or (out, softmax_lse [Hq, T], S_dmask).
    """
    _check_table(block_table)
    _check_shapes(ranks=3, q=q)
    _check_shapes(ranks=3 if block_table is None else 4, k=k, v=v)
    _check_fit(q, k, v)
    _check_probs(return_attn_probs, dropout_p)
    ends = cu_seqlens_q, cu_seqlens_k
    for name, value in zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True):
        if not isinstance(value, Tensor):
            raise wrong_kind(name, value, "an int32 tensor [sequences + 1]: torch.tensor() makes one of a list")
    settings = _settings(dropout_p, softmax_scale, causal, window_size, softcap)
    slopes = _slopes(alibi_slopes, cu_seqlens_q.numel() - 1, q.size(1))
    hints = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    if block_table is not None:
        lens = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        result = _attend_pages(q, k, v, cu_seqlens_q, block_table, lens, slopes, **hints, **settings)
        return _results(*result, return_attn_probs)
    if slopes is None or slopes.dim() == 1:
        result = attention_varlen(q, k, v, *ends, alibi_slopes=slopes, return_lse=True, **hints, **settings)
        return _results(*result, return_attn_probs)
    attention_varlen(q[:0], k[:0], v[:0], cu_seqlens_q * 0, cu_seqlens_k * 0, **hints, **settings)
    _check_ends(cu_seqlens_q=(cu_seqlens_q, q), cu_seqlens_k=(cu_seqlens_k, k))
    outs, lses = [q.new_empty(0, q.size(1), v.size(2))], [_empty_lse(q)]
    for b, slope in enumerate(slopes):
        (first, last), (start, end) = (x[b : b + 2].tolist() for x in ends)
        rows = [x.transpose(0, 1).unsqueeze(0) for x in (q[first:last], k[start:end], v[start:end])]
        out, lse = attention(*rows, alibi_slopes=slope, q_offset="end", return_lse=True, **settings)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return _results(torch.cat(outs), torch.cat(lses, 1), return_attn_probs)


@with_probs
def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                                    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                                    softmax_scale: float | None = None, causal: bool = False,
                                    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                    alibi_slopes: Tensor | None = None, deterministic: bool = False,
                                    return_attn_probs: bool = False
                                    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`flash_attn_varlen_func` of q [T, Hq, D] and kv [S, 2, Hkv, D]."""
    k, v = _unpack("kv", kv, 2, "[tokens, 2, heads, head_dim]", 4)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                                  return_attn_probs)  # fmt: skip


@with_probs
def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
                                     softmax_scale: float | None = None, causal: bool = False,
                                     window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                     alibi_slopes: Tensor | None = None, deterministic: bool = False,
                                     return_attn_probs: bool = False
                                     ) -> Tensor | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`flash_attn_varlen_func` of qkv [T, 3, H, D], whose sequences begin at cu_seqlens [B + 1]."""
    q, k, v = _unpack("qkv", qkv, 3, "[tokens, 3, heads, head_dim]", 4)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale,
                                  causal, window_size, softcap, alibi_slopes, deterministic,
                                  return_attn_probs)  # fmt: skip


@with_lse
def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None,
                            v: Tensor | None = None, rotary_cos: Tensor | None = None,
                            rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
                            cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None,
                            block_table: Tensor | None = None, softmax_scale: float | None = None,
                            causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                            rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
                            return_softmax_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of q [B, Lq, Hq, D] over a cache, after k and v were written into it. It has no gradients.

    Args:
        k_cache, v_cache: [rows, S, Hkv, D], changed in place if k and v are given; with block_table pools
            [num_pages, page_size, Hkv, D] of any page_size.
        k, v: [B, Lnew, Hkv, D], written at positions cache_seqlens to cache_seqlens + Lnew.
        rotary_cos, rotary_sin: [positions, r / 2]: k is rotated at cache_seqlens, cache_seqlens + 1 ...; q too if
            causal or window_size is set, otherwise q is rotated at cache_seqlens. They go with k and v.
        cache_seqlens: int or int32 [B], the tokens of the cache before this call; default S, without k and v. With
            block_table S is pages * page_size.
        cache_batch_idx: int32 [B], the row of the cache of each sequence; default 0, 1 ...
        cache_leftpad: int32 [B], where the keys of each sequence begin.
        block_table: int32 [B, pages], the pages of each sequence; without cache_batch_idx and cache_leftpad, as in
            flash-attn.
        rotary_interleaved: pairs (2i, 2i + 1) instead of (i, i + r / 2).
        num_splits: has no effect: results do not depend on how the keys are split.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in `flash_attn_func`, with Lk the keys of the
            sequence after the writing.

    Returns:
        out [B, Lq, Hq, D], or (out, softmax_lse [B, Hq, Lq]) with return_softmax_lse.

    Raises:
        ValueError: a shape, dtype or length does not fit; nothing has been written then.
    """
    _check_table(block_table, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad)
    _check_shapes(q=q, k_cache=k_cache, v_cache=v_cache, **({} if k is None else {"k": k}),
                  **({} if v is None else {"v": v}))  # fmt: skip
    _check_fit(q, k_cache, v_cache, "_cache")
    if isinstance(num_splits, bool) or not isinstance(num_splits, int) or num_splits < 0:
        raise wrong_kind("num_splits", num_splits, "an int of at least 0")
    settings = _settings(0.0, softmax_scale, causal, window_size, softcap)
    with torch.no_grad():
        new = _new_length(q, k_cache, v_cache, k, v, cache_seqlens)
        room = k_cache.size(1) * (1 if block_table is None else block_table.size(1))
        before = _lengths(cache_seqlens, q.size(0), room)
        rows = _numbers("cache_batch_idx", cache_batch_idx, q.size(0), range(q.size(0)))
        pads = _numbers("cache_leftpad", cache_leftpad, q.size(0), [0] * q.size(0))
        _check_places(before, new, rows, pads, room, k_cache.size(0) if block_table is None else q.size(0))
        slopes = _slopes(alibi_slopes, q.size(0), q.size(2))
        if rotary_cos is not None or rotary_sin is not None:
            turns = settings["causal"] or settings["window"] != (-1, -1)
            q, k = _rotate(q, k, rotary_cos, rotary_sin, before, turns, rotary_interleaved)
        if block_table is not None:
            out, lse = _append_and_attend_pages(q, k_cache, v_cache, k, v, before, block_table, slopes, settings)
            return (out, lse) if return_softmax_lse else out
        # A call that fails raises before the cache is written: this one has the shapes of the real ones.
        _attend(*(x[:, :0].transpose(1, 2) for x in (q, k_cache[:1].expand(q.size(0), -1, -1, -1)[:, :0],
                v_cache[:1].expand(q.size(0), -1, -1, -1)[:, :0])), slopes, **settings)  # fmt: skip
        for b in range(q.size(0) if new else 0):
            k_cache[rows[b], before[b] : before[b] + new] = k[b]
            v_cache[rows[b], before[b] : before[b] + new] = v[b]
        out, lse = _attend_cache(q, k_cache, v_cache, [n + new for n in before], rows, pads, slopes, settings)
    return (out, lse) if return_softmax_lse else out


def _attend_cache(q, k_cache, v_cache, ends, rows, pads, slopes, settings):
    """out [B, Lq, Hq, D] and lse [B, Hq, Lq]: one call, or one for each sequence that has its own row or padding."""
    heads = [x.transpose(1, 2) for x in (q, k_cache, v_cache)]
    if rows == list(range(k_cache.size(0))) and not any(pads):
        lens = torch.tensor(ends, dtype=torch.int64, device=q.device)
        out, lse = _attend(*heads, slopes, kv_lens=lens, **settings)
        return out.transpose(1, 2), lse
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    outs = [q.new_empty(0, *q.shape[1:3], v_cache.size(3))]
    lses = [q.new_empty(0, q.size(2), q.size(1), dtype=kind)]
    for b, (row, pad, end) in enumerate(zip(rows, pads, ends, strict=True)):
        keys = [x[row : row + 1, :, pad:end] for x in heads[1:]]
        row_slopes = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        out, lse = attention(
            heads[0][b : b + 1], *keys, alibi_slopes=row_slopes, q_offset="end", return_lse=True, **settings
        )
        outs.append(out.transpose(1, 2))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _append_and_attend_pages(q, k_pool, v_pool, k, v, before, table, slopes, settings):
    """out [B, Lq, Hq, D] and lse [B, Hq, Lq] over pools, after k and v were written into them."""
    batch, length = q.shape[:2]
    lens = torch.tensor(before, dtype=torch.int64, device=q.device)
    # A call that fails raises before the pools are written: this one has no rows, and checks all that is read.
    none = torch.zeros(batch + 1, dtype=torch.int32, device="cpu")
    _attend_pages(q[:0].flatten(0, 1), k_pool, v_pool, none, table, lens, slopes, **settings)
    if k is not None:
        heads = [x.transpose(1, 2) for x in (k, v)]
        torch.ops.attnpack.kv_cache_append_paged_(k_pool, v_pool, table, lens, *heads, None, None)
    ends = torch.arange(batch + 1, dtype=torch.int32, device="cpu") * length
    out, lse = _attend_pages(q.flatten(0, 1), k_pool, v_pool, ends, table, lens, slopes, **settings)
    return out.unflatten(0, (batch, length)), lse.unflatten(1, (batch, length)).transpose(0, 1)


def _attend_pages(q, k_pool, v_pool, ends, table, lens, slopes, **settings):
    """`attention_varlen` over pools; with slopes [B, Hq] one call for each sequence."""
    pages = {"block_table": table, "kv_lens": lens}
    if slopes is None or slopes.dim() == 1:
        return attention_varlen(q, k_pool, v_pool, ends, **pages, alibi_slopes=slopes, return_lse=True, **settings)
    # This call has no rows: it checks all sequences before the first one is computed.
    none = attention_varlen(q[:0], k_pool, v_pool, ends * 0, **pages, return_lse=True, **settings)
    _check_ends(cu_seqlens_q=(ends, q))
    outs, lses = ([x] for x in none)
    for b, slope in enumerate(slopes):
        first, last = ends[b : b + 2].tolist()
        of_row = {"block_table": table[b : b + 1], "kv_lens": lens[b : b + 1], "alibi_slopes": slope}
        one = torch.tensor([0, last - first], dtype=torch.int32, device="cpu")
        out, lse = attention_varlen(q[first:last], k_pool, v_pool, one, **of_row, return_lse=True, **settings)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, 1)


def _attend(q, k, v, slopes, **settings):
    """`attention` of heads [B, H, L, D], bottom-right; with slopes [B, Hq] one call for each sequence."""
    if slopes is None or slopes.dim() == 1 or q.size(0) == 0:
        slopes = slopes if slopes is None or slopes.dim() == 1 else None
        return attention(q, k, v, alibi_slopes=slopes, q_offset="end", return_lse=True, **settings)
    lens = settings.pop("kv_lens", None)
    results = []
    for b, slope in enumerate(slopes):
        rows = (x[b : b + 1] for x in (q, k, v))
        row_lens = None if lens is None else lens[b : b + 1]
        results.append(
            attention(*rows, alibi_slopes=slope, q_offset="end", kv_lens=row_lens, return_lse=True, **settings)
        )
    return tuple(torch.cat(part) for part in zip(*results, strict=True))


def _settings(dropout_p, softmax_scale, causal, window_size, softcap) -> dict[str, Any]:
    sides = window_size if isinstance(window_size, tuple | list) else ()
    if len(sides) != 2 or not all(isinstance(side, int) for side in sides):
        raise wrong_kind("window_size", window_size, "a tuple of two ints (left, right), -1 for no limit")
    if min(sides) < -1:
        raise ValueError(f"attnpack: window_size is {window_size}, wants numbers >= 0, or -1 for no limit")
    if softmax_scale is not None and not isinstance(softmax_scale, int | float):
        raise wrong_kind("softmax_scale", softmax_scale, "a number, or None for 1 / sqrt(head_dim)")
    if softmax_scale is not None and not math.isfinite(softmax_scale):
        raise ValueError(
            f"attnpack: softmax_scale is {softmax_scale}, wants a finite number: 1 / sqrt(head_dim) is usual"
        )
    rules = {"dropout_p": dropout_p, "scale": softmax_scale, "causal": causal, "softcap": softcap}
    return {**rules, "window": tuple(sides)}


def _results(out, lse, return_attn_probs):
    return (out, lse, out.new_empty(0)) if return_attn_probs else out


def _empty_lse(q: Tensor) -> Tensor:  # q [T, H, D] -> [H, 0]
    return q.new_empty(q.size(1), 0, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def _check_probs(return_attn_probs: bool, dropout_p: float) -> None:
    if not isinstance(dropout_p, int | float):
        raise wrong_kind("dropout_p", dropout_p, "a number from 0 to below 1")
    if return_attn_probs and dropout_p > 0:
        raise ValueError(
            f"attnpack: return_attn_probs is {return_attn_probs} with dropout_p {dropout_p}, wants dropout_p 0.0: the "
            "probabilities after dropout are not stored"
        )


def _check_table(block_table: Tensor | None, **others: Tensor | None) -> None:
    """Raises unless block_table is None or a tensor [B, pages], and stands without the others."""
    if block_table is None:
        return
    if not isinstance(block_table, Tensor):
        raise wrong_kind("block_table", block_table, "an int32 tensor [batch, pages], or None")
    if block_table.dim() != 2:
        raise ValueError(f"attnpack: block_table has shape {list(block_table.shape)}, wants [batch, pages]")
    for name, other in others.items():
        if other is not None:
            raise ValueError(
                f"attnpack: {name} is given with block_table, wants None: choose and shift the rows of block_table"
            )


def _check_shapes(ranks: int = 4, **tensors: Tensor) -> None:
    shape = "[batch, length, heads, head_dim]" if ranks == 4 else "[tokens, heads, head_dim]"
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise wrong_kind(name, x, f"a tensor {shape}")
        if x.is_nested or x.dim() != ranks:
            shown = "a nested tensor" if x.is_nested else f"of shape {list(x.shape)}"
            raise ValueError(f"attnpack: {name} is {shown}, wants {shape}: heads before head_dim, length before heads")


def _check_fit(q: Tensor, k: Tensor, v: Tensor, suffix: str = "") -> None:
    """Raises unless k and v fit q. suffix: of their names, "_cache" where they are caches, which have rows of their
    own."""
    if q.dtype not in DTYPES.values():
        raise ValueError(f"attnpack: q has dtype {q.dtype}, wants one of {', '.join(map(str, DTYPES.values()))}")
    k_name, v_name = f"k{suffix}", f"v{suffix}"
    for name, x in ((k_name, k), (v_name, v)):
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"attnpack: {name} is {x.dtype} on {x.device}, q {q.dtype} on {q.device}: bring one of them to the "
                "other with .to()"
            )
    if k.dim() == q.dim() == 4 and not suffix and k.size(0) != q.size(0):
        raise ValueError(f"attnpack: k has batch {k.size(0)}, q {q.size(0)}: expand one of them")
    if k.size(-1) != q.size(-1):
        raise ValueError(f"attnpack: {k_name} has head_dim {k.size(-1)}, q {q.size(-1)}: they must agree")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"attnpack: {v_name} has shape {list(v.shape)}, {k_name} {list(k.shape)}: all but head_dim must agree"
        )
    if (q.size(-2) % k.size(-2) if k.size(-2) else q.size(-2)) != 0:
        raise ValueError(
            f"attnpack: q has {q.size(-2)} heads, {k_name} {k.size(-2)}, wants a multiple of them: pass "
            "attnpack.attention a head_map for uneven groups"
        )


def _unpack(name: str, x: Tensor, count: int, shape: str, ranks: int) -> tuple[Tensor, ...]:
    if not isinstance(x, Tensor):
        raise wrong_kind(name, x, f"a tensor {shape}")
    if x.is_nested or x.dim() != ranks or x.size(-3) != count:
        shown = "nested" if x.is_nested else list(x.shape)
        raise ValueError(f"attnpack: {name} has shape {shown}, wants {shape}: stack the parts before the heads")
    return x.unbind(-3)


def _slopes(slopes: Tensor | None, batch: int, heads: int) -> Tensor | None:
    """Slopes [Hq] or [B, Hq]."""
    if slopes is None:
        return None
    if not isinstance(slopes, Tensor):
        raise wrong_kind("alibi_slopes", slopes, "a float tensor [heads] or [batch, heads], or None")
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(
            f"attnpack: alibi_slopes has shape {list(slopes.shape)}, wants [heads] = [{heads}] or [batch, heads] = "
            f"[{batch}, {heads}]: one number per query head"
        )
    return slopes


def _check_ends(**given: tuple[Tensor, Tensor]) -> None:
    for name, (ends, rows) in given.items():
        values = values_of(ends.cpu())
        if values is not None and (values[0] != 0 or values[-1] != rows.size(0) or values != sorted(values)):
            raise ValueError(
                f"attnpack: {name} is {values}, wants numbers from 0 to {rows.size(0)} that never fall: where each "
                "sequence begins, and the end of the last"
            )


def _new_length(q, k_cache, v_cache, k, v, cache_seqlens) -> int:
    """The number of new tokens, 0 without k and v."""
    if (k is None) != (v is None):
        raise ValueError(
            f"attnpack: {'v' if v is None else 'k'} is None, wants a tensor: pass both k and v, or neither"
        )
    if k is None:
        return 0
    if cache_seqlens is None:
        raise ValueError(
            "attnpack: cache_seqlens is None, wants an int or int32 [batch] with k and v: say where they go"
        )
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        wanted = (q.size(0), k.size(1), *cache.shape[2:])
        if tuple(x.shape) != wanted or x.dtype != cache.dtype or x.device != cache.device:
            raise ValueError(
                f"attnpack: {name} has shape {list(x.shape)} in {x.dtype} on {x.device}, wants {list(wanted)} in "
                f"{cache.dtype} on {cache.device} as its cache"
            )
    return k.size(1)


def _numbers(name: str, given: Tensor | None, batch: int, default) -> list[int]:
    if given is None:
        return list(default)
    if not isinstance(given, Tensor):
        raise wrong_kind(name, given, "an int32 tensor [batch]: torch.tensor() makes one of a list")
    if given.dim() != 1 or given.size(0) != batch or given.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"attnpack: {name} has shape {list(given.shape)} and dtype {given.dtype}, wants int32 [{batch}]: one "
            "number per sequence"
        )
    return given.tolist()


def _lengths(cache_seqlens: int | Tensor | None, batch: int, room: int) -> list[int]:
    if cache_seqlens is None:
        return [room] * batch
    if isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool):
        return [cache_seqlens] * batch
    return _numbers("cache_seqlens", cache_seqlens, batch, ())


def _check_places(before: list[int], new: int, rows: list[int], pads: list[int], room: int, count: int) -> None:
    """room: the positions of a row of the cache; count: its rows."""
    for b, (length, row, pad) in enumerate(zip(before, rows, pads, strict=True)):
        if not 0 <= length <= room - new:
            raise ValueError(
                f"attnpack: cache_seqlens[{b}] is {length}, wants 0 to {room - new}: the cache has {room} positions, "
                f"and {new} tokens are new"
            )
        if not 0 <= row < count:
            raise ValueError(
                f"attnpack: cache_batch_idx[{b}] is {row}, wants 0 to {count - 1}, a row of the cache: "
                "default 0, 1 ... wants a row for each sequence"
            )
        if not 0 <= pad <= length:
            raise ValueError(f"attnpack: cache_leftpad[{b}] is {pad}, wants 0 to cache_seqlens[{b}] = {length}")


def _rotate(q, k, cos, sin, before, turns, interleaved) -> tuple[Tensor, Tensor]:
    """q and k, rotated at their places in the cache. turns: whether the rows of q stand at places of their own."""
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(table, Tensor):
            raise wrong_kind(name, table, "a float tensor [positions, rotary_dim / 2] beside the other table")
        if table.dim() != 2 or table.shape != cos.shape or 2 * table.size(1) > q.size(3):
            raise ValueError(
                f"attnpack: {name} has shape {list(table.shape)}, wants [positions, rotary_dim / 2] as rotary_cos, "
                f"with rotary_dim at most head_dim = {q.size(3)}"
            )
    if k is None:
        raise ValueError("attnpack: rotary_cos is given without k and v, wants new keys to rotate: pass k and v")
    last = max(before, default=0) + max(k.size(1), q.size(1) if turns else 1)
    if last > cos.size(0):
        raise ValueError(f"attnpack: rotary_cos has {cos.size(0)} positions, wants {last}: make longer tables")
    starts = torch.tensor(before, device=q.device).unsqueeze(1)

    def rotated(x: Tensor, steps: int) -> Tensor:
        places = starts + torch.arange(steps, device=q.device)  # [B, steps]
        tables = (table.float()[places].unsqueeze(1) for table in (cos, sin))
        return apply_rope(x.transpose(1, 2), *tables, interleaved=interleaved).transpose(1, 2)

    return rotated(q, q.size(1) if turns else 1), rotated(k, k.size(1))
