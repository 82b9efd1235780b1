"""The C++ programs of examples/cpp and of the tests, against the installed package. Several are one file here, because
most of their time goes into torch's headers. tests/project/test_packaging.py builds hello_attention as users do."""

import fcntl
from pathlib import Path

import attnpack
from processes import ROOT, run_program

EXAMPLES = ROOT / "examples/cpp"
# The programs of quick tests, and those of long ones only.
UNITS = [
    [EXAMPLES / name for name in ("train", "generate", "mqa_notebook", "distributed")],
    [EXAMPLES / name for name in ("encoder_decoder", "serve_threads", "aoti")]
    + [ROOT / "tests/cpp/distributed/processes"],
]
START = """
template <class... Arguments>
int start(int (*program)(Arguments...), int argc, char** argv) {
  if constexpr (sizeof...(Arguments) == 0) return program();
  else return program(argc, argv);
}
int main(int argc, char** argv) {
  const std::string name = std::filesystem::path(argv[0]).filename().string();
"""


def one_file(folders: list[Path]) -> str:
    """The programs of the folders as one, which starts the one that its own name says."""
    includes, programs, starts = ["#include <filesystem>", "#include <string>"], [], []
    for folder in folders:
        source = folder / "main.cpp"
        lines = source.read_text().splitlines()
        includes += [line for line in lines if line.startswith("#include") and line not in includes]
        body = "\n".join("" if line.startswith("#include") else line for line in lines)
        # Only a main outside of namespaces may end without a return.
        body = body.rstrip().removesuffix("}") + "  return 0;\n}"
        programs.append(f'namespace program_{folder.name} {{\n#line 1 "{source}"\n{body}\n}}')
        starts.append(f'  if (name == "{folder.name}") return start(program_{folder.name}::main, argc, argv);\n')
    return "\n".join([*includes, *programs, START + "".join(starts) + "  return 127;\n}\n"])


def project(name: str) -> str:
    """The CMakeLists.txt of hello_attention, for a program of that name."""
    text = (EXAMPLES / "hello_attention/CMakeLists.txt").read_text()
    return (
        text.replace("hello_attention", name) + f"target_include_directories({name} PRIVATE {ROOT}/tests/cpp/support)\n"
    )


def write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:  # else it would be compiled again
        path.write_text(text)


def cpp_program(name: str) -> Path:
    """The program of that name. Each is built once a tree."""
    number, folders = next((i, each) for i, each in enumerate(UNITS) if name in [folder.name for folder in each])
    source = ROOT / f"build/cpp_programs/{number}"
    source.mkdir(parents=True, exist_ok=True)
    with (source / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write(source / "CMakeLists.txt", project("programs"))
        write(source / "main.cpp", one_file(folders))
        prefix = Path(attnpack.__file__).parent
        for command in (
            ("cmake", "-S", source, "-B", source / "build", f"-DCMAKE_PREFIX_PATH={prefix}"),
            ("cmake", "--build", source / "build"),
        ):
            process = run_program(*command)
            assert process.returncode == 0, process.text
        program = source / name
        if not program.is_symlink():
            program.symlink_to("build/programs")
    return program
