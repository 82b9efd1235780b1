"""Modules that are made wrongly: one sentence with the argument's name and the fix, in both languages alike."""

import attnpack
import pytest
import torch
from errors import (
    attention,
    both,
    complaint,
    decoder,
    decoder_block,
    embedding,
    encoder,
    encoder_block,
    in_both_languages,
)
from latent_cases import HEADS, SIZES, E
from torch import nn

NAN = float("nan")
LINEAR = {"rope_type": "linear", "factor": 2.0}
ATTENTION = {
    "embed_dim: got -8, want at least 1": (ValueError, lambda m: m.MultiHeadAttention(-8, 2, head_dim=4)),
    "embed_dim: got 0, want at least 1": (ValueError, lambda m: m.MultiHeadAttention(0, 2, head_dim=4)),
    "embed_dim: got -3": (ValueError, lambda m: m.SelfAttention(-3, 4)),
    r"embed_dim is '24' \(str\).*wants an int": (TypeError, lambda m: m.MultiHeadAttention("24", 4)),
    "num_heads: got 0": (ValueError, lambda m: m.MultiHeadAttention(24, 0)),
    "num_heads: got 5, which does not divide embed_dim 24": (ValueError, lambda m: m.MultiHeadAttention(24, 5)),
    "num_kv_heads: got 3, which does not divide num_heads 4": (
        ValueError,
        lambda m: m.GroupedQueryAttention(24, 4, 3),
    ),
    "head_dim: got 0": (ValueError, lambda m: m.MultiHeadAttention(24, 4, head_dim=0)),
    "kdim: got 0, want at least 1": (ValueError, lambda m: m.MultiHeadAttention(24, 4, kdim=0)),
    "vdim: got -1, want at least 1": (ValueError, lambda m: m.MultiHeadAttention(24, 4, vdim=-1)),
    "num_k_heads: got 3, which does not divide num_v_heads 4": (
        ValueError,
        lambda m: m.GatedDeltaNet(24, 3, 4, head_k_dim=4, head_v_dim=4),
    ),
    "head_v_dim: got 0, want at least 1": (
        ValueError,
        lambda m: m.GatedDeltaNet(24, 2, 4, head_k_dim=4, head_v_dim=0),
    ),
    "conv_kernel_size: got 0, want at least 1": (
        ValueError,
        lambda m: m.KimiDeltaAttention(24, 2, head_dim=4, conv_kernel_size=0),
    ),
    "norm_eps: got -1, want a small number": (
        ValueError,
        lambda m: m.KimiDeltaAttention(24, 2, head_dim=4, norm_eps=-1.0),
    ),
    "num_groups: got 3, which does not divide num_heads 4": (
        ValueError,
        lambda m: m.Mamba2(24, 4, head_dim=6, state_dim=4, num_groups=3),
    ),
    "state_dim: got 0, want at least 1": (ValueError, lambda m: m.Mamba2(24, 4, head_dim=6, state_dim=0)),
    "feature_map: got 'relu', want 'identity' or 'elu'": (
        ValueError,
        lambda m: m.LinearAttention(24, 4, feature_map="relu"),
    ),
    "decay: got 'slow', want 'none', 'fixed' or 'learned'": (
        ValueError,
        lambda m: m.LinearAttention(24, 4, decay="slow"),
    ),
    "head_map: got 3 entries": (ValueError, lambda m: m.GroupedQueryAttention(24, 4, 2, head_map=[0, 1, 1])),
    "head_map: got kv head 2, want 0 to 1": (
        ValueError,
        lambda m: m.GroupedQueryAttention(24, 4, 2, head_map=[0, 1, 2, 1]),
    ),
    "head_map is 3 .*, wants a list of num_heads ints": (
        TypeError,
        lambda m: m.GroupedQueryAttention(24, 4, 2, head_map=3),
    ),
    "head_map.*: use GroupedQueryAttention|head_map: got one, MultiHeadAttention has none; use GroupedQuery": (
        (TypeError, ValueError),
        lambda m: m.MultiHeadAttention(24, 4, head_map=[0] * 4),
    ),
    "head_map.*: use GroupedQueryAttention|head_map: got one, MultiQueryAttention has none; use GroupedQuery": (
        (TypeError, ValueError),
        lambda m: m.MultiQueryAttention(24, 4, head_map=[0] * 4),
    ),
    "rope: got dim 8, want at most head_dim 6": (
        ValueError,
        lambda m: m.MultiHeadAttention(24, 4, rope=m.RotaryEmbedding(8)),
    ),
    r"rope is 'yes' \(str\).*RotaryEmbedding.*None": (TypeError, lambda m: m.MultiHeadAttention(24, 4, rope="yes")),
    r"rope is 5 \(int\).*RotaryEmbedding.*None": (TypeError, lambda m: m.ProjectedAttention(4, 4, 6, rope=5)),
    r"window is \(-2, 0\), wants numbers >= 0": (ValueError, lambda m: m.MultiHeadAttention(24, 4, window=(-2, 0))),
    "softcap is -30, wants a finite number > 0": (ValueError, lambda m: m.MultiQueryAttention(24, 4, softcap=-30.0)),
    "dropout: got 1, want 0 <= dropout < 1": (ValueError, lambda m: m.ProjectedAttention(4, 2, 6, dropout=1.0)),
    "scale is 'x' .*, wants a number, or None": (TypeError, lambda m: m.MultiHeadAttention(24, 4, scale="x")),
    "chunk is 4611686018427387904, wants how many": (ValueError, lambda m: m.MultiHeadAttention(24, 4, chunk=2**62)),
    "scale is nan, wants a finite number": (ValueError, lambda m: m.ProjectedAttention(4, 4, 6, scale=NAN)),
    "scale is inf, wants a finite number": (ValueError, lambda m: m.MultiHeadAttention(24, 4, scale=float("inf"))),
    "qk_norm is 'yes' .*, wants True or False": (TypeError, lambda m: m.MultiHeadAttention(24, 4, qk_norm="yes")),
    "sinks is 'yes' .*, wants True or False": (TypeError, lambda m: m.MultiHeadAttention(24, 4, sinks="yes")),
    "alibi is 'yes' .*, wants True or False": (TypeError, lambda m: m.MultiHeadAttention(24, 4, alibi="yes")),
    "dtype is .*, wants a floating one": (ValueError, lambda m: m.MultiHeadAttention(24, 4, dtype=torch.int64)),
    r"MultiHeadAttention\(\) got an unexpected keyword argument 'batch_first'$": (
        TypeError,
        lambda m: m.MultiHeadAttention(24, 4, batch_first=True),
    ),
}
PARTS = {
    "dim: got 5, want an even number": (ValueError, lambda m: m.RotaryEmbedding(5)),
    "dim: got 0, want an even number": (ValueError, lambda m: m.RotaryEmbedding(0)),
    f"dim: got {2**62}, want an even number .* at most 1048576": (ValueError, lambda m: m.RotaryEmbedding(2**62)),
    "max_positions: got 0, want at least 1": (ValueError, lambda m: m.RotaryEmbedding(4, max_positions=0)),
    "scaling: got rope_type 'su', want 'default', 'linear', 'ntk'": (
        ValueError,
        lambda m: m.RotaryEmbedding(8, scaling={"rope_type": "su", "factor": 2.0}),
    ),
    "'linear' needs 'factor'": (ValueError, lambda m: m.RotaryEmbedding(8, scaling={"type": "linear"})),
    "scaling is 2.0 .*, wants None or a dict": (TypeError, lambda m: m.RotaryEmbedding(4, scaling=2.0)),
    "scaling: factor is '2' .*, wants a number": (
        TypeError,
        lambda m: m.RotaryEmbedding(4, scaling=LINEAR | {"factor": "2"}),
    ),
    "scaling: rope_type is 1 .*, wants a word": (TypeError, lambda m: m.RotaryEmbedding(4, scaling={"rope_type": 1})),
    "scaling: original_max_position_embeddings is 1.5": (
        TypeError,
        lambda m: m.RotaryEmbedding(4, scaling=LINEAR | {"original_max_position_embeddings": 1.5}),
    ),
    "activation: got 'tanh'": (ValueError, lambda m: m.FeedForward(24, 32, activation="tanh")),
    "hidden_dim: got 0, want at least 1": (ValueError, lambda m: m.FeedForward(24, 0)),
    "dtype is 'float32' .*, wants a torch.dtype": (TypeError, lambda m: m.FeedForward(24, 32, dtype="float32")),
    "dim: got 0, want at least 1": (ValueError, lambda m: m.RMSNorm(0)),
    "eps: got -1, want a small number": (ValueError, lambda m: m.RMSNorm(8, eps=-1)),
    "dtype is .*(int64|Long), wants a floating": (ValueError, lambda m: m.RMSNorm(8, dtype=torch.int64)),
}
BLOCKS = {
    "attention is 'a'.*wants an attention module": (TypeError, lambda m: m.DecoderBlock("a", "b")),
    "attention is an? .*FeedForward, wants an attention module": (
        TypeError,
        lambda m: m.EncoderBlock(m.FeedForward(24, 32), m.FeedForward(24, 32)),
    ),
    "attention: gives width 1.*want its embed_dim 24; .*leave head_dim out": (
        ValueError,
        lambda m: m.DecoderBlock(m.SelfAttention(24, 1), m.FeedForward(24, 32)),
    ),
    "feed_forward is 'b'.*FeedForward": (TypeError, lambda m: m.EncoderBlock(attention(m), "b")),
    "feed_forward is an? .*GroupedQueryAttention.*FeedForward": (
        TypeError,
        lambda m: m.EncoderBlock(attention(m), attention(m)),
    ),
    "feed_forward: got width 20.*want 24 as attention has; .* of one embed_dim": (
        ValueError,
        lambda m: m.EncoderBlock(attention(m), m.FeedForward(20, 32)),
    ),
    "cross_attention is 'c'.*attention module": (TypeError, lambda m: decoder_block(m, cross_attention="c")),
    "cross_attention: got width 20.*want 24 as attention has": (
        ValueError,
        lambda m: decoder_block(m, cross_attention=m.MultiHeadAttention(20, 4)),
    ),
    "cross_attention: got width 1.*want 24 as attention has": (
        ValueError,
        lambda m: decoder_block(m, cross_attention=m.SelfAttention(24, 1)),
    ),
    "norm: got 'batch', want 'rms', 'rms_plus_one', 'layer' or 'layer_no_bias'": (
        ValueError,
        lambda m: m.EncoderBlock(m.MultiHeadAttention(24, 4), m.FeedForward(24, 32), norm="batch"),
    ),
}
STACKS = {
    "layers: got none": (ValueError, lambda m: m.Encoder([])),
    "layers is 3 .*, wants a list of EncoderBlocks": (TypeError, lambda m: m.Encoder(3)),
    r"layers(\[0\])? is .*'a'.*wants an? .*EncoderBlock": (TypeError, lambda m: m.Encoder(["a"])),
    r"layers(\[0\])? is an? (EncoderBlock|list).*wants a .*DecoderBlock": (
        TypeError,
        lambda m: m.Decoder([encoder_block(m)]),
    ),
    r"layers\[1\]: got width 12, want 24 as the first block has": (ValueError, lambda m: uneven(m)),
    "embed_tokens: got width 12, want 24 as the blocks have": (
        ValueError,
        lambda m: m.Encoder([encoder_block(m)], embed_tokens=embedding(m, 11, 12)),
    ),
    "encoder is an? .*EncoderBlock.*, wants an .*Encoder": (
        TypeError,
        lambda m: m.EncoderDecoder(encoder_block(m), decoder(m)),
    ),
    "decoder is an? .*Encoder.*, wants an? .*Decoder": (TypeError, lambda m: m.EncoderDecoder(encoder(m), encoder(m))),
    "num_layers: got 0": (ValueError, lambda m: m.CausalLM(10, 24, 0, 4)),
    "embed_dim: got 0": (ValueError, lambda m: m.CausalLM(11, 0, 2, 4)),
    "max_positions: got -1, want at least 1": (ValueError, lambda m: m.CausalLM(11, 24, 2, 4, max_positions=-1)),
    "window is 3 .*, wants two ints": (TypeError, lambda m: m.CausalLM(11, 24, 2, 4, window=3)),
    "scores: got 'soft', want softcap, sinks": (ValueError, lambda m: m.CausalLM(11, 24, 2, 4, scores={"soft": 3.0})),
    "scores is 3 .*, wants None or a dict": (TypeError, lambda m: m.CausalLM(11, 24, 2, 4, scores=3)),
    "scores: got one together with latent": (
        ValueError,
        lambda m: m.CausalLM(11, 24, 2, 4, latent=SIZES, scores={"softcap": 3.0}),
    ),
    "position_embedding: got 'sine'": (ValueError, lambda m: m.CausalLM(11, 24, 2, 4, position_embedding="sine")),
    "final_softcap: got -1": (ValueError, lambda m: m.CausalLM(11, 24, 2, 4, final_softcap=-1.0)),
    "embed_scale: got inf": (ValueError, lambda m: m.CausalLM(11, 24, 2, 4, embed_scale=float("inf"))),
    "layer_settings: got 1 of them, want one for each of 2": (
        ValueError,
        lambda m: m.CausalLM(11, 24, 2, 4, layer_settings=[{}]),
    ),
    r"layer_settings\[1\]: got 'base', want window": (
        ValueError,
        lambda m: m.CausalLM(11, 24, 2, 4, layer_settings=[{}, {"base": 3.0}]),
    ),
    "layer_settings is 3 .*, wants None or a list": (TypeError, lambda m: m.CausalLM(11, 24, 2, 4, layer_settings=3)),
    "experts: got 'width', want keywords of MixtureOfExperts": (
        ValueError,
        lambda m: m.CausalLM(11, 24, 2, 4, experts={"width": 3}),
    ),
    "hidden_dim: got 0, want at least 1": (
        ValueError,
        lambda m: m.CausalLM(11, 24, 2, 4, experts={"num_experts": 3, "top_k": 1}),
    ),
    "top_k: got 5, want 1 to 4": (ValueError, lambda m: m.MixtureOfExperts(24, 8, 4, 5)),
    "num_groups: got 3, want a number that divides": (
        ValueError,
        lambda m: m.MixtureOfExperts(24, 8, 4, 1, num_groups=3),
    ),
    "top_groups: got 3, want 1 to num_groups 2": (
        ValueError,
        lambda m: m.MixtureOfExperts(24, 8, 4, 1, num_groups=2, top_groups=3),
    ),
    "num_groups: got 4 for 4 experts, want at least two": (
        ValueError,
        lambda m: m.MixtureOfExperts(24, 8, 4, 1, scores="sigmoid", num_groups=4, top_groups=2),
    ),
    "scores: got 'max', want 'softmax' or 'sigmoid'": (
        ValueError,
        lambda m: m.MixtureOfExperts(24, 8, 4, 1, scores="max"),
    ),
    "scaling: got nan": (ValueError, lambda m: m.MixtureOfExperts(24, 8, 4, 1, scaling=float("nan"))),
    "qk_norm: got 'heads', want all_heads, plus_one, eps, after_rope, weights and values": (
        ValueError,
        lambda m: m.GroupedQueryAttention(24, 4, 2, qk_norm={"heads": True}),
    ),
    "layout: got 'serial', want 'sandwich'": (ValueError, lambda m: m.CausalLM(11, 24, 2, 4, layout="serial")),
}


