"""How DTensors run through the ops: for each op the placements that its kernel may have on one dim of a mesh.

An op runs on replicated tensors, on a share of the batch, or on a share of the heads. Others are redistributed by
torch first. Heads are shared only in numbers that divide, so that a rank's query heads read its own kv heads.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding

Given = dict[str, Any]
"""The arguments of a call by name; DTensors as what torch shows of them, with shape and placements."""
Way = tuple[list[Placement], dict[str, Placement]]
"""Placements of the outputs, and those of the inputs that are not replicated."""

_OPS = torch.ops.attnpack


def register_rules() -> None:
    """Tells torch the rules of all ops of attnpack. Composite ops need none: they run as the ops that they call."""
    for op, ways in _WAYS.items():
        _register(op, ways)
    for name in _REPLICATED:
        _register(getattr(_OPS, name).default, lambda given: iter(()))
    handlers = {_OPS.linears.default: _linears, _OPS.apply_rope.default: _apply_rope}
    handlers |= dict.fromkeys((_OPS.attention.default, _OPS.attention_backward.default), _with_replicated_lengths)
    handlers[_OPS.kv_cache_append_rotated_.default] = _append_rotated
    DTensor._op_dispatcher._custom_op_handlers.update(handlers)


def _register(op: torch._ops.OpOverload, ways: Callable[[Given], Iterator[Way]]) -> None:
    names = [argument.name for argument in op._schema.arguments]
    defaults = {argument.name: argument.default_value for argument in op._schema.arguments}
    written = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]

    def sharding(*arguments: Any) -> list[tuple[list[Placement], list[Placement | None]]]:
        given = defaults | dict(zip(names, arguments, strict=False))
        found = [([Replicate()] * len(op._schema.returns), {}), *ways(given)]
        if written:
            _check_stays(op, given, written, [places for _, places in found])
        return [
            (outputs, [_place(given[name], places.get(name, Replicate())) for name in names[: len(arguments)]])
            for outputs, places in found
        ]

    register_sharding(op)(sharding)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "placements")


def _place(value: Any, placement: Placement) -> Placement | None:
    return placement if _is_tensor(value) else None


def _check_stays(op: torch._ops.OpOverload, given: Given, written: list[str], ways: list[dict[str, Placement]]) -> None:
    """Raises unless there is, on every dim of the mesh, a way that leaves the tensors where they are that the op writes
    into: torch would let it write into moved copies."""
    placed = {name: given[name].placements for name in written if _is_tensor(given[name])}
    for dim in range(len(next(iter(placed.values()), ()))):
        if not any(all(p[dim] == places.get(n, Replicate()) for n, p in placed.items()) for places in ways):
            raise ValueError(
                f"attnpack: {op}: got the tensors that it writes into placed as {placed}, want all of them replicated, "
                "or shared alike by batch or by heads that divide: give them such placements"
            )


def _divides(size: int, given: Any) -> bool:
    """Whether `size` heads divide evenly however many dims of the mesh share them."""
    counts = [1]
    for share in given.mesh.shape:
        counts += [count * share for count in counts]
    return all(size % count == 0 for count in counts if count <= size)


def _of_mask(mask: Any, dim: int) -> Placement:
    """Placement of a mask, right-aligned with [B, H, Lq, Lkv], where dim 0 (batch) or 1 (heads) is shared."""
    axis = dim - 4 + len(mask.shape)
    return Shard(axis) if axis >= 0 and mask.shape[axis] != 1 else Replicate()


_KNOWN = {"mask", "q_offsets", "kv_lens", "sinks", "alibi_slopes", "dropout_seed", "key_index"}


def _attention_ways(given: Given, heads: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Placement]]]:
    """(dim, placements of the inputs) for a share of the batch and of the heads; dim 1 with whole keys is -1."""
    others = {n for n, v in given.items() if _is_tensor(v)} - _KNOWN - set(heads)
    if others or given["dropout_p"] > 0:  # shares of the ranks would draw the same numbers
        return
    mask, by_batch = given["mask"], {n: Shard(0) for n in heads}
    if mask is not None:
        by_batch["mask"] = _of_mask(mask, 0)
    yield 0, by_batch | {"q_offsets": Shard(0), "kv_lens": Shard(0), "key_index": Shard(0)}
    num_heads, num_kv_heads = given["query"].shape[1], given["key"].shape[1]
    by_heads = {n: Shard(1) for n in heads} | {"sinks": Shard(0), "alibi_slopes": Shard(0)}
    if mask is not None:
        by_heads["mask"] = _of_mask(mask, 1)
    if given["key_index"] is not None and given["key_index"].shape[1] > 1:
        by_heads["key_index"] = Shard(1)
    if given["head_map"] is None and num_kv_heads > 1 and _divides(num_kv_heads, given["query"]):
        yield 1, by_heads
    if given["head_map"] is None and num_kv_heads == 1 and _divides(num_heads, given["query"]):
        yield -1, by_heads | {"key": Replicate(), "value": Replicate()}


def _forward_ways(given: Given) -> Iterator[Way]:
    for dim, places in _attention_ways(given, ("query", "key", "value")):
        yield [Shard(abs(dim)), Shard(abs(dim))], places


_BACKWARD_HEADS = ("grad_out", "grad_lse", "query", "key", "value", "out", "lse")


def _backward_ways(given: Given) -> Iterator[Way]:
    for dim, places in _attention_ways(given, _BACKWARD_HEADS):
        keys = Partial() if dim == -1 else Shard(abs(dim))
        # The gradient of what all ranks share is a sum over them. An output that is not asked for is empty.
        mask = places.get("mask", Replicate())
        grad_mask = Replicate() if not given["mask_gradient"] else Partial() if mask == Replicate() else mask
        grad_sinks = Replicate() if not given["sinks_gradient"] else Shard(0) if dim else Partial()
        yield [Shard(abs(dim)), keys, keys, grad_mask, grad_sinks], places


def _varlen_forward_ways(given: Given) -> Iterator[Way]:
    for places in _varlen_ways(given, ("query", "key", "value")):
        yield [Shard(1), Shard(0)], places


def _varlen_backward_ways(given: Given) -> Iterator[Way]:
    for places in _varlen_ways(given, ("grad_out", "query", "key", "value", "out")):
        sinks = Shard(0) if given["sinks_gradient"] else Replicate()
        yield [Shard(1), Shard(1), Shard(1), sinks], places | {"lse": Shard(0), "grad_lse": Shard(0)}


def _varlen_ways(given: Given, heads: tuple[str, ...]) -> Iterator[dict[str, Placement]]:
    """Packed heads [T, H, D] by heads; keys in pages are replicated."""
    plain = given["block_table"] is None and given["head_map"] is None and given["dropout_p"] == 0
    if plain and _divides(given["key"].shape[1], given["query"]):
        yield {name: Shard(1) for name in heads} | {"sinks": Shard(0), "alibi_slopes": Shard(0)}


_RECURRENT_HEADS = ("query", "key", "value", "log_decay", "beta", "initial_state")


def _recurrent_ways(given: Given, others: tuple[str, ...] = ()) -> Iterator[tuple[int, dict[str, Placement]]]:
    """(dim, placements of the inputs) for a share of the batch, if sequences are not packed, and of the heads."""
    if given["cu_seqlens"] is None:
        yield 0, {name: Shard(0) for name in (*_RECURRENT_HEADS, *others, "kv_lens")}
    if _divides(given["query"].shape[1], given["query"]):
        yield 1, {name: Shard(1) for name in (*_RECURRENT_HEADS, *others)}


def _recurrent_forward_ways(given: Given) -> Iterator[Way]:
    for dim, places in _recurrent_ways(given):
        yield [Shard(dim), Shard(dim)], places


def _recurrent_in_place_ways(given: Given) -> Iterator[Way]:
    for dim, places in _recurrent_ways(given, ("state",)):
        yield [Shard(dim)], places


def _recurrent_backward_ways(given: Given) -> Iterator[Way]:
    for dim, places in _recurrent_ways(given, ("grad_out", "grad_state")):
        # A gradient of an argument that is not given is empty.
        yield [Shard(dim) if given[name] is not None else Replicate() for name in _RECURRENT_HEADS], places


_CONVOLVED = {"x": 2, "weight": 0, "bias": 0, "initial_state": 1, "grad_out": 2, "grad_state": 1}  # dim of the channels


def _conv_places(batch: bool) -> dict[str, Placement]:
    """Placements of the tensors of a causal convolution, for a share of the batch or of the channels."""
    rows = {"x", "initial_state", "grad_out", "grad_state"}
    if batch:
        return {name: Shard(0) for name in (*rows, "kv_lens")}
    return {name: Shard(dim) for name, dim in _CONVOLVED.items()}


def _conv_forward_ways(given: Given) -> Iterator[Way]:
    if given["cu_seqlens"] is None:
        yield [Shard(0), Shard(0)], _conv_places(True)
    yield [Shard(2), Shard(1)], _conv_places(False)


def _conv_backward_ways(given: Given) -> Iterator[Way]:
    def only_given(places: dict[str, Placement]) -> list[Placement]:  # a gradient of an argument not given is empty
        return [p if given[name] is not None else Replicate() for name, p in places.items()]

    if given["cu_seqlens"] is None:
        results = {"x": Shard(0), "weight": Partial(), "bias": Partial(), "initial_state": Shard(0)}
        yield only_given(results), _conv_places(True)
    results = {name: Shard(_CONVOLVED[name]) for name in ("x", "weight", "bias", "initial_state")}
    yield only_given(results), _conv_places(False)


def _row_ways(given: Given) -> Iterator[Way]:
    """x [..., dim] of an op that treats each row alike: all dims but the last may be shared."""
    x = given["x"]
    for dim in range(len(x.shape) - 1):
        yield [Shard(dim)], {"x": Shard(dim)}


def _sum_ways(given: Given) -> Iterator[Way]:
    """The same for two results of x and what is added to it."""
    for dim in range(len(given["x"].shape) - 1):
        yield [Shard(dim), Shard(dim)], {"x": Shard(dim), "added": Shard(dim)}


def _number_ways(given: Given) -> Iterator[Way]:
    """gate and up of an op that treats each number alike: any dim may be shared."""
    for dim in range(len(given["gate"].shape)):
        yield [Shard(dim)], {"gate": Shard(dim), "up": Shard(dim)}


def _linear_ways(given: Given) -> Iterator[Way]:
    last = len(given["input"].shape) - 1
    for dim in range(last):
        yield [Shard(dim)], {"input": Shard(dim)}
    yield [Shard(last)], {"weight": Shard(0), "bias": Shard(0)}
    if given["bias"] is None:
        yield [Partial()], {"input": Shard(last), "weight": Shard(1)}


def _append_ways(given: Given) -> Iterator[Way]:
    """New keys into a cache [B, H, capacity, D], by batch or heads."""
    heads = ("cache_key", "cache_value", "key", "value")
    yield [], {n: Shard(0) for n in (*heads, "lengths", "new_lens", "dropped")}
    yield [], {n: Shard(1) for n in heads}


def _linears(op: Any, arguments: tuple, keywords: dict) -> list[DTensor]:
    """By `linear`: torch knows no rule for an op that gives a list."""
    x, weights, biases = (*arguments, [])[:3]
    return [_OPS.linear(x, weight, bias) for weight, bias in itertools.zip_longest(weights, biases)]


_OF_ALL_RANKS = ("q_offsets", "kv_lens", "alibi_slopes", "dropout_seed")


def _with_replicated_lengths(op: Any, arguments: tuple, keywords: dict) -> Any:
    """Lengths, offsets and slopes that modules make are plain tensors, the same on all ranks. Heads and masks must be
    DTensors: a plain one may be a share. A seed comes from each rank's own generator: all take that of the first."""
    mesh = next(x.device_mesh for x in arguments if isinstance(x, DTensor))
    everywhere = [Replicate()] * mesh.ndim

    def whole(name: str, x: Any) -> Any:
        if name not in _OF_ALL_RANKS or not isinstance(x, torch.Tensor) or isinstance(x, DTensor):
            return x
        if name == "dropout_seed":
            return distribute_tensor(x, mesh, everywhere)
        return DTensor.from_local(x, mesh, everywhere, run_check=False)

    given = [whole(argument.name, x) for argument, x in zip(op._schema.arguments, arguments, strict=False)]
    handlers = DTensor._op_dispatcher._custom_op_handlers
    with _lock:
        handlers.pop(op)  # torch's own way, by the rules
        try:
            return tuple(_in_declared_layout(x) for x in op(*given, **keywords))
        finally:
            handlers[op] = _with_replicated_lengths


