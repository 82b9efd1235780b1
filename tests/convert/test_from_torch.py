"""from_torch: torch.nn's layers give the same outputs and gradients, over the inputs of torch's own tests of them."""

import attnpack
import pytest
import torch
from attnpack.convert import from_torch
from torch import nn
from torch.testing._internal.common_modules import module_db

KINDS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
TOLERANCE = {"rtol": 1e-9, "atol": 1e-10}
REFUSED = "add_bias_kv|add_zero_attn|activation is"


def module_cases(kind, training):
    """(constructor arguments, forward arguments) of torch's own tests, in fp64."""
    (info,) = (info for info in module_db if info.module_cls is kind)
    made = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=False, training=training)
    return [(each.constructor_input, each.forward_input) for each in made]


def randomised(layer):
    """Biases and norms begin at 0 and 1, which would hide a mistake."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def batch_first(layer):
    inner = layer if isinstance(layer, nn.MultiheadAttention) else layer.self_attn
    return inner.batch_first


def as_ours(x, layer):
    """[B, L, E] of one of torch's inputs."""
    if x is None:
        return None
    return x.unsqueeze(0) if x.dim() == 2 else x if batch_first(layer) else x.transpose(0, 1)


def as_theirs(out, layer, like):
    return out.squeeze(0) if like.dim() == 2 else out if batch_first(layer) else out.transpose(0, 1)


def may_attend(mask, padding, heads):
    """torch's two masks as one additive mask [B or 1, H or 1, L or 1, Lkv], or None."""
    total = None
    for each in (mask, padding):
        if each is None:
            continue
        added = (
            torch.zeros(each.shape, dtype=torch.float64).masked_fill(each, -torch.inf)
            if each.dtype == torch.bool
            else each
        )
        if each is padding:
            added = added.reshape(-1, 1, 1, added.size(-1))
        elif added.dim() == 3:
            added = added.unflatten(0, (-1, heads))
        total = added if total is None else total + added
    return total


def run_ours(ours, layer, arguments):
    names = {
        nn.MultiheadAttention: ("query", "key", "value"),
        nn.TransformerEncoderLayer: ("src", "src_mask", "src_key_padding_mask"),
        nn.TransformerDecoderLayer: ("tgt", "memory"),
    }[type(layer)]
    given = dict(zip(names, arguments.args, strict=False)) | arguments.kwargs
    if isinstance(layer, nn.MultiheadAttention):
        query, key, value = (as_ours(given[name], layer) for name in names)
        mask = may_attend(given.get("attn_mask"), given.get("key_padding_mask"), layer.num_heads)
        out, weights = ours(query, key, value_context=value, mask=mask, need_weights=True)
        out = as_theirs(out, layer, given["query"])
        if not given.get("need_weights", True):
            return (out,)
        weights = weights.mean(1) if given.get("average_attn_weights", True) else weights
        return out, weights if given["query"].dim() == 3 else weights.squeeze(0)
    heads = layer.self_attn.num_heads
    if isinstance(layer, nn.TransformerEncoderLayer):
        mask = may_attend(given.get("src_mask"), given.get("src_key_padding_mask"), heads)
        return (as_theirs(ours(as_ours(given["src"], layer), mask=mask), layer, given["src"]),)
    inputs = {
        "mask": may_attend(given.get("tgt_mask"), given.get("tgt_key_padding_mask"), heads),
        "context_mask": may_attend(given.get("memory_mask"), given.get("memory_key_padding_mask"), heads),
    }
    out = ours(as_ours(given["tgt"], layer), as_ours(given["memory"], layer), **inputs)
    return (as_theirs(out, layer, given["tgt"]),)


