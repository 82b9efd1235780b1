"""Mutation testing: makes the mistakes that tests/mutants/*.toml lists, one at a time, and checks that tests notice.

    python scripts/mutants.py [--list] [--only NAME ...] [--jobs N]

A mutant is a piece of a source file with a mark «original → mistake», and the tests that must fail with the mistake:
they kill the mutant. If no test can see the mistake, `argued` says why. The C++ library is built once, in a copy of the
tree under build/mutants. It contains all mistakes as switches, and an environment variable turns one on. So does a
program per C++ test file that runs CUDA kernels on the emulated block. A Python mutant gets its own copy of the tree.
The exit code is 0 if every mutant is killed or argued.
"""

import argparse
import importlib.util
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LISTS = ROOT / "tests" / "mutants"
COPY = ROOT / "build" / "mutants"
MARK = re.compile("«(.*) → (.*)»", re.DOTALL)
SWITCH = "attnpack_mutant"
# The library reads the environment when it is loaded, into a variable, so that loops with a switch stay fast.
SWITCH_SOURCE = f"""#include <cstdlib>
static const char* wanted = std::getenv("ATTNPACK_MUTANT");
extern "C" const unsigned {SWITCH};
const unsigned {SWITCH} = wanted ? std::strtoul(wanted, nullptr, 10) : 0;
"""
MOST_SECONDS = 1800  # a mutant that hangs is killed
# Forked from one process that has imported the slow packages, but not attnpack.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["pytest", "torch", "hypothesis", "transformers.masking_utils"])


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    text: str  # with one «original → mistake»
    tests: tuple[str, ...]  # below tests/, files or test ids; of C++ FILE or FILE::CASE
    argued: str = ""  # why no test can kill it

    @property
    def number(self) -> int:
        """Number of the switch. It depends only on the name, so that a new mutant does not rebuild the others."""
        return zlib.crc32(self.name.encode())

    @property
    def in_cpp(self) -> bool:
        return self.file.startswith("csrc/")

    def find_piece(self, source: str) -> tuple[int, int, str]:
        """(begin of the original in the text of its file, its end, the mistake)."""
        marks = MARK.search(self.text)
        if marks is None:
            raise ValueError(f"{self.name}: its text marks no piece as «original → mistake»")
        original, mistake = marks.groups()
        is_expression = self.in_cpp and not is_statement(original)
        if is_expression and not (is_operand(original) and is_operand(mistake)):
            raise ValueError(f"{self.name}: marks no expression: mark operators with their operands, or a statement")
        if is_expression and (is_list(original) or is_list(mistake)):
            raise ValueError(f"{self.name}: marks expressions with a comma between them: mark the call around them")
        before, after = self.text[: marks.start()], self.text[marks.end() :]
        count = source.count(before + original + after)
        if count != 1:
            raise ValueError(f"{self.name}: its text is found {count} times in {self.file}, wants 1: change the list")
        begin = source.index(before + original + after) + len(before)
        return begin, begin + len(original), mistake

    def with_switch(self, original: str, mistake: str) -> str:
        """C++ code with original and mistake, of which the switch chooses one: statements with `if`, expressions with
        `?`."""
        on = f"{SWITCH} == {self.number}u"
        if is_statement(original):
            return f"if ({on}) {{ {mistake} }} else {{ {original} }}"
        return f"({on} ? ({mistake}) : ({original}))"


def is_statement(code: str) -> bool:
    return code.rstrip().endswith((";", "}"))


def is_operand(code: str) -> bool:
    """Whether code can be an expression: it is not empty, and no operator at its ends lacks an operand."""
    no_first = r"^\s*($|[<>=%/|^?.,]|[-+*&!]=|&&|:(?!:))"
    no_last = r"([<=*/%|^&?:!~.,]|(?<![\w>])>|(?<!\+)\+|(?<!-)-)\s*$"  # f<int>, i++ and i-- are whole
    return re.search(f"{no_first}|{no_last}", code) is None


def is_list(code: str) -> bool:
    """Whether a comma stands outside of all brackets: between ? and : it would be C++'s operator, which drops the
    first."""
    code, count = re.sub(r"<[\w:, ]*>", "", code), 1
    while count:
        code, count = re.subn(r"\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}", "", code)
    return "," in code


def read_lists() -> list[Mutant]:
    entries = [entry for file in sorted(LISTS.glob("*.toml")) for entry in tomllib.loads(file.read_text())["mutant"]]
    mutants = [Mutant(**entry | {"tests": tuple(entry["tests"])}) for entry in entries]
    if len({mutant.number for mutant in mutants}) < len(mutants):
        raise ValueError("two mutants have one name, or names of one checksum: rename one")
    return mutants


