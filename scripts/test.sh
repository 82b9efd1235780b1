#!/usr/bin/env bash
# Sets up, builds and runs every test: pytest (with the C++ consumer and the README's snippets) and ctest.
#   --long       run the tests that take minutes too
#   --torch      test the operators under another supported release of torch too, the next one each day; on a machine
#                that has taken more than 45 minutes for the rest, say that this was left out
#   --sanitize   run only the kernels, under the address, undefined-behaviour and thread sanitizers
# Further arguments go to pytest. Skips are printed; a skip that tests/allowed_skips.txt does not list is a failure.
# Style and the pages come first, because they take seconds and fail most often. The last lines say how long each part took.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh

if [ "${1:-}" = --sanitize ]; then
  need_compiler
  exec bash scripts/sanitize.sh
fi
marks=(-m "not long") other_torch=
while true; do
  case "${1:-}" in
    --long)
      marks=()
      export ATTNPACK_LONG_TESTS=1  # for ctest
      ;;
    --torch) other_torch=yes ;;
    *) break ;;
  esac
  shift
done

reports=build/reports
parts=()
begin=$SECONDS
# end_part <name>: notes the seconds since the last part ended.
end_part() {
  parts+=("$(printf '%-22s %5d s' "$1" $((SECONDS - begin)))")
  begin=$SECONDS
}

need_compiler
need_test_programs
set_up test
end_part "set-up"

say style
python -m pytest -q --noconftest tests/project/test_{style,arrows,docs}.py </dev/null
end_part style

build -DATTNPACK_TESTS=ON
end_part build

rm -rf "$reports"
mkdir -p "$reports"

status=0
say ctest
OMP_WAIT_POLICY=passive ctest --test-dir build --parallel "$processes" --output-on-failure --output-junit "$PWD/$reports/ctest.xml" || status=1
end_part ctest
# run_pytest <name of the part> [argument of pytest]
run_pytest() {
  local name=$1
  shift
  say "pytest: $name"
  run_shared python -rs "${marks[@]}" --durations 80 --durations-min 1 \
    --junitxml "$reports/pytest-${name// /-}.xml" "$@" || status=1
  end_part "pytest: $name"
}
# In three parts, because processes grow: compiled graphs, models and imported packages stay. Files that take long come
# early in a part, so that both processes end at about the same time.
if [[ " $*" == *" tests/"* ]]; then
  run_pytest "as given" "$@"
else
  run_pytest operators tests/{cuda,ops,cache,backend} "$@"
  run_pytest modules tests/{checkpoints,convert,nn,distributed,hf} "$@"
  run_pytest "tools and project" tests/{project,tools} "$@"
  bash scripts/matrix.sh --if-newer || status=1
  end_part "newest transformers"
fi
if [ -n "$other_torch" ] && ((SECONDS > 45 * 60)); then
  parts+=("another torch: left out after $((SECONDS / 60)) minutes; bash scripts/matrix.sh --torch --in-turn runs it")
elif [ -n "$other_torch" ]; then
  bash scripts/matrix.sh --torch --in-turn || status=1
  end_part "another torch"
fi
say summary
python scripts/summary.py "$reports"/*.xml || status=1
printf '%s\n' "${parts[@]}"
exit "$status"
