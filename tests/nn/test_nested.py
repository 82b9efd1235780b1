"""Jagged nested tensors mean one call per sequence, in the operator and in every module, with gradients."""

import attnpack
import pytest
import torch
from attnpack import attention
from op_cases import draw
from torch.testing import assert_close

LENGTHS = [3, 1, 70, 8]


def jag(parts):
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def sequences(*width, lengths=LENGTHS, seed=0, dtype=torch.float64):
    return [draw(n, *width, dtype=dtype, seed=seed + i) for i, n in enumerate(lengths)]


def heads(parts):
    """[L, H, D] each -> nested [B, H, L*, D]."""
    return jag(parts).transpose(1, 2)


def one(x):
    return x.transpose(0, 1).unsqueeze(0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "settings",
    [{}, {"causal": True}, {"causal": True, "q_offset": 2}, {"causal": True, "q_offset": "end"},
     {"window": (4, 1), "softcap": 2.0, "q_offset": "tensor"}],
)  # fmt: skip
def test_attention_is_one_call_per_sequence(settings, dtype):
    q, k, v = (sequences(h, d, seed=s, dtype=dtype) for h, d, s in ((4, 8, 0), (2, 8, 10), (2, 6, 20)))
    offsets = torch.tensor([1, -1, 0, 2]) if settings.get("q_offset") == "tensor" else None
    given = settings if offsets is None else settings | {"q_offset": offsets}
    k_nested = heads(k)
    v_nested = torch.nested.nested_tensor_from_jagged(torch.cat(v), k_nested.offsets()).transpose(1, 2)
    out, lse = attention(heads(q), k_nested, v_nested, return_lse=True, **given)
    assert out.shape[:2] == (4, 4) and out.size(3) == 6 and out.is_nested
    assert torch.equal(attention(heads(q), k_nested, v_nested, **given).values(), out.values())
    for b, (o, s) in enumerate(zip(out.unbind(), lse.unbind(), strict=True)):
        own = given if offsets is None else settings | {"q_offset": int(offsets[b])}
        expected, expected_lse = attention(*(one(x[b]) for x in (q, k, v)), return_lse=True, **own)
        assert torch.equal(o, expected[0]) and torch.equal(s, expected_lse[0])


def test_each_token_has_a_factor_of_its_own():
    """query_scale [B, L*], with a gradient."""
    q, k, v = (sequences(h, 8, seed=s) for h, s in ((4, 0), (2, 10), (2, 20)))
    factors = [draw(n, dtype=torch.float64, seed=30 + n).requires_grad_() for n in LENGTHS]
    scale = torch.nested.as_nested_tensor(factors, layout=torch.jagged)
    out = attention(heads(q), heads(k), heads(v), causal=True, query_scale=scale)
    got = torch.autograd.grad(out.values().square().sum(), factors)
    for o, a, b, c, factor, grad in zip(out.unbind(), q, k, v, factors, got, strict=True):
        expected = attention(one(a), one(b), one(c), causal=True, query_scale=factor)
        assert torch.equal(o, expected[0])
        assert_close(grad, torch.autograd.grad(expected.square().sum(), factor)[0])


def test_factors_of_other_sequences_are_refused():
    q = heads(sequences(2, 8))
    with pytest.raises(ValueError, match="query_scale is a padded tensor beside nested ones, wants a jagged nested"):
        attention(q, q, q, query_scale=torch.ones(4, 70))
    with pytest.raises(ValueError, match="query_scale has other sequence lengths than query, wants the same"):
        attention(q, q, q, query_scale=jag([torch.ones(n) for n in LENGTHS[::-1]]))
    with pytest.raises(ValueError, match=r"query_scale has shape \[82, 1\], wants \[tokens\]"):
        attention(q, q, q, query_scale=jag([torch.ones(n, 1) for n in LENGTHS]))


def test_gradients_reach_the_nested_inputs():
    parts = [x.requires_grad_() for x in sequences(3, 8)]
    x = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    attention(*[x.transpose(1, 2)] * 3, causal=True).values().square().sum().backward()
    got = [p.grad for p in parts]
    for part, g in zip(parts, got, strict=True):
        leaf = part.detach().clone().requires_grad_()
        attention(*[one(leaf)] * 3, causal=True).square().sum().backward()
        assert_close(g, leaf.grad)


def test_cross_attention_of_other_lengths():
    q, k = sequences(2, 8), sequences(2, 8, lengths=[5, 2, 9, 0], seed=5)
    keys = heads(k)
    out = attention(heads(q), keys, keys)
    for o, a, b in zip(out.unbind(), q, k, strict=True):
        assert torch.equal(o, attention(one(a), one(b), one(b))[0])


