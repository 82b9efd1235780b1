#!/usr/bin/env bash
# Sets up, builds and runs every test: pytest (with the C++ consumer and the README's snippets) and ctest.
#   --long       run the tests that take minutes too
#   --sanitize   run the kernels alone, under the address, undefined-behaviour and thread sanitizers
# Further arguments go to pytest. Skips are printed; a skip that tests/allowed_skips.txt does not list is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh

if [ "${1:-}" = --sanitize ]; then
  need_compiler
  exec bash scripts/sanitize.sh
fi
marks=(-m "not long")
if [ "${1:-}" = --long ]; then
  marks=()
  shift
fi
need_compiler
need_test_programs
set_up test -DATTNPACK_TESTS=ON

reports=build/reports
rm -rf "$reports"
mkdir -p "$reports"

# Two processes share the files of tests. Each takes up to 2.1 GB.
# Their threads sleep while they wait: threads that spin take the cores of the other process, and tests last ten times.
export OMP_WAIT_POLICY=passive
processes=$(($(nproc) > 1 ? 2 : 1))
status=0
say ctest
ctest --test-dir build --output-on-failure --output-junit "$PWD/$reports/ctest.xml" || status=1
say pytest
python -m pytest -q -rs -n "$processes" --dist loadfile "${marks[@]}" --junitxml "$reports/pytest.xml" "$@" </dev/null || status=1
say summary
python scripts/summary.py "$reports/ctest.xml" "$reports/pytest.xml" || status=1
exit "$status"
