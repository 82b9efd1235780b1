"""backend.enable("linear"): programs of torch with their linear layers on the faster kernel."""

import copy

import attnpack
import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from attnpack import backend
from torch import nn
from torch.testing import assert_close

pytestmark = pytest.mark.onednn
WIDE = torch.backends.cpu.get_cpu_capability() == "AVX512"  # oneDNN gets bf16 only there
SUBCLASS = "a tensor is of a class of its own, or a graph is exported"


@pytest.fixture
def replaced():
    backend.reset_report()
    with backend.enable("linear") as replacement:
        yield replacement
    assert not backend.report()["linear"]["enabled"]


def counts():
    found = backend.report()["linear"]
    return found["taken"], found["passed_on"]


def perceptron(width=160, dtype=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 192, dtype=dtype), nn.GELU(), nn.Linear(192, width, dtype=dtype))


def step(model, x):
    """The output, and the gradients of x and the parameters."""
    leaves = [x.clone().requires_grad_(), *model.parameters()]
    out = model(leaves[0])
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def close(found, expected, tolerance=1e-5):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
        assert_close(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(130, 160), (2, 70, 160)])
def test_a_training_step(shape, dtype):
    model, x = perceptron(dtype=dtype), torch.randn(shape).to(dtype)
    expected = step(model, x)
    backend.reset_report()
    with backend.enable("linear"):
        found = step(model, x)
    assert counts()[0] == (2 if WIDE or dtype == torch.float32 else 0)
    close(found, expected, 1e-5 if dtype == torch.float32 else 2e-2)
    assert torch.equal(step(model, x)[0], expected[0])


@pytest.mark.parametrize("name", ["half", "double", "wrong shape", "complex", "meta", "sparse", "nested", "int8"])
def test_other_calls_are_torchs(name, replaced):
    x, weight = torch.randn(200, 160), torch.randn(192, 160)
    calls = {
        "half": lambda: F.linear(x.half(), weight.half()),
        "double": lambda: F.linear(x.double(), weight.double()),
        "wrong shape": lambda: F.linear(x, weight[:, 1:]),
        "complex": lambda: F.linear(x.to(torch.complex64), weight.to(torch.complex64)),
        "meta": lambda: F.linear(x.to("meta"), weight.to("meta")).shape,
        "sparse": lambda: F.linear(x.to_sparse(), weight),
        "nested": lambda: F.linear(torch.nested.nested_tensor([x, x[:3]]), weight).unbind()[0],
        "int8": lambda: F.linear(x.to(torch.int8), weight.to(torch.int8)),
    }

    def outcome():
        try:
            return calls[name]()
        except Exception as error:
            return type(error), str(error)

    found, before = outcome(), counts()[0]
    replaced.disable()
    expected = outcome()
    if isinstance(found, torch.Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected
    assert before == (1 if name == "nested" else 0)  # torch multiplies the rows of a nested tensor by linear


def test_transforms_are_torchs(replaced):
    model, x = perceptron(), torch.randn(130, 160)
    torch.func.vmap(torch.func.grad(lambda t: model(t).sum()))(x)
    torch.func.jvp(model, (x,), (x,))
    assert counts()[0] == 0


class Named(torch.Tensor):
    pass


def test_other_classes_are_torchs(replaced):
    F.linear(torch.randn(130, 160).as_subclass(Named), torch.randn(192, 160))
    assert counts()[0] <= 1  # a subclass without rules of its own may run on the operator
    program = torch.export.export(perceptron(), (torch.randn(130, 160),))
    assert {str(node.target) for node in program.graph.nodes if node.op == "call_function"} == {
        "aten.linear.default",
        "aten.gelu.default",
    }
    assert SUBCLASS in counts()[1]


@pytest.mark.parametrize("mode", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs_follow_each_change(mode, dynamic):
    model, x = perceptron(), torch.randn(130, 160)
    compiled = torch.compile(model, fullgraph=True, backend=mode, dynamic=dynamic)

    def ops(rows):
        with torch.profiler.profile() as profile:
            results = step(compiled, rows)
        close(results, step(model, rows), 1e-4)
        return "attnpack::linear" in {event.key for event in profile.key_averages()}

    assert not ops(x)
    with backend.enable("linear"):
        assert ops(x)
        assert ops(x[:100]) or not dynamic
    assert not ops(x)


def test_autocast(replaced):
    model, x = perceptron(), torch.randn(130, 160)
    with torch.autocast("cpu", torch.bfloat16):
        found = step(model, x)
    if WIDE:
        assert counts()[0] >= 2  # products of the backward pass count too where oneDNN is pinned
    replaced.disable()
    with torch.autocast("cpu", torch.bfloat16):
        close(found, step(model, x), 2e-2)


def test_together_with_sdpa():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(96, 4, 256, dropout=0.0, batch_first=True)
    x = torch.randn(4, 40, 96)
    expected = step(layer, x)
    evaluated = copy.deepcopy(layer).eval()
    with torch.no_grad():
        in_eval = evaluated(x)
    backend.reset_report()
    with backend.enable("linear"), backend.sdpa():
        for found, wanted in zip(step(layer, x), expected, strict=True):
            assert_close(found, wanted, rtol=1e-4, atol=1e-3)  # the gradient of the keys' bias is 0
        with torch.no_grad():
            close([evaluated(x)], [in_eval], 1e-4)
    assert counts()[0] >= 4 and backend.report()["sdpa"]["taken"] == 2


def test_attnpacks_modules_give_the_same_bits():
    torch.manual_seed(0)
    model, ids = attnpack.CausalLM(500, 96, 2, 4, hidden_dim=256), torch.randint(500, (2, 60))
    expected = model(ids)
    with backend.enable("linear"):
        assert torch.equal(model(ids), expected)


@pytest.mark.parametrize("mode", ["aot_eager", "inductor"])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_depend_on_data_compile(mode, replaced):
    weight, bias, x = torch.randn(192, 160), torch.randn(192), torch.randn(300, 160)
    for linear in (F.linear, attnpack.ops.linear):
        compiled = torch.compile(lambda x, linear=linear: linear(x[x[:, 0] > 0], weight, bias), backend=mode)
        assert_close(compiled(x), F.linear(x[x[:, 0] > 0], weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_sizes_stay_free(strict, replaced):
    model, x = perceptron().eval(), torch.randn(130, 160)
    for dim in (torch.export.Dim("n", min=2, max=4096), torch.export.Dim.AUTO):
        program = torch.export.export(model, (x,), dynamic_shapes=({0: dim},), strict=strict)
        (allowed,) = program.range_constraints.values()
        assert allowed.lower == 2 and allowed.upper >= 4096


def test_gradients_of_a_batch(replaced):
    x, weight = torch.randn(130, 160), torch.randn(192, 160, requires_grad=True)
    out = F.linear(x, weight)
    assert counts()[0] == 1
    vectors = torch.randn(3, 130, 192)
    (found,) = torch.autograd.grad(out, [weight], vectors, is_grads_batched=True)
    assert_close(found, vectors.transpose(1, 2) @ x, rtol=1e-4, atol=1e-4)


def test_onednn_that_is_switched_off_is_not_taken(replaced):
    with torch.backends.mkldnn.flags(enabled=False), torch.no_grad():
        F.linear(torch.randn(130, 160), torch.randn(192, 160))
    assert counts()[0] == 0
