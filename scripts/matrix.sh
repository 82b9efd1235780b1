#!/usr/bin/env bash
# Runs what stands on transformers under several of its releases: tests/hf, and some doors elsewhere.
#   scripts/matrix.sh [RELEASE ...]    such as 5.17.0, or newest; default: those that attnpack/extras.py names, and newest
#   scripts/matrix.sh --if-newer       the newest, unless it is the one in use or no package index answers
# The environment that has attnpack and its tests is used (scripts/test.sh makes one). A release lies in a small
# environment on top of it, under build/matrix. The last lines say what passed under each.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
enter_environment

# The doors outside of tests/hf that read transformers.
DOORS=(tests/checkpoints/test_from_hf_families.py tests/nn/test_layers_by_names.py tests/tools/test_page_heads.py)

in_use() { "$1" -c 'import importlib.metadata as m; print(m.version("transformers"))' 2>/dev/null; }

# The newest release, asked of the package index.
newest() {
  python -m pip install -q --dry-run --ignore-installed --no-deps --report - transformers 2>/dev/null |
    python -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])'
}

# python_with <release>: a Python that has it.
python_with() {
  local folder=$PWD/build/matrix/$1
  if [ "$(in_use python)" = "$1" ]; then
    command -v python
    return
  fi
  if [ "$(in_use "$folder/bin/python")" != "$1" ]; then
    rm -rf "$folder"
    python -m venv --without-pip "$folder"
    python - "$folder" <<'PY'
import sysconfig, sys
from pathlib import Path
site = next(Path(sys.argv[1]).glob("lib/python*/site-packages"))
(site / "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
PY
    "$folder/bin/python" -m pip install -q "transformers==$1" >&2
  fi
  echo "$folder/bin/python"
}

if [ "${1:-}" = --if-newer ]; then
  used=$(in_use python)
  found=$(newest) || found=$used
  if [ "$found" = "$used" ]; then
    say "transformers $used is in use, and no newer one is known"
    exit
  fi
  set -- "$found"
elif [ $# = 0 ]; then
  set -- $(python -c 'from attnpack.extras import TESTED; print(*TESTED["transformers"])') newest
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
  python=$(python_with "$release")
  run_shared "$python" -m "not long" -p no:cacheprovider tests/hf "${DOORS[@]}" 2>&1 | tee "$log" || status=1
  rows+=("transformers $release: $(tail -1 "$log" | tr -d =)")
done
say "matrix"
printf '%s\n' "${rows[@]}"
exit "$status"
