"""Time of packed sequences against the two calls that programs make without them: a table.

"masked": all tokens as one sequence, with a block-diagonal bool mask, as transformers' flattened batches run on a CPU.
"padded": a batch padded to the longest sequence, with a padding mask. Each round times all ways in turn; a ratio is the
median over the rounds of packed / other.
"""

import argparse
import statistics
import time

import attnpack
import torch
import torch.nn.functional as F

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_calls(lengths: list[int], heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> dict:
    """Causal self-attention of the sequences by each way; every call gives a tensor."""
    total, longest = sum(lengths), max(lengths)
    q, k, v = (torch.randn(total, n, width, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    ends = torch.tensor([0, *lengths]).cumsum(0)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = (owner[:, None] == owner) & torch.ones(total, total, dtype=torch.bool).tril()
    dense = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    lens = torch.tensor(lengths)
    padded = [x.new_zeros(len(lengths), longest, *x.shape[1:]) for x in (q, k, v)]
    for x, room in zip((q, k, v), padded, strict=True):
        for b, part in enumerate(x.split(lengths)):
            room[b, : len(part)] = part
    padded = [x.transpose(1, 2) for x in padded]
    return {
        "packed": lambda: attnpack.attention_varlen(q, k, v, ends, causal=True),
        "masked sdpa": lambda: F.scaled_dot_product_attention(*dense, attn_mask=mask, enable_gqa=heads != kv_heads),
        "masked attnpack": lambda: attnpack.attention(*dense, mask),
        "padded attnpack": lambda: attnpack.attention(*padded, causal=True, kv_lens=lens),
    }


def measure(calls: dict, rounds: int) -> dict[str, list[float]]:
    """The seconds of each call in each round. A round times all calls in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for _ in range(rounds + 1):
            for name, call in calls.items():
                begin = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - begin)
    return {name: found[1:] for name, found in times.items()}  # the first round warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    args = parser.parse_args()
    cases = {"16 x 512": [512] * 16, "64 x 32": [32] * 64, "16 to 1024": [2**n for n in range(4, 11)] * 2}
    print(f"causal, 8 query heads, 2 kv heads of 64, {args.dtype}, {torch.get_num_threads()} threads")
    for name, lengths in cases.items():
        times = measure(make_calls(lengths, 8, 2, 64, DTYPES[args.dtype]), args.rounds)
        packed = times.pop("packed")
        shown = f"{name:>12}: packed {statistics.median(packed) * 1e3:8.2f} ms"
        for other, found in times.items():
            ratio = statistics.median(p / t for p, t in zip(packed, found, strict=True))
            shown += f", {ratio:.3f} of {other}"
        print(shown, flush=True)


if __name__ == "__main__":
    main()
