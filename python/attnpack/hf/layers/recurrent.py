"""Recurrent layers of transformers on the modules of attnpack."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ...nn.linear import project, project_all
from ...nn.norm import RMSNorm
from ...nn.recurrent import GatedConvolution, GatedDeltaNet, KimiDeltaAttention, Mamba2
from ...nn.recurrent.base import States
from ...nn.recurrent.kimi_delta_attention import ForgetGate
from .adopted import Adopted, cache_of_call, eps_of, norm_on_the_weight_of


class _Recurrent(Adopted):
    """Mixin, the first base before one of our recurrent layers, for the caches of transformers."""

    _state_is_transposed = False  # in transformers' cache

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
            states = States(
                None if conv is None else conv[..., conv.size(-1) - conv_shape[1] :],
                state.transpose(2, 3) if state is not None and self._state_is_transposed else state,
            )
        lengths = {"kv_lens": None, "cu_seqlens": settings.get("cu_seq_lens_q")}
        out, after = self._run_masked(x, attention_mask, states, lengths)
        if cache is not None:
            cache.update_conv_state(after.conv, self.layer_idx, conv_kernel_size=self.conv_kernel_size)
            if after.state is not None:
                state = after.state.transpose(2, 3).contiguous() if self._state_is_transposed else after.state
                cache.update_recurrent_state(state, self.layer_idx)
        return out

    def _run_masked(
        self, x: Tensor, mask: Tensor | None, states: States, lengths: dict[str, Tensor | None]
    ) -> tuple[Tensor, States]:
        """`_run`, for an x that is 0 where the mask is. Then it changes no state, if no convolution has a bias."""
        return self._run(x, states, lengths)


def _adopt_into(ours: nn.Module, theirs: nn.Module) -> None:
    for name, parameter in theirs.named_parameters(recurse=False):
        setattr(ours, name, parameter)
    for name, child in theirs.named_children():
        our_child = getattr(ours, name, None)
        if our_child is None and next(child.parameters(), None) is None:
            continue  # an activation
        if isinstance(our_child, RMSNorm):
            setattr(ours, name, norm_on_the_weight_of(child, plus_one=False))
        elif isinstance(our_child, ForgetGate):
            _adopt_into(our_child, child)
        else:
            setattr(ours, name, child)


class HfGatedDeltaNet(_Recurrent, GatedDeltaNet):
    """A GatedDeltaNet in the place of Qwen3.5's."""

    # Children of ours under other names, or under None where other projections compute what they do.
    _renamed: dict[str, str | None] = {}

    def __init__(self, theirs: nn.Module) -> None:
        super().__init__(
            theirs.hidden_size, theirs.num_k_heads, theirs.num_v_heads, head_k_dim=theirs.head_k_dim,
            head_v_dim=theirs.head_v_dim, conv_kernel_size=theirs.conv_kernel_size,
            norm_eps=eps_of(getattr(theirs, self._renamed.get("norm") or "norm")),
            allow_neg_eigval=getattr(theirs, "allow_neg_eigval", False), device="meta",
        )  # fmt: skip
        for name, their_name in self._renamed.items():
            child = getattr(self, name)
            delattr(self, name)
            if their_name is not None:
                setattr(self, their_name, child)
        self._adopt_layer(theirs)


class HfInterleavedDeltaNet(HfGatedDeltaNet):
    """The same in the place of Qwen3-Next's, whose projections hold what belongs to each head of keys side by side."""

    _renamed = dict.fromkeys(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
    in_proj_qkvz: nn.Linear
    in_proj_ba: nn.Linear

    def _input_projection(self) -> nn.Module:
        return self.in_proj_qkvz

    def _project_in(self, x: Tensor) -> tuple[Tensor, ...]:
        heads = self.num_k_heads
        group = self.num_v_heads // heads
        keys, values = self.head_k_dim, group * self.head_v_dim
        qkvz, ba = (y.unflatten(-1, (heads, -1)) for y in project_all((self.in_proj_qkvz, self.in_proj_ba), x))
        q, k, v, gate = (part.flatten(2) for part in qkvz.split([keys, keys, values, values], -1))
        beta, decay = (part.flatten(2) for part in ba.split(group, -1))
        return torch.cat([q, k, v], -1), decay, beta, gate


class HfSplitDeltaNet(HfGatedDeltaNet):
    """The same in the place of OLMo hybrid's, which has a projection for each of q, k and v."""

    _renamed = {"in_proj_qkv": None, "in_proj_z": "g_proj", "in_proj_b": "b_proj", "in_proj_a": "a_proj",
                "norm": "o_norm", "out_proj": "o_proj"}  # fmt: skip
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    g_proj: nn.Linear
    b_proj: nn.Linear
    a_proj: nn.Linear
    o_norm: RMSNorm
    o_proj: nn.Linear

    def _input_projection(self) -> nn.Module:
        return self.q_proj

    def _project_in(self, x: Tensor) -> tuple[Tensor, ...]:
        layers = (self.q_proj, self.k_proj, self.v_proj, self.a_proj, self.b_proj, self.g_proj)
        q, k, v, decay, beta, gate = project_all(layers, x)
        return torch.cat([q, k, v], -1), decay, beta, gate

    def _last_layers(self) -> tuple[RMSNorm, nn.Linear]:
        return self.o_norm, self.o_proj


class HfMamba2(_Recurrent, Mamba2):
    """A Mamba2 in the place of that of Mamba-2, Bamba and Granite 4."""

    _state_is_transposed = True

    def __init__(self, theirs: nn.Module) -> None:
        if theirs.activation not in ("silu", "swish"):
            raise ValueError(f"attnpack: hidden_act: got {theirs.activation!r}, want 'silu'; leave this model's layers")
        least, most = theirs.time_step_limit
        if least > 0 or most != float("inf"):
            raise ValueError(
                f"attnpack: time_step_limit: got {theirs.time_step_limit}, want (0, inf), because steps are not "
                "limited here; leave this model's layers, and call attnpack.hf.register() instead"
            )
        super().__init__(
            theirs.hidden_size, theirs.num_heads, head_dim=theirs.head_dim, state_dim=theirs.ssm_state_size,
            num_groups=theirs.n_groups, conv_kernel_size=theirs.conv_kernel_size, conv_bias=theirs.use_conv_bias,
            bias=theirs.in_proj.bias is not None, norm_eps=eps_of(theirs.norm), device="meta",
        )  # fmt: skip
        self._adopt_layer(theirs)

    def _run_masked(
        self, x: Tensor, mask: Tensor | None, states: States, lengths: dict[str, Tensor | None]
    ) -> tuple[Tensor, States]:
        if mask is None:
            return self._run(x, states, lengths)
        mixed, steps = project(self.in_proj, x).tensor_split([-self.num_heads], -1)
        steps = steps.masked_fill(mask[:, :, None] == 0, float("-inf"))  # a step of 0 leaves the state as it is
        return self._attend(torch.cat([mixed, steps], -1), states, lengths)


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
    "Qwen3NextGatedDeltaNet": HfInterleavedDeltaNet,
    "OlmoHybridGatedDeltaNet": HfSplitDeltaNet,
    "KimiLinearDeltaAttention": HfKimiDeltaAttention,
    "Lfm2ShortConv": HfGatedConvolution,
    "Mamba2Mixer": HfMamba2,
    "BambaMixer": HfMamba2,
    "GraniteMoeHybridMambaLayer": HfMamba2,
}
# Older releases hand the cache over by another name and keep its states in another way: those layers stay their own.
_RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])
RECURRENT = _LAYERS if _RELEASE >= (5, 24) else {}
