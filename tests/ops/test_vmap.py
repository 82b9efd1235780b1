"""vmap of the ops: one call of a kernel on samples folded into the batch or the heads; torch's loop is switched off."""

import attnpack
import pytest
import torch
from attnpack import apply_rope, attention, attention_scores, merge_states
from attnpack.ops import add_rms_norm, linear, linears, rms_norm, rope_table, rope_table_by_length, swiglu
from op_cases import draw
from processes import run_python
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.testing import assert_close

SHAPES = (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)
LENS = torch.tensor([[7, 3], [2, 0], [5, 6]])
SINKS = draw(3, 4, seed=5)


@pytest.fixture(autouse=True)
def no_loops():
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


def check_against_loop(function, in_dims, *tensors):
    samples = next(x.shape[d] for x, d in zip(tensors, in_dims, strict=True) if d is not None)

    def sample(n):
        return function(*(x if d is None else x.select(d, n) for x, d in zip(tensors, in_dims, strict=True)))

    each = [sample(n) for n in range(samples)]
    whole = isinstance(each[0], torch.Tensor)
    expected = torch.stack(each) if whole else tuple(torch.stack(parts) for parts in zip(*each, strict=True))
    assert_close(vmap(function, in_dims)(*tensors), expected)


def make_tensors(in_dims, seed=0):
    """query, key and value with 3 samples at these dims."""
    drawn = [draw(3, *shape, dtype=torch.float64, seed=seed + n) for n, shape in enumerate(SHAPES)]
    return [x[0] if d is None else x.movedim(0, d) for x, d in zip(drawn, in_dims, strict=True)]


def gradients(call, *places):
    return grad(lambda *x: call(*x).square().sum(), places)


WHERE = [(0, 0, 0), (0, None, None), (None, 0, 0), (0, 1, 2), (None, None, 0), (None, 3, None)]


@pytest.mark.parametrize("in_dims", WHERE, ids=str)
def test_attention_and_its_gradients(in_dims):
    tensors = make_tensors(in_dims)
    check_against_loop(lambda *x: attention(*x, causal=True, return_lse=True), in_dims, *tensors)
    check_against_loop(gradients(lambda *x: attention(*x, causal=True), 0, 1, 2), in_dims, *tensors)

    def with_lse(*x):
        return sum(part.sin().sum() for part in attention(*x, return_lse=True))

    check_against_loop(grad(with_lse, (0, 1, 2)), in_dims, *tensors)


MASKS = [(7,), (5, 1), (5, 7), (1, 5, 7), (4, 1, 7), (2, 1, 5, 7), (1, 4, 1, 7), (2, 4, 5, 7)]


@pytest.mark.parametrize("keys", [0, None])
@pytest.mark.parametrize("own", [True, False], ids=["own masks", "one mask"])
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks(shape, own, keys):
    in_dims = (0, keys, keys, 0 if own else None)
    tensors = *make_tensors(in_dims[:3]), draw(3, *shape, dtype=torch.float64) if own else draw(*shape)
    check_against_loop(attention, in_dims, *tensors)
    check_against_loop(attention, in_dims, *tensors[:3], tensors[3] > -0.5)
    check_against_loop(gradients(attention, 0, 1, 2, 3), in_dims, *tensors)
    check_against_loop(gradients(attention, 0, 3), (None, None, None, 0), *(x[0] for x in make_tensors((0, 0, 0))),
                       draw(3, *shape))  # fmt: skip


@pytest.mark.parametrize("head_map", [None, [1, 0, 0, 1]])
@pytest.mark.parametrize("lens", [0, None, "none"])
@pytest.mark.parametrize("sinks", [0, None])
@pytest.mark.parametrize("keys", [0, None])
def test_numbers_per_head_and_per_sequence(keys, sinks, lens, head_map):
    in_dims = (0, keys, keys, sinks, None if lens == "none" else lens)
    numbers = SINKS[0] if sinks is None else SINKS, LENS[0] if lens is None else LENS if lens == 0 else None

    def call(q, k, v, s, n):
        place = {} if n is None else {"kv_lens": n, "q_offset": "end", "causal": True}
        return attention(q, k, v, sinks=s, head_map=head_map, **place)

    tensors = make_tensors(in_dims[:3])
    if lens == "none":
        in_dims, short = in_dims[:4], call
        check_against_loop(lambda *x: short(*x, None), in_dims, *tensors, numbers[0])
        check_against_loop(gradients(lambda *x: short(*x, None), 0, 1, 2, 3), in_dims, *tensors, numbers[0])
    else:
        check_against_loop(call, in_dims, *tensors, *numbers)
        check_against_loop(gradients(call, 0, 1, 2, 3), in_dims, *tensors, *numbers)


@pytest.mark.parametrize("keys", [0, None])
def test_slopes_and_offsets(keys):
    in_dims = (0, keys, keys, 0)
    tensors = make_tensors(in_dims[:3])
    check_against_loop(lambda q, k, v, s: attention(q, k, v, alibi_slopes=s), in_dims, *tensors, SINKS.abs())
    check_against_loop(lambda q, k, v, n: attention(q, k, v, causal=True, q_offset=n), in_dims, *tensors, LENS - 3)