def with_causal_mask(layer, arguments):
    """A decoder block is causal by itself, so torch's layer is asked with a causal mask too."""
    if not isinstance(layer, nn.TransformerDecoderLayer):
        return arguments
    length = arguments.args[0].size(1 if batch_first(layer) or arguments.args[0].dim() == 2 else 0)
    if arguments.args[0].dim() == 2:
        length = arguments.args[0].size(0)
    causal = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)
    own = arguments.kwargs.get("tgt_mask")
    if own is not None:
        causal = causal + may_attend(own, None, layer.self_attn.num_heads)
    if causal.dim() == 4:
        causal = causal.flatten(0, 1)
    changed = type(arguments)(*arguments.args, **(arguments.kwargs | {"tgt_mask": causal}))
    return changed


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
def test_over_the_inputs_of_torchs_own_tests(kind, training):
    """Outputs of all of them, but for layers that have what attnpack has not: these are refused by name."""
    torch.manual_seed(0)
    compared = refused = 0
    for constructor, forward in module_cases(kind, training):
        settings = {k: v for k, v in constructor.kwargs.items() if k not in ("device", "dtype")}
        layer = randomised(kind(*constructor.args, **settings, dtype=torch.float64).train(training))
        for part in layer.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
            if isinstance(part, nn.MultiheadAttention):
                part.dropout = 0.0
        try:
            ours = from_torch(layer)
        except (ValueError, TypeError) as error:
            assert any(word in str(error) for word in REFUSED.split("|")), error
            refused += 1
            continue
        forward = with_causal_mask(layer, forward)
        wanted = layer(*forward.args, **forward.kwargs)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        out = run_ours(ours, layer, forward)
        for mine, theirs in zip(out, wanted, strict=False):
            if theirs is not None:
                rows = ~theirs.isnan()  # torch gives NaN where a mask hides all keys
                torch.testing.assert_close(mine[rows], theirs[rows], **TOLERANCE)
        compared += 1
    assert compared >= 16, (compared, refused)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", nn.GELU("tanh")], ids=str)
def test_layers_and_their_gradients(norm_first, bias, activation):
    torch.manual_seed(0)
    settings = {"norm_first": norm_first, "bias": bias, "activation": activation, "layer_norm_eps": 1e-3}
    shared = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64}
    x, memory = torch.randn(2, 5, 24, dtype=torch.float64), torch.randn(2, 7, 24, dtype=torch.float64)
    causal = torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)
    for kind, theirs, mine in (
        (nn.TransformerEncoderLayer, lambda m: m(x), lambda m: m(x)),
        (nn.TransformerDecoderLayer, lambda m: m(x, memory, tgt_mask=causal), lambda m: m(x, memory)),
    ):
        layer = randomised(kind(24, 4, 32, **settings, **shared))
        ours = from_torch(layer)
        wanted, out = theirs(layer), mine(ours)
        torch.testing.assert_close(out, wanted, **TOLERANCE)
        torch.testing.assert_close(mine(ours.cpp().forward), out, **TOLERANCE)
        wanted.pow(3).sum().backward()
        out.pow(3).sum().backward()
        for name, parameter in (("linear1", ours.mlp.up_proj), ("norm1", ours.input_layernorm)):
            torch.testing.assert_close(parameter.weight.grad, getattr(layer, name).weight.grad, **TOLERANCE)
        q = layer.self_attn.in_proj_weight.grad[:24]
        torch.testing.assert_close(ours.self_attn.q_proj.weight.grad, q, **TOLERANCE)
        trained = {name: p.requires_grad for name, p in ours.named_parameters()}
        assert all(trained[name] == (bias or not name.endswith("norm.bias")) for name in trained)


def test_the_copy_keeps_mode_rates_dtype_and_what_is_frozen():
    layer = nn.TransformerDecoderLayer(24, 4, 32, dropout=0.3, dtype=torch.bfloat16).eval()
    layer.multihead_attn.in_proj_bias.requires_grad_(False)
    ours = from_torch(layer)
    assert isinstance(ours, attnpack.DecoderBlock) and not ours.training and not ours.cross_attn.training
    assert [ours.dropout, ours.mlp.dropout, ours.self_attn.dropout, ours.cross_attn.dropout] == [0.3] * 4
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    frozen = {name for name, p in ours.named_parameters() if not p.requires_grad}
    assert frozen == {f"cross_attn.{name}_proj.bias" for name in "qkv"}
    before = ours.mlp.up_proj.weight.clone()
    layer.linear1.weight.data.zero_()
    assert torch.equal(ours.mlp.up_proj.weight, before)
    assert type(ours.mlp.up_proj) is nn.Linear and isinstance(ours.mlp.up_proj.weight, nn.Parameter)


