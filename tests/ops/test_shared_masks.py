"""Masks that all rows of a sequence share, as padding masks: a range of keys takes the place of the mask."""

import pytest
import torch
from attnpack import attention
from torch.testing import assert_close

LENGTHS = {"few": 24, "short": 100, "long": 700}
INF = float("inf")


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def make(rows, length, kind, dtype=torch.float32, heads=(4, 2)):
    """query, key, value and a mask [3, 1, 1, length] of which sequence 2 allows all keys."""
    q, k, v = (
        draw(3, heads[0], rows, 32, dtype=dtype),
        *(draw(3, heads[1], length, 32, dtype=dtype, seed=s) for s in (1, 2)),
    )
    place = torch.arange(length)
    lens = torch.tensor([length // 3, length - 1, length])[:, None]
    allowed = {
        "right": place < lens,
        "left": place >= length - lens,
        "both": (place >= 3) & (place < lens),
        "holes": (place < lens) & (place % 5 != 1),
        "none": (place < lens) & (torch.arange(3)[:, None] > 0),
    }[kind]
    return q, k, v, allowed[:, None, None]


def run(q, k, v, **settings):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, return_lse=True, **settings)
    return [out, lse, *torch.autograd.grad(out.double().square().sum(), leaves)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", ["right", "left", "both", "holes", "none"])
def test_values_and_gradients(kind, length, rows, causal):
    q, k, v, mask = make(rows, LENGTHS[length], kind)
    settings = {"causal": causal, "q_offset": "end"} if causal else {}
    exact = run(*(x.double() for x in (q, k, v)), mask=mask.expand(-1, 1, rows, -1).contiguous(), **settings)
    added = torch.zeros(mask.shape).masked_fill(~mask, -INF)
    for given in (mask, added, mask.expand(-1, 4, rows, -1), added.expand(-1, 4, rows, -1).contiguous()):
        for found, expected in zip(run(q, k, v, mask=given, **settings), exact, strict=True):
            assert_close(found.double(), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.parametrize("length", LENGTHS)
def test_padding_on_the_right_is_lengths(length, rows, dtype):
    q, k, v, mask = make(rows, LENGTHS[length], "right", dtype)
    expected = run(q, k, v, kv_lens=mask.sum((1, 2, 3)))
    for found, wanted in zip(run(q, k, v, mask=mask), expected, strict=True):
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 4e-2}[dtype]
        assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["right", "left", "both", "holes"])
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_hidden_keys_change_no_bit(kind, rows):
    q, k, v, mask = make(rows, 100, kind)
    expected = run(q, k, v, mask=mask)
    hidden = ~mask.transpose(-1, -2)  # [3, 1, 100, 1]
    for poison in (float("nan"), INF, 1e30):
        found = run(q, k.masked_fill(hidden, poison), v.masked_fill(hidden, poison), mask=mask)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


def test_a_shared_float_mask_has_a_gradient_at_every_allowed_key():
    q, k, v, mask = make(7, 100, "both")
    added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -INF)

    def gradient(dtype, given):
        leaf = given.to(dtype).requires_grad_()
        out = attention(*(x.to(dtype) for x in (q, k, v)), mask=leaf)
        return torch.autograd.grad(out.square().sum(), leaf)[0]

    found = gradient(torch.float32, added)
    exact = gradient(torch.float64, added + torch.zeros(3, 1, 7, 1)).sum(2, keepdim=True)
    assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
    assert (found[mask] != 0).all() and (found[~mask] == 0).all()


def test_one_query_with_a_mask_of_its_own_and_heads_with_theirs():
    q, k, v, mask = make(1, 100, "left")
    own = mask.clone()  # one row: its stride does not matter
    of_heads = mask.repeat(1, 4, 1, 1)
    of_heads[:, 1] = True
    for given in (own, of_heads):
        exact = run(*(x.double() for x in (q, k, v)), mask=given)
        for found, expected in zip(run(q, k, v, mask=given), exact, strict=True):
            assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    everywhere = mask.expand(3, 1, 5, 100)
    assert_close(attention(q.expand(-1, -1, 5, -1), k, v, mask=everywhere)[:, :, 3:4], attention(q, k, v, mask=mask))
