"""What is installed and loaded, and why not: `attnpack info`, to be pasted into bug reports."""

import argparse
import importlib.metadata
import json
import platform
from typing import Any

import torch

from ._load import _C, LIBRARY, PACKAGE, build_record

# optional package: the extra that brings it
_OPTIONAL = {
    "gguf": "gguf",
    "tokenizers": "tokenizers",
    "transformers": "hf",
    "safetensors": "hf",
    "matplotlib": "demo",
    "tqdm": "demo",
}


def collect() -> dict[str, Any]:
    """Versions, instruction set, threads, libraries and optional packages, as plain values that JSON can hold."""
    build = build_record()
    return {
        "attnpack": build["version"],
        "torch": {"running": torch.__version__, "built_for": build["torch"]},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "pybind11": build["pybind11"],
        "compiler": f"{build['compiler']}, {build['build_type']}",
        "instruction_set": {"chosen": _C.isa(), "built": build["instruction_sets"].split(";")},
        "threads": torch.get_num_threads(),
        "libraries": {
            "attnpack._C": {"loaded": True, "path": _C.__file__},
            "libattnpack.so": {"loaded": True, "path": str(LIBRARY)},
            "libattnpack_cuda.so": {"loaded": False, "why": "not built; CUDA tensors run through ATen"},
        },
        "optional": {name: _optional(name, extra) for name, extra in _OPTIONAL.items()},
        "cmake_prefix": str(PACKAGE),
    }


def main(args: argparse.Namespace) -> None:
    """Prints the CMake prefix alone (`--cmake-prefix`), JSON (`--json`) or lines to read."""
    if args.cmake_prefix:
        print(PACKAGE)
    elif args.json:
        print(json.dumps(collect(), indent=2))
    else:
        print("\n".join(_lines(collect())))


def _lines(info: dict[str, Any]) -> list[str]:
    isa = info["instruction_set"]
    rows = [
        ("attnpack", info["attnpack"]),
        ("torch", f"{info['torch']['running']}, built for {info['torch']['built_for']}"),
        ("python", f"{info['python']} on {info['platform']}"),
        ("pybind11", f"{info['pybind11']}, torch's bundled headers"),
        ("compiler", info["compiler"]),
        ("instruction set", f"{isa['chosen']}, of {', '.join(isa['built'])}"),
        ("threads", info["threads"]),
    ]
    for name, library in info["libraries"].items():
        rows.append((name, library["path"] if library["loaded"] else f"not loaded: {library['why']}"))
    rows += info["optional"].items()
    rows.append(("find_package", f"CMAKE_PREFIX_PATH={info['cmake_prefix']}"))
    return [f"{name:<20} {value}" for name, value in rows]


def _optional(name: str, extra: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"not installed: pip install 'attnpack[{extra}]'"
