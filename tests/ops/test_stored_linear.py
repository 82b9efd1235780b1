"""Stored weights: their formats against the package gguf, and their products against fp64."""

import pytest
import torch
from attnpack import ops, reference
from attnpack.ops.stored import format_of
from attnpack.tools.threads import threads
from isas import PRESENT, run_with
from stored_blocks import FORMATS, check_rounded, numbers_of, random_blocks
from torch.library import opcheck
from torch.nn import functional as F
from torch.testing import assert_close

EACH = pytest.mark.parametrize("kind", FORMATS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@EACH
def test_the_reference_reads_blocks_as_gguf_does(kind):
    blocks = random_blocks(kind, rows=7, inputs=768)
    assert torch.equal(reference.stored_numbers(blocks, kind), numbers_of(blocks, kind))


def test_the_reference_rounds_each_32_numbers_to_127_steps():
    x = torch.cat([torch.linspace(-1, 1, 32), torch.linspace(0, 100, 32), torch.zeros(32)]).double()
    rounded = reference.round_rows(x)
    steps = rounded[:32] * 127
    assert torch.allclose(steps, steps.round()) and rounded[31] == 1 and rounded[0] == -1
    assert (rounded[:32] - x[:32]).abs().max() <= 0.5 / 127 + 1e-12
    assert (rounded[32:64] - x[32:64]).abs().max() <= 50 / 127 + 1e-12
    assert not rounded[64:].any()


def test_the_reference_keeps_a_number_that_stands_out():
    x = torch.rand(2, 256).double() + 1
    x[0, 40], x[0, 70], x[0, 71] = -300.0, 200.0, 160.0  # 71 is too near to 70
    rounded = reference.round_rows(x)
    assert rounded[0, 40] == -300 and (rounded - x)[0, 32:64].abs().max() <= 1 / 127 + 1e-12
    assert (rounded - x)[0, 64:96].abs().max() > 0.1
    assert torch.equal(rounded[1], reference.round_rows(x[1]))


@EACH
def test_widened_numbers_are_those_of_gguf(kind):
    blocks = random_blocks(kind, rows=70, inputs=768)
    assert format_of(blocks) == kind
    for dtype in (torch.float64, *DTYPES):
        assert torch.equal(ops.widen_stored(blocks, dtype), numbers_of(blocks, kind).to(dtype))
    ids = torch.tensor([[3, 69], [0, 3]], dtype=torch.int32)
    assert torch.equal(ops.stored_rows(blocks, ids), numbers_of(blocks, kind)[ids.long()])
    with pytest.raises(IndexError):
        ops.stored_rows(blocks, torch.tensor([70]))


PRODUCT = """
import torch
from attnpack import ops
from stored_blocks import FORMATS, exact_input, numbers_of, random_blocks
for kind in FORMATS:
    shapes = [(1, 70, 768), (2, 32, 512), (5, 33, 256), (7, 96, 1280), (200, 45, 1024)]
    if FORMATS[kind][0] == 32:  # blocks are unpacked by four, and then one by one
        shapes += [(1, 32, 32), (2, 64, 96), (3, 40, 224), (8, 65, 608)]
    for rows, outputs, inputs in shapes:
        blocks, x = random_blocks(kind, outputs, inputs), exact_input(rows, inputs)
        weight, bias = numbers_of(blocks, kind).double(), torch.randn(outputs)
        exact, size = x.double() @ weight.t() + bias, x.double().abs() @ weight.abs().t() + 1
        found = ops.stored_linear(x, blocks, bias, round_input=True).double()
        assert ((found - exact).abs() <= 1e-6 * size).all(), (kind, rows, ((found - exact).abs() / size).max())
        # Numbers that stand out, in up to two blocks of each row: beside them the others are exact as before.
        for row in range(rows):
            x[row, (6 + row % 31) % 32 + 32 * torch.randint(inputs // 32, (2,))] = 16384 - 7 * row
        exact, size = x.double() @ weight.t() + bias, x.double().abs() @ weight.abs().t() + 1
        found = ops.stored_linear(x, blocks, bias, round_input=True).double()
        assert ((found - exact).abs() <= 1e-6 * size).all(), (kind, rows, ((found - exact).abs() / size).max())
"""


@pytest.mark.parametrize("isa", PRESENT)
def test_products_of_exact_inputs_are_those_of_fp64(isa):
    process = run_with(isa, PRODUCT)
    assert process.returncode == 0, process.text


@EACH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounded_inputs_move_by_half_a_step(kind, dtype):
    torch.manual_seed(1)
    blocks, bias = random_blocks(kind, rows=40, inputs=768, largest=0.01), torch.randn(40, dtype=dtype)
    x = (torch.randn(9, 768) * torch.logspace(-4, 0, 9)[:, None]).to(dtype)
    found = ops.stored_linear(x, blocks, bias, round_input=True)
    assert found.dtype == dtype
    check_rounded(x, blocks, kind, found, bias)
    close = reference.stored_linear(x.double(), blocks, kind, bias.double())
    scale = close.abs().amax(-1, keepdim=True)
    assert ((found.double() - close).abs() <= (2 * torch.finfo(dtype).eps + 1e-4) * scale).all()


@EACH
@pytest.mark.parametrize("dtype", (torch.float64, *DTYPES), ids=str)
def test_widened_weights_give_the_product_of_the_numbers(kind, dtype):
    torch.manual_seed(2)
    blocks, x = random_blocks(kind, rows=150, inputs=512), torch.randn(3, 7, 512).to(dtype)
    weight, bias = numbers_of(blocks, kind).to(dtype), torch.randn(150).to(dtype)
    exact = F.linear(x.double(), weight.double(), bias.double())
    error = (ops.stored_linear(x, blocks, bias, round_input=False) - exact).abs().max()
    assert error <= 2 * (F.linear(x, weight, bias) - exact).abs().max() + 1e-15


@EACH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others_or_on_threads(kind, dtype):
    blocks, x = random_blocks(kind, rows=70, inputs=768), torch.randn(205, 768).to(dtype)
    x[torch.rand(205, 768) < 0.01] *= 50  # numbers that stand out, too
    whole = ops.stored_linear(x, blocks, round_input=True)
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 193):
        assert torch.equal(ops.stored_linear(x[-rows:], blocks, round_input=True), whole[-rows:])
    with threads(1):
        assert torch.equal(ops.stored_linear(x, blocks, round_input=True), whole)
    for first, last in ((0, 32), (5, 38), (69, 70)):
        assert torch.equal(ops.stored_linear(x, blocks[first:last], round_input=True), whole[:, first:last])


