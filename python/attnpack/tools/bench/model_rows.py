"""The rows of `attnpack bench model`: prompts and new tokens, with the work and the memory traffic that each needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ... import CausalLM
from ...errors import DTYPES
from .cases import Limits


class Sizes(NamedTuple):
    """Numbers of a CausalLM."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    body: int  # parameters that each token of a prompt meets
    head: int  # parameters of the map from states to logits; only a prompt's last token meets them

    @classmethod
    def of(cls, model: CausalLM) -> Sizes:
        embedding = model.model.embed_tokens.weight.numel()
        body = sum(parameter.numel() for parameter in model.model.parameters()) - embedding
        return cls(model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim, body, embedding)

    def flops(self, tokens: int, pairs: int, logits: int) -> float:
        """Two operations per multiply-add.

        Args:
            tokens: that go through the layers.
            pairs: of a query and a key that it may see, of one head.
            logits: rows of logits.
        """
        attention = 4 * pairs * self.heads * self.head_dim * self.layers
        return 2 * (tokens * self.body + logits * self.head) + attention

    def bytes(self, positions: int, dtype: str) -> int:
        """Bytes of the weights, and of the keys and values of `positions`."""
        cache = 2 * positions * self.kv_heads * self.head_dim * self.layers
        return (self.body + self.head + cache) * DTYPES[dtype].itemsize


@dataclass(frozen=True)
class Row:
    """One call of `generate`, on a prompt [batch, prompt].

    A prefill is timed as a whole: the prompt and the choice of one new token. Decoding is timed from one new token to
    the next.
    """

    name: str
    kind: str  # "prefill" or "decode"
    dtype: str
    batch: int
    prompt: int  # tokens of each row of the batch
    new_tokens: int
    keep: bool = False  # the prompt's keys and values are computed once, and kept between the rounds

    @property
    def unit(self) -> str:
        return "tokens/s" if self.kind == "prefill" else "ms/step"

    def figure(self, seconds: float) -> float:
        """`seconds` of a prefill or of a step, in the row's unit."""
        return self.batch * self.prompt / seconds if self.kind == "prefill" else seconds * 1e3

    def flops(self, sizes: Sizes) -> float:
        """The operations of a prefill, or of a step in the middle of the new tokens."""
        if self.kind == "prefill":
            pairs = self.prompt * (self.prompt + 1) // 2
            return sizes.flops(self.batch * self.prompt, self.batch * pairs, self.batch)
        return sizes.flops(self.batch, self.batch * self._middle_len, self.batch)

    def bytes(self, sizes: Sizes) -> int:
        """That the call must read or write at least once: the weights, and all keys and values."""
        return sizes.bytes(self.batch * (self.prompt if self.kind == "prefill" else self._middle_len), self.dtype)

    def limit_seconds(self, sizes: Sizes, limits: Limits) -> float:
        """The least time that a machine of these limits needs."""
        rates = {"bf16": limits.bf16_flops, "fp16": limits.fp16_flops}
        flops = rates.get(self.dtype) or limits.flops
        return max(self.flops(sizes) / flops, self.bytes(sizes) / limits.bytes_per_second)

    @property
    def _middle_len(self) -> int:
        """Positions of a sequence that the step in the middle attends."""
        return self.prompt + self.new_tokens // 2


def rows(dtype: str, quick: bool) -> list[Row]:
    """The rows of one dtype. The context of a long decode is the prompt and the new tokens together."""
    prompt, steps, context, lengths = (8, 4, 256, (64, 128)) if quick else (32, 24, 8192, (512, 2048))
    prefills = [Row(f"prefill {length} tokens", "prefill", dtype, 1, length, 1) for length in lengths]
    decodes = [Row(f"decode batch {batch}", "decode", dtype, batch, prompt, steps) for batch in (1, 4, 16)]
    long = Row(f"decode {context} context", "decode", dtype, 1, context - steps, steps, keep=True)
    return [*prefills, *decodes, long]
