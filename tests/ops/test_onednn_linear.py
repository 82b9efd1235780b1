"""Linear layers of many rows by oneDNN: values and gradients against fp64, transforms, memory."""

import pytest
import torch
import torch.nn.functional as F
from attnpack import ops
from processes import run_python
from torch import nn
from torch.testing import assert_close

# Enough work for oneDNN by the table, where the table has it.
ROWS, IN, OUT = 130, 256, 320
pytestmark = pytest.mark.onednn


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


@pytest.mark.parametrize("by_columns", [False, True])
def test_a_weight_with_gaps_gives_the_bits_of_a_dense_one(by_columns):
    x, wide = draw(ROWS, IN), draw(OUT, IN + 16)
    weight = draw(IN, OUT + 16)[:, :OUT].t() if by_columns else wide[:, :IN]
    assert_close(ops.linear(x, weight), ops.linear(x, weight.contiguous()), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [17, 130, 1000])
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 320), (33, 4001), (771, 65), (2048, 64), (16, 999)])
@pytest.mark.parametrize("biased", [False, True])
def test_values_and_gradients(dtype, rows, inputs, outputs, biased):
    given = [draw(rows, inputs, dtype=dtype), draw(outputs, inputs, dtype=dtype)]
    given += [draw(outputs, dtype=dtype)] if biased else []
    grad = draw(rows, outputs, dtype=dtype, seed=1)

    def results(linear, *tensors, gradient):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = linear(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]

    exact = results(F.linear, *(t.double() for t in given), gradient=grad.double())
    torchs = results(F.linear, *given, gradient=grad)
    found = results(ops.linear, *given, gradient=grad)
    with torch.no_grad():
        assert_close(ops.linear(*given), found[0], rtol=0, atol=0)
    for ours, theirs, true in zip(found, torchs, exact, strict=True):
        assert ours.dtype == dtype and ours.shape == true.shape
        # oneDNN's sums in fp32 are longer than MKL's: its error is up to four times as large.
        allowed = 4 * (theirs - true).abs().max() + 1e-6 * true.abs().max()
        assert (ours - true).abs().max() <= allowed


@pytest.mark.parametrize("shape", [(2, 65, IN), (2, 5, 13, IN), (ROWS, IN)])
def test_layouts(shape):
    weight, bias = draw(OUT, IN), draw(OUT)
    x = draw(*shape)
    expected = F.linear(x, weight, bias)
    for same in (
        ops.linear(x.transpose(0, 1).contiguous().transpose(0, 1), weight, bias),
        ops.linear(x.repeat_interleave(2, -1)[..., ::2], weight, bias),
        ops.linear(x, weight.t().contiguous().t(), bias.repeat_interleave(2)[::2]),
        ops.linear(x, weight.repeat_interleave(3, 1)[:, ::3], bias),
        ops.linear(F.pad(x, (3, 4))[..., 3:-4], F.pad(weight, (1, 2))[:, 1:-2], bias),
    ):
        assert_close(same, expected, rtol=1e-4, atol=1e-4)
    row = draw(1, IN)
    assert_close(
        ops.linear(row.expand(ROWS, IN), weight), F.linear(row, weight).expand(ROWS, OUT), rtol=1e-4, atol=1e-4
    )
    assert ops.linear(draw(0, IN), weight).shape == (0, OUT)


def test_second_derivatives_and_transforms():
    x, weight, bias = draw(ROWS, IN), draw(OUT, IN), draw(OUT)

    def loss(linear, x, weight, bias):
        return (linear(x, weight, bias) / 40).tanh().sum()

    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    seconds = []
    for linear in (ops.linear, F.linear):
        grads = torch.autograd.grad(loss(linear, *leaves), leaves, create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))
    for ours, theirs in zip(*seconds, strict=True):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max())
    for transform in (
        lambda linear: torch.func.grad(lambda w: loss(linear, x, w, bias))(weight),
        lambda linear: torch.func.vmap(lambda x: linear(x, weight, bias))(draw(3, ROWS, IN)),
        lambda linear: torch.func.vmap(torch.func.grad(lambda x: loss(linear, x, weight, bias)))(draw(3, ROWS, IN)),
        lambda linear: torch.func.jvp(lambda x: linear(x, weight, bias), (x,), (x.cos(),))[1],
        lambda linear: torch.func.jvp(torch.func.grad(lambda w: loss(linear, x, w, bias)), (weight,), (weight.cos(),))[
            1
        ],
    ):
        ours, theirs = transform(ops.linear), transform(F.linear)
        assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def test_only_the_gradients_that_are_asked_for():
    x, weight, bias = draw(ROWS, IN), draw(OUT, IN), draw(OUT)
    for wanted in ({0}, {1}, {2}, {0, 1}, {0, 2}, {1, 2}):
        leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate((x, weight, bias))]
        ops.linear(*leaves).sum().backward()
        assert {i for i, leaf in enumerate(leaves) if leaf.grad is not None} == wanted


def test_a_weight_that_changes_before_the_backward_pass_is_noticed():
    x, weight = draw(ROWS, IN).requires_grad_(), draw(OUT, IN)
    out = ops.linear(x, weight)
    weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_with_gradients(backend):
    x, weight, bias = (t.requires_grad_() for t in (draw(ROWS, IN), draw(OUT, IN), draw(OUT)))

    def call(x, weight, bias):
        return torch.ops.attnpack.linear(x, weight, bias).relu()

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for found, expected in zip(
        torch.autograd.grad(compiled(x, weight, bias).sum(), (x, weight, bias)),
        torch.autograd.grad(call(x, weight, bias).sum(), (x, weight, bias)),
        strict=True,
    ):
        assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    torch.library.opcheck(torch.ops.attnpack.linear.default, (x, weight, bias))


def test_autocast_casts_as_torch_does():
    layer, x = nn.Linear(IN, OUT), draw(ROWS, IN)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = ops.linear(x, layer.weight, layer.bias), layer(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


@pytest.mark.parametrize("training", [False, True])
def test_many_lengths_take_little_memory(training):
    """oneDNN keeps memory for each shape: 300 lengths once took 200 MB."""
    process = run_python(f"""
import torch, attnpack, ctypes
torch.set_num_threads(1)
def resident():
    ctypes.CDLL(None).malloc_trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * 4
x, weight = torch.randn(600, 128), torch.randn(128, 128, requires_grad={training})
def call(rows):
    out = attnpack.ops.linear(x[:rows], weight)
    if {training}:
        out.sum().backward()
call(600)
before = resident()
for rows in range(201, 501):
    call(rows)
print(resident() - before)
""")
    assert process.returncode == 0, process.text
    assert int(process.stdout) < 48 * 1024  # KiB


def test_every_number_of_rows():
    weight, bias = draw(OUT, IN), draw(OUT)
    for rows in (*range(60, 140), 255, 257, 511, 1000):
        x = draw(rows, IN)
        found = ops.linear(x, weight, bias)
        assert found.shape == (rows, OUT) and found.is_contiguous()
        assert_close(found, F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