def with_switches(source: str, mutants: Iterable[Mutant]) -> str:
    """The text of a C++ file with the mistakes of all its mutants as switches."""
    pieces: dict[tuple[int, int], str] = {}
    for mutant in mutants:
        begin, end, mistake = mutant.find_piece(source)
        pieces[begin, end] = mutant.with_switch(pieces.get((begin, end), source[begin:end]), mistake)
    next_begin = len(source)
    for begin, end in sorted(pieces, reverse=True):
        if end > next_begin:
            raise ValueError(f"mutants overlap: mark the same piece in each, {source[begin:end]!r}")
        source, next_begin = source[:begin] + pieces[begin, end] + source[end:], begin
    return f'extern "C" const unsigned {SWITCH};\n' + source


def copy_tree(mutants: list[Mutant]) -> None:
    """Copies the repository's files to COPY, C++ with switches. A file that has not changed keeps its time stamp, so
    that it is not rebuilt."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    contents = {name: (ROOT / name).read_bytes() for name in listed.split("\0") if (ROOT / name).is_file()}
    for file in {mutant.file for mutant in mutants if mutant.in_cpp}:
        of_file = [mutant for mutant in mutants if mutant.file == file]
        contents[file] = with_switches((ROOT / file).read_text(), of_file).encode()
    for folder in ("kernels", "ops"):  # libattnpack_kernels stands alone too, and gives no names but its own
        contents[f"csrc/attnpack/{folder}/mutant.cpp"] = SWITCH_SOURCE.encode()
    for name, content in contents.items():
        target = COPY / name
        if not target.is_file() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def is_program(test: str) -> bool:
    return test.partition("::")[0].endswith(".cpp")


def program_of(test: str) -> Path:
    return COPY / Path(test.partition("::")[0]).stem


def build_programs(tests: Iterable[str], jobs: int) -> None:
    """Builds the C++ tests that run the CUDA kernels' source: headers only, so no library is needed."""
    torch = Path(importlib.util.find_spec("torch").origin).parent  # catch.h includes a header of it
    files = {program_of(test): f"tests/{test.partition('::')[0]}" for test in tests if is_program(test)}

    def build(program: Path) -> str:
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-w", "-I", "csrc", "-I", "tests/cpp/support"]
        command += ["-isystem", f"{torch}/include", "tests/cpp/main.cpp", files[program], "-o", str(program)]
        command += ["csrc/attnpack/kernels/mutant.cpp", f"-L{torch}/lib", "-lc10", f"-Wl,-rpath,{torch}/lib"]
        return subprocess.run(command, cwd=COPY, capture_output=True, text=True).stderr

    with ThreadPoolExecutor(jobs) as pool:
        for errors in filter(None, pool.map(build, files)):
            sys.exit(f"the mutants do not build:\n{errors[-4000:]}")


