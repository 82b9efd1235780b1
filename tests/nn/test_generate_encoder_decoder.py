"""EncoderDecoder.generate: the tokens of a loop that computes everything anew, in both languages."""

import attnpack
import pytest
import torch
from attnpack import DecoderBlock, EncoderBlock, FeedForward, MultiHeadAttention, MultiHeadLatentAttention

VOCAB, WIDTH = 11, 24


def make_model(latent: bool = False, tied: bool = True) -> attnpack.EncoderDecoder:
    torch.manual_seed(0)
    rope = attnpack.RotaryEmbedding(6)

    def attention(**settings):
        if latent:
            return MultiHeadLatentAttention(
                WIDTH, 4, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=6, v_head_dim=6, rope=rope, **settings
            )
        return MultiHeadAttention(WIDTH, 4, rope=rope, **settings)

    def table():
        return torch.nn.Embedding(VOCAB, WIDTH)

    readers = [EncoderBlock(MultiHeadAttention(WIDTH, 4, rope=rope), FeedForward(WIDTH, 40)) for _ in range(2)]
    writers = [
        DecoderBlock(
            attention(causal=True), FeedForward(WIDTH, 40), cross_attention=attnpack.GroupedQueryAttention(WIDTH, 4, 2)
        )
        for _ in range(2)
    ]
    decoder = attnpack.Decoder(writers, embed_tokens=table() if tied else None)
    if tied:
        decoder.embed_tokens.weight.data *= 0.02  # else each token is its own likeliest successor
    return attnpack.EncoderDecoder(attnpack.Encoder(readers, embed_tokens=table()), decoder).eval()


def write_anew(model, source, target, count, head, source_lens=None, lengths=None):
    """The likeliest tokens, one sequence at a time, each from a call of the whole model."""
    rows = []
    for i in range(len(source)):
        own = source[i : i + 1, : source_lens[i] if source_lens is not None else None]
        ids = target[i : i + 1, : lengths[i] if lengths is not None else None]
        new = []
        for _ in range(count):
            ids = torch.cat([ids, head(model(own, ids)[:, -1]).argmax(-1, keepdim=True)], 1)
            new.append(ids[0, -1])
        rows.append(torch.cat([target[i], torch.stack(new)]))
    return torch.stack(rows)


def tied_head(model):
    return lambda state: state @ model.decoder.embed_tokens.weight.T


SOURCE = torch.tensor([[1, 5, 3, 9, 2, 7], [4, 4, 8, 0, 0, 0], [6, 10, 1, 2, 3, 0]])
SOURCE_LENS, LENGTHS = torch.tensor([6, 3, 5]), torch.tensor([1, 3, 2])
TARGET = torch.tensor([[1, 0, 0], [2, 3, 4], [5, 6, 0]])


@pytest.mark.parametrize("ragged", [False, True], ids=["whole", "ragged"])
@pytest.mark.parametrize("cache", ["dynamic", "none"])
@pytest.mark.parametrize("latent", [False, True], ids=["grouped", "latent"])
@torch.no_grad()
def test_tokens_of_a_loop_without_caches(latent, cache, ragged):
    model = make_model(latent)
    target = TARGET if ragged else TARGET[:, :1]
    inputs = {"source_lens": SOURCE_LENS, "lengths": LENGTHS} if ragged else {}
    wanted = write_anew(model, SOURCE, target, 6, tied_head(model), **inputs)
    assert len(set(wanted[:, -6:].flatten().tolist())) > 3  # the model does not repeat itself
    for twin in (model, model.cpp()):
        assert torch.equal(twin.generate(SOURCE, target, max_new_tokens=6, cache=cache, **inputs), wanted)


@torch.no_grad()
def test_a_cache_of_the_callers_own_holds_the_target():
    model = make_model()
    wanted = model.generate(SOURCE, TARGET, max_new_tokens=6)
    cache = attnpack.ModelCache([attnpack.StaticCache(3, 4, 8, 6) for _ in range(2)])
    assert torch.equal(model.generate(SOURCE, TARGET, max_new_tokens=6, cache=cache), wanted)
    assert len(cache) == 8  # the last token is not appended
    small = attnpack.ModelCache([attnpack.StaticCache(3, 4, 7, 6) for _ in range(2)])
    with pytest.raises(ValueError, match="cache: got room for 7 positions, want 8"):
        model.generate(SOURCE, TARGET, max_new_tokens=6, cache=small)


