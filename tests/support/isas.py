"""The instruction sets of this CPU that are built, and code that runs with one of them."""

from pathlib import Path

from attnpack._load import build_record
from processes import run_python

BUILT = build_record()["instruction_sets"].split(";")

CPU = Path("/proc/cpuinfo").read_text()
FLAGS = set(CPU.split("flags", 1)[-1].split("\n", 1)[0].split())
AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
NEEDS = {
    "baseline": set(),
    "avx512_bf16_emulated": AVX512,  # in builds with ATTNPACK_EMULATE_PAIRS
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": AVX512,
    "avx512_bf16": AVX512 | {"avx512_bf16"},
}
PRESENT = [name for name, needs in NEEDS.items() if needs <= FLAGS and name in BUILT]


def run_with(isa: str, code: str):
    support = str(Path(__file__).parent)
    return run_python(f"import sys; sys.path.append({support!r})\n{code}", ATTNPACK_ISA=isa)
