"""Error sentences for wrong inputs of the Python modules. Their C++ twins check the arguments of constructors."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .explain import nested, unexpected_keyword, wrong_kind


def check_input(name: str, tensor: Tensor, width: int, projection: nn.Module | None) -> None:
    """Raises unless `tensor` is [B, L, width] in the dtype and on the device of a plain linear `projection`."""
    if not isinstance(tensor, Tensor):
        raise wrong_kind(name, tensor, f"a tensor [batch, length, {width}]: torch.tensor() makes one of a list")
    if tensor.is_nested:
        raise nested(name)
    if tensor.dim() != 3 or tensor.size(-1) != width:
        raise ValueError(f"attnpack: {name}: got shape {list(tensor.shape)}, want [batch, length, {width}]")
    _check_place(name, tensor, projection)


def check_tokens(name: str, tensor: Tensor, width: int, projection: nn.Module | None) -> None:
    """As `check_input` for [..., width], which norms and feed-forwards take."""
    if not isinstance(tensor, Tensor):
        raise wrong_kind(name, tensor, f"a tensor [..., {width}]: torch.tensor() makes one of a list")
    if tensor.dim() == 0 or tensor.size(-1) != width:
        raise ValueError(f"attnpack: {name}: got shape {list(tensor.shape)}, want [..., {width}]")
    _check_place(name, tensor, projection)


def check_device(name: str, tensor: Tensor, weight: Tensor) -> None:
    if tensor.device != weight.device:
        fix = (
            "its weights hold no numbers yet, assign it a state dict first"
            if weight.is_meta
            else "move one of them with .to()"
        )
        raise ValueError(
            f"attnpack: {name}: got device {tensor.device}, want the module's device {weight.device}; {fix}"
        )


def _check_place(name: str, tensor: Tensor, projection: nn.Module | None) -> None:
    """Checks dtype and device. A projection that replaces the plain linear may want others, so it is not checked."""
    if type(projection) is not nn.Linear:
        return
    weight = projection.weight
    check_device(name, tensor, weight)
    if tensor.dtype != weight.dtype and not torch.is_autocast_enabled(tensor.device.type):
        raise ValueError(
            f"attnpack: {name}: got dtype {tensor.dtype}, want the module's dtype {weight.dtype}; "
            "convert one of them with .to()"
        )


def check_context(
    x: Tensor,
    context: Tensor | None,
    value_context: Tensor | None,
    cache: object | None,
    positions: Tensor | None,
) -> None:
    """Checks that context and cache exclude each other, that value_context has a context of its own length, and that
    batch sizes agree."""
    for name, other in (("context", context), ("value_context", value_context)):
        if other is not None and other.size(0) != x.size(0):
            raise ValueError(f"attnpack: {name}: got batch {other.size(0)}, want {x.size(0)} as in x")
    if value_context is not None and context is None:
        raise ValueError(
            "attnpack: value_context: got a tensor without context; give context, where the keys come from, too"
        )
    if context is not None and cache is not None:
        raise ValueError(
            "attnpack: cache: got one together with context; a cache holds self-attention's keys, leave it out"
        )
    if value_context is not None and value_context.size(1) != context.size(1):
        raise ValueError(
            f"attnpack: value_context: got length {value_context.size(1)}, want {context.size(1)} as context has: each "
            "of its keys needs one value"
        )
    check_positions(positions, x)


def check_positions(positions: Tensor | None, x: Tensor) -> None:
    """Checks that positions, if given, are int64 [L] or [B, L] for x [B, L, E], even if no RoPE reads them."""
    if positions is None:
        return
    if not isinstance(positions, Tensor):
        raise wrong_kind(
            "positions", positions, "an int64 tensor [length] or [batch, length]: torch.tensor() makes one of a list"
        )
    length = x.size(1)
    flat = positions.dim() == 1 and positions.size(0) == length
    by_sequence = positions.dim() == 2 and positions.size(0) in (1, x.size(0)) and positions.size(1) == length
    if positions.dtype != torch.int64 or not (flat or by_sequence):
        raise ValueError(
            f"attnpack: positions has shape {list(positions.shape)} and dtype {positions.dtype}, wants int64 [length] "
            f"or [batch, length] with length {length}: one number for each new token"
        )


def check_lengths(name: str, lengths: Tensor | None, x: Tensor) -> None:
    """Checks that lengths, if given, are int32 or int64, one for each sequence of x [B, L, ...], and from 0 to L.

    Values are checked on the CPU alone: reading them on another device would wait for it.
    """
    if lengths is None or not isinstance(x, Tensor) or x.dim() < 2:  # the check of x itself refuses such an x
        return
    if not isinstance(lengths, Tensor):
        raise wrong_kind(name, lengths, "an int32 or int64 tensor [batch]: torch.tensor() makes one of a list")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"attnpack: {name} has dtype {lengths.dtype}, wants int32 or int64: call .long() on it")
    if lengths.dim() != 1 or lengths.size(0) != x.size(0):
        raise ValueError(
            f"attnpack: {name} has shape {list(lengths.shape)}, wants [batch] = [{x.size(0)}]: the valid tokens of "
            "each sequence"
        )
    for b, length in enumerate(values_of(lengths) or ()):
        if not 0 <= length <= x.size(1):
            raise ValueError(f"attnpack: {name}[{b}] is {length}, wants 0 to {x.size(1)}: the valid tokens of that row")


def values_of(tensor: Tensor) -> list[Any] | None:
    """The values to check, or None if they cannot be read.

    A traced tensor has no values: the op checks those of each run. Reading from another device would wait for it.
    """
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    try:
        return tensor.tolist()
    except RuntimeError:  # a tensor inside a transform of torch.func has no values either
        return None


@contextmanager
def _renaming(own: str, callers: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        start, text = f"attnpack: {own}", str(error)
        if type(error) not in (TypeError, ValueError) or not text.startswith((start + ":", start + " ")):
            raise
        raise type(error)(f"attnpack: {callers}{text.removeprefix(start)}") from None


def naming(own: str, callers: str) -> AbstractContextManager[None]:
    """A context for a call of a part of a module: an error about the part's argument `own` names `callers` instead."""
    return nullcontext() if torch.compiler.is_compiling() else _renaming(own, callers)


