"""Modules of attention, each kind in a file of its own."""

from .compressed_attention import CompressedAttention
from .differential_attention import DifferentialAttention
from .grouped_attention import GroupedQueryAttention, MultiHeadAttention, MultiQueryAttention
from .latent_attention import MultiHeadLatentAttention
from .projected_attention import ProjectedAttention
from .self_attention import SelfAttention
from .sparse_attention import SparseAttention
from .sparse_latent_attention import SparseLatentAttention

__all__ = [
    "CompressedAttention",
    "DifferentialAttention",
    "GroupedQueryAttention",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "MultiQueryAttention",
    "ProjectedAttention",
    "SelfAttention",
    "SparseAttention",
    "SparseLatentAttention",
]
