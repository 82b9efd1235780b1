"""Eight Python threads call at once, with different shapes; each gets bitwise the result of one thread. And processes
that never chose a number of threads, fork, have one core for many threads, or end while helpers are awake."""

import random

import pytest
import torch
from attnpack import apply_rope, attention, attention_scores
from op_cases import compute_results, draw, make_inputs
from processes import run_python
from threads import in_threads

CALLS = 200
MIXED = [
    dict(dtype=torch.float32, lengths=(1, 700), dims=(20, 12)),  # decode over two ranges
    dict(dtype=torch.bfloat16, heads="mqa", lengths=(4, 130), positions={"causal": True, "q_offset": "end"}),
    dict(dtype=torch.float16, heads="uneven", lengths=(5, 9), mask="own -inf"),
    dict(dtype=torch.float32, lengths=(100, 130), scores={"softcap": 2.0, "sinks": True, "alibi": True}),
    dict(dtype=torch.float64, heads="mha", lengths=(17, 33), kv_lens=torch.int64, mask="bool padding"),
    dict(dtype=torch.bfloat16, lengths=(33, 65), positions={"window": (7, 0)}, layout="columns outside"),
    dict(dtype=torch.float32, heads="one", lengths=(2, 3), mask="float32 heads"),
    dict(dtype=torch.float32, lengths=(0, 5)),
]


def call(number: int) -> dict[str, torch.Tensor]:
    """One of several small calls: forward alone, with gradients, and the other ops."""
    inputs = make_inputs(**MIXED[number % len(MIXED)])
    results = compute_results(attention, inputs, gradients=number % 3 > 0)
    if number % 3 == 2:
        results["scores"] = attention_scores(inputs.query, inputs.key, inputs.mask, **inputs.settings)
        angle = draw(inputs.query.shape[2], inputs.query.shape[3] // 2)
        results["rope"] = apply_rope(inputs.query, angle.cos(), angle.sin())
    return results


def test_mixed_shapes_change_no_bit():
    """Scratch memory is kept between calls, but belongs to one call at a time."""
    kinds = 3 * len(MIXED)
    expected = [call(n) for n in range(kinds)]

    def work(thread):
        order = random.Random(thread)
        for _ in range(CALLS):
            n = order.randrange(kinds)
            for name, got in call(n).items():
                assert torch.equal(got, expected[n][name]), (n, name)

    in_threads(work)


@pytest.mark.parametrize("gradients", [False, True])
def test_errors_in_some_threads_leave_the_others_alone(gradients):
    inputs = make_inputs(lengths=(40, 70), kv_lens=torch.int64)
    bad = make_inputs(lengths=(40, 70))
    bad.settings = {"kv_lens": torch.tensor([71, 3])}
    expected = compute_results(attention, inputs, gradients=gradients)

    def work(thread):
        for _ in range(50):
            if thread % 2:
                with pytest.raises(ValueError, match=r"kv_lens\[0\] is 71"):
                    compute_results(attention, bad, gradients=gradients)
                continue
            for name, got in compute_results(attention, inputs, gradients=gradients).items():
                assert torch.equal(got, expected[name]), name

    in_threads(work)


CALLS_OF_ALL_THREADS = """
import os, sys
import attnpack, torch

def calls():
    torch.manual_seed(0)
    for heads, kv_heads, width, keys in [(8, 8, 64, 256), (8, 8, 64, 3000), (32, 8, 128, 1024), (9, 3, 64, 1024)]:
        for dtype in (torch.float32, torch.bfloat16):
            query = torch.randn(1, heads, 1, width, dtype=dtype)
            key, value = torch.randn(2, 1, keys, kv_heads, width, dtype=dtype).transpose(2, 3)
            yield attnpack.attention(query, key, value)

def check(found):
    torch.set_num_threads(1)
    for wanted, *results in zip(calls(), *found, strict=True):
        assert all(torch.equal(result, wanted) for result in results)
"""

PROCESSES = {
    # OpenMP's workers may then report another number than the caller does, so no unit may ask for it.
    "nobody set the number of threads": "check([list(calls()) for _ in range(3)])",
    "more threads than cores": "torch.set_num_threads(9); check([list(calls()) for _ in range(3)])",
    "one core": """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
torch.set_num_threads(4)
check([list(calls()) for _ in range(3)])
""",
    "another number from call to call": """
found = []
for threads in (4, 1, 3, 2):
    torch.set_num_threads(threads)
    found.append(list(calls()))
check(found)
""",
    "the child of a fork": """
torch.set_num_threads(3)
before = list(calls())
child = os.fork()
if child == 0:
    try:
        found = list(calls())
        os._exit(0 if all(map(torch.equal, before, found)) else 1)
    finally:
        os._exit(2)
assert os.waitpid(child, 0)[1] == 0
check([before, list(calls())])
""",
    "the end, while helpers are awake": "check([list(calls())]); torch.set_num_threads(9); list(calls()); sys.exit()",
}


@pytest.mark.parametrize("name", PROCESSES)
def test_processes(name):
    process = run_python(CALLS_OF_ALL_THREADS + PROCESSES[name])
    assert process.returncode == 0, process.stderr
