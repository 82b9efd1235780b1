"""The attention function that takes the place of transformers' "sdpa"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .attention_function import attention_forward

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NAME = "sdpa"


def replace_sdpa() -> None:
    """Registers `sdpa_forward` under the name "sdpa"."""
    AttentionInterface.register(_NAME, sdpa_forward)


def restore_sdpa() -> None:
    """Registers transformers' own function again, if ours is there."""
    if AttentionInterface()[_NAME] is sdpa_forward:
        AttentionInterface.register(_NAME, sdpa_attention_forward)


def sdpa_forward(
    module: nn.Module,
    query: Tensor,  # [B, Hq, Lq, D]
    key: Tensor,  # [B, Hkv, Lkv, D]
    value: Tensor,  # [B, Hkv, Lkv, Dv]
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """`attention_forward` with the arguments and the meaning of transformers' sdpa. Calls that the operator does not
    take go to transformers' function: continuous batching, exported graphs, soft caps (which sdpa refuses)."""
    if not _is_taken(query, key, value, attention_mask, others):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, position_bias, **others
        )
    return attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, is_causal, position_bias=position_bias,
        output_attentions=None,
    )  # fmt: skip


def _is_taken(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, others: dict[str, Any]) -> bool:
    if any(others.get(name) is not None for name in ("cache", "softcap")) or others.get("output_attentions"):
        return False
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        return False
    heads, lengths = query.size(1), [query.size(2), key.size(2)]
    if mask is not None and (mask.dim() != 4 or list(mask.shape[2:]) != lengths or mask.size(1) not in (1, heads)):
        return False
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        return False
    dtype, device = query.dtype, query.device
    return dtype in _DTYPES and all(x.dtype == dtype and x.device == device for x in (key, value))
