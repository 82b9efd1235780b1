"""Calls that a user gets wrong: other libraries' keywords, lists for tensors, numbers out of range, parts that do not
fit. Each raises one sentence with the argument's name and the fix, in both languages alike."""

import attnpack
import pytest
import torch
from processes import run_python

X = torch.randn(2, 5, 24)
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def attention(m):
    return m.GroupedQueryAttention(24, 4, 2)


def encoder(m):
    return m.Encoder([m.EncoderBlock(attention(m), m.FeedForward(24, 32))])


def decoder_block(m, **settings):
    return m.DecoderBlock(attention(m), m.FeedForward(24, 32), **settings)


def decoder(m, **settings):
    return m.Decoder([decoder_block(m, **settings)])


def model(m):
    return m.CausalLM(11, 24, 2, 4)


def generate(m, ids=IDS, **settings):
    return model(m).generate(ids, **{"max_new_tokens": 2} | settings)


def both(*arguments):
    """The test for attnpack's module and for attnpack.cpp's."""
    return lambda test: pytest.mark.parametrize("m", [attnpack, attnpack.cpp], ids=["python", "cpp"])(
        pytest.mark.parametrize(*arguments)(test)
    )


def complaint(kind, message, call, *arguments):
    with pytest.raises(kind, match=message) as error:
        call(*arguments)
    text = str(error.value)
    assert text.startswith("attnpack: ") and "\n" not in text and "incompatible" not in text


KEYWORDS = {
    "attention": (lambda m, **k: attention(m).forward(X, **k), r"DynamicCache\(\) or StaticCache"),
    "projected": (
        lambda m, **k: m.ProjectedAttention(4, 4, 6).forward(X, X, X, **k),
        r"DynamicCache\(\) or StaticCache",
    ),
    "decoder block": (lambda m, **k: decoder_block(m).forward(X, **k), r"DynamicCache\(\) or StaticCache"),
    "decoder": (lambda m, **k: decoder(m).forward(X, **k), r"ModelCache\(num_layers\)"),
    "both stacks": (
        lambda m, **k: m.EncoderDecoder(encoder(m), decoder(m)).forward(X, X, **k),
        r"ModelCache\(num_layers\)",
    ),
    "model": (lambda m, **k: model(m).forward(IDS, **k), r"ModelCache\(num_layers\)"),
    "generate": (generate, r"ModelCache\(num_layers\)"),
}
ENCODERS = {
    "block": lambda m, **k: m.EncoderBlock(attention(m), m.FeedForward(24, 32)).forward(X, **k),
    "stack": lambda m, **k: encoder(m).forward(X, **k),
}


@both("where", KEYWORDS)
def test_other_names_of_the_cache(where, m):
    call, cache = KEYWORDS[where]
    for name in ("kv_cache", "past_key_values"):
        complaint(
            TypeError, f"unexpected keyword argument '{name}': use cache= with .*{cache}", call_with, call, m, name
        )
    complaint(TypeError, "unexpected keyword argument 'masks'$", call_with, call, m, "masks")


@both("where", ENCODERS)
def test_an_encoder_keeps_no_cache(where, m):
    message = "unexpected keyword argument 'kv_cache': it keeps no cache, leave it out"
    complaint(TypeError, message, call_with, ENCODERS[where], m, "kv_cache")
    complaint(TypeError, "'attn_mask': use mask=", call_with, ENCODERS[where], m, "attn_mask")


def call_with(call, m, name):
    call(m, **{name: None})


MAKE = r".*torch\.tensor\(\) makes one"
LISTS = {
    r"x is \[\[1.0\]\] \(list\), wants a tensor": lambda m: attention(m).forward([[1.0]]),
    r"mask is \[True\] \(list\), wants a bool or float tensor": lambda m: attention(m).forward(X, mask=[True]),
    r"kv_lens is \[3, 4\] \(list\), wants an int32 or int64 tensor \[batch\]": lambda m: attention(m).forward(
        X, kv_lens=[3, 4]
    ),
    r"positions is \[0\] \(list\), wants an int64 tensor \[length\]": lambda m: attention(m).forward(X, positions=[0]),
    r"context_lens is \[3, 4\] \(list\), wants an int": lambda m: decoder_block(
        m, cross_attention=attention(m)
    ).forward(X, X, context_lens=[3, 4]),
    r"source_lens is \[3, 4\] \(list\), wants an int": lambda m: m.EncoderDecoder(
        encoder(m), decoder(m, cross_attention=attention(m))
    ).forward(X, X, source_lens=[3, 4]),
    r"ids is \[\[1, 2\]\] \(list\), wants an int64 tensor \[batch, length\]": lambda m: model(m).forward([[1, 2]]),
    r"ids is \[\[1, 2\]\] \(list\), wants an int64 tensor": lambda m: generate(m, [[1, 2]]),
    r"lengths is \[1, 2\] \(list\), wants an int32 or": lambda m: model(m).forward(IDS, lengths=[1, 2]),
    r"lengths is \[0, 5\] \(list\), wants an int32 or int64 tensor": lambda m: generate(m, lengths=[0, 5]),
    r"positions is \[0, 1, 2\] \(list\), wants an int64": lambda m: model(m).forward(IDS, positions=[0, 1, 2]),
}


