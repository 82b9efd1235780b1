#!/usr/bin/env bash
# Cross-compiles the kernels for ARM, and runs them under emulation on odd-sized problems (tests/sanitize/kernels.cpp).
# Needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user).   check_arm.sh [problems]
set -euo pipefail
cd "$(dirname "$0")/.."
out=build/arm
cmake -S tests/sanitize -B "$out" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static -DCMAKE_CXX_FLAGS=-Wall
cmake --build "$out" --parallel "$(nproc)"
qemu-aarch64 "$out/kernels" "${1:-40}"
