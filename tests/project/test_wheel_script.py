"""scripts/wheel.sh makes one wheel for the torch in use and for those that scripts/matrix.sh has brought, asked by the
build backend, as cibuildwheel does. pip installs it into a fresh environment with each, away from the sources. There
run the operator's grid, a notebook, and a program in C++. ATTNPACK_TEST_WHEEL names a wheel to test instead of a new
one."""

import os
import shutil
import sys
import sysconfig
import time
import venv
import zipfile
from email import message_from_bytes
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from processes import ROOT, run_program

HERE = Path(sysconfig.get_path("purelib"))
GRID = ("tests/ops/test_attention.py", "tests/ops/test_attention_backward.py", "tests/ops/test_linear_attention.py")
NOTEBOOK = "notebooks/grouped_query_attention.py"


def release_in(site: Path) -> str:
    return next(distributions(name="torch", path=[str(site)])).version.partition("+")[0]


def torches() -> dict[str, Path]:
    """{release: the folder of packages that has it}: the one in use, and others that a wheel which is ready is for."""
    others = sorted((ROOT / "build/matrix").glob("torch-*/lib/python*/site-packages"))
    found = {release_in(site): site for site in (*others, HERE)}
    if ready := os.environ.get("ATTNPACK_TEST_WHEEL"):
        inside = {name.split("/")[1] for name in zipfile.ZipFile(ready).namelist() if "/torch-" in name}
        found = {release: site for release, site in found.items() if f"torch-{release.rpartition('.')[0]}" in inside}
    return found


TORCHES = torches()

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    if ready := os.environ.get("ATTNPACK_TEST_WHEEL"):
        return Path(ready).resolve()
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    made = run_program(*pip, timeout=3500, env={"ATTNPACK_WHEEL_TORCHES": " ".join(TORCHES)})
    assert made.returncode == 0, made.text
    (wheel,) = folder.glob("attnpack-*.whl")
    return wheel


def test_its_name_says_on_which_linux_it_loads(wheel):
    assert "manylinux_2_28" in wheel.name or "manylinux_2_34" in wheel.name
    assert zipfile.ZipFile(wheel).testzip() is None


def test_it_asks_for_torch_and_no_more(wheel):
    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    asked = message_from_bytes(zipfile.ZipFile(wheel).read(metadata)).get_all("Requires-Dist")
    (torch_range,) = (Requirement(each) for each in asked if "extra ==" not in each)
    assert torch_range.name == "torch" and all(torch_range.specifier.contains(release) for release in TORCHES)


def test_it_becomes_an_archive_for_c_and_cpp(wheel, tmp_path):
    made = run_program(sys.executable, ROOT / "scripts/wheel_parts.py", "archive", tmp_path, wheel)
    assert made.returncode == 0, made.text
    shutil.unpack_archive(made.stdout.strip(), tmp_path)
    assert list(tmp_path.glob("attnpack/torch-*/lib/libattnpack.so")) and not list(tmp_path.rglob("*.py"))


@pytest.fixture(scope="module", params=TORCHES)
def environment(request, wheel, tmp_path_factory) -> Path:
    """A folder with a fresh environment, venv, which has that torch and the wheel, and with copies of the tests, of the
    notebooks and of an example."""
    folder = tmp_path_factory.mktemp(f"torch-{request.param}")
    venv.create(folder / "venv", with_pip=False)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    for there in (TORCHES[request.param], HERE):  # links, because torch has gigabytes
        for entry in there.iterdir():
            ours, of_torch = "attnpack" in entry.name, entry.name.startswith(("torch", "functorch", "nvidia"))
            if not (ours or (site / entry.name).exists() or (of_torch and there != TORCHES[request.param])):
                (site / entry.name).symlink_to(entry)
    python = folder / "venv/bin/python"
    begin = time.perf_counter()
    # Without dependencies: pip would write another torch through the links.
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--no-cache-dir")
    installed = run_program(*pip, wheel, env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    assert installed.returncode == 0, installed.text
    print(f"pip installed {wheel.name} beside torch {request.param} in {time.perf_counter() - begin:.1f} s")
    for part in ("tests", "notebooks", "examples/cpp/hello_attention"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.ipynb"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run_there(folder: Path, program: str, *arguments):
    """A program of the environment, in the folder. Nothing leads back to the sources."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return run_program(folder / "venv/bin" / program, *arguments, cwd=folder, env=variables, timeout=1200)


def test_it_is_the_installed_one_that_loads(environment):
    code = "import attnpack, torch; print(attnpack._load.PREFIX, attnpack._C.__file__, torch.__version__)"
    ran = run_there(environment, "python", "-c", code)
    assert ran.returncode == 0, ran.text
    prefix, native, release = ran.stdout.split()
    (site,) = environment.glob("venv/lib/python*/site-packages")
    minor = ".".join(release.split(".")[:2])
    assert Path(prefix) == site / "attnpack" / f"torch-{minor}" and Path(native).parent == Path(prefix)
    assert environment.name.startswith(f"torch-{release.partition('+')[0]}")


def test_the_grid_of_the_operator_passes_there(environment):
    ran = run_there(environment, "python", "-m", "pytest", "-q", "-m", "not long", "-p", "no:cacheprovider", *GRID)
    assert ran.returncode == 0, ran.text[-3000:]
    print(ran.stdout.splitlines()[-1])


def test_a_notebook_runs_there(environment):
    code = f"""
import jupytext, sys
from nbclient import NotebookClient
notebook = jupytext.read("{NOTEBOOK}")
there = {{"metadata": {{"path": "notebooks"}}}}
NotebookClient(notebook, kernel_name="python3", timeout=500, resources=there).execute()
print(sum(cell.cell_type == "code" for cell in notebook.cells), "cells")
"""
    ran = run_there(environment, "python", "-c", code)
    assert ran.returncode == 0 and int(ran.stdout.split()[0]) > 5, ran.text[-3000:]


def test_a_program_in_cpp_finds_it(environment):
    asked = run_there(environment, "attnpack", "info", "--cmake-prefix")
    assert asked.returncode == 0, asked.text
    build = environment / "build"
    arguments = ("-S", environment / "examples/cpp/hello_attention", f"-DCMAKE_PREFIX_PATH={asked.stdout.strip()}")
    for command in (("cmake", "-B", build, *arguments), ("cmake", "--build", build), (build / "hello_attention",)):
        ran = run_program(*command, cwd=environment)
        assert ran.returncode == 0, ran.text
    assert "[1, 10, 512]" in ran.stdout


def test_one_of_the_torches_is_in_use():
    assert torch.__version__.partition("+")[0] in TORCHES
