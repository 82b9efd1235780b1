"""Blocks and stacks: against transformers and plain formulas, and an encoder-decoder that learns."""

import attnpack
import pytest
import torch
import torch.nn.functional as F
from attnpack.tools.threads import threads
from torch import nn
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

SIZES = dict(vocab_size=64, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6)
PEERS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}, {}),
    "llama_linear_rope": (
        LlamaForCausalLM,
        LlamaConfig,
        dict(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}),
        dict(rope_base=500.0, rope_scaling={"rope_type": "linear", "factor": 4.0}),
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}, dict(bias=True, out_bias=False)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, dict(head_dim=12), dict(qk_norm=True, head_dim=12)),
    "tied": (LlamaForCausalLM, LlamaConfig, dict(tie_word_embeddings=True), dict(tie_embeddings=True)),
}


def pair(name):
    """A small random model of transformers, and ours with its state dict."""
    model_class, config_class, theirs, ours = PEERS[name]
    torch.manual_seed(0)
    settings = {"tie_word_embeddings": False, "rms_norm_eps": 1e-5} | theirs
    config = config_class(**SIZES, num_key_value_heads=2, attn_implementation="eager", **settings)
    peer = model_class(config).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model = attnpack.CausalLM(64, 48, 2, 6, 2, hidden_dim=80, eps=1e-5, **ours).eval()
    model.load_state_dict(peer.state_dict(), strict=True)
    return model, peer


@pytest.mark.parametrize("name", PEERS)
def test_logits_and_gradients_are_those_of_transformers(name):
    model, peer = pair(name)
    ids = torch.randint(64, (2, 9))
    logits, wanted = model(ids), peer(ids).logits
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    for out in (logits, wanted):
        out.square().mean().backward()
    theirs = dict(peer.named_parameters())
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[parameter_name].grad, rtol=1e-3, atol=1e-5)


def test_state_dict_of_a_llama_layer_fits_a_block():
    model, peer = pair("llama")
    rope = attnpack.RotaryEmbedding(8)
    attention = attnpack.GroupedQueryAttention(48, 6, 2, rope=rope)
    block = attnpack.DecoderBlock(attention, attnpack.FeedForward(48, 80), eps=1e-5)
    block.load_state_dict(peer.model.layers[1].state_dict(), strict=True)
    x = torch.randn(2, 7, 48)
    embeddings = peer.model.rotary_emb(x, torch.arange(7)[None])
    causal = torch.full((7, 7), float("-inf")).triu(1)[None, None]
    wanted = peer.model.layers[1](x, attention_mask=causal, position_embeddings=embeddings)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    torch.testing.assert_close(block(x), wanted, rtol=1e-4, atol=1e-5)


def parts(cross=False):
    attention = attnpack.MultiHeadAttention(24, 4)
    return (
        attention,
        attnpack.FeedForward(24, 32, activation="gelu"),
        attnpack.MultiHeadAttention(24, 4) if cross else None,
    )


@pytest.mark.parametrize("pre_norm", [True, False])
def test_post_norm_block_is_torchs_encoder_layer(pre_norm):
    torch.manual_seed(0)
    attention, feed_forward, _ = parts()
    block = attnpack.EncoderBlock(attention, feed_forward, norm="layer", pre_norm=pre_norm, eps=1e-5)
    peer = nn.TransformerEncoderLayer(
        24, 4, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=pre_norm, bias=True
    )
    with torch.no_grad():
        peer.self_attn.in_proj_weight.copy_(
            torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        )
        for bias in (peer.self_attn.in_proj_bias, peer.self_attn.out_proj.bias, peer.linear1.bias, peer.linear2.bias):
            bias.zero_()
        peer.self_attn.out_proj.weight.copy_(attention.o_proj.weight)
        peer.linear1.weight.copy_(feed_forward.up_proj.weight)
        peer.linear2.weight.copy_(feed_forward.down_proj.weight)
    x, lens = torch.randn(2, 6, 24), torch.tensor([4, 6])
    torch.testing.assert_close(block(x), peer(x), rtol=1e-4, atol=1e-5)
    padded = torch.arange(6) >= lens[:, None]
    out, wanted = block(x, kv_lens=lens), peer(x, src_key_padding_mask=padded)
    torch.testing.assert_close(out[~padded], wanted[~padded], rtol=1e-4, atol=1e-5)


