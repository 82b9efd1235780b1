"""The build: the parts that it reports, and the one sentence with which it stops."""

import json
import os
import platform
import re
import sys
from pathlib import Path

import attnpack
import pytest
import setuptools
from attnpack._load import build_record
from processes import ROOT, TORCH_DIR, fake_torch, needs, run_program, without_python

NEEDS = "attnpack: Linux x86-64 (ARM compiles), Python >= 3.11, torch >= 2.11"


def configure(build: Path, *arguments: str, **options):
    return run_program("cmake", "-S", ROOT, "-B", build, *arguments, **options)


def on(system: str, processor: str) -> list[str]:
    return [f"-DCMAKE_SYSTEM_NAME={system}", f"-DCMAKE_SYSTEM_PROCESSOR={processor}"]


@pytest.mark.parametrize("system, processor", [("Linux", "riscv64"), ("Darwin", "x86_64"), ("Windows", "AMD64")])
def test_stops_on_other_platforms(system, processor):
    stopped = run_program("cmake", *on(system, processor), "-P", ROOT / "cmake/Platform.cmake")
    assert stopped.returncode != 0
    assert f"{NEEDS}; this is {system} {processor}." in stopped.text


@pytest.mark.parametrize("system, processor", [("Linux", "x86_64"), ("Linux", "aarch64"), ("Darwin", "arm64")])
def test_goes_on_where_it_is_supported(system, processor):
    assert run_program("cmake", *on(system, processor), "-P", ROOT / "cmake/Platform.cmake").returncode == 0


def test_stops_on_an_old_python(tmp_path):
    script = tmp_path / "check.cmake"
    script.write_text(f'include("{ROOT}/cmake/Platform.cmake")\nattnpack_require(Python 3.10.13 3.11)\n')
    stopped = run_program("cmake", *on("Linux", "x86_64"), "-P", script)
    assert stopped.returncode != 0
    assert f"{NEEDS}; this is Python 3.10.13." in stopped.text


def test_stops_on_an_old_torch(tmp_path):
    torch_dir = fake_torch(tmp_path / "torch", "2.10.0")
    stopped = configure(tmp_path / "b", "-DATTNPACK_PYTHON=OFF", f"-DATTNPACK_TORCH_DIR={torch_dir}")
    assert stopped.returncode != 0
    assert f"{NEEDS}; this is torch 2.10.0." in stopped.text


def test_stops_where_there_is_no_torch(tmp_path):
    stopped = configure(tmp_path / "b", "-DATTNPACK_PYTHON=OFF", "-DATTNPACK_TORCH_DIR=/nowhere")
    assert stopped.returncode != 0
    assert "attnpack: no torch found (looked in '/nowhere'). Install one (pip install torch)" in stopped.text


@needs("clang++")
def test_says_which_header_threads_need(tmp_path):
    """clang++ brings no omp.h of its own."""
    arguments = ["-DATTNPACK_PYTHON=OFF", f"-DATTNPACK_TORCH_DIR={TORCH_DIR}", "-DCMAKE_CXX_COMPILER=clang++"]
    configured = configure(tmp_path / "b", *arguments)
    omp = tmp_path / "omp.cpp"
    omp.write_text("#include <omp.h>\n")
    has_header = run_program("clang++", "-fopenmp", "-fsyntax-only", omp).returncode == 0
    assert (configured.returncode == 0) == has_header, configured.text
    if not has_header:
        assert "clang++ finds no omp.h, which the library's threads need: install it" in configured.text


def test_names_what_it_found(tmp_path):
    python = [f"-DPython_EXECUTABLE={sys.executable}", f"-DATTNPACK_TORCH_DIR={TORCH_DIR}"]
    configured = configure(tmp_path / "b", *python, "-DATTNPACK_TESTS=ON")
    assert configured.returncode == 0, configured.text
    assert f"pybind11 {build_record()['pybind11']}: torch's bundled headers" in configured.text
    assert re.search(r"nlohmann/json: /", configured.text)
    assert re.search(r"Catch2 [23]\.\d+\.\d+: /", configured.text)