@pytest.mark.parametrize("cache", ["dynamic", "none"])
@torch.no_grad()
def test_the_encoder_runs_once(cache):
    """After the first token its weights may be anything. With a cache this goes for the projections of its output
    too."""
    model = make_model()
    wanted = model.generate(SOURCE, TARGET, max_new_tokens=5, cache=cache)

    def poison(tokens):
        for parameter in model.encoder.parameters():
            parameter.fill_(torch.nan)
        for layer in model.decoder.layers if cache == "dynamic" else ():
            layer.cross_attn.k_proj.weight.fill_(torch.nan)
            layer.cross_attn.v_proj.weight.fill_(torch.nan)

    assert torch.equal(model.generate(SOURCE, TARGET, max_new_tokens=5, cache=cache, callback=poison), wanted)
    with pytest.raises(ValueError, match="logits: got NaN"):
        model.generate(SOURCE, TARGET, max_new_tokens=5, cache=cache)


@pytest.mark.parametrize("cache", ["dynamic", "none"])
@torch.no_grad()
def test_several_answers_to_each_source(cache):
    model = make_model()
    inputs = {"source_lens": SOURCE_LENS, "lengths": LENGTHS, "max_new_tokens": 6, "cache": cache}
    greedy = model.generate(SOURCE, TARGET, **inputs)
    assert torch.equal(model.generate(SOURCE, TARGET, num_return_sequences=2, **inputs), greedy.repeat_interleave(2, 0))
    drawn = model.generate(SOURCE, TARGET, num_return_sequences=2, temperature=2.0, seed=1, **inputs)
    repeated = {name: value.repeat_interleave(2, 0) for name, value in inputs.items() if torch.is_tensor(value)}
    again = model.generate(
        SOURCE.repeat_interleave(2, 0), TARGET.repeat_interleave(2, 0), temperature=2.0, seed=1, **inputs | repeated
    )
    assert torch.equal(drawn, again) and not torch.equal(drawn[::2], drawn[1::2])


@torch.no_grad()
def test_head_stop_tokens_and_callback():
    model, head = make_model(), torch.nn.Linear(WIDTH, 7)
    wanted = write_anew(model, SOURCE, TARGET, 5, head)
    assert torch.equal(model.generate(SOURCE, TARGET, max_new_tokens=5, head=head), wanted)
    assert torch.equal(model.cpp().generate(SOURCE, TARGET, max_new_tokens=5, head=lambda x: head(x)), wanted)
    stop = int(wanted[0, 3])
    stopped = model.generate(SOURCE[:1], TARGET[:1], max_new_tokens=5, head=head, stop_tokens=stop)
    assert torch.equal(stopped, wanted[:1, :4])
    seen = []
    model.generate(
        SOURCE, TARGET, max_new_tokens=5, head=head, callback=lambda tokens: seen.append(tokens) or len(seen) < 2
    )
    assert torch.equal(torch.stack(seen, 1), wanted[:, 3:5])


def test_what_does_not_fit_raises_a_sentence():
    model = make_model()
    for package_model in (model, model.cpp()):
        for error, message, arguments in [
            (ValueError, "source: got shape .*, want 3 sequences, as target has", {"source": SOURCE[:2]}),
            (ValueError, "target: got .*, want int64 token numbers", {"target": torch.zeros(3, 2, WIDTH)}),
            (ValueError, "cache: got 'paged', an encoder-decoder wants 'dynamic', 'none'", {"cache": "paged"}),
            (ValueError, r"head: got logits of shape \[3\]", {"head": lambda state: state[:, 0]}),
            (TypeError, "head is 3 .int., wants a function of the decoder's states", {"head": 3}),
            (ValueError, "source_lens", {"source_lens": torch.tensor([1, 2])}),
            (ValueError, "num_return_sequences: got 0", {"num_return_sequences": 0}),
        ]:
            call = {"source": SOURCE, "target": TARGET, "max_new_tokens": 2} | arguments
            with pytest.raises(error, match=message):
                package_model.generate(**call)
    with pytest.raises(ValueError, match="target: got token numbers, but the decoder has no embed_tokens"):
        make_model(tied=False).generate(SOURCE, TARGET, max_new_tokens=2)


def test_a_model_with_foreign_parts_is_refused():
    model = make_model()
    model.decoder.layers[0].register_forward_hook(lambda module, inputs, out: out + 1)
    with pytest.raises(TypeError, match="hook"):
        model.generate(SOURCE, TARGET, max_new_tokens=2)
