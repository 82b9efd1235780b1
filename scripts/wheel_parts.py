"""Joins wheels that were built for several releases of torch, and checks what came out. For scripts/wheel.sh.

    python scripts/wheel_parts.py join FOLDER WHEEL ...    one wheel in FOLDER with what all of them have
    python scripts/wheel_parts.py cuda FOLDER LIBRARY      attnpack-cu13 in FOLDER: LIBRARY is libattnpack_cuda.so
    python scripts/wheel_parts.py archive FOLDER WHEEL     what C and C++ programs need of it, as a .tar.gz in FOLDER
    python scripts/wheel_parts.py check WHEEL TORCH ...    TORCH: the folders of the releases that it was built for

`check` exits with 1 if a library looks for others outside of the wheel and torch, if it needs a symbol that its torch
lacks or a private one that private_torch_symbols.txt does not list, if a file names a folder of this machine, or if a
part is missing.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = ROOT / "csrc/attnpack/version.h"
ALLOWED = frozenset((ROOT / "scripts/private_torch_symbols.txt").read_text().split("\n"))
HOW = ": use what is public, or list it in scripts/private_torch_symbols.txt"
OF_A_PREFIX = ("lib/libattnpack.so", "include/attnpack/attnpack.h", "share/cmake/attnpack/attnpackConfig.cmake",
               "share/attnpack/build.json", "lib/pkgconfig/attnpack.pc")  # fmt: skip
SHARED = ("lib/libattnpack_kernels.so", "include/attnpack/kernels.h", "lib/pkgconfig/attnpack_kernels.pc",
          "share/cmake/attnpack_kernels/attnpack_kernelsConfig.cmake")  # fmt: skip


def join(folder: Path, wheels: list[Path]) -> None:
    """The wheels differ in their torch-X.Y only, which share the kernels. The joined one asks for one of these
    releases."""
    with tempfile.TemporaryDirectory() as unpacked:
        for wheel in wheels:
            zipfile.ZipFile(wheel).extractall(unpacked)
        minors = sorted(path.name.removeprefix("torch-") for path in Path(unpacked).glob("attnpack/torch-*"))
        metadata = next(Path(unpacked).glob("*.dist-info")) / "METADATA"
        text, count = re.subn(
            r"^Requires-Dist: torch\S*$", f"Requires-Dist: {requirement(minors)}", metadata.read_text(), flags=re.M
        )
        assert count == 1, f"{metadata} names torch {count} times"
        metadata.write_text(text)
        folder.mkdir(parents=True)
        subprocess.run([sys.executable, "-m", "wheel", "pack", "--dest-dir", folder, unpacked], check=True)


def requirement(minors: list[str]) -> str:
    """The releases between the first and the last, without those that were left out: torch>=2.13,<2.15."""
    numbers = sorted(int(minor.split(".")[1]) for minor in minors)
    missing = [f",!=2.{number}.*" for number in range(numbers[0], numbers[-1]) if number not in numbers]
    return f"torch>=2.{numbers[0]},<2.{numbers[-1] + 1}{''.join(missing)}"


def cuda(folder: Path, library: Path) -> Path:
    """A wheel apart, attnpack-cu13 for CUDA 13: its package holds the library, and _load.py finds it there."""
    major = re.search(r"release (\d+)\.", printed("nvcc", "--version"))[1]
    name, version = f"attnpack_cu{major}", re.search(r'ATTNPACK_VERSION "(.+)"', VERSION.read_text())[1]
    with tempfile.TemporaryDirectory() as packed:
        package, record = Path(packed) / name, Path(packed) / f"{name}-{version}.dist-info"
        (package / "lib").mkdir(parents=True)
        shutil.copy(library, package / "lib")
        (package / "__init__.py").write_text(
            f'"""attnpack\'s kernels for CUDA {major}: `import attnpack` loads them."""\n'
        )
        (record / "licenses").mkdir(parents=True)
        shutil.copy(ROOT / "LICENSE", record / "licenses")
        (record / "METADATA").write_text(
            f"Metadata-Version: 2.4\nName: {name.replace('_', '-')}\nVersion: {version}\n"
            f"Summary: CUDA {major} kernels of attnpack\nLicense-Expression: BSD-3-Clause\nLicense-File: LICENSE\n"
            f"Requires-Dist: attnpack=={version}\n"
        )
        tag = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        (record / "WHEEL").write_text(f"Wheel-Version: 1.0\nGenerator: attnpack\nRoot-Is-Purelib: false\nTag: {tag}\n")
        folder.mkdir(parents=True)
        subprocess.run([sys.executable, "-m", "wheel", "pack", "--dest-dir", folder, packed], check=True, stdout=2)
    return next(folder.glob("*.whl"))


