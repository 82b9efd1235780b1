"""One call on a GPU, for profilers and sanitizers.

python scripts/gpu_one.py prefill | backward | latent | small_prefill | small_backward | empty [--device cpu]
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

from attnpack import attention  # noqa: E402


def run_prefill(device: str, tokens: int, gradients: bool) -> None:
    """32/8 heads of 128, causal."""
    query, key, value = (
        torch.randn(1, heads, tokens, 128, device=device, dtype=torch.bfloat16).requires_grad_(gradients)
        for heads in (32, 8, 8)
    )
    out = attention(query, key, value, causal=True)
    if gradients:
        out.sum().backward()


def run_latent(device: str) -> None:
    keys = torch.randn(1, 1, 1000, 576, device=device, dtype=torch.bfloat16)
    attention(keys.new_ones(1, 128, 1, 576), keys, keys[..., :512])


def run_empty(device: str) -> None:
    """No keys, no sequences, no queries: forward and backward."""
    for batch, q_len, kv_len in ((2, 64, 0), (0, 64, 64), (2, 0, 64), (2, 0, 0)):
        query, key, value = (
            torch.randn(batch, heads, length, 128, device=device, dtype=torch.bfloat16).requires_grad_()
            for heads, length in ((4, q_len), (2, kv_len), (2, kv_len))
        )
        out = attention(query, key, value)
        out.sum().backward()
        assert not out.any() or kv_len


CASES = {
    "prefill": lambda device: run_prefill(device, 8192, gradients=False),
    "backward": lambda device: run_prefill(device, 8192, gradients=True),
    "latent": run_latent,
    "small_prefill": lambda device: run_prefill(device, 300, gradients=False),
    "small_backward": lambda device: run_prefill(device, 300, gradients=True),
    "empty": run_empty,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    CASES[args.case](args.device)
    if args.device == "cuda":
        torch.cuda.synchronize()
    print(f"{args.case}: done")
