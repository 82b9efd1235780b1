"""Runs functions of torch on attnpack's operator, so that programs need no change::

    attnpack.backend.enable("sdpa")     # from now on, for every F.scaled_dot_product_attention
    attnpack.backend.enable("linear")   # for every F.linear, so every nn.Linear, on the CPU
    with attnpack.backend.sdpa(): ...   # in a block
    attnpack.backend.report()           # the calls that ran on the operators, and those that torch ran

Importing attnpack replaces nothing.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import _C, _load
from ..errors import wrong_kind
from . import flops, varlen

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_TRACERS = {
    "torch._subclasses.fake_tensor": "FakeTensor",
    "torch._subclasses.functional_tensor": "FunctionalTensor",
}
# In the keys of compiled graphs on disk. Graphs hold the strides that the operators of one version give.
_VERSION_TAG = f"attnpack {_load.build_record()['version']};"
_TAG = "attnpack {};"


class Replacement:
    """One function of torch that runs on the operator until `disable` is called. Dropping the object changes nothing.

    Replacements of the same function may be nested: torch's own comes back when each of them is disabled.
    """

    def __init__(self, name: str, native: Any) -> None:
        self.name = name
        self._native = native

    @property
    def enabled(self) -> bool:
        """Whether `disable` was not called yet."""
        return self._native.enabled

    def disable(self) -> None:
        """Undoes this replacement. A second call does nothing."""
        self._native.disable()

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, *_: object) -> None:
        self.disable()

    remove = disable  # as torch's registry of flash attention calls it

    def __repr__(self) -> str:
        return f"<attnpack.backend.Replacement of {self.name}: {'enabled' if self.enabled else 'disabled'}>"


def enable(name: str) -> Replacement:
    """Replaces a function of torch by the operator, in the whole process: for Python, C++ and compiled graphs.

    Args:
        name: "sdpa" for `torch.nn.functional.scaled_dot_product_attention`. Its meaning, its gradients and its errors
            stay those of torch. A call that the operator does not take is passed on to torch (see `report`). On CUDA,
            so are plain calls in 16 bits where a table says that torch's kernel is faster; `ATTNPACK_CUDA=own` in the
            environment keeps them.
            `nn.MultiheadAttention` and `nn.TransformerEncoder` in eval mode call a function of their own, which is
            replaced too. There are two differences: an excluded key that holds NaN has no influence, and in these
            modules a row without keys attends nothing, where torch gives NaN.
            "linear" for `torch.nn.functional.linear` on the CPU: the faster of the kernels that this torch has, and our
            own for few rows (`attnpack.ops.linear`). Its results have torch's tolerance, not its bits. Models whose
            layers call another function, such as GPT-2's `torch.addmm`, gain nothing.
            Dispatch modes see `attnpack.linear` in place of `aten.addmm` and `aten.mm`.
            "varlen" gives `torch.nn.attention.varlen.varlen_attn` a CPU, where torch has none, forward and backward
            (`attention_varlen`).

    Returns:
        An object whose `disable()` undoes it, as does the end of a `with` block that holds it.

    Raises:
        ValueError: no function of that name can be replaced. RuntimeError: this torch has no varlen_attn.

    Compiled graphs are never reused across a change: `torch.compile` compiles anew, and graphs on disk are kept apart.
    """
    if not isinstance(name, str):
        raise wrong_kind("name", name, _names())
    if name not in _FUNCTIONS:
        raise ValueError(f"attnpack: name is {name!r}, wants {_names()}")
    return Replacement(name, _FUNCTIONS[name]())


@contextlib.contextmanager
def sdpa() -> Iterator[Replacement]:
    """`enable("sdpa")` for a block or, as a decorator, for a function."""
    replacement = enable("sdpa")
    try:
        yield replacement
    finally:
        replacement.disable()


def report() -> dict[str, dict[str, Any]]:
    """The calls of each function since the process began or `reset_report` was called.

    Returns:
        A dict with one for each function. {"enabled": whether it is replaced now, "taken": calls that ran on the
        operator, "passed_on": {reason: calls that torch ran}}. A compiled graph counts when it is traced, not when it
        runs. "varlen" has no numbers: torch has no kernels of its own for such calls on the CPU.
        "cuda": {"kernels": which kernels plain 16-bit calls of the operator run on CUDA (`ATTNPACK_CUDA` chooses),
        "ran_torch": {kernel of torch: calls that it ran}}.
    """
    return {
        "sdpa": {"enabled": _C.backend.sdpa_enabled(), **_C.backend.sdpa_report()},
        "linear": {"enabled": _C.backend.linear_enabled(), **_C.backend.linear_report()},
        "varlen": {"enabled": varlen.is_enabled()},
        "cuda": {"kernels": _C.backend.cuda_choice(), "ran_torch": _C.backend.torch_kernel_report()},
    }


def reset_report() -> None:
    """Sets the numbers of `report` to 0."""
    _C.backend.reset_sdpa_report()
    _C.backend.reset_linear_report()
    _C.backend.reset_torch_kernel_report()


_FUNCTIONS: dict[str, Callable[[], Any]] = {
    "sdpa": _C.backend.enable_sdpa,
    "linear": _C.backend.enable_linear,
    "varlen": varlen.Registration,
}


def _names() -> str:
    *names, last = (f'"{name}"' for name in _FUNCTIONS)
    return f"{', '.join(names)} or {last}"


def _on_change(name: str, op: Any, enabled: bool) -> None:
    """Called by C++ after the first replacement of a function and after the last one is undone."""
    config, tag = torch.compiler.config, _TAG.format(name)
    if enabled:
        config.cache_key_tag += tag
    else:
        config.cache_key_tag = config.cache_key_tag.replace(tag, "", 1)
    # While torch traces, it keeps the kernels that it found for each op. Dynamo has no guard for this state. The
    # tag separates graphs on disk.
    op._dispatch_cache.clear()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _takes(*tensors: Tensor | None) -> bool:
    """Whether the operators may take these tensors, some of which are no plain ones. A tracer's are welcome. Exported
    graphs stay portable, and tensors of other classes bring their own rules for torch's function."""
    if torch.compiler.is_exporting():
        return False
    known = {getattr(sys.modules.get(module), name, Tensor) for module, name in _TRACERS.items()}
    return all(tensor is None or type(tensor) in _PLAIN or type(tensor) in known for tensor in tensors)


def _register_flash_name() -> None:
    """Makes "attnpack" known to `torch.nn.attention.activate_flash_attention_impl`, where torch has it."""
    registry = sys.modules.get("torch.nn.attention")
    if hasattr(registry, "register_flash_attention_impl"):
        registry.register_flash_attention_impl("attnpack", register_fn=lambda: enable("sdpa"))


torch.compiler.config.cache_key_tag += _VERSION_TAG
_C.backend.set_takes_hook(_takes)
_C.backend.set_sdpa_hook(functools.partial(_on_change, "sdpa", torch.ops.aten.scaled_dot_product_attention.default))
_C.backend.set_linear_hook(functools.partial(_on_change, "linear", torch.ops.aten.linear.default))
_register_flash_name()
flops.register()
