"""Speed of linear attention with the gated delta rule, in one run beside transformers' torch code: prefill, training
and decode steps.

Prefill and training are shares of the CPU's peak of fused multiply-adds in fp32, measured before and after. They count
6 D Dv + 128 (D + Dv) operations per token and value head, twice that for the backward pass. A decode step is
compared with a copy of its states, which reads and writes the same bytes: one that returns new states with a new copy,
one in place with a copy to memory that is there. All calls of a round are timed in turn, and the least time counts.

With --ggml FOLDER the op of llama.cpp, the CPU engine that has one, takes part in the fp32 rows; it has no gradients.
FOLDER holds libggml-base.so and libggml-cpu.so:

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36 && tar xf llama_cpp_python-0.3.36.tar.gz
    cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B ggml -DCMAKE_BUILD_TYPE=Release
    cmake --build ggml --target ggml-base ggml-cpu
    python benchmarks/linear_attention.py --ggml ggml/bin
"""

import argparse
from pathlib import Path

import attnpack
import torch
from attnpack import _C
from attnpack.ops import linear_attention_
from attnpack.tools.bench import conditions
from ggml_delta_net import Ggml
from packed import DTYPES, measure
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule


def draw(
    batch: int, heads: int, length: int, width: int, dtype: torch.dtype, per_channel: bool, key_heads: int | None = None
) -> dict:
    """Tensors of a layer: keys of length 1, and decays near 1. [B, L, H, ...] underneath, as projections give them."""

    def heads_outside(*shape: int, count: int = heads) -> torch.Tensor:
        return torch.randn(batch, length, count, *shape).to(dtype).transpose(1, 2)

    query, key = (heads_outside(width, count=key_heads or heads) for _ in range(2))
    return {
        "query": query, "key": torch.nn.functional.normalize(key, dim=-1),
        "value": heads_outside(width), "beta": heads_outside().sigmoid(),
        "log_decay": -0.1 * heads_outside(*[width] * per_channel).float().abs(),
    }  # fmt: skip


def ours(x: dict, state: torch.Tensor | None = None) -> tuple:
    return attnpack.linear_attention(x["query"], x["key"], x["value"], log_decay=x["log_decay"], beta=x["beta"],
                                     initial_state=state, return_state=True)  # fmt: skip


def ours_in_place(x: dict, state: torch.Tensor) -> torch.Tensor:
    return linear_attention_(x["query"], x["key"], x["value"], state, log_decay=x["log_decay"], beta=x["beta"])


def theirs(function, x: dict, state: torch.Tensor | None = None) -> tuple:
    heads = x["value"].size(1)
    rows = {name: t.repeat_interleave(heads // t.size(1), 1).transpose(1, 2) for name, t in x.items()}
    return function(rows["query"], rows["key"], rows["value"], rows["log_decay"], rows["beta"], initial_state=state,
                    output_final_state=True)  # fmt: skip


def by_ggml(args: argparse.Namespace, x: dict, state: torch.Tensor):
    """The call of ggml, after a look at its numbers."""
    call = Ggml(args.ggml).delta_rule(x, state, args.threads)
    torch.testing.assert_close(call(), ours(x, state), rtol=1e-3, atol=1e-3)
    return call


def with_gradients(call, x: dict) -> None:
    with torch.enable_grad():
        leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
        call(leaves)[0].float().sum().backward()


def peak() -> float:
    return max(_C.limits()[0], 1.0)


def time_sequences(args: argparse.Namespace) -> None:
    work = args.batch * args.heads * args.length * (6 * args.width**2 + 256 * args.width)
    of_keys = f", {args.key_heads} of keys" if args.key_heads else ""
    print(f"{args.length:,} tokens, {args.heads} heads of {args.width}{of_keys}, {torch.get_num_threads()} threads")
    for name, dtype in DTYPES.items():
        x, channels = (draw(args.batch, args.heads, args.length, args.width, dtype, per_channel=each,
                            key_heads=args.key_heads) for each in (False, True))  # fmt: skip
        chunked = lambda t: theirs(torch_chunk_gated_delta_rule, t)  # noqa: E731
        calls = {
            "prefill": lambda: ours(x),  # noqa: B023
            "prefill, decay per channel": lambda: ours(channels),  # noqa: B023
            "prefill, transformers": lambda: chunked(x),  # noqa: B023
            "training": lambda: with_gradients(ours, x),  # noqa: B023
            "training, decay per channel": lambda: with_gradients(ours, channels),  # noqa: B023
            "training, transformers": lambda: with_gradients(chunked, x),  # noqa: B023
        }
        if args.ggml and dtype == torch.float32 and not args.key_heads:
            zeros = torch.zeros(args.batch, args.heads, args.width, args.width)
            calls["prefill, ggml"] = by_ggml(args, x, zeros)
            calls["prefill, decay per channel, ggml"] = by_ggml(args, channels, zeros)
        limit = peak()
        times = {call: min(found) for call, found in measure(calls, args.rounds).items()}
        limit = max(limit, peak())
        for call, seconds in times.items():
            share = work * (3 if call.startswith("training") else 1) / seconds / limit
            print(f"{name:>5} {call:>32}: {seconds * 1e3:8.2f} ms, {share:4.0%} of {limit / 1e9:.0f} GFLOP/s")
        prefill, training = (times[f"{call}, transformers"] / times[call] for call in ("prefill", "training"))
        print(f"{name:>5} transformers / ours: prefill {prefill:.1f}, training {training:.1f}", flush=True)
        if "prefill, ggml" in times:
            one, each = (times[f"{call}, ggml"] / times[call] for call in ("prefill", "prefill, decay per channel"))
            print(f"{name:>5} ggml / ours: prefill {one:.1f}, decay per channel {each:.1f}", flush=True)


def time_steps(args: argparse.Namespace) -> None:
    for batch in (1, args.sequences):
        heads = 32
        x = draw(batch, heads, 1, args.width, torch.float32, per_channel=False)
        state = torch.randn(batch, heads, args.width, args.width)
        owned, copied = state.clone(), torch.empty_like(state)
        calls = {
            "step": lambda: ours(x, state),  # noqa: B023
            "step in place": lambda: ours_in_place(x, owned),  # noqa: B023
            "copy": lambda: state.clone(),  # noqa: B023
            "copy loop": lambda: copied.copy_(state),  # noqa: B023
            "transformers": lambda: theirs(torch_recurrent_gated_delta_rule, x, state),  # noqa: B023
        }
        if args.ggml:
            calls["ggml"] = by_ggml(args, x, state)
        times = {call: min(found) for call, found in measure(calls, args.rounds).items()}
        print(f"decode of {batch} sequences, {heads} heads of {args.width}, states {state.nbytes / 2**20:.0f} MiB: "
              + ", ".join(f"{call} {seconds * 1e3:.3f} ms" for call, seconds in times.items())
              + f"; step / copy {times['step'] / times['copy']:.2f}, in place / copy loop "
              f"{times['step in place'] / times['copy loop']:.2f}, transformers / step "
              f"{times['transformers'] / times['step']:.1f}"
              + (f", ggml / in place {times['ggml'] / times['step in place']:.2f}" if args.ggml else ""),
              flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key-heads", type=int, help="heads of queries and keys; default: as many as --heads")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=64, help="of the larger decode step")
    parser.add_argument("--ggml", type=Path, metavar="FOLDER", help="of ggml's libraries")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"on {conditions()}")
    time_sequences(args)
    with torch.no_grad():
        time_steps(args)


if __name__ == "__main__":
    main()