def module_outputs(module, inputs, settings):
    """Outputs and gradients, nested and one call per sequence."""
    results = []
    for packed in (True, False):
        leaves = [[x.detach().clone().requires_grad_(x.is_floating_point()) for x in parts] for parts in inputs]
        module.zero_grad()
        if packed:
            out = module(*(torch.nested.as_nested_tensor(x, layout=torch.jagged) for x in leaves), **settings)
            assert out.is_nested
            outs = out.unbind()
        else:
            outs = [module(*(x.unsqueeze(0) for x in each), **settings)[0] for each in zip(*leaves, strict=True)]
        sum(o.square().sum() for o in outs).backward()
        grads = [x.grad for parts in leaves for x in parts if x.is_floating_point()]
        results.append([*outs, *grads, *(p.grad for p in module.parameters() if p.grad is not None)])
    return results


def attention_modules():
    rope = attnpack.RotaryEmbedding(8, max_positions=16)
    dynamic = attnpack.RotaryEmbedding(8, max_positions=16, scaling={"rope_type": "dynamic", "factor": 2.0})
    latent = {"kv_lora_rank": 6, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 5}
    return {
        "self": attnpack.SelfAttention(32, causal=True),
        "mha": attnpack.MultiHeadAttention(32, 4, bias=True, alibi=True, sinks=True),
        "gqa": attnpack.GroupedQueryAttention(
            32, 4, 2, rope=rope, qk_norm=True, causal=True, window=(5, 0), softcap=3.0
        ),
        "uneven": attnpack.GroupedQueryAttention(32, 4, 2, head_map=[1, 0, 1, 1], rope=rope),
        "mqa by length": attnpack.MultiQueryAttention(32, 4, rope=dynamic, causal=True),
        "latent": attnpack.MultiHeadLatentAttention(32, 4, q_lora_rank=12, rope=rope, causal=True, **latent),
        "latent by length": attnpack.MultiHeadLatentAttention(32, 4, rope=dynamic, **latent),
        "folded": attnpack.MultiHeadLatentAttention(32, 4, rope=rope, causal=True, **latent).fold(),
    }


@pytest.mark.parametrize("name", attention_modules())
@pytest.mark.parametrize("cross", [False, True])
def test_attention_modules(name, cross):
    torch.manual_seed(0)
    module = attention_modules()[name].double()
    inputs = [sequences(32)] + ([sequences(32, lengths=[5, 2, 40, 7], seed=9)] if cross else [])
    got, expected = module_outputs(module, inputs, {})
    for g, e in zip(got, expected, strict=True):
        assert_close(g, e)


def test_positions_start_anew_or_are_given():
    module = attnpack.MultiHeadAttention(32, 4, rope=attnpack.RotaryEmbedding(8), causal=True).double()
    parts = sequences(32)
    x = jag(parts)
    places = [torch.arange(n) * 3 + 1 for n in LENGTHS]
    out = module(x, positions=jag(places))
    for o, part, place in zip(out.unbind(), parts, places, strict=True):
        assert_close(o, module(part.unsqueeze(0), positions=place)[0])
    assert not torch.allclose(out.values(), module(x).values())
    others = sequences(32, seed=9)
    for o, part, other, place in zip(
        module(x, jag(others), positions=jag(places)).unbind(), parts, others, places, strict=True
    ):
        assert_close(o, module(part.unsqueeze(0), other.unsqueeze(0), positions=place)[0])


def test_projected_attention():
    module = attnpack.ProjectedAttention(4, 2, 8, rope=attnpack.RotaryEmbedding(8), causal=True)
    q, k, v = sequences(32), sequences(16, seed=5), sequences(16, seed=9)
    got, expected = module_outputs(module, [q, k, v], {})
    for g, e in zip(got, expected, strict=True):
        assert_close(g, e)
    longer = [5, 2, 80, 9]
    k, v = sequences(16, lengths=longer, seed=5), sequences(16, lengths=longer, seed=9)
    for g, e in zip(*module_outputs(module, [q, k, v], {"causal": False}), strict=True):
        assert_close(g, e)


