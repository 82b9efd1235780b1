"""The base class that connects a Python module with its C++ twin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from inspect import get_annotations
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from .. import cpp
from .._C import checks, linear_layers
from ..errors import wrong_kind
from ..ops.stored import inputs_of, is_stored
from ..signatures import HasForward, HasTwin, P, Result, Twin
from .stored import StoredEmbedding, StoredLinear, storable_layers

# Types of layers that a C++ twin has too. The type must be the same: a derived class may compute something else.
_PLAIN = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.Conv1d, nn.ModuleList, StoredLinear, StoredEmbedding)


class NativeModule(nn.Module):
    """Base of attnpack's modules: ``nn.Module``s, each with a twin in ``attnpack.cpp``.

    The twin's constructor checks the arguments, so that both languages give the same errors.
    """

    if TYPE_CHECKING:

        def __call__(self: HasForward[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result: ...

    # _cpp_class, the class of the twin, has no annotation: each class has a type of its own, which `cpp` gives.
    _not_of_twin: frozenset[str] = frozenset()
    """Arguments of the constructor that the twin's constructor does not have."""
    _no_attributes: frozenset[str] = frozenset()
    """Options that are no attributes of this module, so that later changes of such an attribute mean something else."""
    _config: dict[str, Any]
    """The twin's options, without modules."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "_cpp_class" in vars(cls):
            _BY_TWIN.setdefault(cls._cpp_class, cls)

    def _configure(self, arguments: dict[str, Any]) -> Any:
        """Checks the arguments of the constructor by making the twin, which it returns. The options become attributes.

        Args:
            arguments: `locals()` of the constructor.
        """
        foreign = {"self", "__class__", "device", "dtype", "rope"} | self._not_of_twin
        given = {name: value for name, value in arguments.items() if name not in foreign}
        self._config = given
        if arguments["device"] is not None:
            checks.device(arguments["device"])
        twin = self._make_cpp("meta", dtype=arguments["dtype"])
        resolved = twin.options()
        self._config = {name: resolved[name] if value is None else value for name, value in given.items()}
        for name in self._config.keys() - self._no_attributes:
            setattr(self, name, self._config[name])
        return twin

    def _make_children(self, twin: Any, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Makes the children that the twin of `_configure` has, in its order, each initialised as its class does.

        A child that the class declares, as an annotation that allows None, and that the twin has not, is None. Children
        whose class is known only to C++ are left to the constructor.
        """
        for name, part in twin.named_children().items():
            if not hasattr(self, name) and (make := maker_of(part)):
                setattr(self, name, make(device=device, dtype=dtype))
        ours = (kind for kind in type(self).__mro__ if kind.__module__.startswith(__package__))
        for name, hint in chain.from_iterable(get_annotations(kind).items() for kind in ours):
            if hint.endswith("| None") and not hasattr(self, name):
                setattr(self, name, None)

    def _live_config(self) -> dict[str, Any]:
        """The twin's options with later changes: after `module.scale = 2` the twin's scale is 2 too."""
        return {name: self.__dict__.get(name, given) for name, given in self._config.items()}

    def _make_cpp(self, device: str | None, dtype: torch.dtype | None = None) -> Any:
        """The twin with its own parameters. On the device "meta" they take no memory."""
        return self._cpp_class(**self._live_config(), device=device, dtype=dtype)

    def cpp(self: HasTwin[Twin]) -> Twin:
        """The C++ module on this module's storage: it shares parameters and gradients, and runs without Python.

        Raises TypeError if a child was replaced by, or given, something that only Python can run. Call it again after
        parameters were replaced (``load_state_dict(assign=True)``, ``.to(dtype)``).
        """
        _refuse_foreign(self)
        return self._twin()

    def _twin(self) -> Any:
        """`cpp()` for a use that calls no forward: hooks do not matter."""
        return give_parameters(self._make_cpp("meta"), dict(self.named_parameters(remove_duplicate=False))).train(
            self.training
        )

    @classmethod
    def from_cpp(cls, twin: Any) -> Self:
        """The Python module of a C++ module: the inverse of `cpp()`. It shares parameters and gradients with the twin.

        Each module is in training or evaluation mode as its twin is. Raises TypeError if `twin` is no module of
        attnpack.cpp, or that of another class; `NativeModule.from_cpp` itself takes the twin of any class.
        """
        module = cls._shell(twin)
        for name, tensor in twin.named_parameters():
            owner, _, leaf = name.rpartition(".")
            if is_stored(tensor):
                replace_by_stored(module, owner, tensor)
                continue
            if type(tensor) is Tensor:
                tensor.__class__ = nn.Parameter  # the same tensor for both languages: nn.Parameter(tensor) is another
            setattr(module.get_submodule(owner), leaf, tensor)
        for name, part in twin.named_modules().items():
            module.get_submodule(name).training = part.training
        return module

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        assigned = bool(local_metadata.get("assign_to_params_buffers"))
        _make_place_for_stored(self, state_dict, prefix, assigned)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    @classmethod
    def _shell(cls, twin: Any) -> Self:
        """The module of a twin on the device "meta", without its parameters."""
        kind = cls if getattr(cls, "_cpp_class", None) is type(twin) else _BY_TWIN.get(type(twin))
        if kind is None or not issubclass(kind, cls):
            twin_name = f"an attnpack.cpp.{cls._cpp_class.__name__}" if hasattr(cls, "_cpp_class") else ""
            wanted = twin_name or "a module of attnpack.cpp that has a class in Python"
            raise wrong_kind("twin", twin, f"{wanted}: .cpp() of a Python module gives one")
        return kind(**kind._arguments(twin), device="meta")

    @classmethod
    def _arguments(cls, twin: Any) -> dict[str, Any]:
        """The arguments of the constructor that give a module like the twin."""

        def ours(value: Any) -> Any:
            if type(value) in _BY_TWIN:
                return NativeModule._shell(value)
            return tuple(value) if isinstance(value, list) else value

        return {name: ours(value) for name, value in twin.options().items() if name not in cls._not_of_twin}