_lock = threading.RLock()


def _in_declared_layout(x: Any) -> Any:
    """x, whose share lies as x says that the whole does: torch makes views of it by the strides of the whole. A kernel
    lays its output as the query, and a query that torch has moved lies in other strides than it says."""
    if not isinstance(x, DTensor):
        return x
    share = x.to_local()
    order = sorted(range(x.ndim), key=lambda dim: (-x.stride(dim), dim))
    if share.permute(order).is_contiguous():
        return x
    back = sorted(range(x.ndim), key=order.__getitem__)
    laid = share.permute(order).contiguous().permute(back)
    return DTensor.from_local(laid, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def _apply_rope(op: Any, arguments: tuple, keywords: dict) -> DTensor:
    """On the shares of x as they are, unless its last dim is divided. Tables that are plain tensors are the same on all
    ranks: they are made of positions and frequencies."""
    x, cos, sin, interleaved = arguments
    x = _moved(x, lambda p: p if isinstance(p, Shard) and p.dim < x.ndim - 1 else Replicate())

    def share_of(table: Any) -> torch.Tensor:  # broadcast to [..., L, r/2], right-aligned with x
        def place(p: Placement) -> Placement:
            axis = p.dim - x.ndim + table.ndim if isinstance(p, Shard) else -1
            return Shard(axis) if axis >= 0 and table.shape[axis] != 1 else Replicate()

        return _share(table, x.device_mesh, [place(p) for p in x.placements])

    out = op(x.to_local(), share_of(cos), share_of(sin), interleaved)
    return DTensor.from_local(out, x.device_mesh, x.placements, shape=x.shape, stride=x.stride())


def _append_rotated(op: Any, arguments: tuple, keywords: dict) -> DTensor:
    """As `_append_ways` says. torch would take the cache for the result of an op whose name ends in an underscore."""
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, arguments, strict=False))
    cache = given["cache_key"]
    _check_stays(
        op, given, ["cache_key", "cache_value", "lengths"], [{}, *(places for _, places in _append_ways(given))]
    )
    by_batch = [p if p == Shard(0) else Replicate() for p in cache.placements]
    heads = ("cache_key", "cache_value", "query", "key", "value")
    local = {
        name: _share(x, cache.device_mesh, cache.placements if name in heads else by_batch)
        if isinstance(x, torch.Tensor)
        else x
        for name, x in given.items()
    }
    out = op(*local.values(), **keywords)
    query = given["query"]
    return DTensor.from_local(out, cache.device_mesh, cache.placements, shape=query.shape, stride=query.stride())


