"""The cache of a context, for cross-attention."""

from __future__ import annotations

from torch import Tensor

from .kv_cache import KVCache, check_lens


class CrossCache(KVCache):
    """The keys and values of a context, which cross-attention projects once.

    The first call stores the keys and values of its context, and its kv_lens as `lengths`. Later calls read them: they
    project no context, and need none. A context that is given again is not read, but its batch and length must be those
    of the stored one; without kv_lens a call takes `lengths`. `reset()` makes room for another context. Keys are stored
    before rotation, without history: gradients flow through the first call's keys and values, never through the stored
    ones. `len(cache)` is the length of the context, with its padding.

    Attention modules take it as `cache`, decoder blocks as `cross_cache`, stacks a ModelCache of them.
    MultiHeadLatentAttention and ProjectedAttention refuse it; `crop` raises.

    Not thread-safe while it is filled or changed: let one thread do that. Give each thread its own otherwise.
    """

    _kind = "CrossCache"

    @property
    def filled(self) -> bool:
        """Whether it holds a context."""
        return self._tensors[self._places["key"]] is not None

    def store(self, key: Tensor, value: Tensor, kv_lens: Tensor | None) -> None:
        """Stores copies of key [B, Hkv, Lc, D], before rotation, and value [B, Hkv, Lc, Dv]; kv_lens [B]: how many keys
        of each sequence are valid, default all."""
        check_lens(kv_lens)
        self._change("store", key, value, kv_lens)

    def check_call(self, x: Tensor, context: Tensor | None) -> None:
        """Raises unless a call with x [B, L, E] can read the cache, or fill it with the context [B, Lc, E]."""
        self._call_rule("check_call", x, context)
