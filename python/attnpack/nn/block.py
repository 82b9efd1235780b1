"""Transformer blocks: attention and a feed-forward, each with a norm and a residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import cpp
from .._C import checks
from ..cache import CrossCache, KVCache, ModelCache
from ..errors import check_input, reject_keywords, wrong_kind
from ..ops import nested
from .attention.base import NativeAttention, SharedKeys
from .feed_forward import FeedForward
from .layer_tail import LayerTail
from .linear import is_offloaded
from .native import NativeModule, dropped
from .norm import arguments_of_norm, make_norm, norm_of_sum, norm_settings
from .sharded_attention import check_lengths

_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "cross_attention_layernorm",
)
# The norms that a layout has. None is the layout that pre_norm says.
_NORMS_OF = {
    None: _NORMS[:2],
    "sandwich": _NORMS[:4],
    "output": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "parallel": _NORMS[:1],
    "parallel_two": _NORMS[:2],
}


def _check_parts(attention: nn.Module, feed_forward: nn.Module, cross_attention: nn.Module | None) -> None:
    """Checks that the parts are of the right kinds and of one width: their outputs are added to x."""
    # nn.MultiheadAttention is refused: it takes query, key and value, and knows no cache.
    other = isinstance(attention, FeedForward | nn.MultiheadAttention)
    if other or not (isinstance(attention, nn.Module) and hasattr(attention, "embed_dim")):
        wanted = "an attention module with an embed_dim, such as attnpack.MultiHeadAttention"
        raise wrong_kind("attention", attention, wanted)
    if isinstance(cross_attention, FeedForward | nn.MultiheadAttention) or not isinstance(
        cross_attention, nn.Module | None
    ):
        raise wrong_kind("cross_attention", cross_attention, "an attention module, or None")
    if isinstance(feed_forward, NativeAttention) or not isinstance(feed_forward, nn.Module):
        raise wrong_kind("feed_forward", feed_forward, "a module [..., E] -> [..., E], such as attnpack.FeedForward")
    embed_dim = attention.embed_dim
    checks.output_width(getattr(attention, "out_dim", embed_dim), embed_dim)
    for name, part in (("feed_forward", feed_forward), ("cross_attention", cross_attention)):
        for width in (getattr(part, "embed_dim", embed_dim), getattr(part, "out_dim", embed_dim)):
            checks.part_width(name, width, embed_dim)


def positions_after(cache: KVCache | ModelCache | None, x: Tensor) -> Tensor | None:
    """int64 [B, L], the positions of x after what the cache holds; None where it holds no sequence yet."""
    if cache is None or cache.lengths.size(0) != x.size(0):
        return None
    return cache.lengths.unsqueeze(1) + torch.arange(x.size(1), device=x.device)


class Block(NativeModule):
    def __init__(
        self,
        attention: nn.Module,
        feed_forward: nn.Module,
        norm: str,
        pre_norm: bool,
        cross_attention: nn.Module | None,
        eps: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        dropout: float,
        residual_scale: float,
        layout: str | None = None,
    ) -> None:
        super().__init__()
        _check_parts(attention, feed_forward, cross_attention)
        checks.dropout("dropout", dropout)
        if layout is not None:
            checks.layout(layout, pre_norm, cross_attention is not None)
        self.pre_norm = pre_norm
        self.dropout = dropout
        self.residual_scale = residual_scale
        self.embed_dim = attention.embed_dim
        self.self_attn = attention
        self.mlp = feed_forward
        # By default the norms get the device and dtype of the attention.
        beside = next(attention.parameters(), torch.empty(0))
        factory = (beside.device if device is None else device, beside.dtype if dtype is None else dtype)
        for name in _NORMS_OF[layout]:
            setattr(self, name, make_norm(norm, self.embed_dim, eps, *factory))
        if cross_attention is not None:
            self.cross_attn = cross_attention
            self.cross_attention_layernorm = make_norm(norm, self.embed_dim, eps, *factory)

    def _live_config(self) -> dict[str, Any]:
        norms = (getattr(self, name, None) for name in _NORMS)
        options = {"pre_norm": self.pre_norm, "dropout": self.dropout, "residual_scale": self.residual_scale}
        return {**options, **norm_settings(norm for norm in norms if norm is not None)}

    @classmethod
    def _arguments(cls, twin: Any) -> dict[str, Any]:
        parts = dict(twin.named_children().items())
        names = {"attention": "self_attn", "feed_forward": "mlp", "cross_attention": "cross_attn"}
        made = {name: NativeModule._shell(parts[part]) for name, part in names.items() if part in parts}
        norm = next(parts[name] for name in _NORMS if name in parts)
        settings = {"pre_norm": twin.pre_norm, "dropout": twin.dropout, "residual_scale": twin.residual_scale}
        return {**made, **settings, **arguments_of_norm(norm)}

    def _check(self, x: Tensor) -> None:
        projection = None if is_offloaded(self.self_attn) else getattr(self.self_attn, "q_proj", None)
        check_input("x", nested.one_row("x", x), self.embed_dim, projection)

    def _twins(self, *names: str) -> list[Any]:
        """The C++ modules of these children."""
        for name in names:
            if not hasattr(getattr(self, name), "cpp"):
                raise TypeError(
                    f"attnpack: {type(self).__name__}.{name} is a {type(getattr(self, name)).__name__}, which C++ "
                    "cannot run there: give the block a module of attnpack, or call the Python module"
                )
        return [getattr(self, name).cpp() for name in names]

    def _run_parts(self, x: Tensor, *parts: tuple[nn.Module, Callable[[Tensor], Tensor]]) -> Tensor:
        """For each norm and layer in turn x + layer(norm(x)), or norm(x + layer(x))."""
        if not self.pre_norm:
            for norm, layer in parts:
                _, x = norm_of_sum(norm, x, self._added(layer(x)))
            return x
        normed = parts[0][0](x)
        for (norm, _), (_, layer) in zip(parts[1:], parts, strict=False):
            x, normed = norm_of_sum(norm, x, self._added(layer(normed)))
        return x + self._added(parts[-1][1](normed))

    def _added(self, x: Tensor) -> Tensor:
        """The output of attention or of the feed-forward, as the block adds it."""
        kept = dropped(x, self)
        return kept if self.residual_scale == 1 else kept * self.residual_scale

    def extra_repr(self) -> str:
        return f"pre_norm={self.pre_norm}" + (f", dropout={self.dropout}" if self.dropout else "")


class EncoderBlock(Block):
    """Self-attention, then the feed-forward, each with a norm and a residual.

    Args:
        attention: an attention module with its own `causal` setting; child self_attn.
        feed_forward: a module [..., E] -> [..., E]; child mlp.
        norm: "rms", "rms_plus_one" (Gemma), "layer" or "layer_no_bias" (Cohere 2); children input_layernorm,
            post_attention_layernorm.
        pre_norm: True computes x + f(norm(x)), False norm(x + f(x)) as in Vaswani et al. 2017.
        eps: eps of the norms.
        dropout: of what attention and feed-forward add to x, in training.
        residual_scale: factor on what they add (Granite).
        device, dtype: those of the norms; default those of attention.
    """

    _cpp_class = cpp.EncoderBlock

    def __init__(
        self,
        attention: nn.Module,
        feed_forward: nn.Module,
        *,
        norm: str = "rms",
        pre_norm: bool = True,
        eps: float = 1e-6,
        dropout: float = 0.0,
        residual_scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(attention, feed_forward, norm, pre_norm, None, eps, device, dtype, dropout, residual_scale)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        kv_lens: Tensor | None = None,
        **unknown: Any,
    ) -> Tensor:
        """[B, L, E] -> [B, L, E], or a jagged nested [B, L*, E] -> [B, L*, E], one call per sequence.

        Args:
            mask: broadcastable to [B, Hq, L, L].
            positions: int64 [L] or [B, L], for RoPE.
            kv_lens: [B], the number of valid tokens of each sequence.
        """
        reject_keywords(unknown, cache=None)
        self._check(x)
        return self._run_parts(
            x,
            (self.input_layernorm, lambda h: self.self_attn(h, mask=mask, positions=positions, kv_lens=kv_lens)),
            (self.post_attention_layernorm, self.mlp),
        )

    def _make_cpp(self, device: str | None, dtype: torch.dtype | None = None) -> Any:
        return self._cpp_class(*self._twins("self_attn", "mlp"), **self._live_config())


class DecoderBlock(Block):
    """Causal self-attention, then cross-attention if the block has it, then the feed-forward, each with a norm and a
    residual.

    The block ignores the `causal` setting of its self-attention module. Cross-attention sees the whole context; its
    RoPE rotates queries by their positions in the target, with a cache too. With a cache, cross-attention may have no
    window and no ALiBi. Without cross-attention the state dict has the names of a Llama layer.

    Args:
        attention, feed_forward, norm, pre_norm, eps, dropout, residual_scale, device, dtype: as in EncoderBlock.
        layout: other places of the norms, in place of pre_norm; not together with cross_attention.
            "sandwich": x + norm(f(norm(x))), with children pre_feedforward_layernorm and post_feedforward_layernorm too
            (Gemma 2). "output": x + norm(f(x)), children post_attention_layernorm and post_feedforward_layernorm (OLMo
            2). "parallel": x + attention(norm(x)) + feed_forward(norm(x)) with one norm, input_layernorm (Falcon-7B),
            or with post_attention_layernorm before the feed-forward for "parallel_two" (Falcon-40B).
        cross_attention: an attention module that reads the context; children cross_attn, cross_attention_layernorm.
        tail: a LayerTail behind the feed-forward (Gemma 4), or None.
        kv_from: in a Decoder, the number of the earlier layer whose keys and values self-attention reads; the module
            has own_keys=False.
    """

    _cpp_class = cpp.DecoderBlock

    def __init__(
        self,
        attention: nn.Module,
        feed_forward: nn.Module,
        *,
        norm: str = "rms",
        pre_norm: bool = True,
        layout: str | None = None,
        cross_attention: nn.Module | None = None,
        eps: float = 1e-6,
        dropout: float = 0.0,
        residual_scale: float = 1.0,
        tail: LayerTail | None = None,
        kv_from: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        others = (device, dtype, dropout, residual_scale, layout)
        super().__init__(attention, feed_forward, norm, pre_norm, cross_attention, eps, *others)
        self.layout = layout
        self.tail = tail
        self.kv_from = kv_from
        self.has_cross_attention = cross_attention is not None

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        kv_lens: Tensor | None = None,
        context_mask: Tensor | None = None,
        context_lens: Tensor | None = None,
        cross_cache: CrossCache | None = None,
        kv_from: KVCache | SharedKeys | None = None,
        layer_input: Tensor | None = None,
        **unknown: Any,
    ) -> Tensor:
        """[B, L, E] -> [B, L, E], or a jagged nested [B, L*, E] -> [B, L*, E], one call per sequence.

        Args:
            context: [B, Lc, E], the input of cross-attention; nested if x is.
            mask: broadcastable to [B, Hq, L, keys]; it applies in addition to causality.
            cache: the cache of self-attention.
            positions: int64 [L] or [B, L], for RoPE.
            kv_lens: [B], the number of valid new tokens of each sequence.
            context_mask: broadcastable to [B, Hq, L, Lc].
            context_lens: [B], the number of valid context tokens of each sequence.
            cross_cache: the cache of cross-attention. The first call stores the context in it; later calls read it, and
                need no context.
            kv_from: what self-attention reads in place of keys of its own: the cache of an earlier layer, or what that
                layer shares without a cache.
            layer_input: [B, L, input_dim], the input of the tail.
        """
        reject_keywords(unknown)
        self._check(x)
        is_cross = isinstance(cross_cache, CrossCache)
        if cross_cache is not None and not (is_cross and self.has_cross_attention):
            checks.cross_cache(is_cross, True, self.has_cross_attention)
        if isinstance(cache, CrossCache):
            checks.self_cache(True)
        reads = context is not None or (is_cross and cross_cache.filled)
        if self.has_cross_attention != reads:
            checks.cross_attention(self.has_cross_attention, reads)
        if nested.is_nested(x):
            nested.refuse(context_mask=context_mask, context_lens=context_lens, cross_cache=cross_cache)
        elif context is not None:
            check_lengths("context_lens", context_lens, context)

        cross = {"mask": context_mask, "kv_lens": context_lens}
        if self.has_cross_attention:
            cross |= self._query_positions(x, positions, cache)
        if is_cross:
            cross["cache"] = cross_cache

        def attend(h: Tensor) -> Tensor:
            shared = {} if kv_from is None else {"kv_from": kv_from}
            appends = None if isinstance(kv_from, KVCache) else cache
            return self.self_attn(
                h, causal=True, mask=mask, cache=appends, positions=positions, kv_lens=kv_lens, **shared
            )

        x = self._run(x, context, attend, cross)
        if self.tail is None and layer_input is not None:
            checks.layer_input(True, False)
        return x if self.tail is None else self.tail(x, layer_input)

    def _run(
        self, x: Tensor, context: Tensor | None, attend: Callable[[Tensor], Tensor], cross: dict[str, Any]
    ) -> Tensor:
        """The block without its tail."""
        if self.layout is not None:
            return self._run_layout(x, attend)
        parts: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = [(self.input_layernorm, attend)]
        if self.has_cross_attention:
            parts.append((self.cross_attention_layernorm, lambda h: self.cross_attn(h, context, **cross)))
        return self._run_parts(x, *parts, (self.post_attention_layernorm, self.mlp))

    def _query_positions(self, x: Tensor, positions: Tensor | None, cache: KVCache | None) -> dict[str, Tensor]:
        """The positions of x for cross-attention, which knows nothing of what was before x; {} where it needs none."""
        window, alibi, chunk = (getattr(self.cross_attn, name, None) for name in ("window", "alibi", "chunk"))
        if cache is not None and (alibi or chunk or window not in (None, (-1, -1))):
            checks.cross_distances(True, True)
        if getattr(self.cross_attn, "rope", None) is None:
            return {}
        positions = positions_after(cache, x) if positions is None else positions
        return {} if positions is None else {"positions": positions}

    def _run_layout(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        if self.layout in ("parallel", "parallel_two"):
            first = self.input_layernorm(x)
            second = first if self.layout == "parallel" else self.post_attention_layernorm(x)
            return x + self._added(attend(first)) + self._added(self.mlp(second))
        sandwich = self.layout == "sandwich"
        attended = self.post_attention_layernorm(attend(self.input_layernorm(x) if sandwich else x))
        x = x + self._added(attended)
        fed = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x) if sandwich else x))
        return x + self._added(fed)

    def _live_config(self) -> dict[str, Any]:
        return {**super()._live_config(), "layout": self.layout, "kv_from": self.kv_from}

    @classmethod
    def _arguments(cls, twin: Any) -> dict[str, Any]:
        parts = dict(twin.named_children().items())
        tail = {"tail": NativeModule._shell(parts["tail"])} if "tail" in parts else {}
        return {**super()._arguments(twin), "layout": twin.layout, "kv_from": twin.kv_from, **tail}

    def _make_cpp(self, device: str | None, dtype: torch.dtype | None = None) -> Any:
        parts = self._twins("self_attn", "mlp")
        cross = self._twins("cross_attn")[0] if self.has_cross_attention else None
        tail = self._twins("tail")[0] if self.tail is not None else None
        return self._cpp_class(*parts, cross_attention=cross, tail=tail, **self._live_config())