def blocks():
    def attend(**settings):
        return attnpack.GroupedQueryAttention(32, 4, 2, rope=attnpack.RotaryEmbedding(8), **settings)

    def feed():
        return attnpack.FeedForward(32, 48)

    def decoder(cross=False, **settings):
        return attnpack.DecoderBlock(attend(), feed(), cross_attention=attend() if cross else None, **settings)

    return {
        "norm": (attnpack.RMSNorm(32), 1),
        "feed forward": (attnpack.FeedForward(32, 48, activation="gelu"), 1),
        "encoder block": (attnpack.EncoderBlock(attend(), feed(), norm="layer", pre_norm=False), 1),
        "decoder block": (decoder(), 1),
        "cross block": (decoder(True, norm="layer"), 2),
        "encoder": (attnpack.Encoder([attnpack.EncoderBlock(attend(), feed()) for _ in range(2)]), 1),
        "decoder": (attnpack.Decoder([decoder(True), decoder(True)]), 2),
        "both": (attnpack.EncoderDecoder(attnpack.Encoder([attnpack.EncoderBlock(attend(), feed())]),
                                         attnpack.Decoder([decoder(True)])), 2),
    }  # fmt: skip


@pytest.mark.parametrize("name", blocks())
@pytest.mark.parametrize("frozen", [False, True])
def test_blocks_and_stacks(name, frozen):
    torch.manual_seed(0)
    module, count = blocks()[name]
    module = module.double()
    inputs = [sequences(32), sequences(32, lengths=[5, 2, 40, 7], seed=9)][:count]
    if frozen:
        with torch.no_grad():
            out = module(*(jag(x) for x in inputs)).unbind()
            for n, o in enumerate(out):
                shape = (x[n].unsqueeze(0) for x in inputs)
                assert_close(o, module(*shape)[0])
        return
    for g, e in zip(*module_outputs(module, inputs, {}), strict=True):
        assert_close(g, e)


def small_model(**settings):
    torch.manual_seed(0)
    shape = dict(vocab_size=50, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=48)
    return attnpack.CausalLM(**(shape | settings)).double()


@pytest.mark.parametrize("tied", [False, True])
def test_a_language_model_trains_on_packed_ids(tied):
    model = small_model(tie_embeddings=tied)
    ids = [torch.randint(50, (n,)) for n in LENGTHS]
    got, expected = module_outputs(model, [ids], {})
    for g, e in zip(got, expected, strict=True):
        assert_close(g, e)


