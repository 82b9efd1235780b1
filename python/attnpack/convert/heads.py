"""Converts modules and models to fewer key-value heads."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import _C, cpp
from ..errors import wrong_kind
from ..explain import explain
from ..nn.attention import GroupedQueryAttention, MultiQueryAttention
from ..nn.block import Block
from ..nn.causal_lm import CausalLM
from ..nn.stack import Decoder, Encoder, EncoderDecoder
from .weights import Groups, LayerWeights, MergedHeads, calibration_rows, merge_kv_heads

_CPP_KINDS = (cpp.MultiHeadAttention, cpp.GroupedQueryAttention, cpp.MultiQueryAttention)
_WANTED = (
    "a MultiHeadAttention, GroupedQueryAttention or MultiQueryAttention, or a block, stack or CausalLM that holds some"
)


def to_gqa(
    module: nn.Module,
    num_kv_heads: int,
    method: str = "mean",
    *,
    window: int = 1,
    groups: Groups | None = None,
    seed: int | None = None,
    calibration: Tensor | Sequence[Tensor | None] | None = None,
    encoder: bool = False,
) -> nn.Module:
    """A copy of `module` with `num_kv_heads` key-value heads (Ainslie et al. 2023); `module` stays as it is.

    Args:
        module: a MultiHeadAttention, GroupedQueryAttention or MultiQueryAttention, also of `attnpack.cpp`. Or a block,
            a stack, an EncoderDecoder or a CausalLM (the last two also of `attnpack.cpp`), whose attention layers are
            converted.
        num_kv_heads: the new number of key-value heads, at most the present number.
        method, window, groups, seed: as in `merge_kv_heads`. groups lists kv heads. Groups that are uneven or not
            consecutive give a head_map. A CausalLM has no head_map, so its query heads are reordered instead. With a
            seed every layer of a model draws by one of its own.
        calibration: the input of the layer on some text, [B, L, E], or (x, context, value_context); for single layers.
        encoder: convert the encoder of an EncoderDecoder too. The paper leaves it, because an encoder reads no cache.

    Returns:
        A GroupedQueryAttention or the model. Settings, biases, norms, sinks, RoPE, training mode, dtype, device and
        requires_grad are kept.

    Raises:
        ValueError: sizes or groups do not fit. TypeError: a module of another kind, or k_proj, v_proj (with "aligned"
        q_proj and o_proj too) are no plain nn.Linear.
    """
    explain({"num_kv_heads": num_kv_heads, "seed": seed}, num_kv_heads=(lambda size: type(size) is int, "an int"))
    settings = {"method": method, "window": window, "groups": groups, "seed": seed}
    if isinstance(module, _CPP_KINDS):
        return _C.convert.to_gqa(module, num_kv_heads, **settings, calibration=calibration_rows(calibration))
    if isinstance(module, GroupedQueryAttention):
        merged = _merge_module(module, num_kv_heads, settings, calibration)
        even = module.num_heads % num_kv_heads == 0 and merged.head_map == [
            head * num_kv_heads // module.num_heads for head in range(module.num_heads)
        ]
        arguments = {"head_map": None if even else merged.head_map}
        sizes = (module.embed_dim, module.num_heads, num_kv_heads)
        return _rebuild_module(module, GroupedQueryAttention, sizes, merged.weights, arguments)
    if calibration is not None:
        raise ValueError("attnpack: calibration: got one for a whole model, want it for a single attention layer only")
    if isinstance(module, cpp.CausalLM | cpp.EncoderDecoder):
        return _C.convert.model_to_gqa(module, num_kv_heads, **settings, encoder=encoder)
    return _convert_model(module, num_kv_heads, settings, encoder)


def to_mqa(
    module: nn.Module,
    method: str = "mean",
    *,
    window: int = 1,
    seed: int | None = None,
    calibration: Tensor | Sequence[Tensor | None] | None = None,
    encoder: bool = False,
) -> nn.Module:
    """`to_gqa` with one key-value head; a single layer becomes a MultiQueryAttention."""
    settings = {"method": method, "window": window, "groups": None, "seed": seed}
    if isinstance(module, _CPP_KINDS):
        return _C.convert.to_mqa(module, **settings, calibration=calibration_rows(calibration))
    if isinstance(module, GroupedQueryAttention):
        merged = _merge_module(module, 1, settings, calibration)
        return _rebuild_module(module, MultiQueryAttention, (module.embed_dim, module.num_heads), merged.weights, {})
    return to_gqa(module, 1, method, window=window, seed=seed, calibration=calibration, encoder=encoder)


def similar_groups(
    module: nn.Module, num_kv_heads: int, calibration: Tensor | Sequence[Tensor | None] | None = None
) -> list[list[int]]:
    """The groups that method "similar" would choose for an attention layer. They have one size if num_kv_heads divides
    the layer's number of kv heads."""
    heads = module.num_kv_heads
    distances = _C.convert.head_distances(list(layer_weights(module)), heads, calibration_rows(calibration))
    return _C.convert.choose_groups(distances, num_kv_heads, heads % num_kv_heads != 0)


