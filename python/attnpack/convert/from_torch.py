"""torch.nn's attention, transformer layers and stacks of them as attnpack's."""

from __future__ import annotations

from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import wrong_kind
from ..nn.attention import MultiHeadAttention
from ..nn.block import DecoderBlock, EncoderBlock
from ..nn.feed_forward import FeedForward
from ..nn.stack import Decoder, Encoder, EncoderDecoder
from .weights import split_qkv

_Layer = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
_Like = MultiHeadAttention | EncoderBlock | DecoderBlock | Encoder | Decoder | EncoderDecoder


@overload
def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention: ...
@overload
def from_torch(module: nn.TransformerEncoderLayer) -> EncoderBlock: ...
@overload
def from_torch(module: nn.TransformerDecoderLayer) -> DecoderBlock: ...
@overload
def from_torch(module: nn.TransformerEncoder) -> Encoder: ...
@overload
def from_torch(module: nn.TransformerDecoder) -> Decoder: ...
@overload
def from_torch(module: nn.Transformer) -> EncoderDecoder: ...
@overload
def from_torch(module: nn.Module) -> _Like: ...
def from_torch(module: nn.Module) -> _Like:
    """A layer or stack of torch.nn as attnpack's, with copies of its weights, its dropout, mode, dtype, device and
    requires_grad.

    The outputs are the same but for rounding, and these habits differ:

    - attnpack's tensors are [B, L, E], as torch's with batch_first.
    - In a bool mask of attnpack True means "may attend"; in torch.nn it means "hide". Give `mask=~attn_mask`, and
      `kv_lens` or `mask=~key_padding_mask[:, None, None]`. Float masks are the same. (torch::nn in C++ adds a bool
      attn_mask to the scores as 0 and 1, pytorch#80494. attnpack hides by it in both languages.)
    - Where a mask hides all keys of a row, attention gives 0 there; torch may give NaN.
    - A DecoderBlock is causal; torch's decoder layer is if it is given a causal tgt_mask.
    - `need_weights` gives the weights of each head; torch's are their mean.
    - Dropout draws other numbers in training.

    Args:
        module: nn.MultiheadAttention, which becomes a MultiHeadAttention; nn.TransformerEncoderLayer, an EncoderBlock;
            nn.TransformerDecoderLayer, a DecoderBlock with cross-attention; nn.TransformerEncoder, an Encoder;
            nn.TransformerDecoder, a Decoder; nn.Transformer, an EncoderDecoder. The LayerNorms of a layer without
            biases get biases of 0, which are frozen.

    Raises:
        TypeError: module is another one, its activation is neither ReLU nor GELU, or the norm of a stack is no
            LayerNorm.
        ValueError: it has add_bias_kv, add_zero_attn, or several values of dropout in one layer.
    """
    if isinstance(module, nn.TransformerEncoder):
        return _stack_like(Encoder, module)
    if isinstance(module, nn.TransformerDecoder):
        return _stack_like(Decoder, module)
    if isinstance(module, nn.Transformer):
        made = EncoderDecoder(from_torch(module.encoder), from_torch(module.decoder))
        made.training = module.training  # only of this module: its parts have their own
        return made
    if isinstance(module, nn.MultiheadAttention):
        made, state = _attention_like(module), _attention_state(module)
    elif isinstance(module, nn.TransformerEncoderLayer):
        made = EncoderBlock(_attention_like(module.self_attn), _feed_forward_like(module), **_block_settings(module))
        state = _block_state(module, module.norm2)
    elif isinstance(module, nn.TransformerDecoderLayer):
        made = DecoderBlock(
            _attention_like(module.self_attn),
            _feed_forward_like(module),
            cross_attention=_attention_like(module.multihead_attn),
            **_block_settings(module),
        )
        cross = {f"cross_attn.{name}": value for name, value in _attention_state(module.multihead_attn).items()}
        state = {**_block_state(module, module.norm3), **cross}
        state |= _norm_state(module.norm2, "cross_attention_layernorm.")
    else:
        wanted = "an nn.MultiheadAttention, nn.Transformer, or an encoder, a decoder or a layer of it"
        raise wrong_kind("module", module, wanted)
    _fill(made, state)
    return made.train(module.training)


