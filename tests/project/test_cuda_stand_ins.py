"""scripts/cuda_stand_ins.py: a library whose neighbours are gone loads, and hears from them that there is no GPU."""

import ctypes
import os
import sys
from pathlib import Path

from processes import ROOT, run_program

COMPILER = os.environ.get("CC", "cc")


def build(folder: Path, name: str, source: str, *options: str | Path) -> None:
    (folder / "source.c").write_text(source)
    built = run_program(
        COMPILER, "-shared", "-fPIC", folder / "source.c", f"-Wl,-soname,{name}", "-o", folder / name, *options
    )
    assert built.returncode == 0, built.text


def test_a_library_loads_without_its_neighbours(tmp_path):
    """One neighbour gives its names a version, as most of NVIDIA's do, and one does not. Python's names stay free."""
    folder = tmp_path / "torch/lib"
    folder.mkdir(parents=True)
    (tmp_path / "versions").write_text("SOME_VERSION { with_version; };")
    build(
        folder, "libone.so.1", "int with_version(void) { return 1; }", f"-Wl,--version-script={tmp_path / 'versions'}"
    )
    build(folder, "libtwo.so.2", "int without(void) { return 2; }")
    source = """int with_version(void); int without(void); extern long Py_IsInitialized(void);
    int ask(void) { return with_version() + without(); } long python(void) { return Py_IsInitialized(); }"""
    build(folder, "libtorch.so", source, folder / "libone.so.1", folder / "libtwo.so.2", "-Wl,-rpath,$ORIGIN")
    for gone in ("libone.so.1", "libtwo.so.2"):
        (folder / gone).unlink()
    for _ in range(2):  # again is the same
        ran = run_program(sys.executable, ROOT / "scripts/cuda_stand_ins.py", tmp_path / "torch")
        assert ran.stdout == "stood in for: libone.so.1 libtwo.so.2\n", ran.text
    library = ctypes.CDLL(str(folder / "libtorch.so"))
    assert library.ask() == 200 and library.python() == 1
