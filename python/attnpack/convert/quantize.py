"""Linear layers of 8 or 4 bits in the place of those of a module."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn

from ..errors import wrong_kind
from ..nn.linear import has_hooks
from ..nn.native import dtype_of_numbers, stored_like
from ..nn.stored import StoredEmbedding, StoredLinear, is_stored, storable_layers, to_stored

FORMATS = {8: "Q8_0", 4: "Q4_0"}
"""What so many bits are in GGUF files."""

Module = TypeVar("Module", bound=nn.Module)


def quantize_(
    model: Module, bits: int = 8, *, exact_first: int = 0, exact_last: int = 0, head_bits: int | None = None
) -> Module:
    """Rounds the weights of the linear layers of a module of attnpack to 8 or 4 bits, in place, and returns the module.

    Each 32 numbers of a row become integers with one scale in fp16, as GGUF's Q8_0 and Q4_0: 8.5 or 4.5 bits per
    number. A head that is tied to the embeddings is quantised with its table. The layers have no gradients, so all
    parameters of the module are frozen. Layers whose rows are no multiple of 32, kv_b_proj of latent attention and
    o_a_proj of compressed attention stay as they are.

    Raises, and changes nothing, for a layer alone, for layers with hooks, for weights that are stored in another format
    or distributed, and as `attnpack.ops.to_stored`. A layer that stands in several places stays one.

    Args:
        bits: 8 or 4.
        exact_first, exact_last: how many blocks at the start and at the end of each stack keep their weights.
        head_bits: bits of lm_head, or of the table that it is tied to: 8, 4, or 0 for as it is. Default: `bits`.
    """
    _check(bits, exact_first, exact_last, head_bits)
    _check_model(model)
    chosen = {name: bits for name in storable_layers(model)}
    chosen |= {name: bits for name, part in model.named_modules() if isinstance(part, StoredLinear | StoredEmbedding)}
    for path, child in model.named_modules(remove_duplicate=False):
        leaf = path.rpartition(".")[2]
        if isinstance(child, nn.Embedding | StoredEmbedding) and not _is_tied(model, path):
            chosen.pop(path, None)
        elif leaf in ("lm_head", "embed_tokens") and head_bits is not None and path in chosen:
            chosen[path] = head_bits
        if isinstance(child, nn.ModuleList) and leaf == "layers":
            exact = [i for i in range(len(child)) if i < exact_first or i >= len(child) - exact_last]
            kept = tuple(f"{path}.{i}." for i in exact)
            chosen = {name: width for name, width in chosen.items() if not name.startswith(kept)} if kept else chosen
    layers = {name: model.get_submodule(name) for name in chosen}
    for name, layer in layers.items():
        _check_layer(name, layer, chosen[name])
    # A layer in several places stays one, and so does a weight.
    blocks: dict[tuple[int, int], Tensor] = {}
    made: dict[nn.Module, nn.Module] = {}
    dtype = dtype_of_numbers(model.parameters())
    for name, layer in layers.items():
        key = id(layer.weight), chosen[name]
        if is_stored(layer.weight) or not chosen[name] or layer.weight.shape[1] % 32 or not layer.weight.shape[1]:
            continue
        if key not in blocks:
            blocks[key] = to_stored(layer.weight, chosen[name])
        if layer not in made:
            made[layer] = stored_like(layer, blocks[key], dtype)
    for name, layer in layers.items():
        if layer in made:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, made[layer])
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


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise wrong_kind("model", model, "a module in Python: quantize it, and then call .cpp() on it")
    if isinstance(model, nn.Linear | nn.Embedding):
        kind, rest = ("Linear", "layer.bias") if isinstance(model, nn.Linear) else ("Embedding", "layer.weight.dtype")
        one = f"attnpack.Stored{kind}.from_blocks(attnpack.ops.to_stored(layer.weight, bits), {rest})"
        raise wrong_kind("model", model, f"a module that holds it, in which it is replaced; {one} makes one layer")
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "placements"):
            raise ValueError(
                f"attnpack: model: {name} is a DTensor, whose parts cannot be rounded: call quantize_ on a model of "
                "one process"
            )


def _check_layer(name: str, layer: nn.Module, bits: int) -> None:
    if isinstance(layer, StoredLinear | StoredEmbedding):
        if bits and layer.format != FORMATS[bits]:
            raise ValueError(
                f"attnpack: model: {name} is stored in {layer.format} already, and rounding it to {FORMATS[bits]} "
                "would add one error to the other: take the model with its numbers"
            )
    elif bits and has_hooks(layer):
        raise ValueError(
            f"attnpack: model: {name} has hooks or a forward of its own, which its layer of stored weights would not "
            "have: remove them first"
        )
