"""Constructors, caches and inputs of models that a user gets wrong: one sentence that names the argument as the caller
knows it, in both languages."""

import attnpack
import pytest
import torch
from test_wrong_calls import IDS, X, attention, both, complaint, decoder, decoder_block, encoder, model
from torch import nn

NAN = float("nan")
RATES = {"rope_type": "linear", "factor": 2.0}
CONSTRUCTIONS = {
    "scale is 'x' .*, wants a number, or None": (TypeError, lambda m: m.MultiHeadAttention(24, 4, scale="x")),
    "qk_norm is 'yes' .*, wants True or False": (TypeError, lambda m: m.MultiHeadAttention(24, 4, qk_norm="yes")),
    "sinks is 'yes' .*, wants True or False": (TypeError, lambda m: m.MultiHeadAttention(24, 4, sinks="yes")),
    "alibi is 'yes' .*, wants True or False": (TypeError, lambda m: m.MultiHeadAttention(24, 4, alibi="yes")),
    "scale: got nan, want a finite number": (ValueError, lambda m: m.ProjectedAttention(4, 4, 6, scale=NAN)),
    "scale: got inf, want a finite number": (ValueError, lambda m: m.MultiHeadAttention(24, 4, scale=float("inf"))),
    r"MultiHeadAttention\(\) got an unexpected keyword argument 'batch_first'$": (
        TypeError,
        lambda m: m.MultiHeadAttention(24, 4, batch_first=True),
    ),
    "head_map.*: use GroupedQueryAttention|head_map: got one, MultiHeadAttention has none; use GroupedQuery": (
        (TypeError, ValueError),
        lambda m: m.MultiHeadAttention(24, 4, head_map=[0] * 4),
    ),
    "head_map.*: use GroupedQueryAttention|head_map: got one, MultiQueryAttention has none; use GroupedQuery": (
        (TypeError, ValueError),
        lambda m: m.MultiQueryAttention(24, 4, head_map=[0] * 4),
    ),
    "head_map is 3 .*, wants a list of num_heads ints": (
        TypeError,
        lambda m: m.GroupedQueryAttention(24, 4, 2, head_map=3),
    ),
    "embed_dim: got -8, want at least 1": (ValueError, lambda m: m.MultiHeadAttention(-8, 2, head_dim=4)),
    "embed_dim: got 0, want at least 1": (ValueError, lambda m: m.MultiHeadAttention(0, 2, head_dim=4)),
    "embed_dim: got -3": (ValueError, lambda m: m.SelfAttention(-3, 4)),
    "kdim: got 0, want at least 1": (ValueError, lambda m: m.MultiHeadAttention(24, 4, kdim=0)),
    "vdim: got -1, want at least 1": (ValueError, lambda m: m.MultiHeadAttention(24, 4, vdim=-1)),
    "hidden_dim: got 0, want at least 1": (ValueError, lambda m: m.FeedForward(24, 0)),
    "dim: got 0, want at least 1": (ValueError, lambda m: m.RMSNorm(0)),
    "eps: got -1, want a small number": (ValueError, lambda m: m.RMSNorm(8, eps=-1)),
    "dim: got 0, want an even number": (ValueError, lambda m: m.RotaryEmbedding(0)),
    "max_positions: got 0, want at least 1": (ValueError, lambda m: m.RotaryEmbedding(4, max_positions=0)),
    "max_positions: got -1, want at least 1": (ValueError, lambda m: m.CausalLM(11, 24, 2, 4, max_positions=-1)),
    "window is 3 .*, wants two ints": (TypeError, lambda m: m.CausalLM(11, 24, 2, 4, window=3)),
    "embed_dim: got 0": (ValueError, lambda m: m.CausalLM(11, 0, 2, 4)),
    "scaling is 2.0 .*, wants None or a dict": (TypeError, lambda m: m.RotaryEmbedding(4, scaling=2.0)),
    "scaling: factor is '2' .*, wants a number": (
        TypeError,
        lambda m: m.RotaryEmbedding(4, scaling=RATES | {"factor": "2"}),
    ),
    "scaling: rope_type is 1 .*, wants a word": (TypeError, lambda m: m.RotaryEmbedding(4, scaling={"rope_type": 1})),
    "scaling: original_max_position_embeddings is 1.5": (
        TypeError,
        lambda m: m.RotaryEmbedding(4, scaling=RATES | {"original_max_position_embeddings": 1.5}),
    ),
    "dtype is 'float32' .*, wants a torch.dtype": (TypeError, lambda m: m.FeedForward(24, 32, dtype="float32")),
    "dtype is .*, wants a floating one": (ValueError, lambda m: m.MultiHeadAttention(24, 4, dtype=torch.int64)),
    "dtype is .*(int64|Long), wants a floating": (ValueError, lambda m: m.RMSNorm(8, dtype=torch.int64)),
    "layers is 3 .*, wants a list of EncoderBlocks": (TypeError, lambda m: m.Encoder(3)),
    r"layers\[1\]: got width 12, want 24 as the first block has": (ValueError, lambda m: uneven(m)),
    "embed_tokens: got width 12, want 24 as the blocks have": (
        ValueError,
        lambda m: m.Encoder([block(m)], embed_tokens=embedding(m, 11, 12)),
    ),
    "encoder is an? .*EncoderBlock.*, wants an .*Encoder": (
        TypeError,
        lambda m: m.EncoderDecoder(block(m), decoder(m)),
    ),
    "decoder is an? .*Encoder.*, wants an? .*Decoder": (TypeError, lambda m: m.EncoderDecoder(encoder(m), encoder(m))),
}


