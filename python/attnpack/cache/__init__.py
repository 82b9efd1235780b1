"""KV caches: the memory of one attention layer, and the list of a model's."""

from .cross_cache import CrossCache
from .kv_cache import DynamicCache, KVCache, ModelCache, StaticCache, check_kind, unchanged_on_error
from .latent_cache import LatentCache
from .paged_cache import PagedCache
from .quantized_cache import QuantizedCache
from .recurrent_cache import RecurrentCache
from .sliding_window_cache import SlidingWindowCache
from .sparse_cache import SparseCache

__all__ = [
    "CrossCache",
    "DynamicCache",
    "KVCache",
    "LatentCache",
    "ModelCache",
    "QuantizedCache",
    "PagedCache",
    "RecurrentCache",
    "SlidingWindowCache",
    "SparseCache",
    "StaticCache",
    "check_kind",
    "unchanged_on_error",
]