def check_ids(ids: Tensor) -> None:
    """Checks that ids are token numbers [B, L]. The embedding finds wrong values, see explain_ids."""
    if not isinstance(ids, Tensor):
        raise wrong_kind("ids", ids, "an int64 tensor [batch, length] of token numbers: torch.tensor() makes one")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"attnpack: ids has dtype {ids.dtype}, wants int64 token numbers: call .long() on it")
    if ids.dim() != 2:
        raise ValueError(
            f"attnpack: ids: got shape {list(ids.shape)}, want token numbers [B, L]; for one sequence pass "
            "ids.unsqueeze(0)"
        )


def explain_ids(ids: Tensor, vocab_size: int) -> None:
    """Raises for ids out of the vocabulary. It is called after an embedding failed, so it costs a good call nothing."""
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.numel():
        raise ValueError(
            f"attnpack: ids holds {int(outside[0])}, wants 0 to {vocab_size - 1}, the tokens of vocab_size "
            f"{vocab_size}: use the tokenizer that belongs to the model"
        ) from None


LAYER_CACHE = "an attnpack.DynamicCache() or StaticCache"
MODEL_CACHE = "an attnpack.ModelCache(num_layers)"


def reject_keywords(unknown: dict[str, Any], cache: str | None = LAYER_CACHE, function: str = "forward") -> None:
    """Raises TypeError for keywords that `function` does not have; `cache` says in words what its cache= takes, None if
    it has no such argument."""
    for name in unknown:
        raise unexpected_keyword(function, name, ("mask",) if cache is None else ("mask", "cache"), cache or "")