def stored_like(layer: nn.Module, blocks: Tensor, dtype: torch.dtype | None) -> nn.Module:
    """The layer of stored weights that takes the place of a linear layer or an embedding. dtype: of an embedding's
    rows."""
    if isinstance(layer, nn.Embedding | StoredEmbedding):
        made: nn.Module = StoredEmbedding.from_blocks(blocks, dtype)
    else:
        made = StoredLinear.from_blocks(blocks, layer.bias)
    return made.train(layer.training)


def dtype_of_numbers(tensors: Iterable[object]) -> torch.dtype | None:
    """The dtype of the first tensor of numbers."""
    return next((x.dtype for x in tensors if isinstance(x, Tensor) and x.is_floating_point()), None)


def replace_by_stored(module: nn.Module, name: str, blocks: Tensor, dtype: torch.dtype | None = None) -> None:
    """Puts a layer of stored weights in the place of the linear layer or the embedding `name`. dtype: of an embedding's
    rows [that of the module's numbers]."""
    parent, _, leaf = name.rpartition(".")
    made = stored_like(module.get_submodule(name), blocks, dtype or dtype_of_numbers(module.parameters()))
    setattr(module.get_submodule(parent), leaf, made)


def _make_place_for_stored(module: nn.Module, state: dict[str, Any], prefix: str, assigned: bool) -> None:
    """Puts layers of stored weights where a state dict has a stored weight for a layer of numbers, and freezes the
    module. Raises if the state dict is not assigned but copied."""
    found = {
        name.removeprefix(prefix).removesuffix(".weight"): tensor
        for name, tensor in state.items()
        if name.startswith(prefix) and name.endswith(".weight") and isinstance(tensor, Tensor) and is_stored(tensor)
    }
    for name in storable_layers(module) if found else ():
        blocks, shape = found.get(name), module.get_submodule(name).weight.shape
        if blocks is None or (blocks.shape[0], inputs_of(blocks)) != tuple(shape):
            continue
        if not assigned:
            raise ValueError(
                f"attnpack: state dict: {prefix}{name}.weight is stored in 8 or 4 bits, and the layer has numbers: "
                "pass assign=True to load_state_dict, which then makes it a layer of stored weights"
            )
        module.requires_grad_(False)  # the numbers are assigned as those that they replace are
        replace_by_stored(module, name, blocks, dtype_of_numbers(state.values()))


