"""Converts one variant of attention to another: to fewer key-value heads or to latent attention. It also splits and
fuses projections.

`pool_kv_heads` works on one weight, `merge_kv_heads` on a layer's weights. `to_gqa`, `to_mqa` and `to_mla` work on
modules and on models. `from_torch` takes layers of torch.nn. The command `attnpack convert` works on whole checkpoints,
and `checkpoint_to_mla` is its form for latent attention.
"""

from typing import TYPE_CHECKING, Any

from .from_torch import from_torch
from .heads import layer_error, similar_groups, to_gqa, to_mqa
from .latent import to_mla
from .quantize import quantize_
from .weights import LayerWeights, fuse_qkv, merge_kv_heads, pool_kv_heads, split_qkv

__all__ = [
    "LatentReport",
    "LayerWeights",
    "checkpoint_to_mla",
    "from_torch",
    "fuse_qkv",
    "layer_error",
    "merge_kv_heads",
    "pool_kv_heads",
    "quantize_",
    "similar_groups",
    "split_qkv",
    "to_gqa",
    "to_mla",
    "to_mqa",
]

if TYPE_CHECKING:
    from .checkpoint.to_mla import LatentReport as LatentReport
    from .checkpoint.to_mla import checkpoint_to_mla as checkpoint_to_mla
else:

    def __getattr__(name: str) -> Any:
        """Imports what works on whole checkpoints when it is first used: a layer does not need it."""
        if name in ("LatentReport", "checkpoint_to_mla"):
            from .checkpoint import to_mla as module

            return getattr(module, name)
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
