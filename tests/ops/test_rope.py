"""apply_rope and rope_table against the formula in fp64."""

import pytest
import torch
from attnpack import apply_rope, attention, reference
from attnpack.ops import rope_table
from op_cases import DTYPES, draw, laid_out
from torch.testing import assert_close

INTERLEAVED = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def table(length: int, half: int, dtype: torch.dtype = torch.float32):
    angle = draw(length, half, dtype=torch.float64, seed=9)
    return angle.cos().to(dtype), angle.sin().to(dtype)


@INTERLEAVED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape, half", [((2, 3, 5, 8), 4), ((2, 3, 5, 9), 3), ((4, 7, 2), 1), ((6, 10), 5), ((2, 2, 3, 5, 6), 2)]
)
def test_rotates_the_first_dims_and_keeps_the_rest(shape, half, dtype, interleaved):
    x = draw(*shape, dtype=dtype)
    cos, sin = table(shape[-2], half, torch.float64 if dtype == torch.float64 else torch.float32)
    got = apply_rope(x, cos, sin, interleaved=interleaved)
    exact = reference.apply_rope(x.double(), cos.double(), sin.double(), interleaved=interleaved)
    assert got.dtype == dtype and torch.equal(got[..., 2 * half :], x[..., 2 * half :])
    eps = torch.finfo(dtype).eps
    assert_close(got.double(), exact, atol=4 * eps, rtol=2 * eps)


@INTERLEAVED
@pytest.mark.parametrize(
    "layout", ["heads inside", "sliced", "expanded batch", "expanded heads", "offset", "columns outside"]
)
def test_layout_of_x_changes_no_bit(layout, interleaved):
    x = draw(2, 3, 5, 8)
    cos, sin = table(5, 3)
    laid = laid_out(x, layout)
    got = apply_rope(laid, cos, sin, interleaved=interleaved)
    assert torch.equal(got, apply_rope(laid.contiguous(), cos, sin, interleaved=interleaved))
    if layout in ("heads inside", "columns outside"):  # dense: the layout is kept
        assert got.stride() == laid.stride()


@pytest.mark.parametrize(
    "shape", [(5, 3), (1, 3), (3,), (1, 1, 5, 3), (2, 1, 5, 3), (2, 4, 5, 3), (1, 4, 1, 3)], ids=str
)
def test_tables_broadcast(shape):
    x = draw(2, 4, 5, 8)
    angle = draw(*shape, seed=2)
    whole = angle.expand(2, 4, 5, 3).contiguous()
    expected = apply_rope(x, whole.cos(), whole.sin())
    assert torch.equal(apply_rope(x, angle.cos(), angle.sin()), expected)
    strided = torch.stack([angle, angle], -1)[..., 0]
    assert torch.equal(apply_rope(x, strided.cos(), strided.sin()), expected)


@INTERLEAVED
def test_turning_back_gives_x(interleaved):
    x = draw(2, 4, 5, 8, dtype=torch.float64)
    cos, sin = table(5, 4, torch.float64)
    turned = apply_rope(x, cos, sin, interleaved=interleaved)
    assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert_close(apply_rope(turned, cos, -sin, interleaved=interleaved), x)


@INTERLEAVED
def test_scores_depend_on_the_distance_only(interleaved):
    q, k, v = (draw(1, 2, 6, 8, dtype=torch.float64, seed=s) for s in range(3))
    inv_freq = [10000 ** (-i / 4) for i in range(4)]

    def at(start):
        cos, sin = (t.double() for t in rope_table(torch.arange(start, start + 6), inv_freq))
        return attention(*(apply_rope(x, cos, sin, interleaved=interleaved) for x in (q, k)), v, causal=True)

    assert_close(at(0), at(1000), atol=1e-5, rtol=1e-5)  # the tables are fp32


