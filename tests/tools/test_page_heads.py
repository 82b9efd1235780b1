"""The page's reading of models: the masks that they have, their scores, and models of transformers."""

import attnpack
import pytest
import torch
from attnpack.tools.plot.findings import find
from attnpack.tools.plot.heads import Heads, heads_of, watching

L = 6
DISTANCE = torch.arange(L)[:, None] - torch.arange(L)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def ids(length=L):
    return torch.arange(length).unsqueeze(0)


def encoder(**settings):
    attention = attnpack.GroupedQueryAttention(16, 4, 2, **settings)
    block = attnpack.EncoderBlock(attention, attnpack.FeedForward(16, 32))
    return attnpack.Encoder([block], embed_tokens=torch.nn.Embedding(20, 16)).eval()


def scores_of(layer):
    """The scores that the page adds up, from the parts that it has, [H, L, L]."""
    key = layer.key[torch.tensor(layer.kv)]
    scores = layer.query.double() @ key.double().mT * layer.scale
    if layer.softcap:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    if layer.slopes:
        scores = scores - torch.tensor(layer.slopes)[:, None, None] * DISTANCE.abs()
    if layer.added is not None:
        scores = scores + layer.added
    return scores.masked_fill(layer.hidden, -torch.inf)


def check_sums(layer):
    """softmax of the parts' sum is the weights."""
    scores = scores_of(layer)
    if layer.sinks:
        sinks = torch.tensor(layer.sinks, dtype=scores.dtype)[:, None, None].expand(-1, L, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :L]
    else:
        weights = scores.softmax(-1).nan_to_num()
    torch.testing.assert_close(weights.float(), layer.weights, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "settings, hidden, words",
    [
        ({}, DISTANCE > L, "not causal"),
        ({"causal": True}, DISTANCE < 0, "causal"),
        ({"window": (1, 2)}, (DISTANCE > 1) | (DISTANCE < -2), "not causal, a window of 1 key before and 2 keys after"),
        ({"alibi": True, "softcap": 2.0, "sinks": True}, DISTANCE > L, "not causal"),
        ({"head_map": (1, 0, 0, 1), "scale": 0.7}, DISTANCE > L, "not causal"),
    ],
    ids=str,
)
def test_the_mask_is_that_of_the_layer(settings, hidden, words):
    (layer,) = heads_of(encoder(**settings), ids(), None, {})
    assert layer.mask == words and torch.equal(layer.hidden, hidden.expand(1, L, L))
    assert layer.kv == list(settings.get("head_map", (0, 0, 1, 1)))
    check_sums(layer)


def test_keys_that_a_call_excludes_are_hidden():
    model = encoder(causal=True)
    excluded = torch.ones(1, 1, 1, L, dtype=torch.bool)
    excluded[..., 2] = False
    for inputs in ({"mask": excluded}, {"mask": torch.where(excluded, 0.0, -1e9)}, {"kv_lens": torch.tensor([4])}):
        (layer,) = heads_of(model, ids(), None, inputs)
        masked = (torch.arange(L) >= 4) if "kv_lens" in inputs else (torch.arange(L) == 2)
        wanted = (DISTANCE < 0) | masked
        assert torch.equal(layer.hidden, wanted.expand(1, L, L)) and layer.added is None
        assert layer.mask == "causal, keys that a mask excludes" and (layer.weights[:, wanted] == 0).all()


def test_a_mask_of_numbers_for_each_head_is_part_of_the_scores():
    mask = torch.randn(1, 4, L, L)
    mask[0, 1, :, 3] = -torch.inf
    (layer,) = heads_of(encoder(), ids(), None, {"mask": mask})
    assert layer.hidden.shape == (4, L, L) and layer.hidden.sum() == L and layer.hidden[1, :, 3].all()
    check_sums(layer)


