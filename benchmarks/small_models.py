"""Small byte-level language models with MHA or MQA, and their training, for uptraining.py."""

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
HIDDEN_DIM = 4 * EMBED_DIM  # of the MHA model; that of MQA grows by the parameters that its attention saves
LEARNING_RATE = 3e-3
SIZES = {"vocab_size": 256, "embed_dim": EMBED_DIM, "num_layers": NUM_LAYERS, "num_heads": NUM_HEADS}
VARIANTS = {"MHA": NUM_HEADS, "MQA": 1}
"""Their key-value heads."""


def read_text(most_bytes: int = 4 << 20) -> tuple[Tensor, Tensor]:
    """(bytes to train on, bytes to measure on): help topics and sources of the standard library, in pieces of 8 KiB.
    Every tenth piece is for measuring."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
    pieces = torch.frombuffer(bytearray(text[: most_bytes >> 13 << 13]), dtype=torch.uint8).view(-1, 1 << 13)
    held_out = torch.arange(len(pieces)) % 10 == 9
    return pieces[~held_out].flatten(), pieces[held_out].flatten()


def make_attention(variant: str) -> nn.Module:
    rope = attnpack.RotaryEmbedding(HEAD_DIM)
    return attnpack.GroupedQueryAttention(EMBED_DIM, NUM_HEADS, VARIANTS[variant], rope=rope, causal=True)


def make_model(variant: str) -> attnpack.Decoder:
    """A stack whose embedding is the head too. It has as many parameters as the MHA model, up to one column."""

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


def loss_of(model: attnpack.Decoder, tokens: Tensor) -> Tensor:  # [B, L + 1] int64 -> nats per byte
    logits = model(tokens[:, :-1]) @ model.embed_tokens.weight.T
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: attnpack.Decoder, text: Tensor) -> float:
    rows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)[:512].long()
    return statistics.fmean(loss_of(model, batch).item() for batch in rows.split(64))


@dataclass
class Course:
    """The record of a training."""

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def stability(self) -> dict[str, float]:
        """Gradient norms and spikes after the first fifth of the steps, in which all losses fall steeply. A spike is a
        loss that exceeds the mean of the 50 losses before it by more than four standard deviations."""
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


def train_model(
    model: attnpack.Decoder,
    text: Tensor,
    steps: int,
    seed: int,
    *,
    anneal: bool = True,
    at: dict[int, Callable[[], None]] | None = None,
    after_step: Callable[[], None] = lambda: None,
) -> Course:
    """Trains in place.

    With anneal the learning rate has a warm-up and a cosine down to a tenth, as in pre-training. Without it the rate is
    a constant tenth, as uptraining continues from that end. at: functions by number of step; each is called before its
    step, and the one for `steps` after the last step. Batches depend only on the seed, so all variants read the same
    text.
    """
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
        after_step()
    course.seconds = time.perf_counter() - start
    return course


@torch.no_grad()
def time_decoding(model: attnpack.CausalLM, context: int, steps: int = 32) -> dict[str, float]:
    """KV bytes per token and layer, and ms per token after `context` tokens; neither depends on the weights."""
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
