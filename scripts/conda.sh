#!/usr/bin/env bash
# Makes dist/conda/.../attnpack-*.conda from conda/recipe.yaml, one per Python of conda/variants.yaml, by rattler-build
# of the package index. The packages that the recipe names come from conda-forge.
#   scripts/conda.sh --render-only    only evaluates the recipe: seconds, and without conda-forge
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
enter_environment
tools=$PWD/build/conda
[ -d "$tools/rattler_build" ] || python -m pip install -q --no-deps --target "$tools" py-rattler-build
ATTNPACK_VERSION=$(sed -n 's/.*define ATTNPACK_VERSION "\(.*\)"/\1/p' csrc/attnpack/version.h)
export ATTNPACK_VERSION
PYTHONPATH=$tools python -W ignore::DeprecationWarning - "${1:-}" <<'PY'
import sys
import rattler_build
only = sys.argv[1] == "--render-only"
rattler_build.build_recipes(["conda/recipe.yaml"], channel=["conda-forge"], output_dir="dist/conda", render_only=only)
PY
