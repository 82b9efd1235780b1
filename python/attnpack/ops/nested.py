"""Jagged nested tensors: batches of sequences of several lengths, without padding.

A nested tensor [B, L*, ...] holds its sequences one after the other in one tensor, `values` [T, ...]. Sequence b has
the rows offsets[b] to offsets[b + 1], which is what `attend_packed` takes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import values_of
from .packed import attend_packed


def is_nested(x: object) -> bool:
    return getattr(x, "is_nested", False)


def rows(name: str, x: Tensor) -> Tensor:
    """The values [T, ...] of a jagged [B, L*, ...].

    Raises:
        ValueError: x is padded, has another layout, or another dimension is ragged.
    """
    if not is_nested(x):
        raise ValueError(
            f"attnpack: {name} is a padded tensor beside nested ones, wants a jagged nested tensor: pass all of them "
            "nested, or all padded"
        )
    if x.layout != torch.jagged:
        raise ValueError(
            f"attnpack: {name} is a nested tensor of the layout {x.layout}, wants torch.jagged: build it with "
            "torch.nested.nested_tensor(sequences, layout=torch.jagged)"
        )
    if x._ragged_idx != 1 or x.lengths() is not None:
        x = _compact(name, x)
    return x.values()


def _compact(name: str, x: Tensor) -> Tensor:
    if x._ragged_idx != 1:
        raise ValueError(
            f"attnpack: {name} has the shape {_shape(x)}, wants the lengths in dimension 1: transpose it, or build it "
            "from sequences [length, ...]"
        )
    raise ValueError(
        f"attnpack: {name} is a narrowed nested tensor, wants one without gaps between its sequences: call "
        ".contiguous() on it"
    )


def _shape(x: Tensor) -> str:
    return "[" + ", ".join("L*" if i == x._ragged_idx else str(n) for i, n in enumerate(x.shape)) + "]"


def like(values: Tensor, nested: Tensor) -> Tensor:
    """values [T, ...] as a nested tensor [B, L*, ...] with the sequences of another one."""
    return torch.nested.nested_tensor_from_jagged(values, nested.offsets())


def same_sequences(a: Tensor, b: Tensor) -> bool:
    """Whether two nested tensors have the same lengths. Traced ones have if they share their offsets."""
    if a.offsets() is b.offsets():
        return True
    first, second = values_of(a.offsets()), values_of(b.offsets())
    return first is None or second is None or first == second


def check_same_sequences(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if x.size(0) != other.size(0) or not same_sequences(x, other):
        raise ValueError(
            f"attnpack: {name} has other sequence lengths than {other_name}, wants the same: build both from sequences "
            "of equal lengths"
        )


def refuse(**given: Any) -> None:
    """Raises for arguments that nested tensors do not go with."""
    fixes = {
        "mask": "causal and window hold for each sequence; another mask wants padded tensors",
        "key_index": "the keys of packed sequences have no numbers of their own",
        "key_block": "the keys of packed sequences have no numbers of their own",
        "kv_lens": "nested tensors hold their lengths",
        "lengths": "nested tensors hold their lengths",
        "cu_seqlens": "nested tensors hold their lengths",
        "context_lens": "nested tensors hold their lengths",
        "context_mask": "it wants padded tensors",
        "source_lens": "nested tensors hold their lengths",
        "target_lens": "nested tensors hold their lengths",
        "cache": "appends of several lengths take padded tensors and kv_lens",
        "need_weights": "ask attnpack.attention_scores for one sequence at a time",
    }
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(
                f"attnpack: {name} is given with nested tensors, wants to be left out: {fixes[name]}, so leave it out "
                "or pass padded tensors"
            )


_UNNESTED = ("kv_lens", "key_index", "key_block")  # rules that nested tensors do not go with


def attention(
    query: Tensor,  # [B, Hq, L*, D]
    key: Tensor,  # [B, Hkv, L*, D]
    value: Tensor,  # [B, Hkv, L*, Dv]
    mask: Tensor | None,
    return_lse: bool,
    rules: dict[str, Any],
) -> Tensor | tuple[Tensor, Tensor]:  # [B, Hq, L*, Dv], lse [B, Hq, L*]
    """`attnpack.attention` of jagged nested tensors: one call per sequence, with q_offset as given and the factors of
    query_scale [B, L*]."""
    refuse(mask=mask, **{name: rules.get(name) for name in _UNNESTED if name != "key_block"})
    heads = {name: by_rows(name, x) for name, x in (("query", query), ("key", key), ("value", value))}
    for name in ("key", "value"):
        if heads[name].size(0) != heads["query"].size(0):
            raise ValueError(
                f"attnpack: {name} has {heads[name].size(0)} sequences, query {heads['query'].size(0)}: they must agree"
            )
    q, k, v = (rows(name, x) for name, x in heads.items())
    check_same_sequences("value", heads["value"], "key", heads["key"])
    packed = {"q_offset": 0} | {name: rule for name, rule in rules.items() if name not in _UNNESTED}
    if (scale := rules.get("query_scale")) is not None:
        packed["query_scale"] = rows("query_scale", scale)
        check_same_sequences("query_scale", scale, "query", heads["query"])
    ends = heads["query"].offsets(), heads["key"].offsets()
    out, lse = attend_packed(q, k, v, *ends, return_lse=True, **packed)
    out = like(out, heads["query"]).transpose(1, 2)
    return (out, like(lse.transpose(0, 1), heads["query"]).transpose(1, 2)) if return_lse else out


def by_rows(name: str, x: Tensor) -> Tensor:
    """A jagged [B, H, L*, D] as [B, L*, H, D]; without D too."""
    if is_nested(x) and x.layout == torch.jagged and (x.dim() not in (3, 4) or x._ragged_idx != 2):
        raise ValueError(
            f"attnpack: {name} has the shape {_shape(x)}, wants [batch, heads, L*, head_dim]: build it from sequences "
            "[length, heads, head_dim], and transpose(1, 2)"
        )
    return x.transpose(1, 2) if is_nested(x) and x.layout == torch.jagged else x


def owners(nested: Tensor) -> Tensor:
    """The number of each row's sequence, int64 [T]. Raises ValueError where rows belong to none."""
    offsets = nested.offsets()
    _check_offsets(nested, offsets)
    numbers = torch.arange(offsets.size(0) - 1, device=offsets.device)
    return torch.repeat_interleave(numbers, offsets.diff(), output_size=nested.values().size(0))


