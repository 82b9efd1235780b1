"""Hooks by which a module computes on this rank's shares: before forward its parameters become plain tensors, the
shares of this rank; after it they are DTensors again, and the parts of the output are joined."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..ops import nested
from .agreement import agree, state_of_draws
from .collectives import copied, gathered, summed
from .shares import Plan, Share, rows_of, select_rows, tensor_of


class Unit:
    """The hooks of one module; this one is of a module that every rank runs whole."""

    def __init__(self, module: nn.Module, parameters: dict[str, Share], group: dist.ProcessGroup) -> None:
        self.group, self.parameters = group, parameters
        self._swapped: list[list[tuple[nn.Module, str, Any]]] = []
        module.register_forward_pre_hook(self.before, with_kwargs=True)
        module.register_forward_hook(self.after, with_kwargs=True, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__, _swapped=[])
        return copied

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        changed: list[tuple[nn.Module, str, Any]] = []
        self._swapped.append(changed)
        for name, share in self.parameters.items():
            owner, leaf = _owner(module, name)
            parameter = None if owner is None else owner._parameters.get(leaf)
            if parameter is not None and not (self._is_gathered_later(parameter) and self._skips(module, owner)):
                changed.append((owner, leaf, parameter))
                owner._parameters[leaf] = self._local(parameter, share)
        return self.inputs(module, args, kwargs)

    def after(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        changed = self._swapped.pop() if self._swapped else []
        for owner, name, value in reversed(changed):
            if name in owner._parameters:
                owner._parameters[name] = value
            else:
                setattr(owner, name, value)
        return None if output is None else self.output(module, output)

    def inputs(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, kwargs

    def output(self, module: nn.Module, output: Any) -> Any:
        return output

    @staticmethod
    def _is_gathered_later(parameter: Tensor) -> bool:
        """Whether fully_shard holds a part of it, which its hooks have not gathered yet."""
        return isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1

    def _skips(self, module: nn.Module, owner: nn.Module) -> bool:
        """Whether the hooks of a child, which run later, gather its parameters."""
        return owner is not module

    def _local(self, parameter: Tensor, share: Share) -> Tensor | None:
        if self._is_gathered_later(parameter):
            raise ValueError(
                "attnpack: fully_shard divides a single linear layer, whose weight the module around it reads: call "
                "fully_shard on that module (attention, a feed-forward) or on its block"
            )
        if share.added_last:
            return None
        local = tensor_of(parameter)
        if share.summed:
            local = copied(local, self.group)
        return local if share.rows is None else select_rows(local, share.rows)

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        """Sets an attribute until the end of the call."""
        self._swapped[-1].append((module, name, getattr(module, name)))
        setattr(module, name, value)


class Agreement:
    """A hook: whether all ranks give a module inputs of the same shapes, and draw the same numbers for dropout. gloo
    ends a process where shapes differ."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> Agreement:
        return Agreement(self.group)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given = {f"input {i}": x for i, x in enumerate(args)} | kwargs
        given = {name: x for name, x in given.items() if isinstance(x, Tensor) and not nested.is_nested(x)}
        for x in given.values():
            draws = state_of_draws(module, x.device)
            agree(f"a {type(module).__name__}", self.group, x.device, **given, generator=draws)
            break


