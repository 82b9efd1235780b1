"""The files in the wheel, C++ programs that use them, and `attnpack info`."""

import argparse
import json
import os
import platform
import re
import shutil
import sys
import zipfile
from pathlib import Path

import attnpack
import pytest
import torch
from attnpack import _load
from attnpack.tools import info
from processes import ROOT, TORCH_DIR, fake_torch, needs, run_attnpack, run_program, run_python, without_python
from script_modules import load_script

EXAMPLE = ROOT / "examples/cpp/hello_attention"
MINOR = ".".join(torch.__version__.split(".")[:2])
PREFIX = f"torch-{MINOR}"
wheel_parts = load_script("scripts/wheel_parts.py")
# Both libraries, without torch's headers for modules, which take a quarter of a minute.
SHORT_PROGRAM = r"""#include <ATen/ops/ones.h>
#include <attnpack/ops/attention.h>
#include <attnpack/ops/library.h>
#include <iostream>
int main() {
  const at::Tensor x = at::ones({1, 2, 3, 24});
  std::cout << attnpack::version() << "\n" << attnpack::instruction_set() << "\n"
            << attnpack::attention(x, x, x).sizes().slice(1) << "\n";
}
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The package unpacked from a wheel that pip has built; compiled files of build/ are used again."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", folder, ROOT]
    built = run_program(*pip)
    assert built.returncode == 0, built.text
    site = folder / "site-packages"
    zipfile.ZipFile(next(folder.glob("attnpack-*.whl"))).extractall(site)
    return site


@pytest.fixture
def prefix(wheel) -> Path:
    """The folder of the native code for this torch."""
    return wheel / "attnpack" / PREFIX


def test_wheel_carries_both_languages(wheel, prefix):
    for file in ("include/attnpack/attnpack.h", "include/attnpack/ops/attention.h", "lib/libattnpack.so",
                 "share/cmake/attnpack/attnpackConfig.cmake"):  # fmt: skip
        assert (prefix / file).is_file(), file
    for file in wheel_parts.SHARED:
        assert (wheel / "attnpack" / file).is_file(), file
        assert not (prefix / file).exists(), f"{file} is there twice"
    for file in ("py.typed", "cpp.pyi", "tools/data/smollm2_reference.json", "tools/cli.py"):
        assert (wheel / "attnpack" / file).is_file(), file
    assert list(prefix.glob("_C.*.so"))
    assert not list(prefix.glob("include/attnpack/bindings")), "bindings need Python, the installed headers do not"
    for file in ("LICENSE", "LICENSE-third-party.txt"):
        assert next(wheel.glob(f"*.dist-info/licenses/{file}")).read_text() == (ROOT / file).read_text()
    metadata = next(wheel.glob("*.dist-info/METADATA")).read_text()
    assert f"Version: {attnpack.__version__}\n" in metadata
    assert re.findall(r"^Requires-Dist: ([^;\n]+)$", metadata, re.MULTILINE) == ["torch>=2.11"]
    assert "attnpack = attnpack.tools.cli:main" in next(wheel.glob("*.dist-info/entry_points.txt")).read_text()


def test_wheel_passes_its_check(wheel):
    """scripts/wheel.sh asks the same: parts, RUNPATHs, symbols that torch has, no folder of this machine."""
    assert wheel_parts.check(next(wheel.parent.glob("*.whl")), [TORCH_DIR]) == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="old_glibc.cpp is for x86-64")
def test_the_wheel_loads_on_the_linux_of_torchs_wheels(wheel):
    """manylinux_2_28: cmake/old_glibc.cpp has a function for each name that this machine's glibc has anew."""
    for library in set(wheel.rglob("*.so")) - set(wheel.rglob("libattnpack_cuda.so")):  # CUDA's runtime asks for 2.34
        asked = re.findall(r" U (\S+)@GLIBC_2\.(\d+)", run_program("nm", "-D", library).stdout)
        assert asked and not [name for name, minor in asked if int(minor) > 28], library


