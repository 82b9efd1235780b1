#!/usr/bin/env bash
# Fifteen minutes on a machine with a GPU, a CUDA torch, a compiler, cmake and pytest. Downloads nothing: CMAKE_ARGS=
# -DATTNPACK_JSON_DIR=... names headers of nlohmann/json that were brought along. scripts/gpu_bundle.sh has built the
# kernels beforehand, into .gpu; without .gpu/base.tar.xz the first step calls nvcc, for minutes. The clocks of the GPU
# are left as they are. Tables go to $OUT. Without a name: all steps, in this order, as long as 900 s (LIMIT) last:
#   check     260 s  is it right at all: names of kernels, fp64, the device tests
#   compare   240 s  which variant of .gpu is faster, the base first and last; then rules, latent and decode
#   why       120 s  Nsight Compute on one kernel of each kind
#   sanitize  120 s  synccheck and racecheck on short calls, memcheck on empty tensors
#   torch            all tables beside torch's SDPA, in the time that is left
# `large` is a step too: the device tests beyond 32 bits, which take minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
export OUT=${OUT:-build/gpu_results} PYTHONPATH=$PWD/python
mkdir -p "$OUT"
unpacked=build/gpu_unpacked

python=$(find_python) || stop "no Python >= 3.11 found."
nvidia-smi | tee "$OUT/nvidia-smi.txt" || stop "nvidia-smi does not run: is there a GPU, and a driver?"
status=0
if [ $# = 0 ]; then set -- check compare why sanitize torch; fi

# within <seconds> <command>: no longer than that, or than what is left. A step that fails does not keep the next ones
# from running.
within() {
  local left=$((${LIMIT:-900} - SECONDS)) seconds=$1
  shift
  if [ "$left" -lt 5 ]; then
    echo "attnpack: no time is left for: $*" >&2
    return
  fi
  timeout "$((seconds < left ? seconds : left))" "$@" || {
    status=$?
    printf 'attnpack: exit code %s of: %s\n' "$status" "$*" >&2
  }
}
bench() { # <seconds> <file in $OUT> <arguments>
  within "$1" "$python" benchmarks/cuda_attention.py "${@:3}" > >(tee -a "$OUT/$2.txt") 2>&1
}

# Every failure returns: inside `build_all ||` the shell does not stop at one.
build_all() {
  local capability
  rm -rf "$unpacked"
  mkdir -p "$unpacked"
  for each in .gpu/*.tar.xz; do if [ -e "$each" ]; then tar xJf "$each" -C "$unpacked" || return; fi; done
  if [ -d "$unpacked/host" ]; then
    cp -r "$unpacked"/host/. python/attnpack/ || return
  else
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
    cmake -S . -B build/gpu $(command -v ninja >/dev/null && echo -G Ninja) -DCMAKE_BUILD_TYPE=Release \
      -DPython_EXECUTABLE="$(command -v "$python")" -DCMAKE_INSTALL_PREFIX=python/attnpack -DATTNPACK_TESTS=OFF \
      "-DATTNPACK_CUDA=$([ -d "$unpacked/base" ] && echo OFF || echo ON)" \
      -DATTNPACK_CUDA_ARCHITECTURES="${ARCHITECTURES:-$capability}" ${CMAKE_ARGS:-} &&
      cmake --build build/gpu --parallel "$(nproc)" && cmake --install build/gpu || return
  fi
  if [ -d "$unpacked/base" ]; then cp "$unpacked/base/libattnpack_cuda.so" python/attnpack/lib/; fi
}

for step in "$@"; do
  say "$step, $SECONDS s after the start"
  case $step in
    check)
      build_all >"$OUT/build.log" 2>&1 || { tail -n 40 "$OUT/build.log"; stop "the build failed."; }
      say "built, $SECONDS s after the start"
      "$python" -m attnpack info | tee "$OUT/info.txt"
      # Warnings are errors: attnpack warns where ATen runs in place of its kernels.
      CUDA_LAUNCH_BLOCKING=1 within 60 "$python" -W error scripts/gpu_smoke.py --names > >(tee "$OUT/smoke.txt") 2>&1
      ATTNPACK_CUDA=own within 120 "$python" -m pytest -q -x -m "not long" tests/cuda/test_cuda.py \
        > >(tee "$OUT/test.txt") 2>&1 ;;
    compare)
      variants=()
      for each in "$unpacked"/*/libattnpack_cuda.so; do
        name=$(basename "$(dirname "$each")")
        if [ -e "$each" ] && [ "$name" != base ]; then variants+=("$name"); fi
      done
      for variant in base "${variants[@]}" base; do # the base twice: a drift between its runs is the error of all
        library=$unpacked/$variant/libattnpack_cuda.so
        if [ -e "$library" ]; then bench 25 "$variant" plain decode --quick --library "$library"; else bench 25 base plain decode --quick; fi
      done
      bench 15 rules rules --quick
      bench 20 latent latent
      bench 20 packed packed --quick ;;
    why) # one kernel of a kind each; ncu would change the clocks if it were not told
      for kind in prefill:forward_sm90 backward:key_gradient backward:query_gradient latent:latent_sm90; do
        within 40 ncu --clock-control none --set full --kernel-name "regex:${kind#*:}" --launch-count 1 \
          "$python" scripts/gpu_one.py "${kind%:*}" >"$OUT/ncu_${kind#*:}.txt" 2>&1
        grep -E "Duration|Throughput|Pipe|Registers|Occupancy" "$OUT/ncu_${kind#*:}.txt" || tail -n 5 "$OUT/ncu_${kind#*:}.txt"
      done ;;
    sanitize)
      for check in synccheck:small_prefill synccheck:small_backward racecheck:small_prefill racecheck:small_backward memcheck:empty; do
        say "$check"
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 within 40 compute-sanitizer --tool "${check%:*}" --error-exitcode 9 \
          "$python" scripts/gpu_one.py "${check#*:}" >"$OUT/${check/:/_}.log" 2>&1
        tail -n 6 "$OUT/${check/:/_}.log"
      done ;;
    torch) bench 400 torch plain decode rules fp32 ;;
    large) within 570 "$python" -m pytest -q -m long tests/cuda/test_cuda.py > >(tee "$OUT/large.txt") 2>&1 ;;
    *) stop "no step is called $step: see the list at the head of $0." ;;
  esac
done
say "$SECONDS s"
exit "$status"
