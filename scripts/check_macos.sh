#!/usr/bin/env bash
# Compiles and links everything for macOS on ARM, with zig's clang, against the headers and libraries of torch's wheel
# for macOS. Both come from the package index. Nothing of it can run here: the last lines say what was linked.
#   scripts/check_macos.sh [--configure]    only the first step: seconds
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
enter_environment
need_build_tools

out=$PWD/build/macos
mkdir -p "$out/tools"
python -c 'import ziglang' 2>/dev/null || python -m pip install -q ziglang
if [ ! -d "$out/torch/lib" ]; then
  say "torch for macOS"
  rm -rf "$out/wheel" "$out/torch"
  python -m pip download -q --no-deps --only-binary=:all: --platform macosx_14_0_arm64 --platform macosx_11_0_arm64 \
    -d "$out/wheel" "${MACOS_TORCH:-torch}"
  python - "$out"/wheel/torch-*.whl "$out" <<'PY'
import sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
parts = ("torch/include/", "torch/lib/", "torch/version.py")
wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.startswith(parts)])
PY
  rm -rf "$out/wheel"
fi

# CMake wants programs. Nothing runs, so nothing is optimised: that is faster. zig's own float.h hides DBL_MAX unless it
# comes first.
for tool in c++ cc ar ranlib; do
  target= last=
  case $tool in c*) target='-target aarch64-macos.14.0 -include float.h' last=-O0 ;; esac
  printf '#!/bin/sh\nexec "%s" -m ziglang %s %s "$@" %s\n' "$(command -v python)" "$tool" "$target" "$last" \
    >"$out/tools/$tool"
  chmod +x "$out/tools/$tool"
done
cmake -S . -B "$out/tree" -G Ninja -DCMAKE_SYSTEM_NAME=Darwin -DCMAKE_SYSTEM_PROCESSOR=arm64 \
  -DCMAKE_C_COMPILER="$out/tools/cc" -DCMAKE_CXX_COMPILER="$out/tools/c++" \
  -DCMAKE_AR="$out/tools/ar" -DCMAKE_RANLIB="$out/tools/ranlib" -DCMAKE_BUILD_TYPE=Release -DATTNPACK_CUDA=OFF \
  -DCMAKE_OSX_DEPLOYMENT_TARGET= -DPython_EXECUTABLE="$(command -v python)" -DATTNPACK_TORCH_DIR="$out/torch"
if [ "${1:-}" = --configure ]; then exit; fi
cmake --build "$out/tree" --parallel "$(nproc)"
say "linked for macOS on ARM, not run"
python - "$out/tree" <<'PY'
import struct, sys
from pathlib import Path

for file in sorted([*Path(sys.argv[1]).glob("*.dylib"), *Path(sys.argv[1]).glob("_C.*")]):
    magic, cpu = struct.unpack("<II", file.open("rb").read(8))
    assert (magic, cpu) == (0xFEEDFACF, 0x0100000C), f"{file} is no Mach-O file for ARM"
    print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB, Mach-O for ARM")
PY
