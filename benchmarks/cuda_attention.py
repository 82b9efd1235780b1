"""Speed of attention on a CUDA device, in TFLOP/s (TF), beside torch's SDPA.

python benchmarks/cuda_attention.py [plain] [rules] [latent] [decode] [packed] [fp32] [--quick] [--library PATH]
                                    [--device cpu]

plain: prefill (fwd) and gradients (bwd) without rules, with the times of the two gradient kernels. The peers' gradients
are those of repeated key-value heads. rules: prefill and gradients of 32/8 heads, 4,096 tokens, by rule. latent: decode
of 8 sequences of 58,254 keys, of which each read counts once, and of one sequence. packed: causal prefill and gradients
of sequences of several lengths in one call, over pages too, beside one call for each. fp32: as plain, and exact.
The peers are torch's SDPA by default (sdpa), and its kernels by name. A dash: the peer refuses the call.
A time is the median of ten replays of a CUDA graph, so Python's time does not count. Our kernels run, not torch's in
their place (ATTNPACK_CUDA=own). --quick: the shapes that tell most. --library: another libattnpack_cuda.so.
--device cpu: tiny shapes, only to try the script.
"""

import argparse
import contextlib
import ctypes
import functools
import itertools
import os
import statistics
from collections.abc import Callable

os.environ.setdefault("ATTNPACK_CUDA", "own")

import torch
import torch.nn.functional as F
from attnpack import attention, attention_varlen
from attnpack.tools.bench.devices import Cpu, Cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

