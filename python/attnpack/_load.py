"""Loads the native code, attnpack._C, or says in one sentence why it cannot.

`build.json` in the package records the torch and the Python of the build. So a mismatch is found before the loader
meets an undefined symbol.
"""

import ctypes
import importlib
import json
import os
import platform
import warnings
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).parent
LIBRARY = PACKAGE / "lib" / "libattnpack.so"
CUDA_LIBRARY = PACKAGE / "lib" / "libattnpack_cuda.so"
_AGAIN = "build it again: run `pip install .` in attnpack's source folder"


def build_record() -> dict[str, str]:
    """The settings of the build: version, torch, pybind11, python, compiler, build_type, instruction_sets."""
    try:
        return json.loads((PACKAGE / "share" / "attnpack" / "build.json").read_text())
    except FileNotFoundError:
        raise ImportError(
            f"attnpack's native code is not built in {PACKAGE}: run `pip install .`, or `pip install -e .` to work on "
            "it, in attnpack's source folder"
        ) from None


def loaded_copies(name: str = LIBRARY.name) -> list[str]:
    """Paths of every file of that name mapped into this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split(maxsplit=5)[-1] for line in lines if line.endswith(f"/{name}")})


def load() -> ModuleType:
    """Returns the module attnpack._C.

    Raises ImportError if torch or the build is missing, if the build is for another Python or torch, or if another copy
    of attnpack is loaded already.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError("attnpack needs torch >= 2.11, which is not installed: run `pip install torch`") from None
    build = build_record()
    for name, here in (("torch", torch.__version__), ("python", platform.python_version())):
        wanted = _minor(build[name])
        if _minor(here) != wanted:
            raise ImportError(f"attnpack was built for {name} {wanted}, but this is {name} {here}: {_AGAIN}")
    for path in loaded_copies():
        if not (LIBRARY.exists() and os.path.samefile(path, LIBRARY)):
            raise ImportError(
                f"another copy of attnpack is loaded already, {path}, and operators can be registered only once: load "
                f"{LIBRARY} instead, or nothing before `import attnpack`"
            )
    try:
        native = importlib.import_module("attnpack._C")
        load_cuda()
        return native
    except ImportError as error:
        reason = "" if "undefined symbol" in str(error) else f" ({error})"
        raise ImportError(f"attnpack's native code does not fit torch {torch.__version__}{reason}: {_AGAIN}") from None


def load_cuda() -> bool:
    """Loads the CUDA kernels if they are built and torch has CUDA. Without them CUDA tensors run through ATen."""
    import torch

    if torch.version.cuda is None or not CUDA_LIBRARY.exists():
        return False
    try:
        ctypes.CDLL(str(CUDA_LIBRARY))
    except OSError as error:  # not fatal: CUDA tensors run without it, only slower
        warnings.warn(f"attnpack's CUDA kernels do not load and CUDA tensors run through ATen: {error}", stacklevel=2)
        return False
    return True


def why_no_cuda() -> str:
    """The reason why `load_cuda` loads nothing."""
    import torch

    if torch.version.cuda is None:
        return "this torch has no CUDA"
    built = "did not load" if CUDA_LIBRARY.exists() else "not built"
    return f"{built}; CUDA tensors run through ATen"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
