"""The modules that select keys share these: the call of an indexer beside its cache, and what they refuse."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...cache import CrossCache, KVCache, LatentCache, SparseCache, StaticCache, check_kind
from ...errors import wrong_kind
from ...ops import index_keys, nested
from ..sharded_attention import refuse_context_parallel, sharded_attention

IndexCache = LatentCache | StaticCache | None
NORM_EPS = 1e-6  # of the norm of an indexer's keys


def name_keys(
    tokens: tuple[Tensor, Tensor, Tensor],  # queries, keys and weights of an indexer
    top_k: int,
    num_local: int,
    head_dim: int,
    shared_cache: SparseCache | LatentCache | None,
    index_cache: IndexCache,
    settings: dict[str, Any],
) -> Tensor | None:
    """The keys that an indexer names, None for all. Its keys go into `shared_cache` or `index_cache`."""
    key, length = tokens[1], tokens[1].size(2)
    room = None
    if index_cache is not None:
        room = index_cache.reserve_latents(key, head_dim)
    elif shared_cache is not None:
        room = shared_cache.reserve_index(key)
    named = index_keys(*tokens, top_k, num_local, cache=room, **settings)
    if index_cache is not None:
        index_cache.commit(length, settings["kv_lens"])
    keys = length if room is None else room[0].size(2)
    # A traced graph must be right for other lengths too, where the keys named are not all.
    return named if torch.compiler.is_compiling() or named.size(3) < keys else None


def check_selects(module: str, x: Tensor, cache: KVCache | None, caches: str) -> None:
    """Raises for calls that a module that selects keys does not take."""
    if nested.is_nested(x):
        raise ValueError(f"attnpack: x: got a nested tensor, {module} wants a padded one and kv_lens")
    refuse_context_parallel(module, "leave context_parallel for its layers")
    check_kind(cache, KVCache, module)
    if isinstance(cache, CrossCache):
        refuse("cache", f"got a CrossCache, but {module} selects among the keys of x; use {caches}")
    if sharded_attention(cache) is not None:
        refuse("cache", "got one that is sharded over processes, want one that this process holds whole")


def check_index_cache(module: str, cache: KVCache | None, index_cache: IndexCache, holder: type) -> None:
    """Raises unless the indexer's keys have one place, or none without a cache. `holder` is the cache that has them
    beside its own."""
    if isinstance(cache, holder):
        if index_cache is not None:
            words = f"got one beside a {holder.__name__}, which holds the indexer's keys; leave it out"
            refuse("index_cache", words)
        return
    if (cache is None) != (index_cache is None):
        got = "none beside cache" if index_cache is None else "one without cache"
        refuse(
            "index_cache",
            f"got {got}, want both or none: the indexer's keys lie in a LatentCache of their own, or with the "
            f"others in a {holder.__name__}",
        )
    if not isinstance(index_cache, StaticCache):
        check_kind(index_cache, LatentCache, module, "a LatentCache() or a StaticCache", name="index_cache")
    if torch.compiler.is_compiling():  # a graph has no numbers to compare
        return
    if index_cache is not None and len(index_cache) != len(cache):
        refuse(
            "index_cache",
            f"holds {len(index_cache)} positions, cache {len(cache)}, want as many: give both to the same calls",
        )


def check_norm(name: str, norm: nn.Module | None) -> None:
    """Raises for a norm that the twin does not have."""
    if norm is not None and (type(norm) is not nn.LayerNorm or norm.eps != NORM_EPS):
        raise TypeError(
            f"attnpack: {name} is {norm}, C++ has LayerNorm with eps {NORM_EPS:g} there. Set that eps, or call the "
            "Python module"
        )


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise wrong_kind(name, value, "True or False")


def refuse(name: str, words: str) -> NoReturn:
    raise ValueError(f"attnpack: {name}: {words}")