def test_a_layer_that_selects_keys_hides_the_others():
    attention = attnpack.SparseAttention(16, 4, 2, selector="indexer", top_k=2, causal=True)
    block = attnpack.EncoderBlock(attention, attnpack.FeedForward(16, 32))
    (layer,) = heads_of(attnpack.Encoder([block]).eval(), torch.randn(1, L, 16), None, {})
    assert layer.selects and layer.mask == "causal, keys that are not selected"
    assert ((~layer.hidden).sum(-1) == torch.arange(1, L + 1).clamp(max=2)).all()
    check_sums(layer)


@pytest.mark.parametrize("path", ["auto", "absorbed"])
def test_latent_attention(path):
    sizes = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "path": path}
    model = attnpack.CausalLM(50, 32, 1, 4, hidden_dim=48, latent=sizes).eval()
    (layer,) = heads_of(model, ids(), None, {"positions": torch.arange(L) * 3})
    assert layer.kv == ([0] * 4 if path == "absorbed" else [0, 1, 2, 3])
    check_sums(layer)


def test_differential_attention():
    for version in (1, 2):
        attention = attnpack.DifferentialAttention(16, 2, 2, version=version, causal=True)
        block = attnpack.EncoderBlock(attention, attnpack.FeedForward(16, 32))
        (layer,) = heads_of(attnpack.Encoder([block]).eval(), torch.randn(1, L, 16), None, {})
        assert len(layer.weights) == attention.query_heads
        check_sums(layer)


def test_self_attention_of_a_decoder_alone():
    """Cross-attention has keys of another sequence; an EncoderDecoder's target is not the tokens of the page."""
    parts = [attnpack.MultiHeadAttention(16, 2) for _ in range(2)]
    block = attnpack.DecoderBlock(parts[0], attnpack.FeedForward(16, 32), cross_attention=parts[1])
    inputs = {"context": torch.randn(1, L, 16)}
    (layer,) = heads_of(attnpack.Decoder([block]).eval(), torch.randn(1, L, 16), None, inputs)
    assert layer.mask == "causal"
    check_sums(layer)


