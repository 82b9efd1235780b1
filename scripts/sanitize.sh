#!/usr/bin/env bash
# The kernels, which need nothing of torch, under AddressSanitizer with UndefinedBehaviorSanitizer, then under
# ThreadSanitizer; buffers end at protected pages. Minutes.   sanitize.sh [problems for each instruction set]
set -euo pipefail
cd "$(dirname "$0")/.."
out=build/sanitize
mkdir -p "$out/include"
ln -sfn "$PWD/csrc" "$out/include/attnpack"
declare -A flags=([baseline]="")
if [ "$(uname -m)" = x86_64 ]; then
  flags+=([avx2]="-mavx2 -mfma -mf16c"
    [avx512]="-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c -mprefer-vector-width=512")
fi
common="-std=c++20 -O1 -g -fno-math-errno -fno-trapping-math -Wno-psabi -Wno-uninitialized -Wno-maybe-uninitialized"
common+=" -Wno-aggressive-loop-optimizations -I$out/include"
for kind in address,undefined thread; do
  objects=()
  jobs=()
  for isa in "${!flags[@]}"; do
    for source in csrc/ops/cpu/isa/*.cpp; do
      object=$out/$kind.$isa.$(basename "$source" .cpp).o
      objects+=("$object")
      # shellcheck disable=SC2086
      jobs+=("${CXX:-c++} $common -fsanitize=$kind -fno-sanitize-recover=all ${flags[$isa]} -DATTNPACK_ISA=$isa -c $source -o $object")
    done
  done
  echo "== $kind: compiling ${#jobs[@]} files"
  printf '%s\0' "${jobs[@]}" | xargs -0 -P "$(nproc)" -I{} sh -c '{}'
  # shellcheck disable=SC2086
  "${CXX:-c++}" $common -fsanitize=$kind -fno-sanitize-recover=all tests/sanitize/kernels.cpp "${objects[@]}" -lpthread \
    -o "$out/kernels.$kind"
  "$out/kernels.$kind" "${1:-100}"
done