class SharedUnit(Unit):
    """Attention or a feed-forward: every rank computes a part of the output, from its heads or hidden numbers."""

    def __init__(self, module: nn.Module, plan: Plan, group: dist.ProcessGroup) -> None:
        self.plan = plan
        super().__init__(module, plan.parameters, group)

    def _skips(self, module: nn.Module, owner: nn.Module) -> bool:
        return False

    def inputs(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if module.training and getattr(module, "dropout", 0.0):
            raise ValueError(
                f"attnpack: dropout: got {module.dropout} in training, which is not supported over several "
                "processes: each rank would draw the same numbers for other heads; set it to 0, or call eval()"
            )
        for name, value in self.plan.settings.items():
            self._set(module, name, value)
        args = tuple(self._copied(x) for x in args)
        return args, {name: self._mask(x) if name == "mask" else self._copied(x) for name, x in kwargs.items()}

    def output(self, module: nn.Module, output: Any) -> Any:
        joined = output[0] if isinstance(output, tuple) else output
        joined = summed(joined, self.group)
        for name, share in self.parameters.items():
            owner, leaf = _owner(module, name)
            if share.added_last and owner is not None and owner._parameters.get(leaf) is not None:
                joined = joined + tensor_of(owner._parameters[leaf])
        if not isinstance(output, tuple):
            return joined
        weights = gathered(output[1].transpose(0, 1), self.group)
        return joined, weights.transpose(0, 1)

    def _copied(self, x: Any) -> Any:
        if nested.is_nested(x):
            raise ValueError(
                "attnpack: x is a nested tensor, wants a padded one under tensor parallelism: pass padded tensors and "
                "lengths"
            )
        floating = isinstance(x, Tensor) and x.is_floating_point()
        return copied(x, self.group) if floating and x.requires_grad else x

    def _mask(self, mask: Any) -> Any:
        heads, mask = self.plan.heads, self._copied(mask)
        if heads is None or not isinstance(mask, Tensor) or mask.dim() < 3 or mask.size(-3) != self.plan.num_heads:
            return mask
        return mask.narrow(-3, heads.start, len(heads))


class EmbeddingUnit(Unit):
    """A table whose rows the ranks share: each rank looks up the tokens that it has.

    In C++ this is one function (SharedTable in distributed/detail/layer_shares.cpp). Here the look-up is nn.Embedding's
    own forward, with the hooks of others, in the rows that DTensor has dealt out, which torch cuts otherwise; so the
    steps before and after it are hooks.
    """

    def __init__(self, module: nn.Embedding, parameters: dict[str, Share], group: dist.ProcessGroup) -> None:
        self.size = module.num_embeddings
        self._foreign: list[Tensor] = []
        super().__init__(module, parameters, group)

    def inputs(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        ids = args[0] if args else kwargs["input"]
        if nested.is_nested(ids):
            raise ValueError("attnpack: ids are nested, want padded ones under tensor parallelism: pass lengths too")
        outside = (ids < 0) | (ids >= self.size)
        if not torch.compiler.is_compiling() and ids.is_cpu:
            if outside.any():
                raise IndexError("attnpack: ids: got one outside the vocabulary")
        else:
            torch._assert_async(~outside.any(), "attnpack: ids: got one outside the vocabulary")
        rows = rows_of(self.size, self.group.size(), self.group.rank())
        foreign = (ids < rows.start) | (ids >= rows.stop)
        self._foreign.append(foreign)
        weight = module.weight
        if not len(rows):  # a rank without rows: no look-up may miss
            module._parameters["weight"] = torch.cat([weight, weight.new_zeros(1, weight.size(1))])
        return ((ids - rows.start).masked_fill(foreign, 0),), {}

    def after(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        try:
            return super().after(module, args, kwargs, output)
        finally:
            if self._foreign:
                self._foreign.pop()

    def output(self, module: nn.Module, output: Tensor) -> Tensor:
        return summed(output.masked_fill(self._foreign[-1].unsqueeze(-1), 0), self.group)


class HeadUnit(Unit):
    """A linear layer whose outputs the ranks share, and all get: the logits of a model."""

    def inputs(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        x = args[0] if args else kwargs["input"]
        return (copied(x, self.group),), {}

    def output(self, module: nn.Module, output: Tensor) -> Tensor:
        return gather_last(output, module.out_features, self.group)


class ModelUnit(Unit):
    """A CausalLM. All ranks must give it the same ids; where it has no lm_head, its embedding is the head too."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, divides: bool) -> None:
        tied = module.lm_head is None
        self.joins = tied and divides
        self.size = module.model.embed_tokens.num_embeddings
        super().__init__(module, {"model.embed_tokens.weight": Share()} if tied else {}, group)
        if self.joins:
            module.model.register_forward_hook(self.hidden)

    def inputs(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        ids = args[0] if args else kwargs.get("ids")
        if isinstance(ids, Tensor) and not nested.is_nested(ids):
            agree("the model", self.group, ids.device, ids=ids, generator=state_of_draws(module, ids.device))
        return args, kwargs

    def hidden(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        """The states that the head reads: each rank gives a part of their gradient."""
        return copied(output, self.group) if self._swapped else output

    def output(self, module: nn.Module, output: Tensor) -> Tensor:
        return gather_last(output, self.size, self.group) if self.joins else output


def gather_last(x: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    """[..., n] of all ranks as [..., size], where DTensors divide the last dim."""
    longest = len(rows_of(size, group.size(), 0))
    padded = F.pad(x, (0, longest - x.size(-1)))
    whole = gathered(padded.movedim(-1, 0), group)
    return whole.narrow(0, 0, size).movedim(0, -1).contiguous()


def _owner(module: nn.Module, name: str) -> tuple[nn.Module | None, str]:
    """The child that has the parameter `name`, None if there is none, and the parameter's name there."""
    *path, leaf = name.split(".")
    for child in path:
        module = getattr(module, child, None)
        if not isinstance(module, nn.Module):
            return None, leaf
    return module, leaf
