"""Attention over the keys that a selector names, or over entries that stand for windows of keys: the projections, the
selector and native ops."""

from .compressed import CompressedAttention
from .grouped import SparseAttention
from .latent import SparseLatentAttention

__all__ = ["CompressedAttention", "SparseAttention", "SparseLatentAttention"]