class Own(torch.nn.Module):
    """A user's model: its layer is called twice, once by a keyword, and it reads the weights itself."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(20, 16)
        self.attention = attnpack.MultiQueryAttention(16, 4)
        self.projected = attnpack.ProjectedAttention(2, 2, 8, causal=True)

    def forward(self, ids):
        x = self.embed(ids)
        x, self.weights = self.attention(x, need_weights=True)
        return self.projected(x, x, x) + self.attention(x=x, causal=True)


def test_a_model_of_ones_own():
    model = Own().eval()
    with torch.no_grad():
        before = model(ids())
    layers = heads_of(model, ids(), None, {})
    assert [layer.mask for layer in layers] == ["not causal", "causal", "causal"]
    assert [layer.kv for layer in layers] == [[0] * 4, [0, 1], [0] * 4]
    assert torch.equal(layers[0].weights, model.weights[0])
    with torch.no_grad():
        assert torch.equal(model(ids()), before), "hooks are gone"
    for layer in layers:
        check_sums(layer)
    assert [layer.number for layer in heads_of(model, ids(), [2, 0], {})] == [2, 0]
    with pytest.raises(ValueError, match="layers: got 3, want 0 to 2"):
        heads_of(model, ids(), [3], {})


def test_keys_of_another_layer():
    class Shares(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(attnpack.GroupedQueryAttention(16, 4, 2, causal=True) for _ in range(2))

        def forward(self, x):
            cache = attnpack.DynamicCache()
            return self.layers[1](self.layers[0](x, cache=cache), kv_from=cache)

    first, second = heads_of(Shares().eval(), torch.randn(1, L, 16), None, {})
    check_sums(first)
    assert second.query is second.key is None and second.kv == [0, 0, 1, 1] and second.mask == "causal"


def test_hooks_are_gone_after_an_error():
    model = encoder()
    with pytest.raises(ZeroDivisionError), watching(model, lambda *_: 1 / 0):
        model(ids())
    model(ids())


SIZES = {"vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
GQA = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
WINDOW = DISTANCE > 2
MODELS = {
    "Llama": (GQA, 2, [DISTANCE < 0] * 2),
    "GPT2": ({"vocab_size": 20, "n_embd": 32, "n_layer": 2, "n_head": 4}, 4, [DISTANCE < 0] * 2),
    "Gemma2": (
        {**GQA, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
        2,
        [(DISTANCE < 0) | WINDOW, DISTANCE < 0],
    ),
    "GptOss": (
        {**GQA, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 2,
         "num_experts_per_tok": 1},
        2,
        [(DISTANCE < 0) | WINDOW, DISTANCE < 0],
    ),
    "Bert": (SIZES, 4, [DISTANCE > L] * 2),
}  # fmt: skip


def of_transformers(name, implementation="eager"):
    transformers = pytest.importorskip("transformers")
    settings, kv_heads, hidden = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings, attn_implementation=implementation)
    made = getattr(transformers, f"{name}Model")(config).eval()
    with torch.no_grad():
        for key, weight in made.named_parameters():
            weight.add_(0.3 * torch.randn_like(weight) if "norm" not in key else 0)
    return made, kv_heads, hidden


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name):
    """Their weights, with `eager`, are those of the page; and the model is as it was after it."""
    model, kv_heads, hidden = of_transformers(name)
    with torch.no_grad():
        wanted = model(ids(), output_attentions=True).attentions
    layers = heads_of(model, ids(), None, {})
    assert [layer.number for layer in layers] == [0, 1]
    for layer, weights, mask in zip(layers, wanted, hidden, strict=True):
        torch.testing.assert_close(layer.weights, weights[0], atol=1e-5, rtol=1e-4)
        assert torch.equal(layer.hidden, mask.expand(1, L, L))
        assert layer.kv == [head * kv_heads // 4 for head in range(4)]
        assert (layer.sinks is not None) == (name == "GptOss") and bool(layer.softcap) == (name == "Gemma2")
        check_sums(layer)
    assert model.config._attn_implementation == "eager"


def test_transformers_is_left_as_it_was():
    transformers = pytest.importorskip("transformers")
    import attnpack.hf

    model, *_ = of_transformers("Llama", "sdpa")
    with torch.no_grad():
        before = model(ids()).last_hidden_state
    attnpack.hf.unregister()
    heads_of(model, ids(), [1], {})
    assert "attnpack" not in transformers.AttentionInterface._global_mapping
    assert {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")} == {"sdpa"}
    with torch.no_grad():
        assert torch.equal(model(ids()).last_hidden_state, before)
    attnpack.hf.register()
    heads_of(model, ids(), [1], {})
    assert "attnpack" in transformers.AttentionInterface._global_mapping
    with pytest.raises(IndexError):
        heads_of(model, ids() + 100, None, {})
    assert model.config._attn_implementation == "sdpa"


def test_padding_and_replaced_layers_of_transformers():
    pytest.importorskip("transformers")
    import attnpack.hf

    model, *_ = of_transformers("Llama")
    padding = torch.tensor([[0, 1, 1, 1, 1, 1]])
    plain = heads_of(model, ids(), None, {"attention_mask": padding})
    assert torch.equal(plain[0].hidden, ((DISTANCE < 0) | (torch.arange(L) == 0)).expand(1, L, L))
    replaced = heads_of(attnpack.hf.replace_attention(model), ids(), None, {"attention_mask": padding})
    for mine, theirs in zip(replaced, plain, strict=True):
        torch.testing.assert_close(mine.weights, theirs.weights)
        assert torch.equal(mine.hidden, theirs.hidden) and mine.number == theirs.number
        check_sums(mine)


def test_a_model_that_keeps_its_own_attention_shows_its_weights():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}
    model = transformers.GPTNeoModel(transformers.GPTNeoConfig(**sizes, attn_implementation="eager")).eval()
    with torch.no_grad():
        wanted = model(ids(), output_attentions=True).attentions
    layers = heads_of(model, ids(), None, {})
    for layer, weights in zip(layers, wanted, strict=True):
        torch.testing.assert_close(layer.weights, weights[0])
        assert layer.mask == "causal" and layer.query is None and layer.kv == [0, 1, 2, 3]


def test_a_position_bias_is_part_of_the_scores():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    model = transformers.T5EncoderModel(transformers.T5Config(**sizes)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    for layer in heads_of(model, ids(), None, {}):
        assert layer.mask == "not causal" and layer.added.shape == (4, L, L)
        check_sums(layer)


def test_values_give_the_output_of_the_layer():
    """weights times values is what the layer projects: with grouped and with transformers' heads."""
    model, seen = encoder(head_map=(1, 0, 0, 1)), []
    attention = model.layers[0].self_attn
    attention.register_forward_hook(lambda module, args, out: seen.append(out))
    (layer,) = heads_of(model, ids(), None, {})
    output = layer.weights @ layer.value[torch.tensor(layer.kv)]
    with torch.no_grad():
        projected = attention.o_proj(output.transpose(0, 1).flatten(1))
    torch.testing.assert_close(projected, seen[0][0][0], atol=1e-5, rtol=1e-4)
    llama, *_ = of_transformers("Llama")
    llama.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    second = heads_of(llama, ids(), None, {})[1]
    output = second.weights @ second.value[torch.tensor(second.kv)]
    torch.testing.assert_close(output.transpose(0, 1).flatten(1), seen[-1][0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("version", [1, 2])
def test_values_of_other_heads_than_the_keys_are_left_out(version):
    attention = attnpack.DifferentialAttention(16, 2, 2, version=version, causal=True)
    block = attnpack.EncoderBlock(attention, attnpack.FeedForward(16, 32))
    (layer,) = heads_of(attnpack.Encoder([block]).eval(), torch.randn(1, L, 16), None, {})
    assert layer.value is None or layer.value.size(0) == layer.key.size(0) == max(layer.kv) + 1


def layer_with(weights, number=0):
    hidden = torch.zeros(1, *weights.shape[1:], dtype=torch.bool)
    return Heads(number, weights, hidden, "", [0] * len(weights), *[None] * 3, 1.0, 0.0, None, None, None, False)


def test_findings_are_the_clearest_heads():
    """Heads that were made to have one habit each are found, with the mean share over the queries that can show it."""
    tokens = ["a", "b", "c", "a", "b", "d"]
    before = torch.where(DISTANCE == 1, 0.9, 0.02)
    itself = torch.where(DISTANCE == 0, 0.8, 0.04)
    follows = torch.full((L, L), 0.05)
    follows[3, 1] = 0.7  # the second a reads b, which followed the first a
    follows[4, 2] = 0.5
    far = torch.full((L, L), 0.1)
    far[5, 1] = 0.6
    found = {each.habit: each for each in find([layer_with(torch.stack([before, far])),
                                                layer_with(torch.stack([itself, follows]), 1)], tokens)}  # fmt: skip
    names = ["what followed the same token before", "an earlier word", "the token before", "itself"]
    assert list(found) == names
    picked = {name: each[1:5] for name, each in found.items()}
    assert picked[names[0]] == (1, 1, 3, 1) and found[names[0]].share == pytest.approx(0.6)
    assert picked[names[1]] == (0, 1, 5, 1) and found[names[1]].share == pytest.approx(0.6)
    assert picked[names[2]][:2] == (0, 0) and found[names[2]].share == pytest.approx(0.9)
    assert picked[names[3]][:2] == (1, 0) and found[names[3]].share == pytest.approx(0.8)


def test_without_a_habit_the_largest_weight_is_found():
    weights = torch.full((2, L, L), 0.1)
    weights[1, 2, 4] = 0.2
    (only,) = find([layer_with(weights)], list("abcdef"))
    assert only[1:5] == (0, 1, 2, 4) and only.share == pytest.approx(0.2)
    for tokens in (["a"], ["a", "b"]):
        assert find([layer_with(torch.ones(1, len(tokens), len(tokens)))], tokens)
