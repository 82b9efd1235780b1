"""Costs of several processes: seconds, bytes sent and memory of a rank, for 1, 2 and 4 gloo processes of one thread.

"context": causal attention over one sequence, forward and backward, by each method of `attnpack.distributed.attention`.
"overlap": the ring, which sends while it computes, and the same ring that waits for each transfer first, in turns, and
only its transfers. "decode": one step of a layer over a ShardedCache. "model": a training step of a small CausalLM
under tensor_parallel. Times are the slowest rank's median over the rounds. "model s" is the cost model of
docs/distributed.md, from the speed of one process and of an all-gather, measured in the same run; processes share the
cores.
"""

import argparse
import os
import statistics
import tempfile
import time

import attnpack
import attnpack.distributed as parallel
import torch
import torch.distributed as dist
import torch.multiprocessing
from attnpack.tools.memory import peak_bytes
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

BATCH, HEADS, KV_HEADS, DIM = 1, 8, 2, 64
METHODS = [("allgather", "contiguous"), ("allgather", "zigzag"), ("ulysses", "contiguous"), ("ring", "contiguous")]
METHODS += [("ring", "zigzag")]
COLLECTIVES = torch.ops._c10d_functional


def slowest(seconds: float) -> float:
    worst = torch.tensor(seconds)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def measure(call, rounds: int) -> tuple[float, float]:
    """(seconds of the slowest rank, MiB by which this rank's memory rose)."""
    call()
    times = []
    for _ in range(rounds):
        dist.barrier()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return slowest(statistics.median(times)), (peak_bytes(call) or 0) / 2**20


def numbers_sent(method: str, ranks: int, length: int) -> int:
    """Numbers that a rank sends in forward and backward: the formulas of docs/distributed.md."""
    rows = BATCH * length // ranks
    kv, others = rows * KV_HEADS * 2 * DIM, ranks - 1
    if method == "allgather":
        return 2 * others * kv
    if method == "ring":
        return (3 * ranks - 2) * kv if ranks > 1 else 0
    share, read = HEADS // ranks, max(KV_HEADS // ranks, 1)
    there, back = share * DIM + read * 2 * DIM, share * (DIM + 1)
    return others * rows * (2 * there + 2 * back - share)


def bandwidth() -> float:
    """Bytes a second that a rank sends in an all-gather of 4 MiB."""
    x, whole = torch.zeros(2**20), torch.zeros(dist.get_world_size() * 2**20)
    seconds, _ = measure(lambda: dist.all_gather(list(whole.chunk(dist.get_world_size())), x), 5)
    return x.nbytes * (dist.get_world_size() - 1) / seconds if dist.get_world_size() > 1 else float("inf")


