#!/usr/bin/env bash
# Builds and tests on a machine with a GPU, nvcc, a compiler, cmake, a CUDA torch and pytest. Downloads nothing. Builds
# in place, then runs the named steps, each in less than ten minutes; results go to $OUT. The first build may take ten
# minutes too, so run it in a call of its own.
#   gpu_session.sh build | [test] [large] [sanitize] [bench]      without a name: test
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
export OUT=${OUT:-build/gpu_results} PYTHONPATH=$PWD/python
mkdir -p "$OUT"

python=$(find_python) || stop "no Python >= 3.11 found."
say "build"
{
  cmake -S . -B build/gpu $(command -v ninja >/dev/null && echo -G Ninja) -DCMAKE_BUILD_TYPE=Release \
    -DPython_EXECUTABLE="$(command -v "$python")" -DCMAKE_INSTALL_PREFIX=python/attnpack -DATTNPACK_CUDA=ON &&
    cmake --build build/gpu --parallel "$(nproc)" --target install
} >"$OUT/build.log" 2>&1 || { tail -n 40 "$OUT/build.log"; stop "the build failed."; }
"$python" -m attnpack info

checked() { timeout 570 "$@" || { status=$?; printf 'attnpack: exit code %s of: %s\n' "$status" "$*" >&2; }; }
status=0
for step in "${@:-test}"; do
  say "$step"
  case $step in
    build) ;;
    test) checked "$python" -m pytest -q -m "not long" tests/cuda/test_cuda.py ;;
    large) checked "$python" -m pytest -q -m long tests/cuda/test_cuda.py ;;
    sanitize) # checks our kernels, and leaves out those of torch
      for tool in memcheck racecheck synccheck initcheck; do
        say "$tool"
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 checked timeout 140 compute-sanitizer --tool "$tool" --error-exitcode 9 \
          --kernel-regex kns=attnpack "$python" -m pytest -q tests/cuda/test_cuda.py \
          -k "(latent or excluded or dropout or append) and not captured" >"$OUT/$tool.log" 2>&1
        tail -n 20 "$OUT/$tool.log"
      done ;;
    bench) # a dash means that the machine lacks the peer, or that the peer refuses the case
      checked "$python" -m attnpack bench --device cuda --dtypes bf16 --json \
        --peers sdpa flash cudnn efficient flex flash_attn flashinfer >"$OUT/bench.json"
      head -c 3000 "$OUT/bench.json" ;;
    *) stop "no step is called $step: build, test, large, sanitize or bench." ;;
  esac
done
exit "$status"
