"""The reference against PyTorch's SDPA if SDPA has the feature, otherwise against numbers worked out by hand."""

import math
import re
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from attnpack import reference
from attnpack.reference import apply_rope, attention, attention_scores, merge_states, rope_table
from torch import tensor
from torch.testing import assert_close

NAN, INF = float("nan"), float("inf")


def draw(*shape, dtype=torch.float64, grad=False, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)


def qkv(batch=2, num_heads=4, num_kv_heads=2, q_len=5, kv_len=7, dim=8, v_dim=8, **keywords):
    return (
        draw(batch, num_heads, q_len, dim, seed=1, **keywords),
        draw(batch, num_kv_heads, kv_len, dim, seed=2, **keywords),
        draw(batch, num_kv_heads, kv_len, v_dim, seed=3, **keywords),
    )


def one_head(scores, values):
    """q, k, v whose scaled scores are the given row and whose values are the given column."""
    return tensor([[[[1.0]]]]), tensor(scores).view(1, 1, -1, 1), tensor(values).view(1, 1, -1, 1)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [None, "bool", "float"])
def test_equals_sdpa(num_kv_heads, causal, masked):
    q, k, v = qkv(num_kv_heads=num_kv_heads, v_dim=6, grad=True)
    mask = {None: None, "bool": draw(5, 7) > -0.5, "float": draw(2, 1, 5, 7)}[masked]
    whole = mask
    if causal:
        lower = torch.ones(5, 7, dtype=torch.bool).tril()
        whole = lower if mask is None else mask & lower if masked == "bool" else mask.masked_fill(~lower, -INF)
    ours = attention(q, k, v, mask, causal=causal, scale=0.3)
    theirs = F.scaled_dot_product_attention(q, k, v, whole, scale=0.3, enable_gqa=True)
    assert_close(ours, theirs)
    grad = draw(*ours.shape, seed=9)
    assert_close(torch.autograd.grad(ours, (q, k, v), grad), torch.autograd.grad(theirs, (q, k, v), grad))


def test_low_dtype_stays_low():
    q, k, v = qkv(dtype=torch.bfloat16)
    out, lse = attention(q, k, v, return_lse=True)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert_close(out, F.scaled_dot_product_attention(q, k, v, enable_gqa=True), atol=2e-2, rtol=2e-2)


def test_head_map_reads_the_named_heads():
    q, k, v = qkv(num_kv_heads=3)
    head_map = [2, 0, 0, 2]
    assert_close(
        attention(q, k, v, head_map=head_map), F.scaled_dot_product_attention(q, k[:, head_map], v[:, head_map])
    )


# Scores 0, ln 2, ln 4 weigh 1, 2, 4; values 7, 14, 28.
WEIGHTS = [0.0, math.log(2), math.log(4)]
VALUES = [7.0, 14.0, 28.0]


