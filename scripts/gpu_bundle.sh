#!/usr/bin/env bash
# Builds beforehand what a machine with a GPU of Hopper's class needs, so that nvcc takes none of its minutes:
# libattnpack_cuda.so, once per variant, packed into .gpu/NAME.tar.xz for scripts/gpu_session.sh. Needs nvcc and
# build/libattnpack.so, of which only the name is kept. It needs no GPU and no CUDA torch.
#   gpu_bundle.sh [NAME=REVISION[:FLAG ...] ...]      default: base=.
# REVISION: of git, or . for the files as they are. FLAG: for nvcc, such as -DNAME=1.
# HOST_PYTHON: a Python with the device's torch. Then the host side is built for it too, into .gpu/host.tar.xz.
# ARCHITECTURES: default "90"; the kernels of sm90/ are always for sm_90a.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
command -v nvcc >/dev/null || stop "no nvcc found; install a CUDA toolkit (12.0 or newer) and put its bin folder on the PATH."
library=build/libattnpack.so
[ -e "$library" ] || stop "no $library: build attnpack first (python setup.py build_ext --inplace)."
work=build/gpu_bundle
mkdir -p .gpu "$work"

compile() { # <object> <architectures> <flags> <source>
  local flags=()
  for architecture in $2; do flags+=(-gencode "arch=compute_$architecture,code=sm_$architecture"); done
  # shellcheck disable=SC2086
  nvcc -std=c++20 -O3 --threads 0 -Xcompiler -fPIC ${CXX:+-ccbin "$CXX"} "${flags[@]}" $3 -I "$root/csrc" -c "$4" -o "$1"
}
export -f compile

build_variant() { # <name> <revision> <flags>
  export root=$work/$1
  rm -rf "$root"
  mkdir -p "$root/objects"
  if [ "$2" = . ]; then cp -r csrc "$root"; else git archive "$2" csrc | tar x -C "$root"; fi
  local kernels=$root/csrc/attnpack/ops/cuda/kernels number=0 source part
  for source in "$kernels"/*.cu "$kernels"/sm90/*.cu; do
    case $source in */without_sm90.cu) continue ;; */sm90/*) architectures=90a ;; *) architectures=${ARCHITECTURES:-90} ;; esac
    while read -r part; do # the parts of a file that takes minutes, as cmake/Cuda.cmake compiles them
      printf '%s\0' "$root/objects/$((number++)).o" "$architectures" "$3 $part" "$source"
    done <<<"$(sed -n 's|^// part: ||p' "$source")"
  done | xargs -0 -n 4 -P "$(nproc)" bash -c 'compile "$@"' compile || stop "a kernel of $1 did not compile; nvcc's words stand above."
  nvcc -shared -cudart static -o "$root/libattnpack_cuda.so" "$root"/objects/*.o "$library" \
    -Xlinker --allow-shlib-undefined -Xlinker '-rpath=$ORIGIN'
  tar cJf ".gpu/$1.tar.xz" -C "$work" "$1/libattnpack_cuda.so"
  say "$1: $(du -h ".gpu/$1.tar.xz" | cut -f 1) in .gpu/$1.tar.xz"
}

if [ $# = 0 ]; then set -- base=.; fi
for variant in "$@"; do
  [[ $variant =~ ^([a-zA-Z0-9_]+)=([^:]+)(:(.*))?$ ]] || stop "'$variant' is no variant: NAME=REVISION[:FLAG ...]."
  say "${BASH_REMATCH[1]}: ${BASH_REMATCH[2]} ${BASH_REMATCH[4]}"
  build_variant "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}" "${BASH_REMATCH[4]}"
done
if [ -n "${HOST_PYTHON:-}" ]; then
  say "the host side, for torch $("$HOST_PYTHON" -c 'import torch; print(torch.__version__)')"
  cmake -S . -B "$work/host_build" -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v "$HOST_PYTHON")" \
    -DCMAKE_INSTALL_PREFIX="$work/host" -DATTNPACK_CUDA=OFF -DATTNPACK_TESTS=OFF ${CMAKE_ARGS:-}
  cmake --build "$work/host_build" --parallel "$(nproc)"
  cmake --install "$work/host_build"
  tar cJf .gpu/host.tar.xz -C "$work" host
fi
say "carry .gpu to the machine, and run scripts/gpu_session.sh there"
