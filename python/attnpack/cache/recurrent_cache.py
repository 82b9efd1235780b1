"""The cache of recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .kv_cache import KVCache


class RecurrentCache(KVCache):
    """The state of a recurrent layer: GatedDeltaNet, KimiDeltaAttention, LinearAttention, Mamba2 or GatedConvolution.
    Its bytes do not grow with the length.

    `crop` to fewer positions raises, because a state cannot forget its last tokens: keep a `clone()` from before them.
    There are no keys and values: `k` and `v` are None.

    Not thread-safe: give each thread its own.
    """

    _kind = "RecurrentCache"

    @property
    def state(self) -> Tensor | None:
        """The states [B, Hv, D, Dv]; None before the first call, and for a layer that has none."""
        return self._part("state")

    @property
    def conv_state(self) -> Tensor | None:
        """The last inputs of the short convolution, [B, C, K - 1]; None before the first call, and for a layer that has
        none."""
        return self._part("conv_state")

    def states(
        self, batch: int, conv_shape: Sequence[int], state_shape: Sequence[int]
    ) -> tuple[Tensor | None, Tensor | None]:
        """(conv_state, state) for a call with `batch` sequences of states of these shapes, empty for a part that the
        layer does not have; None for a part that is not there yet. A ValueError if the cache holds other shapes."""
        conv_state, state = self._call_rule("states", batch, list(conv_shape), list(state_shape))
        return conv_state, state

    def advance(
        self, conv_state: Tensor | None, state: Tensor | None, new_len: int, new_lens: Tensor | None = None
    ) -> None:
        """Counts `new_len` tokens of each sequence, or the valid ones, new_lens [B], and holds the states after
        them."""
        self._change("advance", conv_state, state, new_len, new_lens)
