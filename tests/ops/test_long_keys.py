"""Prefill of many keys: several tiles of rows take each packed block of keys in turn, as many as suit the threads."""

import pytest
import torch
from attnpack import attention, reference
from attnpack.tools.threads import threads
from marks import long
from op_cases import compute_results, make_inputs
from torch.testing import assert_close

# More keys than one tile takes alone; in the second case more than stay packed. 1,500 and 900 rows per kv head.
CASES = {
    "packed": dict(heads="gqa", lengths=(300, 4500), dims=(16, 20)),
    "packed anew": dict(batch=1, heads="mha", lengths=(900, 8500), dims=(16, 16)),
}
RULES = {
    "full": {},
    "causal": {"positions": {"causal": True, "q_offset": "end"}},
    "window": {"positions": {"window": (700, 0), "q_offset": 2000}},
    "kv_lens": {"kv_lens": torch.int64},
    "mask": {"mask": "bool padding"},
}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("packed", torch.float32),
        ("packed", torch.bfloat16),
        long("packed anew", torch.float32),
        long("packed anew", torch.bfloat16),
    ],
    ids=str,
)
def test_against_fp64_with_any_number_of_threads(case, rules, dtype):
    inputs = make_inputs(dtype, **CASES[case], **RULES[rules])
    exact = compute_results(reference.attention, inputs.to(torch.float64), gradients=False)
    first = None
    for count in (1, 2, 5, 32):
        with threads(count):
            found = compute_results(attention, inputs, gradients=False)
        first = first or found
        for name, result in found.items():
            assert torch.equal(result, first[name]), (name, count)
    for name, result in first.items():
        bound = 2e-5 if dtype == torch.float32 or name == "lse" else 2e-2
        assert_close(result.double(), exact[name], atol=bound, rtol=bound)


@pytest.mark.parametrize("length", [4500, 8500])
def test_nan_in_excluded_keys_reaches_no_row(length):
    """The first rows that one unit takes exclude the last keys, and some see none at all."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, n, 16) for n in (900, length, length))
    clean = attention(query, key, value, causal=True, q_offset=length - 905)
    key[:, :, -300:], value[:, :, -300:] = float("nan"), float("inf")
    seen = 900 - 300 + 5
    for count in (1, 2):
        with threads(count):
            found = attention(query, key, value, causal=True, q_offset=length - 905)
        assert torch.equal(found[:, :, :seen], clean[:, :, :seen])
        assert found[:, :, seen:].isnan().all()
    before = attention(query, key.nan_to_num(), value, causal=True, q_offset=-400)
    assert (before[:, :, :400] == 0).all() and (before[:, :, 400:] != 0).any()
