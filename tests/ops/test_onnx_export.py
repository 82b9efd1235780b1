"""Models exported to ONNX with our translations give in onnxruntime what they give in eager mode."""

from collections import Counter

import attnpack
import onnxruntime
import pytest
import torch
from attnpack import attention
from marks import long
from op_cases import INF, draw
from processes import run_python
from torch.export import Dim
from torch.testing import assert_close

onnxruntime.set_default_logger_severity(3)
SHAPES = (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)
LENS = torch.tensor([7, 0])
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.05])
MASKS = {"rows": (2, 1, 5, 7), "padding": (2, 1, 1, 7), "columns": (7,), "heads": (4, 1, 7), "one per row": (5, 1)}


class Attention(torch.nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.settings = settings

    def forward(self, *tensors):
        return attention(*tensors, **self.settings)


def export(model, tensors, dynamic=None):
    return torch.onnx.export(
        model.eval(), tensors, dynamo=True, opset_version=23, dynamic_shapes=dynamic, verbose=False,
        custom_translation_table=attnpack.onnx.translation_table(),
    )  # fmt: skip


def check_export(model, *batches, dynamic=None, rtol=1e-4, atol=2e-5):
    """Exports with the first tensors, runs with all, and returns how often each node occurs."""
    program = export(model, batches[0], dynamic)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    for tensors in batches:
        expected = model(*tensors)
        names = [each.name for each in session.get_inputs()]
        got = session.run(None, {name: x.numpy() for name, x in zip(names, tensors, strict=True)})
        for a, b in zip(got, expected if isinstance(expected, tuple) else (expected,), strict=True):
            assert_close(torch.from_numpy(a), b.detach(), rtol=rtol, atol=atol)
    assert {node.domain for node in program.model.graph} == {""}
    return Counter(node.op_type for node in program.model.graph)


def tensors(dtype=torch.float32):
    return tuple(draw(*shape, dtype=dtype, seed=n) for n, shape in enumerate(SHAPES))


# Settings, and whether the Attention node computes them.
SETTINGS = {
    "plain": ({}, True),
    "causal": ({"causal": True}, True),
    "offset": ({"causal": True, "q_offset": 2}, True),
    "rows without keys": ({"causal": True, "q_offset": -2}, True),
    "bottom right": ({"causal": True, "q_offset": "end"}, True),
    "offsets": ({"causal": True, "q_offset": torch.tensor([2, -3])}, True),
    "far": ({"causal": True, "q_offset": 2**62 + 2, "window": (2**62, -1)}, True),
    "window": ({"window": (1, 2)}, True),
    "chunk": ({"chunk": 3, "q_offset": -2}, True),
    "causal chunk": ({"chunk": 2, "causal": True}, True),
    "causal window": ({"window": (1, -1), "causal": True}, True),
    "lengths": ({"kv_lens": LENS, "causal": True, "q_offset": "end"}, True),
    "softcap": ({"softcap": 1.5}, True),
    "softcap and causal": ({"softcap": 1.5, "causal": True}, False),
    "sinks": ({"sinks": draw(4), "kv_lens": LENS}, False),
    "alibi": ({"alibi_slopes": SLOPES, "causal": True}, True),
    "alibi and window": ({"alibi_slopes": SLOPES, "window": (1, 1), "q_offset": 3}, True),
    "head map": ({"head_map": [1, 0, 0, 1], "causal": True}, True),
    "head map and sinks": ({"head_map": [1, 0, 0, 0], "softcap": 2.0, "sinks": draw(4)}, False),
    "named keys": ({"key_index": torch.tensor([[[[0, 3, -1]] * 5] * 2, [[[6, 2, 2]] * 5] * 2])}, True),
    "named blocks of all heads": (
        {"key_index": torch.arange(10).view(2, 1, 5, 1) % 4, "key_block": 2, "causal": True, "q_offset": 2},
        True,
    ),
    "named keys and sinks": ({"key_index": torch.arange(10).view(2, 1, 5, 1) % 7, "sinks": draw(4)}, False),
    "scale": ({"scale": 0.3}, True),
    "negative scale": ({"scale": -0.3}, False),
}


class Calls(torch.nn.Module):
    """Several calls of attention on the same tensors: one export is much faster than one for each."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def forward(self, *tensors):
        outs = [attention(*tensors[:3], *tensors[3 + i : 4 + i], **call) for i, call in enumerate(self.calls)]
        return tuple(x for out in outs for x in (out if isinstance(out, tuple) else (out,)))


@pytest.mark.parametrize("return_lse", [True, long(False)])
@pytest.mark.parametrize("by_node", [True, False])
def test_settings(by_node, return_lse):
    calls = [settings | {"return_lse": return_lse} for settings, node in SETTINGS.values() if node == by_node]
    assert len(calls) > 4
    nodes = len(calls) - 1 if by_node else 0  # "far" is the same node as "offset"
    assert check_export(Calls(calls), tensors())["Attention"] == nodes


def test_the_plain_call_is_one_node():
    assert check_export(Attention(causal=True), tensors()) == {"Attention": 1}


@pytest.mark.parametrize(("kind", "softcap"), [("bool", 0.0), ("float", 1.5), long("bool", 1.5), long("float", 0.0)])
def test_masks(softcap, kind):
    masks = [draw(*shape, seed=9) for shape in MASKS.values()]
    masks = [mask > -0.3 if kind == "bool" else mask.masked_fill(mask > 1, -INF) for mask in masks]
    call = {"causal": True, "q_offset": 1, "softcap": softcap, "return_lse": True}
    nodes = check_export(Calls([call] * len(masks)), (*tensors(), *masks))
    assert nodes["Attention"] == (softcap == 0) * len(masks)


def test_half_precision():
    check_export(Attention(causal=True, window=(2, -1)), tensors(torch.float16), rtol=0, atol=2e-3)


def test_lengths_may_change():
    batch, q_len, kv_len = (Dim(name, min=2, max=64) for name in ("batch", "q_len", "kv_len"))
    dynamic = (({0: batch, 2: q_len}, {0: batch, 2: kv_len}, {0: batch, 2: kv_len}),)
    other = draw(3, 4, 2, 8), draw(3, 2, 9, 8), draw(3, 2, 9, 6)
    check_export(Attention(causal=True, q_offset="end"), tensors(), other, dynamic=dynamic)


MODULES = {
    "mha": lambda: attnpack.MultiHeadAttention(32, 4),
    "gqa": lambda: attnpack.GroupedQueryAttention(
        32, 4, 2, causal=True, rope=attnpack.RotaryEmbedding(8), qk_norm=True, window=(3, -1)
    ),
    "interleaved": lambda: attnpack.GroupedQueryAttention(
        32, 4, 2, causal=True, rope=attnpack.RotaryEmbedding(4, interleaved=True)
    ),
    "softcap": lambda: attnpack.GroupedQueryAttention(32, 4, 2, causal=True, softcap=3.0, alibi=True),
    "sparse": lambda: attnpack.SparseAttention(
        32, 4, 2, selector="mean", top_k=2, key_block=3, causal=True, rope=attnpack.RotaryEmbedding(8)
    ),
    "latent": lambda: attnpack.MultiHeadLatentAttention(
        32, 4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, causal=True,
        rope=attnpack.RotaryEmbedding(4),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "gradients"),
    [
        ("gqa", True),
        *(long(name, False) if name in ("mha", "gqa", "interleaved") else (name, False) for name in MODULES),
        *(long(name, True) for name in MODULES),
    ],
)
def test_modules(name, gradients):
    torch.manual_seed(0)
    batch, length = Dim("batch", min=1, max=64), Dim("length", min=2, max=512)
    with torch.set_grad_enabled(gradients):
        model = MODULES[name]()
        check_export(model, (draw(2, 5, 32),), (draw(3, 40, 32),), dynamic=({0: batch, 1: length},))


def test_a_language_model_at_far_positions():
    torch.manual_seed(0)
    model = attnpack.CausalLM(vocab_size=50, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2)
    dynamic = ({0: Dim("batch", min=1, max=64), 1: Dim("length", min=2, max=4096)},)
    short, far = (torch.randint(0, 50, shape) for shape in ((2, 5), (1, 2000)))
    nodes = check_export(model, (short,), (far,), dynamic=dynamic, atol=2e-4)
    assert nodes["Attention"] == 2


def test_rope_tables_at_far_positions():
    class Table(torch.nn.Module):
        def forward(self, positions):
            return attnpack.ops.rope_table(positions, [1.0, 0.3, 0.1], 1.5)

    check_export(Table(), (torch.tensor([0, 5, 999_983, 2**22 + 1]),), rtol=0, atol=1e-5)


def test_linear_and_norm_alone():
    class Ops(torch.nn.Module):
        def forward(self, x, weight, bias, scale):
            return attnpack.ops.rms_norm(attnpack.ops.linear(x, weight, bias), scale, 1e-3)

    with torch.no_grad():
        check_export(Ops(), (draw(2, 3, 8), draw(6, 8), draw(6), draw(6)))


def messages(error):
    """Those of an error and of its causes."""
    while error is not None:
        yield str(error)
        error = error.__cause__ or error.__context__


class Packed(torch.nn.Module):
    def forward(self, q, k, v, ends):
        return attnpack.attention_varlen(q, k, v, ends)


def test_what_is_refused():
    dynamic = attnpack.RotaryEmbedding(8, max_positions=16, scaling={"rope_type": "dynamic", "factor": 2.0})
    for model, given, sentence in (
        (Attention(dropout_p=0.5), tensors(), "dropout_p is 0.5, wants 0 for ONNX: call .eval()"),
        (attnpack.MultiHeadAttention(32, 4, rope=dynamic), (draw(2, 5, 32),), "frequencies that follow the length"),
        (Packed(), (*(draw(5, 2, 8) for _ in "qkv"), torch.tensor([0, 2, 5])), "export the model with padded tensors"),
    ):
        with pytest.raises(torch.onnx.errors.OnnxExporterError) as caught:
            export(model, given)
        assert any(sentence in message for message in messages(caught.value))


def test_without_onnxscript():
    ran = run_python("import sys; sys.modules['onnxscript'] = None; import attnpack; attnpack.onnx.translation_table()")
    assert ran.returncode == 1
    assert "attnpack.onnx needs onnxscript, and onnxscript is not installed: run `pip install onnxscript`" in ran.text


def test_importing_attnpack_imports_no_onnx():
    ran = run_python("import attnpack, sys; assert not {'onnx', 'onnxscript', 'onnx_ir'} & set(sys.modules)")
    assert ran.returncode == 0, ran.text