def test_needs_no_python_for_cpp_alone(tmp_path):
    """test_packaging.py, test_cpp_without_python also builds and tests in this way, which takes minutes."""
    arguments = ["-DATTNPACK_PYTHON=OFF", f"-DATTNPACK_TORCH_DIR={TORCH_DIR}"]
    configured = configure(tmp_path / "b", *arguments, env=without_python(tmp_path / "bin"))
    assert configured.returncode == 0, configured.text
    assert "pybind11" not in configured.text and "Python" not in configured.text


def test_finds_nlohmann_json_beside_torch(tmp_path):
    """Where pip puts it. Only where nothing holds it is it named, with what installs it."""
    (tmp_path / "torch").symlink_to(TORCH_DIR)
    arguments = ["-DATTNPACK_PYTHON=OFF", "-DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON"]
    arguments += [f"-DATTNPACK_TORCH_DIR={tmp_path / 'torch'}"]
    stopped = configure(tmp_path / "b", *arguments)
    assert stopped.returncode != 0
    assert "attnpack: no nlohmann/json.hpp found" in stopped.text
    assert "Install it (pip install nlohmann-json, or apt-get install nlohmann-json3-dev)" in stopped.text
    header = tmp_path / "nlohmann_json/include/nlohmann/json.hpp"
    header.parent.mkdir(parents=True)
    header.write_text("#pragma once\n")
    found = configure(tmp_path / "b", *arguments)
    assert found.returncode == 0, found.text
    assert f"nlohmann/json: {tmp_path / 'b/nlohmann_json'}" in found.text
    header.unlink()  # as after pip's build, whose environment is gone
    again = configure(tmp_path / "b", *arguments)
    assert again.returncode == 0, again.text


TAKE_IN = {
    "fetch_content": f"""include(FetchContent)
        FetchContent_Declare(attnpack SOURCE_DIR {ROOT})
        FetchContent_MakeAvailable(attnpack)""",
    "add_subdirectory": f"add_subdirectory({ROOT} attnpack)",
}


@pytest.mark.parametrize("way", TAKE_IN)
def test_a_program_takes_the_sources_in(tmp_path, way):
    """Only the library, under the name of find_package; the program's warnings do not apply to its headers."""
    (tmp_path / "main.cpp").write_text("#include <attnpack/attnpack.h>\nint main() {}\n")
    (tmp_path / "CMakeLists.txt").write_text(
        f"""cmake_minimum_required(VERSION 3.22)
        project(program LANGUAGES CXX)
        set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
        {TAKE_IN[way]}
        add_executable(program main.cpp)
        target_link_libraries(program PRIVATE attnpack::attnpack)
        get_target_property(version attnpack SOVERSION)
        message(STATUS "the library's name ends in ${{version}}")
        """
    )
    build = tmp_path / "b"
    configured = run_program("cmake", "-S", tmp_path, "-B", build, f"-DATTNPACK_TORCH_DIR={TORCH_DIR}")
    assert configured.returncode == 0, configured.text
    assert "pybind11" not in configured.text and "Python" not in configured.text
    assert f"the library's name ends in {attnpack.__version__.rpartition('.')[0]} " in configured.text
    commands = json.loads((build / "compile_commands.json").read_text())
    (own,) = (each["command"] for each in commands if each["file"] == str(tmp_path / "main.cpp"))
    assert not re.search(r" -I *\S", own)
    headers = [Path(folder) for folder in re.findall(r"-isystem (\S+)", own)]
    assert any((folder / "attnpack/attnpack.h").is_file() for folder in headers)
    assert not any("/bindings/" in each["file"] for each in commands)


def hide_packages(folder: Path) -> dict[str, str]:
    """An environment in which Python sees setuptools but not the user's packages, made as pip makes it."""
    folder.mkdir()
    site = Path(setuptools.__file__).parents[1]
    for part in [*site.glob("setuptools*"), site / "_distutils_hack"]:
        (folder / part.name).symlink_to(part)
    (folder / "sitecustomize.py").write_text(
        "import sys\nsys.path = [path for path in sys.path if not path.endswith('site-packages')]\n"
    )
    hidden = {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "build_backend")]), "PYTHONNOUSERSITE": "1"}
    return os.environ | hidden


