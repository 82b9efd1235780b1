"""Loading the native code: one copy, one OpenMP, in any order, and an error in one sentence if it does not fit."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from attnpack._load import KERNELS_LIBRARY, LIBRARY, PACKAGE, build_record
from processes import ROOT, run_attnpack, run_program, run_python

BUILD = Path(os.environ.get("ATTNPACK_BUILD_DIR", ROOT / "build"))
ATTEND = "q = torch.ones(1, 2, 300, 64); torch.ops.attnpack.null(q); attnpack.attention(q, q, q)"


def copy_package(folder: Path, **build: str) -> Path:
    """A copy of the installed package with a changed build.json."""
    shutil.copytree(PACKAGE, folder / "attnpack", ignore=shutil.ignore_patterns("include", "__pycache__"))
    record = folder / "attnpack/share/attnpack/build.json"
    record.write_text(json.dumps(build_record() | build))
    return folder


def import_error(process) -> str:
    """The message of the ImportError that ended the process; nothing else may have been raised on the way."""
    assert process.returncode == 1, process.text
    assert "During handling" not in process.text and "undefined symbol" not in process.text
    last = process.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    return last.removeprefix("ImportError: ")


def test_without_torch():
    message = import_error(run_python("import sys; sys.modules['torch'] = None; import attnpack"))
    assert message == "attnpack needs torch >= 2.11, which is not installed: run `pip install torch`"


def test_a_folder_that_an_uninstall_left_is_no_torch(tmp_path):
    (tmp_path / "torch").mkdir()
    code = "import sys; sys.path.insert(0, sys.argv[1]); sys.modules.pop('torch', None); import attnpack"
    ran = run_program(sys.executable, "-S", "-c", code, ROOT / "python", cwd=tmp_path)
    assert import_error(ran).startswith("attnpack needs torch >= 2.11, which is not installed")


def test_without_a_build(tmp_path):
    shutil.rmtree(copy_package(tmp_path) / "attnpack/share")
    message = import_error(run_python("import attnpack", first=tmp_path))
    assert message.startswith(f"attnpack's native code is not built in {tmp_path / 'attnpack'}: run `pip install .`")


@pytest.mark.parametrize("written", [b"{", b"[]", b"\xff", b'{"torch": "2.13.0"}', b"[" * 100_000, None])
def test_a_damaged_record_of_the_build(tmp_path, written):
    record = copy_package(tmp_path) / "attnpack/share/attnpack/build.json"
    if written is None:
        record.unlink()
        record.mkdir()
    else:
        record.write_bytes(written)
    message = import_error(run_python("import attnpack", first=tmp_path))
    assert message.startswith(f"attnpack's record of the build, {record}, is damaged: build it again")


@pytest.mark.parametrize("name, other", [("torch", "2.99.0"), ("python", "3.99.0")])
def test_built_for_another_version(tmp_path, name, other):
    message = import_error(run_python("import attnpack", first=copy_package(tmp_path, **{name: other})))
    assert message.startswith(f"attnpack was built for {name} {other[:4]}, but this is {name} ")
    assert message.endswith("build it again: run `pip install .` in attnpack's source folder")


def test_the_command_line_of_a_misfit_says_so_without_a_traceback(tmp_path):
    first = copy_package(tmp_path, torch="2.99.0")

    def command(*arguments):
        process = run_attnpack(*arguments, first=first)
        assert process.returncode == 2 and "Traceback" not in process.text
        return process

    why = "attnpack was built for torch 2.99, but this is torch "
    lines = dict(line.split(maxsplit=1) for line in command("info").stdout.splitlines())
    assert lines["attnpack._C"].startswith(f"not loaded: {why}") and lines["libattnpack.so"] == lines["attnpack._C"]
    assert lines["torch"].endswith("built for 2.99.0") and "gguf" in lines
    libraries = json.loads(command("info", "--json").stdout)["libraries"]
    assert not libraries["attnpack._C"]["loaded"] and not libraries["libattnpack.so"]["loaded"]
    for others in (("generate", "hello"), ("info", "--cmake-prefix")):  # CMake reads what stands on stdout
        ran = command(*others)
        assert ran.stderr.startswith(f"attnpack: {why}") and not ran.stdout


def test_a_library_that_lacks_symbols(tmp_path):
    """The version agrees but the symbols do not, as between two development builds of torch."""
    library = copy_package(tmp_path) / "attnpack/lib/libattnpack.so"
    source = tmp_path / "empty.cpp"
    source.write_text("")
    compiler = os.environ.get("CXX", "c++")
    assert (
        run_program(compiler, "-shared", "-fPIC", f"-Wl,-soname,{library.name}", source, "-o", library).returncode == 0
    )
    message = import_error(run_python("import attnpack", first=tmp_path))
    assert re.fullmatch(
        r"attnpack's native code does not fit torch \S+: build it again: run `pip install .` in .*", message
    )


@pytest.mark.parametrize(
    "load", ["torch.ops.load_library({!r})", "import ctypes; ctypes.CDLL({!r})"], ids=["torch", "ctypes"]
)
def test_library_first_then_python(load):
    code = (
        f"import torch; {load.format(str(LIBRARY))}; torch.ops.attnpack.null(torch.ones(2)); import attnpack; {ATTEND}"
    )
    process = run_python(code)
    assert process.returncode == 0, process.text


def test_python_first_then_library():
    process = run_python(f"import torch, attnpack; torch.ops.load_library({str(LIBRARY)!r}); {ATTEND}")
    assert process.returncode == 0, process.text


def test_a_second_copy_is_refused(tmp_path):
    copy = tmp_path / LIBRARY.name
    shutil.copy(LIBRARY, copy)
    shutil.copy(KERNELS_LIBRARY, tmp_path)
    message = import_error(run_python(f"import torch; torch.ops.load_library({str(copy)!r}); import attnpack"))
    assert message.startswith(f"another copy of attnpack is loaded already, {copy}, ")


def test_one_openmp():
    """Two libgomp in one process mean two thread pools, and one of them ignores torch.set_num_threads."""
    code = f"import torch, attnpack; {ATTEND}; print(open('/proc/self/maps').read())"
    assert len(set(re.findall(r"/\S*lib(?:gomp|omp|iomp5)\S*", run_python(code).stdout))) == 1


@pytest.mark.parametrize("isa", [isa for isa in build_record()["instruction_sets"].split(";") if isa != "baseline"])
def test_kernels_leak_no_code_of_their_instruction_set(isa):
    """A weak symbol outside its own namespace may be the one the linker keeps, and then runs on a CPU without it."""
    objects = list((BUILD / f"CMakeFiles/attnpack_{isa}.dir").rglob("*.o"))
    assert objects, f"no objects of attnpack_{isa} in {BUILD}: run scripts/test.sh, which builds there"
    symbols = run_program("nm", "--demangle", "--defined-only", *objects).stdout
    weak = re.findall(r"^[0-9a-f]+ [WVu] (.*)$", symbols, re.MULTILINE)
    assert [name for name in weak if f"attnpack::{isa}::" not in name] == []
    assert f"attnpack::{isa}::" in symbols


def test_checkpoints_are_imported_when_they_are_used():
    script = (
        "import attnpack, sys; before = 'attnpack.checkpoints' in sys.modules; attnpack.checkpoints.load; "
        "print(before, 'attnpack.checkpoints' in sys.modules)"
    )
    assert run_python(script).stdout.split() == ["False", "True"]


def test_a_folder_with_the_name_of_the_cuda_wheel_is_no_wheel(tmp_path):
    (tmp_path / "attnpack_cu13").mkdir()
    ready = f"import sys, torch; sys.path.append({str(tmp_path)!r}); torch.version.cuda = '13.0'"
    ran = run_python(f"{ready}; from attnpack import _load; print(_load.CUDA_LIBRARY)")
    assert ran.returncode == 0 and "attnpack_cu13" not in ran.stdout, ran.text
