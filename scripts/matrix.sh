#!/usr/bin/env bash
# Runs tests under several releases of transformers, or of torch.
#   scripts/matrix.sh [RELEASE ...]    transformers: tests/hf, and some doors elsewhere. Such as 5.17.0, or newest;
#                                      default: those that attnpack/extras.py names, and newest
#   scripts/matrix.sh --if-newer       the newest, unless it is the one in use or no package index answers
#   scripts/matrix.sh --torch [RELEASE ...]   torch: attnpack built for it, the operators' tests and those in C++. Such as
#                                      2.11.0; default: those that attnpack/extras.py names, but for the one in use
#   scripts/matrix.sh --torch --whole [RELEASE ...]    all tests, not the operators' only
#   scripts/matrix.sh --torch --in-turn       one of these: the next one each day, of those that the index gives
# The environment that has attnpack and its tests is used (scripts/test.sh makes one). A release lies in a small
# environment on top of it, under build/matrix; one of torch takes 1.5 GB, because scripts/cuda_stand_ins.py spares it
# NVIDIA's packages. The last lines say what passed under each.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
enter_environment

# The tests of what torch's releases change, and the doors outside of tests/hf that read transformers.
OPERATORS=(tests/ops tests/cache)
# Those of a whole suite, in parts as in test.sh. Left out: the tests of the checkout itself, its style and its build.
WHOLE=("${OPERATORS[*]} tests/backend" "tests/checkpoints tests/convert tests/nn tests/distributed tests/hf" tests/tools)
DOORS=(tests/checkpoints/test_from_hf_families.py tests/nn/test_layers_by_names.py tests/tools/test_page_heads.py)

# in_use <package> <python>: its release there, without what follows a +.
in_use() { "$2" -c 'import importlib.metadata as m, sys; print(m.version(sys.argv[1]).split("+")[0])' "$1" 2>/dev/null; }

tested() { python -c 'import sys; from attnpack.extras import TESTED; print(*TESTED[sys.argv[1]])' "$1"; }

# The newest release, asked of the package index.
newest() {
  python -m pip install -q --dry-run --ignore-installed --no-deps --report - transformers 2>/dev/null |
    python -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])'
}

# python_with <package> <release>: a Python that has it.
python_with() {
  local folder=$PWD/build/matrix/$1-$2
  if [ "$(in_use "$1" python)" = "$2" ]; then
    command -v python
    return
  fi
  if [ "$(in_use "$1" "$folder/bin/python")" != "$2" ]; then
    rm -rf "$folder"
    python -m venv --without-pip "$folder"
    python - "$folder" <<'PY'
import sysconfig, sys
from pathlib import Path
site = next(Path(sys.argv[1]).glob("lib/python*/site-packages"))
(site / "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
PY
    if [ "$1" = torch ]; then
      "$folder/bin/python" -m pip install -q --no-deps "$1==$2" >&2 || return
      python scripts/cuda_stand_ins.py "$(folder_of_torch "$folder/bin/python")" >&2 || return
    else
      "$folder/bin/python" -m pip install -q "$1==$2" >&2 || return
    fi
  fi
  echo "$folder/bin/python"
}

# run_under_torch <release>: builds attnpack for it, beside the environment's own, and tests it.
run_under_torch() {
  local release=$1 python folder=$PWD/build/matrix/torch-$1 tree=$PWD/build/matrix/tree status=0 log part
  python=$(python_with torch "$release") || return
  log=$folder/tests.log
  need_build_tools
  rm -rf "$folder/wheel" "$folder/package"
  ATTNPACK_TORCH_DIR=$(folder_of_torch "$python") \
    ATTNPACK_BUILD_DIR=$tree CMAKE_ARGS="-DATTNPACK_TESTS=ON -DATTNPACK_CUDA=OFF ${CMAKE_ARGS:-}" \
    python -m pip wheel -v --no-deps --no-build-isolation -w "$folder/wheel" . >"$folder/build.log" 2>&1 ||
    { tail -30 "$folder/build.log" && return 1; }
  python -m zipfile -e "$folder"/wheel/attnpack-*.whl "$folder/package"
  OMP_WAIT_POLICY=passive ctest --test-dir "$tree" --parallel "$processes" 2>&1 | tee "$log" || status=1
  rows+=("torch $release: $(grep 'tests passed' "$log")")
  for part in "${parts[@]}"; do
    PYTHONPATH=$folder/package run_shared "$python" -m "not long" -p no:cacheprovider $part 2>&1 | tee -a "$log" || status=1
    rows+=("torch $release, ${part//tests\//}: $(tail -1 "$log" | tr -d =)")
  done
  return "$status"
}

if [ "${1:-}" = --torch ]; then
  shift
  parts=("${OPERATORS[*]}")
  if [ "${1:-}" = --whole ]; then
    parts=("${WHOLE[@]}")
    shift
  fi
  used=$(in_use torch python)
  read -ra others <<<"$(tested torch | tr ' ' '\n' | grep -vxF "$used" | tr '\n' ' ')"
  if [ "${1:-}" = --in-turn ]; then
    [ ${#others[@]} != 0 ] || stop "attnpack/extras.py names no release of torch but the one in use."
    set --
    day=$(($(date +%s) / 86400))
    for i in "${!others[@]}"; do
      release=${others[$(((day + i) % ${#others[@]}))]}
      if python_with torch "$release" >/dev/null; then
        set -- "$release"
        break
      fi
      say "torch $release cannot be had here: not tested"
    done
    [ $# != 0 ] || exit 0
  elif [ $# = 0 ]; then
    set -- "${others[@]}"
  fi
  status=0 rows=()
  for release in "$@"; do
    say "torch $release"
    run_under_torch "$release" || status=1
  done
  say "matrix"
  printf '%s\n' "${rows[@]}"
  exit "$status"
fi

if [ "${1:-}" = --if-newer ]; then
  used=$(in_use transformers python)
  found=$(newest) || found=$used
  if [ "$found" = "$used" ]; then
    say "transformers $used is in use, and no newer one is known"
    exit
  fi
  set -- "$found"
elif [ $# = 0 ]; then
  set -- $(tested transformers) newest
fi
# An editable install is a line in a .pth file, which the small environments do not read.
PYTHONPATH=$(python -c 'from pathlib import Path; import attnpack; print(Path(attnpack.__file__).parents[1])')
export PYTHONPATH
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0 rows=() seen=" "
for release in "$@"; do
  if [ "$release" = newest ]; then release=$(newest) || stop "the package index does not name the newest transformers"; fi
  [[ "$seen" == *" $release "* ]] && continue
  seen+="$release "
  say "transformers $release"
  python=$(python_with transformers "$release")
  run_shared "$python" -m "not long" -p no:cacheprovider tests/hf "${DOORS[@]}" 2>&1 | tee "$log" || status=1
  rows+=("transformers $release: $(tail -1 "$log" | tr -d =)")
done
say "matrix"
printf '%s\n' "${rows[@]}"
exit "$status"
