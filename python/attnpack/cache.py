"""KV caches: plain tensors and a tensor of lengths. Each attention layer has its own, and forward takes it.

A call asks for room with `reserve`, lets the native op write, and counts the new positions with `commit`. If the op
raises, the cache is as it was. B batch, Hkv kv heads, D head dim, Dv head dim of values.

A cache is not thread-safe: calls that append to one cache must come one after the other. Give each thread its own
caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor

from . import cpp
from .errors import check_dtype, check_size, with_article, wrong_kind


class KVCache:
    """Base class of the caches of one layer."""

    lengths: Tensor
    """Number of positions held for each sequence, int64 [B]."""
    _key: Tensor | None
    _value: Tensor | None

    def reserve(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(key, value, lengths) with room for the new key [B, Hkv, L, D] and value [B, Hkv, L, Dv]; a ValueError if
        they do not fit the cache."""
        raise NotImplementedError

    def reserve_latents(self, latents: Tensor, kv_lora_rank: int) -> tuple[Tensor, Tensor]:
        """(latents, lengths) with room for the new latents [B, 1, L, kv_lora_rank + rope] of latent attention.

        A latent is key and value at once: it is stored as a key, and the values have width 0.
        """
        keys, _, lengths = self.reserve(latents, latents[..., :0])
        return keys, lengths

    def commit(self, new_len: int, new_lens: Tensor | None) -> None:
        """Counts the positions that the op wrote: `new_len` of each sequence, or the valid ones, `new_lens` [B]."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Length of the longest sequence. A StaticCache on CUDA must wait for the device to know it."""
        raise NotImplementedError

    def __bool__(self) -> bool:
        """True: an empty cache is a cache."""
        return True

    def __repr__(self) -> str:
        if self.k is None:
            return f"{type(self).__name__}(len=0)"
        batch, heads, length, dim = self.k.shape
        return (
            f"{type(self).__name__}(batch={batch}, num_kv_heads={heads}, len={length}, head_dim={dim}, "
            f"dtype={self.k.dtype}, bytes={self.nbytes})"
        )

    @property
    def k(self) -> Tensor | None:
        """Keys [B, Hkv, len, D], a view; None before the first append. If sequences differ in length, the content
        after the end of a shorter one is unspecified."""
        return None if self._key is None else self._key[:, :, : len(self)]

    @property
    def v(self) -> Tensor | None:
        """Values [B, Hkv, len, Dv], as `k`."""
        return None if self._value is None else self._value[:, :, : len(self)]

    def crop(self, n: int) -> None:
        """Keeps the first n positions of each sequence."""
        _check_crop(n)
        self.lengths.clamp_(max=n)

    def take_back(self, lengths: Tensor) -> None:
        """Forgets the positions that were appended after `lengths` was copied."""
        self.lengths.copy_(lengths)

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Takes the cache back to where it was if the body raises."""
        before = self.lengths.clone()
        try:
            yield
        except BaseException:
            self.take_back(before)
            raise

    def clone(self) -> KVCache:
        """A deep copy."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        with torch.inference_mode(False), torch.no_grad():
            for name in ("_key", "_value", "lengths"):
                tensor = getattr(self, name)
                setattr(other, name, None if tensor is None else tensor.clone())
        return other

    def _check_fits(self, key: Tensor, value: Tensor) -> None:
        for name, held, new in (("keys", self._key, key), ("values", self._value, value)):
            batch, heads, _, dim = held.shape
            if new.dim() != 4 or (new.size(0), new.size(1), new.size(3)) != (batch, heads, dim):
                raise ValueError(
                    f"attnpack: cache: got {name} of shape {list(new.shape)}, want [{batch}, {heads}, L, {dim}] as the "
                    "cache holds; use a cache of this layer's shape, or reset() it"
                )
            if (new.dtype, new.device) != (held.dtype, held.device):
                raise ValueError(
                    f"attnpack: cache: got {name} in {new.dtype} on {new.device}, want {held.dtype} on {held.device} "
                    "as the cache holds; use a cache of the module's dtype and device"
                )


