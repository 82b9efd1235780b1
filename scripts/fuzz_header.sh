#!/usr/bin/env bash
# Any bytes as JSON and as the header of a safetensors file, under libFuzzer and the address and undefined-behaviour
# sanitizers: bash scripts/fuzz_header.sh [SECONDS]. Needs clang++ with libFuzzer (apt-get install clang libclang-rt-dev).
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-60}
clang=${CLANG:-clang++}
torch=$(python -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent)')
json=$(python -c 'import importlib.util as u; s = u.find_spec("nlohmann_json"); print(s.submodule_search_locations[0] if s else "")')
out=build/fuzz_header
mkdir -p "$out/corpus"

printf '{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,8],"data_offsets":[0,64]}}' > "$out/corpus/one"
printf '{"a":{"dtype":"F4","shape":[128],"data_offsets":[0,64]},"\\ud83d\\ude00":{"dtype":"I64","shape":[0,18446744073709551615],"data_offsets":[64,64],"x":[-1.5e-3,true,null,{}]}}' > "$out/corpus/two"

detail=csrc/attnpack/weights/detail
"$clang" -std=c++20 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -Icsrc \
  -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include" ${json:+-isystem "$json/include"} \
  tests/fuzz/header_fuzzer.cpp "$detail"/{json,json_shown,file_errors,safetensors_header}.cpp \
  -L"$torch/lib" -lc10 -Wl,-rpath,"$torch/lib" -o "$out/header_fuzzer"
ASAN_OPTIONS=detect_leaks=0 "$out/header_fuzzer" -max_total_time="$seconds" -max_len=4096 -print_final_stats=1 \
  -artifact_prefix="$out/" "$out/corpus"
