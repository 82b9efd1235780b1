"""One decode step of SparseAttention against GroupedQueryAttention of the same shape, over caches of some lengths.

Each attends 2,048 keys: the best of an indexer, or 32 blocks of 64 keys of the best mean or the greatest product. The
step is the whole layer: projections, rotation, append, choice, attention. Each round times all layers in turn on caches
of their own, which grow by the step; the ratio is the median over the rounds of dense / sparse.
"""

import argparse
import statistics

import attnpack
import torch
from packed import DTYPES, measure

EMBED, HEADS, KV_HEADS, WIDTH = 2048, 16, 4, 128
SELECTORS = {"indexer": {"top_k": 2048, "index_heads": 8},
             "mean": {"selector": "mean", "top_k": 32}, "max": {"selector": "max", "top_k": 32}}  # fmt: skip


def make_layer(selector: str | None, dtype: torch.dtype) -> torch.nn.Module:
    usual = {"causal": True, "rope": attnpack.RotaryEmbedding(WIDTH), "dtype": dtype}
    if selector is None:
        return attnpack.GroupedQueryAttention(EMBED, HEADS, KV_HEADS, **usual).eval()
    return attnpack.SparseAttention(EMBED, HEADS, KV_HEADS, **usual, **SELECTORS[selector]).eval()


def filled(selector: str | None, keys: torch.Tensor) -> attnpack.DynamicCache:
    """A cache of keys [1, Hkv, L, D], which are its values too, without the work of prefill."""
    cache, length = attnpack.DynamicCache() if selector is None else attnpack.SparseCache(), keys.size(2)
    if selector == "indexer":
        cache.reserve_index(keys[:, :1])[0].copy_(keys[:, :1])
    if selector == "mean":
        cache.keep_sums(64, length)
    room = cache.reserve(keys, keys)
    room.key.copy_(keys)
    room.value.copy_(keys)
    room.lengths.fill_(length)
    if selector == "mean":
        room.block_sums[:, :, : length // 64] = keys.unflatten(2, (-1, 64)).sum(3, dtype=torch.float32)
    cache.commit(length, None)
    return cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--keys", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = DTYPES[args.dtype]
    print(f"one decode step, {EMBED} wide, {HEADS} heads, {KV_HEADS} kv heads of {WIDTH}, {args.dtype}, "
          f"{args.threads} threads")  # fmt: skip
    layers = {name or "dense": (name, make_layer(name, dtype)) for name in (None, *SELECTORS)}
    token = torch.randn(1, 1, EMBED, dtype=dtype)
    for length in args.keys:
        keys, calls = torch.randn(1, KV_HEADS, length, WIDTH, dtype=dtype), {}
        for name, (selector, layer) in layers.items():
            cache = filled(selector, keys)
            with torch.no_grad():
                layer(token, cache=cache)  # which doubles the capacity
            calls[name] = lambda layer=layer, cache=cache: layer(token, cache=cache)
        times = measure(calls, args.rounds)
        dense = times.pop("dense")
        shown = f"{length:>7,} keys: dense {statistics.median(dense) * 1e3:7.2f} ms"
        for name, found in times.items():
            ratio = statistics.median(d / t for d, t in zip(dense, found, strict=True))
            shown += f", {name} {statistics.median(found) * 1e3:6.2f} ms ({ratio:.1f}x)"
        print(shown, flush=True)


if __name__ == "__main__":
    main()