def _stack_like(kind: type[Encoder | Decoder], module: nn.TransformerEncoder | nn.TransformerDecoder):
    norm, layers = module.norm, [from_torch(layer) for layer in module.layers]
    if norm is None:
        made = kind(layers, norm=None)
    elif isinstance(norm, nn.LayerNorm) and norm.elementwise_affine:
        made = kind(layers, norm="layer", eps=norm.eps)
        _fill(made.norm, _norm_state(norm))
    else:
        raise wrong_kind("norm", norm, "an nn.LayerNorm with a weight, or None")
    made.training = module.training
    return made


def _fill(made: nn.Module, state: dict[str, Tensor]) -> None:
    """Gives `made` copies of the tensors, which ask for gradients where these do."""
    made.load_state_dict({name: value.detach().clone() for name, value in state.items()}, assign=True)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(state[name].requires_grad)


def _blank(weight: Tensor) -> dict[str, Any]:
    """Where a module is made whose parameters are replaced."""
    return {"device": "meta", "dtype": weight.dtype}


def _attention_like(module: nn.MultiheadAttention) -> MultiHeadAttention:
    for name, given in (("add_bias_kv", module.bias_k is not None), ("add_zero_attn", module.add_zero_attn)):
        if given:
            raise ValueError(f"attnpack: {name}: got a module with it, which attnpack does not have; want one without")
    widths = {} if module._qkv_same_embed_dim else {"kdim": module.kdim, "vdim": module.vdim}
    return MultiHeadAttention(
        module.embed_dim,
        module.num_heads,
        bias=module.in_proj_bias is not None,
        out_bias=module.out_proj.bias is not None,
        dropout=module.dropout,
        **widths,
        **_blank(module.out_proj.weight),
    )


def _attention_state(module: nn.MultiheadAttention) -> dict[str, Tensor]:
    def fused(whole: Tensor, kind: str) -> dict[str, Tensor]:
        parts = split_qkv(whole.detach(), "concat", module.num_heads, module.num_heads)
        return {
            f"{name}_proj.{kind}": part.requires_grad_(whole.requires_grad)
            for name, part in zip("qkv", parts, strict=True)
        }

    if module._qkv_same_embed_dim:
        state = fused(module.in_proj_weight, "weight")
    else:
        state = {f"{name}_proj.weight": getattr(module, f"{name}_proj_weight") for name in "qkv"}
    if module.in_proj_bias is not None:
        state |= fused(module.in_proj_bias, "bias")
    return state | {f"o_proj.{name}": value for name, value in module.out_proj.named_parameters()}


def _feed_forward_like(layer: _Layer) -> FeedForward:
    return FeedForward(
        layer.linear1.in_features,
        layer.linear1.out_features,
        activation=_activation_name(layer.activation),
        bias=layer.linear1.bias is not None,
        dropout=layer.dropout.p,
        **_blank(layer.linear1.weight),
    )


def _activation_name(activation: Any) -> str:
    if activation is F.relu or activation is torch.relu or isinstance(activation, nn.ReLU):
        return "relu"
    if isinstance(activation, nn.GELU):
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    if activation is F.gelu:
        return "gelu"
    raise wrong_kind("activation", activation, "ReLU or GELU: F.relu, F.gelu, nn.ReLU() or nn.GELU()")


def _block_settings(layer: _Layer) -> dict[str, Any]:
    rates = {part.p for name, part in layer.named_children() if name.startswith("dropout") and name != "dropout"}
    if len(rates) > 1:
        raise ValueError(f"attnpack: dropout: got {sorted(rates)} in one layer, want one value: a block has one")
    settings = {"norm": "layer", "pre_norm": layer.norm_first, "eps": layer.norm1.eps, "dropout": rates.pop()}
    return settings | _blank(layer.linear1.weight)


def _block_state(layer: _Layer, last: nn.LayerNorm) -> dict[str, Tensor]:
    state = {f"self_attn.{name}": value for name, value in _attention_state(layer.self_attn).items()}
    for ours, theirs in (("mlp.up_proj", layer.linear1), ("mlp.down_proj", layer.linear2)):
        state |= {f"{ours}.{name}": value for name, value in theirs.named_parameters()}
    return state | _norm_state(layer.norm1, "input_layernorm.") | _norm_state(last, "post_attention_layernorm.")


def _norm_state(norm: nn.LayerNorm, prefix: str = "") -> dict[str, Tensor]:
    bias = torch.zeros_like(norm.weight, requires_grad=False) if norm.bias is None else norm.bias
    return {f"{prefix}weight": norm.weight, f"{prefix}bias": bias}
