"""Language models over bytes that have as many parameters whatever their attention is: the feed-forwards take what it
leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ... import Decoder, DecoderBlock, FeedForward
from .variants import NUM_HEADS, Sizes, make_attention

BYTES = 256
_TOLERANCE = 0.02  # how far a model may be from the number of parameters, as a fraction
_HIDDEN = 8 / 3  # width inside the feed-forwards of mha over that of the model, as in Llama
_WIDTHS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


@dataclass(frozen=True)
class Scale:
    """All that follows from the number of parameters, and is the same for each variant."""

    params: int
    num_layers: int
    embed_dim: int
    head_dim: int
    length: int  # bytes of a sequence
    batch: int
    steps: int
    learning_rate: float

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.embed_dim, self.head_dim, self.length)


# Up to so many parameters: layers, bytes of a sequence, sequences of a step, steps.
_SCALES = (
    (50_000, 2, 64, 16, 200),
    (1_000_000, 3, 128, 8, 300),
    (20_000_000, 6, 256, 8, 1000),
    (math.inf, 12, 512, 8, 4000),
)


def scale_of(params: int) -> Scale:
    """The sizes of models of so many parameters: of those that fit, the ones whose feed-forwards in mha are nearest to
    the usual width."""
    _, num_layers, length, batch, steps = next(row for row in _SCALES if params <= row[0])

    def distance(width: int) -> float:
        attention = 4 * width * NUM_HEADS * _head_dim(width)
        hidden = (params - BYTES * width - num_layers * attention) / (3 * num_layers * width)
        return abs(math.log(hidden / width / _HIDDEN)) if hidden > 0 else math.inf

    width = min(_WIDTHS, key=distance)
    rate = round(3e-3 * math.sqrt(64 / width), 5)
    return Scale(params, num_layers, width, _head_dim(width), length, batch, steps, rate)


def _head_dim(width: int) -> int:
    """As wide as eight heads share the model's width, but 16 where the width allows it: narrower heads learn badly."""
    return max(width // NUM_HEADS, min(16, width // 4), 8)


class ByteModel(nn.Module):
    """Decoder blocks over bytes, whose embedding is the head too.

    Args:
        attentions: a layer of attention for each block.
        hidden_dim: width inside the feed-forwards.
    """

    def __init__(self, attentions: Sequence[nn.Module], hidden_dim: int, **factory: Any) -> None:
        super().__init__()
        width = attentions[0].embed_dim
        blocks = [
            DecoderBlock(attention, FeedForward(width, hidden_dim, **factory), **factory) for attention in attentions
        ]
        table = nn.Embedding(BYTES, width, **factory)
        table.weight.data.mul_(width**-0.5)  # the first logits then have a deviation of about 1
        self.decoder = Decoder(blocks, embed_tokens=table, **factory)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, L] -> logits [B, L, 256]"""
        return F.linear(self.decoder(ids), self.decoder.embed_tokens.weight)


def make_model(variant: str, scale: Scale, **factory: Any) -> ByteModel:
    """The model of a variant, with `scale.params` parameters up to 2%; `factory` has its device and dtype.

    Raises ValueError, naming --params, if so few parameters do not hold the variant's attention.
    """
    layers = [make_attention(variant, scale.sizes, **factory) for _ in range(scale.num_layers)]
    return ByteModel(layers, equal_hidden_dim(layers, scale.params), **factory)


def equal_hidden_dim(attentions: Sequence[nn.Module], params: int) -> int:
    """The width inside the feed-forwards that brings a ByteModel with these layers nearest to so many parameters."""
    width, count = attentions[0].embed_dim, len(attentions)
    norms = 2 * count + 1
    rest = sum(map(count_parameters, attentions)) + (BYTES + norms) * width
    step = 3 * count * width  # parameters of one more number inside each feed-forward
    hidden = max(1, round((params - rest) / step))
    if abs(rest + hidden * step - params) > _TOLERANCE * params:
        kind = type(attentions[0]).__name__
        raise ValueError(
            f"--params: got {params:,}, want at least {rest + step:,} for {count} layers with {kind}; give more, or "
            "leave the variant out"
        )
    return hidden


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
