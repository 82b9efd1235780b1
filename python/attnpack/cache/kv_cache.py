"""KV caches: plain tensors and a few numbers, whose rules are those of the native caches. Each attention layer has its
own cache, and forward takes it.

A call asks for room with `reserve`, lets the native op write, and counts the new positions with `commit`. If the call
raises, `rollback_on_error` takes the cache back to where it was. B batch, Hkv kv heads, D head dim, Dv that of values.

A cache is not thread-safe: calls that append to one cache must come one after the other. Appends of two threads to one
cache may be lost without an error. Give each thread its own caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .. import _C, cpp
from ..errors import with_article, wrong_kind
from ..ops import CacheTensors

# Where a native cache gives each field of CacheTensors, by the names that it says.
_PLACES = [_C.cpp.room_names().index(field) for field in CacheTensors._fields]


class KVCache:
    """Base class of the caches of one layer. It holds the state of a native cache, and each call asks such a cache. Not
    thread-safe."""

    _kind: str
    """Class of the native cache."""
    _tensors: list[Tensor | None]
    """The tensors of the native cache, in its order; None where it does not hold one yet."""
    _numbers: list[int]
    """The numbers that the native cache keeps beside its tensors, in its order."""
    _places: dict[str, int]
    """Where the native cache has the tensor of each name."""

    def __init__(self) -> None:
        """An empty cache, of a class without settings."""
        self._tensors, self._numbers = _native("new_cache")(self._kind)

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if isinstance(kind := vars(cls).get("_kind"), str):
            cls._places = {name: place for place, name in enumerate(_C.cpp.cache_tensor_names(kind))}

    def _state_names(self) -> dict[str, list[str]]:
        """The names of the tensors and the numbers of the state, by which pickles hold them."""
        return {"_tensors": list(self._places), "_numbers": _C.cpp.cache_number_names(self._kind)}

    def __getstate__(self) -> dict[str, Any]:
        names = self._state_names()
        return self.__dict__ | {part: dict(zip(names[part], getattr(self, part), strict=True)) for part in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        lists = {}
        for part, names in self._state_names().items():
            given = state[part]
            if not isinstance(given, dict) or given.keys() != set(names):
                held = ", ".join(given) or "none" if isinstance(given, dict) else "a list"
                raise ValueError(
                    f"attnpack: state: got {held} as the {part[1:]} of a {self._kind}, want "
                    f"{', '.join(names) or 'none'}: it is of another release of attnpack; fill a new cache"
                )
            lists[part] = [given[name] for name in names]
        self.__dict__ |= state | lists

    def _call_rule(self, rule: str, *arguments: Any) -> Any:
        return _native("cache_" + rule)(self._kind, self._tensors, self._numbers, *arguments)

    def _change(self, rule: str, *arguments: Any) -> None:
        self._tensors, self._numbers = self._call_rule(rule, *arguments)

    def _room(self, rule: str, *arguments: Any) -> CacheTensors:
        """Asks a rule that makes room."""
        self._tensors, self._numbers, tensors, numbers = self._call_rule(rule, *arguments)
        given = *tensors, *numbers
        return CacheTensors(*[given[place] for place in _PLACES])

    def _part(self, name: str) -> Any:
        """The part of the native cache with this name, a tensor or a number; None where it holds none yet."""
        tensors, numbers = self._call_rule("part", name)
        return (*tensors, *numbers)[0]

    def reserve(self, key: Tensor, value: Tensor, new_lens: Tensor | None = None) -> CacheTensors:
        """Tensors with room for the new key [B, Hkv, L, D] and value [B, Hkv, L, Dv], of which new_lens [B] are valid;
        a ValueError if they do not fit the cache."""
        check_lens(new_lens)
        return self._room("reserve", key, value, new_lens)

    def reserve_latents(self, latents: Tensor, kv_lora_rank: int) -> tuple[Tensor, Tensor]:
        """(latents, lengths) with room for the new latents [B, 1, L, kv_lora_rank + rope] of latent attention.

        A latent is key and value at once: it is stored as a key, and the values have width 0.
        """
        room = self._room("reserve_latents", latents, kv_lora_rank)
        return room.key, room.lengths

    def commit(self, new_len: int, new_lens: Tensor | None) -> None:
        """Counts the positions that the op wrote: `new_len` of each sequence, or the valid ones, `new_lens` [B]."""
        self._change("commit", new_len, new_lens)

    def __len__(self) -> int:
        """Length of the longest sequence. A StaticCache on CUDA must wait for the device to know it."""
        return self._call_rule("len")[0]

    def __bool__(self) -> bool:
        """True: an empty cache is a cache."""
        return True

    def __repr__(self) -> str:
        return _C.cpp.describe_cache(type(self).__name__, _lent(self))

    @property
    def lengths(self) -> Tensor:
        """Number of positions held for each sequence, int64 [B]."""
        return self._tensors[self._places["lengths"]]

    @property
    def k(self) -> Tensor | None:
        """Keys [B, Hkv, len, D], a view; None before the first append. If sequences differ in length, the content
        after the end of a shorter one is unspecified."""
        return self._call_rule("views")[0]

    @property
    def v(self) -> Tensor | None:
        """Values [B, Hkv, len, Dv], as `k`."""
        return self._call_rule("views")[1]

    def shared(
        self, x: Tensor, new_lens: Tensor | None, num_kv_heads: int, head_dim: int, v_head_dim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(key, value, lengths) for another layer, whose queries are those of x [B, L, E], new_lens [B] of them valid.
        A ValueError unless the cache holds these positions, and heads of that shape."""
        key, value, lengths = self._call_rule("shared", x, new_lens, num_kv_heads, head_dim, v_head_dim)
        return key, value, lengths

    @property
    def nbytes(self) -> int:
        """Bytes of the positions that are stored, without free capacity; of a StaticCache, whose memory is allocated at
        once, bytes of all max_len positions."""
        return self._call_rule("nbytes")[0]

    @property
    def nbytes_allocated(self) -> int:
        """Bytes of the memory that the cache takes, with its free capacity."""
        return self._call_rule("nbytes_allocated")[0]

    def reset(self) -> None:
        """Forgets everything. A StaticCache keeps its memory, the others forget shape and memory too."""
        self._change("reset")

    def crop(self, n: int) -> None:
        """Keeps the first n positions of each sequence."""
        self._change("crop", n)

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Sequence b becomes the former sequence index[b] (beam search); index int64 [B], where B may change, but not
        that of a StaticCache."""
        if torch.compiler.is_compiling() and not isinstance(index, Tensor):
            index = torch.tensor(index, device="cpu")  # an op takes no list in place of a tensor
        self._change("reorder", index)

    def rollback_on_error(self) -> AbstractContextManager[None]:
        """Takes the cache back to where it was if the body raises."""
        return _RollbackOnError([self])

    def _after_rollback(self) -> None:
        """Runs when the former state is there again."""

    def clone(self) -> KVCache:
        """A deep copy. In a compiled function the attributes that a subclass adds stay behind."""
        other = object.__new__(type(self))
        if not torch.compiler.is_compiling():  # torch 2.11 cannot copy a __dict__ in a graph
            other.__dict__.update(self.__dict__)
        other._tensors, other._numbers = self._call_rule("clone")
        return other

    def __copy__(self) -> KVCache:
        """As `clone`: two caches on one memory would write over each other."""
        return self.clone()


class DynamicCache(KVCache):
    """A cache that grows with each append and doubles its capacity when it is full.

    It takes shape, dtype and device from the first append, and again from the first append after `reset()`.

    Not thread-safe: appends of two threads to one cache may be lost without an error. Give each thread its own.
    """

    _kind = "DynamicCache"


class StaticCache(KVCache):
    """Room for `max_len` positions, allocated once; an append past it raises. Compiles with `fullgraph=True` and does
    not recompile as it fills.

    Not thread-safe: appends of two threads to one cache may be lost without an error. Give each thread its own.

    Args:
        batch, num_kv_heads, max_len, head_dim: the shape of the keys, [batch, num_kv_heads, max_len, head_dim].
        v_head_dim: width of the values; default head_dim. For latent attention give 0: its latents are keys and values.
        dtype, device: those of the module that uses the cache; default torch's defaults.
    """

    _kind = "StaticCache"

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
        if device is None:
            device = torch.empty(0).device  # the default one, also while torch.compile traces
        sizes = batch, num_kv_heads, max_len, head_dim, v_head_dim
        self._tensors, self._numbers = _native("static_cache")(*sizes, dtype, device)

    def commit(self, new_len: int, new_lens: Tensor | None) -> None:
        """The op has counted the positions already, in `lengths`."""

    @property
    def max_len(self) -> int:
        return self._part("max_len")


class ModelCache:
    """The caches of a model's layers, in the order of the layers. Not thread-safe: give each thread its own.

    Args:
        layers: the number of layers, which each get a DynamicCache, or a list of caches.
    """

    def __init__(self, layers: int | Iterable[KVCache]) -> None:
        wanted = "the number of the model's layers, or a list with an attnpack cache for each"
        if not isinstance(layers, int | Iterable):
            raise wrong_kind("layers", layers, wanted)
        if isinstance(layers, int):
            layers = (DynamicCache() for _ in cpp.ModelCache(layers).layers)  # which checks the number
        self.layers = list(layers)
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, KVCache):
                raise wrong_kind(f"layers[{i}]", layer, "an attnpack.DynamicCache() or StaticCache")
        if not torch.compiler.is_compiling():
            self._twin()  # raises if it cannot be made of these layers

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

    @property
    def nbytes_allocated(self) -> int:
        """Bytes of the memory that all layers take, with their free capacity."""
        return sum(layer.nbytes_allocated for layer in self.layers)

    def reset(self) -> None:
        for layer in self.layers:
            layer.reset()

    def crop(self, n: int) -> None:
        """Keeps the first n positions of each sequence. If a layer refuses, no layer is cropped."""
        with unchanged_on_error(self):
            for layer in self.layers:
                layer.crop(n)

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Sequence b becomes the former sequence index[b] (beam search); index int64 [B]."""
        filled = self.lengths.size(0) > 0
        for layer in self.layers:
            if not filled or layer.lengths.size(0) > 0:  # a layer without keys of its own holds none
                layer.reorder(index)

    def clone(self) -> ModelCache:
        """A deep copy."""
        return ModelCache([layer.clone() for layer in self.layers])

    def rollback_on_error(self) -> AbstractContextManager[None]:
        """Takes every layer back to where it was if the body raises."""
        return _RollbackOnError(self.layers)

    def _twin(self) -> cpp.ModelCache:
        twins = {id(layer): _lent(layer) for layer in self.layers}
        return cpp.ModelCache([twins[id(layer)] for layer in self.layers])

    @contextmanager
    def lent(self) -> Iterator[cpp.ModelCache]:
        """Lends the tensors to a C++ cache; at the end this cache takes over the tensors of the C++ one."""
        twin = self._twin()
        try:
            yield twin
        finally:
            for layer, native in zip(self.layers, twin.layers, strict=True):
                layer._tensors, layer._numbers = _C.cpp.cache_state(native)


