"""Converts attention layers to multi-head latent attention."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .. import _C, cpp
from ..errors import wrong_kind
from ..nn.attention import GroupedQueryAttention
from ..nn.latent_attention import MultiHeadLatentAttention
from .heads import layer_error, layer_weights
from .weights import calibration_rows, call_cpp

_CPP_KINDS = (cpp.MultiHeadAttention, cpp.GroupedQueryAttention, cpp.MultiQueryAttention)


def to_mla(
    module: nn.Module,
    kv_lora_rank: int,
    *,
    calibration: Tensor | Sequence[Tensor | None] | None = None,
    length: int | None = None,
) -> nn.Module:
    """Converts an attention layer to a MultiHeadLatentAttention; `module` stays as it is.

    The cache then holds, per token, one latent of `kv_lora_rank` numbers and one rotating key as wide as the layer's
    RoPE. Keys and values of all kv heads are factored together by principal components. Errors of the keys are weighted
    by their effect on the scores, errors of the values by their effect after o_proj. Without RoPE that is exact from
    kv_lora_rank = 2 * num_kv_heads * head_dim on. With RoPE the keys of all heads share one rotating key, and the rest
    of each key no longer rotates. That loses accuracy, except for one kv head, where kv_lora_rank = head_dim is exact
    (for partial RoPE head_dim plus the dims that do not rotate). The method follows TransMLA (Meng et al. 2025).

    Args:
        module: a MultiHeadAttention, GroupedQueryAttention or MultiQueryAttention, also of `attnpack.cpp`.
        kv_lora_rank: width of the latent. A rank above the exact one is padded with zeros.
        calibration: the input of the layer on some text, [B, L, E], or tokens [tokens, E] (or (x, context)). The new
            Python module then has `conversion_error`, the relative error of its outputs on this input. Without
            calibration `conversion_error` is None; `layer_error(module, made, x)` measures the error, also for modules
            of `attnpack.cpp`.
        length: the text length for which the unrotated keys are made; default L of the calibration, else 512.

    Returns:
        The layer with latent_norm=False. Dropout, causality, scale, RoPE, mode, dtype and device are kept. A bias of
        q_proj needs a query latent: q_a_proj holds the bias, and q_b_proj is the identity.

    Raises:
        ValueError: the layer has a setting that latent attention lacks (window, softcap, sinks, ALiBi, qk_norm, kdim or
        vdim other than embed_dim), or sizes do not fit. TypeError: a module of another kind, or projections that are no
        plain nn.Linear.
    """
    rows = calibration_rows(calibration)
    texts = [calibration] if calibration is None or isinstance(calibration, Tensor) else list(calibration[:2])
    texts = [text if text is None or text.dim() == 3 else text[None] for text in texts]  # [B, L, E]
    if length is None:
        given = calibration if texts[0] is None or isinstance(calibration, Tensor) else calibration[0]
        length = given.shape[1] if given is not None and given.dim() == 3 else 512
    if not isinstance(module, (GroupedQueryAttention, *_CPP_KINDS)):
        raise wrong_kind(
            "module",
            module,
            "a single MultiHeadAttention, GroupedQueryAttention or MultiQueryAttention: give it the "
            "layers of a model one by one",
        )
    if isinstance(module, _CPP_KINDS):
        return _C.convert.to_mla(module, kv_lora_rank, rows, length)
    made = _build_latent_layer(module, kv_lora_rank, rows, length)
    made.conversion_error = None
    if texts[0] is not None:
        made.conversion_error = layer_error(module, made, *texts)
    return made


def _build_latent_layer(
    module: GroupedQueryAttention, kv_lora_rank: int, rows: list[Tensor | None], length: int
) -> MultiHeadLatentAttention:
    weights = layer_weights(module)
    _check_has_latent_form(module)
    rope = module.rope
    q, q_bias, kv_a, kv_a_bias, kv_b = call_cpp(
        _C.convert.factorise_latent,
        weights=list(weights),
        num_heads=module.num_heads,
        num_kv_heads=module.num_kv_heads,
        kv_lora_rank=kv_lora_rank,
        head_map=module.head_map,
        inv_freq=() if rope is None else rope.inv_freq,
        interleaved=rope is not None and rope.interleaved,
        rope_factor=1.0 if rope is None else rope.factor,
        length=length,
        causal=module.causal,
        calibration=rows,
    )
    out = module.o_proj
    bias = any(tensor is not None for tensor in (q_bias, kv_a_bias, out.bias))
    scale = module.head_dim**-0.5 if module.scale is None else module.scale
    made = MultiHeadLatentAttention(
        module.embed_dim,
        module.num_heads,
        kv_lora_rank=kv_lora_rank,
        q_lora_rank=None if q_bias is None else len(q),
        qk_nope_head_dim=module.head_dim,
        qk_rope_head_dim=0 if rope is None else 2 * len(rope.inv_freq),
        v_head_dim=module.head_dim,
        rope=copy.deepcopy(rope),
        latent_norm=False,
        bias=bias,
        dropout=module.dropout,
        causal=module.causal,
        scale=scale if rope is None else scale / rope.softmax_factor,
        device="meta",
    )
    state = {"kv_a_proj_with_mqa.weight": kv_a, "kv_b_proj.weight": kv_b, "o_proj.weight": out.weight.detach().clone()}
    if bias:
        state["kv_a_proj_with_mqa.bias"] = kv_a.new_zeros(len(kv_a)) if kv_a_bias is None else kv_a_bias
        state["o_proj.bias"] = kv_a.new_zeros(module.embed_dim) if out.bias is None else out.bias.detach().clone()
    if q_bias is None:
        state["q_proj.weight"] = q
    else:
        identity = torch.eye(len(q), dtype=q.dtype, device=q.device)
        state |= {"q_a_proj.weight": q, "q_a_proj.bias": q_bias, "q_b_proj.weight": identity}
    made.load_state_dict(state, assign=True)
    return made.requires_grad_(True).train(module.training)


def _check_has_latent_form(module: GroupedQueryAttention) -> None:
    lacks = {
        "window": module.window not in (None, (-1, -1)),
        "softcap": module.softcap != 0,
        "sinks": module.sinks is not None,
        "alibi": module.alibi,
        "qk_norm": module.k_norm is not None,
    }
    for name, given in lacks.items():
        if given:
            raise ValueError(
                f"attnpack: {name}: got a layer with it, which latent attention has not; conversion would lose it"
            )
    for width in (module.kdim, module.vdim):
        if width != module.embed_dim:
            raise ValueError(
                f"attnpack: kdim, vdim: got a layer with {width}, want embed_dim {module.embed_dim}: one latent makes "
                "keys and values of it"
            )
