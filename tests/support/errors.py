"""Small inputs and modules for wrong calls, and the form of every error.

The functions that make modules take `m`: attnpack, or attnpack.cpp for the same in C++.
"""

import attnpack
import pytest
import torch
from torch import nn

X = torch.randn(2, 5, 24)
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
NINE = torch.tensor([1, 9])  # lengths; the second is too long
A_TENSOR = r".*torch\.tensor\(\) makes one"  # the fix for a list


def attention(m):
    return m.GroupedQueryAttention(24, 4, 2)


def encoder_block(m, **settings):
    return m.EncoderBlock(attention(m), m.FeedForward(24, 32), **settings)


def decoder_block(m, **settings):
    return m.DecoderBlock(attention(m), m.FeedForward(24, 32), **settings)


def cross_block(m):
    return decoder_block(m, cross_attention=attention(m))


def embedding(m, vocab_size, width):
    return (nn.Embedding if m is attnpack else m.Embedding)(vocab_size, width)


def encoder(m):
    return m.Encoder([encoder_block(m)])


def decoder(m):
    return m.Decoder([decoder_block(m)])


def model(m):
    return m.CausalLM(11, 24, 2, 4)


in_both_languages = pytest.mark.parametrize("m", [attnpack, attnpack.cpp], ids=["python", "cpp"])


def both(*arguments):
    """The test for attnpack's module and for attnpack.cpp's, with each of these values."""
    return lambda test: in_both_languages(pytest.mark.parametrize(*arguments)(test))


def complaint(kind, message, call, *arguments, **keywords):
    """The call raises one sentence of ours that the pattern `message` fits."""
    with pytest.raises(kind, match=message) as error:
        call(*arguments, **keywords)
    text = str(error.value)
    assert text.startswith("attnpack: ") and "\n" not in text and "incompatible" not in text


def complains_of_keywords(call, m, cache):
    """Other libraries' names of the cache are explained, with `cache`, a pattern; other keywords are refused."""
    for name in ("kv_cache", "past_key_values"):
        message = f"unexpected keyword argument '{name}': use cache= with .*{cache}"
        complaint(TypeError, message, call, m, **{name: None})
    complaint(TypeError, "unexpected keyword argument 'masks'$", call, m, masks=None)
