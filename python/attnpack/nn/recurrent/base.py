"""Base class of the layers whose memory of a sequence is a state of fixed size.

B batch, L length, N sequences (B, or those of cu_seqlens).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._C import checks
from ...cache import RecurrentCache, check_kind, unchanged_on_error
from ...errors import check_input, reject_keywords
from ...ops import nested
from ..linear import is_offloaded
from ..native import NativeModule
from ..sharded_attention import refuse_context_parallel

RECURRENT_CACHE = "an attnpack.RecurrentCache()"


class States(NamedTuple):
    """The memory that a layer has of its sequences. A part is None if the layer does not have it, and before the first
    call."""

    conv: Tensor | None = None
    state: Tensor | None = None


class RecurrentLayer(NativeModule):
    """Calls `_run` on the states of a cache. Subclasses say the shapes of the states of one sequence."""

    embed_dim: int

    def new_cache(self) -> RecurrentCache:
        """An empty cache, of the kind that forward fills."""
        return RecurrentCache()

    def forward(
        self,
        x: Tensor,
        *,
        cache: RecurrentCache | None = None,
        kv_lens: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool | None = None,
        positions: Tensor | None = None,
        **unknown: Any,
    ) -> Tensor:
        """[B, L, embed_dim] -> [B, L, embed_dim], or a jagged nested [B, L*, embed_dim], one call per sequence.

        Args:
            cache: the call goes on from the states in it, and leaves those after x there.
            kv_lens: int32 or int64 [B], the number of valid tokens of each sequence. Padding stands after them, and
                does not reach the states.
            cu_seqlens: int32 or int64 [N + 1]: N packed sequences stand one after the other in a batch of one.
            mask, causal: as blocks give them; a mask and causal=False are refused.
            positions: not read: the layer knows the order of its tokens, and no more.

        Raises:
            ValueError: a shape, dtype, device or length does not fit; the cache is as it was then.
        """
        name = type(self).__name__
        reject_keywords(unknown, cache=RECURRENT_CACHE)
        if mask is not None or causal is False:
            checks.recurrent_call(name, False, mask is not None, causal is False, False, False)
        if nested.is_nested(x):
            nested.refuse(cache=cache, kv_lens=kv_lens, cu_seqlens=cu_seqlens)
            packed = self(nested.rows("x", x).unsqueeze(0), cu_seqlens=x.offsets())
            return nested.like(packed[0], x)
        refuse_context_parallel("a recurrent layer was called", "call it outside, on whole sequences")
        check_input("x", x, self.embed_dim, None if is_offloaded(self) else self._input_projection())
        check_kind(cache, RecurrentCache, name, RECURRENT_CACHE)
        with unchanged_on_error(cache):
            states = States()
            if cache is not None:
                batch = x.size(0) if cu_seqlens is None else cu_seqlens.size(0) - 1
                states = States(*cache.states(batch, *self._state_shapes()))
            out, after = self._run(x, states, {"kv_lens": kv_lens, "cu_seqlens": cu_seqlens})
            if cache is not None:
                cache.advance(*after, x.size(1), kv_lens if cu_seqlens is None else cu_seqlens.diff())
            return out

    def _state_shapes(self) -> tuple[Sequence[int], Sequence[int]]:
        """The shapes of the convolution state and of the state of one sequence; () for none."""
        raise NotImplementedError

    def _run(self, x: Tensor, states: States, lengths: dict[str, Tensor | None]) -> tuple[Tensor, States]:
        """The output of the layer for x [B, L, embed_dim], and the states after it."""
        raise NotImplementedError

    def _input_projection(self) -> nn.Module | None:
        """The projection that reads x."""
        raise NotImplementedError

    @property
    def out_dim(self) -> int:
        """Width of the output of forward."""
        return self.embed_dim

    def extra_repr(self) -> str:
        shown = {name: value for name, value in self._live_config().items() if value not in (None, False)}
        return ", ".join(f"{name}={value}" for name, value in shown.items())


def first_steps(size: int, device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
    """A new dt_bias [size] whose softplus is log-uniform between 0.001 and 0.1, as in the papers' code: with a bias of
    1 a layer would forget within a token what it is to learn to keep."""
    bias = torch.empty(size, device=device, dtype=dtype)
    if bias.is_meta:
        return bias
    steps = bias.uniform_(math.log(0.001), math.log(0.1)).exp_()
    return steps + (-torch.expm1(-steps)).log()  # softplus(x + log(1 - exp(-x))) = x


def log_of_uniform(
    shape: tuple[int, ...], least: float, most: float, device: torch.device | str | None, dtype: torch.dtype | None
) -> Tensor:
    """log(x) for x drawn from (least, most), a new A_log."""
    rates = torch.empty(shape, device=device, dtype=dtype)
    return rates if rates.is_meta else rates.uniform_(least, most).log_()
