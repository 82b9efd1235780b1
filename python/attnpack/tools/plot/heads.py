"""Reads what a model's heads do with a sequence: the weights of each layer, its mask, and the parts of its scores.

H query heads, Hkv key-value heads, L tokens, D numbers of a query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...nn.attention import MultiHeadLatentAttention, ProjectedAttention, SparseAttention, SparseLatentAttention
from ...nn.attention.base import NativeAttention
from ...ops import attention_scores

MODELS = (
    "a model with attention layers of attnpack, such as CausalLM, Encoder or Decoder, or a model of transformers that "
    "takes attn_implementation"
)
LOWERED = -1e4
"""A mask that adds this or less to a score hides the key: exp of it is 0 in every dtype."""


class Heads(NamedTuple):
    """The heads of one layer on one sequence."""

    number: int
    weights: Tensor
    """[H, L, L], before dropout."""
    hidden: Tensor
    """bool [1 or H, L, L], the pairs that the mask excludes."""
    mask: str
    """The mask in words."""
    kv: list[int]
    """The key-value head of each head."""
    query: Tensor | None
    """[H, L, D] as the operator gets them, or None where they are not known; so are key, [Hkv, L, D], and value."""
    key: Tensor | None
    value: Tensor | None
    """[Hkv, L, Dv]: a head's output is its weights times these. None too where values have other heads than keys."""
    scale: float
    softcap: float
    slopes: list[float] | None
    """ALiBi: what a head subtracts from a score for each token of distance."""
    added: Tensor | None
    """[1 or H, L, L], what a mask of numbers adds to the scores."""
    sinks: list[float] | None
    """The logit of each head that joins the denominator of its softmax."""
    selects: bool
    """Whether the layer chooses the keys that a query attends."""


Watcher = Callable[[nn.Module, tuple, dict[str, Any], Tensor], None]


