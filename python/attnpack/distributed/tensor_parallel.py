"""Tensor parallelism (Shoeybi et al. 2019): each rank has a share of the heads, of the hidden numbers and of the
vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from .. import errors
from ..nn.causal_lm import CausalLM
from ..nn.stack import EncoderDecoder
from ..nn.stored import StoredEmbedding, StoredLinear
from .agreement import agree
from .collectives import as_group
from .generate import generate, generate_from_source
from .shares import COLUMNS, Plan, Share, plan_of, shared_like
from .units import Agreement, EmbeddingUnit, HeadUnit, ModelUnit, SharedUnit, Unit

Module = TypeVar("Module", bound=nn.Module)


def tensor_parallel(module: Module, mesh: DeviceMesh) -> Module:
    """Shares a module out over the ranks of a mesh, in place, and returns it.

    Its parameters become DTensors of the one-process shapes, under the same names and in the same order: rows of q, k,
    v, gate, up, of the embedding and the head, columns of o and down. Each rank keeps its share of them, with the
    weights of rank 0. A weight that stands in two places stays one. Where kv heads do not divide among the ranks,
    k_proj and v_proj stay whole: a rank computes the kv heads that its query heads read, and the gradients are summed.
    Inputs and outputs are those of one process, the same on all ranks; a KV cache holds only this rank's kv heads, so
    make a StaticCache for those. `load_state_dict` takes DTensors, or whole tensors that all ranks have alike.

    Args:
        module: any module of attnpack, or one that contains some. SelfAttention, DifferentialAttention, SparseAttention
            and modules of other kinds run whole on every rank.
        mesh: a DeviceMesh of one dim, such as `mesh["tp"]`.

    Raises:
        ValueError: the ranks' parameters differ in name or shape, a number of heads does not divide among the ranks, or
            a layer has parameters of its own, a norm over all heads, stored weights, or a weight that has another share
            elsewhere.
            Later calls raise it for dropout of heads or hidden numbers in training, for nested tensors, and for inputs
            whose shapes differ between ranks. So do they for dropout of whole states where the ranks' generators
            differ.
    """
    if not isinstance(mesh, DeviceMesh):
        raise errors.wrong_kind("mesh", mesh, "a DeviceMesh: torch.distributed.device_mesh.init_device_mesh makes one")
    if not isinstance(module, nn.Module):
        raise errors.wrong_kind("module", module, "a torch.nn.Module")
    for path, child in module.named_modules():
        if isinstance(child, StoredLinear | StoredEmbedding):
            raise ValueError(
                f"attnpack: {path or 'module'} holds stored weights (8 or 4 bits), which tensor parallelism cannot "
                "cut: load the model with its weights expanded"
            )
    group = as_group(mesh)
    agree("tensor_parallel", group, torch.device(mesh.device_type), **dict(module.named_parameters()))
    found = list(_units(module, "", mesh, {}))
    placed: dict[nn.Parameter, Placement] = {}
    for path, _, name, parameter, share in _parameters(found):
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"attnpack: {path}{name} is a DTensor already, want a plain parameter: call tensor_parallel first, and "
                "fully_shard after it"
            )
        if placed.setdefault(parameter, share.placement) != share.placement:
            raise ValueError(
                f"attnpack: {path}{name} is a weight that stands in another place too, of which ranks have another "
                "share there: make them two weights"
            )
    made: dict[nn.Parameter, nn.Parameter] = {}  # a weight in two places stays one
    for _, unit, name, parameter, share in list(_parameters(found)):
        if parameter not in made:
            made[parameter] = _distributed(parameter, share, mesh)
        owner, _, leaf = name.rpartition(".")
        unit.get_submodule(owner)._parameters[leaf] = made[parameter]
    for _, unit, kind, shares in found:
        kind(unit, shares, group)
    module.register_load_state_dict_pre_hook(_share_loaded)
    if not isinstance(module, CausalLM):  # which compares its ids itself
        module.register_forward_pre_hook(Agreement(group), with_kwargs=True)
    for unit in module.modules():
        if isinstance(unit, CausalLM):
            unit._generate = generate
            ModelUnit(unit, group, _divides(unit.model.embed_tokens))
        elif isinstance(unit, EncoderDecoder):
            unit._generate = generate_from_source
    return module


def _units(
    module: nn.Module, path: str, mesh: DeviceMesh, whole: dict[nn.Module, list[str]]
) -> Iterator[tuple[str, nn.Module, type[Unit], Any]]:
    """(path, module, kind of unit, its shares) of all units. `whole` receives, per module that was seen, the names in
    it of the parameters that every rank reads whole: a module between units may read those of its children."""
    if module in whole:
        return
    names = whole[module] = []
    plan = plan_of(module, mesh.size(), mesh.get_local_rank())
    if plan is not None:
        yield path, module, SharedUnit, plan
        return
    names += [name for name, _ in module.named_parameters(recurse=False)]
    for name, child in module.named_children():
        where = f"{path}{name}."
        heads = isinstance(module, CausalLM) and name == "lm_head" and type(child) is nn.Linear
        if (heads or _divides(child)) and child not in whole:
            whole[child] = []
            shares = {part: Share(COLUMNS) for part in ("weight", "bias")}
            yield where, child, HeadUnit if heads else EmbeddingUnit, shares
        else:
            yield from _units(child, where, mesh, whole)
        names += [f"{name}.{part}" for part in whole[child]]
    if names:
        yield path, module, Unit, {name: Share() for name in names}


def _share_loaded(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Whole tensors, as one process has them, become shares like those of the parameters."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        whole = state_dict.get(prefix + name)
        plain = isinstance(whole, Tensor) and not isinstance(whole, DTensor) and whole.shape == parameter.shape
        if plain and isinstance(parameter, DTensor):
            state_dict[prefix + name] = shared_like(whole, parameter)


def _parameters(
    units: list[tuple[str, nn.Module, type[Unit], Any]],
) -> Iterator[tuple[str, nn.Module, str, nn.Parameter, Share]]:
    """(path of the unit, unit, name in it, parameter, its share) for each place of each parameter."""
    for path, unit, _, shares in units:
        parameters = shares.parameters if isinstance(shares, Plan) else shares
        for name, parameter in unit.named_parameters(remove_duplicate=False):
            if name in parameters:
                yield path, unit, name, parameter, parameters[name]


def _divides(module: nn.Module) -> bool:
    """Whether a module is an embedding whose rows can be shared."""
    plain = type(module) is nn.Embedding
    return plain and module.padding_idx is None and module.max_norm is None and not module.sparse


def _distributed(parameter: nn.Parameter, share: Share, mesh: DeviceMesh) -> nn.Parameter:
    shared = distribute_tensor(parameter.detach(), mesh, [share.placement])
    return nn.Parameter(shared, requires_grad=parameter.requires_grad)
