"""The base class that connects a Python module with its C++ twin."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Types of layers that a C++ twin has too. The type must be the same: a derived class may compute something else.
_PLAIN = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.ModuleList)


class NativeModule(nn.Module):
    """Base of attnpack's modules: ``nn.Module``s, each with a twin in ``attnpack.cpp``.

    The twin's constructor checks the arguments, so that both languages give the same errors.
    """

    _cpp_class: type
    _not_of_twin: frozenset[str] = frozenset()
    """Arguments of the constructor that the twin's constructor does not have."""
    _no_attributes: frozenset[str] = frozenset()
    """Options that are no attributes of this module, so that later changes of such an attribute mean something else."""
    _config: dict[str, Any]
    """The twin's options, without modules."""

    def _configure(self, arguments: dict[str, Any]) -> Any:
        """Checks the arguments of the constructor by making the twin, which it returns. The options become attributes.

        Args:
            arguments: `locals()` of the constructor.
        """
        foreign = {"self", "__class__", "device", "dtype", "rope"} | self._not_of_twin
        given = {name: value for name, value in arguments.items() if name not in foreign}
        self._config = given
        twin = self._make_cpp("meta", dtype=arguments["dtype"])
        resolved = twin.options()
        self._config = {name: resolved[name] if value is None else value for name, value in given.items()}
        for name in self._config.keys() - self._no_attributes:
            setattr(self, name, self._config[name])
        return twin

    def _live_config(self) -> dict[str, Any]:
        """The twin's options with later changes: after `module.scale = 2` the twin's scale is 2 too."""
        return {name: self.__dict__.get(name, given) for name, given in self._config.items()}

    def _make_cpp(self, device: str | None, dtype: torch.dtype | None = None) -> Any:
        """The twin with its own parameters. On the device "meta" they take no memory."""
        return self._cpp_class(**self._live_config(), device=device, dtype=dtype)

    def cpp(self) -> Any:
        """The C++ module on this module's storage: it shares parameters and gradients, and runs without Python.

        Raises TypeError if a child was replaced by, or given, something that only Python can run. Call it again after
        parameters were replaced (``load_state_dict(assign=True)``, ``.to(dtype)``).
        """
        _refuse_foreign(self)
        twin = self._make_cpp("meta")
        parameters = dict(self.named_parameters(remove_duplicate=False))
        frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
        for name, parameter in twin.named_parameters() if frozen else ():
            if name in frozen:
                parameter.requires_grad_(False)
        twin.assign_state_dict(parameters)
        return twin.train(self.training)


def _refuse_foreign(module: nn.Module) -> None:
    for name, child in module.named_modules():
        where = f"{type(module).__name__}.{name}" if name else type(module).__name__
        ours = isinstance(child, NativeModule) and type(child).forward.__module__.startswith("attnpack.")
        if type(child) not in _PLAIN and not ours:
            raise TypeError(
                f"attnpack: {where} is a {type(child).__name__}, which C++ cannot run: it knows plain nn.Linear, "
                "nn.Embedding, nn.LayerNorm and attnpack's own modules. Merge or unwrap it, or call the Python module"
            )
        if "forward" in child.__dict__:
            raise TypeError(
                f"attnpack: {where} has a forward of its own, which C++ would not run. Remove it, or call the Python "
                "module"
            )
        if child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks:
            raise TypeError(
                f"attnpack: {where} has hooks, which C++ would not run. Remove them, or call the Python module"
            )
