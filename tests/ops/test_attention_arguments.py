"""Random calls over all arguments, sizes 0 to 5: each gives the right result or a clear error."""

import inspect
import re

import pytest
import torch
from attnpack import attention, attention_scores, attention_varlen, reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_cases import DTYPES, INF, NAN, Inputs, check_against_reference, compute_results, draw, laid_out
from torch.testing import assert_close

SIZES = st.integers(0, 5)
OFFSETS = st.integers(-6, 6) | st.sampled_from([-(2**59), -(2**31) - 3, 2**31 - 1, 2**31 + 3, 2**59])
EXAMPLES, MANY_EXAMPLES = 600, 20_000


def many(examples: int):
    return settings(
        max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
    )


# ---- calls that fit ------------------------------------------------------------------


LAYOUTS = st.sampled_from(["contiguous", "contiguous", "reversed", "stepped", "repeated"])


@st.composite
def masks(make, shape):
    """A mask that broadcasts to shape from the right: any rank, any dimension kept or 1, any dtype."""
    kept = [size if make(st.booleans()) else 1 for size in shape]
    own = kept[make(st.integers(0, 4)) :]
    dtype = make(st.sampled_from([torch.bool, *DTYPES]))
    numbers = draw(*own, seed=6)
    if dtype == torch.bool:
        return numbers > -0.7
    if make(st.booleans()):
        numbers = numbers.masked_fill(numbers > 0.6, -INF)
    return numbers.to(dtype)


