"""Export to ONNX: attnpack's ops as nodes of opset 23, for ``torch.onnx.export(dynamo=True)``.

Needs onnxscript. Caches are not exported: their ops write into tensors.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch

from .extras import install_command

INT64, FLOAT, DOUBLE, BOOL = 7, 1, 11, 9  # numbers of ONNX's dtypes
_FAR = 1 << 60  # larger than any length

# torch's exporter does not read `X | None`.
_Integers, _Number = Optional[Sequence[int]], Optional[float]  # noqa: UP045


def translation_table() -> dict[Any, Callable]:
    """The translations of attnpack's ops, for ``torch.onnx.export``.

    `attention` becomes one `Attention` node. Window, `kv_lens` and `q_offset` go into its bool mask, ALiBi into its
    float mask. With sinks, a scale <= 0, or softcap under a mask, it becomes the nodes of the formula: the node has no
    sinks, and runtimes differ in the order of softcap and mask. `head_map` gathers kv heads.

    Example::

        torch.onnx.export(model.eval(), (x,), dynamo=True, opset_version=23,
                          custom_translation_table=attnpack.onnx.translation_table())

    Returns:
        A dict from ops (`torch.ops.attnpack.attention.default`, ...) to functions that write ONNX nodes.

    Raises:
        ImportError: onnxscript is missing.
        ValueError: during the export, for dropout, for packed sequences, and for RoPE whose frequencies follow the
            length.
    """
    _op()
    ops = torch.ops.attnpack
    return {
        ops.attention.default: _attention,
        ops.attention_varlen.default: _refuse_packed,
        ops.key_products.default: _key_products,
        ops.apply_rope.default: _apply_rope,
        ops.rope_table.default: _rope_table,
        ops.rope_table_by_length.default: _rope_table_by_length,
        ops.rms_norm.default: _rms_norm,
        ops.linear.default: _linear,
        torch.ops.aten.sort.stable: _stable_sort,  # of the keys that are chosen
    }


def _op() -> Any:
    try:
        from onnxscript import opset23
    except ModuleNotFoundError as error:
        raise ImportError(
            f"attnpack.onnx needs onnxscript, and {error.name} is not installed: run `{install_command('onnx')}`"
        ) from None
    return opset23


# Tensors have no annotation here: torch reads an annotation as that of an ONNX attribute.
def _attention(query, key, value, mask=None, q_offset=0, q_offsets=None, kv_lens=None, dropout_seed=None,
               key_index=None, key_block: int = 1, causal: bool = False, window_left: int = -1, window_right: int = -1,
               chunk: _Number = None, softcap: float = 0.0, sinks=None, alibi_slopes=None, head_map: _Integers = None,
               dropout_p: float = 0.0, scale: _Number = None):  # fmt: skip
    if dropout_p > 0:
        raise ValueError(f"dropout_p is {dropout_p}, wants 0 for ONNX: call .eval() on the model before the export")
    op = _op()
    head_dim = query.shape[3]
    factor = scale if scale is not None else 1 / math.sqrt(head_dim) if head_dim else 1.0
    heads, kv_heads = query.shape[1], key.shape[1]
    every_head = list(head_map) if head_map is not None else [h // (heads // kv_heads) for h in range(heads)]
    keys, values = key, value
    if every_head != list(range(kv_heads)):
        index = op.Constant(value_ints=every_head)
        keys, values = op.Gather(key, index, axis=1), op.Gather(value, index, axis=1)
    if head_map is not None:  # the node groups heads in one way
        key, value = keys, values
    places = _Places(op, query, key, q_offset, q_offsets)
    left_to_node = causal and places.begin_at_zero
    allowed = places.allowed(causal and not left_to_node, window_left, window_right, chunk, kv_lens)
    if key_index is not None:
        selected = _selected_keys(op, key, key_index, key_block, every_head if kv_heads > 1 else None)
        allowed = selected if allowed is None else op.And(allowed, selected)
    mask, bias = (mask, None) if mask is None or mask.dtype == BOOL else (None, mask)
    if mask is not None:
        allowed = mask if allowed is None else op.And(allowed, mask)
    if alibi_slopes is not None:
        slopes = op.Unsqueeze(op.Cast(alibi_slopes, to=FLOAT), op.Constant(value_ints=[1, 2]))
        distance = op.Cast(op.Abs(op.Sub(places.rows, places.columns)), to=FLOAT)
        lines = op.Neg(op.Mul(slopes, distance))
        bias = lines if bias is None else op.Add(op.Cast(bias, to=FLOAT), lines)
    scores = _scores(op, query, keys, factor, softcap)
    every = places.allowed(causal, -1, -1, None, None) if left_to_node else None
    every = allowed if every is None else every if allowed is None else op.And(every, allowed)
    masked = scores
    if bias is not None:
        masked = op.Add(masked, op.CastLike(bias, masked))
    if every is not None:
        masked = op.Where(every, masked, op.CastLike(op.Constant(value_float=-math.inf), masked))
    # Runtimes refuse a scale that is not positive.
    if sinks is not None or factor <= 0 or (softcap > 0 and (every is not None or bias is not None)):
        probs, lse = _softmax(op, masked, sinks)
        out = op.CastLike(op.MatMul(probs, op.CastLike(values, probs)), query)
        return out, lse
    attn_mask = _joined(op, allowed, bias, query)
    if attn_mask is not None:
        attn_mask = op.Expand(attn_mask, op.Concat(op.Constant(value_ints=[1, 1]), places.sizes, axis=0))
    out, *_ = op.Attention(
        query, key, value, attn_mask, is_causal=int(left_to_node), scale=float(factor), softcap=float(softcap)
    )
    if attn_mask is not None:  # a row without keys gives 0; older runtimes give NaN
        read = every
        if bias is not None:
            finite = op.Greater(op.Cast(bias, to=FLOAT), op.Constant(value_float=-math.inf))
            read = finite if read is None else op.And(read, finite)
        any_read = op.ReduceMax(op.Cast(read, to=FLOAT), op.Constant(value_ints=[-1]), keepdims=1)
        out = op.Where(op.Cast(any_read, to=BOOL), out, op.CastLike(op.Constant(value_float=0.0), out))
    return out, _softmax(op, masked, None)[1]  # the exporter drops lse if nobody reads it


def _refuse_packed(query, key, value, cu_seqlens_q, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
                   block_table=None, kv_lens=None, q_offset=None, q_offsets=None, dropout_seed=None,
                   causal: bool = False, window_left: int = -1, window_right: int = -1, chunk: _Number = None,
                   softcap: float = 0.0, sinks=None, alibi_slopes=None, head_map: _Integers = None,
                   dropout_p: float = 0.0, scale: _Number = None):  # fmt: skip
    raise ValueError(
        "attention_varlen takes packed sequences, which ONNX's Attention node does not: export the model with padded "
        "tensors and kv_lens"
    )


def _selected_keys(op, key, key_index, key_block, every_head):
    """Whether a row names a key, a bool mask [B, 1 or Hq, Lq, Lkv]."""
    last = op.Constant(value_ints=[-1])
    columns = op.Range(op.Constant(value_int=0), op.Squeeze(op.Shape(key, start=2, end=3)), op.Constant(value_int=1))
    blocks = op.Div(columns, op.Constant(value_int=key_block))
    same = op.Equal(op.Unsqueeze(op.Cast(key_index, to=INT64), last), blocks)  # [B, 1 or Hkv, Lq, n, Lkv]
    selected = op.Cast(op.ReduceMax(op.Cast(same, to=FLOAT), op.Constant(value_ints=[-2]), keepdims=0), to=BOOL)
    if every_head is None or key_index.shape[1] == 1:
        return selected
    return op.Gather(selected, op.Constant(value_ints=every_head), axis=1)


class _Places:
    """Where queries and keys stand: rows [B or 1, 1, Lq, 1] or [Lq, 1], columns [Lkv]."""

    def __init__(self, op, query, key, q_offset, q_offsets) -> None:
        self.op = op
        begin, step, last = op.Constant(value_int=0), op.Constant(value_int=1), op.Constant(value_ints=[-1])
        q_len, kv_len = op.Shape(query, start=2, end=3), op.Shape(key, start=2, end=3)
        self.sizes = op.Concat(q_len, kv_len, axis=0)
        self.columns = op.Range(begin, op.Squeeze(kv_len), step)
        self.count = op.Unsqueeze(op.Range(begin, op.Squeeze(q_len), step), last)
        self.offset = q_offset if isinstance(q_offset, int) and q_offsets is None else 0
        self.begin_at_zero = q_offsets is None and isinstance(q_offset, int) and q_offset == 0
        if q_offsets is not None or not isinstance(q_offset, int):  # known when the model runs
            offset = op.Cast(q_offset if q_offsets is None else q_offsets, to=INT64)
            offset = op.Clip(offset, op.Constant(value_int=-_FAR), op.Constant(value_int=_FAR))
            if q_offsets is not None:
                offset = op.Unsqueeze(offset, op.Constant(value_ints=[1, 2, 3]))
            self.count = op.Add(self.count, offset)
        self.rows = self.moved(0)

    def moved(self, by: int):
        """The positions of the rows, moved by a number of any size."""
        by = max(-_FAR, min(self.offset + by, _FAR))
        return self.op.Add(self.count, self.op.Constant(value_int=by)) if by else self.count

    def allowed(self, causal, window_left, window_right, chunk, kv_lens):
        """Whether a query may attend a key, a bool mask; None where all may."""
        op = self.op
        conditions = []
        if causal:
            conditions.append(op.LessOrEqual(self.columns, self.rows))
        if window_left >= 0:
            conditions.append(op.GreaterOrEqual(self.columns, self.moved(-window_left)))
        if window_right >= 0:
            conditions.append(op.LessOrEqual(self.columns, self.moved(window_right)))
        if chunk is not None:
            size = op.Constant(value_int=chunk)
            begin = op.Sub(self.rows, op.Mod(self.rows, size))  # Mod has the sign of chunk
            conditions.append(op.GreaterOrEqual(self.columns, begin))
            conditions.append(op.Less(self.columns, op.Add(begin, size)))
        if kv_lens is not None:
            each = op.Unsqueeze(op.Cast(kv_lens, to=INT64), op.Constant(value_ints=[1, 2, 3]))
            conditions.append(op.Less(self.columns, each))
        if not conditions:
            return None
        result = conditions[0]
        for condition in conditions[1:]:
            result = op.And(result, condition)
        return result


def _scores(op, query, keys, factor, softcap):
    wide = DOUBLE if query.dtype == DOUBLE else FLOAT
    scores = op.MatMul(op.Cast(query, to=wide), op.Transpose(op.Cast(keys, to=wide), perm=[0, 1, 3, 2]))
    scores = op.Mul(scores, op.CastLike(op.Constant(value_float=float(factor)), scores))
    if softcap > 0:
        cap = op.CastLike(op.Constant(value_float=float(softcap)), scores)
        scores = op.Mul(op.Tanh(op.Div(scores, cap)), cap)
    return scores


def _softmax(op, scores, sinks):
    """Probabilities, 0 in a row without keys, and lse."""
    last = op.Constant(value_ints=[-1])
    every = scores
    if sinks is not None:
        column = op.Unsqueeze(op.CastLike(sinks, scores), op.Constant(value_ints=[0, 2, 3]))
        shape = op.Concat(op.Shape(scores, start=0, end=3), op.Constant(value_ints=[1]), axis=0)
        every = op.Concat(scores, op.Expand(column, shape), axis=-1)
    infinite = op.CastLike(op.Constant(value_float=-math.inf), scores)
    zero = op.CastLike(op.Constant(value_float=0.0), scores)
    highest = op.ReduceMax(every, last, keepdims=1)
    base = op.Where(op.Equal(highest, infinite), zero, highest)
    total = op.ReduceSum(op.Exp(op.Sub(every, base)), last, keepdims=1)
    lse = op.Add(op.Log(total), base)
    weights = op.Exp(op.Sub(scores, base))
    probs = op.Where(op.Equal(total, zero), zero, op.Div(weights, total))
    return probs, op.Squeeze(lse, last)


def _key_products(query, key):
    """Each query with every key, [B, Hq, Lq, Lkv]; the rows of a group are rows of one matrix."""
    op = _op()
    wide = DOUBLE if query.dtype == DOUBLE else FLOAT
    rows = op.Reshape(op.Cast(query, to=wide), op.Constant(value_ints=[0, key.shape[1], -1, query.shape[3]]))
    products = op.MatMul(rows, op.Transpose(op.Cast(key, to=wide), perm=[0, 1, 3, 2]))
    return op.Reshape(products, op.Concat(op.Shape(query, start=0, end=3), op.Shape(key, start=2, end=3), axis=0))


def _stable_sort(input, stable: Optional[bool] = None, dim: int = -1, descending: bool = False):  # noqa: UP045
    op = _op()
    count = op.Shape(input, start=dim, end=None if dim == -1 else dim + 1)
    return op.TopK(input, count, axis=dim, largest=int(descending), sorted=1)  # of equals, the lower index is first


def _joined(op, allowed, bias, query):
    """One mask for the node: bool, or float in query's dtype."""
    if bias is None or allowed is None:
        return allowed if bias is None else op.CastLike(bias, query)
    bias = op.CastLike(bias, query)
    return op.Where(allowed, bias, op.CastLike(op.Constant(value_float=-math.inf), bias))


