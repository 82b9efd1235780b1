"""Speed of attention in bf16 on a CUDA device, in TFLOP/s (TF), beside FlashAttention-2 and cuDNN in torch's SDPA.

python benchmarks/cuda_attention.py [plain] [rules] [latent]

plain: prefill (fwd) and gradients (bwd) without rules. The peers' gradients are those of repeated key-value heads.
rules: prefill of 32/8 heads, 4,096 tokens, by rule. latent: decode of 8 sequences of 58,254 keys, of which each read
counts once, and of one sequence, as replays of a graph of ten calls.
A time is the median of ten calls by CUDA events; the time of Python counts where a call is short.
"""

import functools
import itertools
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from attnpack import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
SHAPES = [(32, 8, 8192, 128), (32, 8, 8192, 64), (16, 16, 8192, 256), (8, 8, 1024, 64), (8, 2, 2048, 128)]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def milliseconds(call: Callable, calls: int = 10) -> float:
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in events)[calls // 2]


def rate(flops: float, time: float) -> str:
    return f"{flops / time / 1e9:.0f}"


def beside(flops: float, make_call: Callable[[], Callable]) -> str:
    """The rates of the peers. A dash: the peer refuses the call."""
    rates = []
    for name, backend in PEERS.items():
        try:
            with sdpa_kernel(backend):
                rates.append(f"{name} {rate(flops, milliseconds(make_call()))}")
        except RuntimeError:
            rates.append(f"{name} -")
    return " ".join(rates)


@torch.no_grad()
def forward(flops: float, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> str:
    def peer():
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)

    time = milliseconds(lambda: attention(query, key, value, causal=causal))
    return f"fwd {time:.3f} ms {rate(flops, time)} TF {beside(flops, lambda: peer)}"


def backward(flops: float, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> str:
    out = attention(query, key, value, causal=causal)
    grad = torch.randn_like(out)

    def gradients(result: torch.Tensor, leaves: list[torch.Tensor]) -> Callable:
        return lambda: torch.autograd.grad(result, leaves, grad, retain_graph=True)

    def peer() -> Callable:
        repeats = query.size(1) // key.size(1)
        leaves = [query, *(x.detach().repeat_interleave(repeats, 1).requires_grad_() for x in (key, value))]
        return gradients(F.scaled_dot_product_attention(*leaves, is_causal=causal), leaves)

    time = milliseconds(gradients(out, [query, key, value]))
    return f"bwd {time:.3f} ms {rate(flops, time)} TF {beside(flops, peer)}"


def plain() -> None:
    for (heads, kv_heads, length, dim), causal in itertools.product(SHAPES, (False, True)):
        tensors = [draw(1, h, length, dim).requires_grad_() for h in (heads, kv_heads, kv_heads)]
        flops = 4 * heads * length**2 * dim * (0.5 if causal else 1)
        parts = [forward(flops, *tensors, causal)]
        if dim <= 128:  # wider ones run on the kernels of all devices
            parts.append(backward(2.5 * flops, *tensors, causal))
        print(f"{heads}/{kv_heads} L{length} D{dim}{' causal' * causal}: {' | '.join(parts)}", flush=True)


def rules() -> None:
    heads, kv_heads, length = 32, 8, 4096
    slopes = torch.linspace(0.01, 0.5, heads, device="cuda", dtype=torch.float64)
    settings = {
        "plain": {},
        "bool mask": {"mask": torch.rand(1, 1, length, length, device="cuda") < 0.8},
        "float mask": {"mask": draw(1, 1, length, length)},
        "softcap": {"softcap": 30.0},
        "alibi": {"alibi_slopes": slopes, "causal": True},  # its rate counts all scores, also those after a query
        "dropout": {"dropout_p": 0.1},
    }
    for dim, (name, rule) in itertools.product((64, 128), settings.items()):
        query, key, value = (draw(1, h, length, dim) for h in (heads, kv_heads, kv_heads))
        time = milliseconds(functools.partial(attention, query, key, value, **rule))
        print(f"D{dim} {name}: {time:.3f} ms {rate(4 * heads * length**2 * dim, time)} TF", flush=True)


def ten_times(query: torch.Tensor, keys: torch.Tensor) -> torch.cuda.CUDAGraph:
    attention(query, keys, keys[..., :512])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            attention(query, keys, keys[..., :512])
    return graph


def latent() -> None:
    batch, length = 8, 58_254
    keys = draw(batch, 1, length, 576)
    for heads in (128, 16):
        query = draw(batch, heads, 1, 576)
        time = milliseconds(functools.partial(attention, query, keys, keys[..., :512]))
        flops = 2 * batch * heads * length * (576 + 512)
        print(f"latent {heads}: {time:.3f} ms {keys.nbytes / time / 1e9:.2f} TB/s {rate(flops, time)} TF")
        for one in (1000, 8000, 29_127):
            graph = ten_times(query[:1], keys[:1, :, :one])
            print(f"  one sequence S{one}: {milliseconds(graph.replay) * 100:.1f} us", flush=True)


if __name__ == "__main__":
    print(torch.cuda.get_device_name())
    for part in sys.argv[1:] or ("plain", "rules", "latent"):
        {"plain": plain, "rules": rules, "latent": latent}[part]()
