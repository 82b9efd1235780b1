"""CompressedAttention: DeepSeek-V4's layer, a window of tokens and entries that stand for windows before it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import cpp, ops
from ..._C import checks
from ...errors import check_input, wrong_kind
from ..linear import project
from ..native import NativeModule
from ..norm import RMSNorm, rms_norm
from ..rope import RotaryEmbedding
from .base import split_heads


class _Sizes(NamedTuple):
    """The sizes of a layer's parts."""

    embed_dim: int
    q_lora_rank: int
    rate: int
    eps: float
    factory: dict[str, Any]


class EntryScorer(NativeModule):
    """The weights of an indexer's heads. Child weights_proj."""

    def __init__(self, sizes: _Sizes, num_heads: int) -> None:
        super().__init__()
        self._config = {}
        self.weights_proj = nn.Linear(sizes.embed_dim, num_heads, bias=False, **sizes.factory)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, embed_dim] -> [B, L, H]"""
        return project(self.weights_proj, x)


class _Compressor(NativeModule):
    """Entries of width `dim`, one for each full window of tokens. With overlap an entry is made of two windows."""

    def __init__(self, sizes: _Sizes, dim: int, overlap: bool) -> None:
        super().__init__()
        self._config = {}
        self.overlap = overlap
        width = 2 * dim if overlap else dim
        for name in ("kv_proj", "gate_proj"):
            setattr(self, name, nn.Linear(sizes.embed_dim, width, bias=False, **sizes.factory))
        self.position_bias = nn.Parameter(torch.zeros(sizes.rate, width, **sizes.factory))
        self.kv_norm = RMSNorm(dim, eps=sizes.eps, **sizes.factory)

    def _entries(self, x: Tensor) -> Tensor:
        """[B, L, embed_dim] -> [B, 1, L / rate, dim]"""
        value, gate = project(self.kv_proj, x), project(self.gate_proj, x)
        return self.kv_norm(ops.compress_tokens(value, gate, self.position_bias, self.overlap)).unsqueeze(1)


class EntryIndexer(_Compressor):
    """Names the entries that a query attends, by small entries of its own. Children kv_proj, gate_proj, kv_norm,
    q_b_proj and scorer, parameter position_bias."""

    def __init__(self, sizes: _Sizes, dim: int, num_heads: int, top_k: int) -> None:
        super().__init__(sizes, dim, True)
        self.num_heads, self.top_k = num_heads, top_k
        self.q_b_proj = nn.Linear(sizes.q_lora_rank, num_heads * dim, bias=False, **sizes.factory)
        self.scorer = EntryScorer(sizes, num_heads)

    def forward(self, low: Tensor, x: Tensor, **rotation: Any) -> Tensor:
        """low [B, L, q_lora_rank], x [B, L, embed_dim] -> int32 [B, 1, L, min(top_k, entries)], -1 for none"""
        query = split_heads(project(self.q_b_proj, low), self.num_heads)
        return ops.name_entries(query, self._entries(x), self.scorer(x), self.top_k, **rotation)


class TokenCompressor(_Compressor):
    """Makes the entries of a CompressedAttention. Children kv_proj, gate_proj, kv_norm and, with an indexer, indexer;
    parameter position_bias."""

    def __init__(self, sizes: _Sizes, dim: int, indexer: EntryIndexer | None) -> None:
        super().__init__(sizes, dim, indexer is not None)
        self.indexer = indexer

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, embed_dim] -> [B, 1, L / rate, head_dim]"""
        return self._entries(x)


