"""FLOP formulas of the ops for ``torch.utils.flop_counter.FlopCounterMode``; `import attnpack` puts them in place.

They count as torch counts its own attention: two FLOPs for a multiply-add, all Lq x Lkv scores whatever a mask or
causality leaves out, two matrix products forward and five backward. So figures compare. With `key_index` each row has
as many scores as it can name keys.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import pairwise
from math import prod
from types import ModuleType

import torch
from torch import Tensor

from ..errors import values_of

Shape = Sequence[int]
_COUNTER = "torch.utils.flop_counter"


def _keys_of_a_row(op: object, key: Shape, given: tuple, by_name: dict) -> int:
    """How many keys a row has: those that it can name, if it names any. given: the arguments as shapes."""
    names = [argument.name for argument in op.default._schema.arguments]
    arguments = dict(zip(names, given, strict=False)) | by_name
    index = arguments.get("key_index")
    return key[2] if index is None else min(key[2], index[3] * arguments.get("key_block", 1))


def attention_flops(query: Shape, key: Shape, value: Shape, *others: object, out_shape: object = None,
                    **by_name: object) -> int:  # fmt: skip
    """FLOPs of a forward call, Q K^T and P V, from the shapes [B, Hq, Lq, D], [B, Hkv, Lkv, D], [B, Hkv, Lkv, Dv]."""
    keys = _keys_of_a_row(torch.ops.attnpack.attention, key, (query, key, value, *others), by_name)
    return 2 * prod(query[:3]) * keys * (query[3] + value[3])


def attention_backward_flops(grad_out: Shape, grad_lse: Shape | None, query: Shape, key: Shape, value: Shape,
                             *others: object, out_shape: object = None, **by_name: object) -> int:  # fmt: skip
    """FLOPs of a backward call: Q K^T again, dO V^T, P^T dO, dS K and dS^T Q."""
    given = (grad_out, grad_lse, query, key, value, *others)
    keys = _keys_of_a_row(torch.ops.attnpack.attention_backward, key, given, by_name)
    return 2 * prod(query[:3]) * keys * (3 * query[3] + 2 * value[3])


def _pairs(query: Tensor, key: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None,
           kv_lens: Tensor | None = None) -> int:  # fmt: skip
    """The pairs of rows and keys of all sequences. Ends whose values are not known, while a graph is traced, count as
    one sequence, which has all keys of a pool."""
    if kv_lens is not None:
        ends, keys = values_of(cu_seqlens_q), values_of(kv_lens)
        if ends is None or keys is None:
            return query.size(0) * key.size(0) * key.size(1)
        return sum((b - a) * n for (a, b), n in zip(pairwise(ends), keys, strict=True))
    ends = [cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k]
    values = [values_of(x) for x in ends]
    if None in values:
        return query.size(0) * key.size(0)
    rows, keys = ([b - a for a, b in pairwise(x)] for x in values)
    return sum(r * k for r, k in zip(rows, keys, strict=True))


def varlen_flops(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor,
                 cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
                 block_table: Tensor | None = None, kv_lens: Tensor | None = None, *_, out_val: object = None,
                 **__) -> int:  # fmt: skip
    """FLOPs of a forward call of packed sequences: the sum over the sequences."""
    pairs = query.size(1) * _pairs(query, key, cu_seqlens_q, cu_seqlens_k, kv_lens)
    return 2 * pairs * (query.size(-1) + value.size(-1))


def varlen_backward_flops(grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor,
                          out: Tensor, lse: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, *_,
                          out_val: object = None, **__) -> int:  # fmt: skip
    """FLOPs of a backward call of packed sequences."""
    pairs = query.size(1) * _pairs(query, key, cu_seqlens_q, cu_seqlens_k)
    return 2 * pairs * (3 * query.size(2) + 2 * value.size(2))


def linear_flops(input: Shape, weight: Shape, *_, **__) -> int:
    """FLOPs of input [..., in] times weight [out, in]."""
    return 2 * prod(input) * weight[0]


def linears_flops(input: Shape, weights: Sequence[Shape], *_, **__) -> int:
    """FLOPs of one input [..., in] times several weights, each [out, in]."""
    return sum(linear_flops(input, weight) for weight in weights)


def linear_attention_flops(query: Shape, key: Shape, value: Shape, *given: Shape | None, out_shape: object = None,
                           **by_name: object) -> int:  # fmt: skip
    """FLOPs of linear attention in chunks of 64 tokens: three products with the states (two without beta), and those of
    the tokens of a chunk with each other, of which half are left out."""
    tokens, widths = prod(value[:3]), query[3] + value[3]
    with_beta = by_name.get("beta", given[1] if len(given) > 1 else None) is not None
    parts = 3 if with_beta else 2
    return tokens * (2 * parts * query[3] * value[3] + 64 * (parts - 1) * widths)


def linear_attention_backward_flops(grad_out: Shape, grad_state: Shape | None, *given: Shape | None,
                                    out_shape: object = None, **by_name: object) -> int:  # fmt: skip
    """FLOPs of its backward pass: each product of the forward pass has two gradients."""
    return 2 * linear_attention_flops(*given, **by_name)


def _register(counter: ModuleType) -> None:
    ops = torch.ops.attnpack
    for op, formula in (
        (ops.attention, attention_flops),
        (ops.attention_backward, attention_backward_flops),
        (ops.linear_attention, linear_attention_flops),
        (ops.linear_attention_backward, linear_attention_backward_flops),
        (ops.linear, linear_flops),
        (ops.linears, linears_flops),
    ):
        if op not in counter.flop_registry:
            counter.register_flop_formula(op)(formula)
    # These read the lengths, not only the shapes.
    for op, formula in ((ops.attention_varlen, varlen_flops), (ops.attention_varlen_backward, varlen_backward_flops)):
        if op not in counter.flop_registry:
            counter.register_flop_formula(op, get_raw=True)(formula)


class _RegisterAfterImport(MetaPathFinder):
    """Registers the formulas when a program imports torch's counter, which itself may import Triton."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        load = spec.loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            _register(module)

        spec.loader.exec_module = load_and_register
        return spec


def register() -> None:
    """Gives torch's counter the formulas, now or as soon as it is imported."""
    if _COUNTER in sys.modules:
        _register(sys.modules[_COUNTER])
    else:
        sys.meta_path.insert(0, _RegisterAfterImport())
