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
[ -d "$out/zig/ziglang" ] || python -m pip install -q --no-deps --target "$out/zig" ziglang
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
# comes first, zig names the parts of a CPU in its own way, and its linker makes no bundles.
zig=$out/zig/ziglang/zig
for tool in ar ranlib; do printf '#!/bin/sh\nexec "%s" %s "$@"\n' "$zig" "$tool" >"$out/tools/$tool"; done
cat >"$out/tools/c++" <<SH
#!/bin/bash
arguments=("\${@/#-march=armv8.2-a/-mcpu=generic+v8_2a}")
exec "$zig" c++ -target aarch64-macos.14.0 -include float.h "\${arguments[@]/#-bundle/-dynamiclib}" -O0
SH
chmod +x "$out"/tools/*
cmake -S . -B "$out/tree" -G Ninja -DCMAKE_SYSTEM_NAME=Darwin -DCMAKE_SYSTEM_PROCESSOR=arm64 \
  -DCMAKE_CXX_COMPILER="$out/tools/c++" -DCMAKE_AR="$out/tools/ar" -DCMAKE_RANLIB="$out/tools/ranlib" \
  -DCMAKE_BUILD_TYPE=Release -DATTNPACK_CUDA=OFF \
  -DCMAKE_OSX_DEPLOYMENT_TARGET= -DPython_EXECUTABLE="$(command -v python)" -DATTNPACK_TORCH_DIR="$out/torch" \
  -DPython_INCLUDE_DIR="$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')"
if [ "${1:-}" = --configure ]; then exit; fi
cmake --build "$out/tree" --parallel "$(nproc)"
say "linked for macOS on ARM, not run"
python - "$out/tree" <<'PY'
import struct, sys
from pathlib import Path

LC_SYMTAB, LC_DYSYMTAB, NO_LIBRARY = 0x2, 0xB, (0, 0xFE)


def sought_at_run_time(content):
    """The names that no library on the command line defined."""
    place, tables = 32, {}
    for _ in range(struct.unpack_from("<I", content, 16)[0]):
        kind, size = struct.unpack_from("<II", content, place)
        tables[kind] = struct.unpack_from(f"<{size // 4}I", content, place)
        place += size
    (_, _, symbols, _, strings, _), (first, count) = tables[LC_SYMTAB], tables[LC_DYSYMTAB][6:8]
    for i in range(first, first + count):
        name, _, _, description, _ = struct.unpack_from("<IBBHQ", content, symbols + 16 * i)
        if description >> 8 in NO_LIBRARY:
            yield content[strings + name : content.index(b"\0", strings + name)].decode()


for file in sorted([*Path(sys.argv[1]).glob("*.dylib"), *Path(sys.argv[1]).glob("_C.*")]):
    content = file.read_bytes()
    assert struct.unpack_from("<II", content) == (0xFEEDFACF, 0x0100000C), f"{file} is no Mach-O file for ARM"
    names = list(sought_at_run_time(content))
    others = [name for name in names if not name.startswith(("_Py", "__Py"))]
    assert not others, f"no library defines {others} for {file.name}"
    print(f"{file.name}: {len(content) / 1e6:.1f} MB, Mach-O for ARM, {len(names)} names of Python")
PY