@pytest.mark.parametrize(
    "keywords, out, denominator",
    [
        ({}, (7 + 28 + 112) / 7, 7),
        ({"causal": True}, 7, 1),
        ({"causal": True, "q_offset": 1}, (7 + 28) / 3, 3),
        ({"causal": True, "q_offset": tensor([1])}, (7 + 28) / 3, 3),
        ({"causal": True, "q_offset": "end"}, 21, 7),
        ({"causal": True, "q_offset": "end", "kv_lens": tensor([2])}, (7 + 28) / 3, 3),
        ({"causal": True, "q_offset": -1}, 0, 0),
        ({"kv_lens": tensor([0], dtype=torch.int32)}, 0, 0),
        ({"window": (0, 0), "q_offset": 1}, 14, 2),
        ({"window": (1, 0), "q_offset": 2}, (28 + 112) / 6, 6),
        ({"window": (0, 1)}, (7 + 28) / 3, 3),
        ({"mask": tensor([True, False, True])}, (7 + 112) / 5, 5),
        ({"mask": tensor([math.log(3), -INF, 0.0])}, (21 + 112) / 7, 7),
        ({"mask": torch.full((3,), torch.finfo(torch.float32).min)}, 49 / 3, None),
        ({"sinks": tensor([0.0])}, 147 / 8, 8),
        ({"sinks": tensor([math.log(3)]), "kv_lens": tensor([0])}, 0, 3),
        ({"alibi_slopes": tensor([math.log(2)])}, (7 + 14 + 28) / 3, 3),
        ({"alibi_slopes": tensor([math.log(2)]), "q_offset": 2}, (7 / 4 + 14 + 112) / (1 / 4 + 1 + 4), 5.25),
        ({"scale": 2.0}, (7 + 4 * 14 + 16 * 28) / 21, 21),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_equals_numbers_worked_by_hand(keywords, out, denominator):
    got, lse = attention(*one_head(WEIGHTS, VALUES), return_lse=True, **keywords)
    assert_close(got, tensor(float(out)).view(1, 1, 1, 1))
    if denominator is not None:
        assert_close(lse, tensor(float(denominator)).log().view(1, 1, 1))


def test_end_lines_the_last_row_up_with_each_sequences_last_key():
    q, k, v = qkv(q_len=3, kv_len=7)
    lens = tensor([7, 4])
    ours = attention(q, k, v, causal=True, q_offset="end", kv_lens=lens)
    columns, rows = torch.arange(7), torch.arange(3)
    keep = columns <= rows.view(3, 1) + lens.view(2, 1, 1, 1) - 3
    assert_close(ours, F.scaled_dot_product_attention(q, k, v, keep, enable_gqa=True))


def test_finfo_min_excludes_nothing_even_where_the_dtype_cannot_hold_it():
    q, k, v = qkv(dtype=torch.bfloat16)
    out = attention(q, k, v, torch.full((7,), torch.finfo(torch.float32).min))
    assert_close(out, v.mean(2, keepdim=True).repeat_interleave(2, 1).expand_as(out), atol=2e-2, rtol=2e-2)


def test_stages():
    q, k, _ = one_head([1.0, 2.0, 3.0], VALUES)
    keywords = {"softcap": 2.0, "kv_lens": tensor([2]), "scale": 2.0}
    capped = [2 * math.tanh(1), 2 * math.tanh(2), 2 * math.tanh(3)]
    first = 1 / (1 + math.exp(capped[1] - capped[0]))
    wanted = {"scaled": [2.0, 4, 6], "capped": capped, "masked": [*capped[:2], -INF], "probs": [first, 1 - first, 0]}
    for stage, row in wanted.items():
        assert_close(attention_scores(q, k, stage=stage, **keywords), tensor(row).view(1, 1, 1, 3))
    with pytest.raises(ValueError, match="stage: got 'raw'"):
        attention_scores(q, k, stage="raw")


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("rule", ["causal", "kv_lens", "window", "bool", "float"])
def test_an_excluded_key_has_no_influence(poison, rule):
    keywords = {
        "causal": {"causal": True},
        "kv_lens": {"kv_lens": tensor([4, 4])},
        "window": {"window": (-1, 0)},
        "bool": {"mask": torch.arange(5) < 4},
        "float": {"mask": torch.zeros(5).masked_fill(torch.arange(5) >= 4, -INF)},
    }[rule]
    clean, dirty = qkv(q_len=4, kv_len=5, grad=True), qkv(q_len=4, kv_len=5)
    dirty[1][:, :, 4] = dirty[2][:, :, 4] = poison
    dirty = [each.requires_grad_() for each in dirty]
    outs = [attention(*inputs, return_lse=True, **keywords) for inputs in (clean, dirty)]
    assert_close(outs[1], outs[0])
    for out, lse in outs:
        (out.sum() + lse.sum()).backward()
    assert_close([each.grad for each in dirty], [each.grad for each in clean])
    assert not dirty[1].grad[:, :, 4].any() and not dirty[2].grad[:, :, 4].any()


def test_nan_reaches_exactly_the_rows_that_attend_it():
    q, k, v = qkv(q_len=4, kv_len=4)
    v[0, 0, 2] = NAN
    out = attention(q, k, v, causal=True)
    spoilt = out.isnan().any(-1)
    assert spoilt[0, :2, 2:].all() and spoilt.sum() == 4


def test_an_empty_row_gives_zero_gradients():
    q, k, v = qkv(q_len=3, kv_len=2, grad=True)
    bias, sinks = draw(3, 2, grad=True), draw(4, grad=True)
    out, lse = attention(q, k, v, bias, causal=True, q_offset=-1, sinks=sinks, return_lse=True)
    assert not out[:, :, 0].any() and torch.equal(lse[:, :, 0], sinks.expand(2, 4))
    (out[:, :, 0].sum() + lse[:, :, 0].sum()).backward()
    assert not any(each.grad.any() for each in (q, k, v, bias))
    assert_close(sinks.grad, torch.full((4,), 2.0, dtype=torch.float64))


def test_gradients_by_finite_differences():
    q, k, v = qkv(batch=1, q_len=3, kv_len=4, dim=3, v_dim=2, grad=True)
    bias, sinks = draw(1, 1, 3, 4, grad=True), draw(4, grad=True)

    def run(q, k, v, bias, sinks):
        keywords = {"causal": True, "q_offset": 1, "softcap": 1.5, "alibi_slopes": tensor([0.1, 0.2, 0.3, 0.4])}
        return attention(q, k, v, bias, sinks=sinks, return_lse=True, **keywords)

    assert torch.autograd.gradcheck(run, (q, k, v, bias, sinks))


@pytest.mark.parametrize("empty", ["batch", "num_heads", "q_len", "kv_len", "dim", "v_dim"])
def test_empty_dimensions(empty):
    sizes = {"batch": 2, "num_heads": 4, "num_kv_heads": 2, "q_len": 5, "kv_len": 7, "dim": 8, "v_dim": 8, empty: 0}
    if empty == "num_heads":
        sizes["num_kv_heads"] = 0
    q, k, v = qkv(**sizes, grad=True)
    out = attention(q, k, v)
    assert out.shape == (sizes["batch"], sizes["num_heads"], sizes["q_len"], sizes["v_dim"])
    out.sum().backward()
    if empty == "kv_len":
        assert not out.any()
    if empty == "dim":
        assert_close(out, v.mean(2, keepdim=True).repeat_interleave(2, 1).expand_as(out))


def test_merge_states_joins_disjoint_keys():
    q, k, v = qkv()
    whole = attention(q, k, v, return_lse=True)
    parts = [attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 3), slice(3, 7))]
    assert_close(merge_states(*parts[0], *parts[1]), whole)
    nothing = attention(q, k[:, :, :0], v[:, :, :0], return_lse=True)
    assert_close(merge_states(*nothing, *whole), whole)
    assert_close(merge_states(*nothing, *nothing), nothing)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_turns_pairs_by_position_times_frequency(interleaved):
    cos, sin = rope_table(torch.arange(6), 4, base=100.0, factor=2.0, dtype=torch.float64)
    x = draw(6, 5)
    got = apply_rope(x, cos, sin, interleaved=interleaved)
    for position in range(6):
        for pair, (i, j) in enumerate([(0, 1), (2, 3)] if interleaved else [(0, 2), (1, 3)]):
            turn = complex(math.cos(a := position / 2 * 100 ** (-pair / 2)), math.sin(a))
            wanted = complex(x[position, i], x[position, j]) * turn
            assert_close(torch.view_as_complex(got[position, [i, j]]).item(), wanted)
    assert torch.equal(got[:, 4], x[:, 4])


