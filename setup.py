"""The extension attnpack._C, built by CMake: one build for the C++ library, its headers and the binding."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "build_backend"))
from attnpack_build import find_torch  # noqa: E402
from build_progress import Progress  # noqa: E402

if int(setuptools.__version__.split(".")[0]) < 77:  # without build isolation: what a new venv of Python 3.11 holds
    sys.exit(f"attnpack: setuptools {setuptools.__version__} is too old; pip install 'setuptools>=77' and try again.")


class FreshBuildPy(build_py):
    """Starts a wheel from an empty folder: what an earlier build left there would be packed again."""

    def run(self):
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """Drives CMake. The build tree stays in build/ (ATTNPACK_BUILD_DIR), so that a second build is incremental.

    A wheel has its native code in torch-X.Y, so that scripts/wheel.sh can join those for several releases of torch.
    MAX_JOBS limits the compilers at work (default: all cores); CMAKE_ARGS adds CMake arguments.
    """

    def run(self):
        self.in_source = self.inplace or self.editable_mode  # setuptools clears inplace while it builds
        super().run()

    def build_extension(self, ext):
        package = (ROOT / "python" if self.in_source else Path(self.build_lib).resolve()) / "attnpack"
        tree = Path(os.environ.get("ATTNPACK_BUILD_DIR", ROOT / "build")).resolve()
        jobs = os.environ.get("MAX_JOBS") or str(usable_cpus())
        self.configure(tree, wheel=not self.in_source)
        self.build(tree, jobs)
        if self.in_source:
            self.cmake("--install", tree, "--prefix", package)
        else:
            self.cmake("--install", tree, "--prefix", package, "--component", "kernels")
            self.cmake("--install", tree, "--prefix", package / prefix_for_torch(tree), "--component", "Unspecified")

    def configure(self, tree: Path, wheel: bool):
        ninja = shutil.which("ninja")
        settings = {
            "CMAKE_BUILD_TYPE": "Release",
            "Python_EXECUTABLE": sys.executable,
            "ATTNPACK_TORCH_DIR": find_torch(),
            "ATTNPACK_PYTHON": "ON",
            "ATTNPACK_WHEEL": "ON" if wheel else "OFF",
        }
        generator = "Ninja" if ninja else "Unix Makefiles"
        if ninja:  # the one of an earlier build may be gone with pip's build environment
            settings["CMAKE_MAKE_PROGRAM"] = ninja
        forget_cache_of_another(tree, generator)
        arguments = [f"-D{name}={value}" for name, value in settings.items()]
        self.cmake("-S", ROOT, "-B", tree, "-G", generator, *arguments, *os.environ.get("CMAKE_ARGS", "").split())

    def build(self, tree: Path, jobs: str):
        command = [find_cmake(), "--build", str(tree), "--parallel", jobs]
        progress = Progress(planned_steps(tree))
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
            for line in process.stdout:
                progress.take(line)
        progress.end_line()
        if process.returncode != 0:
            sys.exit("attnpack: the build stopped; the reason stands above.")

    def cmake(self, *arguments):
        if subprocess.call([find_cmake(), *map(str, arguments)]) != 0:
            sys.exit("attnpack: the build stopped; the reason stands above.")

    def copy_extensions_to_source(self):
        """Nothing to do: an in-place build was installed into python/attnpack by CMake."""


def prefix_for_torch(tree: Path) -> str:
    """`torch-X.Y`: where a wheel has the native code, of which _load.py takes what the running torch needs."""
    return "torch-" + ".".join(json.loads((tree / "build.json").read_text())["torch"].split(".")[:2])


def planned_steps(tree: Path) -> list[str]:
    """The steps of the build, as `ninja -n` prints them: from a copy of build.ninja, because ninja would first want to
    make build.ninja anew."""
    ninja = shutil.which("ninja")
    if ninja is None or not (tree / "build.ninja").exists():
        return []
    shutil.copy(tree / "build.ninja", tree / "plan.ninja")
    command = [ninja, "-C", tree, "-f", "plan.ninja", "-n"]
    return subprocess.run(command, capture_output=True, text=True, errors="replace").stdout.splitlines()


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_cmake() -> str:
    cmake = shutil.which("cmake")
    if cmake is None:
        sys.exit("attnpack: the build needs cmake 3.22 or newer; install it (pip install cmake ninja).")
    return cmake


def forget_cache_of_another(tree: Path, generator: str):
    """CMake refuses a cache made with another generator or in another place; compiled files stay."""
    cache = tree / "CMakeCache.txt"
    if cache.exists():
        lines = cache.read_text().splitlines()
        wanted = {f"CMAKE_GENERATOR:INTERNAL={generator}", f"CMAKE_CACHEFILE_DIR:INTERNAL={tree}"}
        if not wanted.issubset(lines):
            cache.unlink()


def version() -> str:
    return re.search(r'ATTNPACK_VERSION "(.+)"', (ROOT / "csrc/attnpack/version.h").read_text())[1]


setup(
    version=version(),
    ext_modules=[Extension("attnpack._C", sources=[])],
    cmdclass={"build_py": FreshBuildPy, "build_ext": CMakeBuild},
)