def _apply_rope(x, cos, sin, interleaved: bool = False):
    op = _op()
    wide = DOUBLE if x.dtype == DOUBLE else FLOAT
    half, last = cos.shape[-1], op.Constant(value_ints=[-1])
    begin, middle, end = (op.Constant(value_ints=[n]) for n in (0, half, 2 * half))
    rotated = op.Cast(op.Slice(x, begin, end, last), to=wide)
    cos, sin = op.Cast(cos, to=wide), op.Cast(sin, to=wide)
    if interleaved:
        two = op.Constant(value_ints=[2])
        first = op.Slice(rotated, begin, end, last, two)
        second = op.Slice(rotated, op.Constant(value_ints=[1]), end, last, two)
    else:
        first, second = op.Slice(rotated, begin, middle, last), op.Slice(rotated, middle, end, last)
    a, b = op.Sub(op.Mul(first, cos), op.Mul(second, sin)), op.Add(op.Mul(second, cos), op.Mul(first, sin))
    if interleaved:
        pairs = op.Concat(op.Unsqueeze(a, last), op.Unsqueeze(b, last), axis=-1)
        turned = op.Reshape(pairs, op.Shape(rotated))
    else:
        turned = op.Concat(a, b, axis=-1)
    turned = op.CastLike(turned, x)
    if x.shape[-1] == 2 * half:
        return turned
    rest = op.Slice(x, end, op.Constant(value_ints=[x.shape[-1]]), last)
    return op.Concat(turned, rest, axis=-1)


