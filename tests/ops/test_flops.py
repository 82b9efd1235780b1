"""FlopCounterMode counts our ops as it counts torch's own attention and products."""

import attnpack
import pytest
import torch
import torch.nn.functional as F
from attnpack import attention
from attnpack.ops import linear, linears
from processes import run_python
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


def count(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def tensors(*shapes, **options):
    return [torch.randn(shape, **options) for shape in shapes]


SHAPES = [
    ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
    ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)),  # grouped heads, values of another width
    ((1, 6, 1, 16), (1, 1, 50, 16), (1, 1, 50, 16)),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_attention_as_torchs_own(shapes):
    q, k, v = tensors(*shapes, requires_grad=True)
    heads = shapes[0][1]
    full = [(s[0], heads, *s[2:]) for s in shapes]  # torch's formulas want as many kv heads: forward until 2.12
    forward = sdpa_flop_count(*full)
    assert count(lambda: attention(q, k, v, causal=True)) == forward
    with sdpa_kernel(SDPBackend.MATH):
        assert count(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)) == forward
    out_shape = (*shapes[0][:3], shapes[2][3])
    backward = sdpa_backward_flop_count(out_shape, *full)
    assert count(lambda: attention(q, k, v, window=(1, 1)).sum().backward()) == forward + backward


def test_linear_attention_counts_products_with_states_and_within_chunks():
    q, v, beta = tensors((2, 2, 10, 8), (2, 4, 10, 6), (2, 4, 10), requires_grad=True)
    plain, delta = (2 * 4 * 10 * x for x in (4 * 8 * 6 + 64 * (8 + 6), 6 * 8 * 6 + 128 * (8 + 6)))
    assert count(lambda: attnpack.linear_attention(q, q, v)) == plain
    assert count(lambda: attnpack.linear_attention(q, q, v, beta=beta)) == delta
    assert count(lambda: attnpack.linear_attention(q, q, v, beta=beta).sum().backward()) == 3 * delta


def test_a_head_map_counts_query_heads():
    q, k, v = tensors((2, 5, 3, 8), (2, 3, 7, 8), (2, 3, 7, 6))
    assert count(lambda: attention(q, k, v, head_map=[2, 0, 0, 1, 0])) == 2 * 2 * 5 * 3 * 7 * (8 + 6)


def test_named_keys_count_alone():
    q, k, v = tensors((2, 4, 3, 8), (2, 2, 700, 8), (2, 2, 700, 6), requires_grad=True)
    index = torch.randint(70, (2, 1, 3, 5))
    products = 2 * 2 * 4 * 3 * (8 + 6)
    assert count(lambda: attention(q, k, v, key_index=index)) == products * 5
    assert count(lambda: attention(q, k, v, key_index=index, key_block=10)) == products * 50
    assert count(lambda: attention(q, k, v, key_index=index % 4, key_block=200, scale=0.1)) == products * 700  # no more
    backward = 2 * 2 * 4 * 3 * (3 * 8 + 2 * 6)
    assert count(lambda: attention(q, k, v, key_index=index).sum().backward()) == (products + backward) * 5


def test_linear_as_torchs_own():
    x, w, u = tensors((2, 3, 8), (5, 8), (4, 8))
    assert count(lambda: linear(x, w)) == count(lambda: F.linear(x, w)) == 2 * 2 * 3 * 8 * 5
    assert count(lambda: linears(x, [w, u])) == 2 * 2 * 3 * 8 * (5 + 4)


@pytest.mark.parametrize("trained", [False, True])
def test_a_module(trained):
    layer = attnpack.GroupedQueryAttention(32, 4, 2, rope=attnpack.RotaryEmbedding(8))
    x = torch.randn(2, 5, 32)
    rows, products = 2 * 5, 32 * 32 + 2 * 32 * 16 + 32 * 32
    forward, scores = 2 * rows * products, 2 * 2 * 4 * 5 * 5 * 8

    def call():
        with torch.set_grad_enabled(trained):
            out = layer(x)
        if trained:
            out.sum().backward()

    # Backward: each weight's gradient, and those of what enters the last one; x has none.
    backward = forward + 2 * rows * 32 * 32 + 5 * scores if trained else 0
    assert count(call) == forward + 2 * scores + backward


def test_compiled_and_exported():
    """torch runs a compiled function in eager mode while it counts."""
    q, k, v = tensors(*SHAPES[1], requires_grad=True)

    class Call(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, causal=True).square().sum()

    call = Call()
    compiled = torch.compile(call, backend="aot_eager")
    compiled(q, k, v).backward()
    assert count(lambda: compiled(q, k, v).backward()) == count(lambda: call(q, k, v).backward())
    exported = torch.export.export(call, (q, k, v)).module()
    assert count(lambda: exported(q, k, v)) == count(lambda: call(q, k, v)) > 0


@pytest.mark.parametrize("order", ["torch.utils.flop_counter, attnpack", "attnpack, torch.utils.flop_counter"])
def test_the_order_of_imports_does_not_matter(order):
    program = f"""
import {order}, sys
assert torch.ops.attnpack.attention in torch.utils.flop_counter.flop_registry
assert not any(type(finder).__module__ == "attnpack.backend.flops" for finder in sys.meta_path)
"""
    ran = run_python("import torch\n" + program)
    assert ran.returncode == 0, ran.text


def test_importing_attnpack_leaves_the_counter_alone():
    ran = run_python('import attnpack, sys; assert "torch.utils.flop_counter" not in sys.modules')
    assert ran.returncode == 0, ran.text


def test_packed_sequences_count_as_their_sum():
    from attnpack import attention, attention_varlen

    q, ends = torch.randn(10, 4, 8, requires_grad=True), torch.tensor([0, 3, 3, 10])
    k = torch.randn(10, 2, 8)
    with FlopCounterMode(display=False) as packed:
        attention_varlen(q, k, k, ends).sum().backward()
    with FlopCounterMode(display=False) as alone:
        for begin, end in ((0, 3), (3, 10)):
            rows, keys = (x[begin:end].transpose(0, 1).unsqueeze(0) for x in (q, k))
            attention(rows, keys, keys).sum().backward()
    assert packed.get_total_flops() == alone.get_total_flops() > 0