@pytest.mark.parametrize("with_norm", [False, True])
def test_stacks_and_their_gradients(with_norm):
    torch.manual_seed(0)
    norms = [nn.LayerNorm(24, eps=1e-2, dtype=torch.float64) if with_norm else None for _ in range(2)]
    settings = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64}
    x, memory = torch.randn(2, 5, 24, dtype=torch.float64), torch.randn(2, 7, 24, dtype=torch.float64)
    causal = torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, 32, **settings), 3, norms[0])
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(24, 4, 32, **settings), 2, norms[1])
    whole = nn.Transformer(24, 4, 2, 3, 32, **settings)
    lens = torch.tensor([7, 3])
    hidden = torch.arange(7) >= lens[:, None]
    for theirs, kind, wanted, mine in (
        (encoder, attnpack.Encoder, lambda m: m(x), lambda m: m(x)),
        (decoder, attnpack.Decoder, lambda m: m(x, memory, tgt_mask=causal), lambda m: m(x, context=memory)),
        (
            whole,
            attnpack.EncoderDecoder,
            lambda m: m(memory, x, tgt_mask=causal, src_key_padding_mask=hidden, memory_key_padding_mask=hidden),
            lambda m: m(memory, x, source_lens=lens),
        ),
    ):
        ours = from_torch(randomised(theirs))
        assert type(ours) is kind and ours.training
        out, expected = mine(ours), wanted(theirs)
        torch.testing.assert_close(out, expected, **TOLERANCE)
        torch.testing.assert_close(mine(ours.cpp().forward), out, **TOLERANCE)
        out.pow(3).sum().backward()
        expected.pow(3).sum().backward()
        theirs, ours = getattr(theirs, "decoder", theirs), getattr(ours, "decoder", ours)
        torch.testing.assert_close(
            ours.layers[1].mlp.up_proj.weight.grad, theirs.layers[1].linear1.weight.grad, **TOLERANCE
        )
        if theirs.norm is not None:
            torch.testing.assert_close(ours.norm.weight.grad, theirs.norm.weight.grad, **TOLERANCE)


def test_a_stack_keeps_what_is_frozen_and_its_mode():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, 32, bias=False), 2, nn.LayerNorm(24, bias=False))
    encoder.layers[1].eval()
    encoder.norm.weight.requires_grad_(False)
    ours = from_torch(encoder)
    assert [ours.training, ours.layers[0].training, ours.layers[1].training] == [True, True, False]
    assert not ours.norm.weight.requires_grad and not ours.norm.bias.requires_grad and not ours.norm.bias.any()
    assert not from_torch(encoder.eval()).layers[0].training
    with pytest.raises(TypeError, match="norm is .*BatchNorm1d.*wants an nn.LayerNorm"):
        from_torch(nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4), 2, nn.BatchNorm1d(24)))


def test_what_has_no_like_is_refused_by_its_name():
    def refused(error, words, module):
        with pytest.raises(error, match=words):
            from_torch(module)

    refused(ValueError, "add_bias_kv: got a module with it", nn.MultiheadAttention(24, 4, add_bias_kv=True))
    refused(ValueError, "add_zero_attn: got a module with it", nn.MultiheadAttention(24, 4, add_zero_attn=True))
    refused(TypeError, "activation is .*wants ReLU or GELU", nn.TransformerEncoderLayer(24, 4, activation=torch.tanh))
    refused(TypeError, "module is .*Linear.*wants an nn.MultiheadAttention", nn.Linear(3, 3))
    uneven = nn.TransformerEncoderLayer(24, 4)
    uneven.dropout2.p = 0.5
    refused(ValueError, r"dropout: got \[0.1, 0.5\] in one layer", uneven)
