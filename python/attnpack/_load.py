"""Loads the native code, attnpack._C, or says in one sentence why it cannot.

A wheel has native code for one or several releases of torch, each in a folder `torch-X.Y`; a build in place has it in
the package itself. `build.json` there records the torch and the Python of the build. So a mismatch is found before the
loader meets an undefined symbol.
"""

import ctypes
import importlib
import importlib.util
import json
import os
import platform
import sys
import warnings
from pathlib import Path
from types import ModuleType

try:
    import torch

    torch.__version__  # noqa: B018 (an empty folder that an uninstall left is no torch)
except (ModuleNotFoundError, AttributeError) as error:
    if error.name not in ("torch", "__version__"):
        raise
    torch = None  # load() says so


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


PACKAGE = Path(__file__).parent
IN_WHEEL = sorted(folder.name.removeprefix("torch-") for folder in PACKAGE.glob("torch-*"))
"""The releases of torch, such as "2.13", that a wheel has native code for."""
_RUNNING = _minor(torch.__version__) if torch else ""
PREFIX = PACKAGE / f"torch-{_RUNNING}" if _RUNNING in IN_WHEEL else PACKAGE
"""The folder of the native code, its headers and its CMake package."""
_SUFFIX = "dylib" if sys.platform == "darwin" else "so"
LIBRARY = PREFIX / "lib" / f"libattnpack.{_SUFFIX}"
KERNELS_LIBRARY = PACKAGE / "lib" / f"libattnpack_kernels.{_SUFFIX}"
"""The CPU kernels, which the folders of all releases share."""
_CUDA = torch.version.cuda.partition(".")[0] if torch and torch.version.cuda else ""
CUDA_PACKAGE = f"attnpack_cu{_CUDA}" if _CUDA else ""
"""The package that a wheel apart has for this torch's CUDA: attnpack-cu13 for CUDA 13."""


def _find_cuda_library() -> Path:
    """Beside libattnpack in a build with CUDA, else in the package of a wheel apart."""
    beside = PREFIX / "lib" / "libattnpack_cuda.so"
    apart = importlib.util.find_spec(CUDA_PACKAGE) if CUDA_PACKAGE and not beside.exists() else None
    # A folder without __init__.py is no wheel: it has no origin.
    return Path(apart.origin).parent / "lib" / beside.name if apart and apart.origin else beside


CUDA_LIBRARY = _find_cuda_library()
_AGAIN = (
    "install the wheel again: `pip install --force-reinstall --no-deps` and its file"
    if IN_WHEEL
    else "build it again: run `pip install .` in attnpack's source folder"
)
_RECORDED = {"version", "torch", "pybind11", "python", "compiler", "build_type", "instruction_sets"}


def build_record() -> dict[str, str]:
    """The settings of the build, by the names in _RECORDED."""
    file = PREFIX / "share" / "attnpack" / "build.json"
    try:
        record = json.loads(file.read_text())
        if not (isinstance(record, dict) and all(isinstance(record.get(name), str) for name in _RECORDED)):
            raise ValueError
        return record
    except FileNotFoundError:
        if IN_WHEEL:
            raise ImportError(f"attnpack's record of the build, {file}, is missing: {_AGAIN}") from None
        raise ImportError(
            f"attnpack's native code is not built in {PACKAGE}: run `pip install .`, or `pip install -e .` to work on "
            "it, in attnpack's source folder"
        ) from None
    except (ValueError, OSError, RecursionError):  # ValueError: of json, too
        raise ImportError(f"attnpack's record of the build, {file}, is damaged: {_AGAIN}") from None


def loaded_copies(name: str = LIBRARY.name) -> list[str]:
    """Paths of every file of that name mapped into this process."""
    return sorted({path for path in _mapped_files() if path.endswith(f"/{name}")})


def _mapped_files() -> list[str]:
    if sys.platform == "darwin":
        dyld = ctypes.CDLL(None)
        dyld._dyld_get_image_name.restype = ctypes.c_char_p
        return [os.fsdecode(dyld._dyld_get_image_name(i)) for i in range(dyld._dyld_image_count())]
    return [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]


def load() -> ModuleType:
    """Returns the module attnpack._C.

    Raises ImportError if torch or the build is missing, if the build is for another Python or torch, or if another copy
    of attnpack is loaded already.
    """
    if torch is None:
        release = f"'torch=={IN_WHEEL[-1]}.*'" if IN_WHEEL else "torch"
        raise ImportError(f"attnpack needs torch >= 2.11, which is not installed: run `pip install {release}`")
    if IN_WHEEL and PREFIX == PACKAGE:
        raise ImportError(
            f"this wheel of attnpack has native code for torch {' and '.join(IN_WHEEL)}, but this is torch "
            f"{torch.__version__}: run `pip install 'torch=={IN_WHEEL[-1]}.*'`, or `pip install .` in attnpack's "
            "source folder"
        )
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
    if PREFIX != PACKAGE:
        sys.modules[__package__].__path__.append(str(PREFIX))
    try:
        native = importlib.import_module("attnpack._C")
        load_cuda()
        return native
    except ImportError as error:
        reason = "" if "undefined symbol" in str(error) else f" ({error})"
        fault = f"does not fit torch {torch.__version__}" if not reason else "cannot be loaded"
        raise ImportError(f"attnpack's native code {fault}{reason}: {_AGAIN}") from None


def load_cuda() -> bool:
    """Loads the CUDA kernels if they are built and torch has CUDA. Without them CUDA tensors run through ATen."""
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
    if torch.version.cuda is None:
        return "this torch has no CUDA"
    lacks = (
        f"not in this wheel, but in {CUDA_PACKAGE.replace('_', '-')}, which `bash scripts/wheel.sh --cuda` makes with "
        f"the nvcc of CUDA {_CUDA}"
    )
    built = "did not load" if CUDA_LIBRARY.exists() else lacks if IN_WHEEL else "not built"
    return f"{built}; CUDA tensors run through ATen"