@pytest.mark.parametrize("position", [0, 1, 4095, 131_071, 1_000_000])
def test_table_angles_are_exact_far_out(position):
    """From fp64 angles: within half a unit of fp32, even where fp32 angles would be wrong by radians."""
    dim = 128
    inv_freq = [500000.0 ** (-2 * i / dim) for i in range(dim // 2)]
    cos, sin = rope_table(torch.tensor([position]), inv_freq)
    angle = torch.tensor(inv_freq, dtype=torch.float64) * position
    assert cos.dtype == torch.float32
    assert_close(cos[0].double(), angle.cos(), atol=6e-8, rtol=0)
    assert_close(sin[0].double(), angle.sin(), atol=6e-8, rtol=0)


@pytest.mark.parametrize("shape", [(5,), (2, 5), (0,)], ids=str)
def test_table_has_one_row_a_position(shape):
    positions = torch.arange(10)[: torch.Size(shape).numel()].view(shape)
    ours = rope_table(positions, [10000 ** (-2 * i / 6) for i in range(3)])
    for a, b in zip(ours, reference.rope_table(positions, 6), strict=True):
        assert_close(a, b)
    doubled = rope_table(positions, [1.0, 0.1, 0.01], 2.0)
    for a, b in zip(doubled, rope_table(positions, [1.0, 0.1, 0.01]), strict=True):
        assert_close(a, 2 * b)


@INTERLEAVED
def test_gradients_by_finite_differences(interleaved):
    x, angle = draw(1, 2, 3, 7, dtype=torch.float64), draw(3, 3, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (x, angle.cos(), angle.sin())]

    def call(*tensors):
        return apply_rope(*tensors, interleaved=interleaved)

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)
    fixed = [leaves[0], *(t.detach() for t in leaves[1:])]  # the native backward
    assert torch.autograd.gradcheck(call, fixed)
    assert torch.autograd.gradgradcheck(call, fixed, fast_mode=True)


@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (2, 0, 5, 8), (2, 2, 0, 8), (2, 2, 5, 0)], ids=str)
def test_empty_dimensions(shape):
    x = torch.empty(shape, requires_grad=True)
    cos, sin = table(shape[2], min(4, shape[3] // 2))
    out = apply_rope(x, cos, sin)
    assert out.shape == shape
    assert torch.autograd.grad(out.sum(), x)[0].shape == shape


def test_no_angle_is_the_identity():
    x = draw(2, 2, 5, 8)
    assert torch.equal(apply_rope(x, torch.ones(5, 4), torch.zeros(5, 4)), x)
    assert torch.equal(apply_rope(x, torch.ones(5, 0), torch.zeros(5, 0)), x)


BAD = {
    "angles wider than half of head_dim": ((5, 5), torch.float32, "cos has shape"),
    "another length": ((4, 3), torch.float32, "does not broadcast"),
    "too many dimensions": ((1, 1, 1, 5, 3), torch.float32, "cos has shape"),
    "low precision": ((5, 3), torch.bfloat16, "wants float32 or float64"),
    "integers": ((5, 3), torch.int64, "wants float32 or float64"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tables_raise(case):
    shape, dtype, message = BAD[case]
    cos = torch.ones(shape, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        apply_rope(draw(2, 2, 5, 8), cos, cos)


def test_other_bad_arguments_raise():
    x, (cos, sin) = draw(2, 2, 5, 8), table(5, 3)
    with pytest.raises(ValueError, match="they must agree"):
        apply_rope(x, cos, sin[:4])
    with pytest.raises(ValueError, match="they must agree"):
        apply_rope(x, cos, sin.double())
    with pytest.raises(ValueError, match="x has shape .* wants a float tensor"):
        apply_rope(x.long(), cos, sin)
    with pytest.raises(ValueError, match="x has shape .* wants a float tensor"):
        apply_rope(x[0, 0, 0], cos, sin)
    with pytest.raises(ValueError, match="positions has dtype Int, wants int64"):
        rope_table(torch.arange(5, dtype=torch.int32), [1.0])
