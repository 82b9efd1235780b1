"""Every instruction set that this CPU has computes the same things; each is forced in a process of its own."""

import os
import sys
from pathlib import Path

import attnpack._C
import pytest
from processes import run, run_python

FLAGS = set(Path("/proc/cpuinfo").read_text().split("flags", 1)[-1].split("\n", 1)[0].split())
NEEDS = {
    "baseline": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
}
PRESENT = [name for name, needs in NEEDS.items() if needs <= FLAGS]


def run_with(isa: str, code: str):
    environment = os.environ | {
        "ATTNPACK_ISA": isa,
        "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parent}",
    }
    return run(sys.executable, "-c", code, env=environment, cwd="/")


GRID = """
import torch, attnpack
from op_cases import COVERING, INF, NAN, check_against_reference, make_inputs, run
torch.set_num_threads(2)
for case in COVERING[::5]:
    check_against_reference(make_inputs(**case))
for lengths in ((3, 70), (60, 300)):  # excluded keys are never read
    inputs = make_inputs(lengths=lengths, dims=(17, 10), scores={"softcap": 3.0})
    inputs.settings["kv_lens"] = torch.tensor([33, 65])
    expected = run(attnpack.attention, inputs)
    for b, n in enumerate((33, 65)):
        inputs.key[b, :, n:], inputs.value[b, :, n:] = NAN, INF
    for name, x in run(attnpack.attention, inputs).items():
        assert torch.equal(x, expected[name]), name
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


def test_the_widest_is_the_default():
    process = run_python("import attnpack._C; print(attnpack._C.isa())")
    if "ATTNPACK_ISA" not in os.environ:
        assert process.stdout.split()[-1] == PRESENT[-1], process.text
    assert attnpack._C.isa() in PRESENT


def test_an_unknown_name_says_what_there_is():
    process = run_with("sse9", "import torch, attnpack; x = torch.ones(1, 1, 1, 1); attnpack.attention(x, x, x)")
    assert process.returncode != 0
    assert f"ATTNPACK_ISA is 'sse9', this CPU has: {', '.join(PRESENT)}" in process.text
