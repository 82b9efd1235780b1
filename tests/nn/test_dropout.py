"""Dropout of feed-forwards, blocks, stacks and language models: where it acts, how much, and the same in C++."""

import attnpack
import pytest
import torch
from torch import nn

E, P = 24, 0.25


def attention(**settings):
    return attnpack.MultiHeadAttention(E, 4, **settings)


def feed_forward(**settings):
    return attnpack.FeedForward(E, 32, **settings)


def decoder_block(cross=False, **settings):
    other = attention() if cross else None
    return attnpack.DecoderBlock(attention(), feed_forward(), cross_attention=other, **settings)


MODULES = {
    "feed_forward": lambda p: feed_forward(dropout=p),
    "feed_forward_without_gate": lambda p: feed_forward(activation="relu", dropout=p),
    "encoder_block": lambda p: attnpack.EncoderBlock(attention(), feed_forward(), dropout=p),
    "post_norm": lambda p: attnpack.EncoderBlock(attention(), feed_forward(), pre_norm=False, dropout=p),
    "decoder_block": lambda p: decoder_block(dropout=p),
    "cross": lambda p: decoder_block(cross=True, dropout=p),
    **{
        layout: lambda p, layout=layout: decoder_block(layout=layout, dropout=p)
        for layout in ("sandwich", "output", "parallel", "parallel_two")
    },
    "encoder": lambda p: attnpack.Encoder([attnpack.EncoderBlock(attention(), feed_forward())], dropout=p),
    "decoder": lambda p: attnpack.Decoder([decoder_block()], embed_positions=nn.Embedding(9, E), dropout=p),
    "causal_lm": lambda p: attnpack.CausalLM(32, E, 2, 4, hidden_dim=32, dropout=p),
    "causal_lm_attention": lambda p: attnpack.CausalLM(32, E, 2, 4, hidden_dim=32, attention_dropout=p),
    "causal_lm_latent": lambda p: attnpack.CausalLM(
        32, E, 1, 4, attention_dropout=p,
        latent={"kv_lora_rank": 10, "qk_nope_head_dim": 5, "qk_rope_head_dim": 6, "v_head_dim": 7},
    ),
}  # fmt: skip
by_name = pytest.mark.parametrize("name", MODULES)


def inputs(name):
    if name.startswith("causal_lm"):
        return (torch.randint(32, (2, 5)),)
    return (torch.randn(2, 5, E), torch.randn(2, 7, E)) if name == "cross" else (torch.randn(2, 5, E),)


def same_weights(name, p):
    """The module with dropout p, and the same without."""
    torch.manual_seed(0)
    with_dropout = MODULES[name](p)
    torch.manual_seed(0)
    return with_dropout, MODULES[name](0.0)


@by_name
def test_it_acts_in_training_alone_and_draws_anew(name):
    module, plain = same_weights(name, P)
    x = inputs(name)
    assert torch.equal(module.eval()(*x), plain(*x))
    module.train()
    assert not torch.allclose(module(*x), plain(*x)) and not torch.equal(module(*x), module(*x))


@by_name
def test_the_twin_draws_the_same(name):
    module, _ = same_weights(name, P)
    twin, x = module.cpp(), inputs(name)
    torch.manual_seed(7)
    wanted = module(*x)
    torch.manual_seed(7)
    assert torch.equal(twin.forward(*x), wanted)
    assert torch.equal(twin.eval().forward(*x), module.eval()(*x))
    rebuilt = type(module).from_cpp(twin)
    torch.manual_seed(7)
    assert torch.equal(rebuilt.train()(*x), wanted)


def test_a_feed_forward_drops_numbers_inside_and_scales_the_others():
    module = attnpack.FeedForward(64, 64, activation="relu", dropout=P)
    with torch.no_grad():
        module.up_proj.weight.copy_(torch.eye(64))
        module.down_proj.weight.copy_(torch.eye(64))
    x = torch.rand(40, 50, 64) + 0.1
    out = module(x)
    kept = out != 0
    torch.testing.assert_close(out[kept], (x / (1 - P))[kept])
    assert abs((~kept).float().mean().item() - P) < 0.01


@pytest.mark.parametrize("pre_norm", [True, False])
def test_a_block_drops_what_is_added_to_x(pre_norm):
    torch.manual_seed(0)
    block = attnpack.EncoderBlock(attention(), feed_forward(), pre_norm=pre_norm, dropout=P)
    with torch.no_grad():
        block.mlp.down_proj.weight.zero_()
    if not pre_norm:
        block.input_layernorm = block.post_attention_layernorm = nn.Identity()
    x = torch.randn(40, 50, E)
    added = block(x) - x
    block.eval()
    whole = block(x) - x
    kept = added.abs() > 1e-6
    torch.testing.assert_close(added[kept], (whole / (1 - P))[kept], rtol=1e-3, atol=1e-5)
    assert abs((~kept).float().mean().item() - P) < 0.01


@pytest.mark.parametrize("module", [attnpack, attnpack.cpp], ids=["python", "cpp"])
@pytest.mark.parametrize(
    "build",
    [
        lambda m, p: m.FeedForward(E, 32, dropout=p),
        lambda m, p: m.EncoderBlock(m.MultiHeadAttention(E, 4), m.FeedForward(E, 32), dropout=p),
        lambda m, p: m.DecoderBlock(m.MultiHeadAttention(E, 4), m.FeedForward(E, 32), dropout=p),
        lambda m, p: m.Encoder([m.EncoderBlock(m.MultiHeadAttention(E, 4), m.FeedForward(E, 32))], dropout=p),
        lambda m, p: m.CausalLM(32, E, 1, 4, dropout=p),
    ],
    ids=["feed_forward", "encoder_block", "decoder_block", "encoder", "causal_lm"],
)
def test_wrong_rates_are_refused(module, build):
    for wrong, words in ((1.0, "dropout: got 1, want 0 <= dropout < 1"), (-0.1, "dropout: got -0.1")):
        with pytest.raises(ValueError, match=words):
            build(module, wrong)
    with pytest.raises(TypeError, match="dropout is 'x'"):
        build(module, "x")


def test_wrong_rate_of_attention_is_refused_by_its_name():
    with pytest.raises(ValueError, match="attention_dropout: got 2"):
        attnpack.CausalLM(32, E, 1, 4, attention_dropout=2.0)


def test_nested_sequences_and_compiled_graphs_take_it():
    torch.manual_seed(0)
    module = MODULES["causal_lm"](P)
    ids = torch.nested.nested_tensor([torch.randint(32, (n,)) for n in (3, 5)], layout=torch.jagged)
    assert module(ids).size(2) == 32
    compiled = torch.compile(MODULES["encoder_block"](P), fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, E)
    assert not torch.equal(compiled(x), compiled(x))
