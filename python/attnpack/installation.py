"""The parts that are installed and loaded, and why others are not: the table of `attnpack info`, for bug reports."""

import contextlib
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ._load import CUDA_LIBRARY, IN_WHEEL, KERNELS_LIBRARY, LIBRARY, PREFIX, build_record, loaded_copies, why_no_cuda
from .extras import TESTED, install_command

# optional package: the extra that installs it
_OPTIONAL = {
    "gguf": "gguf",
    "tokenizers": "tokenizers",
    "transformers": "hf",
    "safetensors": "hf",
    "matplotlib": "demo",
    "tqdm": "demo",
}


def collect_info(failure: str = "") -> dict[str, Any]:
    """Versions, instruction set, threads, libraries and optional packages, as plain values for JSON. `failure` is the
    reason if the native code could not be loaded."""
    import torch

    try:
        build = build_record()
    except ImportError:
        build = dict.fromkeys(("version", "torch", "pybind11", "compiler", "build_type"), "unknown")
        if IN_WHEEL:
            build["torch"] = " and ".join(IN_WHEEL)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            build["version"] = importlib.metadata.version("attnpack")
    return {
        "attnpack": build["version"],
        "torch": {"running": torch.__version__, "built_for": build["torch"]},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "pybind11": build["pybind11"],
        "compiler": f"{build['compiler']}, {build['build_type']}",
        "instruction_set": {
            "chosen": None if failure else _native().isa(),
            "built": build.get("instruction_sets", "none").split(";"),
        },
        "linear": None if failure else _native().linear_kernels(),
        "cuda": None if failure else _native().backend.cuda_choice(),
        "threads": torch.get_num_threads(),
        "cuda_devices": [] if failure else _cuda_devices(),
        "replaced": [] if failure else _replaced(),
        "libraries": {
            "attnpack._C": {"loaded": False, "why": failure} if failure else _loaded(_native().__file__),
            LIBRARY.name: _loaded_or(LIBRARY, failure),
            KERNELS_LIBRARY.name: _loaded_or(KERNELS_LIBRARY, failure),
            CUDA_LIBRARY.name: _loaded_or(CUDA_LIBRARY, why_no_cuda()),
        },
        "optional": {name: _optional(name, extra) for name, extra in _OPTIONAL.items()},
        "tested": {name: list(releases) for name, releases in TESTED.items()},
        "cmake_prefix": str(PREFIX) if (PREFIX / "share/cmake/attnpack").exists() else None,
    }


def print_info(info: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(info, indent=2) if as_json else "\n".join(_lines(info)))


def _native() -> ModuleType:
    from . import _C

    return _C


def _replaced() -> list[str]:
    """The functions of torch that run on the operator in this process (attnpack.backend)."""
    from .backend import report

    return [name for name, state in report().items() if state.get("enabled")]


def _cuda_devices() -> list[dict[str, Any]]:
    """The CUDA devices, and whether our kernels run there or a composition of ATen ops."""
    import torch

    return [
        {"name": torch.cuda.get_device_name(i), "kernels": _native().cuda_kernels_run(i)}
        for i in range(torch.cuda.device_count())
    ]


def _loaded(path: str) -> dict[str, Any]:
    return {"loaded": True, "path": path}


def _loaded_or(library: Path, why: str) -> dict[str, Any]:
    return _loaded(str(library)) if _is_mapped(library) else {"loaded": False, "why": why}


def _is_mapped(library: Path) -> bool:
    return library.exists() and any(os.path.samefile(path, library) for path in loaded_copies(library.name))


def _lines(info: dict[str, Any]) -> list[str]:
    isa = info["instruction_set"]
    rows = [
        ("attnpack", info["attnpack"]),
        ("torch", f"{info['torch']['running']}, built for {info['torch']['built_for']}"),
        ("python", f"{info['python']} on {info['platform']}"),
        ("pybind11", f"{info['pybind11']}, torch's bundled headers"),
        ("compiler", info["compiler"]),
        ("instruction set", f"{isa['chosen'] or 'none'}, of {', '.join(isa['built'])}"),
        ("linear layers", info["linear"] or "none"),
        ("cuda kernels", info["cuda"] or "none"),
        ("threads", info["threads"]),
        ("replaced", ", ".join(info["replaced"]) or "nothing of torch: attnpack.backend.enable() does it"),
    ]
    for i, device in enumerate(info["cuda_devices"]):
        here = "attnpack's kernels run" if device["kernels"] else "ATen runs: no kernel fits device and driver"
        rows.append((f"cuda:{i}", f"{device['name']}: {here}"))
    for name, library in info["libraries"].items():
        rows.append((name, library["path"] if library["loaded"] else f"not loaded: {library['why']}"))
    rows += info["optional"].items()
    rows.append(("tested with", "; ".join(f"{name} {', '.join(found)}" for name, found in info["tested"].items())))
    prefix = info["cmake_prefix"]
    rows.append(("find_package", f"CMAKE_PREFIX_PATH={prefix}" if prefix else "nothing is built for this torch"))
    return [f"{name:<20} {value}" for name, value in rows]


def _optional(name: str, extra: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"not installed: {install_command(extra)}"


def end_command(error: ImportError) -> None:
    """Ends the process if it is the command `attnpack`, and returns if it is not.

    The user sees a sentence instead of a traceback; `attnpack info` shows its table of what is loaded and why not, but
    for the path that CMake reads.
    """
    module = sys.argv[0] == "-m" and sys.orig_argv[1:3] == ["-m", "attnpack"]
    if not module and Path(sys.argv[0]).name != "attnpack":
        return
    if sys.argv[1:2] == ["info"] and "--cmake-prefix" not in sys.argv and "torch" in sys.modules:
        print_info(collect_info(str(error)), as_json="--json" in sys.argv)
    else:
        print(f"attnpack: {error}", file=sys.stderr)
    raise SystemExit(2)