def _moved(x: DTensor, place: Callable[[Placement], Placement]) -> DTensor:
    return x.redistribute(placements=[place(p) for p in x.placements])


def _share(x: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """This rank's share of x. A plain tensor is the same on all ranks."""
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return x.redistribute(placements=placements).to_local()


_WAYS: dict[torch._ops.OpOverload, Callable[[Given], Iterator[Way]]] = {
    _OPS.attention.default: _forward_ways,
    _OPS.attention_backward.default: _backward_ways,
    _OPS.attention_quantized.default: _forward_ways,
    _OPS.attention_varlen.default: _varlen_forward_ways,
    _OPS.attention_varlen_backward.default: _varlen_backward_ways,
    _OPS.linear_attention.default: _recurrent_forward_ways,
    _OPS.linear_attention_.default: _recurrent_in_place_ways,
    _OPS.linear_attention_backward.default: _recurrent_backward_ways,
    _OPS.causal_conv1d.default: _conv_forward_ways,
    _OPS.causal_conv1d_backward.default: _conv_backward_ways,
    _OPS.rms_norm.default: _row_ways,
    _OPS.add_rms_norm.default: _sum_ways,
    _OPS.swiglu.default: _number_ways,
    _OPS.null.default: _row_ways,
    _OPS.quantize_rows.default: _row_ways,
    _OPS.linear.default: _linear_ways,
    _OPS.kv_cache_append_.default: _append_ways,
}
_REPLICATED = (
    "dequantize_rows",
    "kv_cache_append_paged_",
    "kv_window_crop",
    "kv_window_slide",
    "rope_table",
    "rope_table_by_length",
)