def _rope_table(positions, inv_freq: Sequence[float] = (), factor: float = 1.0):
    op = _op()
    frequencies = op.Constant(value=_double(inv_freq))
    angle = op.Mul(op.Unsqueeze(op.Cast(positions, to=DOUBLE), op.Constant(value_ints=[-1])), frequencies)
    # Reduced in float64, because runtimes lack a cosine of float64.
    angle = op.Cast(op.Mod(angle, op.Constant(value=_double(2 * math.pi)), fmod=1), to=FLOAT)
    length = op.Constant(value_float=float(factor))
    return op.Mul(op.Cos(angle), length), op.Mul(op.Sin(angle), length)


def _double(numbers) -> Any:
    import onnx_ir

    return onnx_ir.tensor(torch.tensor(numbers, dtype=torch.float64).numpy())


def _rope_table_by_length(positions, lengths=None, inv_freq: Sequence[float] = (), factor: float = 1.0,
                          long_inv_freq: Sequence[float] = (), growth: float = 0.0, trained_len: int = 0):  # fmt: skip
    raise ValueError(
        "rope has frequencies that follow the length (dynamic NTK, LongRoPE), which attnpack.onnx does not translate: "
        'export a model with scaling "linear", "ntk", "yarn" or "llama3", or without'
    )


def _rms_norm(x, weight, eps: float = 1e-5):
    op = _op()
    return op.RMSNormalization(x, op.CastLike(weight, x), axis=-1, epsilon=eps)


def _linear(input, weight, bias=None):
    op = _op()
    out = op.MatMul(input, op.Transpose(weight, perm=[1, 0]))
    return out if bias is None else op.Add(out, bias)