def test_the_check_of_a_wheel_finds_what_is_wrong(wheel, prefix, tmp_path):
    """Against a torch without symbols, with a RUNPATH of this machine, a lost part and a folder's name."""
    bad = tmp_path / "bad"
    shutil.copytree(wheel, bad)
    (bad / "torchgen").mkdir()
    broken = bad / "attnpack" / prefix.name
    (broken / "share/attnpack/build.json").unlink()
    (broken / "note.txt").write_text(f"made in {ROOT}")
    source = tmp_path / "outside.cpp"
    declared = "namespace at { void none(); namespace native { void none(); } }"
    source.write_text(declared + " void f() { at::none(); at::native::none(); }")
    compiler = os.environ.get("CXX", "c++")
    built = run_program(compiler, "-shared", "-fPIC", source, "-Wl,-rpath,/elsewhere", "-o", broken / "lib/bad.so")
    assert built.returncode == 0, built.text
    archive = Path(shutil.make_archive(str(tmp_path / "attnpack"), "zip", bad))
    wrong = "\n".join(wheel_parts.check(archive, [TORCH_DIR]))
    for finding in ("beside the package stand torchgen", f"{PREFIX} lacks share/attnpack/build.json",
                    f"note.txt names {ROOT}", "lib/bad.so: RUNPATH /elsewhere",
                    "lib/bad.so: no library of torch defines _ZN2at4noneEv",
                    "lib/bad.so: at::native::none is private to torch"):  # fmt: skip
        assert finding in wrong
    assert len(wrong.splitlines()) == 7, wrong  # no library defines the private one either


def test_wheels_for_several_torches_are_joined(wheel, tmp_path):
    """The other one is this one under another name: each has its folder, and the joined wheel asks for one of them."""
    other = tmp_path / "other"
    shutil.copytree(wheel, other)
    (other / "attnpack" / PREFIX).rename(other / "attnpack/torch-2.11")
    second = Path(shutil.make_archive(str(tmp_path / "second"), "zip", other))
    wheel_parts.join(tmp_path / "joined", [next(wheel.parent.glob("*.whl")), second])
    site = tmp_path / "site"
    zipfile.ZipFile(next((tmp_path / "joined").glob("attnpack-*.whl"))).extractall(site)
    assert sorted(path.name for path in site.glob("attnpack/torch-*")) == ["torch-2.11", PREFIX]
    metadata = next(site.glob("*.dist-info/METADATA")).read_text()
    last = int(MINOR.split(".")[1])
    missing = "".join(f",!=2.{number}.*" for number in range(12, last))
    assert f"Requires-Dist: torch>=2.11,<2.{last + 1}{missing}\n" in metadata
    ran = run_python("import attnpack; print(attnpack._load.PREFIX)", first=site)
    assert ran.stdout.strip() == str(site / "attnpack" / PREFIX), ran.text
    shutil.rmtree(site / "attnpack" / PREFIX)
    shown = run_attnpack("info", first=site)
    lines = dict(line.split(maxsplit=1) for line in shown.stdout.splitlines())
    assert lines["attnpack"] == attnpack.__version__ and lines["torch"].endswith("built for 2.11"), shown.text
    assert lines["find_package"] == "nothing is built for this torch"
    stopped = run_python("import attnpack", first=site)
    wanted = f"this wheel of attnpack has native code for torch 2.11, but this is torch {torch.__version__}: run "
    assert stopped.returncode == 1 and wanted in stopped.stderr.splitlines()[-1]


@needs("nvcc")
def test_cuda_kernels_are_a_wheel_apart(wheel, tmp_path, monkeypatch):
    """attnpack-cu13 for CUDA 13 has the library only, asks for this attnpack, and _load finds it by torch's CUDA."""
    library = tmp_path / "libattnpack_cuda.so"
    library.write_text("the kernels")
    packed = wheel_parts.cuda(tmp_path / "packed", library)
    major = re.fullmatch(rf"attnpack_cu(\d+)-{attnpack.__version__}-py3-none-linux_\w+\.whl", packed.name)[1]
    site, package = tmp_path / "site", f"attnpack_cu{major}"
    zipfile.ZipFile(packed).extractall(site)
    assert f"\nRequires-Dist: attnpack=={attnpack.__version__}\n" in next(site.glob("*.dist-info/METADATA")).read_text()
    assert b"the kernels" not in [file.read_bytes() for file in wheel.rglob("libattnpack_cuda*")]
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(_load, "PREFIX", tmp_path / "none")
    monkeypatch.setattr(_load, "CUDA_PACKAGE", "")
    assert _load._find_cuda_library() == tmp_path / "none/lib" / library.name
    monkeypatch.setattr(_load, "CUDA_PACKAGE", package)
    assert _load._find_cuda_library() == site / package / "lib" / library.name


@pytest.mark.parametrize(
    "minors, wanted",
    [
        (["2.13"], "torch>=2.13,<2.14"),
        (["2.14", "2.13"], "torch>=2.13,<2.15"),
        (["2.11", "2.13"], "torch>=2.11,<2.14,!=2.12.*"),
    ],
)
def test_a_joined_wheel_asks_for_its_torches(minors, wanted):
    assert wheel_parts.requirement(minors) == wanted


