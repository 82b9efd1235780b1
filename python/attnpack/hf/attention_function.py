"""The attention function that transformers calls under the name "attnpack"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import _active_collector

from ..ops import attention, attention_scores, attention_varlen
from .arguments import REFUSED_BY_PAGES, refuse_arguments, refuse_parts
from .calls import Call, calls_seen
from .masks import LazyMask, Ranges
from .packed import ends_of, named_sequences, same_sequence
from .paged import attend_paged, is_paged

_NO_RANGES = Ranges(causal=False, window=(-1, -1), q_offset=0, kv_lens=None, key_mask=None)


def attention_forward(
    module: nn.Module,
    query: Tensor,  # [B, Hq, Lq, D]
    key: Tensor,  # [B, Hkv, Lkv, D]
    value: Tensor,  # [B, Hkv, Lkv, Dv]
    attention_mask: Tensor | None,  # [B, 1 or Hq, Lq, Lkv]
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [Hq]
    position_bias: Tensor | None = None,  # [1 or B, Hq, Lq, Lkv]
    indices: Tensor | None = None,  # [B, Lq, n]
    block_indices: Tensor | None = None,  # [B, Hkv, Lq, n]
    output_attentions: bool | None = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """`attnpack.attention` as `transformers.AttentionInterface` wants it.

    Args:
        attention_mask: a mask of `attnpack.hf`, a bool mask (True = may attend) or an additive float mask. None means
            causal for more than one query, as in transformers' sdpa: query i attends keys 0..i. `is_causal` (default
            the module's own setting, else True) can turn this off.
        scaling: default 1 / sqrt(D).
        s_aux: one logit per head that joins the softmax denominator only.
        position_bias: added to the scores.
        indices: the keys that each query may attend, if the model selects them (sparse attention of DeepSeek-V3.2). No
            other key is read.
        block_indices: the same for blocks of keys, -1 for none (MiniMax-M3); `module.indexer.block_size` keys each.
        output_attentions: also return the probabilities, before dropout.
        others: cu_seq_lens_q, cu_seq_lens_k and seq_idx keep packed sequences apart (`packed.py`). `cache` and its
            indices are those of continuous batching (`paged.py`); they say what each token attends, so
            `attention_mask` is refused. The names in `arguments.REFUSED` raise. All others are ignored.

    Returns:
        (out [B, Lq, Hq, Dv], probabilities [B, Hq, Lq, Lkv] or None).

    Raises:
        ValueError: names an argument that the operator cannot honour. A window needs no argument: it is in the mask.
    """
    refuse_parts()
    if is_paged(others.get("cache")):
        selected = {"indices": indices, "block_indices": block_indices}
        given_mask = None if isinstance(attention_mask, LazyMask) else attention_mask  # of a layer, such as Doge's
        refuse_arguments({"position_bias": position_bias, "attention_mask": given_mask, **selected}, REFUSED_BY_PAGES)
        return attend_paged(module, query, key, value, others, scale=scaling, softcap=softcap, sinks=s_aux), None
    refuse_arguments(others)
    packed = named_sequences(others, query, key)
    selected = _selected_keys(module, key, indices, block_indices)
    if attention_mask is None:
        ranges, mask = _NO_RANGES._replace(causal=causal_without_mask(module, is_causal, query.size(2))), None
    else:
        ranges, mask = split_mask(attention_mask, query.size(2), key.size(2))
    weights_wanted = are_recorded(output_attentions)
    seen = None if torch.compiler.is_compiling() else calls_seen.get()
    sequences = [numbers for numbers in (packed, ranges.sequences) if numbers is not None]
    if sequences and block_indices is not None:
        raise ValueError(
            "attnpack: block_indices: got blocks that the model selected for packed sequences; it counts them from the "
            "first token of all, and not of each sequence, so it may select another's; call it once per sequence"
        )
    if packed is not None and selected:
        raise ValueError(
            "attnpack: indices: got keys that the model selected for packed sequences, which may be those of another "
            "sequence; leave cu_seq_lens and seq_idx out and pass position_ids with use_cache=False"
        )
    if sequences:
        plain = not selected and position_bias is None and mask is None and not weights_wanted and seen is None
        out = _attend_packed(query, key, value, sequences, ranges, dropout, softcap, s_aux, scaling) if plain else None
        if out is not None:
            return out, None
        for numbers in sequences:
            mask = restricted(mask, same_sequence(numbers))
    if position_bias is not None:
        mask = _biased(position_bias, mask)
    if query.size(0) == 1 < key.size(0):
        query = query.expand(key.size(0), -1, -1, -1)  # learned queries, one set for the whole batch
    settings = {
        "causal": ranges.causal,
        "q_offset": ranges.q_offset,
        "window": ranges.window,
        "kv_lens": ranges.kv_lens,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "scale": scaling,
        **selected,
    }
    out = attention(query, key, value, mask, dropout_p=dropout, **settings)
    weights = attention_scores(query, key, mask, **settings) if weights_wanted or seen is not None else None
    if seen is not None:
        seen.append(Call(module, query, key, value, mask, settings, weights))
    return out.transpose(1, 2).contiguous(), weights if weights_wanted else None


def _attend_packed(
    query: Tensor,  # [B, Hq, L, D]
    key: Tensor,  # [B, Hkv, L, D]
    value: Tensor,  # [B, Hkv, L, Dv]
    sequences: list[Tensor],  # each [1 or B, L]
    ranges: Ranges,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,  # [Hq]
    scale: float | None,
) -> Tensor | None:
    """The output [B, L, Hq, Dv] by `attention_varlen`, which computes scores only within each sequence; None where it
    cannot take the call."""
    rows, length = query.size(0), query.size(2)
    limits = ranges.kv_lens is None and ranges.key_mask is None
    if torch.compiler.is_compiling() or not limits or isinstance(ranges.q_offset, Tensor) or ranges.q_offset != 0:
        return None
    if key.size(0) != rows or key.size(2) != length:
        return None
    ends, *others = (ends_of(numbers, rows) for numbers in sequences)
    if ends is None or not all(other is not None and torch.equal(ends, other) for other in others):
        return None
    out = attention_varlen(
        *(x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)), ends, causal=ranges.causal,
        window=ranges.window, softcap=softcap or 0.0, sinks=sinks, dropout_p=dropout, scale=scale,
    )  # fmt: skip
    return out.view(rows, length, *out.shape[1:])


def are_recorded(output_attentions: bool | None) -> bool:
    """Whether the caller wants the probabilities, or transformers does: for a model that does not pass the flag on
    (GPT-2) or has it in its config."""
    recorded = _active_collector.get() or ()
    return bool(output_attentions) or any(name.endswith("attentions") for name in recorded)


def causal_without_mask(module: nn.Module, is_causal: bool | None, q_len: int) -> bool:
    """The rule of transformers: several queries are causal, unless `is_causal` or, without it, the module says no."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return bool(causal) and q_len > 1


