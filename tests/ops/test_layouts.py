"""Rare layouts of each tensor argument, against its contiguous copy."""

import pytest
import torch
from attnpack import attention
from op_cases import DTYPES, NAN, compute_results, make_inputs
from torch.testing import assert_close


def stepped(x):
    """Every dimension sliced with a step, NaN between."""
    fill = True if x.dtype == torch.bool else 7 if not x.is_floating_point() else NAN
    room = x.new_full([3 * n + 2 for n in x.shape], fill)
    return room[tuple(slice(2, None, 3) for _ in x.shape)].copy_(x)


def reversed_strides(x):
    backwards = list(reversed(range(x.dim())))
    return x.permute(backwards).contiguous().permute(backwards)


def offset(x):
    return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape)


def overlapping(x):
    """All strides 1: the same memory belongs to several elements."""
    return x.contiguous().as_strided(x.shape, (1,) * x.dim())


def one_number(x):
    """All strides 0."""
    return x.flatten()[:1].expand(x.numel()).as_strided(x.shape, (0,) * x.dim())


def repeated_rows(x):
    return x[..., :1, :].expand(x.shape) if x.dim() > 1 else x[:1].expand(x.shape)


def repeated_columns(x):
    return x[..., :1].expand(x.shape)


def negated(x):
    """A lazy negation: the memory holds the numbers with the other sign."""
    return torch._neg_view(-x) if x.is_floating_point() else x


LAYOUTS = [stepped, reversed_strides, offset, overlapping, one_number, repeated_rows, repeated_columns, negated]
ARGUMENTS = ["query", "key", "value", "mask", "grad_out", "grad_lse"]
SETTINGS = ["sinks", "alibi_slopes", "kv_lens", "q_offset"]


def case(dtype, lengths, mask="own"):
    return make_inputs(
        dtype,
        "gqa",
        lengths,
        (24, 17),
        mask=mask,
        positions={"causal": True, "q_offset": "tensor"},
        kv_lens=torch.int32,
        scores={"sinks": True, "alibi": True},
    )


def assert_same(inputs, plain, *, exact=True):
    """Compares bit by bit, except for the dot product of grad_out and out: its order depends on grad_out's strides."""
    expected = compute_results(attention, plain)
    eps = torch.finfo(inputs.query.dtype).eps
    for name, got in compute_results(attention, inputs).items():
        if exact or not name.startswith("grad"):
            assert torch.equal(got, expected[name]), name
        else:
            assert_close(got, expected[name], atol=8 * eps, rtol=8 * eps)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("lengths", [(2, 70), (50, 70)], ids=["decode", "prefill"])
def test_one_tensor_laid_out_otherwise(lengths, argument, layout):
    for n, dtype in enumerate(DTYPES):
        mask = "bool" if n % 2 else "own"
        inputs, plain = case(dtype, lengths, mask), case(dtype, lengths, mask)
        x = layout(getattr(inputs, argument))
        setattr(inputs, argument, x)
        setattr(plain, argument, x.clone(memory_format=torch.contiguous_format))
        assert_same(inputs, plain, exact=argument != "grad_out")


@pytest.mark.parametrize("layout", [stepped, offset, one_number, negated], ids=lambda f: f.__name__)
@pytest.mark.parametrize("argument", SETTINGS)
def test_one_setting_laid_out_otherwise(argument, layout):
    inputs, plain = case(torch.float32, (20, 70)), case(torch.float32, (20, 70))
    x = layout(inputs.settings[argument])
    inputs.settings[argument] = x
    plain.settings[argument] = x.clone(memory_format=torch.contiguous_format)
    assert_same(inputs, plain)


@pytest.mark.parametrize("lengths", [(2, 70), (50, 70)], ids=["decode", "prefill"])
def test_every_tensor_laid_out_in_another_way(lengths):
    ways = dict(zip(ARGUMENTS, [stepped, reversed_strides, offset, negated, stepped, reversed_strides], strict=True))
    for dtype in DTYPES:
        inputs = case(dtype, lengths)
        for argument, layout in ways.items():
            setattr(inputs, argument, layout(getattr(inputs, argument)))
        assert_same(inputs, case(dtype, lengths), exact=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_storage_for_query_key_value(dtype):
    """Query, key and value as views of one fused projection: [batch, length, 3, heads, head_dim]."""
    fused = torch.stack([make_inputs(dtype, "mha", (40, 40), (16, 16)).query.transpose(1, 2) + n for n in range(3)], 2)
    views = [fused[:, :, n].transpose(1, 2) for n in range(3)]
    assert torch.equal(attention(*views, causal=True), attention(*(x.contiguous() for x in views), causal=True))


def test_query_may_be_the_mask():
    """Two arguments in one memory."""
    x = make_inputs(torch.float32, "mha", (8, 8), (8, 8)).query
    assert torch.equal(attention(x, x, x, x), attention(x, x.clone(), x.clone(), x.clone()))