class DynamicCache(KVCache):
    """A cache that grows with each append and doubles its capacity when it is full.

    It takes shape, dtype and device from the first append, and again from the first append after `reset()`.
    """

    def __init__(self) -> None:
        self.reset()

    def reserve(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        need = self._len + key.size(2)
        if self._len == 0:
            lengths = _zeros((key.size(0),), torch.int64, key.device)
            self._room = _grown(key, 0, need), _grown(value, 0, need), lengths
        else:
            self._check_fits(key, value)
            capacity = self._key.size(2)
            if need <= capacity:
                self._room = self._key, self._value, self.lengths
            else:
                capacity = max(need, 2 * capacity)
                grown = (_grown(held, self._len, capacity) for held in (self._key, self._value))
                self._room = *grown, self.lengths
        # Cut to the length after the append, so that a mask over the keys fits.
        keys, values, lengths = self._room
        return keys[:, :, :need], values[:, :, :need], lengths

    def commit(self, new_len: int, new_lens: Tensor | None) -> None:
        self._key, self._value, self.lengths = self._room
        self._room = None
        self._len = _longest(self.lengths) if new_lens is not None else self._len + new_len

    def __len__(self) -> int:
        return self._len

    @property
    def nbytes(self) -> int:
        """Bytes of the len positions that are held, without the free capacity."""
        return sum(held[:, :, : self._len].nbytes for held in (self._key, self._value)) if self._len else 0

    def reset(self) -> None:
        """Forgets everything, shape and memory too."""
        self._len = 0  # a copy of the longest length, so that no call waits for the device
        self._room = self._key = self._value = None
        self.lengths = _zeros((0,), torch.int64, None)

    def crop(self, n: int) -> None:
        _check_crop(n)
        if n == 0:
            self.reset()
            return
        super().crop(n)
        self._len = min(self._len, n)

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Sequence b becomes the former sequence index[b] (beam search); index int64 [B], where B may change."""
        rows = _check_index(index, self.lengths, same_batch=False)
        if self._len:
            with torch.inference_mode(False), torch.no_grad():
                self._key, self._value, self.lengths = (
                    held.index_select(0, rows) for held in (self._key, self._value, self.lengths)
                )
            self._len = _longest(self.lengths)

    def take_back(self, lengths: Tensor) -> None:
        if lengths.numel() == 0:
            self.reset()
            return
        super().take_back(lengths)
        self._len = _longest(lengths)

    def _lend(self) -> cpp.DynamicCache:
        return cpp.DynamicCache.from_tensors(self._key, self._value, self.lengths) if self._len else cpp.DynamicCache()

    def _take(self, native: cpp.DynamicCache) -> None:
        self._key, self._value, self.lengths = native.tensors()
        self._len = len(native)


class StaticCache(KVCache):
    """Room for `max_len` positions, allocated once; an append past it raises. Compiles with `fullgraph=True` and does
    not recompile as it fills.

    Args:
        batch, num_kv_heads, max_len, head_dim: the shape of the keys, [batch, num_kv_heads, max_len, head_dim].
        v_head_dim: width of the values; default head_dim. For latent attention give 0: its latents are keys and values.
        dtype, device: those of the module that uses the cache; default torch's defaults.
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        max_len: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        width = head_dim if v_head_dim is None else v_head_dim
        check_least("batch", batch)
        for name, size in {"num_kv_heads": num_kv_heads, "max_len": max_len, "head_dim": head_dim}.items():
            check_size(name, size)
        check_least("v_head_dim", width)
        check_dtype(dtype)
        self._key = _zeros((batch, num_kv_heads, max_len, head_dim), dtype, device)
        self._value = _zeros((batch, num_kv_heads, max_len, width), dtype, device)
        self.lengths = _zeros((batch,), torch.int64, device)

    @property
    def max_len(self) -> int:
        return self._key.size(2)

    def reserve(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._check_fits(key, value)
        return self._key, self._value, self.lengths

    def commit(self, new_len: int, new_lens: Tensor | None) -> None:
        pass

    def __len__(self) -> int:
        return _longest(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of all max_len positions, which are allocated."""
        return self._key.nbytes + self._value.nbytes

    def reset(self) -> None:
        """Forgets everything, keeps the memory."""
        self.lengths.zero_()

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Sequence b becomes the former sequence index[b] (beam search); index int64 [B]. The batch keeps its size."""
        rows = _check_index(index, self.lengths, same_batch=True)
        with torch.no_grad():
            for held in (self._key, self._value, self.lengths):
                held.copy_(held.index_select(0, rows))

    def _lend(self) -> cpp.StaticCache:
        return cpp.StaticCache.from_tensors(self._key, self._value, self.lengths)

    def _take(self, native: cpp.StaticCache) -> None:
        pass


class ModelCache:
    """The caches of a model's layers, in the order of the layers.

    Args:
        layers: the number of layers, which each get a DynamicCache, or a list of caches.
    """

    def __init__(self, layers: int | Iterable[KVCache]) -> None:
        wanted = "the number of the model's layers, or a list with an attnpack cache for each"
        if not isinstance(layers, int | Iterable):
            raise wrong_kind("layers", layers, wanted)
        self.layers = [DynamicCache() for _ in range(layers)] if isinstance(layers, int) else list(layers)
        if not self.layers:
            raise ValueError("attnpack: layers: got none, want the number of the model's layers or a cache for each")
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, KVCache):
                raise wrong_kind(f"layers[{i}]", layer, "an attnpack.DynamicCache() or StaticCache")
            if any(layer is other for other in self.layers[:i]):
                raise ValueError(f"attnpack: layers[{i}]: got the cache of an earlier layer, want one for each layer")

    def __len__(self) -> int:
        """Length of the longest sequence (the number of layers is `len(cache.layers)`)."""
        return len(self.layers[0])

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"ModelCache({len(self.layers)} layers, bytes={self.nbytes}, first: {self.layers[0]!r})"

    def __iter__(self) -> Iterator[KVCache]:
        return iter(self.layers)

    def __getitem__(self, layer: int) -> KVCache:
        return self.layers[layer]

    @property
    def lengths(self) -> Tensor:
        """Number of positions held for each sequence, int64 [B]; the same in all layers."""
        return self.layers[0].lengths

    @property
    def nbytes(self) -> int:
        """Bytes of all layers together."""
        return sum(layer.nbytes for layer in self.layers)

    def reset(self) -> None:
        for layer in self.layers:
            layer.reset()

    def crop(self, n: int) -> None:
        """Keeps the first n positions of each sequence."""
        for layer in self.layers:
            layer.crop(n)

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Sequence b becomes the former sequence index[b] (beam search); index int64 [B]."""
        for layer in self.layers:
            layer.reorder(index)

    def clone(self) -> ModelCache:
        """A deep copy."""
        return ModelCache([layer.clone() for layer in self.layers])

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Takes every layer back to where it was if the body raises."""
        with ExitStack() as layers:
            for layer in self.layers:
                layers.enter_context(layer.all_or_none())
            yield

    @contextmanager
    def lent(self) -> Iterator[cpp.ModelCache]:
        """Lends the tensors to a C++ cache; at the end this cache takes over the tensors of the C++ one."""
        native = [layer._lend() for layer in self.layers]
        try:
            yield cpp.ModelCache(native)
        finally:
            for layer, twin in zip(self.layers, native, strict=True):
                layer._take(twin)


def _zeros(size: tuple[int, ...], dtype: torch.dtype | None, device: torch.device | str | None) -> Tensor:
    """A normal tensor even under inference_mode, so that a cache made there can be written outside of it too."""
    with torch.inference_mode(False):
        return torch.zeros(size, dtype=dtype, device=device)


def _grown(like: Tensor, length: int, capacity: int) -> Tensor:
    """[B, H, capacity, D]: the first `length` positions of `like`, then zeros."""
    larger = _zeros((*like.shape[:2], capacity, like.size(3)), like.dtype, like.device)
    if length:
        with torch.no_grad():
            larger[:, :, :length] = like[:, :, :length]
    return larger


def _longest(lengths: Tensor) -> int:
    longest = int(lengths.max()) if lengths.numel() else 0
    if longest < 0:
        raise ValueError(
            f"attnpack: the cache's lengths hold {longest}, want 0 or more, the positions held of each sequence: call "
            "reset()"
        )
    return longest


def check_least(name: str, size: int) -> None:
    if not isinstance(size, int) or isinstance(size, bool):
        raise wrong_kind(name, size, "an int")
    if size < 0:
        raise ValueError(f"attnpack: {name}: got {size}, want 0 or more")


def check_kind(cache: object, wanted: type, where: str, fix: str | None = None) -> None:
    """Raises TypeError unless cache is None or of the kind `wanted`; `where` names the module that takes it."""
    if cache is None or isinstance(cache, wanted):
        return
    kind = "attnpack.cpp." * isinstance(cache, cpp.KVCache | cpp.ModelCache) + type(cache).__name__
    usual = (
        "a DynamicCache or StaticCache, one a layer" if wanted is KVCache else "a ModelCache, the list of its layers'"
    )
    raise TypeError(f"attnpack: cache is {with_article(kind)}, {where} wants {fix or usual}")


def unchanged_on_error(cache: KVCache | ModelCache | None) -> AbstractContextManager[None]:
    """A context for a forward: if it raises, the cache is as it was. While a graph is compiled, the context is empty: a
    compiled graph has no way back."""
    caches = isinstance(cache, KVCache | ModelCache) and not torch.compiler.is_compiling()
    return cache.all_or_none() if caches else nullcontext()


def _check_crop(n: int) -> None:
    if not isinstance(n, int):
        raise wrong_kind("n", n, "an int, how many positions to keep")
    if n < 0:
        raise ValueError(f"attnpack: n: got {n}, want how many positions to keep, 0 or more")


def _check_index(index: Tensor | Sequence[int], lengths: Tensor, same_batch: bool) -> Tensor:
    """Checks that index [B] names sequences of the cache, and returns it on the device of lengths."""
    batch = lengths.size(0)
    if isinstance(index, list | tuple | range) and all(isinstance(row, int) for row in index):
        index = torch.tensor(index, dtype=torch.int64)
    if not isinstance(index, Tensor):
        raise wrong_kind("index", index, "int64 sequence numbers [B]: a tensor, or a list of ints")
    if index.dim() != 1 or index.dtype != torch.int64 or (same_batch and index.size(0) != batch):
        want = f"[{batch}]: a StaticCache keeps its batch size" if same_batch else "sequence numbers [B]: call .long()"
        raise ValueError(f"attnpack: index: got {index.dtype} of shape {list(index.shape)}, want int64 {want}")
    # Values on another device are not checked: reading them would wait for that device.
    if batch and index.device.type == "cpu" and not torch.compiler.is_compiling():
        for b, row in enumerate(index.tolist()):
            if not 0 <= row < batch:
                raise ValueError(
                    f"attnpack: index[{b}] is {row}, wants 0 to {batch - 1}: a sequence that the cache holds"
                )
    return index.to(lengths.device)
