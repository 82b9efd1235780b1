"""Attention modules: projections that are real ``nn.Linear``s around one native op, ``attnpack.ops.attend``.

B batch, L / Lkv lengths of x and context, Hq / Hkv query / kv heads, E embed_dim, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from . import cpp, ops
from .cache import KVCache
from .checks import check_context, check_input, reject_keywords
from .native import NativeModule
from .norm import RMSNorm
from .rope import RotaryEmbedding


class AttentionSettings(TypedDict, total=False):
    """Keyword arguments of GroupedQueryAttention that MultiHeadAttention and MultiQueryAttention take too."""

    head_dim: int | None
    kdim: int | None
    vdim: int | None
    bias: bool
    out_bias: bool | None
    dropout: float
    causal: bool
    window: tuple[int, int] | None
    softcap: float
    sinks: bool
    alibi: bool
    qk_norm: bool
    rope: RotaryEmbedding | None
    scale: float | None
    device: torch.device | str | None
    dtype: torch.dtype | None


class _Attention(NativeModule):
    """What the modules share: the way from heads through the op. Subclasses set these and `_config`."""

    causal: bool
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    dropout: float = 0.0
    scale: float | None = None
    head_map: tuple[int, ...] | None = None
    rope: RotaryEmbedding | None
    _config: dict[str, Any]  # arguments of the twin, without rope and device
    _cpp_class: type

    def _attend(
        self,
        query: Tensor,  # [B, Hq, L, D]
        key: Tensor,  # [B, Hkv, Lkv, D]
        value: Tensor,  # [B, Hkv, Lkv, D]
        cache: KVCache | None,
        kv_lens: Tensor | None,
        **inputs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        room = None if cache is None else cache.reserve(key, value)
        result = ops.attend(
            query,
            key,
            value,
            rope=None if self.rope is None else self.rope.settings,
            cache=room,
            kv_lens=kv_lens,
            window=(-1, -1) if self.window is None else self.window,
            softcap=self.softcap,
            head_map=self.head_map,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scale,
            **inputs,
        )
        if cache is not None:
            cache.commit(key.size(2), kv_lens)
        return result

    def _rotate(self, query: Tensor, key: Tensor, positions: Tensor | None, cross: bool) -> tuple[Tensor, Tensor]:
        if self.rope is None:
            return query, key
        return self.rope(query, positions), self.rope(key, None if cross else positions)

    def _make_cpp(self, device: str | None) -> Any:
        rope = {} if self.rope is None else {"rope": self.rope.cpp()}
        return self._cpp_class(**self._config, **rope, device=device)

    def extra_repr(self) -> str:
        shown = {name: value for name, value in self._config.items() if value not in (None, False, 0.0)}
        return ", ".join(f"{name}={value}" for name, value in shown.items())


class _ContextAttention(_Attention):
    """Modules that are called with x and, for cross-attention, a context."""

    embed_dim: int
    kdim: int
    vdim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        value_context: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        kv_lens: Tensor | None = None,
        need_weights: bool = False,
        **unknown: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Self-attention of x, or, with a context, attention of x over it.

        Args:
            x: [B, L, embed_dim].
            context: [B, Lkv, kdim], where keys and values come from; RoPE rotates its keys at 0..Lkv-1.
            value_context: [B, Lkv, vdim], where values come from; default context.
            mask: bool (True = may attend) or additive float, broadcastable to [B, Hq, L, keys]. A padding mask has
                shape [B, 1, 1, Lkv]. With a cache it covers all keys after the append, `len(cache)` of them.
            causal: default the module's own setting, with context False.
            cache: the new keys and values are appended first; the queries stand behind what was there.
            positions: int64 [L] or [B, L], for RoPE only; default behind the cache, else 0..L-1.
            kv_lens: [B], valid new tokens (with context: valid context keys) of each sequence.
            need_weights: also return the probabilities before dropout.

        Returns:
            out [B, L, embed_dim] ([B, L, head_dim] of SelfAttention), or (out, weights [B, Hq, L, keys]).

        Raises:
            ValueError: a shape, dtype, device or length does not fit; nothing has been written then.
        """
        reject_keywords(unknown)
        check_context(x, context, value_context, cache)
        query, key, value = self._heads(x, context, value_context)
        result = self._attend(
            query,
            key,
            value,
            cache,
            kv_lens,
            positions=positions,
            cross=context is not None,
            mask=mask,
            causal=(self.causal and context is None) if causal is None else causal,
            need_weights=need_weights,
        )
        if not need_weights:
            return self._output(result)
        out, weights = result
        return self._output(out), weights

    def project(
        self, x: Tensor, context: Tensor | None = None, *, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(q [B, Hq, L, D], k [B, Hkv, Lkv, D], v [B, Hkv, Lkv, D]) as they enter the operator."""
        check_context(x, context, None, None)
        query, key, value = self._heads(x, context, None)
        query, key = self._rotate(query, key, positions, context is not None)
        return query, key, value

    def _heads(self, x: Tensor, context: Tensor | None, value_context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v by head, normed, not rotated."""
        context = x if context is None else context
        value_context = context if value_context is None else value_context
        check_input("x", x, self.embed_dim, self.q_proj)
        check_input("context", context, self.kdim, self.k_proj)
        check_input("value_context", value_context, self.vdim, self.v_proj)
        return (
            _split_heads(self.q_proj(x), self.num_heads),
            _split_heads(self.k_proj(context), self.num_kv_heads),
            _split_heads(self.v_proj(value_context), self.num_kv_heads),
        )

    def _output(self, joined: Tensor) -> Tensor:
        return joined


class SelfAttention(_ContextAttention):
    """One head and no output projection: x [B, L, embed_dim] -> [B, L, head_dim] (Vaswani et al. 2017, section 3.2.1).

    Args:
        embed_dim: width of x.
        head_dim: width of the head; default embed_dim.
        bias: on q_proj, k_proj, v_proj.
        causal: each token sees itself and what stands before it.
    """

    _cpp_class = cpp.SelfAttention

    def __init__(
        self,
        embed_dim: int,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._config = {"embed_dim": embed_dim, "head_dim": head_dim, "bias": bias, "causal": causal}
        self.embed_dim = self.kdim = self.vdim = embed_dim
        self.head_dim = embed_dim if head_dim is None else head_dim
        self.num_heads = self.num_kv_heads = 1
        self.causal = causal
        self.rope = None
        self._make_cpp("meta")
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, nn.Linear(embed_dim, self.head_dim, bias=bias, device=device, dtype=dtype))


class GroupedQueryAttention(_ContextAttention):
    """Groups of query heads share a kv head (Ainslie et al. 2023). Children q_proj, k_proj, v_proj, o_proj.

    Args:
        embed_dim: width of x and of the output.
        num_heads, num_kv_heads: query and kv heads; without head_map consecutive query heads share a kv head.
        head_map: the kv head that each query head reads, num_heads ints, for uneven groups.
        head_dim: default embed_dim / num_heads.
        kdim, vdim: widths of context and value_context; default embed_dim.
        bias: on q_proj, k_proj, v_proj; out_bias on o_proj, None means as bias.
        causal: each token sees itself and what stands before it.
        qk_norm: RMSNorm over head_dim on q and k before RoPE, eps 1e-6 (children q_norm, k_norm).
        rope: a RotaryEmbedding, or None for no rotation.
        scale: of the scores; default 1 / sqrt(head_dim).
        dropout, window, softcap, sinks, alibi: not built in this version; other than the default they raise.
    """

    _cpp_class = cpp.GroupedQueryAttention

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        head_map: Sequence[int] | None = None,
        head_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        dropout: float = 0.0,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        softcap: float = 0.0,
        sinks: bool = False,
        alibi: bool = False,
        qk_norm: bool = False,
        rope: RotaryEmbedding | None = None,
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._config = {
            **self._sizes(embed_dim, num_heads, num_kv_heads),
            "head_map": None if head_map is None else tuple(head_map),
            "head_dim": head_dim,
            "kdim": kdim,
            "vdim": vdim,
            "bias": bias,
            "out_bias": out_bias,
            "dropout": dropout,
            "causal": causal,
            "window": window,
            "softcap": softcap,
            "sinks": sinks,
            "alibi": alibi,
            "qk_norm": qk_norm,
            "scale": scale,
        }
        self.rope = rope
        self._make_cpp("meta")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_map = self._config["head_map"]
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.dropout = dropout
        self.causal = causal
        self.window = window
        self.softcap = softcap
        self.scale = scale

        factory = {"device": device, "dtype": dtype}
        width, kv_width = num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, width, bias=bias, **factory)
        self.k_proj = nn.Linear(self.kdim, kv_width, bias=bias, **factory)
        self.v_proj = nn.Linear(self.vdim, kv_width, bias=bias, **factory)
        self.o_proj = nn.Linear(width, embed_dim, bias=bias if out_bias is None else out_bias, **factory)
        self.q_norm = RMSNorm(self.head_dim, **factory) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, **factory) if qk_norm else None

    @staticmethod
    def _sizes(embed_dim: int, num_heads: int, num_kv_heads: int) -> dict[str, int]:
        """The positional arguments of the twin."""
        return {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}

    def _heads(self, x: Tensor, context: Tensor | None, value_context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super()._heads(x, context, value_context)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        return query, key, value

    def _output(self, joined: Tensor) -> Tensor:
        return self.o_proj(joined)


class MultiHeadAttention(GroupedQueryAttention):
    """Every query head has its own kv head (Vaswani et al. 2017); arguments as in GroupedQueryAttention, but for
    num_kv_heads and head_map."""

    _cpp_class = cpp.MultiHeadAttention

    def __init__(self, embed_dim: int, num_heads: int, **settings: Unpack[AttentionSettings]) -> None:
        super().__init__(embed_dim, num_heads, num_heads, head_map=None, **settings)

    @staticmethod
    def _sizes(embed_dim: int, num_heads: int, num_kv_heads: int) -> dict[str, int]:
        return {"embed_dim": embed_dim, "num_heads": num_heads}


class MultiQueryAttention(GroupedQueryAttention):
    """All query heads share one kv head (Shazeer 2019); arguments as in GroupedQueryAttention, but for num_kv_heads and
    head_map."""

    _cpp_class = cpp.MultiQueryAttention

    def __init__(self, embed_dim: int, num_heads: int, **settings: Unpack[AttentionSettings]) -> None:
        super().__init__(embed_dim, num_heads, 1, head_map=None, **settings)

    @staticmethod
    def _sizes(embed_dim: int, num_heads: int, num_kv_heads: int) -> dict[str, int]:
        return {"embed_dim": embed_dim, "num_heads": num_heads}


class ProjectedAttention(_Attention):
    """Attention over q, k and v that somebody else projected; no parameters.

    Args:
        num_heads, num_kv_heads, head_dim: the heads that lie side by side in the last dim of q, k and v.
        head_map, causal, rope, scale, dropout, window, softcap: as in GroupedQueryAttention.
    """

    _cpp_class = cpp.ProjectedAttention

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        head_map: Sequence[int] | None = None,
        dropout: float = 0.0,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        softcap: float = 0.0,
        rope: RotaryEmbedding | None = None,
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._config = {
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "head_map": None if head_map is None else tuple(head_map),
            "dropout": dropout,
            "causal": causal,
            "window": window,
            "softcap": softcap,
            "scale": scale,
        }
        self.rope = rope
        self._make_cpp(None)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.head_map = self._config["head_map"]
        self.dropout = dropout
        self.causal = causal
        self.window = window
        self.softcap = softcap
        self.scale = scale

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        kv_lens: Tensor | None = None,
        need_weights: bool = False,
        **unknown: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """out [B, L, Hq * D], or (out, weights [B, Hq, L, keys]).

        Args:
            q: [B, L, Hq * D].
            k, v: [B, Lkv, Hkv * D]. Without a cache, keys of another length than q come from another sequence: RoPE
                rotates them at 0..Lkv-1.

        The other arguments are those of GroupedQueryAttention.forward.
        """
        reject_keywords(unknown)
        query, key, value = self._heads(q, k, v)
        return self._attend(
            query,
            key,
            value,
            cache,
            kv_lens,
            positions=positions,
            cross=cache is None and q.size(1) != k.size(1),
            mask=mask,
            causal=self.causal if causal is None else causal,
            need_weights=need_weights,
        )

    def project(
        self, q: Tensor, k: Tensor, v: Tensor, *, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(q [B, Hq, L, D], k [B, Hkv, Lkv, D], v [B, Hkv, Lkv, D]) as they enter the operator."""
        query, key, value = self._heads(q, k, v)
        query, key = self._rotate(query, key, positions, q.size(1) != k.size(1))
        return query, key, value

    def _heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        check_input("q", q, self.num_heads * self.head_dim, None)
        check_input("k", k, self.num_kv_heads * self.head_dim, None)
        check_input("v", v, self.num_kv_heads * self.head_dim, None)
        return (
            _split_heads(q, self.num_heads),
            _split_heads(k, self.num_kv_heads),
            _split_heads(v, self.num_kv_heads),
        )


def _split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, L, H * D] -> [B, H, L, D], a view."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)