class CompressedAttention(NativeModule):
    """DeepSeek-V4's layer (2026): a query attends a window of tokens and, with `compress_rate`, entries that stand for
    all full windows of that many tokens before it, in one softmax with sinks.

    One key per token serves all heads, and is the value too. The last dims of queries, keys and entries are rotated,
    and those of the output are rotated back. An entry is a mean of its tokens, weighted for each dim by a softmax of
    their gates. With `top_k` (compressed sparse attention) an entry is made of two windows, and an indexer names the
    top_k entries that a query attends; the choice has no gradient. Without it (heavily compressed attention) a query
    attends all entries. Parameter names, shapes and row order are those of DeepSeek-V4's layers in transformers.

    It takes whole sequences, for prefill and training: no cache, and no mask. Padding on the right changes nothing.

    Children q_a_proj, q_a_norm, q_b_proj, kv_proj, kv_norm, o_a_proj, o_b_proj, compressor; parameter sinks.

    Args:
        embed_dim, num_heads: width of x and of the output; query heads.
        head_dim, q_lora_rank, o_lora_rank: widths of a head, of the queries' latent, and of what o_a_proj makes of a
            group of heads; required.
        o_groups: groups of heads, each with rows of its own in o_a_proj.
        window: a token sees so many tokens: itself, and those right before it.
        compress_rate: tokens of an entry; None for no entries.
        top_k: how many entries a query attends; None for all.
        index_heads, index_head_dim: heads of the indexer and their width; default num_heads and head_dim.
        rope: a RotaryEmbedding over the last dims (DeepSeek's is interleaved); required. Its frequencies must not
            follow the length.
        eps: of the layer's norms.
        scale: factor on the scores; default 1 / sqrt(head_dim).
    """

    _cpp_class = cpp.CompressedAttention
    q_a_proj: nn.Linear
    q_a_norm: RMSNorm
    q_b_proj: nn.Linear
    kv_proj: nn.Linear
    kv_norm: RMSNorm
    o_a_proj: nn.Linear
    o_b_proj: nn.Linear

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        head_dim: int,
        q_lora_rank: int,
        o_lora_rank: int,
        o_groups: int = 1,
        window: int = 128,
        compress_rate: int | None = None,
        top_k: int | None = None,
        index_heads: int | None = None,
        index_head_dim: int | None = None,
        rope: RotaryEmbedding,
        eps: float = 1e-6,
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.rope = rope
        self._make_children(self._configure(locals()), device, dtype)
        factory = {"device": device, "dtype": dtype}
        sizes = _Sizes(embed_dim, q_lora_rank, self._rate, eps, factory)
        self.compressor = None
        if compress_rate is not None:
            chosen = (self.index_head_dim, self.index_heads, top_k)
            indexer = None if top_k is None else EntryIndexer(sizes, *chosen)
            self.compressor = TokenCompressor(sizes, head_dim, indexer)
        self.sinks = nn.Parameter(torch.zeros(num_heads, **factory))

    @property
    def _rate(self) -> int:
        return 1 if self.compress_rate is None else self.compress_rate

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, embed_dim] -> [B, L, embed_dim]; token i stands at position i, and sees no later token."""
        if isinstance(x, Tensor) and x.is_nested:
            checks.padded("x", x)
        check_input("x", x, self.embed_dim, self.q_a_proj)
        cos, sin = ops.rope_table(torch.arange(x.size(1), device=x.device), self.rope.inv_freq, self.rope.factor)
        rotation = {"cos": cos, "sin": sin, "interleaved": self.rope.interleaved, "rate": self._rate}
        low = self.q_a_norm(project(self.q_a_proj, x))
        heads = split_heads(project(self.q_b_proj, low), self.num_heads)
        query = rms_norm(heads, heads.new_ones(self.head_dim), self.eps)
        entries = named = None
        if self.compressor is not None:
            entries = self.compressor(x)
            if self.compressor.indexer is not None:
                with torch.no_grad():
                    named = self.compressor.indexer(low, x, **rotation)
        key = self.kv_norm(project(self.kv_proj, x)).unsqueeze(1)
        joined = ops.attend_entries(
            query, key, entries, named, self.sinks, window=self.window, scale=self.scale, **rotation
        )
        return project(self.o_b_proj, ops.project_groups(joined, self.o_a_proj.weight, self.o_groups))

    def _make_cpp(self, device: str | None, dtype: torch.dtype | None = None) -> Any:
        if not isinstance(self.rope, RotaryEmbedding):
            raise wrong_kind("rope", self.rope, "an attnpack.RotaryEmbedding(dim) over the last dims of a head")
        for name, norm in self.named_modules():
            if isinstance(norm, RMSNorm) and norm.eps != self.eps:
                raise TypeError(
                    f"attnpack: {name} is {norm}, C++ has RMSNorm with eps {self.eps:g} there. Set that eps, or call "
                    "the Python module"
                )
        return self._cpp_class(**self._live_config(), rope=self.rope.cpp(), device=device, dtype=dtype)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._live_config().items() if value is not None)