def split_mask(mask: Tensor, q_len: int, kv_len: int) -> tuple[Ranges, Tensor | None]:
    """Splits a mask into ranges and a tensor for the part of the mask that ranges cannot express."""
    if mask.dim() != 4 or mask.size(3) != kv_len or mask.size(2) not in (1, q_len):
        raise ValueError(
            f"attnpack: attention_mask: got shape {list(mask.shape)}, want [batch, 1 or num_heads, {q_len}, {kv_len}] "
            "for these queries and keys: padding [batch, kv_len] goes to the model, not to its attention"
        )
    if not isinstance(mask, LazyMask):
        return _NO_RANGES, mask
    if torch.compiler.is_compiling():
        return _NO_RANGES, mask._built
    return (_NO_RANGES, mask.materialise()) if mask.ranges is None else (mask.ranges, mask.ranges.key_mask)


def restricted(
    mask: Tensor | None,  # [1 or B, 1 or H, 1 or Lq, Lkv]
    allowed: Tensor,  # [1 or B, 1, Lq, Lkv], bool
) -> Tensor:
    """`mask`, which now also excludes the keys that are not allowed."""
    if mask is None:
        return allowed
    return allowed & mask if mask.dtype == torch.bool else torch.where(allowed, mask, -torch.inf)


def _selected_keys(
    module: nn.Module,
    key: Tensor,  # [B, Hkv, Lkv, D]
    indices: Tensor | None,  # [B, Lq, n]
    block_indices: Tensor | None,  # [B, Hkv, Lq, n]
) -> dict[str, Any]:
    """The arguments of `attnpack.attention` for the keys that a model selected; none if it selected all."""
    if indices is None and block_indices is None:
        return {}
    key_block = 1 if block_indices is None else module.indexer.block_size
    index = indices.unsqueeze(1) if block_indices is None else block_indices
    blocks = -(-key.size(2) // key_block)
    if not torch.compiler.is_compiling() and index.size(-1) == blocks:
        every = torch.arange(blocks, device=index.device)
        if (index.sort(-1).values == every).all():  # a short text: there are no more keys than the model selects
            return {}
    return {"key_index": index, "key_block": key_block}


def _biased(
    bias: Tensor,  # [1 or B, Hq, Lq, Lkv]
    mask: Tensor | None,
) -> Tensor:
    """One additive mask from bias and mask: -inf at the keys that a bool mask excludes."""
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, -torch.inf)
    return bias + mask