BACKEND = "import attnpack_build as b; print(b.get_requires_for_build_wheel()); print(b.find_torch())"


def test_backend_finds_the_torch_that_pip_hides(tmp_path):
    environment = hide_packages(tmp_path / "overlay")
    assert "No module named 'torch'" in run_program(sys.executable, "-c", "import torch", env=environment, cwd="/").text
    found = run_program(sys.executable, "-c", BACKEND, env=environment, cwd=ROOT)
    assert found.returncode == 0, found.text
    requirements, torch_dir = found.stdout.splitlines()[-2:]
    assert torch_dir == str(TORCH_DIR)
    assert "torch" not in requirements


def test_backend_says_what_to_do_where_there_is_no_torch(tmp_path):
    run_program(sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare")
    environment = hide_packages(tmp_path / "overlay")
    stopped = run_program(tmp_path / "bare/bin/python", "-c", BACKEND, env=environment, cwd=ROOT)
    assert stopped.returncode == 1
    assert stopped.stderr.startswith("attnpack: there is no torch in this environment; install one (pip install torch")
    assert len(stopped.stderr.strip().splitlines()) == 1


on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the instruction sets of x86")


@on_x86
def test_instruction_sets_are_chosen(tmp_path):
    """Pairs have the fp64 of avx512, AVX-512 the stored weights of avx2, and every library has the baseline."""
    chosen = configure(tmp_path / "b", "-DATTNPACK_PYTHON=OFF", "-DATTNPACK_ISA_NAMES=avx512_bf16")
    assert chosen.returncode == 0, chosen.text
    assert "instruction sets: baseline;avx2;avx512;avx512_bf16" in chosen.text
    wrong = configure(tmp_path / "b", "-DATTNPACK_PYTHON=OFF", "-DATTNPACK_ISA_NAMES=avx2;avx1024")
    assert wrong.returncode != 0
    assert "ATTNPACK_ISA_NAMES has avx1024, wants native, all, or some of: baseline, avx2," in wrong.text


@on_x86
def test_all_instruction_sets_of_this_machine_are_built():
    """By default: those that the CPU lacks are left out, the others are there to be tested."""
    flags = set(re.findall(r"^flags.*", Path("/proc/cpuinfo").read_text(), flags=re.M)[0].split())
    built = build_record()["instruction_sets"].split(";")
    assert built[0] == "baseline"
    assert ("avx2" in built) >= ({"avx2", "fma", "f16c"} <= flags)
    assert ("avx512" in built) >= ({"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags)


def test_progress_counts_what_is_dear(capsys):
    """The time that is left follows what the files cost, not only how many they are."""
    sys.path.insert(0, str(ROOT / "build_backend"))
    from build_progress import Progress

    steps = ["[1/3] Building CXX object a.cpp.o", "[2/3] Building CXX object Unity/unity_0_cxx.cxx.o", "[3/3] Linking"]
    progress = Progress(steps)
    progress.EVERY, progress.start = 0, progress.start - 10
    for line in (steps[0] + "\n", "warning: beware\n", steps[1] + "\n", steps[2] + "\n"):
        progress.take(line)
    shown = capsys.readouterr().out.splitlines()
    assert shown == [
        "attnpack: 1 of 3 files, 10 s, about 170 s left",
        "warning: beware",
        "attnpack: 2 of 3 files, 10 s, about 1 s left",
        "attnpack: 3 of 3 files, 10 s",
    ]


def test_the_cost_of_a_compilation_is_recorded(tmp_path):
    """scripts/build_cost.py runs each compiler through itself."""
    log = tmp_path / "cpu.log"
    script = ROOT / "scripts/build_cost.py"
    counts = (sys.executable, "-c", "sum(range(3 * 10**7))", "-o", "x.o")
    wrote = run_program(sys.executable, script, "--record", log, *counts)
    assert wrote.returncode == 0, wrote.text
    seconds, name = log.read_text().split()
    assert name == "x.o" and 0.05 < float(seconds) < 60
    failed = run_program(sys.executable, script, "--record", log, sys.executable, "-c", "raise SystemExit(3)")
    assert failed.returncode == 3