@both("message", LISTS)
def test_a_list_where_a_tensor_is_wanted(message, m):
    complaint(TypeError, message + MAKE, LISTS[message], m)


FLOATS = torch.tensor([1.0, 2.0])
VALUES = {
    r"ids has dtype .*[Ff]loat.*, wants int64 token numbers: call \.long\(\)": lambda m: model(m).forward(IDS.float()),
    r"ids: got shape \[3\], want token numbers \[B, L\]; .*unsqueeze": lambda m: model(m).forward(IDS[0]),
    "ids holds 11, wants 0 to 10, the tokens of vocab_size 11: use the tokenizer": lambda m: model(m).forward(IDS + 8),
    "ids holds -1, wants 0 to 10": lambda m: model(m).forward(IDS.int() - 2),
    "ids holds 13, wants 0 to 10": lambda m: generate(m, IDS + 12),
    r"lengths has dtype .*, wants int32 or int64: call \.long": lambda m: model(m).forward(IDS, lengths=FLOATS),
    r"lengths has shape \[3\], wants \[batch\] = \[2\]": lambda m: model(m).forward(IDS, lengths=IDS[0]),
    r"context_lens has dtype .*, wants int32": lambda m: decoder_block(m, cross_attention=attention(m)).forward(
        X, X, context_lens=FLOATS
    ),
    r"target_lens has shape \[3\], wants \[batch\]": lambda m: m.EncoderDecoder(encoder(m), decoder(m)).forward(
        X, X, target_lens=IDS[0]
    ),
    r"lengths\[0\] is 0, wants 1 to 3": lambda m: generate(m, lengths=torch.tensor([0, 5])),
    r"lengths\[1\] is 5, wants 1 to 3: the valid tokens of that row": lambda m: generate(
        m, lengths=torch.tensor([1, 5])
    ),
    r"positions has shape \[4\] .*, wants int64 .* length 5": lambda m: m.SelfAttention(24).forward(
        X, positions=torch.arange(4)
    ),
    r"positions has shape \[6\] .*, wants int64 .* length 5": lambda m: m.ProjectedAttention(4, 4, 6).forward(
        X, X, X, positions=torch.arange(6)
    ),
    r"v: got shape \[2, 3, 24\], want batch and length of k \[2, 5, 24\]": lambda m: m.ProjectedAttention(
        4, 4, 6
    ).forward(X, X, X[:, :3]),
}


@both("message", VALUES)
def test_a_value_that_does_not_fit(message, m):
    complaint(ValueError, message, VALUES[message], m)


def test_ids_out_of_the_vocabulary_leave_the_cache_alone():
    cache = attnpack.ModelCache(2)
    language_model = model(attnpack)
    language_model(IDS, cache)
    with pytest.raises(ValueError, match="ids holds 11"):
        language_model(torch.tensor([[11], [1]]), cache)
    with pytest.raises(ValueError, match="ids holds 11"):
        language_model.generate(torch.tensor([[11], [1]]), max_new_tokens=2, cache=cache)
    assert cache.lengths.tolist() == [3, 3]


SAMPLING = {
    r"seed is -1 \(int\), wants an int from 0 to 2\*\*64 - 1, or None": dict(seed=-1),
    r"seed is 1.5 \(float\), wants an int from 0": dict(seed=1.5),
    r"seed is 'a' \(str\), wants an int from 0": dict(seed="a"),
    r"stop_tokens is None \(NoneType\), wants a token number or a list of them, \(\) for none": dict(stop_tokens=None),
    r"stop_tokens is .*abc|stop_tokens is \['a'.*, wants a token number": dict(stop_tokens="abc"),
    r"stop_tokens is 1.5 \(float\), wants a token number": dict(stop_tokens=1.5),
    r"max_new_tokens is '2' \(str\), wants an int": dict(max_new_tokens="2"),
    r"temperature is 'hot' \(str\), wants a number": dict(temperature="hot"),
    r"top_k is 'all' \(str\), wants an int": dict(top_k="all"),
    r"cache is None \(NoneType\), generate wants 'dynamic', 'static', 'none' .* or a ModelCache": dict(cache=None),
    r"cache is .*, generate wants .*a ModelCache": dict(cache=3),
}


@both("message", SAMPLING)
def test_generate_names_its_argument(message, m):
    complaint(TypeError, message, lambda: generate(m, **SAMPLING[message]))


@pytest.mark.parametrize("m", [attnpack, attnpack.cpp], ids=["python", "cpp"])
def test_one_stop_token_needs_no_list(m):
    torch.manual_seed(0)
    language_model = model(m)
    first = int(language_model.generate(IDS[:1], max_new_tokens=1)[0, -1])
    for stop in (first, [first], (first,)):
        assert language_model.generate(IDS[:1], max_new_tokens=5, stop_tokens=stop).shape == (1, 4)