def test_rope_scores_depend_on_the_distance_only():
    cos, sin = rope_table(torch.tensor([3, 8, 103, 108]), 8, dtype=torch.float64)
    rotated = apply_rope(draw(8).expand(4, 8), cos, sin)
    assert_close(rotated[0] @ rotated[1], rotated[2] @ rotated[3])


def test_latent_attention_reads_latents_alone():
    """Two heads, worked out by hand: keys 2 c and -c beside the shared 3 and 0, values c + 0 and 5 c."""
    latent, k_rope = torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[3.0], [0.0]]])
    w_uk, w_uv = torch.tensor([[[2.0]], [[-1.0]]]), torch.tensor([[[1.0]], [[5.0]]])
    query = torch.tensor([[[[1.0, 1.0]], [[0.5, -1.0]]]])
    first, second = (2 * 1 + 3, 2 * 2 + 0), (-0.5 - 3, -1.0)
    wanted = []
    for scores, values in ((first, (1.0, 2.0)), (second, (5.0, 10.0))):
        weights = [math.exp(0.7 * score) for score in scores]
        wanted.append(sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights))
    out = reference.latent_attention(query, latent, k_rope, w_uk, w_uv, scale=0.7)
    assert_close(out.flatten(), torch.tensor(wanted))


def test_layers_equal_torch_multi_head_attention():
    theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    ours = reference.MHA(12, 3, bias=True).double()
    weights, biases = theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)
    for layer, weight, bias in zip((ours.W_q, ours.W_k, ours.W_v), weights, biases, strict=True):
        layer.load_state_dict({"weight": weight, "bias": bias})
    ours.W_o.load_state_dict(theirs.out_proj.state_dict())
    x, context = draw(2, 5, 12), draw(2, 4, 12)
    assert_close(ours(x, context), theirs(x, context, context)[0])
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    assert_close(ours(x, causal=True), theirs(x, x, x, attn_mask=hidden)[0])


