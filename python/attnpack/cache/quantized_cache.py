"""The cache of quantised keys and values."""

from __future__ import annotations

from .kv_cache import KVCache, _native


class QuantizedCache(KVCache):
    """Keeps keys and values as integers of 8 or 4 bits, with one fp16 scale per 32 numbers: 8.5 or 4.5 bits per number
    (see `attnpack.ops.quantize_rows`). With 4 bits, rows are rotated by a Hadamard matrix first.

    A position is quantised when it is appended, and not again. On the CPU, few queries read the integers without an
    expanded copy. It grows as a DynamicCache does. `k` and `v` are expanded copies in the module's dtype. Gradients
    flow through this call's keys and values as if they were exact. RoPE of the kind "dynamic", which rotates stored
    keys again, raises.

    Under a MultiHeadLatentAttention it holds latents: c in 8 bits, the rotated k_rope as it is. A call expands the
    latents of its layer. `k` is [c | k_rope], [B, 1, len, C + R]; `v` is c. 4 bits and exact positions raise there.

    Not thread-safe: appends of two threads to one cache may be lost without an error. Give each thread its own.

    Args:
        bits: 8 or 4.
        exact_first: how many first positions are kept in the module's dtype too (a model's sinks), for all queries.
        exact_last: a query sees the exact numbers of so many positions, its own and those before it. With one of the
            two, attention must be causal, or it raises. After `crop()` the last positions may be exact no longer.
    """

    _kind = "QuantizedCache"

    def __init__(self, bits: int, *, exact_first: int = 0, exact_last: int = 0) -> None:
        self._tensors, self._numbers = _native("quantized_cache")(bits, exact_first, exact_last)

    @property
    def bits(self) -> int:
        return self._part("bits")

    @property
    def exact_first(self) -> int:
        return self._part("exact_first")

    @property
    def exact_last(self) -> int:
        return self._part("exact_last")

    @property
    def kv_lora_rank(self) -> int:
        """C of the latents that the cache holds; 0 for keys and values."""
        return self._part("kv_lora_rank")