def _native(name: str) -> Callable[..., Any]:
    """A function of the native caches: while torch.compile traces it is an op, else pybind's function of that name."""
    return getattr(torch.ops.attnpack if torch.compiler.is_compiling() else _C.cpp, name)


def check_lens(lens: object) -> None:
    """Refuses lengths of a call that are neither a tensor nor None."""
    if lens is not None and not isinstance(lens, Tensor):
        wanted = "an int32 or int64 tensor [batch], or None: torch.tensor() makes one of a list"
        raise wrong_kind("kv_lens", lens, wanted)


def _lent(cache: KVCache) -> cpp.KVCache:
    """A native cache over the tensors of `cache`."""
    return _C.cpp.lend_cache(cache._kind, cache._tensors, cache._numbers)


class _RollbackOnError:
    """A context that takes caches back to where they were if its body raises."""

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self._caches = caches

    def __enter__(self) -> None:
        self._before = [(cache._tensors, cache._numbers, cache.lengths.clone()) for cache in self._caches]

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            for cache, (tensors, numbers, lengths) in zip(self._caches, self._before, strict=True):
                cache._tensors, cache._numbers = tensors, numbers
                cache.lengths.copy_(lengths)
                cache._after_rollback()


def check_kind(cache: object, wanted: type, where: str, fix: str | None = None, name: str = "cache") -> None:
    """Raises TypeError unless cache, the argument `name`, is None or of the kind `wanted`; `where` names the module
    that takes it."""
    if cache is None or isinstance(cache, wanted):
        return
    kind = "attnpack.cpp." * isinstance(cache, cpp.KVCache | cpp.ModelCache) + type(cache).__name__
    usual = (
        "a DynamicCache or StaticCache, one per layer" if wanted is KVCache else "a ModelCache, the list of its layers'"
    )
    raise TypeError(f"attnpack: {name} is {with_article(kind)}, {where} wants {fix or usual}")


def unchanged_on_error(cache: KVCache | ModelCache | None) -> AbstractContextManager[None]:
    """A context for a forward: if it raises, the cache is as it was. While a graph is compiled, the context is empty: a
    compiled graph has no way back."""
    caches = isinstance(cache, KVCache | ModelCache) and not torch.compiler.is_compiling()
    return cache.rollback_on_error() if caches else nullcontext()
