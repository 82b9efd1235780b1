"""The recurrent layers against transformers' by names and numbers, whole and in steps, and their cache."""

import copy
import importlib
import pickle

import attnpack
import pytest
import torch
from attnpack import (
    GatedConvolution,
    GatedDeltaNet,
    KimiDeltaAttention,
    LinearAttention,
    Mamba2,
    RecurrentCache,
    reference,
)
from module_cases import EMBED
from torch.testing import assert_close
from transformers import DynamicCache as HfCache

NAN = float("nan")
E = 32
OURS = {
    "qwen3_5": lambda **f: GatedDeltaNet(E, 2, 4, head_k_dim=8, head_v_dim=6, norm_eps=1e-5, **f),
    "kimi_linear": lambda **f: KimiDeltaAttention(E, 3, head_dim=8, norm_eps=1e-5, **f),
    "lfm2": lambda **f: GatedConvolution(E, bias=True, **f),
    "mamba2": lambda **f: Mamba2(E, 8, head_dim=8, state_dim=5, num_groups=4, conv_kernel_size=3, bias=True, **f),
    "bamba": lambda **f: Mamba2(E, 4, head_dim=16, state_dim=9, conv_bias=False, **f),
}
OTHERS = {
    "neg_eigval": lambda **f: GatedDeltaNet(E, 2, 2, head_k_dim=5, head_v_dim=9, conv_kernel_size=2,
                                            allow_neg_eigval=True, **f),
    "linear": lambda **f: LinearAttention(E, 4, **f),
    "elu": lambda **f: LinearAttention(E, 4, head_dim=6, feature_map="elu", decay="fixed", bias=True, **f),
    "learned": lambda **f: LinearAttention(E, 2, decay="learned", scale=0.5, out_bias=True, **f),
}  # fmt: skip
by_kind = pytest.mark.parametrize("kind", [*OURS, *OTHERS])


def make(kind, **factory):
    layer = (OURS | OTHERS)[kind](**factory)
    torch.manual_seed(0)  # what the layer itself draws does not count
    randomise(layer)
    return layer


def randomise(layer):
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.rpartition(".")[2] in ("A_log", "dt_bias"):
                parameter.uniform_(-2, 1)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.5 + ("norm" in name))