def test_wheel_runs_in_python(wheel):
    code = "import attnpack, torch; q = torch.ones(1, 2, 3, 4); out = attnpack.attention(q, q, q)"
    process = run_python(f"{code}; print(out.sum().item(), attnpack.__file__)", first=wheel)
    assert process.stdout.split() == ["24.0", str(wheel / "attnpack/__init__.py")], process.text


def test_cpp_program_against_the_wheel(wheel, tmp_path):
    """The example finds the operator by name although it is linked only against the library."""
    prefix = run_python(
        "import sys; from attnpack.tools.cli import main; sys.exit(main(['info', '--cmake-prefix']))", first=wheel
    )
    assert prefix.stdout.strip() == str(wheel / "attnpack" / PREFIX)
    configured = run_program("cmake", "-S", EXAMPLE, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix.stdout.strip()}")
    assert configured.returncode == 0, configured.text
    built = run_program("cmake", "--build", tmp_path)
    assert built.returncode == 0, built.text
    hello = run_program(tmp_path / "hello_attention", env={})
    assert hello.returncode == 0, hello.text
    lines = [line.split(maxsplit=1) for line in hello.stdout.splitlines()]
    assert [line[0] for line in lines] == ["layer", "steps", "operator", "schema"]
    assert lines[0][1] == "[1, 10, 512]"
    assert lines[2][1] == "[1, 8, 10, 64]"
    assert lines[3][1] == str(torch.ops.attnpack.attention.default._schema)


