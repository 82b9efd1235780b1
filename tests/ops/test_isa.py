"""All instruction sets of this CPU give the same results; each runs in its own process."""

import os
from pathlib import Path

import attnpack._C
import pytest
from isas import BUILT, CPU, NEEDS, PRESENT, run_with
from processes import ROOT, run_program, run_python

BUILD = Path(os.environ.get("ATTNPACK_BUILD_DIR", ROOT / "build"))

GRID = """
import torch, attnpack
from attnpack import reference
from op_cases import COVERING, DTYPES, INF, NAN, check_against_reference, make_inputs, compute_results
torch.set_num_threads(2)
for case in COVERING[::5]:
    check_against_reference(make_inputs(**case))
float16, bfloat16, float32 = torch.float16, torch.bfloat16, torch.float32
shapes = [((3, 70), float32), ((7, 300), float16), ((11, 300), bfloat16), ((60, 300), float32), ((130, 301), bfloat16)]
for lengths, dtype in shapes:  # excluded keys are never read
    inputs = make_inputs(dtype, lengths=lengths, dims=(17, 10), scores={"softcap": 3.0})
    inputs.settings["kv_lens"] = torch.tensor([33, 65])
    expected = compute_results(attnpack.attention, inputs)
    for b, n in enumerate((33, 65)):
        inputs.key[b, :, n:], inputs.value[b, :, n:] = NAN, INF
    for name, x in compute_results(attnpack.attention, inputs).items():
        assert torch.equal(x, expected[name]), name
for dtype in DTYPES:  # a softcap of any size, a row without keys whatever its sink is
    for lengths in ((3, 70), (60, 70)):
        for softcap in (1e-300, 1e-40, 1e39, 1e300):
            inputs = make_inputs(dtype, lengths=lengths, scores={"softcap": softcap})
            inputs.query[:, :, 0] = 0
            truth = compute_results(reference.attention, inputs.to(torch.float64))
            for name, x in compute_results(attnpack.attention, inputs).items():
                bound = 16 * torch.finfo(dtype).eps * max(1, truth[name].abs().max().item())
                torch.testing.assert_close(x.double(), truth[name], atol=bound, rtol=0)
        inputs = make_inputs(dtype, lengths=lengths)
        inputs.settings |= {"sinks": torch.tensor([INF, NAN, -INF, 1.0]), "kv_lens": torch.tensor([0, 0])}
        assert (attnpack.attention(inputs.query, inputs.key, inputs.value, **inputs.settings) == 0).all()
print(attnpack._C.isa())
"""


@pytest.mark.parametrize("isa", PRESENT)
def test_part_of_the_grid(isa):
    process = run_with(isa, GRID)
    assert process.returncode == 0, process.text
    assert process.stdout.split()[-1] == isa


EXP = """
import torch, attnpack
# Two keys with scores 0 and s: the second has probability e / (1 + e), e = exp(s). Below -17, 1 + e is 1 in fp32.
s = torch.cat([torch.linspace(-104, 0, 200001), torch.tensor([-87.3, -87.4, -88.0, -103.9])])
k = torch.stack([torch.zeros_like(s), s], 1).view(-1, 1, 2, 1)
v = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1).expand(len(s), -1, -1, -1)
for q_len in (1, 40):  # decode, prefill
    out = attnpack.attention(torch.ones(len(s), 1, q_len, 1)[::q_len], k[::q_len], v[::q_len], scale=1.0)[:, 0, 0, 0]
    e = s[::q_len].double().exp()
    ulp = torch.maximum(2.0 ** (torch.floor(torch.log2(e)) - 23), torch.tensor(2.0**-149))
    error = ((out.double() - e / (1 + e)).abs() / ulp)
    print(error[s[::q_len] < -17].max().item(), error.max().item())
"""


@pytest.mark.parametrize("isa", PRESENT)
def test_exp_is_within_2_ulp(isa):
    process = run_with(isa, EXP)
    assert process.returncode == 0, process.text
    for line in process.stdout.strip().splitlines():
        small, all_of_them = map(float, line.split())
        assert small <= 2
        assert all_of_them <= 3.5  # the sum and the division round too


def test_the_widest_is_the_default_but_pairs_where_they_are_slow():
    process = run_python("import attnpack._C; print(attnpack._C.isa())")
    if "ATTNPACK_ISA" not in os.environ:
        slow = {"avx512_bf16_emulated"} | ({"avx512_bf16"} if "GenuineIntel" in CPU else set())
        assert process.stdout.split()[-1] == [name for name in PRESENT if name not in slow][-1], process.text
    assert attnpack._C.isa() in PRESENT


@pytest.mark.parametrize("name", ["sse9", *(name for name in NEEDS if name not in PRESENT)])
def test_a_name_that_this_cpu_lacks_says_what_there_is(name):
    process = run_with(name, "import torch, attnpack; x = torch.ones(1, 1, 1, 1); attnpack.attention(x, x, x)")
    assert process.returncode != 0
    assert f"ATTNPACK_ISA is '{name}', this CPU has: {', '.join(PRESENT)}" in process.text


def test_an_empty_name_is_none():
    process = run_with("", "import attnpack._C; print(attnpack._C.isa())")
    assert process.returncode == 0 and process.stdout.split()[-1] in PRESENT, process.text


@pytest.mark.parametrize("isa", [isa for isa in BUILT if isa in ("avx512", "avx512_bf16")])
def test_bf16_is_multiplied_in_pairs_where_there_is_an_instruction(isa):
    """Looks for the instruction in the installed kernels; this CPU need not have it."""
    instructions = {}
    units = {kernel: f"{kernel}.cpp.o" for kernel in ("prefill", "decode", "linear")}
    units["machine_speed"] = "unity_small*.o"  # beside others that have no such products
    for kernel, unit in units.items():
        (compiled,) = (BUILD / f"CMakeFiles/attnpack_{isa}.dir").rglob(unit)
        listing = run_program("objdump", "-d", "--no-show-raw-insn", compiled)
        assert listing.returncode == 0, listing.text
        instructions[kernel] = [line for line in listing.stdout.splitlines() if "%zmm" in line]
    for kernel, lines in instructions.items():
        pairs = sum("vdpbf16ps" in line for line in lines)
        assert lines and (pairs >= 8) == (isa == "avx512_bf16"), (kernel, pairs)
    for kernel in ("prefill", "decode"):
        rounded = any("vcvtne2ps2bf16" in line for line in instructions[kernel])
        assert rounded == (isa == "avx512_bf16"), kernel
