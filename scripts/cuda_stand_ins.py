"""Lets a CUDA build of torch import without NVIDIA's packages: 2.5 GB, of which tests on the CPU need nothing.

    python scripts/cuda_stand_ins.py TORCH    the folder of the torch package: its lib/ gets one more library

That library has every name that torch's libraries take from NVIDIA's, as a function that returns the error of a machine
without a GPU, and links give it the names of NVIDIA's libraries.
"""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice
STAND_IN = "libcuda_stand_in.so"


def printed(*command) -> str:
    return subprocess.run([*map(str, command)], text=True, capture_output=True, check=True).stdout


def missing_libraries(libraries: list[Path]) -> set[str]:
    """Those that torch's libraries load, and neither torch nor the system has."""
    of_system = re.findall(r"^\s+(\S+) \(", printed("/sbin/ldconfig", "-p"), re.M)
    known = {library.name for library in libraries}.union(of_system)
    needed = {name for each in libraries for name in re.findall(r"NEEDED.*\[(.*)\]", printed("readelf", "-dW", each))}
    return needed - known


def versions_of(library: Path, missing: set[str]) -> set[str]:
    """The versions of names that it asks of the missing libraries."""
    parts = re.split(r"File: (\S+)", printed("readelf", "-VW", library).partition("version_r")[2])
    asked = zip(parts[1::2], parts[2::2], strict=True)
    return {version for file, text in asked if file in missing for version in re.findall(r"Name: (\S+)", text)}


def missing_names(libraries: list[Path], missing: set[str]) -> dict[str, set[str]]:
    """{version: names} that torch's libraries take of the missing ones; names without a version stand under ""."""
    names, defined = defaultdict(set), set()
    for library in libraries:
        versions = versions_of(library, missing)
        for line in printed("nm", "-D", library).splitlines():
            kind, name = line.split()[-2:]
            name, _, version = name.partition("@")
            if kind != "U":
                defined.add(name)
            elif version in versions or not (version or name.startswith(("_", "Py"))):
                names[version].add(name)
    names[""] -= defined
    return names


def write_stand_in(folder: Path) -> set[str]:
    """The libraries that it stands in for."""
    libraries = [path for path in folder.glob("*.so*") if not path.is_symlink() and path.name != STAND_IN]
    missing = missing_libraries(libraries)
    by_version = {version: sorted(names) for version, names in missing_names(libraries, missing).items() if names}
    functions = [f"int {name}(void) {{ return {NO_DEVICE}; }}" for names in by_version.values() for name in names]
    versions = [f"{version or 'none'} {{ {'; '.join(names)}; }};" for version, names in by_version.items()]
    with tempfile.NamedTemporaryFile("w", suffix=".map") as script:
        print(*versions, sep="\n", file=script, flush=True)
        command = ["cc", "-shared", "-fPIC", "-w", "-fno-builtin", "-x", "c", "-", f"-Wl,-soname,{STAND_IN}"]
        command += [f"-Wl,--version-script={script.name}", "-o", folder / STAND_IN]
        subprocess.run(command, input="\n".join(functions), text=True, check=True)
    for name in missing:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(STAND_IN)
    return missing


if __name__ == "__main__":
    print("stood in for:", *sorted(write_stand_in(Path(sys.argv[1]) / "lib")))