def dropped(x: Tensor, module: nn.Module) -> Tensor:
    """x after the module's `dropout`, which acts in training."""
    return F.dropout(x, module.dropout) if module.dropout and module.training else x


_BY_TWIN: dict[type, type[NativeModule]] = {}

# Torch's layers by their twin; they take its options as arguments.
_TORCH_LAYERS: dict[type, Callable[..., nn.Module]] = {
    cpp.Linear: nn.Linear,
    cpp.LayerNorm: lambda dim, **settings: nn.LayerNorm(dim, **settings),
    cpp.ShortConvolution: lambda channels, kernel_size, **settings: nn.Conv1d(
        channels, channels, kernel_size, groups=channels, padding=kernel_size - 1, **settings
    ),
}


def maker_of(twin: Any) -> Callable[..., nn.Module] | None:
    """A function of device and dtype that makes a layer like the twin; None if Python has no class for it."""
    if type(twin) in _TORCH_LAYERS:
        return partial(_TORCH_LAYERS[type(twin)], **twin.options())
    kind = _BY_TWIN.get(type(twin))
    return partial(kind, **kind._arguments(twin)) if kind else None


def give_parameters(twin: Any, parameters: Mapping[str, Tensor], strict: bool = True) -> Any:
    """Puts the parameters into a twin that has none yet, and returns it. A parameter that is frozen is frozen there."""
    for name, blank in twin.named_parameters():
        if name in parameters and not parameters[name].requires_grad:
            blank.requires_grad_(False)
    twin.assign_state_dict(parameters, strict)
    return twin


def refuse_global_hooks() -> None:
    """Raises TypeError for hooks of all modules, and for modes that see each function of torch: C++ runs neither."""
    if linear_layers.is_seen_by_mode():
        raise TypeError(
            "attnpack: a TorchFunctionMode is active, which would not see what C++ computes. Leave it, or call the "
            "Python module"
        )
    if _has_any_global_hook():
        raise TypeError(
            "attnpack: torch has hooks for all modules (such as register_module_forward_hook), which C++ would not "
            "run. Remove them, or call the Python module"
        )


def _owner_of_forward(kind: type) -> type:
    return next(base for base in kind.__mro__ if "forward" in vars(base))


def _has_own_forward(kind: type) -> bool:
    """Whether nobody has put another forward in the place of the class's: functools.wraps copies names, not code."""
    owner = _owner_of_forward(kind)
    return linear_layers.is_code_of(owner.forward, owner)


def _refuse_foreign(module: nn.Module) -> None:
    refuse_global_hooks()
    for name, child in module.named_modules():
        where = f"{type(module).__name__}.{name}" if name else type(module).__name__
        kind = type(child)
        ours = isinstance(child, NativeModule) and _owner_of_forward(kind).__module__.startswith("attnpack.")
        if kind not in _PLAIN and not ours:
            raise TypeError(
                f"attnpack: {where} is a {type(child).__name__}, which C++ cannot run: it knows plain nn.Linear, "
                "nn.Embedding, nn.LayerNorm and attnpack's own modules. Merge or unwrap it, or call the Python module"
            )
        if not _has_own_forward(kind):
            raise TypeError(
                f"attnpack: {where} is a {kind.__name__} whose class was given another forward, which C++ would not "
                "run. Restore it, or call the Python module"
            )
        weight = getattr(child, "weight", None)
        if hasattr(weight, "__tensor_flatten__") and not hasattr(weight, "placements"):  # which DTensors have
            raise TypeError(
                f"attnpack: {where} has a weight of the class {type(weight).__name__}, which C++ cannot multiply. Call "
                "the Python module, or take attnpack.convert.quantize_ for weights of 8 or 4 bits"
            )
        if getattr(child, "max_norm", None) is not None:
            raise TypeError(
                f"attnpack: {where} has max_norm, which C++ does not know. Leave it out, or call the Python module"
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