def test_the_loss_of_a_packed_batch_falls():
    model = small_model()
    ids = [torch.randint(50, (n,)) for n in (5, 9, 30)]
    batch, targets = jag(ids), torch.cat([torch.cat([x[1:], torch.tensor([-100])]) for x in ids])
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-2), []
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(model(batch).values(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_rotary_embedding():
    for scaling in (None, {"rope_type": "dynamic", "factor": 2.0}):
        rope = attnpack.RotaryEmbedding(8, max_positions=16, scaling=scaling)
        parts = sequences(2, 8)
        for o, part in zip(rope(heads(parts)).unbind(), parts, strict=True):
            assert torch.equal(o, rope(one(part))[0])


def test_compiles_to_one_graph():
    module = attnpack.MultiHeadAttention(32, 4, rope=attnpack.RotaryEmbedding(8), causal=True)
    compiled = torch.compile(module, fullgraph=True)
    for lengths in ([3, 5], [4, 1, 9]):
        x = jag(sequences(32, lengths=lengths, dtype=torch.float32))
        with torch.no_grad():
            assert_close(compiled(x).values(), module(x).values())


@pytest.mark.long
def test_a_compiled_language_model_trains():
    model = small_model()
    compiled = torch.compile(model, fullgraph=True)
    for lengths in ([3, 5, 9], [4, 7]):
        ids = jag([torch.randint(50, (n,)) for n in lengths])
        results = []
        for function in (compiled, model):
            model.zero_grad()
            loss = torch.nn.functional.cross_entropy(function(ids).values(), ids.values())
            loss.backward()
            results.append([loss, *(p.grad for p in model.parameters())])
        for got, expected in zip(*results, strict=True):
            assert_close(got, expected)


def context_cases():
    x, y = jag(sequences(32)), jag(sequences(32, lengths=[1, 2], seed=3))
    padded = draw(4, 3, 32, dtype=torch.float64)
    attend = attnpack.MultiHeadAttention(32, 4, rope=attnpack.RotaryEmbedding(8)).double()
    latent = attnpack.MultiHeadLatentAttention(
        32, 4, kv_lora_rank=6, qk_nope_head_dim=8, qk_rope_head_dim=0, v_head_dim=5
    ).double()
    model = small_model()
    ids = jag([torch.randint(50, (n,)) for n in LENGTHS])
    h = heads(sequences(2, 8))
    narrow = torch.nested.narrow(padded, 1, torch.tensor([0, 1, 0, 0]), torch.tensor([2, 2, 1, 3]), layout=torch.jagged)
    return {
        "mask is given with nested tensors, wants to be left out": lambda: attend(x, mask=torch.ones(1)),
        "cache is given with nested tensors": lambda: attend(x, cache=attnpack.DynamicCache()),
        "kv_lens is given with nested tensors, .* hold their lengths": lambda: latent(x, kv_lens=torch.ones(4).long()),
        "need_weights is given with nested tensors": lambda: attend(x, need_weights=True),
        "context is a padded tensor beside nested ones": lambda: attend(x, padded),
        "context has 2 sequences, x 4": lambda: attend(x, y),
        "value_context has other sequence lengths than context": (
            lambda: attend(x, x, value_context=jag(sequences(32, lengths=[3, 1, 8, 70])))
        ),
        "positions is a padded tensor": lambda: attend(x, positions=torch.arange(3)),
        "positions has dtype torch.int32 and 2 dimensions, wants a jagged int64": (
            lambda: attend(x, positions=jag([torch.arange(n, dtype=torch.int32) for n in LENGTHS]))
        ),
        "positions has other sequence lengths than x": (
            lambda: attend(x, positions=jag([torch.arange(n) for n in (3, 1, 8, 70)]))
        ),
        "x is a nested tensor of the layout torch.strided, wants torch.jagged": (
            lambda: attend(torch.nested.nested_tensor(sequences(32)))
        ),
        "x is a narrowed nested tensor": lambda: attend(narrow),
        r"x: got shape \[1, 82, 16\], want \[batch, length, 32\]": lambda: attend(jag(sequences(16))),
        r"key has 2 sequences, query 4": lambda: attention(h, heads(sequences(2, 8, lengths=[1, 2])), h),
        r"query has the shape \[4, L\*, 2, 8\], wants \[batch, heads, L\*, head_dim\]": (
            lambda: attention(h.transpose(1, 2), h, h)
        ),
        "key is a padded tensor beside nested ones": lambda: attention(h, draw(4, 2, 3, 8), h),
        "value has other sequence lengths than key": (
            lambda: attention(h, h, heads(sequences(2, 8, lengths=[1, 3, 70, 8])))
        ),
        "mask is given with nested tensors, wants": lambda: attention(h, h, h, torch.ones(1)),
        "kv_lens is given with": lambda: attention(h, h, h, kv_lens=torch.ones(4)),
        "lengths is given with nested tensors": lambda: model(ids, lengths=torch.ones(4).long()),
        "ids has the number 50|ids has token 50|ids.*50": lambda: model(jag([torch.tensor([1, 50])])),
    }  # fmt: skip


@pytest.mark.parametrize("message", context_cases())
def test_what_does_not_go_with_nested_tensors_is_named(message):
    with pytest.raises((ValueError, TypeError), match=message):
        context_cases()[message]()


@pytest.mark.parametrize(
    ("offsets", "fix"),
    [
        ([2, 5, 12], "nested_tensor_from_jagged(values[2 : 12], offsets - 2)"),
        ([0, 5, 9], "nested_tensor_from_jagged(values[0 : 9], offsets - 0)"),
        ([0, 7, 5, 12], "as_nested_tensor(sequences, layout=torch.jagged)"),
    ],
    ids=["begin late", "end early", "descend"],
)
def test_rows_of_no_sequence_are_refused(offsets, fix):
    """By modules with RoPE as by the operator; norms do not mind."""
    values, offsets = torch.randn(12, 32), torch.tensor(offsets)
    x = torch.nested.nested_tensor_from_jagged(values, offsets)
    rope = attnpack.RotaryEmbedding(8)
    latent = {"kv_lora_rank": 6, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 5}
    module = attnpack.MultiHeadAttention(32, 4, rope=rope)
    for refusing in (module, attnpack.MultiHeadLatentAttention(32, 4, rope=rope, **latent)):
        with pytest.raises(
            ValueError, match="has the offsets .* and 12 rows of values, wants .* from 0 to 12"
        ) as caught:
            refusing(x)
        assert str(offsets.tolist()) in str(caught.value) and fix in str(caught.value)
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        attnpack.MultiHeadAttention(32, 4)(x)
    assert attnpack.RMSNorm(32)(x).shape == x.shape
    if "values" in fix:
        mended = eval("torch.nested." + fix, {"torch": torch, "values": values, "offsets": offsets})
        for out, begin, end in zip(module(mended).unbind(), offsets[:-1], offsets[1:], strict=True):
            assert_close(out, module(values[begin:end].unsqueeze(0))[0])
