"""Stacks of blocks: Encoder, Decoder, and EncoderDecoder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import cpp
from ..cache import ModelCache, check_kind, unchanged_on_error
from ..checks import MODEL_CACHE, check_device, check_ids, check_lengths, explain_ids, naming, reject_keywords
from ..explain import with_article, wrong_kind
from .block import Block, DecoderBlock, EncoderBlock
from .native import NativeModule
from .norm import arguments_of_norm, make_norm, norm_settings


class _Stack(NativeModule):
    """Blocks of one kind between an optional embedding and an optional norm. Children embed_tokens, layers, norm, as in
    a Llama model."""

    _block: type

    def __init__(
        self,
        layers: Iterable[nn.Module],
        *,
        norm: str | None = "rms",
        eps: float = 1e-6,
        embed_tokens: nn.Embedding | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(layers, Iterable) or isinstance(layers, str | bytes):
            raise wrong_kind("layers", layers, f"a list of {self._block.__name__}s")
        layers = list(layers)
        if not layers:
            raise ValueError("attnpack: layers: got none, want at least one block")
        for i, layer in enumerate(layers):
            other = EncoderBlock if self._block is DecoderBlock else DecoderBlock
            if isinstance(layer, other) or not isinstance(layer, nn.Module):
                raise wrong_kind(f"layers[{i}]", layer, with_article(self._block.__name__))
            first, width = getattr(layers[0], "embed_dim", None), getattr(layer, "embed_dim", None)
            if first is not None and width is not None and width != first:
                raise ValueError(
                    f"attnpack: layers[{i}]: got width {width}, want {first} as the first block has; each reads "
                    "what the one before it gives"
                )
        width = getattr(embed_tokens, "embedding_dim", None)
        if width is not None and width != layers[0].embed_dim:
            raise ValueError(
                f"attnpack: embed_tokens: got width {width}, want {layers[0].embed_dim} as the blocks have"
            )
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        beside = layers[0].input_layernorm.weight
        factory = (beside.device if device is None else device, beside.dtype if dtype is None else dtype)
        self.norm = None if norm is None else make_norm(norm, layers[0].embed_dim, eps, *factory)

    def _embed(self, x: Tensor) -> Tensor:
        if self.embed_tokens is None:
            if isinstance(x, Tensor) and not x.is_floating_point():
                raise ValueError(
                    f"attnpack: x: got {x.dtype} of shape {list(x.shape)}, want states [batch, length, "
                    f"{self.layers[0].embed_dim}]; to take token numbers give the stack embed_tokens"
                )
            return x
        check_ids(x)
        if type(self.embed_tokens) is nn.Embedding:
            check_device("ids", x, self.embed_tokens.weight)
        try:
            return self.embed_tokens(x)
        except IndexError:
            if isinstance(self.embed_tokens, nn.Embedding):
                explain_ids(x, self.embed_tokens.num_embeddings)
            raise

    def _finish(self, x: Tensor) -> Tensor:
        return x if self.norm is None else self.norm(x)

    def _live_config(self) -> dict[str, Any]:
        return {"norm": None} if self.norm is None else norm_settings([self.norm])

    @classmethod
    def _arguments(cls, twin: Any) -> dict[str, Any]:
        parts = dict(twin.named_children().items())
        table = parts.get("embed_tokens")
        return {
            "layers": [NativeModule._shell(layer) for layer in parts["layers"].children()],
            "embed_tokens": table and nn.Embedding.from_pretrained(table.state_dict()["weight"]),
            **(arguments_of_norm(parts["norm"]) if "norm" in parts else {"norm": None}),
        }

    def _make_cpp(self, device: str | None, dtype: torch.dtype | None = None) -> Any:
        embedding = None
        if self.embed_tokens is not None:
            embedding = cpp.Embedding(*self.embed_tokens.weight.shape, device=device)
        layers = [layer.cpp() for layer in self.layers]
        return self._cpp_class(layers, embed_tokens=embedding, **self._live_config())


class Encoder(_Stack):
    """Encoder blocks and a last norm.

    Args:
        layers: EncoderBlocks.
        norm: after the last block: "rms", "layer" or None.
        eps: eps of that norm.
        embed_tokens: an nn.Embedding; with it forward takes token ids.
        device, dtype: those of the norm; default those of the first block.
    """

    _cpp_class = cpp.Encoder
    _block = EncoderBlock

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        kv_lens: Tensor | None = None,
        **unknown: Any,
    ) -> Tensor:
        """[B, L, E], or ids [B, L] with embed_tokens -> [B, L, E]; arguments as in EncoderBlock."""
        reject_keywords(unknown, cache=None)
        h = self._embed(x)
        for layer in self.layers:
            h = layer(h, mask=mask, positions=positions, kv_lens=kv_lens)
        return self._finish(h)


class Decoder(_Stack):
    """Decoder blocks and a last norm; arguments as in Encoder, with DecoderBlocks."""

    _cpp_class = cpp.Decoder
    _block = DecoderBlock

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        cache: ModelCache | None = None,
        positions: Tensor | None = None,
        kv_lens: Tensor | None = None,
        context_mask: Tensor | None = None,
        context_lens: Tensor | None = None,
        **unknown: Any,
    ) -> Tensor:
        """[B, L, E], or ids [B, L] with embed_tokens -> [B, L, E]; arguments as in DecoderBlock, cache a ModelCache.

        A call that raises leaves the cache as it was (in eager mode).
        """
        reject_keywords(unknown, MODEL_CACHE)
        check_kind(cache, ModelCache, type(self).__name__)
        if cache is not None and len(cache.layers) != len(self.layers):
            raise ValueError(
                f"attnpack: cache: got one of {len(cache.layers)} layers, want {len(self.layers)} as the model has"
            )
        inputs = {
            "mask": mask,
            "positions": positions,
            "kv_lens": kv_lens,
            "context_mask": context_mask,
            "context_lens": context_lens,
        }
        with unchanged_on_error(cache):
            h = self._embed(x)
            for i, layer in enumerate(self.layers):
                h = layer(h, context, cache=None if cache is None else cache.layers[i], **inputs)
            return self._finish(h)


class EncoderDecoder(NativeModule):
    """The encoder reads the source; the decoder reads the target, with the output of the encoder as its context.

    `device` and `dtype` have no effect, because both parts exist already; all modules take them.
    """

    _cpp_class = cpp.EncoderDecoder

    def __init__(
        self,
        encoder: Encoder,
        decoder: Decoder,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, part, other in (("encoder", encoder, Decoder), ("decoder", decoder, Encoder)):
            if isinstance(part, other | Block) or not isinstance(part, nn.Module):
                raise wrong_kind(name, part, f"an attnpack.{name.capitalize()}")
        self.encoder = encoder
        self.decoder = decoder

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_lens: Tensor | None = None,
        target_lens: Tensor | None = None,
        cache: ModelCache | None = None,
        **unknown: Any,
    ) -> Tensor:
        """Decoder states [B, Lt, E].

        Args:
            source: [B, Ls, E], or ids [B, Ls] if the encoder has embed_tokens.
            target: [B, Lt, E], or ids [B, Lt] if the decoder has embed_tokens.
            source_lens, target_lens: [B], the numbers of valid source tokens and of valid new target tokens.
            cache: the cache of the decoder's self-attention.
        """
        reject_keywords(unknown, MODEL_CACHE)
        check_lengths("source_lens", source_lens, source)
        check_lengths("target_lens", target_lens, target)
        with naming(_input_name(self.encoder), "source"):
            memory = self.encoder(source, kv_lens=source_lens)
        with naming(_input_name(self.decoder), "target"):
            return self.decoder(target, memory, kv_lens=target_lens, context_lens=source_lens, cache=cache)

    def _make_cpp(self, device: str | None, dtype: torch.dtype | None = None) -> Any:
        return self._cpp_class(self.encoder.cpp(), self.decoder.cpp())

    @classmethod
    def _arguments(cls, twin: Any) -> dict[str, Any]:
        return {name: NativeModule._shell(part) for name, part in twin.named_children().items()}


def _input_name(stack: nn.Module) -> str:
    """The name of the input of a stack's forward in its errors."""
    return "x" if getattr(stack, "embed_tokens", None) is None else "ids"
