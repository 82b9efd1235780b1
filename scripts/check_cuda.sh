#!/usr/bin/env bash
# Compiles every CUDA kernel for sm_80, sm_90a and, if nvcc has them, sm_100 and sm_120, with warnings as errors. Prints registers,
# shared memory and spilled bytes of each kernel, and fails if a kernel spills more bytes than the limit. Needs nvcc
# (12.0 or newer) and Python, no GPU and no torch; takes minutes on two cores.
#   check_cuda.sh [bytes [architecture ...]]
# The environment variable FILES, a pattern of file names, chooses the sources to compile.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
limit=${1:-256}
command -v nvcc >/dev/null || stop "no nvcc found; install a CUDA toolkit (12.0 or newer) and put its bin folder on the PATH."
need_compiler
python=$(find_python) || stop "no Python >= 3.11 found; install one (Debian, Ubuntu: apt-get install python3)."

architectures=("${@:2}")
if [ ${#architectures[@]} = 0 ]; then
  architectures=(80 90a)
  known=$(nvcc --list-gpu-arch)
  for architecture in 100 120; do
    if grep -qx "compute_$architecture" <<<"$known"; then architectures+=("$architecture"); fi
  done
fi
mkdir -p build
out=$(mktemp -d build/check_cuda.XXXXXX)
trap 'rm -rf "$out"' EXIT

compile() { # <architecture> <source> [flags of a part of it]
  local name
  name=$(basename "$2" .cu)${3//[^a-zA-Z0-9]/_}.sm_$1
  # Not -arch: for sm_90a nvcc would also write PTX of compute_90, which has none of its instructions.
  nvcc -std=c++20 -O3 -gencode "arch=compute_$1,code=sm_$1" -Werror all-warnings -Xcompiler -Wall,-Werror,-fPIC -Xptxas -v \
    ${CXX:+-ccbin "$CXX"} ${3:-} -I csrc -c "$2" -o "$out/$name.o" >"$out/$name.log" 2>&1 ||
    { cat "$out/$name.log"; return 1; }
}
export -f compile
export out
say "$(nvcc --version | grep release), sm_${architectures[*]}"
for architecture in "${architectures[@]}"; do
  sources=(csrc/attnpack/ops/cuda/kernels/${FILES:-*.cu})
  if [ "$architecture" = 90a ]; then sources+=(csrc/attnpack/ops/cuda/kernels/sm90/${FILES:-*.cu}); fi
  for source in "${sources[@]}"; do
    [ -e "$source" ] || continue
    parts=$(sed -n 's|^// part: ||p' "$source") # as cmake/Cuda.cmake compiles it
    while read -r part; do printf '%s\0%s\0%s\0' "$architecture" "$source" "$part"; done <<<"$parts"
  done
done | xargs -0 -n 3 -P "$(nproc)" bash -c 'compile "$@"' compile || stop "a kernel did not compile; nvcc's words stand above."
"$python" scripts/cuda_resources.py "$limit" "$out"/*.log