@pytest.mark.parametrize("index", [0, None], ids=["own names", "one list"])
@pytest.mark.parametrize("heads", [1, 2], ids=["all heads", "of heads"])
@pytest.mark.parametrize("sinks", [0, None])
@pytest.mark.parametrize("keys", [0, None])
def test_named_keys(keys, sinks, heads, index):
    names = torch.randint(-1, 4, (3, 2, heads, 5, 3), generator=torch.Generator().manual_seed(0))
    in_dims = (0, keys, keys, sinks, index)
    tensors = *make_tensors(in_dims[:3]), SINKS if sinks == 0 else SINKS[0], names if index == 0 else names[0]

    def call(q, k, v, s, n):
        return attention(q, k, v, sinks=s, key_index=n, key_block=2, causal=True, q_offset=2)

    check_against_loop(call, in_dims, *tensors)
    check_against_loop(gradients(call, 0, 1, 2, 3), in_dims, *tensors)
    check_against_loop(lambda q, k, n: attention_scores(q, k, key_index=n, key_block=2), (0, keys, index),
                       *tensors[:2], tensors[4])  # fmt: skip


def test_one_vmap_inside_another():
    query = draw(3, 4, *SHAPES[0], dtype=torch.float64)
    key, value = draw(3, *SHAPES[1], dtype=torch.float64), draw(4, *SHAPES[2], dtype=torch.float64)
    check_against_loop(vmap(attention, (0, None, 0)), (0, 0, None), query, key, value)
    check_against_loop(vmap(attention, (0, None, None)), (0, None, None), query, key[0], value[0])
    # The inner vmap has nothing to do with the op.
    check_against_loop(
        vmap(lambda q, k, v, x: attention(q, k, v) * x, (None, None, None, 0)), (0, 0, None, None), query[:, 0], key,
        value[0], draw(4),
    )  # fmt: skip


def test_gradients_and_vmap_in_any_order():
    tensors = make_tensors((0, 0, 0))

    def loss(q, k, v):
        return attention(q, k, v, causal=True).square().sum()

    expected = vmap(grad(loss, (0, 1, 2)))(*tensors)
    assert_close(grad(lambda *x: vmap(loss)(*x).sum(), (0, 1, 2))(*tensors), expected)
    leaves = [x.clone().requires_grad_() for x in tensors]
    assert_close(torch.autograd.grad(vmap(loss)(*leaves).sum(), leaves), expected)

    def loss_of_gradients(q, k, v):
        return sum(x.square().sum() for x in grad(loss, (0, 1, 2))(q, k, v))

    check_against_loop(grad(loss_of_gradients, (0, 1, 2)), (0, 0, 0), *tensors)


def names_of_ops(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.name for event in profile.events()}


def test_the_kernel_runs_and_shared_keys_are_not_copied():
    query, key, value = make_tensors((0, None, None))
    names = names_of_ops(lambda: vmap(attention, (0, None, None))(query.contiguous(), key, value))
    assert "attnpack::attention" in names and not names & {"aten::bmm", "aten::exp"}
    whole = [x.movedim(0, 0).contiguous() for x in make_tensors((0, 0, 0))]
    names = names_of_ops(lambda: vmap(attention)(*whole))
    assert not names & {"aten::bmm", "aten::exp", "aten::copy_"}
    names = names_of_ops(lambda: vmap(gradients(attention, 0, 1, 2))(*whole))
    assert "attnpack::attention_backward" in names and not names & {"aten::bmm", "aten::exp"}


def test_samples_that_share_keys_take_no_memory_for_them():
    """Peak memory of 32 samples on 16 MB of keys and values, minus that of two; copied they would take 512 MB."""
    process = run_python("""
import resource, torch, attnpack
k, v = (torch.randn(2, 1, 16384, 64) for _ in range(2))
def peak(samples):
    torch.vmap(lambda q: attnpack.attention(q, k, v))(torch.randn(samples, 2, 1, 1, 64))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
one = peak(2)
print(peak(32) - one)
""")
    assert process.returncode == 0, process.text
    assert int(process.stdout) < 64 * 1024  # KiB


def test_dropout_draws_as_the_loop_does():
    query, key, value = make_tensors((0, None, None))
    query = query[:1].expand(query.shape)

    def drop(q):
        return attention(q, key, value, dropout_p=0.5)

    same, different = (vmap(drop, randomness=each)(query) for each in ("same", "different"))
    assert torch.equal(same[0], same[1]) and not torch.equal(different[0], different[1])
    torch.manual_seed(0)
    got = vmap(drop, randomness="same")(query)
    torch.manual_seed(0)
    assert_close(got[1], drop(query[1]))
    with pytest.raises(RuntimeError, match="randomness error mode"):
        vmap(drop)(query)


def test_errors_name_what_a_sample_has():
    query, key, value = make_tensors((0, 0, 0))
    with pytest.raises(ValueError, match="key has head_dim 7, query 8"):
        vmap(attention)(query, key[..., :7], value)


