"""Linear layers of 8 or 4 bits in the place of those of a module."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from ..nn.native import replace_by_stored
from ..nn.stored import storable_layers, to_stored

Module = TypeVar("Module", bound=nn.Module)


def quantize_(
    model: Module, bits: int = 8, *, exact_first: int = 0, exact_last: int = 0, head_bits: int | None = None
) -> Module:
    """Rounds the weights of the linear layers of a module of attnpack to 8 or 4 bits, in place, and returns the module.

    Each 32 numbers of a row become integers with one scale in fp16, as GGUF's Q8_0 and Q4_0: 8.5 or 4.5 bits per
    number. A head that is tied to the embeddings is quantised with its table. The layers have no gradients, so all
    parameters of the module are frozen. Layers whose rows are no multiple of 32, kv_b_proj of latent attention and
    o_a_proj of compressed attention stay as they are.

    Args:
        bits: 8 or 4.
        exact_first, exact_last: how many blocks at the start and at the end of each stack keep their weights.
        head_bits: bits of lm_head, or of the table that it is tied to: 8, 4, or 0 for as it is. Default: `bits`.
    """
    _check(bits, exact_first, exact_last, head_bits)
    chosen = {name: bits for name in storable_layers(model)}
    for path, child in model.named_modules(remove_duplicate=False):
        leaf = path.rpartition(".")[2]
        if isinstance(child, nn.Embedding) and not _is_tied(model, path):
            chosen.pop(path, None)
        elif leaf in ("lm_head", "embed_tokens") and head_bits is not None and path in chosen:
            chosen[path] = head_bits
        if isinstance(child, nn.ModuleList) and leaf == "layers":
            exact = [i for i in range(len(child)) if i < exact_first or i >= len(child) - exact_last]
            kept = tuple(f"{path}.{i}." for i in exact)
            chosen = {name: width for name, width in chosen.items() if not name.startswith(kept)} if kept else chosen
    weights = {name: model.get_submodule(name).weight for name in chosen}
    blocks = {
        name: to_stored(weight, chosen[name])
        for name, weight in weights.items()
        if chosen[name] and weight.shape[1] % 32 == 0 and weight.shape[1] > 0
    }
    for name, stored in blocks.items():
        replace_by_stored(model, name, stored)
    return model.requires_grad_(False)


def _is_tied(model: nn.Module, path: str) -> bool:
    """Whether the embedding at `path` is the head too: the owner of its stack has an lm_head that is None."""
    owner = path.removesuffix("embed_tokens").rstrip(".").rpartition(".")[0]
    return getattr(model.get_submodule(owner), "lm_head", model) is None


def _check(bits: int, exact_first: int, exact_last: int, head_bits: int | None) -> None:
    if bits not in (8, 4):
        raise ValueError(f"attnpack: bits: got {bits!r}, want 8 or 4")
    if head_bits not in (None, 0, 4, 8):
        raise ValueError(f"attnpack: head_bits: got {head_bits!r}, want 8, 4, or 0 to leave the head exact")
    for name, count in (("exact_first", exact_first), ("exact_last", exact_last)):
        if type(count) is not int or count < 0:
            raise ValueError(f"attnpack: {name}: got {count!r}, want how many blocks stay exact, 0 or more")
