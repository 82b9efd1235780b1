"""Converts one variant of attention to another: to fewer key-value heads or to latent attention. It also splits and
fuses projections.

`pool_kv_heads` works on one weight, `merge_kv_heads` on a layer's weights. `to_gqa`, `to_mqa` and `to_mla` work on
modules and on models. `from_torch` takes layers of torch.nn. The command `attnpack convert` works on whole checkpoints,
and `checkpoint_to_mla` is its form for latent attention.
"""

from .checkpoint.to_mla import LatentReport, checkpoint_to_mla
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
