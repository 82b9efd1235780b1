"""Every node test case of ONNX's `Attention` (opsets 23 to 25) and `RotaryEmbedding`, made by the `onnx` package."""

from collections import Counter

import pytest
import torch
from onnx_adapter import collect_cases, run_node, to_torch
from torch.testing import assert_close

CASES = {case.name: case for case in collect_cases()}


def opset(case) -> int:
    return case.model.opset_import[0].version


@pytest.mark.parametrize("name", CASES)
def test_node(name):
    case = CASES[name]
    ((inputs, outputs),) = case.data_sets
    (node,) = case.model.graph.node
    got = run_node(node, inputs)
    for ours, theirs in zip(got, map(to_torch, outputs), strict=True):
        # The suite's own bounds, except for low dtypes: the suite computes their expected results step by step in that
        # dtype.
        low = theirs.dtype in (torch.float16, torch.bfloat16)
        rtol, atol = (2e-2, 2e-2) if low else (case.rtol, case.atol)
        assert_close(ours, theirs, rtol=rtol, atol=atol)


def test_no_case_is_lost():
    counts = Counter((case.model.graph.node[0].op_type, opset(case)) for case in CASES.values())
    assert counts == {("Attention", 23): 69, ("Attention", 24): 13, ("Attention", 25): 11, ("RotaryEmbedding", 23): 8}
    assert len(CASES) == 101
