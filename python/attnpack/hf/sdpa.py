"""The attention function that takes the place of transformers' "sdpa"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils.import_utils import is_tracing

from .arguments import refuse_parts
from .attention_function import attention_forward
from .masks import is_packed, mask
from .paged import PAGED_ARGUMENTS, is_paged, update_as_theirs

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NAME = "sdpa"


def replace_sdpa() -> None:
    """Registers `sdpa_forward` and `sdpa_mask` under the name "sdpa"."""
    AttentionInterface.register(_NAME, sdpa_forward)
    AttentionMaskInterface.register(_NAME, sdpa_mask)


def restore_sdpa() -> None:
    """Registers transformers' own functions again, if ours are there."""
    if AttentionInterface()[_NAME] is sdpa_forward:
        AttentionInterface.register(_NAME, sdpa_attention_forward)
    if AttentionMaskInterface()[_NAME] is sdpa_mask:
        AttentionMaskInterface.register(_NAME, masking_utils.sdpa_mask)


def sdpa_mask(*arguments: Any, mask_function: Callable = masking_utils.causal_mask_function, **settings: Any) -> Any:
    """The mask of transformers' sdpa. For packed sequences it is attnpack's, which takes no memory."""
    padding = settings.get("attention_mask")
    if is_packed(mask_function) and padding is None and not is_tracing():
        return mask(*arguments, mask_function=mask_function, **settings)
    return masking_utils.sdpa_mask(*arguments, mask_function=mask_function, **settings)


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
    take go to transformers' function: exported graphs, soft caps (which sdpa refuses)."""
    refuse_parts()
    biased_pages = is_paged(others.get("cache")) and position_bias is not None
    if biased_pages or not _is_taken(query, key, value, attention_mask, others):
        key, value = update_as_theirs(module, key, value, others)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, position_bias, **others
        )
    in_pages = is_paged(others.get("cache"))
    paged = {name: others[name] for name in PAGED_ARGUMENTS if in_pages and name in others}
    if paged and attention_mask is not None and attention_mask.size(1) == 1:
        attention_mask = None  # the cache says the same
    return attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, is_causal, position_bias=position_bias,
        output_attentions=None, **paged,
    )  # fmt: skip


def _is_taken(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, others: dict[str, Any]) -> bool:
    if others.get("softcap") is not None or others.get("output_attentions"):
        return False
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        return False
    if is_paged(others.get("cache")):
        mask = None  # the cache says the same
    heads, lengths = query.size(1), [query.size(2), key.size(2)]
    if mask is not None and (mask.dim() != 4 or list(mask.shape[2:]) != lengths or mask.size(1) not in (1, heads)):
        return False
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        return False
    dtype, device = query.dtype, query.device
    return dtype in _DTYPES and all(x.dtype == dtype and x.device == device for x in (key, value))
