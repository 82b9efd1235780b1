"""The few-row linear: values against fp64, and who may see it."""

import attnpack
import pytest
import torch
from attnpack import ops
from attnpack.linear import Linear, linear
from torch import nn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", (1, 2, 4, 7, 16, 17))
@pytest.mark.parametrize(("inputs", "outputs"), ((1, 1), (17, 3), (64, 65), (576, 192), (33, 600)))
def test_error_is_at_most_twice_that_of_torch(dtype, rows, inputs, outputs):
    torch.manual_seed(rows)
    x, weight, bias = (torch.randn(shape, dtype=dtype) for shape in ((rows, inputs), (outputs, inputs), (outputs,)))
    for b in (None, bias):
        exact = nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
        error = (ops.linear(x, weight, b) - exact).abs().max()
        assert error <= 2 * (nn.functional.linear(x, weight, b) - exact).abs().max() + 1e-6 * exact.abs().max()


def test_layouts_and_leading_dimensions():
    x, weight = torch.randn(2, 3, 40)[..., ::2], torch.randn(9, 64)[:, 5:25]
    torch.testing.assert_close(ops.linear(x, weight), nn.functional.linear(x, weight))
    torch.testing.assert_close(ops.linear(x, weight.t().contiguous().t()), nn.functional.linear(x, weight))
    assert ops.linear(torch.randn(0, 20), weight).shape == (0, 9)
    assert ops.linear(torch.randn(20), weight).shape == (9,)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others_or_on_threads(dtype):
    x, weight = torch.randn(16, 300, dtype=dtype), torch.randn(700, 300, dtype=dtype)
    whole = ops.linear(x, weight)
    for rows in (1, 3, 5):
        assert torch.equal(ops.linear(x[:rows], weight), whole[:rows])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(ops.linear(x, weight), whole)
    finally:
        torch.set_num_threads(before)


def test_gradients_are_those_of_torch():
    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (4, 5), (4,)))
    assert torch.autograd.gradcheck(ops.linear, (x, weight, bias))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("rows", (2, 40))
def test_opcheck(dtype, rows):
    arguments = (torch.randn(rows, 12, dtype=dtype), torch.randn(8, 12, dtype=dtype), torch.randn(8, dtype=dtype))
    torch.library.opcheck(torch.ops.attnpack.linear.default, arguments)


def test_layer_is_an_nn_linear_that_uses_the_op_only_without_gradients():
    layer = Linear(24, 10)
    assert isinstance(layer, nn.Linear) and repr(layer) == repr(nn.Linear(24, 10))
    x = torch.randn(2, 24)

    def seen(call):
        with torch.profiler.profile() as profile:
            call()
        return "attnpack::linear" in {event.key for event in profile.key_averages()}

    assert not seen(lambda: layer(x))
    with torch.no_grad():
        assert seen(lambda: layer(x))
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_weights_that_are_not_plain_tensors_go_to_torch():
    class Marked(torch.Tensor):
        pass

    weight = torch.randn(3, 4).as_subclass(Marked)
    with torch.no_grad():
        assert isinstance(linear(torch.randn(2, 4), weight), Marked)


def test_decoding_uses_it_in_cpp_too():
    module = attnpack.MultiQueryAttention(16, 4).cpp()
    with torch.no_grad(), torch.profiler.profile() as profile:
        module.forward(torch.randn(1, 1, 16))
    assert "attnpack::linear" in {event.key for event in profile.key_averages()}


def test_a_bias_that_does_not_fit_raises_as_in_torch():
    with pytest.raises(RuntimeError):
        ops.linear(torch.randn(1, 8), torch.randn(300, 8), torch.randn(2))