def build_library(jobs: int) -> None:
    """Builds the C++ library of COPY. It is hardly optimised, because the time of the build matters most."""
    configure = ["cmake", "-S", COPY, "-B", COPY / "build", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_INSTALL_PREFIX={COPY / 'python/attnpack'}"]
    configure += ["-DATTNPACK_CUDA=OFF"]  # nvcc's device code cannot read the switch
    # The kernels with FMAs, as the limits of tests expect.
    kernels = "-O1;-fexpensive-optimizations"
    configure += ["-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG", f"-DATTNPACK_KERNEL_OPTIMISATION={kernels}"]
    build = ["cmake", "--build", COPY / "build", "--target", "install", "--parallel", jobs, "--", "-k", 0]
    for command in (configure, build):  # -k 0: one build names all mutants that do not compile
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if done.returncode:
            errors = "\n".join(line for line in done.stdout.splitlines() if " error: " in line)
            sys.exit(f"the mutants do not build:\n{errors or done.stdout[-4000:]}{done.stderr[-2000:]}")


def tree_of(mutant: Mutant) -> Path:
    """A folder like COPY for a Python mutant: links to the files of COPY, except for the changed file."""
    folder = COPY / "trees" / str(mutant.number)
    shutil.rmtree(folder, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "build", "trees", "*.log")
    shutil.copytree(COPY, folder, copy_function=os.link, ignore=ignored)
    (folder / "build").symlink_to(COPY / "build")
    source = (ROOT / mutant.file).read_text()
    begin, end, mistake = mutant.find_piece(source)
    changed = source[:begin] + mistake + source[end:]
    compile(changed, mutant.file, "exec")
    (folder / mutant.file).unlink()
    (folder / mutant.file).write_text(changed)
    return folder


def run_pytest(arguments: list[str], tree: Path, number: int, log: Path) -> None:
    """Runs pytest in a process of its own; the exit code of the process is that of pytest."""
    os.environ |= {"PYTHONPATH": str(tree / "python"), "ATTNPACK_MUTANT": str(number)}
    sys.path.insert(0, str(tree / "python"))
    os.chdir(tree)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import pytest

    options = ["-q", "--tb=no", "-p", "no:cacheprovider"]
    sys.exit(int(pytest.main([*options, *arguments], plugins=[ShortOrNamed(arguments)])))


class ShortOrNamed:
    """A plugin of pytest: of a file no long tests; one that is named may be long."""

    def __init__(self, arguments: list[str]) -> None:
        self.named = tuple(argument for argument in arguments if "::" in argument)

    def pytest_collection_modifyitems(self, items: list) -> None:
        items[:] = [item for item in items if not item.get_closest_marker("long") or item.nodeid.startswith(self.named)]


def run_program(test: str, number: int) -> int:
    case = test.partition("::")[2].replace(",", "\\,")  # a comma would begin another name
    command = [program_of(test), "--abort", *filter(None, [case])]
    variables = os.environ | {"ATTNPACK_MUTANT": str(number)}
    try:
        return subprocess.run(command, env=variables, capture_output=True, timeout=MOST_SECONDS).returncode
    except subprocess.TimeoutExpired:
        return 1


def run_tests(tests: Iterable[str], tree: Path, *options: str, number: int = 0) -> tuple[int | None, str]:
    """(pytest's exit code, its output); the code is negative if pytest crashed and None if it hung."""
    tests = list(tests)
    for test in filter(is_program, tests):
        if code := run_program(test, number):
            return code, f"FAILED {test}"
    arguments = [*options, *(f"tests/{test}" for test in tests if not is_program(test))]
    if len(arguments) == len(options):
        return 0, ""
    log = COPY / f"{number}_{zlib.crc32(' '.join(arguments).encode())}.log"
    process = PROCESSES.Process(target=run_pytest, args=(arguments, tree, number, log))
    process.start()
    process.join(MOST_SECONDS)
    code = process.exitcode
    process.kill()
    return code, log.read_text()


def check_without_mutant(tests: list[str], jobs: int) -> None:
    """Stops the program if one of the tests fails without a mistake: it would kill any mutant."""
    files = sorted({test.partition("::")[0] for test in tests})
    parts = [[test for test in tests if files.index(test.partition("::")[0]) % jobs == i] for i in range(jobs)]
    with ThreadPoolExecutor(jobs) as pool:
        for code, printed in pool.map(lambda part: run_tests(part, COPY), filter(None, parts)):
            if code:
                sys.exit(f"the tests fail without a mutant:\n{printed[-4000:]}")


def find_killer(mutant: Mutant) -> str | None:
    """The test, crash or time limit that noticed the mistake; None if the mutant survived."""
    tree = COPY if mutant.in_cpp else tree_of(mutant)
    code, printed = run_tests(mutant.tests, tree, "-x", number=mutant.number)
    if code in (4, 5):
        raise ValueError(f"{mutant.name}: pytest runs none of {', '.join(mutant.tests)}:\n{printed[-500:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)
    return None if code == 0 else failed[1] if failed else f"exit code {code}"


def run_mutants(mutants: list[Mutant], jobs: int) -> Iterator[str]:
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(find_killer, mutant): mutant for mutant in mutants}
        for done in as_completed(running):  # one that hangs holds up no line of the others
            mutant, found = running[done], done.result()
            verdict = "killed" if found else "argued" if mutant.argued else "survived"
            print(f"{verdict:8}  {mutant.name}: {found or mutant.argued or mutant.file}", flush=True)
            yield verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants; a part of a name serves too")
    parser.add_argument("--jobs", type=int, default=2, help="of the build, and mutants at a time (default 2)")
    args = parser.parse_args()
    mutants = read_lists()
    chosen = [mutant for mutant in mutants if not args.only or any(name in mutant.name for name in args.only)]
    if args.list or not chosen:
        print(*(f"{mutant.name}: {mutant.file}" for mutant in chosen), sep="\n")
        return not chosen
    tests = sorted({test for mutant in chosen for test in mutant.tests})
    copy_tree(mutants)
    build_programs(tests, args.jobs)
    if not all(map(is_program, tests)):
        build_library(args.jobs)
    check_without_mutant(tests, args.jobs)
    found = list(run_mutants(chosen, args.jobs))
    killed, argued = found.count("killed"), found.count("argued")
    print(f"killed {killed} of {len(found)} ({100 * killed // len(found)}%), argued {argued}")
    return int(killed + argued < len(found))


if __name__ == "__main__":
    sys.exit(main())
