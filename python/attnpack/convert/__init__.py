"""One variant of attention as another: fewer key-value heads, latent attention, fused projections apart and together.

`pool_kv_heads` works on one weight, `merge_kv_heads` on a layer's weights, `to_gqa`, `to_mqa` and `to_mla` on
modules (the first two on models too);
`attnpack convert` does whole checkpoints.
"""

from .heads import layer_error, similar_groups, to_gqa, to_mqa
from .latent import to_mla
from .weights import LayerWeights, fuse_qkv, merge_kv_heads, pool_kv_heads, split_qkv

__all__ = [
    "LayerWeights",
    "fuse_qkv",
    "layer_error",
    "merge_kv_heads",
    "pool_kv_heads",
    "similar_groups",
    "split_qkv",
    "to_gqa",
    "to_mla",
    "to_mqa",
]