def test_gates_by_hand():
    joined, gate = tensor([[[1.0, 2.0, 3.0, 4.0]]]), tensor([[[0.0, math.log(3.0)]]])
    assert_close(reference.gate_heads(joined, gate, 2), tensor([[[0.5, 1.0, 2.25, 3.0]]]))
    assert_close(reference.gate_heads(joined, gate * 0, 2, "softplus"), joined * math.log(2.0))
    by_element = tensor([[[0.0, math.log(3.0), 0.0, math.log(3.0)]]])
    assert_close(reference.gate_heads(joined, by_element, 2), tensor([[[0.5, 1.5, 1.5, 3.0]]]))


def test_entries_by_hand():
    value, gate = tensor([[[1.0], [4.0], [9.0]]]), tensor([[[0.0], [math.log(3.0)], [0.0]]])
    assert_close(reference.compress_tokens(value, gate, torch.zeros(2, 1)), tensor([[[13.0 / 4]]]))
    assert_close(reference.compress_tokens(value, gate * 0, tensor([[math.log(2.0)], [0.0]])), tensor([[[2.0]]]))
    pair, flat = tensor([[[1.0, 2.0], [3.0, 8.0]]]), torch.zeros(1, 2, 2)
    assert_close(reference.compress_tokens(pair, flat, torch.zeros(1, 2), True), tensor([[[2.0], [4.5]]]))


def test_differences_by_hand():
    """One token, so that each softmax is 1 and the difference is one of values."""
    query, key = torch.zeros(1, 4, 1, 2), torch.zeros(1, 2, 1, 2)
    value = tensor([[[[1.0, 2.0]], [[3.0, 4.0]]]])
    both = reference.differential_attention(query, key, value, tensor(0.25), version=1)
    assert_close(both, 0.75 * tensor([[[[1.0, 2.0, 3.0, 4.0]], [[1.0, 2.0, 3.0, 4.0]]]]))
    second = reference.differential_attention(query, key, value, tensor(0.25), version=2)
    assert_close(second, 0.75 * value)


def test_the_indexer_by_hand():
    query, key = tensor([[[[1.0, 0.0]], [[0.0, 2.0]]]]), tensor([[[[3.0, 1.0], [-1.0, 2.0]]]])
    scores = reference.index_scores(query, key, tensor([[[10.0, 1.0]]]))  # relu of 3, -1 and of 2, 4
    assert_close(scores, tensor([[[32.0, 4.0]]]))
    probs = tensor([[[[0.5, 0.5]], [[1.0, 0.0]]]])  # their sum is (1.5, 0.5) of 2
    wanted = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    everywhere = torch.ones(1, 1, 2, dtype=torch.bool)
    assert_close(reference.indexer_loss(scores * 0, probs, everywhere), tensor(wanted))
    assert_close(
        reference.indexer_loss(scores, tensor([[[[1.0, 0.0]]]]), everywhere[..., :1] & tensor([True, False])),
        tensor(0.0),
    )


def test_tied_keys_by_hand():
    """Scores 0 and log 3, so that the weights are 1/4 and 3/4."""
    query, tied = tensor([[[[0.0, 1.0]]]]), tensor([[[[5.0, 1.0], [7.0, 2.0]]]])
    k_rope = tensor([[[[0.0], [math.log(3.0) * 2**0.5]]]])
    assert_close(reference.tied_attention(query, tied, k_rope), tensor([[[[6.5, 1.75]]]]))


def test_groups_of_latents_are_layers_side_by_side():
    torch.manual_seed(0)
    query, latents, k_rope = torch.randn(2, 4, 5, 6), torch.randn(2, 2, 5, 7), torch.randn(2, 5, 2)
    w_uk, w_uv = torch.randn(4, 4, 7), torch.randn(4, 3, 7)
    both = reference.grouped_latent_attention(query, latents, k_rope, w_uk, w_uv, causal=True)
    for group in range(2):
        heads = slice(2 * group, 2 * group + 2)
        alone = reference.latent_attention(
            query[:, heads], latents[:, group], k_rope, w_uk[heads], w_uv[heads], causal=True
        )
        assert_close(both[:, heads], alone)


