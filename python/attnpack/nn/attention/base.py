"""Base classes of the attention modules: they call the one native op, ``attnpack.ops.attend``, on projected heads.

B batch, L / Lkv lengths of x and context, Hq / Hkv query / kv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch import Tensor, nn

from ... import ops
from ..._C import checks, linear_layers
from ...cache import CrossCache, DynamicCache, KVCache, check_kind, unchanged_on_error
from ...errors import check_input, check_inputs, check_positions, reject_keywords, wrong_kind
from ...ops import attend_shared, gate_heads, nested
from ...signatures import ContextInputs, types_of
from ..linear import project, project_all
from ..native import NativeModule
from ..rope import RotaryEmbedding, rotate_rows
from ..sharded_attention import (
    check_mask_share,
    grouped_share,
    positions_here,
    refuse_context_parallel,
    refuse_named_keys,
    sharded_attention,
)


class SharedKeys:
    """Keys and values that layers of a Decoder share in a call without a cache, as they enter the operator: the first
    layer puts its own there, the others read them."""

    key: Tensor | None = None  # [B, Hkv, L, D]
    value: Tensor | None = None


class NativeAttention(NativeModule):
    """Calls the op on projected heads. Subclasses set the attributes below and `_config`."""

    causal: bool
    window: tuple[int, int] | None = None
    chunk: int | None = None
    softcap: float = 0.0
    alibi: bool = False
    _slopes: tuple[float, ...]
    dropout: float = 0.0
    scale: float | None = None
    query_scale: dict[str, Any] | None = None
    head_map: tuple[int, ...] | None = None
    rope: RotaryEmbedding | None
    _norms_rotated = False
    """Whether the module rotates its heads itself, because it norms them then; otherwise the op rotates them."""

    def new_cache(self) -> KVCache:
        """An empty cache that grows, of the kind that forward fills."""
        return DynamicCache()

    def _attend(
        self,
        x: Tensor | None,  # [B, L, ...], what `_output` reads
        query: Tensor,  # [B, Hq, L, D]
        key: Tensor,  # [B, Hkv, Lkv, D]
        value: Tensor,  # [B, Hkv, Lkv, D]
        cache: KVCache | None,
        kv_lens: Tensor | None,
        need_weights: bool,
        **inputs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        check_kind(cache, KVCache, type(self).__name__)
        over = sharded_attention(cache)
        with unchanged_on_error(cache):
            if over is not None:
                refuse_named_keys(inputs.get("key_index"), inputs.get("key_block", 1))
                inputs |= {"cache": cache, "kv_lens": kv_lens, "need_weights": need_weights}
                return self._output(over.attend(self, query, key, value, **inputs), x)
            appends = cache is not None and not isinstance(cache, CrossCache)
            filled = isinstance(cache, CrossCache) and cache.filled

            def past() -> Tensor | None:
                return cache.lengths if appends and cache.lengths.size(0) == query.size(0) else None

            if self._norms_rotated:
                query, placed = self._rotated_now(query, None if filled else key, past(), **inputs)
                key = key if filled else placed
            if isinstance(cache, CrossCache) and not filled:
                cache.store(key, value, kv_lens)
            elif filled and kv_lens is None:
                kv_lens = cache.lengths

            rules = self._rules(query, past, inputs | {"kv_lens": kv_lens})
            if appends:
                rules["cache"] = cache.reserve(key, value, kv_lens)
            result = ops.attend_by(rules, query, key, value, need_weights)
            if appends:
                cache.commit(key.size(2), kv_lens)
            return self._outputs(result, need_weights, x)

    def _outputs(
        self, result: Tensor | tuple[Tensor, Tensor], need_weights: bool, x: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`_output` of what an op gives, with the weights if it gives them."""
        if not need_weights:
            return self._output(result, x)
        out, weights = result
        return self._output(out, x), weights

    def _attend_nested(
        self,
        x: Tensor,  # [B, L*, ...], whose sequences the queries have
        context: Tensor | None,  # the same for keys, if they come from another sequence
        query: Tensor,  # [1, Hq, T, D]
        key: Tensor,  # [1, Hkv, S, D]
        value: Tensor,  # [1, Hkv, S, D]
        positions: Tensor | None,
        causal: bool,
        packed: Tensor | None = None,  # [1, T, ...], x as one row
    ) -> Tensor:
        """The nested output of one call per sequence."""
        refuse_context_parallel("x is a nested tensor", "pass padded tensors and kv_lens")
        self._check_chunk(context is not None)
        source = x if context is None else context
        if self.rope is not None:
            query = rotate_rows(self.rope, query, *nested.positions_of(x, positions))
            key = rotate_rows(self.rope, key, *nested.positions_of(source, positions if context is None else None))
        query, key = self._normed_behind(query, key)
        out = ops.attend_packed(
            *(heads[0].transpose(0, 1) for heads in (query, key, value)),
            x.offsets(),
            source.offsets(),
            causal=causal,
            q_offset=0,
            query_scale=self._packed_query_scale(x, positions),
            **self._settings(query),
        )
        return nested.like(self._output(out.flatten(1).unsqueeze(0), packed)[0], x)

    def _settings(self, query: Tensor) -> dict[str, Any]:
        """The module's own settings, as keywords of the op."""
        return {
            "window": (-1, -1) if self.window is None else self.window,
            "chunk": self.chunk,
            "softcap": self.softcap,
            "sinks": getattr(self, "sinks", None),
            "alibi_slopes": self._alibi_slopes(query),
            "head_map": self.head_map,
            "dropout_p": self.dropout if self.training else 0.0,
            "scale": self.scale,
        }

    def _check_chunk(self, cross: bool) -> None:
        if cross and self.chunk is not None:  # else nothing is called, because graphs stop at it
            checks.chunked_call(True)

    def _rules(self, query: Tensor, past: Callable[[], Tensor | None], inputs: dict[str, Any]) -> dict[str, Any]:
        """The keywords of a layer's op, beside its cache. past() is the number [B] of positions before the queries; few
        modules ask for it."""
        self._check_chunk(bool(inputs.get("cross")))
        rules = self._settings(query) | inputs
        if self.rope is not None and not self._norms_rotated:
            rules["rope"] = self.rope.settings
        if self.query_scale is not None:
            rules["query_scale"] = self._query_scale(query, inputs.get("positions"), past())
        return rules

    def _query_scale(self, query: Tensor, positions: Tensor | None, past: Tensor | None) -> Tensor | None:
        """The factors of the queries [B, H, L, D], fp32 [L] or [B, L]: of `positions`, or of those after the `past`
        [B] ones."""
        if self.query_scale is None:
            return None
        counted = self._counted(query, past)
        return torch.ops.attnpack.query_factors(counted, positions, query.size(0), **self.query_scale)

    def _counted(self, query: Tensor, past: Tensor | None) -> Tensor:
        """The positions [L] or [B, L] of the queries [B, H, L, D] after the `past` [B] ones."""
        steps = positions_here(query.size(2), query.device)
        return steps if past is None else past.to(query.device).unsqueeze(1) + steps

    def _packed_query_scale(self, x: Tensor, positions: Tensor | None) -> Tensor | None:
        """The factors [T] of the rows of a nested tensor."""
        if self.query_scale is None:
            return None
        given = None if positions is None else nested.positions_of(x, positions)[0]
        return torch.ops.attnpack.query_factors(nested.positions_of(x)[0], given, 1, **self.query_scale)

    def _output(self, joined: Tensor, x: Tensor | None) -> Tensor:
        """The output of the module from the joined heads [B, L, Hq * D] and its input x [B, L, embed_dim]."""
        return joined

    def _gated(self, joined: Tensor, x: Tensor, head_dim: int) -> Tensor:
        """The joined heads, each of `head_dim` numbers, times their gate, if there is one."""
        if self.gate_proj is None:
            return joined
        return gate_heads(joined, project(self.gate_proj, x), joined.size(-1) // head_dim, self.gate_activation)

    def _alibi_slopes(self, like: Tensor) -> Tensor | None:
        """Slopes [Hq]. They are no buffer, so the state dict lacks them, and `.to(bfloat16)` does not round them."""
        return torch.tensor(self._slopes, dtype=torch.float64, device=like.device) if self.alibi else None

    def _rotate(self, query: Tensor, key: Tensor, positions: Tensor | None, cross: bool) -> tuple[Tensor, Tensor]:
        check_positions(positions, query)
        return self._rotated(query, key, positions, None if cross else positions)

    def _rotated(
        self, query: Tensor, key: Tensor | None, at: Tensor | None, keys_at: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Heads as the operator gets them. at, keys_at: their positions [L] or [B, L]; default 0..L-1."""
        if self.rope is None:
            return query, key
        return self.rope(query, at), None if key is None else self.rope(key, keys_at)

    def _normed_behind(self, query: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Rotated heads after the norms that stand behind the rotation."""
        return query, key

    def _rotated_now(
        self,
        query: Tensor,
        key: Tensor | None,
        past: Tensor | None,
        positions: Tensor | None = None,
        cross: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """`_rotated` at the positions of a call over a cache that held `past` [B] tokens."""
        check_positions(positions, query)
        at = self._counted(query, past) if positions is None else positions
        return self._rotated(query, key, at, self._counted(key, None) if cross and key is not None else at)

    def _make_cpp(self, device: str | None, dtype: torch.dtype | None = None) -> Any:
        if not isinstance(self.rope, RotaryEmbedding | None):
            raise wrong_kind("rope", self.rope, "an attnpack.RotaryEmbedding(dim), or None for no rotation")
        rope = {} if self.rope is None else {"rope": self.rope.cpp()}
        return self._cpp_class(**self._live_config(), **rope, device=device, dtype=dtype)

    def extra_repr(self) -> str:
        shown = {name: value for name, value in self._live_config().items() if value not in (None, False, 0.0)}
        if "gate" not in shown:
            shown.pop("gate_activation", None)
        return ", ".join(f"{name}={value}" for name, value in shown.items())


class ContextAttention(NativeAttention):
    """Base of the modules that take x and, for cross-attention, a context."""

    embed_dim: int
    kdim: int
    vdim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    _names_keys = False
    """Whether forward takes key_index."""
    own_keys: bool = True

    @overload
    def forward(self, x: Tensor, context: Tensor | None = None, *, need_weights: Literal[False] = False,
                **inputs: Unpack[ContextInputs[KVCache]]) -> Tensor: ...  # fmt: skip
    @overload
    def forward(self, x: Tensor, context: Tensor | None = None, *, need_weights: Literal[True],
                **inputs: Unpack[ContextInputs[KVCache]]) -> tuple[Tensor, Tensor]: ...  # fmt: skip
    @overload
    def forward(self, x: Tensor, context: Tensor | None = None, *, need_weights: bool,
                **inputs: Unpack[ContextInputs[KVCache]]) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
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
        kv_from: KVCache | None = None,
        key_index: Tensor | None = None,
        key_block: int = 1,
        need_weights: bool = False,
        **unknown: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Self-attention of x or, if a context is given, attention of x over the context.

        Args:
            x: [B, L, embed_dim], or a jagged nested tensor [B, L*, embed_dim], which means one call per sequence;
                then the contexts and positions are nested too, and mask, cache, kv_lens and need_weights are refused.
            context: [B, Lkv, kdim], the source of keys and values; RoPE rotates its keys at 0..Lkv-1.
            value_context: [B, Lkv, vdim], the source of values; default context.
            mask: bool (True = may attend) or additive float, broadcastable to [B, Hq, L, keys]. A padding mask has
                shape [B, 1, 1, Lkv]. With a cache, keys is `len(cache)` after the append. Under tensor
                parallelism Hq is this rank's heads.
            causal: default the module's own setting; with a context False.
            cache: the call first appends the new keys and values; the queries come after the cached positions. A
                CrossCache stores the context's keys and values in its first call, and later calls read it instead.
            positions: int64 [L] or [B, L], for RoPE only; default the positions after the cached ones, or 0..L-1.
            kv_lens: [B], the number of valid new tokens of each sequence (with a context: of valid context keys).
            kv_from: the cache of another layer, which was called with these tokens before: this layer reads the keys
                and values there, and appends nothing. Its queries stand at the last positions; k_proj and v_proj are
                not used, and no gradient reaches the layer that filled the cache. A SlidingWindowCache, a CrossCache,
                and a context or cache beside it are refused; SelfAttention refuses it.
            key_index: int32 or int64 [B, 1 or Hkv, L, n], the numbers of the keys that each query may attend, as in
                `attention`; with a cache they are positions of the cache. SelfAttention and DifferentialAttention
                refuse it.
            key_block: key_index names blocks of so many keys. Block 0 begins at key 0.
            need_weights: also return the probabilities before dropout; under tensor parallelism those of this rank's
                heads.

        Returns:
            out [B, L, embed_dim] (for SelfAttention [B, L, head_dim]), or (out, weights [B, Hq, L, keys]).

        Raises:
            ValueError: a shape, dtype, device or length does not fit; nothing has been written to the cache then.
        """
        named = {} if key_index is None else {"key_index": key_index}
        if key_block != 1:
            named["key_block"] = key_block
        if not self._names_keys:
            unknown |= named
        reject_keywords(unknown)
        if nested.is_nested(x):
            nested.refuse(mask=mask, cache=cache, kv_lens=kv_lens, kv_from=kv_from, need_weights=need_weights, **named)
            of_module = self.causal and context is None
            return self._forward_nested(x, context, value_context, positions, of_module if causal is None else causal)
        if kv_from is None and not self.own_keys:
            checks.own_keys(False)
        if kv_from is not None:
            if context is not None or value_context is not None or cache is not None:
                checks.kv_from(context is not None or value_context is not None, cache is not None)
            causal = self.causal if causal is None else causal
            inputs = {"positions": positions, "mask": mask, "causal": causal, "kv_lens": kv_lens}
            if isinstance(kv_from, SharedKeys):
                return self._attend_over(x, kv_from, **inputs)
            return self._attend_shared(x, kv_from, need_weights, **inputs, **named)
        cross_cache = cache if isinstance(cache, CrossCache) else None
        if cross_cache is not None:
            cross_cache.check_call(x, context)
        if cross_cache is not None and cross_cache.filled:
            check_input("x", x, self.embed_dim, self._input_projection())
            key, value = cross_cache.k, cross_cache.v
            query = self._queries(x, key)
        else:
            self._check(x, context, value_context, cache if cross_cache is None else None)
            query, key, value = self._heads(x, context, value_context)
        cross = context is not None or cross_cache is not None
        check_mask_share(self, mask, query.size(1))
        return self._attend(
            x,
            query,
            key,
            value,
            cache,
            kv_lens,
            need_weights,
            positions=positions,
            cross=cross,
            mask=mask,
            causal=(self.causal and not cross) if causal is None else causal,
            **named,
        )

    if TYPE_CHECKING:

        @types_of(forward)
        def __call__(self) -> Any: ...  # type: ignore[override]

    def _attend_shared(
        self, x: Tensor, kv_from: KVCache, need_weights: bool, **inputs: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of x over the cache of another layer."""
        check_kind(kv_from, KVCache, type(self).__name__, name="kv_from")
        if sharded_attention(kv_from) is not None:
            raise ValueError(
                "attnpack: kv_from: got a cache, or a call under context_parallel, whose keys lie on several "
                "processes, want one that this process has whole: leave it out"
            )
        check_input("x", x, self.embed_dim, self._input_projection())
        value_dim = self._value_dim
        key, value, lengths = kv_from.shared(x, inputs["kv_lens"], self.num_kv_heads, self.head_dim, value_dim)
        query = self._queries(x, key)
        check_mask_share(self, inputs["mask"], query.size(1))

        def past() -> Tensor:
            return lengths - (query.size(2) if inputs["kv_lens"] is None else inputs["kv_lens"])

        if self._norms_rotated:
            query, _ = self._rotated_now(query, None, past(), **inputs)
        rules = self._rules(query, past, inputs)
        result = attend_shared(query, key, value, lengths, need_weights=need_weights, **rules)
        return self._outputs(result, need_weights, x)

    def _attend_over(self, x: Tensor, shared: SharedKeys, positions: Tensor | None, **inputs: Any) -> Tensor:
        """Attention of x over shared keys, into which the first layer puts its own."""
        if shared.key is None:
            self._check(x, None, None, None)
            query, key, shared.value = self._heads(x, None, None)
            query, shared.key = self._rotated_now(query, key, None, positions)
        else:
            check_input("x", x, self.embed_dim, self._input_projection())
            query, _ = self._rotated_now(self._queries(x, shared.key), None, None, positions)
        given = inputs | {"positions": positions, "cross": False}
        rules = self._rules(query, lambda: None, given)
        rules.pop("rope", None)  # done
        return self._output(ops.attend_by(rules, query, shared.key, shared.value, False), x)

    def _forward_nested(
        self,
        x: Tensor,
        context: Tensor | None,
        value_context: Tensor | None,
        positions: Tensor | None,
        causal: bool,
    ) -> Tensor:
        rows = packed_inputs(x, context, value_context)
        self._check(*rows, None)
        return self._attend_nested(x, context, *self._heads(*rows), positions, causal, rows[0])

    def project(
        self, x: Tensor, context: Tensor | None = None, *, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(q [B, Hq, L, D], k [B, Hkv, Lkv, D], v [B, Hkv, Lkv, D]), rotated, as the operator gets them.

        Under tensor parallelism they are those of this rank's heads.
        """
        self._check(x, context, None, None)
        query, key, value = self._heads(x, context, None)
        query, key = self._rotate(query, key, positions, context is not None)
        return query, key, value

    def _check(
        self,
        x: Tensor,
        context: Tensor | None,
        value_context: Tensor | None,
        cache: KVCache | None,
    ) -> None:
        check_inputs(
            x,
            context,
            value_context,
            cache,
            (self.embed_dim, self._input_projection()),
            (self.kdim, self.k_proj),
            (self.vdim, self.k_proj if self.v_proj is None else self.v_proj),
        )

    def _heads(self, x: Tensor, context: Tensor | None, value_context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v split into heads, before rotation."""
        query, key, value = self._projected(x, context, value_context)
        heads, kv_heads = grouped_share(self, query, key, value)
        return split_heads(query, heads), split_heads(key, kv_heads), split_heads(value, kv_heads)

    def _projected(
        self, x: Tensor, context: Tensor | None, value_context: Tensor | None
    ) -> Sequence[Tensor]:  # [B, L, Hq * D], [B, Lkv, Hkv * D] twice
        if context is None:
            return project_all((self.q_proj, self.k_proj, self.v_proj), x)
        value = project(self.v_proj, context if value_context is None else value_context)
        return project(self.q_proj, x), project(self.k_proj, context), value

    def _input_projection(self) -> nn.Module | None:
        """The projection that reads x for the queries."""
        return self.q_proj

    def _project_queries(self, x: Tensor) -> Tensor:
        return project(self.q_proj, x)

    @property
    def _value_dim(self) -> int:
        """Width of a head's values in a cache."""
        return self.head_dim

    def _queries(self, x: Tensor, key: Tensor) -> Tensor:
        """q for keys [B, Hkv, Lc, D] that are given, as `_heads`."""
        query, kv = self._project_queries(x), key.new_empty(0, key.size(1) * key.size(3))
        return split_heads(query, grouped_share(self, query, kv, kv)[0])

    @property
    def out_dim(self) -> int:
        """Width of the output of forward."""
        return self.embed_dim


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, L, H * D] -> [B, H, L, D], a view."""
    if not torch.compiler.is_compiling():
        return linear_layers.split_heads(x, num_heads)
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def packed_inputs(
    x: Tensor,
    context: Tensor | None,
    value_context: Tensor | None,
    names: tuple[str, str, str] = ("x", "context", "value_context"),
) -> list[Tensor | None]:
    """Nested inputs [B, L*, E] as batches of one row, [1, T, E]."""
    given = (x, context, value_context)
    packed = [None if e is None else nested.rows(n, e).unsqueeze(0) for n, e in zip(names, given, strict=True)]
    if context is not None and context.size(0) != x.size(0):
        raise ValueError(
            f"attnpack: {names[1]} has {context.size(0)} sequences, {names[0]} {x.size(0)}: they must agree"
        )
    if context is not None and value_context is not None:
        nested.check_same_sequences(names[2], value_context, names[1], context)
    return packed
