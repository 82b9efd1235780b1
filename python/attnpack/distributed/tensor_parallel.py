"""Tensor parallelism (Shoeybi et al. 2019): each rank has a share of the heads, of the hidden numbers and of the
vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from .. import errors
from ..nn.causal_lm import CausalLM
from .collectives import as_group
from .generate import generate
from .shares import COLUMNS, Share, plan_of
from .units import EmbeddingUnit, HeadUnit, ModelUnit, SharedUnit, Unit

Module = TypeVar("Module", bound=nn.Module)


def tensor_parallel(module: Module, mesh: DeviceMesh) -> Module:
    """Shares a module out over the ranks of a mesh, in place, and returns it.

    Its parameters become DTensors of the one-process shapes, under the same names and in the same order: rows of q, k,
    v, gate, up, of the embedding and the head, columns of o and down. Each rank keeps its share of them, with the
    weights of rank 0. Where kv heads do not divide among the ranks, k_proj and v_proj stay whole: a rank computes the
    kv heads that its query heads read, and the gradients are summed. Inputs and outputs are those of one process, the
    same on all ranks; a KV cache holds this rank's kv heads alone, so make a StaticCache for those.

    Args:
        module: any module of attnpack, or one that contains some. Modules of other kinds run whole on every rank.
        mesh: a DeviceMesh of one dim, such as `mesh["tp"]`.

    Raises:
        ValueError: a number of heads does not divide among the ranks, or a layer has parameters of its own. Later calls
            raise it for dropout in training, nested tensors, and ids whose shapes differ between ranks.
    """
    if not isinstance(mesh, DeviceMesh):
        raise errors.wrong_kind("mesh", mesh, "a DeviceMesh: torch.distributed.device_mesh.init_device_mesh makes one")
    if not isinstance(module, nn.Module):
        raise errors.wrong_kind("module", module, "a torch.nn.Module")
    group = as_group(mesh)
    found = list(_units(module, "", mesh, set()))
    for path, unit, _, _ in found:
        for name, parameter in unit.named_parameters():
            if isinstance(parameter, DTensor):
                raise ValueError(
                    f"attnpack: {path}{name} is a DTensor already, want a plain parameter: call tensor_parallel first, "
                    "and fully_shard after it"
                )
    for _, unit, kind, shares in found:
        for name, parameter in list(unit.named_parameters(remove_duplicate=False)):
            if name in shares.parameters if kind is SharedUnit else name in shares:
                share = (shares.parameters if kind is SharedUnit else shares)[name]
                _distribute(unit, name, parameter, share, mesh)
        kind(unit, shares, group)
    for unit in module.modules():
        if isinstance(unit, CausalLM):
            unit._generate = generate
            ModelUnit(unit, group, _divides(unit.model.embed_tokens))
    return module


def _units(
    module: nn.Module, path: str, mesh: DeviceMesh, seen: set[int]
) -> Iterator[tuple[str, nn.Module, type[Unit], object]]:
    """(path, module, kind of unit, its shares) of all units; parameters of modules between them are whole."""
    if id(module) in seen:
        return
    seen.add(id(module))
    plan = plan_of(module, mesh.size(), mesh.get_local_rank())
    if plan is not None:
        yield path, module, SharedUnit, plan
        return
    own = {name: Share() for name, _ in module.named_parameters(recurse=False)}
    if own:
        yield path, module, Unit, own
    for name, child in module.named_children():
        where = f"{path}{name}."
        heads = isinstance(module, CausalLM) and name == "lm_head" and type(child) is nn.Linear
        if heads or _divides(child):
            seen.add(id(child))
            shares = {own: Share(COLUMNS) for own in ("weight", "bias")}
            yield where, child, HeadUnit if heads else EmbeddingUnit, shares
        else:
            yield from _units(child, where, mesh, seen)


def _divides(module: nn.Module) -> bool:
    """Whether a module is an embedding whose rows can be shared."""
    plain = type(module) is nn.Embedding
    return plain and module.padding_idx is None and module.max_norm is None and not module.sparse


def _distribute(unit: nn.Module, name: str, parameter: nn.Parameter, share: Share, mesh: DeviceMesh) -> None:
    owner, _, own = name.rpartition(".")
    shared = distribute_tensor(parameter.detach(), mesh, [share.placement])
    unit.get_submodule(owner)._parameters[own] = nn.Parameter(shared, requires_grad=parameter.requires_grad)
