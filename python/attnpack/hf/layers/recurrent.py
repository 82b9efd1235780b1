"""Recurrent layers of transformers on the modules of attnpack."""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor, nn

from ...nn.norm import RMSNorm
from ...nn.recurrent import GatedConvolution, GatedDeltaNet, KimiDeltaAttention
from ...nn.recurrent.base import States
from ...nn.recurrent.kimi_delta_attention import ForgetGate
from .adopted import Adopted, cache_of_call, eps_of, norm_on_the_weight_of


class _Recurrent(Adopted):
    """Mixin, the first base before one of our recurrent layers, for the caches of transformers."""

    def _adopt_layer(self, theirs: nn.Module) -> None:
        """Takes the children and parameters of `theirs`, which have the names of ours."""
        _adopt_into(self, theirs)
        self.layer_idx, self.layer_type = theirs.layer_idx, theirs.layer_type
        self.config = getattr(theirs, "config", None)
        self.train(theirs.training)

    def forward(
        self,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **settings: Any,
    ) -> Tensor:
        """[B, L, E] -> [B, L, E], as the layer of transformers. attention_mask [B, L] has 0 for padding, which stands
        to the left."""
        cache = cache_of_call(hidden_states, past_key_values, cache)
        x = hidden_states
        if attention_mask is not None:
            x = (x * attention_mask[:, :, None]).to(x.dtype)
        conv_shape, state_shape = self._state_shapes()
        states = States()
        if cache is not None:
            if cache.is_recording_past(self.layer_idx):
                raise ValueError(
                    "attnpack: cache: got one that records its past, as assisted generation makes, which a replaced "
                    "recurrent layer does not keep; leave this model's layers, and call attnpack.hf.register() instead"
                )
            conv = cache.get_conv_state(self.layer_idx, state_idx=0) if conv_shape else None
            state = cache.get_recurrent_state(self.layer_idx, state_idx=0) if state_shape else None
            # transformers keeps one input more than the convolution reads.
            states = States(None if conv is None else conv[..., conv.size(-1) - conv_shape[1] :], state)
        out, after = self._run(x, states, {"kv_lens": None, "cu_seqlens": settings.get("cu_seq_lens_q")})
        if cache is not None:
            cache.update_conv_state(after.conv, self.layer_idx, conv_kernel_size=self.conv_kernel_size)
            if after.state is not None:
                cache.update_recurrent_state(after.state, self.layer_idx)
        return out


def _adopt_into(ours: nn.Module, theirs: nn.Module) -> None:
    for name, parameter in theirs.named_parameters(recurse=False):
        setattr(ours, name, parameter)
    for name, child in theirs.named_children():
        own = getattr(ours, name)
        if isinstance(own, RMSNorm):
            setattr(ours, name, norm_on_the_weight_of(child, plus_one=False))
        elif isinstance(own, ForgetGate):
            _adopt_into(own, child)
        else:
            setattr(ours, name, child)


class HfGatedDeltaNet(_Recurrent, GatedDeltaNet):
    """A GatedDeltaNet in the place of Qwen3.5's."""

    def __init__(self, theirs: nn.Module) -> None:
        super().__init__(
            theirs.hidden_size, theirs.num_k_heads, theirs.num_v_heads, head_k_dim=theirs.head_k_dim,
            head_v_dim=theirs.head_v_dim, conv_kernel_size=theirs.conv_kernel_size, norm_eps=eps_of(theirs.norm),
            device="meta",
        )  # fmt: skip
        self._adopt_layer(theirs)


class HfKimiDeltaAttention(_Recurrent, KimiDeltaAttention):
    """A KimiDeltaAttention in the place of Kimi-Linear's."""

    def __init__(self, theirs: nn.Module) -> None:
        super().__init__(
            theirs.hidden_size, theirs.num_heads, head_dim=theirs.head_dim, conv_kernel_size=theirs.conv_kernel_size,
            norm_eps=eps_of(theirs.o_norm), device="meta",
        )  # fmt: skip
        self._adopt_layer(theirs)


class HfGatedConvolution(_Recurrent, GatedConvolution):
    """A GatedConvolution in the place of LFM2's."""

    def __init__(self, theirs: nn.Module) -> None:
        super().__init__(
            theirs.out_proj.out_features, conv_kernel_size=theirs.conv_kernel_size, bias=theirs.bias, device="meta"
        )
        self._adopt_layer(theirs)


_LAYERS: dict[str, type[nn.Module]] = {
    "Qwen3_5GatedDeltaNet": HfGatedDeltaNet,
    "Qwen3_5MoeGatedDeltaNet": HfGatedDeltaNet,
    "KimiLinearDeltaAttention": HfKimiDeltaAttention,
    "Lfm2ShortConv": HfGatedConvolution,
}
# Older releases hand the cache over by another name and keep its states in another way: those layers stay their own.
_RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])
RECURRENT = _LAYERS if _RELEASE >= (5, 24) else {}
