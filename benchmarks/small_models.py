"""Small byte-level language models whose attention is one of the variants, and their training: for uptraining.py."""

from __future__ import annotations

import math
import statistics
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

import attnpack
import torch
from torch import Tensor, nn

EMBED_DIM, NUM_LAYERS, NUM_HEADS, HEAD_DIM = 64, 2, 8, 8
LENGTH, BATCH = 64, 16
HIDDEN_DIM = 4 * EMBED_DIM  # of the MHA model; the others spend on it what their attention saves
LEARNING_RATE = 3e-3
SIZES = {"vocab_size": 256, "embed_dim": EMBED_DIM, "num_layers": NUM_LAYERS, "num_heads": NUM_HEADS}
VARIANTS = ("MHA", "GQA-4", "GQA-2", "MQA", "MLA")
_LATENT = {"kv_lora_rank": 24, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": HEAD_DIM}


def read_text(most_bytes: int = 4 << 20) -> tuple[Tensor, Tensor]:
    """Bytes to train on, and others to measure on: help topics and sources of the standard library, in pieces of 8 KiB
    of which every tenth is measured on."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
    pieces = torch.frombuffer(bytearray(text[: most_bytes >> 13 << 13]), dtype=torch.uint8).view(-1, 1 << 13)
    held_out = torch.arange(len(pieces)) % 10 == 9
    return pieces[~held_out].flatten(), pieces[held_out].flatten()


def make_attention(variant: str) -> nn.Module:
    if variant == "MLA":
        rope = attnpack.RotaryEmbedding(_LATENT["qk_rope_head_dim"])
        return attnpack.MultiHeadLatentAttention(EMBED_DIM, NUM_HEADS, **_LATENT, rope=rope, causal=True)
    heads = {"MHA": NUM_HEADS, "MQA": 1}.get(variant) or int(variant.removeprefix("GQA-"))
    rope = attnpack.RotaryEmbedding(HEAD_DIM)
    return attnpack.GroupedQueryAttention(EMBED_DIM, NUM_HEADS, heads, rope=rope, causal=True)


def make_model(variant: str) -> attnpack.Decoder:
    """A stack with an embedding, which is the head too; as many parameters as MHA's to within a column."""

    def parameters(layer: nn.Module) -> int:
        return sum(weight.numel() for weight in layer.parameters())

    saved = parameters(make_attention("MHA")) - parameters(make_attention(variant))
    hidden = HIDDEN_DIM + round(saved / (3 * EMBED_DIM))
    blocks = [
        attnpack.DecoderBlock(make_attention(variant), attnpack.FeedForward(EMBED_DIM, hidden))
        for _ in range(NUM_LAYERS)
    ]
    model = attnpack.Decoder(blocks, embed_tokens=nn.Embedding(SIZES["vocab_size"], EMBED_DIM))
    nn.init.normal_(model.embed_tokens.weight, std=EMBED_DIM**-0.5)
    return model


def loss_of(model: attnpack.Decoder, tokens: Tensor) -> Tensor:  # [B, L + 1] int64 -> nats a byte
    logits = model(tokens[:, :-1]) @ model.embed_tokens.weight.T
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: attnpack.Decoder, text: Tensor) -> float:
    rows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)[:512].long()
    return statistics.fmean(loss_of(model, batch).item() for batch in rows.split(64))


@dataclass
class Course:
    """What a training went through."""

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def stability(self) -> dict[str, float]:
        """Behind the first fifth, where all fall steeply: gradient norms, and spikes, which are losses that stand out
        of the 50 before by more than four standard deviations."""
        begin = max(50, len(self.losses) // 5)
        norms = self.gradient_norms[begin:]
        spikes = 0
        for i in range(begin, len(self.losses)):
            before = self.losses[i - 50 : i]
            spikes += self.losses[i] > statistics.fmean(before) + 4 * statistics.stdev(before)
        return {
            "loss_spikes": spikes,
            "gradient_norm_mean": statistics.fmean(norms),
            "gradient_norm_max": max(norms),
        }


def train(
    model: attnpack.Decoder,
    text: Tensor,
    steps: int,
    seed: int,
    *,
    anneal: bool = True,
    at: dict[int, Callable[[], None]] | None = None,
    show: Callable[[], None] = lambda: None,
) -> Course:
    """Trains in place; anneal: warm-up and a cosine down to a tenth, as pre-training; else a constant tenth, as
    uptraining goes on where that ended. at: what is called before the step of that number (`steps`: behind the last).
    Batches depend on the seed alone, so that all variants read the same."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    course, start, offsets = Course(), time.perf_counter(), torch.arange(LENGTH + 1)
    warm_up = max(1, steps // 20)
    for step in range(steps + 1):
        if at and step in at:
            at[step]()
        if step == steps:
            break
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        rate = min(1.0, (step + 1) / warm_up) * cosine if anneal else 0.1
        for group in optimiser.param_groups:
            group["lr"] = LEARNING_RATE * rate
        begin = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
        loss = loss_of(model, text[begin + offsets].long())
        optimiser.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        course.losses.append(loss.item())
        course.gradient_norms.append(norm.item())
        show()
    course.seconds = time.perf_counter() - start
    return course


@torch.no_grad()
def decode_figures(variant: str, context: int) -> dict[str, float]:
    """`time_decoding` of an untrained model."""
    return time_decoding(make_model(variant), context)


@torch.no_grad()
def time_decoding(model: attnpack.CausalLM, context: int, steps: int = 32) -> dict[str, float]:
    """KV bytes a token and layer, and ms a token behind `context` tokens; neither depends on the weights."""
    latent = isinstance(model.layers[0].self_attn, attnpack.MultiHeadLatentAttention)
    kind = attnpack.LatentCache if latent else attnpack.DynamicCache
    caches = attnpack.ModelCache([kind() for _ in model.layers])
    model(torch.zeros(1, context, dtype=torch.long), cache=caches)
    bytes_held, took = caches[0].nbytes, []
    for _ in range(steps):
        start = time.perf_counter()
        model(torch.zeros(1, 1, dtype=torch.long), cache=caches)
        took.append(time.perf_counter() - start)
    return {"kv_bytes_per_token_and_layer": bytes_held / context, "ms_per_token": 1e3 * statistics.median(took)}
