#!/usr/bin/env bash
# The first hour on a machine with a GPU, nvcc, a compiler, cmake, a CUDA torch, nlohmann/json and pytest. Downloads
# nothing: CMAKE_ARGS=-DATTNPACK_JSON_DIR=... names headers of nlohmann/json that were brought along. Builds in place,
# only for this machine's GPU, then runs the named steps, each in less than ten minutes; results go to $OUT.
# Without a name: all of them, in this order. The order is that of doubt: first whether a kernel starts at all, then
# whether numbers are right, then races, then speed beside other libraries.
#   gpu_session.sh [build] [smoke] [test] [resources] [sanitize] [large] [bench-prefill] [bench-train] [bench-decode]
#                  [bench-latent] [profile]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
export OUT=${OUT:-build/gpu_results} PYTHONPATH=$PWD/python
mkdir -p "$OUT"

python=$(find_python) || stop "no Python >= 3.11 found."
nvidia-smi | tee "$OUT/nvidia-smi.txt" || stop "nvidia-smi does not run: is there a GPU, and a driver?"
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
say "build for sm_$capability"
{
  cmake -S . -B build/gpu $(command -v ninja >/dev/null && echo -G Ninja) -DCMAKE_BUILD_TYPE=Release \
    -DPython_EXECUTABLE="$(command -v "$python")" -DCMAKE_INSTALL_PREFIX=python/attnpack -DATTNPACK_CUDA=ON \
    -DATTNPACK_CUDA_ARCHITECTURES="${ARCHITECTURES:-$capability}" ${CMAKE_ARGS:-} &&
    cmake --build build/gpu --parallel "$(nproc)" && cmake --install build/gpu
} >"$OUT/build.log" 2>&1 || { tail -n 40 "$OUT/build.log"; stop "the build failed."; }
"$python" -m attnpack info | tee "$OUT/info.txt"

# A step that fails does not keep the next ones from running.
checked() { timeout "${limit:-570}" "$@" || { status=$?; printf 'attnpack: exit code %s of: %s\n' "$status" "$*" >&2; }; }
status=0
if [ $# = 0 ]; then
  set -- smoke test resources sanitize large bench-prefill bench-train bench-decode bench-latent profile
fi
for step in "$@"; do
  say "$step"
  case $step in
    build) ;;
    smoke) # warnings are errors: attnpack warns where ATen runs in place of its kernels
      CUDA_LAUNCH_BLOCKING=1 checked "$python" -W error scripts/gpu_smoke.py --names > >(tee "$OUT/smoke.txt") 2>&1 ;;
    test) checked "$python" -m pytest -x -q -m "not long" tests/cuda/test_cuda.py > >(tee "$OUT/test.txt") 2>&1 ;;
    large) checked "$python" -m pytest -q -m long tests/cuda/test_cuda.py > >(tee "$OUT/large.txt") 2>&1 ;;
    resources) # what the compiler made: registers, spills, and the instructions of each kernel
      library=python/attnpack/lib/libattnpack_cuda.so
      checked cuobjdump -res-usage "$library" >"$OUT/resources.txt" 2>&1
      checked cuobjdump -sass "$library" 2>/dev/null |
        awk '/Function :/ { name = $3 } match($0, /(HMMA|LDSM|FMNMX|LDGSTS|LDL|STL|MUFU|BAR)[.A-Z0-9]*/) {
               count[name " " substr($0, RSTART, RLENGTH)]++ } END { for (each in count) print count[each], each }' |
        sort -k 2 >"$OUT/instructions.txt"
      grep -E " (LDL|STL)" "$OUT/instructions.txt" | head -n 20 || true ;;
    sanitize) # only the smoke script: under pytest it would take hours
      for tool in memcheck racecheck synccheck initcheck; do
        say "$tool"
        limit=140 PYTORCH_NO_CUDA_MEMORY_CACHING=1 checked compute-sanitizer --tool "$tool" --error-exitcode 9 \
          "$python" scripts/gpu_smoke.py >"$OUT/$tool.log" 2>&1
        tail -n 12 "$OUT/$tool.log"
      done ;;
    bench-*) # by graph replay; a dash means that the machine lacks the peer, or that the peer refuses the case
      checked "$python" -m attnpack bench "${step#bench-}" --device cuda --dtypes bf16 --json \
        --peers sdpa flash cudnn efficient flex flash_attn flashinfer >"$OUT/$step.json"
      head -c 3000 "$OUT/$step.json" ;;
    profile) # of prefill: PERFORMANCE.md says what such a run showed, under "Kernels for all devices"
      checked ncu --set full --kernel-name regex:prefill_kernel --launch-count 1 "$python" -c "
import torch, attnpack
query, key, value = (torch.randn(1, heads, 8192, 128, device='cuda', dtype=torch.bfloat16) for heads in (32, 8, 8))
attnpack.attention(query, key, value)
torch.cuda.synchronize()" >"$OUT/ncu.txt" 2>&1
      grep -E "Duration|Throughput|Pipe|Registers|Occupancy" "$OUT/ncu.txt" || tail -n 5 "$OUT/ncu.txt" ;;
    *) stop "no step is called $step: see the list at the head of $0." ;;
  esac
done
exit "$status"
