"""attn_implementation="attnpack" against transformers' eager attention, on tiny random models of many families."""

import copy
import functools

import attnpack
import attnpack.hf
import pytest
import torch
import transformers
from hf_families import (
    DECODERS,
    ENCODER_DECODERS,
    FAMILIES,
    LATENT,
    VISION,
    backward,
    generated,
    inputs,
    logits,
    make_config,
    make_model,
    padding,
    set_attention,
    since,
    states,
)
from marks import grid, long, some_long
from torch._dynamo.utils import counters
from transformers import AttentionInterface, AttentionMaskInterface

attnpack.hf.register()

FP32 = {"rtol": 1e-4, "atol": 2e-5}
BF16 = 1e-2  # rtol and atol by which transformers compares eager and sdpa, in tests/test_modeling_common.py


_model = functools.lru_cache(maxsize=2)(make_model)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    """(family, model in fp32); built once for the tests of a family, which pytest runs one after the other."""
    return request.param, _model(request.param)


in_some_families = pytest.mark.parametrize("case", some_long(FAMILIES, [*FAMILIES][::4]), indirect=True)


def paddings(family):
    return ["none"] if family in VISION else ["none", "left", "right"]


def test_fp32_logits_equal_eager(case):
    family, model = case
    for kind in paddings(family):
        expected, found = (logits(model, family, name, padding(kind)) for name in ("eager", "attnpack"))
        torch.testing.assert_close(found, expected, **FP32, msg=lambda text, kind=kind: f"{kind} padding: {text}")
        assert not torch.equal(found, expected), "eager itself ran"


@in_some_families
def test_bf16_logits_equal_eager(case):
    """Weights as transformers draws them, and its rule: four of five tokens close, which leaves room for a
    router that the rounding sends another way."""
    family, _ = case
    model = make_model(family, spread=0.0).to(torch.bfloat16)
    for kind in paddings(family):
        expected, found = (logits(model, family, name, padding(kind)) for name in ("eager", "attnpack"))
        assert torch.isclose(found, expected, rtol=BF16, atol=BF16).all(-1).float().mean() >= 0.8


@in_some_families
def test_bf16_is_as_close_to_fp32_as_eager(case):
    family, model = case
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    for kind in paddings(family):
        truth = states(model, family, "eager", padding(kind))
        theirs, ours = (
            (states(rounded, family, name, padding(kind)) - truth).abs().mean(-1).median()
            for name in ("eager", "attnpack")
        )
        assert ours <= 2 * theirs


def test_these_models_show_a_wrong_mask(case):
    """Without its mask (for vision: its scores) attention gives logits far from eager's, so the comparison can fail."""
    family, model = case

    def wrong(module, query, key, value, attention_mask, **settings):
        if family in VISION:
            return attnpack.attention(query * 0, key, value).transpose(1, 2), None
        settings["is_causal"] = False
        return attnpack.hf.attention_forward(module, query, key, value, None, **settings)

    AttentionInterface.register("attnpack_wrong", wrong)
    AttentionMaskInterface.register("attnpack_wrong", attnpack.hf.mask)
    mask = padding("none" if family in VISION else "left")
    expected, found = (logits(model, family, name, mask) for name in ("eager", "attnpack_wrong"))
    assert (found - expected).abs().max() > 100 * FP32["atol"]


@grid(3, family=[*DECODERS, *LATENT, *ENCODER_DECODERS], kind=["none", "left", "right"])
def test_generate_equals_eager(family, kind):
    model = _model(family)
    expected, found = (generated(model, name, padding(kind)) for name in ("eager", "attnpack"))
    assert expected.size(1) >= 8
    assert torch.equal(found, expected)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["none", "left", "right"])
@pytest.mark.parametrize(
    "family",
    # transformers has no static cache for layers of deepseek_v4.
    sorted({*DECODERS, *LATENT, *ENCODER_DECODERS} - {"deepseek_v4"}),
)
def test_generate_with_a_static_cache_equals_eager(family, kind):
    model = _model(family)
    expected, found = (
        generated(model, name, padding(kind), cache_implementation="static") for name in ("eager", "attnpack")
    )
    assert torch.equal(found, expected)


