"""Windows that begin and end within the blocks of keys: rows take part in products with about what they see."""

import pytest
import torch
from attnpack import attention, reference
from attnpack.tools.threads import threads
from op_cases import DTYPES, NAN, check_against_reference, compute_results, draw, make_inputs

# More rows than a tile has, more keys than a block has. The last windows are as wide as several blocks.
WINDOWS = [(0, 0), (20, 0), (40, 30), (128, 0), (-1, 3), (130, -1), (520, 0)]
RULES = {
    "alone": {},
    "padded": {"kv_lens": torch.int64},
    "mask and sinks": {"mask": "own -inf", "scores": {"sinks": True, "softcap": 2.0}},
    "alibi": {"scores": {"alibi": True}},
}


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("heads", ["mha", "uneven"])
def test_windows_in_long_sequences(heads, rule, window):
    positions = {"window": window, "q_offset": 400}
    check_against_reference(make_inputs(heads=heads, lengths=(150, 700), positions=positions, **RULES[rule]))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_windows_in_each_dtype(dtype, window):
    positions = {"window": window, "causal": window[1] != 3}
    check_against_reference(make_inputs(dtype, heads="gqa", lengths=(390, 390), dims=(24, 40), positions=positions))


@pytest.mark.parametrize("window, offset", [((1, 1), 2208), ((4, 1), 2211), ((68, 0), 4000), ((-1, 5), 2210)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_bits_of_any_number_of_threads(dtype, window, offset):
    """With more than 4,096 keys, how many tiles of rows take a block of keys in turn depends on the threads."""
    positions = {"window": window, "q_offset": offset}
    inputs = make_inputs(dtype, heads="mha", lengths=(192, 4500), dims=(4, 6), positions=positions)
    first = None
    for count in (1, 2, 5, 32):
        with threads(count):
            found = compute_results(attention, inputs)
        first = first or found
        for name, result in found.items():
            assert torch.equal(result, first[name]), (name, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [(5, 0), (1, 1), (70, 3)], ids=str)
def test_scores_far_below_zero(window, dtype):
    """Rows that see nothing more of a block find older numbers in scratch, which are larger than such scores."""
    query, key, value = (draw(1, 2, 500, 8, dtype=dtype, seed=seed) for seed in range(3))
    query, key = -(query.abs() + 50), key.abs() + 2
    found = attention(query, key, value, window=window, return_lse=True)
    exact = reference.attention(query.double(), key.double(), value.double(), window=window, return_lse=True)
    assert exact[1].max() < -200
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, atol=3e-2, rtol=3e-2)


def test_dropout_within_windows():
    query, key, value = (draw(1, 2, 300, 16, dtype=torch.float64, seed=seed).requires_grad_() for seed in range(3))

    def results(dtype):
        torch.manual_seed(0)
        tensors = [x.detach().to(dtype).requires_grad_() for x in (query, key, value)]
        out = attention(*tensors, window=(50, 0), dropout_p=0.3)
        return [out, *torch.autograd.grad(out.square().sum(), tensors)]

    for found, exact in zip(results(torch.float32), results(torch.float64), strict=True):
        assert exact.abs().max() > 0.1
        torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [1, 3])
def test_nan_reaches_the_rows_that_see_it(group, dtype):
    """A key's NaN, in another row's window, changes neither this row nor its query's gradient."""
    batch, heads, length, width = 1, 2, 500, 16
    query, grad_out = (draw(batch, heads * group, length, width, dtype=dtype, seed=seed) for seed in (0, 3))
    key, value = (draw(batch, heads, length, width, dtype=dtype, seed=seed) for seed in (1, 2))

    def results():
        leaf = query.clone().requires_grad_()
        out = attention(leaf, key, value, window=(60, 0))
        return out.detach(), *torch.autograd.grad(out, leaf, grad_out)

    clean = results()
    sees_none = torch.ones(length, dtype=torch.bool)
    for at in (3, 250, 300, 499):
        key[:, :, at] = value[:, :, at] = NAN
        sees_none[at : at + 61] = False
    for found, before in zip(results(), clean, strict=True):
        assert torch.equal(found[:, :, sees_none], before[:, :, sees_none])
        assert found[:, :, ~sees_none].isnan().all()
