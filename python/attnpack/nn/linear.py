"""Calls of linear layers. The layers are torch's own; their products are computed by ``attnpack.ops.linear``, which
reads the weights at the speed of memory for few rows, and takes the faster of torch's kernels for many."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from .._C import linear_layers
from ..ops.stored import is_stored
from .stored import StoredLinear

is_watched = linear_layers.is_watched
"""Whether a module has hooks or a forward of its own, so that a call does more than its class says."""

_is_compiling = torch.compiler.is_compiling


def has_hooks(layer: nn.Module) -> bool:
    """Whether a call of the layer runs more than its class says: `is_watched` without C++, for a graph."""
    return "forward" in vars(layer) or any(getattr(layer, name) for name in linear_layers.HOOKS)


def _just_multiplies(layer: nn.Module) -> bool:
    """Whether a call of layer runs only the product of a StoredLinear."""
    return type(layer) is StoredLinear and not (has_hooks(layer) if _is_compiling() else is_watched(layer))


def is_offloaded(module: nn.Module) -> bool:
    """Whether a hook of accelerate brings the weights when the module is called. Until then they are on "meta"."""
    return hasattr(module, "_hf_hook")


def project(layer: nn.Module, x: Tensor) -> Tensor:  # [..., in_features] -> [..., out_features]
    """layer(x). A plain ``nn.Linear`` without hooks is computed by ``attnpack.ops.linear``, unless a graph is traced.

    A subclass of ``nn.Linear`` could do the same, but quantisers and LoRA look for the type ``nn.Linear`` itself.
    """
    if not _is_compiling():
        found = linear_layers.project((layer,), x)
        if found is not None:
            return found[0]
    return layer(x)


def project_all(layers: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """`project` by each of the layers; one call of ``attnpack.ops.linears`` if all of them are plain."""
    found = None if _is_compiling() else linear_layers.project(layers, x)
    if found is None and all(map(_just_multiplies, layers)):
        biases = [layer.bias for layer in layers if layer.bias is not None]
        if len(biases) in (0, len(layers)):
            return ops.stored_linears(x, [layer.weight for layer in layers], biases)
    return [project(layer, x) for layer in layers] if found is None else found


def query_latent(layer: nn.Module, x: Tensor) -> Tensor:
    """q_a_layernorm(q_a_proj(x)) of a layer, whose norm may be None."""
    low = project(layer.q_a_proj, x)
    return low if layer.q_a_layernorm is None else layer.q_a_layernorm(low)


def low_rank(layer: nn.Module, x: Tensor) -> Tensor:
    """Queries through a latent: q_b_proj of `query_latent`."""
    return project(layer.q_b_proj, query_latent(layer, x))


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input [..., in] times weight [out, in] plus bias [out]. torch's linear computes it while a graph is traced, and
    for tensors of other types, such as a quantised weight. The weight may also be stored blocks."""
    if is_stored(weight):
        return ops.stored_linear(input, weight, bias)
    if not _is_compiling() and type(weight) in (Tensor, nn.Parameter) and type(input) is Tensor:
        return ops.linear(input, weight, bias)
    return F.linear(input, weight, bias)


def plain_weight(layer: nn.Module) -> Tensor | None:
    """The weight [out, in] of a layer that just multiplies by it, so that native code may read the weight instead.

    None if layer has a bias or a hook, is of another type (LoRA, a quantised linear), or has a weight of another type.
    """
    if type(layer) is not nn.Linear or layer.bias is not None or type(layer.weight) not in (Tensor, nn.Parameter):
        return None
    if _is_compiling():  # a compiled graph knows no global hooks
        return None if has_hooks(layer) else layer.weight
    return layer.weight if linear_layers.is_plain(layer) else None
