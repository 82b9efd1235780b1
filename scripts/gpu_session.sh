#!/usr/bin/env bash
# What is to be done where a GPU is: on a machine with nvcc, a compiler, cmake, a CUDA torch and pytest; nothing is
# fetched. Builds in place, then runs the steps that are named, each in less than ten minutes (the first build may take as
# long, so give it a call of its own); results go to $OUT.
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
    sanitize) # what a kernel of ours does wrong; torch's own are left out
      for tool in memcheck racecheck synccheck initcheck; do
        say "$tool"
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 checked timeout 140 compute-sanitizer --tool "$tool" --error-exitcode 9 \
          --kernel-regex kns=attnpack "$python" -m pytest -q tests/cuda/test_cuda.py \
          -k "(latent or excluded or dropout or append) and not captured" >"$OUT/$tool.log" 2>&1
        tail -n 20 "$OUT/$tool.log"
      done ;;
    bench) # peers that the machine lacks, or that refuse a case, leave a dash
      checked "$python" -m attnpack bench --device cuda --dtypes bf16 --json \
        --peers sdpa flash cudnn efficient flex flash_attn flashinfer >"$OUT/bench.json"
      head -c 3000 "$OUT/bench.json" ;;
    *) stop "no step is called $step: build, test, large, sanitize or bench." ;;
  esac
done
exit "$status"