def embedding(m, vocab_size, width):
    return (nn.Embedding if m is attnpack else m.Embedding)(vocab_size, width)


def block(m):
    return m.EncoderBlock(attention(m), m.FeedForward(24, 32))


def uneven(m):
    narrow = m.DecoderBlock(m.MultiHeadAttention(12, 2), m.FeedForward(12, 32))
    return m.Decoder([decoder_block(m), narrow])


@both("message", CONSTRUCTIONS)
def test_constructors(message, m):
    kind, call = CONSTRUCTIONS[message]
    complaint(kind, message, call, m)


def test_attention_of_torch_is_no_part_of_a_block():
    feed_forward = attnpack.FeedForward(24, 32)
    with pytest.raises(TypeError, match="attention is a MultiheadAttention, wants an attention module"):
        attnpack.EncoderBlock(nn.MultiheadAttention(24, 4), feed_forward)


CACHES = {
    "max_len is 3.5 .*, wants an int": (TypeError, lambda m: m.StaticCache(1, 2, 3.5, 4)),
    "batch: got -1, want 0 or more": (ValueError, lambda m: m.StaticCache(-1, 2, 3, 4)),
    "max_len: got 0, want at least 1": (ValueError, lambda m: m.StaticCache(1, 2, 0, 4)),
    "v_head_dim: got -1, want": (ValueError, lambda m: m.StaticCache(1, 2, 3, 4, v_head_dim=-1)),
    "dtype is .*, wants a floating one": (ValueError, lambda m: m.StaticCache(1, 2, 3, 4, dtype=torch.int64)),
    "(layers|num_layers) is 2.0 .*, wants": (TypeError, lambda m: m.ModelCache(2.0)),
    r"(layers\[0\] is 1|num_layers is \[1, 2\]) .*, wants": (TypeError, lambda m: m.ModelCache([1, 2])),
    r"layers\[1\]: got the cache of an earlier layer": (ValueError, lambda m: m.ModelCache([m.DynamicCache()] * 2)),
    "n is 1.5 .*, wants an int": (TypeError, lambda m: m.DynamicCache().crop(1.5)),
    "n is None .*, wants an int": (TypeError, lambda m: m.StaticCache(1, 2, 3, 4).crop(None)),
    "n is 'a' .*, wants an int": (TypeError, lambda m: m.ModelCache(2).crop("a")),
}


@both("message", CACHES)
def test_caches(message, m):
    kind, call = CACHES[message]
    complaint(kind, message, call, m)