@contextmanager
def watching(model: nn.Module, watcher: Watcher) -> Iterator[None]:
    """Inside, each call of an attention layer of attnpack gives (layer, arguments, keywords, weights) to `watcher`."""
    asked: list[bool] = []

    def request_weights(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        asked.append(kwargs.get("need_weights", False))
        return args, {**kwargs, "need_weights": True}

    def keep_weights(layer: nn.Module, args: tuple, kwargs: dict[str, Any], result: tuple[Tensor, Tensor]) -> Any:
        watcher(layer, args, kwargs, result[1])
        return result if asked.pop() else result[0]

    hooks = []
    for layer in model.modules():
        if isinstance(layer, NativeAttention):
            hooks.append(layer.register_forward_pre_hook(request_weights, with_kwargs=True))
            hooks.append(layer.register_forward_hook(keep_weights, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def heads_of(model: nn.Module, x: Tensor, layers: Sequence[int] | None, inputs: dict[str, Any]) -> list[Heads]:
    """The heads of the self-attention layers that one forward over x, ids [1, L] or states [1, L, E], calls, in the
    order of the calls; of those in `layers`, if it is given. `inputs` are further arguments of the forward."""
    theirs = hasattr(model, "set_attn_implementation")  # transformers' models have it, and wrappers that pass it on
    found = (_of_transformers if theirs else _of_modules)(model, x, inputs)
    if not found:
        raise TypeError(
            f"attnpack: model: got a {type(model).__name__} that called no self-attention over these tokens which "
            f"attnpack can look into, want {MODELS}"
        )
    numbers = [number for number, _ in found]
    for layer in layers or ():
        if layer not in numbers:
            raise ValueError(f"layers: got {layer}, want {number_range(numbers)}, the model's layers")
    made = {number: make() for number, make in found if layers is None or number in layers}
    return [made[number] for number in (numbers if layers is None else layers)]


def number_range(numbers: list[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if numbers == list(range(len(numbers))) else f"one of {numbers}"


_Found = list[tuple[int, Callable[[], Heads]]]


def _of_modules(model: nn.Module, x: Tensor, inputs: dict[str, Any]) -> _Found:
    length, found = x.size(1), []

    def keep(layer: nn.Module, args: tuple, kwargs: dict[str, Any], weights: Tensor) -> None:
        alone = isinstance(layer, ProjectedAttention) or (len(args) < 2 and kwargs.get("context") is None)
        if not alone or weights.size(0) != 1 or weights.shape[2:] != (length, length):
            return
        number = len(found)
        found.append((number, lambda: _of_call(number, layer, args, kwargs, weights)))

    with watching(model, keep):
        model(x, **inputs)
    return found


def _of_call(number: int, layer: Any, args: tuple, kwargs: dict[str, Any], weights: Tensor) -> Heads:
    selects = isinstance(layer, SparseAttention | SparseLatentAttention)
    if kwargs.get("kv_from") is not None:
        return _without_scores(number, weights[0], layer.num_kv_heads)
    tensors = [*args, *(kwargs[name] for name in ("x", "q", "k", "v") if name in kwargs)]
    query, key, value = layer.project(*tensors, positions=kwargs.get("positions"))
    settings = layer._settings(query)
    del settings["dropout_p"]
    if isinstance(layer, MultiHeadLatentAttention):
        settings["scale"] = layer.softmax_scale
    causal = kwargs.get("causal")
    settings["causal"] = layer.causal if causal is None else causal
    for name in ("kv_lens", "key_index", "key_block"):
        if kwargs.get(name) is not None:
            settings[name] = kwargs[name]
    return heads(number, query, key, value, kwargs.get("mask"), settings, weights, selects=selects)


def heads(
    number: int,
    query: Tensor,  # [1, H, L, D]
    key: Tensor,  # [1, Hkv, L, D]
    value: Tensor,  # [1, Hkv, L, Dv]
    mask: Tensor | None,
    settings: dict[str, Any],  # keywords of `attention_scores`
    weights: Tensor,  # [1, H, L, L]
    *,
    selects: bool = False,
) -> Heads:
    """The heads of a call of the operator."""
    masked = attention_scores(query, key, mask, stage="masked", **settings)[0]
    hidden, added = masked == -torch.inf, None
    selects = selects or settings.get("key_index") is not None
    if selects:
        hidden |= weights[0] == 0
    if mask is not None and mask.is_floating_point():
        added = torch.broadcast_to(mask, (1, mask.size(-3) if mask.dim() > 2 else 1, *weights.shape[2:]))[0].float()
        hidden |= (added <= LOWERED) & (weights[0] == 0)
        added = added.masked_fill(added <= LOWERED, 0)
    num_heads, num_kv_heads, dim = query.size(1), key.size(1), query.size(3)
    head_map, scale, slopes, sinks = (settings.get(name) for name in ("head_map", "scale", "alibi_slopes", "sinks"))
    return Heads(
        number,
        weights[0],
        _shared(hidden),
        _in_words(hidden, settings.get("window", (-1, -1)), selects),
        list(head_map or _consecutive(num_heads, num_kv_heads)),
        query[0],
        key[0],
        value[0] if value.size(1) == num_kv_heads else None,
        dim**-0.5 if scale is None else scale,
        settings.get("softcap") or 0.0,
        None if slopes is None else slopes.tolist(),
        None if added is None or not added.any() else added,
        None if sinks is None else sinks.tolist(),
        selects,
    )


def _without_scores(number: int, weights: Tensor, num_kv_heads: int) -> Heads:  # [H, L, L]
    """The heads of a call whose weights are known, but not its scores: a weight of 0 counts as hidden."""
    hidden, kv = weights == 0, _consecutive(len(weights), num_kv_heads)
    says = _in_words(hidden, (-1, -1), False)
    return Heads(number, weights, _shared(hidden), says, kv, None, None, None, 1.0, 0.0, None, None, None, False)


def _consecutive(num_heads: int, num_kv_heads: int) -> list[int]:
    """The key-value head of each head."""
    return [head * num_kv_heads // num_heads for head in range(num_heads)]


def _shared(hidden: Tensor) -> Tensor:  # [H, L, L] -> [1 or H, L, L]
    return hidden[:1] if (hidden == hidden[:1]).all() else hidden


def _in_words(hidden: Tensor, window: tuple[int, int], selects: bool) -> str:  # [1 or H, L, L]
    places = torch.arange(hidden.size(1), device=hidden.device)
    distance = places[:, None] - places
    causal = bool(hidden[:, distance < 0].all())
    left, right = window[0], -1 if causal else window[1]
    outside = (distance < 0) & causal | ((left >= 0) & (distance > left)) | ((right >= 0) & (-distance > right))
    words = ["causal" if causal else "not causal"]
    sides = [f"{n} {'key' if n == 1 else 'keys'} {side}" for n, side in ((left, "before"), (right, "after")) if n >= 0]
    if sides:
        words.append("a window of " + " and ".join(sides))
    if (hidden & ~outside).any():
        words.append("keys that are not selected" if selects else "keys that a mask excludes")
    return ", ".join(words)


def _of_transformers(model: Any, x: Tensor, inputs: dict[str, Any]) -> _Found:
    from ...hf import recording

    with recording.recording(model) as calls:
        model(x, **inputs)
    length = x.size(1)
    found = [call for call in calls if call.weights.shape[0::2] == (1, length) and call.weights.size(3) == length]
    if not calls:
        return _of_attentions(model, model(x, output_attentions=True, **inputs))
    numbers = [getattr(call.module, "layer_idx", None) for call in found]
    if None in numbers or len(set(numbers)) < len(numbers):
        numbers = list(range(len(found)))
    return [
        (number, lambda call=call, number=number: heads(number, *call[1:]))
        for number, call in zip(numbers, found, strict=True)
    ]


def _of_attentions(model: Any, result: Any) -> _Found:
    """The heads of a transformers model that does not let attnpack compute: the weights that it returns."""
    found = [each for each in getattr(result, "attentions", None) or () if each is not None]
    kv_heads = getattr(model.config, "num_key_value_heads", None)
    return [
        (number, lambda number=number, each=each: _without_scores(number, each[0], kv_heads or each.size(1)))
        for number, each in enumerate(found)
    ]
