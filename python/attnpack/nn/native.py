"""How a Python module and its C++ twin belong together."""

from __future__ import annotations

from typing import Any

from torch import nn

# The leaves that a C++ twin has too; a class derived from one of them may compute something else.
_PLAIN = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.ModuleList)


class NativeModule(nn.Module):
    """Base of attnpack's modules: true ``nn.Module``s, each with a twin in ``attnpack.cpp``.

    The twin's constructor is the judge of the arguments, so that both languages complain in the same words.
    """

    _cpp_class: type
    _config: dict[str, Any]  # the twin's arguments as they were given, without modules and device

    def _live_config(self) -> dict[str, Any]:
        """The twin's arguments, with what was changed since: `module.scale = 2` is the twin's scale too."""
        return {name: self.__dict__.get(name, given) for name, given in self._config.items()}

    def _make_cpp(self, device: str | None) -> Any:
        """The twin with parameters of its own; called on "meta", where they cost nothing."""
        return self._cpp_class(**self._live_config(), device=device)

    def cpp(self) -> Any:
        """The C++ module on this module's storage: shared parameters and gradients, no Python in its forward.

        Raises TypeError where a child was replaced by, or given, something that only Python can run. Call it again
        after parameters were replaced (``load_state_dict(assign=True)``, ``.to(dtype)``).
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