def theirs(family, ours):
    """transformers' layer, and the same layer of ours on its numbers."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = {"hidden_size": E, "num_hidden_layers": 1, "vocab_size": 16, "num_attention_heads": 2}
    if family == "qwen3_5":
        made = module.Qwen3_5TextConfig(**config, layer_types=["linear_attention"], linear_num_key_heads=2,
                                        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6,
                                        rms_norm_eps=1e-5)  # fmt: skip
        layer = module.Qwen3_5GatedDeltaNet(made, 0)
    elif family == "kimi_linear":
        made = module.KimiLinearConfig(**config, layer_types=["linear_attention"], linear_num_heads=3,
                                       linear_head_dim=8, rms_norm_eps=1e-5)  # fmt: skip
        layer = module.KimiLinearDeltaAttention(made, 0)
    elif family == "mamba2":
        made = module.Mamba2Config(hidden_size=E, num_hidden_layers=1, vocab_size=16, num_heads=8, head_dim=8,
                                   state_size=5, n_groups=4, conv_kernel=3, use_bias=True)  # fmt: skip
        layer = module.Mamba2Mixer(made, 0)
    elif family == "bamba":
        made = module.BambaConfig(**config, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=9, mamba_conv_bias=False,
                                  rms_norm_eps=1e-5)  # fmt: skip
        layer = module.BambaMixer(made, 0)
    else:
        made = module.Lfm2Config(**config, layer_types=["conv"], conv_bias=True)
        layer = module.Lfm2ShortConv(made, 0)
    assert layer.load_state_dict(ours.state_dict(), strict=True)
    return layer, made


@pytest.mark.parametrize("family", OURS)
def test_outputs_and_gradients_are_those_of_transformers(family):
    ours = make(family)
    layer, _ = theirs(family, ours)
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in layer.named_parameters()}
    x = torch.randn(2, 70, E)
    grads = []
    for module in (ours, layer, ours.cpp()):
        given = x.clone().requires_grad_()
        out = module.forward(given)
        named = dict(module.named_parameters())
        loss = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()
        leaves = [given, *(named[name] for name, _ in ours.named_parameters())]
        grads.append([out, *torch.autograd.grad(loss, leaves)])
    for found, wanted in zip(*grads[:2], strict=True):
        assert_close(found, wanted, rtol=2e-4, atol=1e-4 * wanted.abs().max().item())  # theirs errs by half of that
    assert_close(grads[0], grads[2], rtol=0, atol=0)


@pytest.mark.parametrize("family", OURS)
def test_steps_with_a_cache_are_those_of_transformers(family):
    ours = make(family).eval()
    layer, config = theirs(family, ours)
    cache, held, x = RecurrentCache(), HfCache(config=config), torch.randn(2, 13, E)
    with torch.no_grad():
        for part in x.split([6, 1, 1, 4, 1], 1):
            assert_close(ours(part, cache=cache), layer(part, cache=held), rtol=1e-4, atol=1e-4)
        assert_close(ours(x), layer(x), rtol=1e-4, atol=1e-4)
    assert len(cache) == 13 and cache.lengths.tolist() == [13, 13]


@pytest.mark.parametrize("kind", ["qwen3_5", "kimi_linear", "mamba2"])
def test_a_new_layer_keeps_what_it_reads(kind):
    # Steps between 0.001 and 0.1, over all their orders of magnitude, in both languages: not gone after a token.
    torch.manual_seed(0)
    biases = []
    for _ in range(30):
        layer = OURS[kind]()
        for module in (layer, layer._make_cpp("cpu")):  # which shares nothing with layer
            biases += [p.detach().flatten() for name, p in dict(module.named_parameters()).items() if "dt_bias" in name]
    steps = torch.nn.functional.softplus(torch.cat(biases))
    assert 0.00099 < steps.min() < 0.0015 and 0.07 < steps.max() < 0.1001
    assert 0.4 < (steps < 0.01).float().mean() < 0.6


def test_linear_attention_is_attention_without_the_softmax():
    layer = make("linear", dtype=torch.float64)
    x = torch.randn(2, 9, E, dtype=torch.float64)
    q, k, v = (p(x).unflatten(-1, (4, 8)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    out = ((q @ k.mT / 8**0.5).tril() @ v).transpose(1, 2).flatten(2)
    assert_close(layer(x), layer.o_proj(out))


def test_positive_features_give_weighted_means():
    layer = make("elu", dtype=torch.float64)
    x = torch.randn(2, 9, E, dtype=torch.float64)
    q, k, v = (p(x).unflatten(-1, (4, 6)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    steps, heads = torch.arange(9.0, dtype=torch.float64), torch.arange(4.0, dtype=torch.float64)
    kept = (1 - 2 ** (-5 - heads)).view(4, 1, 1) ** (steps.view(-1, 1) - steps).clamp(min=0)
    weights = ((torch.nn.functional.elu(q) + 1) @ (torch.nn.functional.elu(k) + 1).mT * kept).tril()
    out = (weights @ v / weights.sum(-1, keepdim=True)).transpose(1, 2).flatten(2)
    assert_close(layer(x), layer.o_proj(out))


def test_learned_decays_are_those_of_gla():
    layer = make("learned", dtype=torch.float64)
    x = torch.randn(2, 9, E, dtype=torch.float64)
    q, k, v, g = (p(x).unflatten(-1, (2, 16)).transpose(1, 2) for p in (
        layer.q_proj, layer.k_proj, layer.v_proj, lambda t: layer.decay_b_proj(layer.decay_a_proj(t))))  # fmt: skip
    out, _ = reference.linear_attention(q, k, v, log_decay=torch.nn.functional.logsigmoid(g) / 16, scale=0.5)
    assert_close(layer(x), layer.o_proj(out.transpose(1, 2).flatten(2)))


@by_kind
def test_cuts_padding_and_packing_change_nothing(kind):
    layer = make(kind, dtype=torch.float64).eval()
    x = torch.randn(3, 11, E, dtype=torch.float64)
    whole, lens = layer(x), torch.tensor([11, 4, 0])
    cache, outs = RecurrentCache(), []
    for part in x.split([1, 1, 6, 3], 1):
        outs.append(layer(part, cache=cache))
    assert_close(torch.cat(outs, 1), whole)
    spoilt = x.clone()
    for b, length in enumerate(lens.tolist()):
        spoilt[b, length:] = 7.0
    ragged = RecurrentCache()
    out = layer(spoilt, cache=ragged, kv_lens=lens)
    assert_close(out[0], whole[0])
    assert_close(out[1, :4], whole[1, :4])
    assert ragged.lengths.tolist() == [11, 4, 0] and len(ragged) == 11
    step = layer(x[:, 4:5], cache=ragged)
    assert_close(step[1], whole[1, 4:5])
    assert_close(step[2], layer(x[2:, 4:5])[0])
    ends = torch.tensor([0, 4, 4, 15])
    packed = torch.cat([x[1, :4], x[0]])[None]
    pages = RecurrentCache()
    rows = layer(packed, cu_seqlens=ends, cache=pages)
    assert_close(rows[0, :4], whole[1, :4])
    assert_close(rows[0, 4:], whole[0])
    assert pages.lengths.tolist() == [4, 0, 11]
    nested = layer(torch.nested.nested_tensor_from_jagged(packed[0], ends))
    assert_close(nested.values(), rows[0])


@by_kind
def test_both_languages_and_a_copy_go_on_alike(kind):
    layer = make(kind).eval()
    twin, x = layer.cpp(), torch.randn(2, 9, E)
    ours, theirs_ = RecurrentCache(), attnpack.cpp.RecurrentCache()
    lens = torch.tensor([2, 4])
    with torch.no_grad():
        for part, valid in zip(x.split([4, 1, 3, 1], 1), (lens, None, None, None), strict=True):
            kept = ours.clone()
            out = layer(part, cache=ours, kv_lens=valid)
            assert torch.equal(out, twin.forward(part, cache=theirs_, kv_lens=valid))
            assert torch.equal(out, layer(part, cache=kept, kv_lens=valid))
            assert ours.nbytes == theirs_.nbytes == ours.nbytes_allocated and len(ours) == len(theirs_)
            for name in ("state", "conv_state"):
                held, native = getattr(ours, name), getattr(theirs_, name)
                assert (held is None and native is None) or torch.equal(held, native)
    assert ours.lengths.tolist() == [7, 9] and repr(ours) == repr(theirs_)


@by_kind
def test_a_failed_call_leaves_the_cache(kind):
    layer = make(kind).eval()
    cache, x = RecurrentCache(), torch.randn(2, 5, E)
    layer(x, cache=cache)
    before = cache.clone()
    with pytest.raises(ValueError, match="kv_lens"):
        layer(x, cache=cache, kv_lens=torch.tensor([1, 6]))
    with pytest.raises(ValueError, match="cache: got one of batch 2, want 3 as in x"):
        layer(torch.randn(3, 1, E), cache=cache)
    assert torch.equal(layer(x, cache=cache), layer(x, cache=before))


def test_the_cache_is_a_state_of_fixed_size():
    layer = make("qwen3_5").eval()
    cache = RecurrentCache()
    assert len(cache) == 0 and cache.nbytes == 0 and cache.state is None and cache.k is None and bool(cache)
    assert repr(cache) == "RecurrentCache(len=0)"
    x = torch.randn(3, 40, E)
    sizes = []
    for part in x.split(1, 1):
        layer(part, cache=cache)
        sizes.append(cache.nbytes)
    assert set(sizes) == {3 * (4 * 8 * 6 + 56 * 3) * 4} and not cache.state.requires_grad
    with pytest.raises(ValueError, match="n: got 39 for a RecurrentCache that has read 40 positions: a state cannot "):
        cache.crop(39)
    cache.crop(40)
    kept = cache.clone()
    cache.reorder([2, 2, 0])
    assert torch.equal(cache.state, kept.state[[2, 2, 0]]) and torch.equal(cache.conv_state, kept.conv_state[[2, 2, 0]])
    out = layer(x[:, :1], cache=cache)
    assert not torch.equal(out[0], out[2])
    cache.reset()
    assert len(cache) == 0 and torch.equal(layer(x[:, :5], cache=cache), layer(x[:, :5]))


def test_copies_and_pickles_go_on_alike():
    layer, x = make("kimi_linear").eval(), torch.randn(2, 4, E)
    cache = RecurrentCache()
    layer(x, cache=cache)
    copies = [copy.deepcopy(cache), copy.copy(cache), pickle.loads(pickle.dumps(cache))]
    wanted = layer(x, cache=cache)
    for other in copies:
        assert other.lengths.tolist() == [4, 4] and torch.equal(layer(x, cache=other), wanted)


def test_a_state_of_inference_mode_serves_training():
    layer = make("kimi_linear")
    cache, x = RecurrentCache(), torch.randn(1, 6, E)
    with torch.inference_mode():
        layer(x, cache=cache)
        layer(x[:, :1], cache=cache)
    layer(x, cache=cache).sum().backward()
    assert layer.q_proj.weight.grad.isfinite().all()


def test_gradients_do_not_reach_the_past():
    layer = make("qwen3_5")
    cache, first, second = RecurrentCache(), torch.randn(1, 3, E, requires_grad=True), torch.randn(1, 3, E)
    layer(first, cache=cache)
    layer(second.requires_grad_(), cache=cache).sum().backward()
    assert first.grad is None and second.grad.abs().sum() > 0


@by_kind
def test_compiled_steps_are_one_graph(kind):
    layer = make(kind, dtype=torch.float64).eval()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 8, E, dtype=torch.float64)
    ours, direct = RecurrentCache(), RecurrentCache()
    with torch.no_grad():
        for part in x.split([5, 1, 1, 1], 1):
            assert_close(compiled(part, cache=ours), layer(part, cache=direct))
    assert len(ours) == 8 and ours.lengths.tolist() == [8, 8]


def test_in_blocks_and_stacks():
    torch.manual_seed(0)
    blocks = [
        attnpack.DecoderBlock(make("qwen3_5"), attnpack.FeedForward(E, 16)),
        attnpack.DecoderBlock(attnpack.MultiHeadAttention(E, 4, rope=attnpack.RotaryEmbedding(8)),
                              attnpack.FeedForward(E, 16)),
    ]  # fmt: skip
    model = attnpack.Decoder(blocks).eval()
    x = torch.randn(2, 7, E)
    cache = model.new_cache()
    assert [type(layer).__name__ for layer in cache.layers] == ["RecurrentCache", "DynamicCache"]
    outs = [model(part, cache=cache) for part in x.split([4, 1, 2], 1)]
    assert_close(torch.cat(outs, 1), model(x), rtol=1e-4, atol=1e-4)
    assert torch.equal(model.cpp().forward(x), model(x))
    with pytest.raises(ValueError, match="n: got 5 for a RecurrentCache"):
        cache.crop(5)
    assert len(cache.layers[1]) == 7
    encoder = attnpack.EncoderBlock(make("linear"), attnpack.FeedForward(E, 16))
    assert torch.equal(encoder(x), encoder.cpp().forward(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_near(dtype):
    x = torch.randn(2, 20, E)
    for kind in OURS | OTHERS:
        layer = make(kind)
        exact = layer(x)
        error = layer.to(dtype)(x.to(dtype)).float() - exact
        assert error.norm() < 10 * torch.finfo(dtype).eps * exact.norm(), kind


X = torch.ones(2, 5, EMBED)
WRONG = {
    r"mask: got one for GatedDeltaNet, which has no scores to mask": dict(mask=torch.ones(2, 1, 1, 5).bool()),
    r"causal: got false for GatedDeltaNet, which reads its tokens in order": dict(causal=False),
    r"x: got \[2, 5, 23\]|x: got shape \[2, 5, 23\]|x has shape \[2, 5, 23\]": dict(x=X[..., 1:]),
    r"cache is an? .*, GatedDeltaNet wants an attnpack.RecurrentCache": dict(cache=attnpack.DynamicCache()),
    r"kv_lens: got \[3\], want \[B\] = \[2\]": dict(kv_lens=torch.ones(3).long()),
    r"cu_seqlens: got a batch of 2": dict(cu_seqlens=torch.tensor([0, 5])),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_inputs_are_named(message):
    layer = GatedDeltaNet(EMBED, 1, 2, head_k_dim=4, head_v_dim=4)
    given = {"x": X} | WRONG[message]
    with pytest.raises((ValueError, TypeError), match=message):
        layer(**given)
    if "cache" not in given:
        with pytest.raises((ValueError, TypeError), match=message):
            layer.cpp().forward(**given)


def test_a_cache_of_another_layer_is_refused():
    cache, x = RecurrentCache(), torch.randn(1, 2, E)
    make("qwen3_5")(x, cache=cache)
    with pytest.raises(ValueError, match="cache: got a RecurrentCache whose convolution state has shape"):
        make("neg_eigval")(x, cache=cache)
    with pytest.raises(ValueError, match="cache: got a RecurrentCache, which holds the state of a recurrent layer"):
        attnpack.MultiHeadAttention(E, 4)(x, cache=RecurrentCache())
    with pytest.raises(ValueError, match="cache: got one for keys and values for GatedDeltaNet"):
        make("qwen3_5").cpp().forward(x, cache=attnpack.cpp.DynamicCache())
    with pytest.raises(ValueError, match="kv_from: got a RecurrentCache"):
        attnpack.MultiHeadAttention(E, 4)(x, kv_from=RecurrentCache())