def test_layouts_and_leading_dimensions():
    blocks = random_blocks("Q4_1", rows=12, inputs=96)
    x = torch.randn(2, 5, 3, 192)[..., ::2].transpose(1, 2)
    rows = ops.stored_linear(x, blocks[::2])
    assert_close(rows, ops.stored_linear(x.contiguous(), blocks[::2].contiguous()), rtol=0, atol=0)
    columns = blocks.transpose(0, 1).contiguous().transpose(0, 1)
    assert_close(ops.stored_linear(x, columns), ops.stored_linear(x, blocks), rtol=0, atol=0)
    assert ops.stored_linear(torch.randn(0, 96), blocks).shape == (0, 12)
    assert ops.stored_linear(torch.randn(96), blocks).shape == (12,)
    assert ops.stored_linear(torch.randn(2, 96), blocks[:0]).shape == (2, 0)


def test_several_weights_of_several_formats_in_one_call():
    x, kinds = torch.randn(2, 3, 512), list(FORMATS)
    weights = [random_blocks(kind, rows=20 + 30 * i, inputs=512, seed=i) for i, kind in enumerate(kinds)]
    biases = [torch.randn(w.shape[0]) for w in weights]
    for given in ([], biases):
        found = ops.stored_linears(x, weights, given)
        for i, weight in enumerate(weights):
            assert torch.equal(found[i], ops.stored_linear(x, weight, given[i] if given else None))


def test_numbers_that_are_not_finite_stay_in_their_row():
    blocks, x = random_blocks("Q8_0", rows=40, inputs=128), torch.randn(8, 128)
    clean = ops.stored_linear(x, blocks)
    x[1, 3], x[4, 40] = float("inf"), float("nan")
    found = ops.stored_linear(x, blocks, round_input=True)
    assert found[[1, 4]].isnan().all()
    kept = [0, 2, 3, 5, 6, 7]
    assert torch.equal(found[kept], ops.stored_linear(x, blocks, round_input=True)[kept])
    assert_close(found[kept], clean[kept])


@EACH
def test_blocks_of_zeros_and_inputs_of_zeros_give_zeros(kind):
    x, blocks = torch.randn(3, 512), torch.zeros_like(random_blocks(kind, rows=9, inputs=512))
    assert not ops.stored_linear(x, blocks).any()
    assert not ops.stored_linear(torch.zeros(3, 512), random_blocks(kind, rows=9, inputs=512)).any()
    tiny = torch.full((1, 512), 1e-44)
    assert ops.stored_linear(tiny, random_blocks(kind, rows=9, inputs=512)).abs().max() < 1e-30


@pytest.mark.parametrize(("bits", "kind"), [(8, "Q8_0"), (4, "Q4_0")])
def test_weights_are_rounded_to_the_nearest_code(bits, kind):
    torch.manual_seed(3)
    weight = torch.randn(33, 96) * torch.logspace(-3, 2, 33)[:, None]
    weight[0, :32] = 0
    stored = ops.to_stored(weight, bits)
    assert format_of(stored) == kind
    back = numbers_of(stored, kind)
    largest = weight.view(33, 3, 32).abs().amax(-1, keepdim=True)
    step = largest / (127 if bits == 8 else 8)
    error = (back - weight).view(33, 3, 32).abs()
    # With 4 bits the codes are -8 to 7, so the far end may lie a whole step away. fp16 rounds the scale.
    assert (error <= step * ((0.5 if bits == 8 else 1.0) + 0.07)).all()
    assert not back[0, :32].any()