@st.composite
def fitting(make):
    """Arguments of a call that attention must accept."""
    dtype = make(st.sampled_from(DTYPES))
    batch, q_len, kv_len, head_dim, v_head_dim = (make(SIZES) for _ in range(5))
    num_kv_heads = make(SIZES)
    head_map = None
    if make(st.booleans()) and num_kv_heads:
        num_heads = make(SIZES)
        head_map = [make(st.integers(0, num_kv_heads - 1)) for _ in range(num_heads)]
    else:
        num_heads = num_kv_heads * make(st.integers(0, 3))
    shapes = {
        "query": (batch, num_heads, q_len, head_dim),
        "key": (batch, num_kv_heads, kv_len, head_dim),
        "value": (batch, num_kv_heads, kv_len, v_head_dim),
    }
    call = {
        name: laid_out(draw(*shape, dtype=dtype, seed=n), make(LAYOUTS))
        for n, (name, shape) in enumerate(shapes.items())
    }

    def lengths(numbers):
        values = torch.tensor([make(numbers) for _ in range(batch)], dtype=torch.int64)
        fits = values.abs().max().item() < 2**31 if batch else True
        return laid_out(
            values.to(make(st.sampled_from([torch.int32, torch.int64])) if fits else torch.int64), "stepped"
        )

    def names():
        call["key_block"] = key_block = make(st.sampled_from([1, 1, 2, 5]))
        blocks, count = -(-kv_len // key_block), make(st.integers(0, 4))
        shape = (batch, make(st.sampled_from([1, num_kv_heads])), q_len, count)
        seed = make(st.integers(0, 99))
        drawn = torch.randint(-1, blocks, shape, generator=torch.Generator().manual_seed(seed))
        return laid_out(drawn.to(make(st.sampled_from([torch.int32, torch.int64]))), "stepped")

    per_head = {
        "sinks": lambda: draw(num_heads, dtype=make(st.sampled_from(DTYPES)), seed=8),
        "alibi_slopes": lambda: draw(num_heads, dtype=make(st.sampled_from(DTYPES)), seed=9),
    }
    optional = {
        "mask": lambda: laid_out(make(masks((batch, num_heads, q_len, kv_len))), make(LAYOUTS)),
        "causal": lambda: make(st.booleans()),
        "q_offset": lambda: make(st.sampled_from([make(OFFSETS), "end", lengths(OFFSETS)])),
        "window": lambda: tuple(make(st.integers(-1, 6) | st.sampled_from([2**31, 2**63 - 1])) for _ in range(2)),
        "chunk": lambda: make(st.integers(1, 6) | st.sampled_from([None, 2**31, 2**59])),
        "kv_lens": lambda: lengths(st.integers(0, kv_len)),
        "softcap": lambda: make(st.sampled_from([0.0, 0.5, 30.0])),
        "key_index": lambda: names(),
        "dropout_p": lambda: 0.0,
        "scale": lambda: make(st.sampled_from([None, 0.0, 0.3, -2.0])),
        **{name: lambda of=of: laid_out(of(), make(LAYOUTS)) for name, of in per_head.items()},
    }
    call |= {name: of() for name, of in optional.items() if make(st.booleans())}
    if "alibi_slopes" in call and call.get("q_offset") != "end":
        # Scores of 1e9 and more cannot be compared: fp16 overflows, and the last digit of lse exceeds the log of a sum.
        call["q_offset"] = make(st.integers(-6, 6))
    if head_map is not None:
        call["head_map"] = head_map
    return call


def largest(x: torch.Tensor) -> float:
    return max((n for n in x.abs().flatten().tolist() if n != INF), default=0.0)


def check_call(call: dict):
    """Forward and backward against the reference in fp64, by the rule of op_cases.

    Gradients in low dtypes are exempt: backward reads an `out` that was rounded to this dtype, plain PyTorch does not,
    and among thousands of tiny calls chance decides which error is twice the other.
    """
    call = dict(call)
    tensors = [call.pop(name, None) for name in ("query", "key", "value", "mask")]
    call.pop("dropout_p", None)  # the reference has none
    dtype, (batch, num_heads, q_len, _) = tensors[0].dtype, tensors[0].shape
    grad_out = draw(batch, num_heads, q_len, tensors[2].shape[3], dtype=dtype, seed=4)
    grad_lse = draw(batch, num_heads, q_len, dtype=torch.promote_types(dtype, torch.float32), seed=5)
    inputs = Inputs(*tensors, call, grad_out, grad_lse)
    low = dtype in (torch.float16, torch.bfloat16)
    check_against_reference(inputs, gradients=not low)
    if low:
        truth = compute_results(reference.attention, inputs.to(torch.float64))
        for name, got in compute_results(attention, inputs).items():
            bound = 16 * torch.finfo(dtype).eps * max(1, largest(truth[name]))
            assert_close(got.double(), truth[name], atol=bound, rtol=0.0)


@many(EXAMPLES)
@given(fitting())
def test_a_call_that_fits_gives_the_right_result(call):
    check_call(call)


@pytest.mark.long
@many(MANY_EXAMPLES)
@given(fitting())
def test_many_calls_that_fit(call):
    check_call(call)


# ---- calls that may not fit ----------------------------------------------------------

DTYPES_OF_ALL_KINDS = [*DTYPES, torch.bool, torch.int32, torch.int64, torch.uint8, torch.complex64, torch.float8_e5m2]


@st.composite
def any_tensor(make):
    shape = make(st.lists(SIZES, max_size=5))
    return (4 * draw(*shape)).to(make(st.sampled_from(DTYPES_OF_ALL_KINDS)))


NUMBERS = st.sampled_from([-(2**62), -1, 0, 1, 3, 2**31, 2**63 - 1, 2**64, -1.5, 0.5, 1e300, NAN, INF, -INF, True])
ANYTHING = (
    any_tensor()
    | any_tensor().map(lambda x: x.to("meta"))
    | NUMBERS
    | st.lists(NUMBERS, max_size=4)
    | st.tuples(NUMBERS, NUMBERS)
    | st.sampled_from([None, "end", "", b"end", {}, object(), torch.float32, 1j])
)
ARGUMENTS = [
    "query", "key", "value", "mask", "causal", "q_offset", "window", "chunk", "kv_lens", "softcap", "sinks",
    "alibi_slopes", "head_map", "dropout_p", "scale", "key_index", "key_block", "return_lse",
]  # fmt: skip


@st.composite
def spoiled(make):
    """A valid call in which one or two arguments are replaced by any value, or by a value next to the valid one."""
    call = make(fitting())
    for name in make(st.lists(st.sampled_from(ARGUMENTS), min_size=1, max_size=2, unique=True)):
        was = call.get(name)
        if isinstance(was, torch.Tensor) and was.dim() and make(st.booleans()):
            dim = make(st.integers(0, was.dim() - 1))
            neighbours = [was.unsqueeze(0), was.transpose(0, dim), was.to(make(st.sampled_from(DTYPES_OF_ALL_KINDS)))]
            neighbours += [torch.cat([was, was.narrow(dim, 0, min(1, was.shape[dim]))], dim), was.narrow(dim, 0, 0)]
            call[name] = make(st.sampled_from(neighbours))
        elif name == "kv_lens" and isinstance(was, torch.Tensor):
            call[name] = was + make(st.integers(-7, 7))
        elif name == "head_map" and was:
            call[name] = [kv_head + make(st.integers(-2, 2)) for kv_head in was]
        else:
            call[name] = make(ANYTHING)
    return call


def complaint_or_result(function, call: dict):
    """The result of a call, or None if it raises a proper error."""
    try:
        return function(**call)
    except (ValueError, TypeError) as error:
        text = str(error)
        assert text.startswith("attnpack: ") and "\n" not in text, text
        return None


def check_spoiled(call: dict):
    """An accepted call must give the result of the reference: the same numbers, and NaN and Inf at the same places."""
    result = complaint_or_result(attention, call)
    scores = complaint_or_result(attention_scores, {k: x for k, x in call.items() if k not in ("value", "return_lse")})
    if result is None or call["query"].is_meta:
        return
    low = call["query"].dtype in (torch.float16, torch.bfloat16)
    bounds = {"atol": 2e-2, "rtol": 2e-2} if low else {"atol": 1e-4, "rtol": 1e-4}
    return_lse, dropout_p = bool(call.pop("return_lse", False)), call.pop("dropout_p", 0)
    # A tensor of one element is a number too.
    call = {k: float(x) if k in ("scale", "softcap") and x is not None else x for k, x in call.items()}
    if dropout_p > 0 or not all(abs(call.get(name) or 0) < 1e6 for name in ("scale", "softcap")):
        return  # random, or so large (or NaN) that fp32 and fp64 differ
    call = {k: x.double() if k in ("query", "key", "value", "sinks") and x is not None else x for k, x in call.items()}
    expected = reference.attention(**call, return_lse=True)
    for got, exact in zip(result if return_lse else (result,), expected, strict=False):
        assert_close(got.double(), exact, equal_nan=True, **bounds)
    del call["value"]
    assert_close(scores.double(), reference.attention_scores(**call), equal_nan=True, **bounds)


@many(2 * EXAMPLES)
@given(spoiled())
def test_a_call_that_may_not_fit_is_refused_clearly_or_right(call):
    check_spoiled(call)


@pytest.mark.long
@many(MANY_EXAMPLES)
@given(spoiled())
def test_many_calls_that_may_not_fit(call):
    check_spoiled(call)


@pytest.mark.parametrize("function", [attention, attention_varlen])
def test_the_docstring_explains_every_argument(function):
    explained = function.__doc__.split("Args:")[1].split("Returns:")[0]
    arguments = inspect.signature(function).parameters
    assert [name for name in arguments if not re.search(rf"(?:^ +|, ){name}\b.*:", explained, re.M)] == []
