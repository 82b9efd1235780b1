"""Errors of the forward against fp64 over a random grid: beside plain PyTorch's everywhere, and beside SDPA's."""

import random
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from attnpack import attention, reference
from op_cases import check, draw, threads

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES_A_DTYPE = 120


@cache
def grid() -> list[dict]:
    """(dtype, heads, lengths, head dim, causal), each dtype the same number of times."""
    pick = random.Random(0)
    return [
        {
            "dtype": DTYPES[n % len(DTYPES)],
            "num_kv_heads": pick.choice([1, 2, 3]),
            "group": pick.choice([1, 2, 4, 7]),
            "q_len": pick.choice([1, 2, 5, 17, 33, 64, 100, 200]),
            "kv_len": pick.choice([1, 3, 17, 64, 65, 129, 300, 700]),
            "head_dim": pick.choice([8, 16, 40, 64, 128]),
            "causal": pick.random() < 0.5,
            "seed": n,
        }
        for n in range(CASES_A_DTYPE * len(DTYPES))
    ]


def measure(dtype, num_kv_heads, group, q_len, kv_len, head_dim, causal, seed):
    """The results of attnpack, plain PyTorch and SDPA in dtype, and the truth."""
    q = draw(2, num_kv_heads * group, q_len, head_dim, dtype=dtype, seed=seed)
    k, v = (draw(2, num_kv_heads, kv_len, head_dim, dtype=dtype, seed=seed + n) for n in (1, 2))
    # Heads repeated by hand: with enable_gqa SDPA leaves its fused kernel.
    repeated = (x.repeat_interleave(group, 1) for x in (k, v))
    with threads(1):
        sdpa = F.scaled_dot_product_attention(q, *repeated, is_causal=causal)
        plain = reference.attention(q, k, v, causal=causal)
        truth = reference.attention(q.double(), k.double(), v.double(), causal=causal)
    return attention(q, k, v, causal=causal), plain, sdpa, truth


@pytest.fixture(scope="module")
def measured() -> list[tuple]:
    return [(case, *measure(**case)) for case in grid()]


def test_at_most_twice_plain_pytorchs_error_everywhere(measured):
    assert len(measured) >= 300
    for case, ours, plain, _, truth in measured:
        check({"out": ours}, {"out": plain}, {"out": truth}, case["dtype"])


def test_no_larger_error_than_sdpas_on_95_percent(measured):
    """Of the grid, up to one eps of the largest number: one rounding more or less of an fp32 sum is chance."""
    share = {}
    for dtype in DTYPES:
        cases = [results for case, *results in measured if case["dtype"] == dtype]
        good = 0
        for ours, _, sdpa, truth in cases:
            error, theirs = ((x.double() - truth).abs().max() for x in (ours, sdpa))
            good += (error <= theirs + torch.finfo(dtype).eps * truth.abs().max()).item()
        share[dtype] = good / len(cases)
    assert min(share.values()) >= 0.95, share