def check(wheel: Path, torches: list[Path]) -> list[str]:
    """The faults of the wheel."""
    with tempfile.TemporaryDirectory() as unpacked:
        zipfile.ZipFile(wheel).extractall(unpacked)
        package, wrong = Path(unpacked) / "attnpack", []
        if other := sorted(path.name for path in Path(unpacked).iterdir() if not path.name.startswith("attnpack")):
            wrong.append(f"beside the package stand {', '.join(other)}")
        for file in filter(Path.is_file, Path(unpacked).rglob("*")):
            content = file.read_bytes()
            found = next((folder for folder in (ROOT, *torches) if str(folder).encode() in content), None)
            wrong += [f"{file.relative_to(unpacked)} names {found}"] if found else []
        wrong += [f"the package lacks {part}" for part in SHARED if not (package / part).is_file()]
        kernels = [*package.glob("lib/*.so")]  # which programs load without torch
        wrong += faults_of(kernels, package, defined_symbols(kernels), "no library of the wheel")
        for torch in torches:
            prefix = package / f"torch-{minor_of(torch)}"
            wrong += [f"{prefix.name} lacks {part}" for part in OF_A_PREFIX if not (prefix / part).is_file()]
            libraries = [*prefix.glob("lib/*.so"), *prefix.glob("_C.*.so")]
            known = defined_symbols([*kernels, *libraries, *(torch / "lib").glob("lib*.so*")])
            wrong += faults_of(libraries, package, known, "no library of torch")
            own = defined_symbols([*kernels, *libraries])
            for library in libraries:
                used = private_names(needed_symbols(library) - own)
                wrong += [f"{library.relative_to(package)}: {name} is private to torch{HOW}" for name in used - ALLOWED]
        for library in sorted({*kernels, *package.glob("torch-*/**/*.so")}):
            print(f"{library.relative_to(package)}: {library.stat().st_size / 1e6:.1f} MB")
        return wrong


def faults_of(libraries: list[Path], package: Path, known: set[str], who: str) -> list[str]:
    """Entries of RUNPATHs that lead out of the wheel, and symbols that are not known."""
    wrong = []
    for library in libraries:
        wrong += [f"{library.relative_to(package)}: RUNPATH {entry}" for entry in outside(library)]
        lacking = sorted(symbol for symbol in needed_symbols(library) if symbol not in known)
        wrong += [f"{library.relative_to(package)}: {who} defines {name}" for name in lacking]
    return wrong


OF_CPP = re.compile(r"attnpack/(torch-[0-9.]+/)?(include|lib|share/cmake)/|.*\.dist-info/licenses/")


def archive(folder: Path, wheel: Path) -> Path:
    """The parts of the wheel in their places, so that libraries and CMake packages find each other."""
    name, version, _, _, platform = wheel.stem.split("-")
    written = folder / f"{name}-{version}-cpp-{platform}.tar.gz"
    with zipfile.ZipFile(wheel) as parts, tempfile.TemporaryDirectory() as unpacked:
        files = [name for name in parts.namelist() if not name.endswith("/")]  # auditwheel writes folders, too
        for part in filter(OF_CPP.match, files):
            file = Path(unpacked) / re.sub(r".*\.dist-info/licenses/", "attnpack/", part)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(parts.read(part))
        with tarfile.open(written, "w:gz") as archive:
            archive.add(Path(unpacked) / "attnpack", "attnpack")
    return written


def minor_of(torch: Path) -> str:
    return re.search(r"__version__ = '(\d+\.\d+)", (torch / "version.py").read_text())[1]


def outside(library: Path) -> list[str]:
    """The entries of the RUNPATH that do not begin at the library itself."""
    found = re.search(r"R(?:UN)?PATH\).*\[(.*)\]", printed("readelf", "-d", library))
    return [entry for entry in found[1].split(":") if not re.match(r"\$ORIGIN(/|$)", entry)] if found else []


def defined_symbols(libraries: list[Path]) -> set[str]:
    lines = printed("nm", "-D", "--defined-only", *libraries).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if " " in line}


def needed_symbols(library: Path) -> set[str]:
    """Those without a version, which are torch's or ours: the system's names have one. The program has Python's."""
    lines = [line.split() for line in printed("nm", "-D", "--undefined-only", library).splitlines()]
    names = {words[-1] for words in lines if words[0] == "U" and "@" not in words[-1]}
    return {name for name in names if not re.match("_?Py", name)}


PUBLIC = re.compile(
    r"(?:.* )?(?:at|c10|c10d|caffe2|torch|pybind11|std)::(?!(?:native|detail|impl|internal|functorch|dynamo|jit)::)"
)


def private_names(symbols: set[str]) -> set[str]:
    """Those that no public header of torch promises, without their arguments."""
    names = subprocess.run(["c++filt"], input="\n".join(symbols), text=True, capture_output=True, check=True).stdout
    shown = {line.partition("(")[0] for line in names.splitlines()}
    return {name for name in shown if not PUBLIC.match(name)}


def printed(*command) -> str:
    return subprocess.run(command, text=True, capture_output=True, check=True).stdout


def main(command: str, first: str, *others: str) -> int:
    if command == "join":
        join(Path(first), list(map(Path, others)))
        return 0
    if command == "cuda":
        print(cuda(Path(first), Path(others[0])))
        return 0
    if command == "archive":
        print(archive(Path(first), Path(others[0])))
        return 0
    wrong = check(Path(first), list(map(Path, others)))
    for line in wrong:
        print(f"wrong: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
