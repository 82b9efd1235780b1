"""Converts modules and models to fewer key-value heads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from .. import _C, cpp
from ..errors import check_size, wrong_kind
from ..nn.attention import GroupedQueryAttention, MultiQueryAttention
from ..nn.block import Block
from ..nn.causal_lm import CausalLM
from ..nn.native import NativeModule, give_parameters
from ..nn.recurrent.base import RecurrentLayer
from ..nn.stack import Decoder, Encoder, EncoderDecoder
from .weights import Groups, LayerWeights, calibration_rows

Model = TypeVar("Model")
CPP_KINDS = cpp.MultiHeadAttention | cpp.GroupedQueryAttention | cpp.MultiQueryAttention
_WANTED = (
    "a MultiHeadAttention, GroupedQueryAttention or MultiQueryAttention, or a block, stack or CausalLM that holds some"
)


class Merging(TypedDict, total=False):
    """Keywords of `to_mqa` and, with groups, `to_gqa`."""

    window: int
    seed: int | None
    calibration: Tensor | Sequence[Tensor | None] | None
    encoder: bool


class Grouping(Merging, total=False):
    groups: Groups | None


@overload
def to_gqa(module: GroupedQueryAttention, num_kv_heads: int, method: str = "mean",
           **settings: Unpack[Grouping]) -> GroupedQueryAttention: ...  # fmt: skip
@overload
def to_gqa(module: CPP_KINDS, num_kv_heads: int, method: str = "mean",
           **settings: Unpack[Grouping]) -> cpp.GroupedQueryAttention: ...  # fmt: skip
@overload
def to_gqa(module: Model, num_kv_heads: int, method: str = "mean", **settings: Unpack[Grouping]) -> Model: ...
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
            converted. Recurrent layers of a model stay as they are.
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
        ValueError: sizes or groups do not fit.
        TypeError: a module of another kind, or k_proj, v_proj (with "aligned" q_proj and o_proj too) are no plain
            nn.Linear.
    """
    settings = {"method": method, "window": window, "groups": groups, "seed": seed}
    if isinstance(module, GroupedQueryAttention | CPP_KINDS):
        settings["calibration"] = calibration_rows(calibration)
        return convert_layer(_C.convert.to_gqa, module, num_kv_heads=num_kv_heads, **settings)
    _C.convert.refuse_calibration(calibration is not None)
    if isinstance(module, CausalLM):
        for layer in module.layers:
            if not isinstance(layer.self_attn, RecurrentLayer):  # they stay as they are
                layer_weights(layer.self_attn)
        made = _C.convert.model_to_gqa(model=module._twin(), num_kv_heads=num_kv_heads, **settings, encoder=encoder)
        return CausalLM.from_cpp(made)
    if isinstance(module, cpp.CausalLM | cpp.EncoderDecoder):
        return _C.convert.model_to_gqa(model=module, num_kv_heads=num_kv_heads, **settings, encoder=encoder)
    return _convert_blocks(module, num_kv_heads, settings, encoder)


@overload
def to_mqa(module: GroupedQueryAttention, method: str = "mean",
           **settings: Unpack[Merging]) -> MultiQueryAttention: ...  # fmt: skip
@overload
def to_mqa(module: CPP_KINDS, method: str = "mean", **settings: Unpack[Merging]) -> cpp.MultiQueryAttention: ...
@overload
def to_mqa(module: Model, method: str = "mean", **settings: Unpack[Merging]) -> Model: ...
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
    if isinstance(module, GroupedQueryAttention | CPP_KINDS):
        settings = {"method": method, "window": window, "groups": None, "seed": seed}
        return convert_layer(_C.convert.to_mqa, module, **settings, calibration=calibration_rows(calibration))
    return to_gqa(module, 1, method, window=window, seed=seed, calibration=calibration, encoder=encoder)


