"""The few-row linear: values against fp64, and the layers that must not take it."""

import copy

import attnpack
import pytest
import torch
from attnpack import ops
from attnpack.nn.linear import linear, project
from attnpack.tools.threads import threads
from processes import run_python
from torch import nn
from torch.testing import assert_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The most rows of the kernel for few rows: more where MKL is slow and oneDNN takes large fp32 products.
MANY = "oneDNN for fp32 from" in attnpack._C.linear_kernels()
MOST_ROWS = {torch.float32: 24, torch.bfloat16: 32, torch.float16: 16} if MANY else dict.fromkeys(DTYPES, 16)
SHAPES = ((1, 1), (300, 1), (17, 3), (64, 65), (576, 192), (33, 600), (4100, 70))  # inputs, outputs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", (1, 2, 4, 7, 16, 24, 31, 32, 33))
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
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
    x, weight = torch.randn(MOST_ROWS[dtype], 300, dtype=dtype), torch.randn(700, 300, dtype=dtype)
    whole = ops.linear(x, weight)
    for rows in (1, 2, 3, 5, 6, 7, 12, 16):
        assert torch.equal(ops.linear(x[:rows], weight), whole[:rows])
    with threads(1):
        assert torch.equal(ops.linear(x, weight), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("most", (False, True))
def test_a_call_with_gradients_has_the_bits_of_one_without(dtype, most):
    x, weight = torch.randn(MOST_ROWS[dtype] if most else 3, 300, dtype=dtype), torch.randn(70, 300, dtype=dtype)
    given = [t.clone().requires_grad_() for t in (x, weight)]
    found = ops.linear(*given)
    assert torch.equal(found, ops.linear(x, weight))
    grad = torch.randn_like(found)
    found.backward(grad)
    exact = [grad.double() @ weight.double(), grad.double().T @ x.double()]
    for tensor, wanted in zip(given, exact, strict=True):
        torch.testing.assert_close(tensor.grad, wanted.to(dtype))


def test_gradients_are_those_of_torch():
    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (4, 5), (4,)))
    assert torch.autograd.gradcheck(ops.linear, (x, weight, bias))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("rows", (2, 40))
def test_opcheck(dtype, rows):
    arguments = (torch.randn(rows, 12, dtype=dtype), torch.randn(8, 12, dtype=dtype), torch.randn(8, dtype=dtype))
    torch.library.opcheck(torch.ops.attnpack.linear.default, arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", (1, 5, 16, 17))
@pytest.mark.parametrize("biased", (False, True))
def test_several_at_once_are_each_alone_bit_by_bit(dtype, rows, biased):
    x = torch.randn(rows, 200, dtype=dtype)
    weights = [torch.randn(outputs, 200, dtype=dtype) for outputs in (65, 1, 700)]
    biases = [torch.randn(len(weight), dtype=dtype) for weight in weights] if biased else []
    found = ops.linears(x, weights, biases)
    for i, weight in enumerate(weights):
        assert torch.equal(found[i], ops.linear(x, weight, biases[i] if biased else None))
    assert ops.linears(x, []) == []


def test_several_at_once_of_which_one_does_not_fit_go_to_torch():
    x, weights = torch.randn(2, 8), [torch.randn(4, 8), torch.randn(8, 5).t()]
    for found, weight in zip(ops.linears(x, weights), weights, strict=True):
        torch.testing.assert_close(found, nn.functional.linear(x, weight))
    with pytest.raises(ValueError, match="biases: got 1, want none or 2, one for each weight"):
        ops.linears(x, weights, [torch.randn(4)])
    with pytest.raises(ValueError, match=r"input has shape \[2, 8\], wants \[\.\.\., 7\] as weight is \[4, 7\]"):
        ops.linears(x, [torch.randn(4, 7)])
    with pytest.raises(TypeError, match="weights is .*wants a list of tensors"):
        ops.linears(x, [1])


def test_gradients_of_several_at_once_are_those_of_torch():
    x, *weights = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (4, 5), (2, 5)))
    assert torch.autograd.gradcheck(lambda x, *weights: tuple(ops.linears(x, weights)), (x, *weights))
    with torch.autocast("cpu", torch.bfloat16):
        assert [y.dtype for y in ops.linears(torch.randn(1, 5), [torch.randn(4, 5)])] == [torch.bfloat16]
    weights = [torch.randn(8, 12), torch.randn(4, 12)]
    for rows in (2, 40):
        torch.library.opcheck(torch.ops.attnpack.linears.default, (torch.randn(rows, 12), weights, []))
        vmapped = torch.vmap(lambda x: torch.stack(torch.ops.attnpack.linears(x, weights[:1], [])))(
            torch.randn(3, rows, 12)
        )
        assert vmapped.shape == (3, 1, rows, 8)