def layer_error(module: nn.Module, converted: nn.Module, x: Tensor, context: Tensor | None = None) -> float:
    """|converted(x) - module(x)| / |module(x)|, with norms over all outputs."""
    with torch.no_grad():
        out = module(x, context).double()
        return ((converted(x, context).double() - out).norm() / out.norm()).item()


def layer_weights(module: GroupedQueryAttention) -> LayerWeights:
    """The weights of an attention layer, whose projections must be plain nn.Linear."""
    if not isinstance(module, GroupedQueryAttention):
        raise wrong_kind("module", module, _WANTED)
    q, k, v, o = module.q_proj, module.k_proj, module.v_proj, module.o_proj
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        layer = getattr(module, name)
        if type(layer) is not nn.Linear:
            raise TypeError(
                f"attnpack: {name} is a {type(layer).__name__}, whose weight conversion does not know: it wants a "
                "plain nn.Linear. Merge adapters into it and dequantise it first"
            )
    return LayerWeights(q.weight, k.weight, v.weight, o.weight, q.bias, k.bias, v.bias)


def _merge_module(
    module: GroupedQueryAttention, num_kv_heads: int, settings: dict[str, Any], calibration: object, **more: bool
) -> MergedHeads:
    return merge_kv_heads(
        layer_weights(module),
        module.num_heads,
        module.num_kv_heads,
        num_kv_heads,
        head_map=module.head_map,
        calibration=calibration,
        rope_dim=0 if module.rope is None else module.rope.dim,
        interleaved=module.rope is not None and module.rope.interleaved,
        key_norm=module.k_norm is not None,
        **settings,
        **more,
    )


def _rebuild_module(
    module: GroupedQueryAttention,
    kind: type[GroupedQueryAttention],
    sizes: tuple[int, ...],
    weights: LayerWeights,
    arguments: dict[str, Any],
) -> GroupedQueryAttention:
    """A `kind` with these weights and with copies of all other parts of `module`."""
    config = {name: value for name, value in module._live_config().items() if name not in _SIZES} | arguments
    made = kind(*sizes, **config, rope=copy.deepcopy(module.rope), device="meta")
    for name in ("q_proj", "o_proj", "q_norm", "k_norm"):
        setattr(made, name, copy.deepcopy(getattr(module, name)))
    if module.sinks is not None:
        made.sinks = copy.deepcopy(module.sinks)
    for name in ("q", "k", "v", "o"):
        old, new = getattr(module, f"{name}_proj"), getattr(made, f"{name}_proj")
        new.weight = _like(old.weight, getattr(weights, name))
        if name != "o" and old.bias is not None:
            new.bias = _like(old.bias, getattr(weights, f"{name}_bias"))
    return made.train(module.training)


_SIZES = ("embed_dim", "num_heads", "num_kv_heads", "head_map")


def _like(old: nn.Parameter, value: Tensor) -> nn.Parameter:
    """A new parameter with the value, and with requires_grad of `old`."""
    return nn.Parameter(value.clone() if value is old else value, requires_grad=old.requires_grad)


def _convert_model(module: nn.Module, num_kv_heads: int, settings: dict[str, Any], encoder: bool) -> nn.Module:
    if isinstance(module, CausalLM):
        return _convert_lm(module, num_kv_heads, settings)
    if not isinstance(module, Block | Encoder | Decoder | EncoderDecoder):
        raise wrong_kind("module", module, _WANTED)
    model = copy.deepcopy(module)
    kept = [] if encoder or not isinstance(model, EncoderDecoder) else list(model.encoder.modules())
    places = [
        (parent, name, child)
        for parent in model.modules()
        if not any(parent is other for other in kept)
        for name, child in parent.named_children()
        if isinstance(child, GroupedQueryAttention)
    ]
    if not places:
        raise ValueError(f"attnpack: module: got a {type(module).__name__} without attention layers to convert")
    for number, (parent, name, child) in enumerate(places):
        setattr(parent, name, to_gqa(child, num_kv_heads, **_for_layer(settings, number)))
    return model


def _convert_lm(model: CausalLM, num_kv_heads: int, settings: dict[str, Any]) -> CausalLM:
    """A CausalLM that is constructed with the new number of heads, so that its C++ twin has the same number."""
    config = model._live_config() | {"num_kv_heads": num_kv_heads}
    made = CausalLM(**config, device="meta")
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for number, layer in enumerate(model.layers):
        old = layer.self_attn
        merged = _merge_module(old, num_kv_heads, _for_layer(settings, number), None, reorder=True)
        for name, value in merged.weights._asdict().items():
            if value is not None:
                stem, _, kind = name.partition("_")
                state[f"model.layers.{number}.self_attn.{stem}_proj.{kind or 'weight'}"] = value.detach().clone()
    made.load_state_dict(state, assign=True)
    before = dict(model.named_parameters())
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(before[name].requires_grad)
    return made.train(model.training)


def _for_layer(settings: dict[str, Any], number: int) -> dict[str, Any]:
    """The settings with the seed of one layer. Seeds are 4 apart: the four tensors of a layer use consecutive seeds."""
    seed = settings["seed"]
    return settings if seed is None else settings | {"seed": (seed + 4 * number) % 2**64}