# All kinds of attention: sliding windows of 6, sinks, soft caps, latents, cross-attention.
VARIED = "llama mistral gemma2 gemma3_text gpt_oss olmo3 qwen2 qwen3_moe deepseek_v3 t5".split()
CHOICES = {
    "static cache": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "prompt in chunks": {"prefill_chunk_size": 5},
    "no cache": {"use_cache": False},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize(
    "family, choice",
    # The encoder of an encoder-decoder takes the whole prompt.
    [(family, choice) for family in VARIED for choice in CHOICES if (family, choice) != ("t5", "prompt in chunks")],
)
def test_ways_to_generate_equal_eager(family, choice):
    """Sliding caches too: mistral, gemma and gpt-oss drop the keys before their window of 6."""
    model = _model(family)
    mask = padding("none", batch=1) if choice == "prompt lookup" else padding("left")
    expected, found = (generated(model, name, mask, **CHOICES[choice]) for name in ("eager", "attnpack"))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "gpt2"])
def test_gradients_equal_eager(family):
    model = make_model(family)
    gradients = []
    for name in ("eager", "attnpack"):
        backward(model, family, name)
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-3, atol=1e-5)


def test_selected_keys_are_the_only_ones():
    """deepseek_v32 attends the 4 keys that its indexer chooses; with all keys its logits differ."""
    mask = padding("none")
    some, every = (make_model("deepseek_v32", index_topk=keys) for keys in (4, 64))
    found = logits(some, "deepseek_v32", "attnpack", mask)
    torch.testing.assert_close(found, logits(some, "deepseek_v32", "eager", mask), **FP32)
    assert (found - logits(every, "deepseek_v32", "attnpack", mask)).abs().max() > 1e-3


def test_compiled_forward_is_one_graph():
    model = make_model("llama")
    batch = inputs("llama", padding("left"))
    real = batch["attention_mask"].bool()
    set_attention(model, "attnpack")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found, expected = (run(**batch, use_cache=False).logits[real] for run in (compiled, model))
    torch.testing.assert_close(found, expected, **FP32)


@pytest.mark.parametrize(
    ("family", "use_cache"),
    [
        ("gemma3n_text", True),
        long("gemma3n_text", False),
        long("gemma4_text", True),
        ("gemma4_text", False),
        long("gemma4_unified_text", True),
        long("gemma4_unified_text", False),
    ],
)
def test_layers_that_share_keys_compile(family, use_cache):
    """Where layers share keys, Gemma 4 keeps only the queries of `logits_to_keep`, and cuts their masks."""
    kinds = ["sliding_attention", "full_attention"]
    model = make_model(family, num_hidden_layers=4, num_kv_shared_layers=2, layer_types=kinds * 2)
    ids, settings = inputs("llama", padding("none"))["input_ids"], {"logits_to_keep": 3, "use_cache": use_cache}
    with torch.no_grad():
        expected = model(ids, **settings).logits
        set_attention(model, "attnpack")
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        found = [run(ids, **settings).logits for run in (model, compiled)]
    torch.testing.assert_close(found, [expected, expected], **FP32)


def test_generate_with_a_compiled_forward_makes_two_graphs():
    """One graph for the prompt and one for all steps; transformers makes their masks outside of the graphs."""
    model = make_model("llama")
    expected = generated(model, "attnpack", padding("left"), cache_implementation="static")
    torch._dynamo.reset()
    counters.clear()
    model.forward = torch.compile(model.forward, fullgraph=True, backend="eager")
    found = generated(model, "attnpack", padding("left"), cache_implementation="static")
    assert torch.equal(found, expected)
    assert counters["stats"]["unique_graphs"] == 2


def test_dropout_acts_in_training_with_torchs_generator():
    model = make_model("llama", attention_dropout=0.5)
    set_attention(model, "attnpack")
    batch = inputs("llama", padding("left"))

    def run(seed):
        torch.manual_seed(seed)
        return model(**batch).logits

    assert torch.equal(run(1), run(2))
    model.train()
    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