def ops_of(call) -> set[str]:
    with torch.profiler.profile() as profile:
        call()
    return {event.key for event in profile.key_averages()}


def test_plain_layers_are_computed_by_the_op_with_gradients_too():
    layer, x = nn.Linear(64, 48), torch.randn(2, 64)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert "attnpack::linear" in ops_of(lambda: project(layer, x))
            torch.testing.assert_close(project(layer, x), layer(x))


def every_linear(module):
    return [child for child in module.modules() if isinstance(child, nn.Linear)]


def test_projections_are_torchs_own_so_that_quantisers_find_them():
    """quantize_dynamic, like other tools, looks for the exact type."""
    torch.manual_seed(0)
    model = attnpack.CausalLM(11, 24, 2, 4, hidden_dim=32).eval()
    assert {type(layer) for layer in every_linear(model)} == {nn.Linear}
    assert {type(layer) for layer in every_linear(attnpack.SelfAttention(24))} == {nn.Linear}
    quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear})
    assert not every_linear(quantised)
    assert type(quantised.layers[0].self_attn.q_proj) is torch.ao.nn.quantized.dynamic.Linear
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        error = (quantised(ids) - model(ids)).abs().max()
        assert 0 < error < 0.1 * model(ids).abs().max()
    with pytest.raises(TypeError, match="q_proj is a Linear, which C\\+\\+ cannot run"):
        quantised.generate(ids, max_new_tokens=1)


class Doubled(nn.Module):
    """Like LoRA: holds the layer, and adds to its output."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return 2 * self.base(x)


def watch_all(module):
    return torch.nn.modules.module.register_module_forward_hook(
        lambda layer, inputs, out: 2 * out if layer is module.v_proj else None
    )


def own_forward(layer):
    layer.forward = lambda x: 2 * nn.functional.linear(x, layer.weight)


CHANGES = {
    "replaced": lambda m: setattr(m, "v_proj", Doubled(m.v_proj)),
    "forward hook": lambda m: m.v_proj.register_forward_hook(lambda layer, inputs, out: 2 * out),
    "pre-hook": lambda m: m.v_proj.register_forward_pre_hook(lambda layer, inputs: (2 * inputs[0],)),
    "hook on all modules": watch_all,
    "parametrised": lambda m: nn.utils.parametrize.register_parametrization(m.v_proj, "weight", Twice()),
    "a forward of its own": lambda m: own_forward(m.v_proj),
    "a subclass": lambda m: setattr(m.v_proj, "__class__", type("Other", (nn.Linear,), {"forward": twice})),
}


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def twice(self, x):
    return 2 * nn.functional.linear(x, self.weight)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "no_grad"])
def test_what_is_done_to_a_projection_takes_effect(change, gradients):
    """Each case doubles the values and thereby the result, which is linear in them."""
    torch.manual_seed(0)
    module, x = attnpack.MultiHeadAttention(24, 4), torch.randn(1, 3, 24)
    with torch.set_grad_enabled(gradients):
        before = module(x)
        handle = CHANGES[change](module)
        torch.testing.assert_close(module(x), 2 * before)
    if change == "hook on all modules":
        handle.remove()


class Doubling(torch.overrides.TorchFunctionMode):
    """Doubles every linear call."""

    seen = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.seen += function is nn.functional.linear
        return 2 * out if function is nn.functional.linear else out


def test_a_function_mode_sees_the_calls_of_linear_layers():
    module, x = attnpack.FeedForward(16, 32), torch.randn(1, 3, 16)
    with torch.no_grad():
        plain = module(x)
        with Doubling() as mode:
            assert not torch.equal(module(x), plain)
        assert mode.seen == 3
        assert torch.equal(module(x), plain)


def test_a_default_device_is_no_mode_that_looks_at_linear_layers():
    module, x = attnpack.FeedForward(16, 32), torch.randn(1, 1, 16)
    with torch.no_grad(), torch.device("cpu"):
        assert "attnpack::linear" in ops_of(lambda: project(module.up_proj, x))


PATCHED_BEFORE = """
import torch
{patch}
import attnpack
module, x = attnpack.FeedForward(16, 32), torch.randn(2, 3, 16)
with torch.no_grad():
    ours = module(x)
    torch.nn.Linear.forward = theirs
    plain = module(x)
print(float((ours - plain).abs().max()) > 0.1, calls)
"""
PATCHES = {
    "a function": """
theirs, calls = torch.nn.Linear.forward, []
torch.nn.Linear.forward = lambda self, x: (calls.append(1), 2 * theirs(self, x))[1]""",
    "a wrapper that shows torch's name": """