def test_gelu_is_the_exact_one():
    """x times the normal distribution function, not its approximation by tanh."""
    ours = attnpack.FeedForward(24, 32, activation="gelu", dtype=torch.float64)
    x = 5 * torch.randn(2, 6, 24, dtype=torch.float64)
    inner = x @ ours.up_proj.weight.T
    wanted = (inner * torch.special.ndtr(inner)) @ ours.down_proj.weight.T
    torch.testing.assert_close(ours(x), wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours.cpp().forward(x), wanted, rtol=1e-9, atol=1e-9)


def test_decoder_is_causal_and_encoder_is_not():
    torch.manual_seed(0)
    encoder = attnpack.Encoder([attnpack.EncoderBlock(*parts()[:2])])
    decoder = attnpack.Decoder([attnpack.DecoderBlock(*parts()[:2])])
    x = torch.randn(1, 6, 24)
    changed = torch.cat([x[:, :5], torch.randn(1, 1, 24)], 1)
    assert torch.equal(decoder(x)[:, :5], decoder(changed)[:, :5])
    assert not torch.allclose(encoder(x)[:, :5], encoder(changed)[:, :5])


def test_a_causal_attention_makes_a_causal_encoder():
    torch.manual_seed(0)
    attention = attnpack.MultiHeadAttention(24, 4, causal=True)
    encoder = attnpack.Encoder([attnpack.EncoderBlock(attention, attnpack.FeedForward(24, 32))])
    x = torch.randn(1, 6, 24)
    changed = torch.cat([x[:, :5], torch.randn(1, 1, 24)], 1)
    for each in (encoder, encoder.cpp()):
        assert torch.equal(each.forward(x)[:, :5], each.forward(changed)[:, :5])


def test_cross_attention_reads_the_whole_context():
    torch.manual_seed(0)
    attention, feed_forward, cross = parts(cross=True)
    block = attnpack.DecoderBlock(attention, feed_forward, cross_attention=cross)
    x, context = torch.randn(1, 3, 24), torch.randn(1, 6, 24)
    wanted = block(x, context)
    cross.causal = True
    assert torch.equal(block(x, context), wanted)


@pytest.mark.parametrize("m", [attnpack, attnpack.cpp], ids=["python", "cpp"])
def test_decoder_reads_its_context_by_length_and_mask(m):
    torch.manual_seed(0)
    attention, feed_forward, cross = parts(cross=True)
    module = attnpack.Decoder([attnpack.DecoderBlock(attention, feed_forward, cross_attention=cross)])
    decoder = module.cpp() if m is attnpack.cpp else module
    x, context = torch.randn(2, 4, 24), torch.randn(2, 6, 24)
    short = module(x[:1], context[:1, :3])
    assert not torch.allclose(short, module(x, context)[:1], atol=1e-2)
    torch.testing.assert_close(decoder.forward(x, context, context_lens=torch.tensor([3, 6]))[:1], short)
    mask = torch.tensor([True, True, True, False, False, False]).view(1, 1, 1, 6)
    torch.testing.assert_close(decoder.forward(x[:1], context[:1], context_mask=mask), short)
    cache = m.ModelCache(1)
    with torch.no_grad():
        steps = [decoder.forward(token, context, cache=cache) for token in x.split(1, 1)]
        torch.testing.assert_close(torch.cat(steps, 1), decoder.forward(x, context))
    with pytest.raises(ValueError, match="context: got none"):
        decoder.forward(x)
    plain = attnpack.DecoderBlock(*parts()[:2])
    with pytest.raises(ValueError, match="no cross-attention"):
        (plain.cpp() if m is attnpack.cpp else plain).forward(x, context)


