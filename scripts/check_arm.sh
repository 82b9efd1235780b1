#!/usr/bin/env bash
# Cross-compiles the kernels for ARM, and runs them under emulation on odd-sized problems (tests/sanitize/kernels.cpp).
# Then compares bits with x86 where both add in the same order: the baselines, which have vectors of 16 bytes, without
# fused multiply-adds, which x86's baseline lacks; and stored weights of avx2 and neon_dotprod.
# Needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user).   check_arm.sh [problems]
set -euo pipefail
cd "$(dirname "$0")/.."
problems=${1:-40}
arm=(-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
     -DCMAKE_EXE_LINKER_FLAGS=-static)

# build_kernels <folder> <argument of CMake> ...
build_kernels() {
  local out=build/arm/$1
  mkdir -p "$out"
  cmake -S tests/sanitize -B "$out" "${@:2}" >"$out.log" || { cat "$out.log"; exit 1; }
  cmake --build "$out" --parallel "$(nproc)" >>"$out.log" || { cat "$out.log"; exit 1; }
}

build_kernels all "${arm[@]}" -DCMAKE_CXX_FLAGS=-Wall -DATTNPACK_ISA_NAMES=all
qemu-aarch64 -cpu max build/arm/all/kernels "$problems" | tee build/arm/all.txt

build_kernels unfused "${arm[@]}" -DCMAKE_CXX_FLAGS=-ffp-contract=off -DATTNPACK_ISA_NAMES=baseline
build_kernels x86 -DATTNPACK_EMULATE_PAIRS=OFF "-DATTNPACK_ISA_NAMES=baseline;avx2"
qemu-aarch64 -cpu max build/arm/unfused/kernels "$problems" | tee build/arm/unfused.txt
build/arm/x86/kernels "$problems" | tee build/arm/x86.txt

# bits_of <output> <instruction set> <kind of call>
bits_of() { sed -n "s/^$2: .* $3 \([0-9a-f]*\).*/\1/p" "build/arm/$1.txt"; }
# same <kind> <output> <instruction set> <output> <instruction set>
same() {
  local a b
  a=$(bits_of "$2" "$3" "$1") b=$(bits_of "$4" "$5" "$1")
  [ -n "$a" ] && [ "$a" = "$b" ] || { echo "$1: $3 of $2 has other bits than $5 of $4"; status=1; return; }
  echo "$1: $3 of $2 has the bits of $5 of $4"
}
status=0
same attention unfused baseline x86 baseline
same layers unfused baseline x86 baseline
same stored all neon_dotprod x86 avx2
exit "$status"
