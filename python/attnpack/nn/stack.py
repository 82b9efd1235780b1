"""Stacks of blocks: Encoder, Decoder, and EncoderDecoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import cpp
from .._C import checks
from ..cache import CrossCache, KVCache, ModelCache, check_kind, unchanged_on_error
from ..errors import (
    MODEL_CACHE,
    check_ids,
    check_input,
    check_positions,
    check_vocabulary,
    reject_keywords,
    with_article,
    wrong_kind,
)
from ..ops import nested
from ..ops.stored import is_stored
from .attention.base import SharedKeys
from .block import Block, DecoderBlock, EncoderBlock, positions_after
from .cached_twin import generate_by_twin
from .layer_tail import LayerInputTable
from .linear import is_offloaded
from .native import NativeModule, dropped
from .norm import arguments_of_norm, make_norm, norm_settings
from .sharded_attention import check_lengths, positions_here, refuse_context_parallel
from .stored import StoredEmbedding


class _Stack(NativeModule):
    """Blocks of one kind between optional embeddings and an optional norm. Children embed_tokens, embed_positions,
    layers, norm, as in a Llama model."""

    _block: type

    def __init__(
        self,
        layers: Iterable[nn.Module],
        *,
        norm: str | None = "rms",
        eps: float = 1e-6,
        embed_tokens: nn.Embedding | None = None,
        embed_scale: float = 1.0,
        embed_positions: nn.Embedding | None = None,
        dropout: float = 0.0,
        layer_inputs: LayerInputTable | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(layers, Iterable) or isinstance(layers, str | bytes):
            raise wrong_kind("layers", layers, f"a list of {self._block.__name__}s")
        layers = list(layers)
        checks.layers_given(len(layers))
        for i, layer in enumerate(layers):
            other = EncoderBlock if self._block is DecoderBlock else DecoderBlock
            if isinstance(layer, other) or not isinstance(layer, nn.Module):
                raise wrong_kind(f"layers[{i}]", layer, with_article(self._block.__name__))
            first, width = getattr(layers[0], "embed_dim", None), getattr(layer, "embed_dim", None)
            if first is not None and width is not None:
                checks.layer_width(i, width, first)
        for name, table in (("embed_tokens", embed_tokens), ("embed_positions", embed_positions)):
            if not isinstance(table, nn.Module | None):
                raise wrong_kind(name, table, "an nn.Embedding, or None")
            width = getattr(table, "embedding_dim", None)
            if width is not None:
                checks.embedding_width(width, layers[0].embed_dim, name)
        self.embed_tokens = embed_tokens
        self.embed_scale = embed_scale
        checks.dropout("dropout", dropout)
        self.dropout = dropout
        self.embed_positions = embed_positions
        self.layer_inputs = layer_inputs
        self.layers = nn.ModuleList(layers)
        beside = next(norm.weight for name, norm in layers[0].named_children() if name.endswith("layernorm"))
        factory = (beside.device if device is None else device, beside.dtype if dtype is None else dtype)
        self.norm = None if norm is None else make_norm(norm, layers[0].embed_dim, eps, *factory)

    def _check(self, name: str, x: Tensor) -> None:
        """Checks the input of forward, which `name` names for users."""
        if torch.compiler.is_compiling():
            return
        x = nested.one_row(name, x)
        if self.embed_tokens is not None:
            plain = type(self.embed_tokens) in (nn.Embedding, StoredEmbedding) and not is_offloaded(self.embed_tokens)
            check_ids(name, x, self.embed_tokens.weight if plain else None)
        elif isinstance(x, Tensor):
            checks.states(name, x, self.layers[0].embed_dim)

    def _embed(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """The states before the first block. positions are those of x; default 0..L-1."""
        h = self._look_up(x)
        if self.embed_positions is not None and nested.is_nested(h):
            places = nested.positions_of(h, positions)[0]
            h = nested.like(nested.rows("x", h) + self._learned(places), h)
        elif self.embed_positions is not None:
            check_positions(positions, h)
            positions = positions_here(h.size(1), h.device) if positions is None else positions
            h = h + self._learned(positions)
        return dropped(h, self)

    def _learned(self, positions: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and positions.device.type == "cpu":
            checks.learned_positions(positions, self.embed_positions.num_embeddings)
        return self.embed_positions(positions)

    def _look_up(self, x: Tensor) -> Tensor:
        if self.embed_tokens is None:
            self._check("x", x)
            return x
        self._check("ids", x)
        h = self._rows_of(x)
        return h if self.embed_scale == 1 else h * torch.full((), self.embed_scale, dtype=h.dtype, device=h.device)

    def _rows_of(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self.embed_tokens(x)
        try:
            return self.embed_tokens(x)
        except IndexError:
            check_vocabulary(self.embed_tokens, "ids", nested.one_row("ids", x))
            raise

    def _finish(self, x: Tensor) -> Tensor:
        return x if self.norm is None else self.norm(x)

    def _live_config(self) -> dict[str, Any]:
        norm = {"norm": None} if self.norm is None else norm_settings([self.norm])
        return {"embed_scale": self.embed_scale, "dropout": self.dropout, **norm}

    @classmethod
    def _arguments(cls, twin: Any) -> dict[str, Any]:
        parts = dict(twin.named_children().items())
        names = ("embed_tokens", "embed_positions")
        tables = {name: parts[name].state_dict()["weight"] for name in names if name in parts}
        return {
            "layers": [NativeModule._shell(layer) for layer in parts["layers"].children()],
            "embed_scale": twin.embed_scale,
            "dropout": twin.dropout,
            **{name: _shell_of_table(table) for name, table in tables.items()},
            **{name: NativeModule._shell(parts[name]) for name in ("layer_inputs",) if name in parts},
            **(arguments_of_norm(parts["norm"]) if "norm" in parts else {"norm": None}),
        }

    def _make_cpp(self, device: str | None, dtype: torch.dtype | None = None) -> Any:
        tables = {
            name: cpp.Embedding(*_table_shape(getattr(self, name)), device=device)
            for name in ("embed_tokens", "embed_positions")
            if getattr(self, name) is not None
        }
        if self.layer_inputs is not None:
            tables["layer_inputs"] = self.layer_inputs.cpp()
        layers = [layer.cpp() for layer in self.layers]
        return self._cpp_class(layers, **tables, **self._live_config())


def _table_shape(table: nn.Module) -> tuple[int, ...]:
    stored = isinstance(table, StoredEmbedding)
    return (table.num_embeddings, table.embedding_dim) if stored else tuple(table.weight.shape)


def _shell_of_table(table: Tensor) -> nn.Module:
    return StoredEmbedding.from_blocks(table) if is_stored(table) else nn.Embedding.from_pretrained(table)


class Encoder(_Stack):
    """Encoder blocks and a last norm.

    Args:
        layers: EncoderBlocks.
        norm: after the last block: "rms", "layer" or None.
        eps: eps of that norm.
        embed_tokens: an nn.Embedding; with it forward takes token ids.
        embed_scale: factor on its rows, rounded to their dtype (Gemma).
        embed_positions: an nn.Embedding whose row p is added to what stands at position p: learned positions (GPT-2),
            or those of ops.sinusoidal_positions.
        dropout: of the states before the first block, in training.
        layer_inputs: a LayerInputTable, which gives the inputs of the blocks' tails (Gemma 4).
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
        """[B, L, E], or ids [B, L] with embed_tokens -> [B, L, E]; arguments as in EncoderBlock.

        Jagged nested states [B, L*, E] or ids [B, L*] give nested states [B, L*, E], those of one call per sequence.
        """
        reject_keywords(unknown, cache=None)
        h = self._embed(x, positions)
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
        cross_cache: ModelCache | None = None,
        **unknown: Any,
    ) -> Tensor:
        """[B, L, E], or ids [B, L] with embed_tokens -> [B, L, E]; arguments as in DecoderBlock, cache a ModelCache,
        cross_cache one of CrossCaches.

        Jagged nested states or ids give nested states [B, L*, E], those of one call per sequence; cache is None then.
        A call that raises leaves the caches as they were (in eager mode).
        """
        reject_keywords(unknown, MODEL_CACHE)
        for model_cache in (cache, cross_cache):
            check_kind(model_cache, ModelCache, type(self).__name__)
            if model_cache is not None and len(model_cache.layers) != len(self.layers):
                checks.cache_layers(len(model_cache.layers), len(self.layers))
        inputs = {
            "mask": mask,
            "positions": positions,
            "kv_lens": kv_lens,
            "context_mask": context_mask,
            "context_lens": context_lens,
        }
        with unchanged_on_error(cache), unchanged_on_error(cross_cache):
            learned = self.embed_positions is not None and positions is None
            h = self._embed(x, positions_after(cache, x) if learned else positions)
            by_layer = None if self.layer_inputs is None else self.layer_inputs(x, h)
            shared = self._shared_keys(cache)
            for i, layer in enumerate(self.layers):
                if cross_cache is not None:
                    inputs["cross_cache"] = cross_cache.layers[i]
                per_layer = {} if shared[i] is None else {"kv_from": shared[i]}
                if by_layer is not None:
                    per_layer["layer_input"] = by_layer.select(-2, i)
                h = layer(h, context, cache=None if cache is None else cache.layers[i], **inputs, **per_layer)
            return self._finish(h)

    def _shared_keys(self, cache: ModelCache | None) -> list[KVCache | SharedKeys | None]:
        """The keys that each layer reads in place of its own; without a cache also the place where it puts its own."""
        sources = [getattr(layer, "kv_from", None) for layer in self.layers]
        found: list[KVCache | SharedKeys | None] = [None] * len(sources)
        for i, source in enumerate(sources):
            if source is None:
                continue
            if not 0 <= source < i or sources[source] is not None:
                checks.kv_source(i, source, not 0 <= source < i)
            if cache is not None:
                found[i] = cache.layers[source]
            else:
                found[source] = found[i] = found[source] or SharedKeys()
        return found

    def new_cache(self) -> ModelCache:
        """An empty cache that grows, of the kind that each layer's self-attention fills."""
        return ModelCache([layer.self_attn.new_cache() for layer in self.layers])