def _check_offsets(nested: Tensor, offsets: Tensor) -> None:
    ends, count = values_of(offsets), nested.values().size(0)
    if not ends or (ends[0] == 0 and ends[-1] == count and ends == sorted(ends)):
        return
    shown = ", ".join(map(str, ends if len(ends) <= 6 else [*ends[:4], "...", ends[-1]]))
    fix = "torch.nested.as_nested_tensor(sequences, layout=torch.jagged)"
    if ends == sorted(ends) and 0 <= ends[0] and ends[-1] <= count:
        fix = f"torch.nested.nested_tensor_from_jagged(values[{ends[0]} : {ends[-1]}], offsets - {ends[0]})"
    raise ValueError(
        f"attnpack: a nested argument has the offsets [{shown}] and {count} rows of values, wants offsets that ascend "
        f"from 0 to {count}: build it by {fix}"
    )


def positions_of(nested: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The position of each row in its sequence, int64 [T], and its sequence's length, the highest position + 1, [T].

    Args:
        positions: jagged int64 [B, L*] of the same sequences; default 0, 1 ... in each.
    """
    owner = owners(nested)
    if positions is None:
        offsets = nested.offsets()
        starts = offsets.to(torch.int64)[owner]
        return torch.arange(owner.size(0), device=owner.device) - starts, offsets.diff().to(torch.int64)[owner]
    given = rows("positions", positions)
    if given.dtype != torch.int64 or given.dim() != 1:
        raise ValueError(
            f"attnpack: positions has dtype {given.dtype} and {given.dim() + 1} dimensions, wants a jagged int64 "
            "[batch, L*], or None for 0, 1 ... in each sequence"
        )
    check_same_sequences("positions", positions, "x", nested)
    lengths = given.new_zeros(nested.size(0)).scatter_reduce(0, owner, given + 1, "amax")
    return given, lengths[owner]


def one_row(name: str, x: Tensor) -> Tensor:
    """A jagged [B, L*, ...] as a batch of one row [1, T, ...]; a padded tensor as it is."""
    return rows(name, x).unsqueeze(0) if is_nested(x) else x
