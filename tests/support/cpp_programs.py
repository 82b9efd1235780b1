"""The C++ programs of examples/cpp and of the tests, built by their own CMakeLists.txt, which find the installed
package. They are one project with one precompiled header. tests/project/test_packaging.py builds hello_attention as
users do."""

import fcntl
from pathlib import Path

import attnpack
from processes import ROOT, run_program

SOURCES = [
    *(
        ROOT / "examples/cpp" / name
        for name in ("train", "generate", "mqa_notebook", "encoder_decoder", "serve_threads")
    ),
    *(ROOT / "examples/cpp" / name for name in ("distributed", "aoti")),
    ROOT / "tests/cpp/distributed/processes",
]


def superbuild() -> str:
    """All of them in one project. They share one precompiled header: most of their time goes into torch's headers."""
    lines = ["cmake_minimum_required(VERSION 3.22)", "project(programs LANGUAGES CXX)"]
    for i, source in enumerate(SOURCES):
        header = f"REUSE_FROM {SOURCES[0].name}" if i else "PRIVATE <attnpack/attnpack.h>"
        lines.append(f'add_subdirectory("{source}" {source.name})')
        lines.append(f"target_precompile_headers({source.name} {header})")
    return "\n".join(lines) + "\n"


def cpp_program(name: str) -> Path:
    """The program of that name. Each is built once a tree."""
    folder = ROOT / "build/cpp_programs"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        source = folder / "source/CMakeLists.txt"
        source.parent.mkdir(exist_ok=True)
        if not source.exists() or source.read_text() != superbuild():
            source.write_text(superbuild())
        prefix = Path(attnpack.__file__).parent
        for command in (
            ("cmake", "-S", source.parent, "-B", folder, f"-DCMAKE_PREFIX_PATH={prefix}"),
            ("cmake", "--build", folder, "--target", name, "--parallel", "2"),
        ):
            process = run_program(*command)
            assert process.returncode == 0, process.text
    return folder / name / name
