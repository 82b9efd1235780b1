"""attnpack inside Hugging Face transformers: ``import attnpack.hf; attnpack.hf.register()``."""

from __future__ import annotations

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError as error:
    raise ImportError(
        "attnpack.hf needs transformers 5, which is not installed or is older: pip install 'attnpack[hf]'"
    ) from error

from .hf_attention import attention_forward
from .hf_masks import mask

NAME = "attnpack"


def register() -> None:
    """Makes `attn_implementation="attnpack"` and `model.set_attn_implementation("attnpack")` known to transformers.

    Both the attention and the mask function are registered: without its own mask function transformers would give an
    attention function no mask at all, so that padding and causality vanish without an error.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask)