def test_compiled():
    query, key, value = make_tensors((0, None, None))

    def call(q):
        return vmap(gradients(lambda q: attention(q, key, value, causal=True), 0))(q)[0]

    assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(query), call(query))


def test_modules_and_models():
    torch.manual_seed(0)
    rope = attnpack.RotaryEmbedding(4)
    layers = [attnpack.GroupedQueryAttention(16, 4, 2, causal=True, rope=rope) for _ in range(3)]
    latent = attnpack.MultiHeadLatentAttention(
        16, 4, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, causal=True
    )
    x = torch.randn(3, 2, 5, 16)
    for layer in (layers[0], latent):
        check_against_loop(layer, (0,), x)
        with torch.no_grad():
            check_against_loop(layer, (0,), x)
    check_against_loop(lambda one: layers[0](one, need_weights=True)[1], (0,), x)
    stacked, _ = stack_module_state(layers)
    got = vmap(lambda state: functional_call(layers[0], (state,), (x[0],)))(stacked)
    assert_close(got, torch.stack([layer(x[0]) for layer in layers]))
    tokens = torch.randint(0, 50, (3, 2, 5))
    model = attnpack.CausalLM(vocab_size=50, embed_dim=16, num_layers=2, num_heads=4, num_kv_heads=2)
    check_against_loop(model, (0,), tokens)


def test_per_sample_gradients_of_a_layer():
    torch.manual_seed(0)
    layer = attnpack.GroupedQueryAttention(16, 4, 2, causal=True, rope=attnpack.RotaryEmbedding(4))
    weights = {name: p.detach() for name, p in layer.named_parameters()}

    def of_sample(x):
        loss = grad(lambda w: functional_call(layer, w, (x[None],)).square().sum())
        return tuple(loss(weights).values())

    check_against_loop(of_sample, (0,), torch.randn(3, 5, 16))


def test_rope():
    x, angle = draw(3, 2, 5, 8), draw(3, 5, 3)

    def rotate(x, a, b):
        return apply_rope(x, a.cos(), b.sin())

    for in_dims in ((0, None, None), (0, 0, None), (None, 0, 0), (None, None, 0)):
        tensors = [t if d == 0 else t[0] for t, d in zip((x, angle, angle), in_dims, strict=True)]
        check_against_loop(rotate, in_dims, *tensors)
    check_against_loop(grad(lambda x: rotate(x, angle[0], angle[0]).pow(3).sum()), (0,), x)
    check_against_loop(lambda p: rope_table(p, [1.0, 0.5], 1.5), (1,), torch.arange(6).view(2, 3))


def test_rope_tables_by_length():
    def table(positions, lengths=None):
        return rope_table_by_length(positions, lengths, [1.0, 0.5], 1.5, [], 2.0, 3)

    flat, rows, lengths = (
        torch.arange(6).view(3, 2),
        torch.arange(12).view(3, 2, 2),
        torch.tensor([[1, 9], [2, 5], [4, 4]]),
    )
    check_against_loop(table, (0,), flat)
    check_against_loop(table, (0,), rows)
    check_against_loop(table, (0, 0), flat, lengths)
    check_against_loop(table, (None, 0), flat[0], lengths)
    check_against_loop(table, (0, None), rows, lengths[0])


def test_other_ops():
    x, weight, scale = draw(3, 2, 5, 8), draw(3, 4, 8, seed=1), draw(3, 8, seed=2)
    check_against_loop(lambda x: rms_norm(x, scale[0], 1e-5), (1,), x)
    check_against_loop(lambda x, w: rms_norm(x, w, 1e-5), (0, 0), x, scale)
    check_against_loop(lambda w: rms_norm(x, w, 1e-5), (0,), scale)
    check_against_loop(lambda x, y: add_rms_norm(x, y, scale[0], 1e-5), (1, 0), x, x.transpose(0, 1).flip(0))
    check_against_loop(lambda x, w: add_rms_norm(x, x, w, 1e-5), (0, 0), x, scale)
    check_against_loop(swiglu, (0, 0), x, x.flip(0))
    check_against_loop(swiglu, (1, 0), x, x.transpose(0, 1).flip(0))
    check_against_loop(lambda gate: swiglu(gate, x[0]), (0,), x)
    check_against_loop(lambda x: linear(x, weight[0], weight[0, :, 0]), (1,), x)
    check_against_loop(lambda x: linear(x, weight[0]), (0,), x[0, 0])
    check_against_loop(linear, (0, 0, None), x, weight, weight[0, :, 0])
    check_against_loop(linear, (None, None, 0), x, weight[0], weight[:, :, 0])
    check_against_loop(lambda x: tuple(linears(x, [weight[0], weight[1]])), (0,), x)
    check_against_loop(lambda x: merge_states(x, x[..., 0], 2 * x, x[..., 1]), (0,), x)
    query, key, _ = make_tensors((0, 0, 0))
    check_against_loop(lambda q, k, n: attention_scores(q, k, kv_lens=n), (0, 0, 0), query, key, LENS)