def similar_groups(
    module: nn.Module, num_kv_heads: int, calibration: Tensor | Sequence[Tensor | None] | None = None
) -> list[list[int]]:
    """The groups that method "similar" would choose for an attention layer. They have one size if num_kv_heads divides
    the layer's number of kv heads."""
    weights, heads = list(layer_weights(module)), module.num_kv_heads
    check_size("num_kv_heads", num_kv_heads)
    distances = _C.convert.head_distances(weights, heads, calibration_rows(calibration))
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
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"):
        layer = getattr(module, name)
        if type(layer) is not nn.Linear and not (name == "gate_proj" and layer is None):
            raise TypeError(
                f"attnpack: {name} is a {type(layer).__name__}, whose weight conversion does not know: it wants a "
                "plain nn.Linear. Merge adapters into it and dequantise it first"
            )
    return LayerWeights(q.weight, k.weight, v.weight, o.weight, q.bias, k.bias, v.bias)


def convert_layer(function: Callable[..., Any], layer: Any, makes_rope: bool = False, **arguments: Any) -> Any:
    """Calls a conversion of _C.convert. A Python layer goes there as its twin, and the result comes back as a Python
    module, with the layer's norms of queries and keys, and its RoPE unless the result has one of its own."""
    if isinstance(layer, CPP_KINDS):
        return function(module=layer, **arguments)
    made = NativeModule.from_cpp(function(module=_twin_of(layer), **arguments))
    if not makes_rope:
        made.rope = copy.deepcopy(layer.rope)
    if layer.k_norm is not None:
        made.q_norm, made.k_norm = copy.deepcopy((layer.q_norm, layer.k_norm))
    return made


def _twin_of(layer: GroupedQueryAttention) -> Any:
    """The layer as conversion reads it. `cpp()` refuses hooks, norms of queries and keys that are not its own, and a
    bias that only one projection has. This twin passes over hooks and norms, and the missing biases are zeros."""
    if layer.q_proj is None or layer.v_proj is None:
        return layer._twin()  # which conversion refuses by the name of its option
    layer_weights(layer)
    config = layer._live_config()
    projections = {name: getattr(layer, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    biased = [name for name, projection in projections.items() if projection.bias is not None]
    config["bias"] = any(name != "o_proj" for name in biased)
    if ("o_proj" in biased) != (config["bias"] if config["out_bias"] is None else config["out_bias"]):
        config["out_bias"] = "o_proj" in biased
    norm = False if layer.k_norm is None else layer.qk_norm or True
    config |= {"qk_norm": norm, "sinks": layer.sinks is not None}
    rope = {} if layer.rope is None else {"rope": layer.rope._make_cpp("meta")}
    twin = layer._cpp_class(**config, **rope, device="meta")

    parameters = {f"{name}.weight": projection.weight for name, projection in projections.items()}
    parameters |= {f"{name}.bias": projections[name].bias for name in biased}
    for name, blank in twin.named_parameters():
        projection = projections.get(name.removesuffix(".bias"))
        if projection is not None and name not in parameters:
            weight = projection.weight
            parameters[name] = weight.new_zeros(blank.shape, requires_grad=weight.requires_grad)
    if layer.sinks is not None:
        parameters["sinks"] = layer.sinks
    if layer.gate_proj is not None:
        if layer.gate_proj.bias is not None:
            raise TypeError("attnpack: gate_proj has a bias, which conversion would lose, want one without: remove it")
        parameters["gate_proj.weight"] = layer.gate_proj.weight
    return give_parameters(twin, parameters, strict=False).train(layer.training)


def _convert_blocks(module: nn.Module, num_kv_heads: int, settings: dict[str, Any], encoder: bool) -> nn.Module:
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
    _C.convert.check_layers_found("module", type(module).__name__, len(places))
    for number, (parent, name, child) in enumerate(places):
        setattr(parent, name, to_gqa(child, num_kv_heads, **_for_layer(settings, number)))
    return model


def _for_layer(settings: dict[str, Any], number: int) -> dict[str, Any]:
    """The settings with the seed of one layer. Seeds are 4 apart: the four tensors of a layer use consecutive seeds."""
    seed = settings["seed"]
    return settings if seed is None else settings | {"seed": (seed + 4 * number) % 2**64}
