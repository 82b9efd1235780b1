"""ONNX nodes `Attention` and `RotaryEmbedding` as calls of attnpack: reshapes, concatenations, other names.

The node test cases come from the `onnx` package, which computes inputs and expected outputs while it is imported.
"""

from __future__ import annotations

import importlib

import numpy as np
import torch
from attnpack import apply_rope, attention, attention_scores
from onnx.backend.test.case import node as onnx_node
from torch import Tensor

# The stages of qk_matmul_output_mode, in its order.
STAGES = ["scaled", "capped", "masked", "probs"]


def collect_cases() -> list:
    """The cases of the two operators; onnx's own collector also makes those of all other operators, which takes
    seconds."""
    for module in ("attention", "rotaryembedding"):
        importlib.import_module(f"{onnx_node.__name__}.{module}")
    # "_expanded" ones are the same inputs and outputs for a graph of many small nodes.
    return [case for case in onnx_node._NodeTestCases if not case.name.endswith("_expanded")]


def to_torch(array: np.ndarray) -> Tensor:
    if array.dtype.name == "bfloat16":  # numpy's comes from ml_dtypes, which torch does not read
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def run_node(node, arrays: list[np.ndarray]) -> list[Tensor]:
    """The outputs that the node names, in its order."""
    present = [name for name in node.input if name]
    given = dict(zip(present, map(to_torch, arrays), strict=True))
    # The inputs are known by their places; an absent input has an empty name.
    inputs = [given[name] if name else None for name in node.input]
    attributes = {a.name: a.f if a.type == a.FLOAT else a.i for a in node.attribute}
    outputs = {"Attention": run_attention, "RotaryEmbedding": run_rope}[node.op_type](*inputs, **attributes)
    return [x for name, x in zip(node.output, outputs, strict=False) if name]


def run_attention(
    query: Tensor,  # [B, Hq, Lq, D], or [B, Lq, Hq * D]; key and value likewise
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad_kv_seqlen: Tensor | None = None,  # [B]: an external cache with so many valid keys
    *,
    scale: float | None = None,
    is_causal: int = 0,
    q_num_heads: int = 0,
    kv_num_heads: int = 0,
    softcap: float = 0.0,
    qk_matmul_output_mode: int = 0,
    softmax_precision: int = 0,  # attnpack's is fp32 or wider
    left_window_size: int = -1,
    right_window_size: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Y, present_key, present_value, qk_matmul_output."""
    flat = query.dim() == 3
    if flat:
        heads = (q_num_heads, kv_num_heads, kv_num_heads)
        query, key, value = (split(x, n) for x, n in zip((query, key, value), heads, strict=True))
    if past_key is not None:
        key, value = torch.cat([past_key, key], dim=2), torch.cat([past_value, value], dim=2)
    settings = {
        "causal": bool(is_causal),
        "window": (left_window_size, right_window_size),
        "kv_lens": nonpad_kv_seqlen,
        "softcap": softcap,
        "scale": scale,
        # The queries come after the past; an external cache already holds the queries' own keys.
        "q_offset": "end" if nonpad_kv_seqlen is not None else 0 if past_key is None else past_key.shape[2],
    }
    mask = fill_up(attn_mask, key.shape[2])
    out = attention(query, key, value, mask, **settings)
    scores = attention_scores(query, key, mask, stage=STAGES[qk_matmul_output_mode], **settings)
    # attnpack's scores are never in a low dtype.
    return (join(out) if flat else out), key, value, scores.to(query.dtype)


def run_rope(
    x: Tensor,  # [B, H, L, D], or [B, L, H * D]
    cos: Tensor,  # [B, L, r / 2], or [positions, r / 2] with position_ids
    sin: Tensor,
    position_ids: Tensor | None = None,  # [B, L]
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,  # the width of cos gives it
) -> tuple[Tensor]:
    flat = x.dim() == 3
    x = split(x, num_heads) if flat else x
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    out = apply_rope(x, cos.unsqueeze(1), sin.unsqueeze(1), interleaved=bool(interleaved))
    return (join(out) if flat else out,)


def split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def fill_up(mask: Tensor | None, kv_len: int) -> Tensor | None:
    """Lengthens a mask: it excludes the keys that it does not cover."""
    if mask is None or mask.shape[-1] == kv_len:
        return mask
    excluded = mask.new_full((*mask.shape[:-1], kv_len - mask.shape[-1]), 0 if mask.dtype == torch.bool else -torch.inf)
    return torch.cat([mask, excluded], dim=-1)
