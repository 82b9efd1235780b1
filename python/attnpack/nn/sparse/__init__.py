"""Attention over the keys that a selector names: the projections and the selector, and one native op."""

from .grouped import SparseAttention
from .latent import SparseLatentAttention

__all__ = ["SparseAttention", "SparseLatentAttention"]