def uneven(m):
    narrow = m.DecoderBlock(m.MultiHeadAttention(12, 2), m.FeedForward(12, 32))
    return m.Decoder([decoder_block(m), narrow])


@both("message", ATTENTION)
def test_attention(message, m):
    kind, make = ATTENTION[message]
    complaint(kind, message, make, m)


@both("message", PARTS)
def test_rope_feed_forward_and_norm(message, m):
    kind, make = PARTS[message]
    complaint(kind, message, make, m)


@both("message", BLOCKS)
def test_blocks(message, m):
    kind, make = BLOCKS[message]
    complaint(kind, message, make, m)


@both("message", STACKS)
def test_stacks_and_language_models(message, m):
    kind, make = STACKS[message]
    complaint(kind, message, make, m)


@in_both_languages
def test_a_required_argument_is_missing(m):
    for make in (
        lambda: m.GroupedQueryAttention(24, 4),
        lambda: m.MultiHeadAttention(24),
        lambda: m.MultiHeadAttention(24, 4, 2),
        lambda: m.MultiHeadLatentAttention(E, HEADS, **{k: v for k, v in SIZES.items() if k != "v_head_dim"}),
    ):
        with pytest.raises(TypeError):
            make()


def test_attention_of_torch_is_no_part_of_a_block():
    feed_forward = attnpack.FeedForward(24, 32)
    with pytest.raises(TypeError, match="attention is a MultiheadAttention, wants an attention module"):
        attnpack.EncoderBlock(nn.MultiheadAttention(24, 4), feed_forward)


