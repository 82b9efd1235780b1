"""Helpers for tests that start other programs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TORCH_DIR = Path(torch.__file__).parent


def run_program(*command, timeout: float = 600, **options) -> subprocess.CompletedProcess:
    """The finished process, with `.text`: both streams, with spaces for line breaks, which CMake puts into messages."""
    process = subprocess.run(list(map(str, command)), text=True, capture_output=True, timeout=timeout, **options)
    process.text = re.sub(r"\s+", " ", process.stdout + process.stderr)
    return process


def run_python(code: str, first: Path | None = None, **variables: str) -> subprocess.CompletedProcess:
    """`code` in a new interpreter, outside the repository, with the attnpack of folder `first`, or the one in use, and
    with environment variables."""
    import attnpack  # here, because style is tested before the build

    environment = os.environ | {"PYTHONPATH": str(first or Path(attnpack.__file__).parents[1])} | variables
    return run_program(sys.executable, "-c", code, env=environment, cwd="/")


def needs(program: str) -> pytest.MarkDecorator:
    """Skips a test where the program is not installed."""
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


def fake_torch(folder: Path, version: str) -> Path:
    """The files of a torch of that version that CMake reads."""
    header = folder / "include/torch/headeronly/version.h"
    header.parent.mkdir(parents=True)
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    header.write_text("".join(f"#define TORCH_VERSION_{name} {number}\n" for name, number in numbers))
    (folder / "lib").mkdir()
    for name in ("torch", "torch_cpu", "c10"):
        (folder / f"lib/lib{name}.so").touch()
    return folder


def without_python(folder: Path) -> dict[str, str]:
    """An environment whose PATH holds every program that ours has, but no Python; `folder` is filled with links."""
    folder.mkdir()
    for directory in map(Path, os.environ["PATH"].split(os.pathsep)):
        for program in directory.iterdir() if directory.is_dir() else ():
            if "python" not in program.name and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    environment = {"PATH": str(folder)}
    assert run_program("sh", "-c", "command -v python3 || command -v python", env=environment).returncode != 0
    return environment
