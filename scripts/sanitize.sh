#!/usr/bin/env bash
# Runs the kernels, which do not need torch, under AddressSanitizer with UndefinedBehaviorSanitizer, and then under
# ThreadSanitizer. Buffers end at protected pages. Takes minutes.   sanitize.sh [problems for each instruction set]
set -euo pipefail
cd "$(dirname "$0")/.."
for kind in address,undefined thread; do
  out=build/sanitize/$kind
  mkdir -p build/sanitize
  cmake -S tests/sanitize -B "$out" -DCMAKE_BUILD_TYPE=None -DATTNPACK_KERNEL_OPTIMISATION=-O1 \
    -DCMAKE_CXX_FLAGS="-O1 -g -fsanitize=$kind -fno-sanitize-recover=all" >"$out.log" 2>&1 || { cat "$out.log"; exit 1; }
  cmake --build "$out" --parallel "$(nproc)"
  "$out/kernels" "${1:-100}"
done