def test_a_part_of_the_other_language():
    with pytest.raises(TypeError, match=r"rope is .*RotaryEmbedding.* wants .* of attnpack.cpp.*\.cpp\(\) of a Python"):
        attnpack.cpp.MultiHeadAttention(24, 4, rope=attnpack.RotaryEmbedding(6))
    with pytest.raises(TypeError, match=r"attention is a .*, wants .*: one of attnpack.cpp, which \.cpp\(\)"):
        attnpack.cpp.EncoderBlock(attention(attnpack), attnpack.cpp.FeedForward(24, 32))


# ---- latent attention --------------------------------------------------------------------

LATENT = {
    "kv_lora_rank: got 0, want at least 1": {"kv_lora_rank": 0},
    "q_lora_rank: got -1, want at least 1": {"q_lora_rank": -1},
    "qk_nope_head_dim: got 0, want at least 1": {"qk_nope_head_dim": 0},
    "qk_rope_head_dim: got -2, want 0 or more": {"qk_rope_head_dim": -2},
    "v_head_dim: got 0, want at least 1": {"v_head_dim": 0},
    "dropout: got 1, want 0 <= dropout < 1": {"dropout": 1.0},
    "path: got 'fast', want 'auto', 'expanded' or 'absorbed'": {"path": "fast"},
    "scale is nan": {"scale": NAN},
}


