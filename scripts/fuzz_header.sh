#!/usr/bin/env bash
# Any bytes as JSON, as the header of a safetensors file and as that of a GGUF file, under libFuzzer and the address and
# undefined-behaviour sanitizers: bash scripts/fuzz_header.sh [SECONDS], for each of two programs. Needs clang++ with
# libFuzzer (apt-get install clang libclang-rt-dev).
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-60}
clang=${CLANG:-clang++}
torch=$(python -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent)')
json=$(python -c 'import importlib.util as u; s = u.find_spec("nlohmann_json"); print(s.submodule_search_locations[0] if s else "")')
out=build/fuzz_header
mkdir -p "$out/corpus" "$out/gguf_corpus"

printf '{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,8],"data_offsets":[0,64]}}' > "$out/corpus/one"
printf '{"a":{"dtype":"F4","shape":[128],"data_offsets":[0,64]},"\\ud83d\\ude00":{"dtype":"I64","shape":[0,18446744073709551615],"data_offsets":[64,64],"x":[-1.5e-3,true,null,{}]}}' > "$out/corpus/two"

# A whole file with a key of each kind that has a size of its own, and a tensor.
python - "$out/gguf_corpus/one" <<'END'
import struct, sys

def text(words):
    return struct.pack("<Q", len(words)) + words

keys = [text(b"a") + struct.pack("<II", 4, 7), text(b"b") + struct.pack("<I", 8) + text(b"words")]
keys += [text(b"c") + struct.pack("<IIQ", 9, 8, 2) + text(b"x") + text(b"y"), text(b"d") + struct.pack("<Id", 12, 0.5)]
keys += [text(b"e") + struct.pack("<IIQIQ2H", 9, 9, 1, 2, 2, 1, 2), text(b"general.alignment") + struct.pack("<II", 4, 64)]
tensor = text(b"t") + struct.pack("<IQQIQ", 2, 4, 2, 0, 0)
with open(sys.argv[1], "wb") as file:
    file.write(b"GGUF" + struct.pack("<IQQ", 3, 1, len(keys)) + b"".join(keys) + tensor)
END

detail=csrc/attnpack/weights/detail
# fuzz PROGRAM CORPUS SOURCE ...
fuzz() {
  local program=$1 corpus=$2
  shift 2
  "$clang" -std=c++20 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -Icsrc \
    -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include" ${json:+-isystem "$json/include"} \
    "tests/fuzz/$program.cpp" "$@" "$detail"/{json,json_shown,file_errors}.cpp \
    -L"$torch/lib" -lc10 -Wl,-rpath,"$torch/lib" -o "$out/$program"
  ASAN_OPTIONS=detect_leaks=0 "$out/$program" -max_total_time="$seconds" -max_len=4096 -print_final_stats=1 \
    -artifact_prefix="$out/" "$out/$corpus"
}
fuzz header_fuzzer corpus "$detail/safetensors_header.cpp"
fuzz gguf_fuzzer gguf_corpus "$detail"/{gguf_header,file}.cpp
