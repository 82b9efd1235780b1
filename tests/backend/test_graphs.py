"""Graphs of torch.compile and torch.export under attnpack.backend. None is reused across a change of the state."""

import os
import sys

import pytest
import torch
import torch.nn.functional as F
from attnpack import backend
from processes import run_program

# argv: "torch", "attnpack" or "enabled". Prints the namespaces of the attention ops that the compiled graph runs.
PROGRAM = """
import sys
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
if sys.argv[1] != "torch":
    import attnpack
if sys.argv[1] == "enabled":
    attnpack.backend.enable("sdpa")
from torch._inductor.utils import run_and_get_code

def attend(q):
    return F.scaled_dot_product_attention(q, q, q) + 1

q = torch.randn(2, 4, 64, 32, generator=torch.Generator().manual_seed(0))
out, code = run_and_get_code(torch.compile(attend, fullgraph=True), q)
from torch._dynamo.utils import counters
caches = counters["aot_autograd"]
print("attnpack" in "".join(code) or (sys.argv[1] != "torch" and attnpack.backend.report()["sdpa"]["taken"] > 0),
      caches["autograd_cache_hit"], caches["autograd_cache_miss"], torch.allclose(out, attend(q), atol=1e-5))
"""


def attend(q):
    return F.scaled_dot_product_attention(q, q, q)


@pytest.fixture(autouse=True)
def nothing_counted():
    backend.reset_report()


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_graphs_in_memory(compiler):
    compiled = torch.compile(attend, fullgraph=True, backend=compiler)
    q = torch.randn(2, 4, 64, 32)
    expected = attend(q)
    for enabled in (False, True, False, True):
        backend.reset_report()
        replacement = backend.enable("sdpa") if enabled else None
        q.grad = None
        leaf = q.detach().requires_grad_()
        out = compiled(leaf)
        out.sum().backward()
        assert torch.allclose(out, expected, atol=1e-5) and leaf.grad.isfinite().all()
        node = type(out.grad_fn).__name__
        # inductor may take its own graph of the same state from the disk; then nothing is traced
        if compiler == "aot_eager":
            assert (backend.report()["sdpa"]["taken"] > 0) == enabled, node
        if replacement:
            replacement.disable()


@pytest.mark.long
def test_graphs_on_disk(tmp_path):
    """One cache for four processes. A graph is found again only by a process in the same state."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    answers = {}
    for state in ("enabled", "torch", "attnpack", "enabled"):
        process = run_program(sys.executable, "-c", PROGRAM, state, env=environment, cwd="/")
        assert process.returncode == 0, process.text
        answers.setdefault(state, []).append(process.stdout.split())
    assert [words[0] for words in answers["torch"]] == ["False"]
    assert [words[0] for words in answers["attnpack"]] == ["False"]
    assert [words[0] for words in answers["enabled"]] == ["True", "True"]
    assert [words[1:3] for words in answers["enabled"]] == [["0", "1"], ["1", "0"]]  # miss, then hit
    assert answers["attnpack"][0][1:3] == ["0", "1"]
    assert all(words[3] == "True" for found in answers.values() for words in found)


class Layer(torch.nn.Module):
    def forward(self, q):
        return attend(q)


def test_exported_graphs_stay_portable():
    q = torch.randn(2, 4, 16, 8)
    with backend.sdpa():
        exported = torch.export.export(Layer(), (q,))
        lowered = exported.run_decompositions()
    for program in (exported, lowered):
        assert "attnpack" not in str(program.graph)
        assert torch.allclose(program.module()(q), attend(q), atol=1e-6)


def test_a_dynamic_length_and_a_mask_in_one_graph():
    def call(q, mask):
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    with backend.sdpa():
        for length in (5, 9, 13):
            q, mask = torch.randn(2, 4, length, 8), torch.ones(length, length, dtype=torch.bool).tril()
            assert torch.allclose(compiled(q, mask), call(q, mask), atol=1e-6)
    assert backend.report()["sdpa"]["passed_on"] == {}
    assert "torch._dynamo" in sys.modules


def kept_rows(x, keep):
    """[rows, 32] -> [rows that are kept, 4, 1, 8]: a size that depends on data."""
    return x[keep].unflatten(-1, (4, 1, 8))


@pytest.mark.parametrize("masked", [False, True])
def test_a_size_that_depends_on_data(masked):
    def tokens(x, keep):  # the kept rows are a batch
        y = kept_rows(x, keep)
        mask = torch.ones(y.size(0), 1, 1, 1, dtype=torch.bool) if masked else None
        return F.scaled_dot_product_attention(y, y, y, attn_mask=mask)

    def keys(x, keep):  # the kept rows are keys and queries
        y = x[keep].unflatten(-1, (4, 8)).transpose(0, 1)[None]
        mask = torch.ones(y.size(-2), y.size(-2), dtype=torch.bool).tril() if masked else None
        return F.scaled_dot_product_attention(y, y, y, attn_mask=mask)

    x, keep = torch.randn(9, 32), torch.arange(9) % 3 > 0
    with backend.sdpa(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for call in (tokens, keys):
            torch._dynamo.reset()
            compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
            assert torch.allclose(compiled(x, keep), call(x, keep), atol=1e-6)
            assert torch.allclose(compiled(x, ~keep), call(x, ~keep), atol=1e-6)


def test_a_size_that_depends_on_data_exports():
    class Kept(torch.nn.Module):
        def forward(self, x, keep):
            return attend(kept_rows(x, keep))

    x, keep = torch.randn(9, 32), torch.arange(9) % 3 > 0
    with backend.sdpa():
        program = torch.export.export(Kept(), (x, keep))
        assert torch.allclose(program.module()(x, ~keep), Kept()(x, ~keep), atol=1e-6)