@both("message", LATENT)
def test_latent_attention(message, m):
    settings = SIZES | LATENT[message]
    complaint(ValueError, f"^attnpack: {message}", lambda: m.MultiHeadLatentAttention(E, HEADS, **settings))


@in_both_languages
def test_rope_of_latent_attention_wider_than_its_rotated_dims(m):
    message = "rope: got dim 10, want at most qk_rope_head_dim 8"
    complaint(ValueError, message, lambda: m.MultiHeadLatentAttention(E, HEADS, **SIZES, rope=m.RotaryEmbedding(10)))


@in_both_languages
def test_language_models_of_latent_attention(m):
    def make(latent, **settings):
        return m.CausalLM(60, E, 2, HEADS, latent=latent, **settings)

    given = SIZES | {"q_lora_rank": 20}
    for name, value in (
        ("head_dim", 8),
        ("qk_norm", True),
        ("window", (3, 0)),
        ("num_kv_heads", 2),
        ("out_bias", True),
    ):
        complaint(ValueError, f"{name}: got one together with latent", make, given, **{name: value})
    complaint(ValueError, "latent: got 'rank', want keywords of MultiHeadLatentAttention", make, {"rank": 3})
    without = {k: v for k, v in given.items() if k != "v_head_dim"}
    complaint(ValueError, "v_head_dim: got none, MultiHeadLatentAttention needs it", make, without)
    complaint(TypeError, "latent is 3 .*, wants None or a dict such as", make, 3)
    complaint(TypeError, "latent: v_head_dim is 2.5 .*, wants an int", make, given | {"v_head_dim": 2.5})