PARTS = {
    "attention is 'a'": (TypeError, "wants an attention module", lambda m: m.DecoderBlock("a", "b")),
    "attention is a FeedForward": (
        TypeError,
        "wants an attention module",
        lambda m: m.EncoderBlock(m.FeedForward(24, 32), m.FeedForward(24, 32)),
    ),
    "feed_forward is 'b'": (TypeError, "FeedForward", lambda m: m.EncoderBlock(attention(m), "b")),
    "feed_forward is a GroupedQueryAttention": (
        TypeError,
        "FeedForward",
        lambda m: m.EncoderBlock(attention(m), attention(m)),
    ),
    "cross_attention is 'c'": (TypeError, "attention module", lambda m: decoder_block(m, cross_attention="c")),
    "feed_forward: got width 20": (
        ValueError,
        "want 24 as attention has; .* of one embed_dim",
        lambda m: m.EncoderBlock(attention(m), m.FeedForward(20, 32)),
    ),
    "cross_attention: got width 20": (
        ValueError,
        "want 24 as attention has",
        lambda m: decoder_block(m, cross_attention=m.MultiHeadAttention(20, 4)),
    ),
    "cross_attention: got width 1": (
        ValueError,
        "want 24 as attention has",
        lambda m: decoder_block(m, cross_attention=m.SelfAttention(24, 1)),
    ),
    "attention: gives width 1": (
        ValueError,
        "want its embed_dim 24; .*leave head_dim out",
        lambda m: m.DecoderBlock(m.SelfAttention(24, 1), m.FeedForward(24, 32)),
    ),
    r"layers(\[0\])? is .*'a'": (TypeError, "wants an? .*EncoderBlock", lambda m: m.Encoder(["a"])),
    r"layers(\[0\])? is an? (EncoderBlock|list)": (
        TypeError,
        "wants a .*DecoderBlock",
        lambda m: m.Decoder([m.EncoderBlock(attention(m), m.FeedForward(24, 32))]),
    ),
    r"rope is 'yes' \(str\)": (TypeError, "RotaryEmbedding.*None", lambda m: m.MultiHeadAttention(24, 4, rope="yes")),
    r"rope is 5 \(int\)": (TypeError, "RotaryEmbedding.*None", lambda m: m.ProjectedAttention(4, 4, 6, rope=5)),
    r"embed_dim is '24' \(str\)": (TypeError, "wants an int", lambda m: m.MultiHeadAttention("24", 4)),
}


@both("got", PARTS)
def test_parts_that_do_not_fit(got, m):
    kind, wants, call = PARTS[got]
    complaint(kind, f"{got}.*{wants}", call, m)


def test_a_part_of_the_other_language():
    with pytest.raises(TypeError, match=r"rope is .*RotaryEmbedding.* wants .* of attnpack.cpp.*\.cpp\(\) of a Python"):
        attnpack.cpp.MultiHeadAttention(24, 4, rope=attnpack.RotaryEmbedding(6))
    with pytest.raises(TypeError, match=r"attention is a .*, wants .*: one of attnpack.cpp, which \.cpp\(\)"):
        attnpack.cpp.EncoderBlock(attention(attnpack), attnpack.cpp.FeedForward(24, 32))
    with pytest.raises(TypeError, match=r"cache is an attnpack.cpp.ModelCache, Decoder wants a ModelCache"):
        model(attnpack)(IDS, attnpack.cpp.ModelCache(2))
    with pytest.raises(TypeError, match=r"cache is .*ModelCache.*, wants an attnpack.cpp.ModelCache"):
        model(attnpack.cpp).forward(IDS, attnpack.ModelCache(2))


def test_a_missing_argument_is_not_a_list_of_signatures():
    with pytest.raises(TypeError, match=r"generate\(\) lacks an argument, .*: it takes ids, max_new_tokens, cache"):
        model(attnpack.cpp).generate(IDS)


def test_cpp_attention_shows_its_sizes():
    for name, sizes in (("MultiHead", (4,)), ("GroupedQuery", (4, 2)), ("MultiQuery", (4,))):
        shown = repr(getattr(attnpack.cpp, f"{name}Attention")(24, *sizes, causal=True))
        kv_heads = {"MultiHead": 4, "GroupedQuery": 2, "MultiQuery": 1}[name]
        assert f"{name}Attention(embed_dim=24, num_heads=4, num_kv_heads={kv_heads}, causal=true)" in shown
    assert "SelfAttention(embed_dim=24, head_dim=6)" in repr(attnpack.cpp.SelfAttention(24, 6))
    projected = attnpack.cpp.ProjectedAttention(4, 2, 6, causal=True)
    assert repr(projected).endswith("ProjectedAttention(num_heads=4, num_kv_heads=2, head_dim=6, causal=true)")


def test_a_meta_embedding_does_not_import_dynamo():
    made = "import attnpack, sys; attnpack.cpp.Embedding(10, 4, device='meta'); print('torch._dynamo' in sys.modules)"
    assert run_python(made).stdout.strip() == "False"


def test_a_window_of_three_is_refused_when_compiled_too():
    x = torch.randn(1, 2, 3, 8)
    attend = torch.compile(lambda x: attnpack.attention(x, x, x, window=(1, 2, 3)), backend="eager")
    with pytest.raises(Exception, match="attention"):
        attend(x)
