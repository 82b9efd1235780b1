"""Calls of linear layers. The layers are torch's own; their products are computed by ``attnpack.ops.linear``, which
reads the weights at the speed of memory for few rows, and takes the faster of torch's kernels for many."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from .. import ops

_FORWARD = nn.Linear.forward
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_hooks_of = itemgetter(*_HOOKS)


def project(layer: nn.Module, x: Tensor) -> Tensor:  # [..., in_features] -> [..., out_features]
    """layer(x). A plain ``nn.Linear`` without hooks is computed by ``attnpack.ops.linear``, unless a graph is traced.

    A subclass of ``nn.Linear`` could do the same, but quantisers and LoRA look for the type ``nn.Linear`` itself.
    """
    if not torch.compiler.is_compiling() and _is_plain(layer) and _are_plain(x, layer.weight):
        return ops.linear(x, layer.weight, layer.bias)
    return layer(x)


def project_all(layers: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """`project` by each of the layers; one call of ``attnpack.ops.linears`` if all of them are plain."""
    biases = [layer.bias for layer in layers if getattr(layer, "bias", None) is not None]
    if (
        not torch.compiler.is_compiling()
        and len(biases) in (0, len(layers))
        and all(_is_plain(layer) and _are_plain(x, layer.weight) for layer in layers)
    ):
        return ops.linears(x, [layer.weight for layer in layers], biases)
    return [project(layer, x) for layer in layers]


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input [..., in] times weight [out, in] plus bias [out]. torch's linear computes it while a graph is traced, and
    for tensors of other types, such as a quantised weight."""
    if not torch.compiler.is_compiling() and _are_plain(input, weight):
        return ops.linear(input, weight, bias)
    return F.linear(input, weight, bias)


def plain_weight(layer: nn.Module) -> Tensor | None:
    """The weight [out, in] of a layer that just multiplies by it, so that native code may read the weight instead.

    None if layer has a bias or a hook, is of another type (LoRA, a quantised linear), or has a weight of another type.
    """
    if type(layer) is not nn.Linear or layer.bias is not None or type(layer.weight) not in (Tensor, nn.Parameter):
        return None
    if torch.compiler.is_compiling():  # a compiled graph knows no global hooks
        return None if any(getattr(layer, name) for name in _HOOKS) else layer.weight
    return layer.weight if _is_plain(layer) else None


def _are_plain(input: Tensor, weight: Tensor) -> bool:
    return type(weight) in (Tensor, nn.Parameter) and type(input) is Tensor


def _is_plain(layer: nn.Module) -> bool:
    """Whether a call of layer is torch's linear alone: no other type, no forward of its own, no hooks."""
    return (
        type(layer) is nn.Linear
        and nn.Linear.forward is _FORWARD
        and not is_watched(layer)
        and not torch_module._has_any_global_hook()
    )


def is_watched(layer: nn.Module) -> bool:
    """Whether layer has hooks or a forward of its own, so that a call does more than its class says."""
    own = layer.__dict__
    return "forward" in own or any(_hooks_of(own))
