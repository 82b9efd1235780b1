"""Wrong inputs of blocks and stacks, and of the norms and feed-forward networks in them: one sentence with the
argument's name and the fix, in both languages alike."""

import torch
from errors import (
    A_TENSOR,
    IDS,
    NINE,
    X,
    both,
    complains_of_keywords,
    complaint,
    cross_block,
    decoder,
    decoder_block,
    embedding,
    encoder,
    encoder_block,
    in_both_languages,
)


def cross_stacks(m):
    return m.EncoderDecoder(encoder(m), m.Decoder([cross_block(m)]))


def embedding_stacks(m):
    """ids of 0 to 10 for the source, 0 to 6 for the target."""
    return m.EncoderDecoder(
        m.Encoder([encoder_block(m)], embed_tokens=embedding(m, 11, 24)),
        m.Decoder([cross_block(m)], embed_tokens=embedding(m, 7, 24)),
    )


DECODERS = {
    "block": (lambda m, **k: decoder_block(m).forward(X, **k), r"DynamicCache\(\) or StaticCache"),
    "stack": (lambda m, **k: decoder(m).forward(X, **k), r"ModelCache\(num_layers\)"),
    "both stacks": (
        lambda m, **k: m.EncoderDecoder(encoder(m), decoder(m)).forward(X, X, **k),
        r"ModelCache\(num_layers\)",
    ),
}
ENCODERS = {
    "block": lambda m, **k: encoder_block(m).forward(X, **k),
    "stack": lambda m, **k: encoder(m).forward(X, **k),
}


@both("where", DECODERS)
def test_other_names_of_the_cache(where, m):
    call, cache = DECODERS[where]
    complains_of_keywords(call, m, cache)


@both("where", ENCODERS)
def test_an_encoder_keeps_no_cache(where, m):
    message = "unexpected keyword argument 'kv_cache': it keeps no cache, leave it out"
    complaint(TypeError, message, ENCODERS[where], m, kv_cache=None)
    complaint(TypeError, "'attn_mask': use mask=", ENCODERS[where], m, attn_mask=None)


LISTS = {
    r"context_lens is \[3, 4\] \(list\), wants an int": lambda m: cross_block(m).forward(X, X, context_lens=[3, 4]),
    r"source_lens is \[3, 4\] \(list\), wants an int": lambda m: cross_stacks(m).forward(X, X, source_lens=[3, 4]),
}


@both("message", LISTS)
def test_a_list_where_a_tensor_is_wanted(message, m):
    complaint(TypeError, message + A_TENSOR, LISTS[message], m)


@both("call", [lambda m: encoder_block(m).forward(None), lambda m: m.FeedForward(24, 32).forward(None)])
def test_none_for_x(call, m):
    complaint(TypeError, "x is None .*, wants a tensor", call, m)


VALUES = {
    r"x: got shape \[2, 5, 3\], want \[batch, length, 24\]$": lambda m: encoder_block(m).forward(X[..., :3]),
    r"x: got shape \[2, 5, 4\], want \[batch, length, 24\]$": lambda m: decoder_block(m).forward(X[..., :4]),
    r"x: got dtype .*, want the module's dtype .*": lambda m: encoder_block(m, norm="layer").forward(X.double()),
    r"x: got .* of shape \[2, 3\], want states .*give the stack embed_tokens": lambda m: encoder(m).forward(IDS),
    r"context_lens has dtype .*, wants int32": lambda m: cross_block(m).forward(
        X, X, context_lens=torch.tensor([1.0, 2.0])
    ),
    r"context_lens\[1\] is 9, wants 0 to 5": lambda m: cross_block(m).forward(X, X, context_lens=NINE),
    r"source_lens\[1\] is 9, wants 0 to 5": lambda m: cross_stacks(m).forward(X, X, source_lens=NINE),
    r"target_lens\[1\] is 9, wants 0 to 5": lambda m: cross_stacks(m).forward(X, X, target_lens=NINE),
    r"target_lens has shape \[3\], wants \[batch\]": lambda m: m.EncoderDecoder(encoder(m), decoder(m)).forward(
        X, X, target_lens=IDS[0]
    ),
    "source holds 11, wants 0 to 10": lambda m: embedding_stacks(m).forward(IDS + 8, IDS),
    "target holds 7, wants 0 to 6": lambda m: embedding_stacks(m).forward(IDS, IDS + 4),
    r"source: got shape \[3\], want token numbers": lambda m: embedding_stacks(m).forward(IDS[0], IDS),
    r"source: got shape \[2, 5, 3\], want \[batch, length, 24\]": lambda m: cross_stacks(m).forward(X[..., :3], X),
    r"target: got shape \[2, 5, 3\], want \[batch, length, 24\]": lambda m: cross_stacks(m).forward(X, X[..., :3]),
    r"x: got shape \[2, 7\], want \[\.\.\., 24\]": lambda m: m.FeedForward(24, 32).forward(torch.ones(2, 7)),
    r"x: got dtype .*, want the module's dtype": lambda m: m.FeedForward(24, 32).forward(X.double()),
    r"x: got shape \[2, 7\], want \[\.\.\., 8\]": lambda m: m.RMSNorm(8).forward(torch.ones(2, 7)),
}


@both("message", VALUES)
def test_a_tensor_that_does_not_fit(message, m):
    complaint(ValueError, message, VALUES[message], m)


@in_both_languages
def test_a_wrong_context_length_leaves_the_cache_alone(m):
    cache = m.DynamicCache()
    complaint(ValueError, "context_lens", lambda: cross_block(m).forward(X, X, cache=cache, context_lens=NINE))
    assert len(cache) == 0
