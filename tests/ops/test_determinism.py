"""Bitwise the same result for any thread count, batch size and batch position, with or without gradients and lse."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from attnpack import apply_rope, attention
from attnpack.tools.threads import threads
from op_cases import DTYPES, Inputs, compute_results, draw, make_inputs

# Enough work for several threads: decode, decode over ranges, prefill, many tiles, more keys than can stay packed.
LENGTHS = {"decode": (1, 700), "split decode": (4, 2100), "prefill": (70, 300), "tiles": (260, 260), "long": (40, 8400)}
CASES = {
    "plain": {},
    "causal mqa": {"heads": "mqa", "positions": {"causal": True, "q_offset": "end"}},
    "uneven mask": {"heads": "uneven", "mask": "own -inf", "layout": "columns outside"},
    "padding": {"kv_lens": torch.int64, "mask": "bool padding", "scores": {"softcap": 2.0, "alibi": True}},
    "sinks": {"mask": "bfloat16", "scores": {"sinks": True}, "layout": "heads inside"},
}


def assert_same(got: dict, expected: dict):
    for name, x in expected.items():
        assert torch.equal(got[name], x), name


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("case", CASES)
def test_threads_change_no_bit(case, lengths):
    for dtype in DTYPES[1:3] if lengths == "long" else DTYPES:
        inputs = make_inputs(dtype, lengths=LENGTHS[lengths], dims=(20, 12), **({"heads": "gqa"} | CASES[case]))
        with threads(1):
            expected = compute_results(attention, inputs)
        for count in (2, 4, 3):
            with threads(count):
                assert_same(compute_results(attention, inputs), expected)


@pytest.mark.parametrize("where", ["mask", "sinks"])
def test_threads_change_no_bit_of_a_gradient_that_is_one_number(where):
    """A sum over all elements, which can easily depend on the number of threads."""
    scores = {"sinks": True} if where == "sinks" else {}
    for more in range(4):  # two orders of a sum may give the same bits by chance
        lengths = (40000 + more, 2) if where == "sinks" else (300 + more, 300)
        inputs = make_inputs(heads="one", lengths=lengths, dims=(2, 2), scores=scores)
        if where == "mask":
            inputs.mask = torch.zeros(1, 1)
        grads = []
        for count in (1, 2, 4):
            with threads(count):
                grads.append(compute_results(attention, inputs)[f"grad of {where}"])
        assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


def rows(inputs: Inputs, index: list[int]) -> Inputs:
    """The same call for some sequences of the batch, in this order."""
    size = inputs.query.shape[0]

    def pick(x):
        return x[index] if isinstance(x, torch.Tensor) and x.dim() > 0 and x.shape[0] == size else x

    settings = {k: x if k in ("sinks", "alibi_slopes") else pick(x) for k, x in inputs.settings.items()}
    mask = inputs.mask if inputs.mask is None or inputs.mask.dim() < 4 else pick(inputs.mask)
    query, key, value, grad_out, grad_lse = map(
        pick, (inputs.query, inputs.key, inputs.value, inputs.grad_out, inputs.grad_lse)
    )
    return Inputs(query, key, value, mask, settings, grad_out, grad_lse)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("case", CASES)
def test_neither_the_batch_nor_the_place_in_it_changes_a_bit(case, lengths):
    """The results that belong to a sequence. Gradients of shared inputs are sums over the sequences."""
    for dtype in (torch.float32, torch.bfloat16):
        whole = make_inputs(dtype, lengths=LENGTHS[lengths], dims=(20, 12), batch=3, **CASES[case])
        expected = compute_results(attention, whole)
        own = ["out", "lse", "grad of query", "grad of key", "grad of value"]
        own += ["grad of mask"] if CASES[case].get("mask") == "own" else []
        for index in ([0], [1], [2], [2, 0], [1, 1, 2, 0]):
            got = compute_results(attention, rows(whole, index))
            assert_same({name: got[name] for name in own}, {name: expected[name][index] for name in own})


@pytest.mark.parametrize("heads, capacity", [(8, 16384), (1, 140000)])
def test_long_ranges_of_keys_change_no_bit(heads, capacity):
    """Ranges depend on a sequence's own length, not on its padding or on the other sequences."""
    lengths = [capacity, 5000, capacity // 2]
    query = draw(3, 2 * heads, 1, 8)
    key, value = draw(3, heads, capacity, 8), draw(3, heads, capacity, 8, seed=1)
    together = attention(query, key, value, kv_lens=torch.tensor(lengths))
    exact = attention(*(x.double() for x in (query, key, value)), kv_lens=torch.tensor(lengths))
    torch.testing.assert_close(together.double(), exact, atol=1e-6, rtol=1e-5)
    for count in (1, 2, 4):
        with threads(count):
            for b, length in enumerate(lengths):
                alone = attention(query[b : b + 1], key[b : b + 1, :, :length], value[b : b + 1, :, :length])
                assert torch.equal(alone, together[b : b + 1]), (count, b)


@pytest.mark.parametrize("heads, q_len", [((6, 6), 97), ((6, 6), 132), ((6, 3), 66), ((6, 2), 45)])
@pytest.mark.parametrize("settings", [{}, {"causal": True, "q_offset": 40}, {"window": (50, 9), "sinks": True}])
def test_a_head_in_one_tile_has_the_bits_of_one_in_two(heads, q_len, settings):
    """Where heads fill all threads, a unit is a whole head of up to 132 rows. Otherwise tiles have at most 96 rows."""
    if "sinks" in settings:
        settings = settings | {"sinks": torch.linspace(-1, 1, heads[0])}
    for dtype in DTYPES:
        query, key, value = (draw(2, n, length, 20, seed=n).to(dtype) for n, length in
                             zip((heads[0], heads[1], heads[1]), (q_len, 140, 140), strict=True))  # fmt: skip
        with threads(1):
            whole = attention(query, key, value, **settings, return_lse=True)
        with threads(4):
            halves = attention(query, key, value, **settings, return_lse=True)
        assert torch.equal(whole[0], halves[0]) and torch.equal(whole[1], halves[1]), dtype


@pytest.mark.parametrize("lengths", LENGTHS)
def test_gradients_and_lse_change_no_bit_of_out(lengths):
    for dtype in DTYPES:
        inputs = make_inputs(dtype, lengths=LENGTHS[lengths])
        arguments = inputs.query, inputs.key, inputs.value
        alone = attention(*arguments)
        with torch.inference_mode():
            assert torch.equal(attention(*arguments), alone)
        out, lse = attention(*arguments, return_lse=True)
        trained = attention(*(x.clone().requires_grad_() for x in arguments), return_lse=True)
        assert torch.equal(out, alone) and torch.equal(trained[0], alone) and torch.equal(trained[1], lse)


def test_many_runs_give_one_result():
    inputs = make_inputs(lengths=(130, 300), mask="own", scores={"sinks": True, "softcap": 2.0})
    first = compute_results(attention, inputs)
    for _ in range(20):
        assert_same(compute_results(attention, inputs), first)


def test_what_ran_before_changes_no_bit():
    """Scratch memory is kept between calls, and no call may depend on an earlier one."""
    inputs = make_inputs(lengths=(50, 130), dims=(9, 7))
    first = compute_results(attention, inputs)
    for lengths, dims in (((300, 700), (64, 64)), ((3, 900), (5, 3)), ((50, 130), (9, 7))):
        other = make_inputs(lengths=lengths, dims=dims)
        other.key = torch.full_like(other.key, float("nan"))
        other.value = torch.full_like(other.value, float("nan"))
        compute_results(attention, other)
        assert_same(compute_results(attention, inputs), first)


def test_dropout_does_not_depend_on_threads():
    inputs = make_inputs(lengths=(200, 300))
    results = []
    for count in (1, 2, 4):
        torch.manual_seed(3)
        with threads(count):
            results.append(compute_results(lambda *x, **k: attention(*x, dropout_p=0.3, **k), inputs))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_many_python_threads_at_once():
    inputs = make_inputs(lengths=(40, 300), mask="own")
    expected = compute_results(attention, inputs)
    with ThreadPoolExecutor(8) as pool:
        for results in pool.map(lambda _: compute_results(attention, inputs), range(64)):
            assert_same(results, expected)


def test_rope_does_not_depend_on_threads():
    x, angle = draw(2, 4, 700, 64), draw(700, 32)
    results = []
    for count in (1, 2, 4):
        with threads(count):
            results.append(apply_rope(x, angle.cos(), angle.sin()))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
