"""The cases of `attnpack bench`: shapes of attention calls, with the work and the memory traffic that each needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import DTYPES

COLD_BYTES = 96 << 20  # of keys and values; the caches are emptied between two calls
WARM_BYTES = 1 << 20  # of keys and values that stay in the cache of a core


class Limits(NamedTuple):
    """The largest rates of a machine, per second."""

    flops: float  # fp32
    bf16_flops: float  # the rate of fp32 if bf16 is widened to fp32
    bytes_per_second: float
    fp16_flops: float = 0  # 0: the rate of fp32, because fp16 is widened to fp32


@dataclass(frozen=True)
class Case:
    """One call: B x Hq x Lq queries over Hkv x Lkv keys."""

    section: str
    name: str
    dtype: str
    num_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int
    batch: int = 1
    causal: bool = False
    backward: bool = False
    cold: bool = False  # keys and values come from memory
    latent: bool = False  # values are the first v_head_dim columns of the keys, and are not read again

    @property
    def flops(self) -> float:
        """Two operations per multiply-add. Causality halves them; the backward pass counts as 2.5 forwards (Dao et al.
        2022)."""
        pairs = self.batch * self.num_heads * self.q_len * self.kv_len * (0.5 if self.causal else 1)
        return 2 * pairs * (self.head_dim + self.v_head_dim) * (3.5 if self.backward else 1)

    @property
    def bytes(self) -> int:
        """Bytes that a forward must read or write at least once."""
        width = self.head_dim if self.latent else self.head_dim + self.v_head_dim
        rows = self.batch * self.num_heads * self.q_len * (self.head_dim + self.v_head_dim)
        return (self.batch * self.num_kv_heads * self.kv_len * width + rows) * DTYPES[self.dtype].itemsize

    def limit_seconds(self, limits: Limits) -> float:
        """The least time that a machine of these limits needs (the roofline, Williams et al. 2009)."""
        rates = {"bf16": limits.bf16_flops, "fp16": limits.fp16_flops}
        flops = rates.get(self.dtype) or limits.flops
        return max(self.flops / flops, self.bytes / limits.bytes_per_second)


def cases(sections: list[str], dtypes: list[str], *, quick: bool = False, device: str = "cpu") -> Iterator[Case]:
    for section in sections:
        for dtype in dtypes:
            yield from SECTIONS[section](dtype, quick)
            if device == "cuda" and section in _CUDA:
                yield from _CUDA[section](dtype)


def _decode(dtype: str, quick: bool) -> Iterator[Case]:
    for temperature, size in (("cold", COLD_BYTES), ("warm", WARM_BYTES)):
        for heads, kv_heads, dim in ((32, 32, 128), (32, 8, 128), (64, 8, 128), (9, 3, 64), (32, 1, 128)):
            tokens = size // (2 * kv_heads * dim * DTYPES[dtype].itemsize)
            name = f"decode {heads}/{kv_heads} D{dim} {tokens} keys, {temperature}"
            yield Case("decode", name, dtype, heads, kv_heads, 1, tokens, dim, dim, cold=temperature == "cold")
    if not quick:
        tokens = COLD_BYTES // (8 * 2 * 8 * 128 * DTYPES[dtype].itemsize)
        name = f"decode 32/8 D128 {tokens} keys, batch 8"
        yield Case("decode", name, dtype, 32, 8, 1, tokens, 128, 128, batch=8, cold=True)


def _prefill(dtype: str, quick: bool) -> Iterator[Case]:
    for length in (1024,) if quick else (1024, 2048, 4096, 8192):
        for heads, kv_heads, dim in ((8, 8, 64), (8, 2, 128)):
            for causal in (False, True):
                name = f"prefill {heads}/{kv_heads} D{dim} L{length}{' causal' if causal else ''}"
                yield Case("prefill", name, dtype, heads, kv_heads, length, length, dim, dim, causal=causal)


def _train(dtype: str, quick: bool) -> Iterator[Case]:
    for heads, kv_heads, dim in ((8, 8, 64), (8, 2, 128), (8, 1, 64)):
        for causal in (False, True):
            name = f"forward + backward {heads}/{kv_heads} D{dim} L1024{' causal' if causal else ''}"
            yield Case("train", name, dtype, heads, kv_heads, 1024, 1024, dim, dim, causal=causal, backward=True)


def _latent(dtype: str, quick: bool) -> Iterator[Case]:
    for heads in (16, 128):
        tokens = (8 << 20 if quick else 32 << 20) // (576 * DTYPES[dtype].itemsize)
        name = f"latent decode {heads} heads, {tokens} keys"
        yield Case("latent", name, dtype, heads, 1, 1, tokens, 576, 512, latent=True)
    yield Case("latent", "latent prefill 192/128 L1024 causal", dtype, 8, 8, 1024, 1024, 192, 128, causal=True)


def _small(dtype: str, quick: bool) -> Iterator[Case]:
    for length in (1, 16):
        yield Case("small", f"small 4/4 D64 L{length}", dtype, 4, 4, length, length, 64, 64)


SECTIONS = {"decode": _decode, "prefill": _prefill, "train": _train, "latent": _latent, "small": _small}


def _cuda_decode(dtype: str) -> Iterator[Case]:
    """Keys and values that exceed the L2 cache of any device; groups of 1 to 16 heads, 1 to 8 queries. Before them a
    short cache, where launches and the join of parts count most."""
    yield Case("decode", "decode 32/8 D128 4096 keys", dtype, 32, 8, 1, 4096, 128, 128, cold=True)
    for heads, kv_heads in ((8, 8), (32, 8), (128, 8)):
        for q_len in (1, 2, 8):
            tokens = (512 << 20) // (2 * kv_heads * 128 * DTYPES[dtype].itemsize)
            name = f"decode {heads}/{kv_heads} D128 {tokens} keys, {q_len} queries"
            yield Case("decode", name, dtype, heads, kv_heads, q_len, tokens, 128, 128)


def _cuda_prefill(dtype: str, backward: bool = False) -> Iterator[Case]:
    for causal in (False, True):
        name = f"{'forward + backward' if backward else 'prefill'} 32/8 D128 L8192{' causal' if causal else ''}"
        section = "train" if backward else "prefill"
        yield Case(section, name, dtype, 32, 8, 8192, 8192, 128, 128, causal=causal, backward=backward)


def _cuda_latent(dtype: str) -> Iterator[Case]:
    for heads in (16, 32, 128):
        tokens = (512 << 20) // (8 * 576 * DTYPES[dtype].itemsize)
        name = f"latent decode {heads} heads, {tokens} keys, batch 8"
        yield Case("latent", name, dtype, heads, 1, 1, tokens, 576, 512, batch=8, latent=True)


_CUDA = {
    "decode": _cuda_decode,
    "prefill": _cuda_prefill,
    "train": lambda dtype: _cuda_prefill(dtype, backward=True),
    "latent": _cuda_latent,
}