def test_a_wheel_becomes_an_archive_for_c_and_cpp(wheel, tmp_path):
    """It holds no file of Python, and programs find both packages in it, away from torch."""
    archive = wheel_parts.archive(tmp_path, next(wheel.parent.glob("*.whl")))
    assert re.fullmatch(r"attnpack-[\d.]+-cpp-\w+\.tar\.gz", archive.name)
    shutil.unpack_archive(archive, tmp_path)
    prefix = tmp_path / "attnpack"
    assert (prefix / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert not [*prefix.rglob("*.py"), *prefix.rglob("_C*"), *prefix.rglob("*.json")]
    assert (prefix / "lib" / _load.KERNELS_LIBRARY.name).is_file() and (
        prefix / PREFIX / "lib/libattnpack.so"
    ).is_file()
    c, cpp = ROOT / "examples/c/decode", tmp_path / "cpp"
    cpp.mkdir()
    (cpp / "CMakeLists.txt").write_text((EXAMPLE / "CMakeLists.txt").read_text())
    (cpp / "main.cpp").write_text(SHORT_PROGRAM)
    for command in (
        ("cmake", "-S", c, "-B", tmp_path / "c", f"-DCMAKE_PREFIX_PATH={prefix}"),
        ("cmake", "--build", tmp_path / "c"),
        (tmp_path / "c/decode",),
        ("cmake", "-S", cpp, "-B", cpp, f"-DCMAKE_PREFIX_PATH={prefix / PREFIX}",
         f"-DATTNPACK_TORCH_DIR={TORCH_DIR}"),
        ("cmake", "--build", cpp),
        (cpp / "hello_attention",),
    ):  # fmt: skip
        process = run_program(*command)
        assert process.returncode == 0, process.text


@needs("pkg-config")
@pytest.mark.parametrize("compiler", ["g++", pytest.param("clang++", marks=[needs("clang++"), pytest.mark.long])])
def test_pkg_config_gives_the_flags_of_a_program(wheel, prefix, tmp_path, compiler):
    """Without CMake. The wheel lies beside no torch here, so the test names it. test_headers.py asks the same of every
    public header."""
    environment = os.environ | {"PKG_CONFIG_PATH": str(prefix / "lib/pkgconfig")}
    ask = ("pkg-config", f"--define-variable=torchdir={TORCH_DIR}", "--cflags", "--libs", "attnpack")
    assert run_program("pkg-config", "--modversion", "attnpack", env=environment).stdout.strip() == attnpack.__version__
    beside = run_program("pkg-config", "--variable=torchdir", "attnpack", env=environment).stdout.strip()
    assert Path(beside).resolve() == (wheel / "torch").resolve()
    flags = run_program(*ask, env=environment)
    assert flags.returncode == 0, flags.text
    source, program = tmp_path / "main.cpp", tmp_path / "program"
    source.write_text(SHORT_PROGRAM)
    warnings = ("-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror")
    built = run_program(compiler, *warnings, source, "-o", program, *flags.stdout.split())
    assert built.returncode == 0, built.text
    ran = run_program(program, env={})
    assert ran.returncode == 0, ran.text
    version, isa, shape = ran.stdout.splitlines()
    assert version == attnpack.__version__ and isa in _load.build_record()["instruction_sets"] and shape == "[2, 3, 24]"


def test_a_second_copy_of_the_library_says_so(tmp_path):
    """It ends the process, because an initialiser of a library cannot fail otherwise: dlopen lets no exception out."""
    second = shutil.copy(ROOT / "python/attnpack/lib/libattnpack.so", tmp_path / "libsecond.so")
    shutil.copy(_load.KERNELS_LIBRARY, tmp_path)
    ran = run_python(f"import attnpack, torch; torch.ops.load_library({str(second)!r}); print('loaded')")
    assert ran.returncode != 0 and "loaded" not in ran.stdout
    sentence = (
        f"attnpack: another copy of the library is loaded in this process, so {second} cannot be: link and load one"
    )
    assert sentence in ran.stderr


def test_example_is_short():
    assert len((EXAMPLE / "main.cpp").read_text().splitlines()) < 40


def test_find_package_refuses_another_torch(prefix, tmp_path):
    torch_dir = fake_torch(tmp_path / "torch", "2.99.0")
    arguments = [f"-DCMAKE_PREFIX_PATH={prefix}", f"-DATTNPACK_TORCH_DIR={torch_dir}"]
    stopped = run_program("cmake", "-S", EXAMPLE, "-B", tmp_path / "b", *arguments)
    assert stopped.returncode != 0
    assert f"attnpack was built for torch {MINOR}, but {torch_dir} is torch 2.99.0" in stopped.text


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_cpp_without_python(tmp_path):
    """-DATTNPACK_PYTHON=OFF builds, passes ctest and installs with no Python on the PATH."""
    environment = without_python(tmp_path / "bin")
    build, prefix = tmp_path / "b", tmp_path / "prefix"
    arguments = ["-DATTNPACK_PYTHON=OFF", "-DATTNPACK_TESTS=ON", f"-DATTNPACK_TORCH_DIR={TORCH_DIR}"]
    for command in (
        ("cmake", "-S", ROOT, "-B", build, *arguments),
        ("cmake", "--build", build, "--parallel", "2"),
        ("ctest", "--test-dir", build, "--output-on-failure", "--no-tests=error"),
        ("cmake", "--install", build, "--prefix", prefix),
        ("cmake", "-S", EXAMPLE, "-B", tmp_path / "hello", f"-DCMAKE_PREFIX_PATH={prefix}"),
        ("cmake", "--build", tmp_path / "hello"),
        (tmp_path / "hello/hello_attention",),
    ):
        process = run_program(*command, env=environment, timeout=1800)
        assert process.returncode == 0, process.text
    minor = attnpack.__version__.rpartition(".")[0]
    assert (
        f"Library soname: [libattnpack.so.{minor}]"
        in run_program("readelf", "-d", prefix / "lib/libattnpack.so").stdout
    )
    assert (prefix / "lib/libattnpack.so").resolve().name == f"libattnpack.so.{attnpack.__version__}"


def test_info_says_what_is_loaded_and_why_not():
    collected = info.collect_info()
    assert collected["attnpack"] == attnpack.__version__
    assert collected["torch"]["running"] == torch.__version__
    assert collected["instruction_set"]["chosen"] in collected["instruction_set"]["built"]
    assert collected["threads"] == torch.get_num_threads()
    assert collected["libraries"]["libattnpack.so"]["loaded"]
    assert collected["libraries"]["libattnpack_kernels.so"]["path"] == str(_load.KERNELS_LIBRARY)
    cuda = collected["libraries"]["libattnpack_cuda.so"]
    assert cuda["loaded"] is _load.load_cuda()
    assert cuda["loaded"] or cuda["why"] == _load.why_no_cuda()
    assert torch.version.cuda is not None or cuda["why"] == "this torch has no CUDA"


def test_info_prints_lines_or_json(capsys):
    info.main(argparse.Namespace(json=True, cmake_prefix=False))
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(info.collect_info()))
    info.main(argparse.Namespace(json=False, cmake_prefix=False))
    printed = capsys.readouterr().out
    assert re.search(r"^libattnpack_cuda.so +(/|not loaded: )", printed, re.MULTILINE)
    assert re.search(rf"^torch +{re.escape(torch.__version__)}, built for \d", printed, re.MULTILINE)