@pytest.mark.parametrize("m", [attnpack, attnpack.cpp], ids=["python", "cpp"])
def test_padding_of_source_and_target_is_not_read(m):
    """A padded pair of sequences gives what the sequences give alone, and the cache keeps only their tokens."""
    torch.manual_seed(0)
    attention, feed_forward, cross = parts(cross=True)
    module = attnpack.EncoderDecoder(
        attnpack.Encoder([attnpack.EncoderBlock(*parts()[:2])]),
        attnpack.Decoder([attnpack.DecoderBlock(attention, feed_forward, cross_attention=cross)]),
    )
    both = module.cpp() if m is attnpack.cpp else module
    source, target, cache = torch.randn(2, 6, 24), torch.randn(2, 4, 24), m.ModelCache(1)
    alone = module(source[:1, :3], target[:1, :2])
    lens = {"source_lens": torch.tensor([3, 6]), "target_lens": torch.tensor([2, 4])}
    with torch.no_grad():
        out = both.forward(source, target, cache=cache, **lens)
    torch.testing.assert_close(out[:1, :2], alone)
    torch.testing.assert_close(out[1:], module(source[1:], target[1:]))
    assert cache.lengths.tolist() == [2, 4]
    # Neither the encoder nor the decoder may read the padding; each alone would change the output.
    memory = module.encoder(source, kv_lens=lens["source_lens"])
    for wrong in (
        module.decoder(target, memory),
        module.decoder(target, module.encoder(source), context_lens=lens["source_lens"]),
    ):
        assert not torch.allclose(wrong[:1, :2], alone, atol=1e-2)


@pytest.fixture
def one_thread():
    """One thread: such small tensors gain nothing from a second one, and wait for it on a busy machine."""
    with threads(1):
        yield


def test_encoder_decoder_learns_to_reverse(one_thread):
    """The model writes sequences of 6 to 8 letters backwards by greedy decoding, with more than 99% of the letters
    right."""
    torch.manual_seed(0)
    letters, longest, width = 12, 8, 48
    start = letters

    class Embed(nn.Module):
        """Embeds tokens and learned positions, because reversing needs the places."""

        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(letters + 1, width)
            self.places = nn.Embedding(longest + 1, width)

        def forward(self, ids, first=0):
            return self.tokens(ids) + self.places(torch.arange(first, first + ids.size(1)))

    def attention():
        return attnpack.MultiHeadAttention(width, 4)

    def feed_forward():
        return attnpack.FeedForward(width, 2 * width)

    encoder = attnpack.Encoder([attnpack.EncoderBlock(attention(), feed_forward())])
    block = attnpack.DecoderBlock(
        attnpack.GroupedQueryAttention(width, 4, 2), feed_forward(), cross_attention=attention()
    )
    model = nn.ModuleDict(
        dict(both=attnpack.EncoderDecoder(encoder, attnpack.Decoder([block])), source=Embed(), target=Embed())
    )
    model["head"] = nn.Linear(width, letters)

    def batch(size):
        lens = torch.randint(6, longest + 1, (size,))
        source = torch.randint(letters, (size, longest))
        places = (lens[:, None] - 1 - torch.arange(longest)).clamp(min=0)
        valid = torch.arange(longest) < lens[:, None]
        return source, lens, source.gather(1, places), valid

    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(200):
        optimiser.param_groups[0]["lr"] = 5e-3 * (1 - step / 200)
        source, lens, target, valid = batch(64)
        shifted = torch.cat([torch.full((64, 1), start), target[:, :-1]], 1)
        states = model["both"](model["source"](source), model["target"](shifted), source_lens=lens)
        loss = F.cross_entropy(model["head"](states)[valid], target[valid])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    source, lens, target, valid = batch(256)
    with torch.no_grad():
        memory = encoder(model["source"](source), kv_lens=lens)
        cache, token, written = attnpack.ModelCache(1), torch.full((256, 1), start), []
        for place in range(longest):
            states = model["both"].decoder(model["target"](token, place), memory, cache=cache, context_lens=lens)
            token = model["head"](states).argmax(-1)
            written.append(token)
    right = (torch.cat(written, 1) == target)[valid].float().mean().item()
    assert right > 0.99
