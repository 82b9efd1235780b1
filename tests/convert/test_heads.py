"""Fewer kv heads: weights, modules and models in both languages, against the formula; everything else stays the
same."""

import copy

import attnpack
import pytest
import torch
from attnpack import _C, convert
from attnpack.convert import LayerWeights
from kv_heads import share_heads
from torch import nn

EMBED, HEADS, DIM = 24, 4, 6
SETTINGS = {
    "plain": {},
    "rope-bias": {"bias": True, "rope": lambda: attnpack.RotaryEmbedding(DIM), "causal": True},
    "partial-rope": {"head_dim": 8, "rope": lambda: attnpack.RotaryEmbedding(4, interleaved=True)},
    "qk-norm": {"qk_norm": True, "rope": lambda: attnpack.RotaryEmbedding(DIM), "bias": True, "out_bias": False},
    "scores": {"window": (3, 0), "causal": True, "softcap": 3.0, "sinks": True, "alibi": True, "scale": 0.3},
    "cross": {"kdim": 10, "vdim": 14, "bias": True},
}
METHODS = ["mean", "first", "similar", "aligned"]


def build(name: str = "plain", kv_heads: int = HEADS, dtype=torch.float64, **more) -> attnpack.GroupedQueryAttention:
    torch.manual_seed(1)
    settings = {key: value() if callable(value) else value for key, value in SETTINGS[name].items()} | more
    module = attnpack.GroupedQueryAttention(EMBED, HEADS, kv_heads, **settings, dtype=dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module


def inputs(module, length: int = 7) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(2)
    x = torch.randn(2, length, EMBED, dtype=module.q_proj.weight.dtype)
    if module.kdim == EMBED:
        return (x,)
    return x, torch.randn(2, 9, module.kdim, dtype=x.dtype), torch.randn(2, 9, module.vdim, dtype=x.dtype)


def call(module, given):
    return module(given[0], *given[1:2], **({"value_context": given[2]} if len(given) > 2 else {}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads: got 3, which does not divide the 4 heads there are; choose a divisor"),
        ({"num_kv_heads": 5}, "num_kv_heads: got 5, want 1 to the 4 heads"),
        ({"num_kv_heads": 0}, "num_kv_heads: got 0, want 1 to"),
        ({"num_heads": 5}, "weight: got shape .*, whose rows are not those of num_heads = 5"),
        ({"num_heads": 0}, "num_heads: got 0"),
        ({"method": "median"}, "method: got 'median', want 'mean', 'first' or 'random'"),
        ({"seed": 1}, "seed: got one for method 'mean'"),
        ({"window": 0}, "window: got 0"),
        ({"groups": [[0, 1, 2, 3]]}, "groups: got 1 lists, want num_kv_heads = 2"),
        ({"groups": [[0, 1], [1, 2, 3]]}, "groups: got head 1 twice"),
        ({"groups": [[0, 1], [2]]}, "groups: got head 3 in none"),
        ({"groups": [[0, 1, 2, 3], []]}, r"groups: got no heads in groups\[1\]"),
        ({"groups": [[0, 1], [2, 4]]}, r"groups: got head 4 in groups\[1\], want 0 to 3"),
        ({"weight": torch.zeros(24, 4, dtype=torch.int8)}, "weight: got dtype .*, want a floating one"),
        ({"weight": torch.zeros(2, 24, 4)}, "weight: got shape"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(arguments, message):
    given = {"weight": torch.zeros(24, 4), "num_heads": HEADS, "num_kv_heads": 2} | arguments
    with pytest.raises(ValueError, match=f"^attnpack: {message}"):
        convert.pool_kv_heads(**given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_kv_heads": "2"}, r"num_kv_heads is '2' \(str\), wants an int"),
        ({"groups": [0, 1]}, "groups is .*, wants a list of lists of heads"),
        ({"method": 3}, r"method is 3 \(int\), wants a word"),
        ({"seed": -1, "method": "random"}, "seed is -1"),
        ({"weight": [1.0]}, "weight is .*, wants a tensor"),
    ],
    ids=str,
)
def test_what_is_of_the_wrong_kind_is_named(arguments, message):
    given = {"weight": torch.zeros(24, 4), "num_heads": HEADS, "num_kv_heads": 2} | arguments
    with pytest.raises(TypeError, match=f"^attnpack: {message}"):
        convert.pool_kv_heads(**given)


# to_gqa, to_mqa


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SETTINGS)
def test_equal_heads_of_a_group_leave_the_output(name, method):
    module = build(name)
    groups = [[0, 1], [2, 3]] if method != "similar" else [[0, 2], [1, 3]]
    share_heads(module, groups)
    given = inputs(module)
    for calibration in (None, given):
        converted = convert.to_gqa(
            module, 2, method, calibration=calibration if method in ("similar", "aligned") else None
        )
        assert converted.num_kv_heads == 2 and converted.k_proj.weight.shape[0] == 2 * module.head_dim
        torch.testing.assert_close(call(converted, given), call(module, given), rtol=1e-9, atol=1e-9)
        twin = converted.cpp()
        assert torch.equal(
            twin.forward(given[0], *given[1:2], **({"value_context": given[2]} if len(given) > 2 else {})),
            call(converted, given),
        )


@pytest.mark.parametrize("method", METHODS)
def test_as_many_heads_are_the_identity(method):
    module = build("rope-bias", dtype=torch.bfloat16)
    converted = convert.to_gqa(module, HEADS, method)
    for name, tensor in module.state_dict().items():
        assert torch.equal(converted.state_dict()[name], tensor), name
        assert converted.state_dict()[name].data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("kind", [convert.to_gqa, convert.to_mqa])
@pytest.mark.parametrize("name", SETTINGS)
def test_mean_is_the_formula_and_all_else_is_kept(name, kind):
    module = build(name, dtype=torch.float32).eval()
    module.q_proj.weight.requires_grad_(False)
    module.v_proj.weight.requires_grad_(False)
    before = copy.deepcopy(module.state_dict())
    count = 2 if kind is convert.to_gqa else 1
    converted = convert.to_gqa(module, 2) if count == 2 else convert.to_mqa(module)
    assert type(converted).__name__ == ("GroupedQueryAttention" if count == 2 else "MultiQueryAttention")
    assert all(torch.equal(tensor, before[key]) for key, tensor in module.state_dict().items())
    new = converted.state_dict()
    assert set(new) == set(before) and not converted.training
    for key, old in before.items():
        wanted = old
        if key.startswith(("k_proj", "v_proj")):
            wanted = old.double().unflatten(0, (count, HEADS // count, -1)).mean(1).flatten(0, 1).float()
        assert torch.equal(new[key], wanted), key
        assert new[key].data_ptr() != module.state_dict()[key].data_ptr()
    settings, kept = module._live_config(), converted._live_config()
    for key in kept.keys() - {"num_kv_heads", "head_map"}:
        assert kept[key] == settings[key], key
    grads = {key: parameter.requires_grad for key, parameter in converted.named_parameters()}
    assert grads == {key: parameter.requires_grad for key, parameter in module.named_parameters()}
    call(converted, inputs(module))


def test_uneven_groups_give_a_head_map():
    module = build("rope-bias")
    groups = [[0, 3, 1], [2]]
    converted = convert.to_gqa(module, 2, groups=groups)
    assert converted.head_map == (0, 0, 1, 0)
    share_heads(module, groups)
    x = inputs(module)[0]
    torch.testing.assert_close(convert.to_gqa(module, 2, groups=groups)(x), module(x))


def test_grouped_heads_are_merged_further():
    module = attnpack.GroupedQueryAttention(EMBED, HEADS, 3, head_map=[2, 0, 1, 0], head_dim=DIM, dtype=torch.float64)
    share_heads(module, [[0, 2]])
    converted = convert.to_gqa(module, 2, groups=[[1], [0, 2]])
    assert converted.head_map == (1, 1, 0, 1)
    x = inputs(module)[0]
    torch.testing.assert_close(converted(x), module(x))
    assert convert.to_mqa(converted).num_kv_heads == 1


@pytest.mark.parametrize("method", ["mean", "first", "random", "similar", "aligned"])
@pytest.mark.parametrize("name", SETTINGS)
def test_cpp_modules_give_the_same_bits(name, method):
    module = build(name, dtype=torch.float32)
    seed = {"seed": 7} if method == "random" else {}
    calibration = {"calibration": inputs(module)} if method in ("similar", "aligned") else {}
    for kind, arguments in ((convert.to_gqa, (2, method)), (convert.to_mqa, (method,))):
        ours = kind(module, *arguments, **seed, **calibration)
        theirs = kind(module.cpp(), *arguments, **seed, **calibration)
        assert type(theirs).__name__ == type(ours).__name__
        tensors = dict(theirs.named_parameters())
        assert set(tensors) == set(ours.state_dict())
        for key, tensor in ours.state_dict().items():
            assert torch.equal(tensors[key], tensor), key
        given = inputs(module)
        more = {"value_context": given[2]} if len(given) > 2 else {}
        assert torch.equal(theirs.forward(given[0], *given[1:2], **more), call(ours, given))


@pytest.mark.parametrize("method", ["mean", "first", "similar", "aligned"])
def test_conversion_commutes_with_the_rope_layout(method):
    """Half-split and interleaved checkpoints of one model are converted to two checkpoints of one model."""

    def interleave(tensor, heads):
        return tensor.unflatten(0, (heads, 2, DIM // 2)).transpose(1, 2).flatten(0, 2)

    half = build("rope-bias")
    other = build("rope-bias", rope=attnpack.RotaryEmbedding(DIM, interleaved=True))
    state = half.state_dict()
    for key in state:
        if key.startswith(("q_proj", "k_proj")):
            state[key] = interleave(state[key], HEADS)
    other.load_state_dict(state)
    x = inputs(half)[0]
    torch.testing.assert_close(half(x), other(x))
    a, b = convert.to_gqa(half, 2, method), convert.to_gqa(other, 2, method)
    for key, heads in (("q_proj.weight", HEADS), ("k_proj.weight", 2), ("k_proj.bias", 2)):
        torch.testing.assert_close(interleave(a.state_dict()[key], heads), b.state_dict()[key])
    torch.testing.assert_close(a.v_proj.weight, b.v_proj.weight)


def orthogonal(size: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0]


def rope_turn(module) -> torch.Tensor:
    """A rotation of a head, [D, D], that commutes with the module's RoPE."""
    rope_dim = 0 if module.rope is None else module.rope.dim
    turn = torch.block_diag(torch.zeros(rope_dim, rope_dim), orthogonal(module.head_dim - rope_dim))
    for p in range(rope_dim // 2):
        i, j = (2 * p, 2 * p + 1) if module.rope.interleaved else (p, p + rope_dim // 2)
        angle = torch.rand((), dtype=torch.float64) * 6
        turn[i, i], turn[j, j], turn[i, j], turn[j, i] = angle.cos(), angle.cos(), -angle.sin(), angle.sin()
    return turn


@pytest.mark.parametrize("name", ["plain", "rope-bias", "partial-rope", "cross"])
def test_alignment_undoes_turns_that_do_not_change_the_layer(name):
    """For "aligned", but not for "mean", heads that differ by rotations are one head: q and o compensate the
    rotations."""
    module = build(name)
    share_heads(module, [[0, 1, 2, 3]])
    given = inputs(module)
    with torch.no_grad():
        out = call(module, given)
        for head in range(HEADS):
            rows = slice(head * module.head_dim, (head + 1) * module.head_dim)
            for projections, turn in (
                ((module.q_proj, module.k_proj), rope_turn(module)),
                ((module.v_proj,), orthogonal(module.head_dim)),
            ):
                for tensor in (tensor for projection in projections for tensor in projection.parameters()):
                    tensor[rows] = turn @ tensor[rows]
            module.o_proj.weight[:, rows] = module.o_proj.weight[:, rows] @ turn.T
        torch.testing.assert_close(call(module, given), out)
        torch.testing.assert_close(call(convert.to_mqa(module, "aligned"), given), out)
        torch.testing.assert_close(call(convert.to_mqa(module, "aligned", calibration=given), given), out)
        assert (call(convert.to_mqa(module), given) - out).abs().max() > 1e-2


def test_the_distance_of_two_heads_is_that_of_what_they_give():
    """Mean |y_a - y_b|^2 of keys over the mean of |y|^2, and the same of values."""
    module = attnpack.GroupedQueryAttention(EMBED, 4, 4, bias=True, dtype=torch.float64)
    x = inputs(module)[0].flatten(0, 1)
    wanted = torch.zeros(4, 4, dtype=torch.float64)
    for layer in (module.k_proj, module.v_proj):
        heads = layer(x).unflatten(-1, (4, -1))  # [tokens, head, D]
        far = (heads[:, :, None] - heads[:, None]).square().sum(-1).mean(0)
        wanted += far / heads.square().sum(-1).mean()
    rows = convert.heads.calibration_rows(x[None])
    got = _C.convert.head_distances(list(convert.heads.layer_weights(module)), 4, rows)
    torch.testing.assert_close(got, wanted.detach(), rtol=1e-4, atol=1e-4)


def test_similar_finds_the_heads_that_belong_together():
    module = attnpack.MultiHeadAttention(EMBED, 8, head_dim=DIM)
    groups = [[0, 5], [1, 4], [2, 7], [3, 6]]
    share_heads(module, groups)
    with torch.no_grad():
        module.k_proj.weight.add_(0.01 * torch.randn_like(module.k_proj.weight))
    x = torch.randn(2, 50, EMBED)
    assert convert.similar_groups(module, 4, x) == groups
    assert convert.to_gqa(module, 4, "similar", calibration=x).head_map == (0, 1, 2, 3, 1, 0, 3, 2)
    assert convert.layer_error(module, convert.to_gqa(module, 4, "similar", calibration=x), x) < 0.05
    assert convert.layer_error(module, convert.to_gqa(module, 4), x) > 0.1


def test_similarity_is_that_of_activations_not_of_weights():
    """Two heads are alike if they differ only in directions that the text does not have; by weights the first is like
    the second."""
    module = attnpack.MultiHeadAttention(8, 4, head_dim=2)
    share_heads(module, [[0, 3]])
    x = torch.randn(1, 64, 8)
    x[..., 4:] = 0
    with torch.no_grad():
        module.k_proj.weight[:4, 4:] += 9
        module.v_proj.weight[:4, 4:] -= 9
    assert [0, 3] not in convert.similar_groups(module, 2)
    assert [0, 3] in convert.similar_groups(module, 2, x)


def test_models_are_converted_layer_by_layer():
    model = attnpack.CausalLM(32, EMBED, 2, HEADS, hidden_dim=32, bias=True, qk_norm=True, dtype=torch.float64).eval()
    for layer in model.layers:
        share_heads(layer.self_attn, [[0, 2], [1, 3]])
    ids = torch.randint(32, (2, 9))
    converted = convert.to_gqa(model, 2, groups=[[0, 2], [1, 3]])
    torch.testing.assert_close(converted(ids), model(ids))
    assert torch.equal(converted.cpp().forward(ids), converted(ids)) and not converted.training
    assert converted.layers[0].self_attn.head_map is None
    with pytest.raises(ValueError, match="groups: got one that 1 query heads read, want 4 / 2"):
        convert.to_gqa(model, 2, groups=[[0], [1, 2, 3]])
    drawn = convert.to_mqa(model, "random", seed=3)
    assert torch.equal(drawn(ids), convert.to_mqa(model, "random", seed=3)(ids))
    first, second = (layer.self_attn.k_proj.weight for layer in drawn.layers)
    assert not torch.allclose(first / first.std(), second / second.std())


def encoder_decoder():
    def block(kind, **more):
        attention = attnpack.MultiHeadAttention(EMBED, HEADS)
        return kind(attention, attnpack.FeedForward(EMBED, 32), **more)

    cross = attnpack.MultiHeadAttention(EMBED, HEADS)
    encoder = attnpack.Encoder([block(attnpack.EncoderBlock)])
    return attnpack.EncoderDecoder(encoder, attnpack.Decoder([block(attnpack.DecoderBlock, cross_attention=cross)]))


def test_of_an_encoder_decoder_only_the_decoder_changes_unless_asked():
    model = encoder_decoder()
    source, target = torch.randn(1, 5, EMBED), torch.randn(1, 4, EMBED)
    for encoder in (False, True):
        converted = convert.to_gqa(model, 2, encoder=encoder)
        heads = {name: m.num_kv_heads for name, m in converted.named_modules() if hasattr(m, "num_kv_heads")}
        assert heads == {
            "encoder.layers.0.self_attn": 2 if encoder else 4,
            "decoder.layers.0.self_attn": 2,
            "decoder.layers.0.cross_attn": 2,
        }
        assert torch.equal(converted.cpp().forward(source, target), converted(source, target))
    assert model.decoder.layers[0].self_attn.num_kv_heads == 4


@pytest.mark.parametrize("method", ["mean", "random", "aligned"])
def test_cpp_models_give_the_same_bits(method):
    seed = {"seed": 5} if method == "random" else {}
    model = attnpack.CausalLM(32, EMBED, 2, HEADS, hidden_dim=32, bias=True).eval()
    model.lm_head.weight.requires_grad_(False)
    pair, source, target = encoder_decoder(), torch.randn(1, 5, EMBED), torch.randn(1, 4, EMBED)
    ids = torch.randint(32, (2, 9))
    for given, inputs, more in (
        (model, (ids,), {}),
        (pair, (source, target), {"encoder": True}),
        (pair, (source, target), {}),
    ):
        ours = convert.to_gqa(given, 2, method, **seed, **more)
        theirs = convert.to_gqa(given.cpp(), 2, method, **seed, **more)
        tensors = dict(theirs.named_parameters())
        assert {name: parameter.requires_grad for name, parameter in ours.named_parameters()} == {
            name: tensor.requires_grad for name, tensor in tensors.items()
        }
        for name, tensor in ours.state_dict().items():
            assert torch.equal(tensors[name], tensor), name
        assert torch.equal(theirs.forward(*inputs), ours(*inputs)) and theirs.training == given.training


def test_a_model_of_interleaved_pairs_is_converted_as_its_layers_are():
    model = attnpack.CausalLM(32, EMBED, 2, HEADS, hidden_dim=32, rope_interleaved=True)
    for given in (model, model.cpp()):
        weights = convert.to_gqa(given, 2, "aligned").state_dict()
        for number, layer in enumerate(model.layers):
            alone = convert.to_gqa(layer.self_attn, 2, "aligned")
            for name, tensor in alone.state_dict().items():
                assert torch.equal(weights[f"model.layers.{number}.self_attn.{name}"], tensor), name


def test_hooks_and_other_norms_do_not_hinder_conversion():
    module, calls = build("qk-norm"), []
    module.q_norm.eps, module.k_norm = 1e-3, nn.LayerNorm(DIM, dtype=torch.float64)
    module.rope.inv_freq = (1.0, 0.3, 0.1)
    share_heads(module, [[0, 1], [2, 3]])
    x = inputs(module)[0]
    wanted = module(x)
    for watched in (module, module.k_proj, module.q_norm):
        watched.register_forward_hook(lambda *_: calls.append(1))
    made = convert.to_gqa(module, 2)
    torch.testing.assert_close(made(x), wanted, rtol=1e-9, atol=1e-9)
    assert made.q_norm.eps == 1e-3 and made.rope.inv_freq == module.rope.inv_freq
    assert made.k_norm is not module.k_norm and made.rope is not module.rope
    model = attnpack.CausalLM(32, EMBED, 2, HEADS, hidden_dim=32, dtype=torch.float64)
    model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    assert convert.to_mqa(model).layers[1].self_attn.num_kv_heads == 1


@pytest.mark.parametrize("lost", ["q_proj", "k_proj", "v_proj", "o_proj"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_bias_that_others_have_is_one_of_zeros(lost, bias):
    """bias=True without the bias of one projection, or bias=False with that of one."""
    module = build(bias=bias)
    getattr(module, lost).bias = None if bias else nn.Parameter(torch.randn(EMBED, dtype=torch.float64))
    share_heads(module, [[0, 1], [2, 3]])
    module.k_proj.weight.requires_grad_(False)
    x = inputs(module)[0]
    made = convert.to_gqa(module, 2)
    torch.testing.assert_close(made(x), module(x), rtol=1e-9, atol=1e-9)
    assert torch.equal(made.cpp().forward(x), made(x))
    if bias and lost == "k_proj":
        assert not made.k_proj.bias.any() and not made.k_proj.bias.requires_grad


def test_a_feed_forward_of_ones_own_stays():
    class Mine(nn.Module):
        def forward(self, x):
            return x.sin()

    block = attnpack.DecoderBlock(build(dtype=torch.float32, kv_heads=4).eval(), Mine())
    made = convert.to_gqa(attnpack.Decoder([block]), 2)
    assert isinstance(made.layers[0].mlp, Mine) and made.layers[0].self_attn.num_kv_heads == 2
    assert made.training and not made.layers[0].self_attn.training


def test_models_that_would_lose_something_are_refused():
    model = attnpack.CausalLM(32, EMBED, 2, HEADS, hidden_dim=32)
    model.layers[0].self_attn.scale = 3.0
    with pytest.raises(TypeError, match="CausalLM has other layers or settings"):
        convert.to_gqa(model, 2)
    latent = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
    model = attnpack.CausalLM(32, EMBED, 1, HEADS, hidden_dim=32, latent=latent)
    with pytest.raises(TypeError, match="module is a MultiHeadLatentAttention"):
        convert.to_gqa(model, 2)
    with pytest.raises(ValueError, match="model: got one of latent attention"):
        convert.to_gqa(model.cpp(), 2)


@pytest.mark.parametrize("convertible", [build, lambda: attnpack.CausalLM(32, EMBED, 2, HEADS, hidden_dim=32)])
def test_no_gradient_reaches_the_source(convertible):
    module = convertible()
    made = convert.to_mqa(module)
    given = inputs(module) if isinstance(module, attnpack.GroupedQueryAttention) else (torch.ones(1, 3).long(),)
    made(*given).sum().backward()
    assert all(parameter.grad is not None for parameter in made.parameters())
    assert all(parameter.grad is None for parameter in module.parameters())
    ours = {parameter.data_ptr() for parameter in module.parameters()}
    assert not any(parameter.data_ptr() in ours for parameter in made.parameters())


def test_modules_that_cannot_be_converted_are_named():
    module = build()
    with pytest.raises(TypeError, match=r"attnpack: module is Linear\(.*wants a MultiHeadAttention"):
        convert.to_gqa(nn.Linear(2, 2), 1)
    with pytest.raises(ValueError, match="module: got a module of class EncoderBlock without attention layers"):
        convert.to_gqa(attnpack.EncoderBlock(attnpack.SelfAttention(EMBED), attnpack.FeedForward(EMBED, 8)), 1)
    with pytest.raises(ValueError, match="calibration: got one for a whole model"):
        convert.to_gqa(attnpack.CausalLM(32, EMBED, 2, HEADS, hidden_dim=32), 1, calibration=torch.zeros(5, EMBED))
    with pytest.raises(ValueError, match="calibration: got rows of width 3, want 24"):
        convert.to_gqa(module, 2, "similar", calibration=torch.zeros(5, 3))
    with pytest.raises(ValueError, match="calibration: got numbers that are not finite"):
        convert.to_gqa(module, 2, "aligned", calibration=torch.full((5, EMBED), torch.nan))
    with pytest.raises(ValueError, match="groups: got some for method 'similar'"):
        convert.to_gqa(module, 2, "similar", groups=[[0, 1], [2, 3]])
    for name, method in (("k_proj", "mean"), ("v_proj", "mean"), ("q_proj", "aligned"), ("o_proj", "aligned")):
        changed = build()
        setattr(changed, name, nn.Sequential(getattr(changed, name)))
        calibration = {"calibration": torch.randn(1, 9, EMBED)} if method == "aligned" else {}
        with pytest.raises(TypeError, match=f"attnpack: {name} is a Sequential.*plain nn.Linear"):
            convert.to_gqa(changed, 2, method, **calibration)


def test_merging_a_layers_weights_puts_query_heads_in_order():
    module = build("rope-bias")
    weights = LayerWeights(*(getattr(module, f"{name}_proj").weight for name in "qkvo"))
    merged = convert.merge_kv_heads(weights, HEADS, HEADS, 2, groups=[[0, 3], [1, 2]], reorder=True)
    assert merged.head_order == [0, 3, 1, 2] and merged.head_map == [0, 0, 1, 1]
    assert torch.equal(merged.weights.q[DIM : 2 * DIM], weights.q[3 * DIM :])
    assert torch.equal(merged.weights.o[:, DIM : 2 * DIM], weights.o[:, 3 * DIM :])


@pytest.mark.parametrize("method", ["mean", "first", "random", "similar", "aligned"])
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_weights_that_are_no_numbers_are_refused(method, name):
    module = attnpack.MultiHeadAttention(16, 4)
    with torch.no_grad():
        getattr(module, name).weight[3, 3] = torch.nan
    for given in (module, module.cpp()):
        with pytest.raises(ValueError, match=f"^attnpack: {name[0]}: got a weight that holds NaN or Inf"):
            convert.to_gqa(given, 2, method)


def test_pooling_refuses_what_is_no_number():
    with pytest.raises(ValueError, match="^attnpack: weight: got a weight that holds NaN or Inf"):
        convert.pool_kv_heads(torch.full((6, 3), torch.nan), 6, 1)


@pytest.mark.parametrize("method", ["similar", "aligned"])
def test_weights_on_meta_have_no_heads_to_compare(method):
    layer = attnpack.MultiHeadAttention(24, 4, device="meta")
    with pytest.raises(ValueError, match="^attnpack: q: got a weight on meta, where it has no numbers"):
        attnpack.convert.to_gqa(layer, 2, method)
    with pytest.raises(ValueError, match="^attnpack: q: got a weight on meta"):
        attnpack.convert.to_mla(layer, 8)
    assert attnpack.convert.to_gqa(layer, 2).k_proj.weight.is_meta
