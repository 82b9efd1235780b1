"""Functions whose plain eager calls run in C++ from their first argument on, past the function of Python.

The function says what a call means: compilers trace it, and it takes the calls that are not plain (nested tensors,
those of a tracer, arguments that do not fit). To enter it would take a sixth of the time of a small call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from .. import _C

Function = TypeVar("Function")


def fast_path(name: str) -> Callable[[Function], Function]:
    """A decorator: plain calls of the function go to `add_fast_path`'s of that name in csrc/bindings/."""
    return lambda function: functools.update_wrapper(_C.FastPathFunction(name, function), function)


def traced_call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
    return self.__wrapped__(*args, **kwargs)


_C.trace_fast_path_functions_by(traced_call)