PEERS = {"sdpa": None, "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
BIASED_PEERS = {"sdpa": None, "cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
SHAPES = [  # heads, kv heads, tokens, head_dim
    (32, 8, 8192, 128),
    (32, 8, 8192, 64),
    (16, 16, 8192, 256),
    (8, 8, 1024, 64),
    (8, 2, 2048, 128),
    (8, 1, 4096, 128),
    (16, 16, 4096, 128),
]
QUICK = [(32, 8, 8192, 128), (8, 2, 2048, 128)]
PACKED = {"16 of 512": [512] * 16, "one of 8192, 31 of 64": [8192] + [64] * 31, "128 of 64": [64] * 128}
PAGE = 16  # keys
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Bench:
    """The tables on one device."""

    def __init__(self, device: str, quick: bool) -> None:
        self.device = Cuda() if device == "cuda" else Cpu()
        self.quick, self.tiny = quick, device == "cpu"

    def draw(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device=self.device.device, dtype=dtype)

    def length(self, tokens: int) -> int:
        return max(tokens // 128, 8) if self.tiny else tokens

    def seconds(self, call: Callable, times: int = 10) -> float:
        return statistics.median(self.device.seconds(call) for _ in range(1 if self.tiny else times))

    def beside(self, flops: float, make_call: Callable[[], Callable], peers: dict[str, SDPBackend | None]) -> str:
        """The rates of the peers."""
        rates = []
        for name, backend in peers.items():
            try:
                with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
                    rates.append(f"{name} {rate(flops, self.seconds(make_call()))}")
            except RuntimeError:
                rates.append(f"{name} -")
        return " ".join(rates)

    def forward(self, flops: float, tensors: Tensors, peers: dict, rule: dict, torch_rule: dict | None) -> str:
        def peer() -> torch.Tensor:
            return F.scaled_dot_product_attention(*tensors, **torch_rule, enable_gqa=True)

        with torch.no_grad():
            time = self.seconds(functools.partial(attention, *tensors, **rule))
            others = "" if torch_rule is None else self.beside(flops, lambda: peer, peers)
        return f"fwd {time * 1e3:.3f} ms {rate(flops, time)} TF {others}".rstrip()

    def backward(self, flops: float, tensors: Tensors, peers: dict, rule: dict, torch_rule: dict | None) -> str:
        query, key, value = tensors
        out = attention(*tensors, **rule)
        grad = torch.randn_like(out)

        def gradients(result: torch.Tensor, leaves: list[torch.Tensor]) -> Callable:
            return lambda: torch.autograd.grad(result, leaves, grad, retain_graph=True)

        def peer() -> Callable:
            repeats = query.size(1) // key.size(1)
            leaves = [query, *(x.detach().repeat_interleave(repeats, 1).requires_grad_() for x in (key, value))]
            return gradients(F.scaled_dot_product_attention(*leaves, **torch_rule), leaves)

        call = gradients(out, [query, key, value])
        time = self.seconds(call)
        others = "" if torch_rule is None else self.beside(flops, peer, peers)
        return f"bwd {time * 1e3:.3f} ms {rate(flops, time)} TF {self.kernels(call)}{others}".rstrip()

    def kernels(self, call: Callable) -> str:
        """The times of the gradient kernels apart, by the profiler."""
        if self.tiny:
            return ""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        times = [
            f"{kind} {event.self_device_time_total / 1e3:.3f} ms"
            for kind, event in itertools.product(("query_gradient", "key_gradient"), profile.key_averages())
            if f"{kind}_kernel" in event.key
        ]
        return f"({', '.join(times)}) " if times else ""

    def print_plain(self, dtype: torch.dtype = torch.bfloat16, peers: dict = PEERS) -> None:
        for (heads, kv_heads, tokens, dim), causal in itertools.product(QUICK if self.quick else SHAPES, (False, True)):
            length = self.length(tokens)
            tensors = tuple(
                self.draw(1, h, length, dim, dtype=dtype).requires_grad_() for h in (heads, kv_heads, kv_heads)
            )
            flops = 4 * heads * length**2 * dim * (0.5 if causal else 1)
            rules = {"causal": causal}, {"is_causal": causal}
            parts = [self.forward(flops, tensors, peers, *rules)]
            if dim <= 128:  # the gradients of wider ones run on the kernels of all devices
                parts.append(self.backward(2.5 * flops, tensors, peers, *rules))
            name = "fp32 " * (dtype == torch.float32)
            print(f"{name}{heads}/{kv_heads} L{length} D{dim}{' causal' * causal}: {' | '.join(parts)}", flush=True)

    def print_fp32(self) -> None:
        self.print_plain(torch.float32, {"sdpa": None, "efficient": SDPBackend.EFFICIENT_ATTENTION})

    def print_rules(self) -> None:
        heads, kv_heads, length = 32, 8, self.length(4096)
        device = self.device.device
        slopes = torch.linspace(0.01, 0.5, heads, device=device, dtype=torch.float64)
        mask = torch.rand(1, 1, length, length, device=device) < 0.8
        bias = self.draw(1, 1, length, length)
        # Masks whose blocks are mostly whole or empty: a window of an eighth, and keys without padding.
        number = torch.arange(length, device=device)
        band = (number[:, None] - number).abs().mul(16) < length
        padding = (number < length - length // 8)[None, None, None]
        # name: (rule, the same for SDPA, which has no caps and no ALiBi). ALiBi's rate counts all scores, also those of
        # keys after a query.
        rules = {
            "plain": ({}, {}),
            "bool mask": ({"mask": mask}, {"attn_mask": mask}),
            "band as mask": ({"mask": band}, {"attn_mask": band}),
            "padding as mask": ({"mask": padding}, {"attn_mask": padding}),
            "float mask": ({"mask": bias}, {"attn_mask": bias}),
            "softcap": ({"softcap": 30.0}, None),
            "window": ({"window": (length // 8, 0)}, None),
            "alibi": ({"alibi_slopes": slopes, "causal": True}, None),
            "dropout": ({"dropout_p": 0.1}, {"dropout_p": 0.1}),
        }
        for dim, (name, (rule, torch_rule)) in itertools.product((128,) if self.quick else (64, 128), rules.items()):
            tensors = tuple(self.draw(1, h, length, dim).requires_grad_() for h in (heads, kv_heads, kv_heads))
            flops = 4 * heads * length**2 * dim
            parts = [self.forward(flops, tensors, BIASED_PEERS, rule, torch_rule)]
            if not self.quick:
                parts.append(self.backward(2.5 * flops, tensors, BIASED_PEERS, rule, torch_rule))
            print(f"D{dim} {name}: {' | '.join(parts)}", flush=True)

    @torch.no_grad()
    def print_latent(self) -> None:
        batch, length = 8, self.length(58_254)
        keys = self.draw(batch, 1, length, 576)
        for heads in (128, 16):
            query = self.draw(batch, heads, 1, 576)
            time = self.seconds(functools.partial(attention, query, keys, keys[..., :512]))
            flops = 2 * batch * heads * length * (576 + 512)
            print(f"latent {heads}: {time * 1e3:.3f} ms {keys.nbytes / time / 1e12:.2f} TB/s {rate(flops, time)} TF")
            for tokens in (1000, 8000, 29_127):
                one = keys[:1, :, : self.length(tokens)]
                time = self.seconds(functools.partial(attention, query[:1], one, one[..., :512]))
                print(f"  one sequence S{tokens}: {time * 1e6:.1f} us", flush=True)

    @torch.no_grad()
    def print_decode(self) -> None:
        shapes = [(32, 8, 4096, 1), (32, 8, 131_072, 1)]
        if not self.quick:
            shapes += [(32, 32, 4096, 1), (32, 1, 2048, 1), (32, 8, 4096, 8), (128, 8, 131_072, 2)]
        for heads, kv_heads, tokens, queries in shapes:
            length = self.length(tokens)
            query = self.draw(1, heads, queries, 128)
            key, value = (self.draw(1, kv_heads, length, 128) for _ in range(2))
            flops = 4 * heads * queries * length * 128
            line = self.forward(flops, (query, key, value), PEERS, {}, {})
            print(f"decode {heads}/{kv_heads} D128 {length} keys, {queries} queries: {line}", flush=True)

    def print_packed(self) -> None:
        for name, tokens in list(PACKED.items())[: 2 if self.quick else None]:
            lengths = [self.length(each) for each in tokens]
            print(f"{name}: {self.packed(lengths)}", flush=True)

    def packed(self, lengths: list[int], heads: int = 32, kv_heads: int = 8, dim: int = 128) -> str:
        leaves = [self.draw(sum(lengths), h, dim).requires_grad_() for h in (heads, kv_heads, kv_heads)]
        ends = torch.tensor([0, *itertools.accumulate(lengths)], device=self.device.device)
        rules = {"causal": True, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}

        # Pages in no order, of which each sequence has whole ones.
        most = -(-max(lengths) // PAGE)
        table = torch.randperm(len(lengths) * most, device=self.device.device).int().view(len(lengths), most)
        pools = [self.draw(table.numel(), PAGE, kv_heads, dim) for _ in range(2)]
        pages = {"block_table": table, "kv_lens": torch.tensor(lengths, device=self.device.device)}

        def pieces(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x.unsqueeze(0).transpose(1, 2).split(lengths, 2)

        def each() -> list[torch.Tensor]:
            return [attention(*x, causal=True) for x in zip(*map(pieces, leaves), strict=True)]

        in_one = functools.partial(attention_varlen, *leaves, ends, **rules)
        with torch.no_grad():
            forward = {
                "packed": self.seconds(in_one),
                "in pages": self.seconds(
                    functools.partial(attention_varlen, leaves[0], *pools, ends, **rules, **pages)
                ),
                "each": self.seconds(each),
            }
        grad = torch.randn_like(leaves[0])
        results = {"packed": (in_one(), grad), "each": (each(), pieces(grad))}
        backward = {
            form: self.seconds(functools.partial(torch.autograd.grad, out, leaves, grads, retain_graph=True))
            for form, (out, grads) in results.items()
        }
        flops = 2 * heads * dim * sum(length**2 for length in lengths)

        def words(times: dict[str, float], flops: float) -> str:
            return ", ".join(f"{form} {time * 1e3:.3f} ms {rate(flops, time)} TF" for form, time in times.items())

        return f"fwd {words(forward, flops)} | bwd {words(backward, 2.5 * flops)}"


def rate(flops: float, seconds: float) -> str:
    return f"{flops / seconds / 1e12:.0f}"


def main() -> None:
    parts = ("plain", "rules", "latent", "decode", "packed", "fp32")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=", ".join(parts))
    parser.add_argument("--quick", action="store_true", help="only the shapes that tell most")
    parser.add_argument("--library", help="a libattnpack_cuda.so whose kernels run in place of the installed ones")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny shapes, to try the script")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(parts):
        parser.error(f"parts are {', '.join(parts)}, got {', '.join(sorted(unknown))}")
    if args.library:
        ctypes.CDLL(os.path.abspath(args.library))  # it puts its kernels in the place of those that are loaded
    bench = Bench(args.device, args.quick)
    print(bench.device.name() + (f", {args.library}" if args.library else ""), flush=True)
    for part in args.parts or parts:
        getattr(bench, f"print_{part}")()


if __name__ == "__main__":
    main()