def stacks(m):
    return m.EncoderDecoder(encoder(m), decoder(m, cross_attention=attention(m)))


def embedding_stacks(m):
    """ids of 0 to 10 for the source, 0 to 6 for the target."""
    blocks = decoder_block(m, cross_attention=attention(m))
    return m.EncoderDecoder(
        m.Encoder([block(m)], embed_tokens=embedding(m, 11, 24)), m.Decoder([blocks], embed_tokens=embedding(m, 7, 24))
    )


NINE = torch.tensor([1, 9])
INPUTS = {
    r"lengths\[1\] is 9, wants 0 to 3": lambda m: model(m).forward(IDS, lengths=NINE),
    r"source_lens\[1\] is 9, wants 0 to 5": lambda m: stacks(m).forward(X, X, source_lens=NINE),
    r"target_lens\[1\] is 9, wants 0 to 5": lambda m: stacks(m).forward(X, X, target_lens=NINE),
    r"context_lens\[1\] is 9, wants 0 to 5": lambda m: decoder_block(m, cross_attention=attention(m)).forward(
        X, X, context_lens=NINE
    ),
    "source holds 11, wants 0 to 10": lambda m: embedding_stacks(m).forward(IDS + 8, IDS),
    "target holds 7, wants 0 to 6": lambda m: embedding_stacks(m).forward(IDS, IDS + 4),
    r"source: got shape \[3\], want token numbers": lambda m: embedding_stacks(m).forward(IDS[0], IDS),
    r"source: got shape \[2, 5, 3\], want \[batch, length, 24\]": lambda m: stacks(m).forward(X[..., :3], X),
    r"target: got shape \[2, 5, 3\], want \[batch, length, 24\]": lambda m: stacks(m).forward(X, X[..., :3]),
    r"x: got shape \[2, 5, 3\], want \[batch, length, 24\]$": lambda m: block(m).forward(X[..., :3]),
    r"x: got shape \[2, 5, 4\], want \[batch, length, 24\]$": lambda m: decoder_block(m).forward(X[..., :4]),
    r"x: got shape \[2, 7\], want \[\.\.\., 24\]": lambda m: m.FeedForward(24, 32).forward(torch.ones(2, 7)),
    r"x: got dtype .*, want the module's dtype": lambda m: m.FeedForward(24, 32).forward(X.double()),
    r"x: got dtype .*, want the module's dtype .*": lambda m: m.EncoderBlock(
        attention(m), m.FeedForward(24, 32), norm="layer"
    ).forward(X.double()),
    r"x: got shape \[2, 7\], want \[\.\.\., 8\]": lambda m: m.RMSNorm(8).forward(torch.ones(2, 7)),
    r"x: got .* of shape \[2, 3\], want states .*give the stack embed_tokens": lambda m: encoder(m).forward(IDS),
}


@both("message", INPUTS)
def test_inputs(message, m):
    complaint(ValueError, message, INPUTS[message], m)


@both("call", [lambda m: block(m).forward(None), lambda m: m.FeedForward(24, 32).forward(None)])
def test_none_for_x(call, m):
    complaint(TypeError, "x is None .*, wants a tensor", call, m)


def test_a_wrong_context_length_leaves_the_cache_alone():
    for m in (attnpack, attnpack.cpp):
        cache = m.DynamicCache()
        with pytest.raises(ValueError, match="context_lens"):
            decoder_block(m, cross_attention=attention(m)).forward(X, X, cache=cache, context_lens=NINE)
        assert len(cache) == 0


@both("number", [3, "tell me"])
def test_a_callback_that_cannot_be_called(number, m):
    complaint(
        TypeError,
        "callback is .*, wants a function of each step's tokens",
        lambda m: model(m).generate(IDS, max_new_tokens=2, callback=number),
        m,
    )


def test_states_of_two_dtypes_do_not_merge():
    out, lse = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3)
    with pytest.raises(ValueError, match="merge_states: out_b is Double with lse_b Double, wants Float and Float"):
        attnpack.merge_states(out, lse, out.double(), lse.double())
