"""Steps beside processes that keep cores busy: attnpack, torch, and llama.cpp where it is installed.

    python benchmarks/busy.py [--seconds N] [--only TEXT]

A neighbour is a process that keeps one core busy. Beside 0, 1 and 2 of them the libraries take turns. Columns: the
median and the 90th percentile of attnpack's step in ms; the median divided by that of one thread without neighbours;
the median and the 90th percentile divided by those of each peer (below 1 attnpack is faster).
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator

import attnpack
import torch
import torch.nn.functional as F
from attnpack.tools.busy import OtherWork
from torch import nn

THREADS = torch.get_num_threads()
TURN = 0.15  # seconds that a library keeps its turn
WIDTH, HEADS, KV_HEADS, PAST = 1024, 16, 4, 1024  # of the layer
PROMPT = 256

Step = Callable[[], object]


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.3 if count else 0)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def time_in_turns(steps: dict[str, Step], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each step of each library."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds * len(steps)
    while time.perf_counter() < end or min(map(len, times.values())) < 5:
        for name, step in steps.items():
            until = time.perf_counter() + TURN
            step()  # after the turn of another library, whose threads may still be awake
            while True:
                begin = time.perf_counter()
                step()
                now = time.perf_counter()
                times[name].append((now - begin) * 1e3)
                if now > until:
                    break
    return times


class TorchLayer(nn.Module):
    """Grouped-query attention on torch's own functions, with a cache of fixed size."""

    def __init__(self, like: attnpack.GroupedQueryAttention) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = like.q_proj, like.k_proj, like.v_proj, like.o_proj
        self.keys = torch.randn(1, KV_HEADS, 2 * PAST, WIDTH // HEADS)
        self.values = torch.randn_like(self.keys)

    def forward(self, x: torch.Tensor, begin: int) -> torch.Tensor:  # [1, L, WIDTH]
        length = x.size(1)

        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.view(1, length, -1, WIDTH // HEADS).transpose(1, 2)

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        if length == 1:
            self.keys[:, :, begin : begin + 1], self.values[:, :, begin : begin + 1] = k, v
            k, v = self.keys[:, :, : begin + 1], self.values[:, :, : begin + 1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1, enable_gqa=True)
        return self.o(out.transpose(1, 2).reshape(1, length, WIDTH))


def layer_decode() -> dict[str, Step]:
    """One token after 1,024."""
    ours = attnpack.GroupedQueryAttention(WIDTH, HEADS, KV_HEADS, causal=True).eval()
    torchs = TorchLayer(ours).eval()
    cache = attnpack.StaticCache(1, KV_HEADS, 2 * PAST, WIDTH // HEADS)
    x = torch.randn(1, 1, WIDTH)
    with torch.no_grad():
        ours(torch.randn(1, PAST, WIDTH), cache=cache)

    @torch.no_grad()
    def step() -> None:
        if len(cache) == 2 * PAST:
            cache.crop(PAST)
        ours(x, cache=cache)

    return {"attnpack": step, "torch": torch.no_grad()(lambda: torchs(x, PAST))}


def layer_training() -> dict[str, Step]:
    """Forward and backward of 256 tokens."""
    ours = attnpack.GroupedQueryAttention(WIDTH, HEADS, KV_HEADS, causal=True)
    torchs = TorchLayer(ours)
    x = torch.randn(1, PROMPT, WIDTH)
    return {"attnpack": lambda: ours(x).sum().backward(), "torch": lambda: torchs(x, 0).sum().backward()}


def smollm2() -> tuple[attnpack.CausalLM, nn.Module]:
    """A model with the sizes of SmolLM2-135M and random weights, and the same one of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # cache= is unknown to older releases

    config = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                         num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)  # fmt: skip
    theirs = LlamaForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        return attnpack.CausalLM.from_hf(directory).eval(), theirs


def model_decode() -> dict[str, Step]:
    """One token of SmolLM2-135M after 256."""
    from transformers import DynamicCache

    ours, theirs = smollm2()
    ids, token = torch.randint(0, 49152, (1, PROMPT)), torch.tensor([[7]])
    cache, past = attnpack.ModelCache(30), DynamicCache()
    with torch.no_grad():
        ours(ids, cache=cache)
        theirs(torch.cat([ids, token], 1), past_key_values=past)

    @torch.no_grad()
    def step() -> None:
        cache.crop(PROMPT)
        ours(token, cache=cache)

    @torch.no_grad()
    def torchs() -> None:
        past.crop(-1)
        theirs(token, past_key_values=past)

    steps: dict[str, Step] = {"attnpack": step, "torch": torchs}
    if with_llama_cpp := llama_cpp(ids):
        steps["llama.cpp"] = with_llama_cpp
    return steps


def llama_cpp(ids: torch.Tensor) -> Step | None:
    """One token of SmolLM2-135M, the real one, after the prompt; None where llama.cpp is not installed."""
    try:
        from attnpack.tools.bench.llama_cpp import LlamaCpp

        model = LlamaCpp("fp32", PROMPT + 64)
    except ImportError:
        return None
    stream: list[Iterator[int]] = []

    def step() -> None:
        token = next(stream[0], None) if stream else None
        if token is None:
            model._model.reset()
            stream[:] = [iter(_limited(model._model.generate(ids[0].tolist(), temp=0.0, repeat_penalty=1.0), 48))]
            next(stream[0])

    return step


def _limited(tokens: Iterator[int], count: int) -> Iterator[int]:
    for _, token in zip(range(count), tokens, strict=False):
        yield token


def model_prefill() -> dict[str, Step]:
    """256 tokens of SmolLM2-135M."""
    ours, theirs = smollm2()
    ids = torch.randint(0, 49152, (1, PROMPT))
    return {"attnpack": torch.no_grad()(lambda: ours(ids)), "torch": torch.no_grad()(lambda: theirs(ids))}


CASES = {
    "a layer's step": layer_decode,
    "a layer's training step": layer_training,
    "SmolLM2's step": model_decode,
    "SmolLM2's prefill": model_prefill,
}


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[min(int(len(times) * share), len(times) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6, help="per library and number of neighbours")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{THREADS} threads, torch {torch.__version__}, fp32")
    print(f"{'':<26}{'neighbours':>11}{'median':>9}{'p90':>9}{'/ 1 thread':>12}   median and p90 / each peer's")
    for name, make in CASES.items():
        if args.only not in name:
            continue
        steps = make()
        others = OtherWork()
        torch.set_num_threads(1)
        one_thread = statistics.median(time_in_turns({"attnpack": steps["attnpack"]}, args.seconds / 2)["attnpack"])
        torch.set_num_threads(THREADS)
        warning = others.warning()
        for count in (0, 1, 2):
            with neighbours(count):
                times = time_in_turns(steps, args.seconds)
            mine = times.pop("attnpack")
            median, high = statistics.median(mine), percentile(mine, 0.9)
            peers = "   ".join(
                f"{peer} {median / statistics.median(theirs):.2f} {high / percentile(theirs, 0.9):.2f}"
                for peer, theirs in times.items()
            )
            print(f"{name:<26}{count:>11}{median:>9.2f}{high:>9.2f}{median / one_thread:>12.2f}   {peers}", flush=True)
        if warning:
            print(warning)


if __name__ == "__main__":
    main()
