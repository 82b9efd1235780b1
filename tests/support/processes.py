"""Helpers for tests that start other programs."""

import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
TORCH_DIR = Path(torch.__file__).parent


def run_program(*command, timeout: float = 600, **options) -> subprocess.CompletedProcess:
    """The finished process, with `.text`: both streams, with spaces for line breaks, which CMake puts into messages."""
    return with_text(subprocess.run([*map(str, command)], text=True, capture_output=True, timeout=timeout, **options))


def add_program(folder: Path, name: str, body: str) -> Path:
    """A program of Bash in the folder, which stands in for another one."""
    program = folder / name
    program.write_text(f"#!/bin/bash\n{body}\n")
    program.chmod(0o755)
    return program


def with_text(process: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    process.text = re.sub(r"\s+", " ", process.stdout + process.stderr)
    return process


class WarmPython:
    """warm_python.py, which is started when the first code comes."""

    def __init__(self) -> None:
        self._server: subprocess.Popen | None = None

    def run(
        self, code: str, argv: list[str], environment: dict[str, str], timeout: float
    ) -> subprocess.CompletedProcess:
        if self._server is None:
            command = [sys.executable, Path(__file__).with_name("warm_python.py")]
            alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            pipe = subprocess.PIPE
            self._server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=alone)
        with tempfile.NamedTemporaryFile("r") as stdout, tempfile.NamedTemporaryFile("r") as stderr:
            request = {"code": code, "argv": argv, "environment": environment}
            line = json.dumps(request | {"stdout": stdout.name, "stderr": stderr.name})
            print(line, file=self._server.stdin, flush=True)
            if not select.select([self._server.stdout], [], [], timeout)[0]:
                self._server.kill()
                self._server = None
                raise subprocess.TimeoutExpired(argv, timeout)
            status = int(self._server.stdout.readline())
            return subprocess.CompletedProcess(argv, status, stdout.read(), stderr.read())


_warm = WarmPython()
_MAIN = """
import runpy, sys
sys.orig_argv[1:] = ["-m", "attnpack", *sys.argv[1:]]
runpy.run_module("attnpack", run_name="__main__", alter_sys=True)
"""


def run_python(
    code: str, first: Path | None = None, argv: Sequence[Any] = ("-c",), timeout: float = 600, **variables: str
) -> subprocess.CompletedProcess:
    """`code` in a process of its own, outside the repository, with the attnpack of folder `first`, or the one in use,
    and with environment variables. The process is a fork of one that has torch, unless torch may read a variable."""
    import attnpack  # here, because style is tested before the build

    environment = os.environ | {"PYTHONPATH": str(first or Path(attnpack.__file__).parents[1])} | variables
    if not all(name.startswith("ATTNPACK_") for name in variables):
        return run_program(sys.executable, "-c", code, *argv[1:], timeout=timeout, env=environment, cwd="/")
    return with_text(_warm.run(code, [*map(str, argv)], environment, timeout))


def run_attnpack(*arguments: Any, first: Path | None = None, **variables: str) -> subprocess.CompletedProcess:
    """The command `attnpack`, as `python -m attnpack` starts it."""
    return run_python(_MAIN, first, ("-m", *arguments), **variables)


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