@pytest.mark.parametrize(("bits", "kind", "code"), [(8, "Q8_0", 127), (4, "Q4_0", 8)])
def test_small_numbers_get_the_smallest_scale(bits, kind, code):
    """Beside larger ones; a weight of nothing but small numbers is refused."""
    torch.manual_seed(4)
    weight = torch.randn(40, 64) * torch.logspace(-9, -4, 40)[:, None]
    weight[0], weight[1, :32], weight[1, 32] = 0, 0, 1e-30
    blocks = ops.to_stored(weight, bits)
    moved = (numbers_of(blocks, kind) - weight).view(40, 2, 32).abs()
    step = weight.view(40, 2, 32).abs().amax(-1, keepdim=True) / code + 2**-24
    assert (moved <= step * (0.5 if bits == 8 else 1.0) * 1.07).all()
    assert not numbers_of(blocks, kind)[:2].any()
    for largest in (1e-30, 0.99 * code * 2**-24):
        with pytest.raises(ValueError, match=r"largest number is .*, too small for a scale of fp16 \(want at least"):
            ops.to_stored(torch.full((3, 32), largest), bits)
    assert not numbers_of(ops.to_stored(torch.zeros(3, 32), bits), kind).any()
    least = ops.to_stored(torch.full((3, 32), code * 2**-24), bits)
    assert (numbers_of(least, kind) - code * 2**-24).abs().max() <= 2**-24


def test_wrong_arguments_are_named():
    blocks, x = random_blocks("Q4_0", rows=6, inputs=64), torch.randn(2, 64)
    for call, words in (
        (lambda: ops.stored_linear(x[:, :32], blocks), "input has shape"),
        (lambda: ops.stored_linear(x, blocks[..., :17]), "blocks of 17 bytes, want 34 (Q8_0), 18 (Q4_0)"),
        (lambda: ops.stored_linear(x, torch.randn(6, 64)), "want stored weights"),
        (lambda: ops.stored_linear(x, blocks, torch.randn(5)), "bias has shape"),
        (lambda: ops.stored_linear(x, blocks, torch.randn(6).double()), "cast one of them"),
        (lambda: ops.stored_linear(x.long(), blocks), "wants a float dtype"),
        (lambda: ops.stored_linear(x.double(), blocks, round_input=True), "never rounded"),
        (lambda: ops.widen_stored(blocks, torch.int32), "dtype: got Int, want a float dtype"),
        (lambda: torch.ops.attnpack.widen_stored(blocks.to("meta"), torch.int32), "dtype: got Int, want a float dtype"),
        (lambda: torch.ops.attnpack.widen_stored(blocks.to("meta"), 2**63 - 1), "want a float dtype"),
        (lambda: ops.to_stored(torch.randn(2, 33), 8), "a multiple of 32"),
        (lambda: ops.to_stored(torch.randn(2, 32), 5), "want 8 or 4"),
        (lambda: ops.to_stored(torch.full((2, 32), float("nan")), 8), "not finite"),
    ):
        with pytest.raises(ValueError, match="attnpack: ") as raised:
            call()
        assert words in str(raised.value)


def test_gradients_are_refused_by_a_sentence():
    blocks, x = random_blocks("Q8_0", rows=6, inputs=64), torch.randn(2, 64, requires_grad=True)
    for call in (
        lambda: ops.stored_linear(x, blocks),
        lambda: ops.stored_linears(x, [blocks]),
        lambda: ops.stored_linear(x.detach(), blocks, torch.zeros(6, requires_grad=True)),
    ):
        with pytest.raises(RuntimeError, match="has no gradient"):
            call()
    with torch.no_grad():
        assert not ops.stored_linear(x, blocks).requires_grad


def test_the_tools_of_torch():
    blocks, x, bias = random_blocks("Q4_K", rows=6, inputs=256), torch.randn(3, 256), torch.randn(6)
    for round_input in (None, False):
        opcheck(torch.ops.attnpack.stored_linear.default, (x, blocks, bias, round_input))
    opcheck(torch.ops.attnpack.stored_linears.default, (x, [blocks, blocks], []))
    opcheck(torch.ops.attnpack.widen_stored.default, (blocks, torch.bfloat16))
    whole = ops.stored_linear(x, blocks, bias)
    assert torch.equal(torch.vmap(lambda row: ops.stored_linear(row, blocks, bias))(x), whole)
    with torch.autocast("cpu", torch.bfloat16):
        found = ops.stored_linear(x, blocks, bias)
    assert torch.equal(found, ops.stored_linear(x.bfloat16(), blocks, bias.bfloat16()))