import functools
theirs, calls = torch.nn.Linear.forward, []
@functools.wraps(theirs)
def forward(self, x):
    calls.append(1)
    return 2 * theirs(self, x)
torch.nn.Linear.forward = forward""",
}


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patch_of_nn_linear_before_the_import_takes_effect(patch):
    ran = run_python(PATCHED_BEFORE.format(patch=PATCHES[patch]))
    assert ran.stdout.strip() == "True [1, 1, 1]", ran.text


def test_a_forward_of_its_own_is_not_run_by_cpp():
    module = attnpack.MultiHeadAttention(24, 4)
    own_forward(module.v_proj)
    with pytest.raises(TypeError, match="v_proj has a forward of its own"):
        module.cpp()


def test_decoding_compiles_whole():
    module, x = attnpack.MultiHeadAttention(24, 4), torch.randn(1, 1, 24)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, fullgraph=True)(x), module(x))


def test_weights_that_are_not_plain_tensors_go_to_torch():
    class Marked(torch.Tensor):
        pass

    weight = torch.randn(3, 4).as_subclass(Marked)
    with torch.no_grad():
        assert isinstance(linear(torch.randn(2, 4), weight), Marked)


def test_decoding_uses_it_in_cpp_too():
    module = attnpack.MultiQueryAttention(16, 4).cpp()
    with torch.no_grad():
        assert {"attnpack::linear", "attnpack::linears"} & ops_of(lambda: module.forward(torch.randn(1, 1, 16)))


X, WEIGHT, BIAS = torch.ones(2, 8), torch.ones(4, 8), torch.ones(4)
WRONG = {
    "a number": ((torch.tensor(1.0), WEIGHT, BIAS), r"input has shape \[\], wants \[\.\.\., 8\] as weight is \[4, 8\]"),
    "width": ((torch.ones(2, 7), WEIGHT, BIAS), r"input has shape \[2, 7\], wants \[\.\.\., 8\]"),
    "weight of rank 1": ((X, torch.ones(8), BIAS), r"weight has shape \[8\], wants \[out, in\]"),
    "weight of rank 3": ((X, torch.ones(1, 4, 8), BIAS), r"weight has shape \[1, 4, 8\], wants \[out, in\]"),
    "bias": ((X, WEIGHT, torch.ones(2)), r"bias has shape \[2\], wants \[4\] as weight is \[4, 8\]"),
    "bias of rank 2": ((X, WEIGHT, torch.ones(1, 4)), r"bias has shape \[1, 4\], wants \[4\]"),
    "integers": ((X.long(), WEIGHT.long(), BIAS.long()), "input has dtype Long, wants a float dtype"),
    "bools": ((X.bool(), WEIGHT.bool(), BIAS.bool()), "input has dtype Bool, wants a float dtype"),
    "dtypes": ((X, WEIGHT.double(), BIAS), "input has dtype Float, weight Double, bias Float: cast them to one"),
    "dtype of the bias": ((X, WEIGHT, BIAS.half()), "input has dtype Float, weight Float, bias Half: cast"),
    "devices": ((X, WEIGHT.to("meta"), BIAS), "input is on cpu, weight on meta, bias on cpu: move them to one device"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("gradients", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_does_not_fit_is_named(wrong, gradients, device):
    (x, weight, bias), message = WRONG[wrong]
    if wrong != "devices":
        x, weight, bias = (t.to(device) for t in (x, weight, bias))
    if gradients and x.is_floating_point():
        x = x.clone().requires_grad_()
    for call in (lambda: ops.linear(x, weight, bias), lambda: ops.linears(x, [weight], [bias])):
        with pytest.raises(ValueError, match=f"attnpack: {message}"):
            call()


def test_autocast_names_shapes_and_takes_other_dtypes():
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.linear(X, WEIGHT.half(), BIAS).dtype == torch.bfloat16
        with pytest.raises(ValueError, match=r"attnpack: bias has shape \[2\]"):
            ops.linear(X, WEIGHT, torch.ones(2))


@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64), (0, 64), (2, 0, 64)], ids=str)
def test_gradients_of_no_outputs_and_of_no_rows(shape):
    for outputs in (0, 3):
        leaves = [torch.randn(s, requires_grad=True) for s in (shape, (outputs, 64), (outputs,))]
        out = ops.linear(*leaves)
        expected = torch.nn.functional.linear(*leaves)
        assert_close(out, expected)
        for found, theirs in zip(*(torch.autograd.grad(o.sum(), leaves) for o in (out, expected)), strict=True):
            assert_close(found, theirs)