def context(args: argparse.Namespace, alone: dict[int, float]) -> None:
    ranks, rate = dist.get_world_size(), bandwidth()
    for length in args.lengths:
        heads = [torch.randn(BATCH, n, length, DIM) for n in (HEADS, KV_HEADS, KV_HEADS)]
        for method, layout in METHODS if ranks > 1 else METHODS[:1]:
            local = [parallel.shard_sequence(x, dim=2, layout=layout).requires_grad_() for x in heads]
            upstream = torch.ones(BATCH, HEADS, length // ranks, DIM)

            def call(local=local, upstream=upstream, method=method, layout=layout):
                parallel.attention(*local, method=method, layout=layout, causal=True).backward(upstream)

            seconds, memory = measure(call, args.rounds)
            alone.setdefault(length, seconds)
            sent = numbers_sent(method, ranks, length) * 4
            # the last rank of a contiguous layout has (2 R - 1) / R^2 of the causal work
            work = (2 * ranks - 1) / ranks**2 if layout == "contiguous" and method != "ulysses" else 1 / ranks
            model = alone[length] * max(work, 1 / os.cpu_count()) + sent / rate
            report(f"context {length:6} {method:>9} {layout:>10}", seconds, sent, memory, f", model {model:7.4f} s")


class Exchanges(TorchDispatchMode):
    """Exchanges of a ring; if `waits`, nothing is computed before they are done."""

    def __init__(self, waits: bool) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        exchanges = self.waits and func is COLLECTIVES.all_to_all_single.default
        return COLLECTIVES.wait_tensor(result) if exchanges else result


def transfers(both: torch.Tensor, ranks: int) -> None:
    """Sends as a ring does, forward and backward: keys and values and their gradients."""
    flat, rank = both.flatten(), dist.get_rank()
    receive, send = [0] * ranks, [0] * ranks
    receive[(rank - 1) % ranks] = send[(rank + 1) % ranks] = flat.numel()
    for _ in range(3 * ranks - 2):
        COLLECTIVES.wait_tensor(COLLECTIVES.all_to_all_single(flat, receive, send, dist.group.WORLD.group_name))


def overlap(args: argparse.Namespace) -> None:
    ranks = dist.get_world_size()
    for length in args.lengths if ranks > 1 else []:
        rows = length // ranks
        local = [torch.randn(BATCH, n, rows, DIM, requires_grad=True) for n in (HEADS, KV_HEADS, KV_HEADS)]
        both, upstream = torch.zeros(BATCH, KV_HEADS, rows, 2 * DIM), torch.ones(BATCH, HEADS, rows, DIM)

        def call(local=local, upstream=upstream):
            parallel.attention(*local, method="ring", layout="zigzag", causal=True).backward(upstream)

        kinds = {
            "overlapped": (call, False),
            "waiting": (call, True),
            "transfers": (lambda both=both: transfers(both, ranks), False),
        }
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(5 * args.rounds + 1):
            for kind, (run_kind, waits) in kinds.items():
                dist.barrier()
                with Exchanges(waits):
                    begin = time.perf_counter()
                    run_kind()
                if turn:  # the first one warms up
                    times[kind].append(time.perf_counter() - begin)
        shown = [f"{slowest(statistics.median(each)):7.4f} s {kind}" for kind, each in times.items()]
        if dist.get_rank() == 0:
            print(f"{ranks} ranks, overlap {length:6} {'ring':>9} {'zigzag':>10}: {', '.join(shown)}", flush=True)


def decode(args: argparse.Namespace) -> None:
    ranks = dist.get_world_size()
    layer = attnpack.GroupedQueryAttention(HEADS * DIM, HEADS, KV_HEADS, causal=True)
    for length in args.lengths:
        cache = parallel.ShardedCache(attnpack.DynamicCache())
        x = torch.randn(BATCH, length, HEADS * DIM)
        with torch.no_grad():
            for part in x.split(1024, 1):
                layer(part, cache=cache)

            def call(cache=cache, x=x, length=length):
                with torch.no_grad():
                    layer(x[:, :1], cache=cache)
                    cache.crop(length)

            seconds, _ = measure(call, 5 * args.rounds)
        sent = (ranks - 1) * BATCH * HEADS * (DIM + 1) * 4
        report(f"decode  {length:6} {'sharded':>9} {'':>10}", seconds, sent, cache.nbytes / 2**20)


def model(args: argparse.Namespace) -> None:
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    net = attnpack.CausalLM(4096, HEADS * DIM, 4, HEADS, KV_HEADS)
    net = parallel.tensor_parallel(net, init_device_mesh("cpu", (ranks,)))
    ids = torch.arange(512).view(2, 256)
    weight_mib = sum(p.to_local().numel() for p in net.parameters()) * 4 / 2**20

    def call():
        net.zero_grad()
        F.cross_entropy(net(ids).flatten(0, 1), ids.flatten()).backward()

    seconds, _ = measure(call, args.rounds)
    joins = 4 * len(net.layers) + 2  # of [B, L, E]: two in each layer, the embedding, the head; and backward
    sent = int(2 * (ranks - 1) / ranks * joins * ids.numel() * HEADS * DIM * 4)
    report(f"model   {ids.size(1):6} {'tensor':>9} {'':>10}", seconds, sent, weight_mib)


def report(name: str, seconds: float, sent: int, memory: float, more: str = "") -> None:
    if dist.get_rank() == 0:
        shown = f"{dist.get_world_size()} ranks, {name}: {seconds:7.4f} s, {sent / 2**20:8.3f} MiB sent, "
        print(f"{shown}{memory:8.1f} MiB a rank{more}", flush=True)


def run(rank: int, ranks: int, folder: str, args: argparse.Namespace, alone: dict[int, float]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, f"store{ranks}"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    if "context" in args.parts:
        context(args, alone)
    if "overlap" in args.parts:
        overlap(args)
    if "decode" in args.parts:
        decode(args)
    if "model" in args.parts:
        model(args)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=["context", "overlap", "decode", "model"])
    args = parser.parse_args()
    print(f"fp32, {HEADS} query heads, {KV_HEADS} kv heads of {DIM}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder, torch.multiprocessing.Manager() as manager:
        alone = manager.dict()
        for ranks in sorted(args.ranks):
            torch.multiprocessing.spawn(run, (ranks, folder, args, alone), nprocs=ranks)


if __name__ == "__main__":
    main()