class EncoderDecoder(NativeModule):
    """The encoder reads the source; the decoder reads the target, with the output of the encoder as its context.

    `device` and `dtype` have no effect, because both parts exist already; all modules take them.
    """

    _cpp_class = cpp.EncoderDecoder

    _generate: Callable[..., Tensor] | None = None
    """The loop of `generate`, if several processes share the model."""

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
        source: Tensor | None,
        target: Tensor,
        *,
        source_lens: Tensor | None = None,
        target_lens: Tensor | None = None,
        cache: ModelCache | None = None,
        cross_cache: ModelCache | None = None,
        **unknown: Any,
    ) -> Tensor:
        """Decoder states [B, Lt, E].

        Args:
            source: [B, Ls, E], or ids [B, Ls] if the encoder has embed_tokens. Source and target may be jagged nested
                tensors, without lengths and cache.
            target: [B, Lt, E], or ids [B, Lt] if the decoder has embed_tokens.
            source_lens, target_lens: [B], the numbers of valid source tokens and of valid new target tokens.
            cache: the cache of the decoder's self-attention.
            cross_cache: a ModelCache of CrossCaches. The first call fills it; in later ones the encoder does not run,
                and source may be None.
        """
        reject_keywords(unknown, MODEL_CACHE)
        lengths = {"source_lens": source_lens, "target_lens": target_lens}
        caches = {"cache": cache, "cross_cache": cross_cache}
        if self._holds_context(cross_cache):
            return self.decode(None, target, **lengths, **caches)
        if source is None:
            raise ValueError("attnpack: source: got none, but no cross_cache holds it; give the first call the source")
        if nested.is_nested(source) or nested.is_nested(target):
            nested.rows("source", source), nested.rows("target", target)
            nested.refuse(**lengths, **caches)
        context = self.encode(source, source_lens=source_lens)
        return self.decode(context, target, **lengths, **caches)

    def encode(self, source: Tensor, *, source_lens: Tensor | None = None) -> Tensor:
        """The output of the encoder, [B, Ls, E]: the context of `decode`. Arguments as in forward."""
        check_lengths("source_lens", source_lens, source)
        return _run(self.encoder, "source", source, kv_lens=source_lens)

    def decode(
        self,
        context: Tensor | None,
        target: Tensor,
        *,
        source_lens: Tensor | None = None,
        target_lens: Tensor | None = None,
        cache: ModelCache | None = None,
        cross_cache: ModelCache | None = None,
    ) -> Tensor:
        """Decoder states [B, Lt, E] over a context [B, Ls, E] of `encode`; other arguments as in forward. With a filled
        cross_cache the context is not read, and may be None."""
        check_lengths("target_lens", target_lens, target)
        inputs = {"context_lens": source_lens, "kv_lens": target_lens, "cache": cache}
        if cross_cache is not None:
            inputs["cross_cache"] = cross_cache
        if not self._holds_context(cross_cache):
            if context is None:
                raise ValueError("attnpack: context: got none, but no cross_cache holds it; give what encode returns")
            inputs["context"] = context
        return _run(self.decoder, "target", target, **inputs)

    def generate(
        self,
        source: Tensor,
        target: Tensor,
        *,
        max_new_tokens: int,
        head: Callable[[Tensor], Tensor] | None = None,
        source_lens: Tensor | None = None,
        cache: str | ModelCache = "dynamic",
        num_return_sequences: int = 1,
        lengths: Tensor | None = None,
        stop_tokens: int | Iterable[int] = (),
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        callback: Callable[[Tensor], bool | None] | None = None,
        **unknown: Any,
    ) -> Tensor:
        """The target followed by the new tokens, [B * num_return_sequences, L + new]. The loop runs in C++.

        The encoder runs once. CrossCaches keep the keys and values of its output.

        Args:
            source: [B, Ls, E], or ids [B, Ls] if the encoder has embed_tokens.
            target: ids [B, L] with which each answer begins, often one token that marks the beginning.
            head: a function of the decoder's states [B, E] that gives logits [B, V], such as an nn.Linear. Default: the
                products with the decoder's own token embeddings.
            source_lens: [B], the numbers of valid source tokens.
            cache: of the decoder's self-attention: "dynamic", "none" (each token computes the target anew), or a
                ModelCache of any kind.
            lengths: [B], the numbers of valid tokens of a right-padded target.
            max_new_tokens, num_return_sequences, stop_tokens, temperature, top_k, top_p, seed, callback: as in
                `CausalLM.generate`.

        Raises:
            ValueError: an argument does not fit. TypeError: C++ cannot run this model, see `cpp()`.
        """
        reject_keywords(unknown, MODEL_CACHE, "generate")
        refuse_context_parallel("generate is called", "call it outside, with the whole source on each rank")
        if not isinstance(cache, str):
            check_kind(cache, ModelCache, "generate")
        return (self._generate or generate_by_twin)(
            self,
            source,
            target,
            head=head,
            source_lens=source_lens,
            cache=cache,
            max_new_tokens=max_new_tokens,
            num_return_sequences=num_return_sequences,
            lengths=lengths,
            stop_tokens=stop_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            callback=callback,
        )

    def new_cross_cache(self) -> ModelCache:
        """An empty `cross_cache`: a CrossCache for each of the decoder's layers."""
        return ModelCache([CrossCache() for _ in self.decoder.layers])

    def _holds_context(self, cross_cache: ModelCache | None) -> bool:
        if cross_cache is None:
            return False
        check_kind(cross_cache, ModelCache, type(self).__name__)
        return len(cross_cache) > 0

    def _make_cpp(self, device: str | None, dtype: torch.dtype | None = None) -> Any:
        return self._cpp_class(self.encoder.cpp(), self.decoder.cpp())

    @classmethod
    def _arguments(cls, twin: Any) -> dict[str, Any]:
        return {name: NativeModule._shell(part) for name, part in twin.named_children().items()}


def _run(stack: nn.Module, name: str, x: Tensor, **inputs: Any) -> Tensor:
    """stack(x, **inputs), with errors that call x by the name that it has for the caller's users."""
    if not isinstance(stack, _Stack) or torch.compiler.is_compiling():
        return stack(x, **inputs)
    stack._check(name, x)
    if stack.embed_tokens is None:
        check_input(name, nested.one_row(name, x), stack.layers[0].embed_dim, None)
        return stack(x, **inputs)
    try:
        return stack(x, **inputs)
    except ValueError:
        check_vocabulary(stack.embed_tokens, name, nested.one_row(name, x))
        raise