def test_merged_latents_by_hand():
    latent, weights = tensor([[[1.0], [2.0], [3.0], [4.0], [5.0]]]), tensor([[1.0, 10.0, 1.0, 10.0, 1.0]])
    merged, mask = reference.merge_latents(latent, weights, 2)
    assert_close(merged, tensor([[[1.0], [21.0], [3.0], [43.0], [5.0]]]))
    assert [row.nonzero().flatten().tolist() for row in mask] == [[0], [1], [1, 2], [1, 3], [1, 3, 4]]


def test_tensor_products_by_hand():
    a, b = tensor([[[[1.0, 2.0], [0.0, 1.0]]]]), tensor([[[[1.0, 0.0, 3.0], [2.0, 4.0, 0.0]]]])
    assert_close(reference.tensor_product(a, b), tensor([[[[0.5, 0.0, 1.5]], [[2.0, 2.0, 3.0]]]]))


@pytest.mark.parametrize("kind", ["GTA", "GLA", "MTLA", "TPA"])
def test_newer_variants_read_no_later_token(kind):
    """Outputs of all tokens but the last stay as they are, to the bit, when only the last one's inputs change."""

    def out(last):
        def drawn(*shape, token_dim, seed):
            x, other = draw(*shape, seed=seed), draw(*shape, seed=seed + 50)
            x.select(token_dim, -1).copy_((other if last else x).select(token_dim, -1))
            return x

        query, k_rope = drawn(2, 4, 5, 6, token_dim=2, seed=1), drawn(2, 5, 2, token_dim=1, seed=2)
        w_uk, w_uv = draw(4, 4, 7, seed=3), draw(4, 3, 7, seed=4)
        if kind == "GTA":
            tied, rotated = drawn(2, 2, 5, 6, token_dim=2, seed=5), drawn(2, 1, 5, 3, token_dim=2, seed=6)
            return reference.tied_attention(query, tied, rotated, causal=True)
        if kind == "GLA":
            latents = drawn(2, 2, 5, 7, token_dim=2, seed=7)
            return reference.grouped_latent_attention(query, latents, k_rope, w_uk, w_uv, causal=True)
        if kind == "MTLA":
            merged, mask = reference.merge_latents(
                drawn(2, 5, 7, token_dim=1, seed=8), drawn(2, 5, token_dim=1, seed=9), stride=2
            )
            return reference.latent_attention(query, merged, k_rope, w_uk, w_uv, mask=mask)
        a, b = drawn(3, 2, 5, 2, 4, token_dim=2, seed=10), drawn(3, 2, 5, 2, 6, token_dim=2, seed=11)
        return attention(*(reference.tensor_product(*both) for both in zip(a, b, strict=True)), causal=True)

    assert torch.equal(out(False)[:, :, :-1], out(True)[:, :, :-1])
    assert not torch.equal(out(False)[:, :, -1], out(True)[:, :, -1])


def test_notebook_versions():
    torch.manual_seed(0)
    said = []
    v1, v2, v3 = (make(12, 3, say=said.append) for make in (reference.MQAV1, reference.MQAV2, reference.MQAV3))
    layer = reference.MQA(12, 3)
    for module in (v2, v3, layer):
        module.load_state_dict(v1.state_dict())
    x = torch.randn(2, 4, 12)
    assert_close(v1(x), layer(x))
    assert (
        said[0].startswith("should be 1 if correct: tensor([[[1.0000,")
        and said[1] == "shape of out : torch.Size([2, 4, 12])"
    )
    for module in (v2, v3):
        cache, outs = None, []
        for t in range(4):
            out, cache = module(x[:, t : t + 1], cache)
            outs.append(out)
        assert_close(torch.cat(outs, 1), layer(x, causal=True))
    assert (
        said[-2]
        == "Q shape : torch.Size([2, 3, 1, 4])\nK.shape: torch.Size([2, 1, 4, 4])\nV.shape: torch.Size([2, 1, 4, 4])"
    )
    assert_close(v2(x)[0], v1(x))
    assert_close(v3(x)[0], layer(x, causal=True))


def test_stands_alone():
    """The reference checks the operator, so it must not use our code: it runs without the package."""
    path = Path(reference.__file__)
    names = runpy.run_path(str(path), run_name="reference")
    imported = re.findall(r"^\s*(?:import|from) (\S+)", path.read_text(), flags=re.M)
    assert not any(name.startswith((".", "attnpack")) for name in imported)
    assert_close(names["attention"](*qkv()), attention(*qkv()), rtol=0, atol=0)
