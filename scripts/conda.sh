#!/usr/bin/env bash
# Makes dist/conda/.../attnpack-*.conda from conda/recipe.yaml. Needs rattler-build, and conda's channels.
#   scripts/conda.sh [argument of rattler-build build]    such as --render-only
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
command -v rattler-build >/dev/null || stop "no rattler-build found: install it (conda install rattler-build)."
ATTNPACK_VERSION=$(sed -n 's/.*define ATTNPACK_VERSION "\(.*\)"/\1/p' csrc/attnpack/version.h)
export ATTNPACK_VERSION
rattler-build build --recipe conda/recipe.yaml --output-dir dist/conda "$@"
