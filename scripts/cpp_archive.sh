#!/usr/bin/env bash
# Makes dist/attnpack-*-cpp-*.tar.gz from the wheel in dist: what C and C++ programs need, without Python's files.
#   scripts/cpp_archive.sh [WHEEL]
# Unpacked, the folder attnpack/ is the prefix of attnpack_kernels, and attnpack/torch-X.Y that of attnpack for a LibTorch
# of that release: -DATTNPACK_TORCH_DIR names it.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
enter_environment
wheel=${1:-$(ls dist/attnpack-*.whl 2>/dev/null || true)}
[ -f "$wheel" ] || stop "no wheel in dist: make one (scripts/wheel.sh), or name one."
made=$(python scripts/wheel_parts.py archive dist "$wheel")
say "$made"
