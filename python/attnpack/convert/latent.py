"""Converts attention layers and models to multi-head latent attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack, overload

from torch import Tensor, nn

from .. import _C, cpp
from ..errors import wrong_kind
from ..nn.attention import GroupedQueryAttention, MultiHeadLatentAttention
from ..nn.causal_lm import CausalLM
from .heads import CPP_KINDS, convert_layer, layer_error, layer_weights
from .weights import calibration_rows


class Factoring(TypedDict, total=False):
    """Keywords of `to_mla`: calibration is for layers, ids for models."""

    calibration: Tensor | Sequence[Tensor | None] | None
    length: int | None
    rope_dim: int | None
    ids: Tensor | None


@overload
def to_mla(module: CausalLM, kv_lora_rank: int, **settings: Unpack[Factoring]) -> CausalLM: ...
@overload
def to_mla(module: cpp.CausalLM, kv_lora_rank: int, **settings: Unpack[Factoring]) -> cpp.CausalLM: ...
@overload
def to_mla(module: CPP_KINDS, kv_lora_rank: int, **settings: Unpack[Factoring]) -> cpp.MultiHeadLatentAttention: ...
@overload
def to_mla(module: nn.Module, kv_lora_rank: int, **settings: Unpack[Factoring]) -> MultiHeadLatentAttention: ...
def to_mla(
    module: nn.Module,
    kv_lora_rank: int,
    *,
    calibration: Tensor | Sequence[Tensor | None] | None = None,
    length: int | None = None,
    rope_dim: int | None = None,
    ids: Tensor | None = None,
) -> nn.Module:
    """Converts an attention layer to a MultiHeadLatentAttention, or those of a CausalLM; `module` stays as it is.

    The cache then holds, per token, one latent of `kv_lora_rank` numbers and one rotating key as wide as the layer's
    RoPE. Keys and values of all kv heads are factored together by principal components. Errors of the keys are weighted
    by their effect on the scores, errors of the values by their effect after o_proj. Without RoPE that is exact from
    kv_lora_rank = 2 * num_kv_heads * head_dim on. With RoPE the keys of all heads share one rotating key, and the rest
    of each key no longer rotates. That loses accuracy, except for one kv head, where kv_lora_rank = head_dim is exact
    (for partial RoPE head_dim plus the dims that do not rotate), and with rope_dim = num_kv_heads times the dims that
    rotate in a head: then the shared key is the keys of all heads together. The method follows TransMLA (Meng et al.
    2025).

    A model gets that key by default, so it is exact from kv_lora_rank = 2 * num_kv_heads * head_dim on. Its layers have
    the form of DeepSeek-V3's: norms on the latents, which a large constant in each latent makes idle. A model with
    settings that latent attention cannot hold is refused by their names.

    Args:
        module: a MultiHeadAttention, GroupedQueryAttention or MultiQueryAttention, or a CausalLM; also of
            `attnpack.cpp`.
        kv_lora_rank: width of the latent. A rank above the exact one is padded with zeros.
        calibration: the input of the layer on some text, [B, L, E], or tokens [tokens, E] (or (x, context)). The new
            Python module then has `conversion_error`, the relative error of its outputs on this input. Without
            calibration `conversion_error` is None; `layer_error(module, made, x)` measures the error, also for modules
            of `attnpack.cpp`.
        length: the text length for which the unrotated keys are made; default L of the calibration, else 512.
        rope_dim: the dims of the shared key that rotate, an even number up to num_kv_heads times those of a head.
            Default: of a layer as many as a head rotates, one pair for each frequency; of a model all.
        ids: for models in the place of calibration: tokens of some text, int64 [B, L].

    Returns:
        The model; or the layer with latent_norm=False. Dropout, causality, scale, RoPE, mode, dtype and device are
        kept. A bias of q_proj needs a query latent: q_a_proj holds the bias, and q_b_proj is the identity.

    Raises:
        ValueError: the layer has a setting that latent attention lacks (window, softcap, sinks, ALiBi, qk_norm, kdim or
            vdim other than embed_dim), or sizes do not fit.
        TypeError: a module of another kind, or projections that are no plain nn.Linear.
    """
    if isinstance(module, CausalLM | cpp.CausalLM):
        return _model_to_mla(module, kv_lora_rank, calibration, length, rope_dim, ids)
    if ids is not None:
        raise ValueError("attnpack: ids: got some for a single layer, want calibration, the layer's input")
    rows = calibration_rows(calibration)
    texts = [calibration] if calibration is None or isinstance(calibration, Tensor) else list(calibration[:2])
    texts = [text if text is None or text.dim() == 3 else text[None] for text in texts]  # [B, L, E]
    if length is None:
        given = calibration if texts[0] is None or isinstance(calibration, Tensor) else calibration[0]
        length = given.shape[1] if given is not None and given.dim() == 3 else 512
    if not isinstance(module, GroupedQueryAttention | CPP_KINDS):
        raise wrong_kind(
            "module",
            module,
            "a single MultiHeadAttention, GroupedQueryAttention or MultiQueryAttention, or a CausalLM: give it the "
            "layers of another model one by one",
        )
    if isinstance(module, GroupedQueryAttention) and module.rope is not None:
        module.rope.cpp()  # refuses numbers that are not those of its settings: C++ would factorise with others
    settings = {"kv_lora_rank": kv_lora_rank, "calibration": rows, "length": length, "rope_dim": rope_dim}
    made = convert_layer(_C.convert.to_mla, module, makes_rope=rope_dim is not None, **settings)
    if isinstance(made, MultiHeadLatentAttention):
        made.conversion_error = None if texts[0] is None else layer_error(module, made, *texts)
    return made


def _model_to_mla(
    model: Any, kv_lora_rank: int, calibration: Any, length: int | None, rope_dim: int | None, ids: Tensor | None
) -> Any:
    _C.convert.refuse_calibration(calibration is not None)
    settings = {"kv_lora_rank": kv_lora_rank, "rope_dim": rope_dim, "ids": ids, "length": length or 512}
    if isinstance(model, cpp.CausalLM):
        return _C.convert.model_to_mla(model=model, **settings)
    _C.convert.LatentConversion(2, None, 512, **model._live_config())  # checks the model before its layers
    for layer in model.layers:
        layer_weights(layer.self_attn)
    return CausalLM.from_cpp(_C.convert.model_to_mla(model=model._twin(), **settings))