@pytest.mark.parametrize(
    "family, by",
    [("llama", "call"), ("llama", "config"), ("gpt2", "call"), ("gpt2", "config"), ("t5", "call"), ("bert", "config")],
)
def test_attentions_are_given_where_asked_for(family, by):
    """GPT-2 does not pass the caller's output_attentions to its layers, and no model passes that of its config."""
    model, found = make_model(family), []
    model.config.output_attentions = by == "config"
    asked = {"output_attentions": True} if by == "call" else {}
    for name in ("eager", "attnpack"):
        set_attention(model, name)
        with torch.no_grad():
            out = model(**inputs(family, padding("none")), **asked)
        found.append({key: value for key, value in out.items() if key.endswith("attentions")})
    assert 2 in map(len, found[0].values())
    torch.testing.assert_close(found[1], found[0], **FP32)


def test_attentions_of_padded_rows_equal_eager():
    model, found = _model("llama"), []
    for name in ("eager", "attnpack"):
        set_attention(model, name)
        with torch.no_grad():
            found.append(model(**inputs("llama", padding("right")), output_attentions=True).attentions)
    real = padding("right").bool()
    for expected, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours.transpose(1, 2)[real], expected.transpose(1, 2)[real], **FP32)


@pytest.mark.parametrize(
    "mask",
    [torch.ones(2, 3), torch.ones(2, 1, 3, 7).bool(), attnpack.hf.mask(2, 3, 7)],
    ids=["padding", "tensor", "ours"],
)
def test_a_mask_of_another_shape_is_refused(mask):
    heads = torch.zeros(2, 4, 3, 8)
    with pytest.raises(ValueError, match=r"attention_mask: got shape .* want \[batch, 1 or num_heads, 3, 3\]"):
        attnpack.hf.attention_forward(torch.nn.Module(), heads, heads, heads, mask)


def test_without_a_mask_attention_is_causal_from_the_first_key():
    """transformers' rule: for several queries, unless the module or the call says no; a single query sees all keys."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)
    module = torch.nn.Module()

    def attend(query, **settings):
        return attnpack.hf.attention_forward(module, query, key, key, None, **settings)[0].transpose(1, 2)

    causal, full = (attnpack.attention(query, key, key, causal=causal) for causal in (True, False))
    assert torch.equal(attend(query), causal)
    assert torch.equal(attend(query, is_causal=False), full)
    torch.testing.assert_close(attend(query[:, :, :1]), full[:, :, :1])
    module.is_causal = False
    assert torch.equal(attend(query), full)


@pytest.mark.parametrize("family", ["bigbird_pegasus", "bloom", "megatron-bert", "mpt"])
def test_a_model_with_attention_of_its_own_is_refused(family):
    """The model's code would read our bool mask as scores, or True as excluded."""
    model = make_model(family)
    model.config._attn_implementation_internal = "attnpack"  # as attn_implementation= of from_pretrained sets it
    with pytest.raises(ValueError, match="does not reach its attention; call model.set_attn_implementation"):
        model(**inputs(family, padding("left")))


@since("5.23")
def test_sinks_of_each_token_are_refused():
    model = make_model("inkling2_text")
    set_attention(model, "attnpack")
    with pytest.raises(ValueError, match="attnpack: sinks: got Tensor, which attnpack cannot honour"):
        model(**inputs("inkling2_text", padding("left")))


def test_readme_counts_the_families():
    assert len(FAMILIES) > 100


NO_FUNCTION = {
    "falcon": {},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "deberta-v2": {},
    "xlnet": {},
}


@pytest.mark.parametrize("family", NO_FUNCTION)
def test_a_model_that_asks_for_no_attention_function_is_left_as_it_was(family, monkeypatch):
    """README's words hold: a KeyError of transformers or no message when loaded, a warning when set afterwards."""
    config = make_config(family, **NO_FUNCTION[family])
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    warnings = []
    monkeypatch.setattr(transformers.modeling_utils.logger, "warning", warnings.append)
    set_attention(model, "attnpack")
    assert model.config._attn_implementation == "eager"
    assert any(text.startswith(f"{type(model).__name__} does not support setting its attention") for text in warnings)
    if family in ("falcon", "gpt_neo"):
        with pytest.raises(KeyError, match="attnpack"):
            transformers.AutoModel.from_config(config, attn_implementation="attnpack")
        return
    loaded = transformers.AutoModel.from_config(config, attn_implementation="attnpack").eval()
    loaded.load_state_dict(model.state_dict())
    batch = inputs("llama", padding("left"))
    assert torch.equal(loaded(**batch)[0], model(**batch)[0])
