"""attnpack.hf.replace_attention: our modules in the place of transformers' layers, with the same parameters."""

import copy
import os
import sys

import attnpack
import attnpack.hf
import pytest
import torch
from attnpack.hf.layers.latent import _latent_mask_arguments
from hf_families import backward, generated, inputs, logits, make_model, padding
from processes import run_program

GROUPED = ["llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"]
FAMILIES = [*GROUPED, "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    """(family, transformers' model, the same one with our layers)."""
    model = make_model(request.param)
    return request.param, model, attnpack.hf.replace_attention(copy.deepcopy(model))


def layers(model):
    return [layer.self_attn for layer in model.model.layers]


@pytest.mark.parametrize("kind", ["none", "left", "right"])
def test_logits_are_equal(pair, kind):
    family, theirs, ours = pair
    kind_of_ours = attnpack.GroupedQueryAttention if family in GROUPED else attnpack.MultiHeadLatentAttention
    assert all(isinstance(layer, kind_of_ours) for layer in layers(ours))
    expected, found = logits(theirs, family, "eager", padding(kind)), logits(ours, family, "attnpack", padding(kind))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["none", "left"])
def test_generate_is_equal(pair, kind, cache):
    family, theirs, ours = pair
    expected = generated(theirs, "eager", padding(kind), cache_implementation=cache)
    assert torch.equal(generated(ours, "attnpack", padding(kind), cache_implementation=cache), expected)


def test_gradients_are_equal(pair):
    family, theirs, ours = pair
    for model, name in ((theirs, "eager"), (ours, "attnpack")):
        backward(model, family, name)
    found = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_parameters_are_the_same_objects_under_the_same_names(family):
    model = make_model(family)
    before = dict(model.named_parameters())
    state = model.state_dict()
    assert attnpack.hf.replace_attention(model) is model
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is parameter for name, parameter in before.items())
    model.load_state_dict(state, strict=True)
    assert model.config._attn_implementation == "attnpack"


def test_rope_of_any_kind_stays_the_models():
    theirs = make_model("llama", rope_parameters=LLAMA3)
    ours = attnpack.hf.replace_attention(copy.deepcopy(theirs))
    plain = make_model("llama")
    plain.load_state_dict(theirs.state_dict())
    expected = logits(theirs, "llama", "eager", padding("none"))
    torch.testing.assert_close(logits(ours, "llama", "attnpack", padding("none")), expected, rtol=1e-4, atol=2e-5)
    assert (logits(plain, "llama", "eager", padding("none")) - expected).abs().max() > 1e-3


def test_save_and_load_again(tmp_path):
    model = make_model("llama")
    expected = logits(model, "llama", "eager", padding("none"))
    attnpack.hf.replace_attention(model).save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="attnpack")
    torch.testing.assert_close(logits(again, "llama", "attnpack", padding("none")), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "changes", [{"rope_interleave": False}, {"q_lora_rank": None}, {"attention_bias": True}], ids=str
)
def test_settings_of_latent_attention(changes):
    theirs = make_model("deepseek_v3", **changes)
    ours = attnpack.hf.replace_attention(copy.deepcopy(theirs))
    for kind in ("none", "left"):
        expected = logits(theirs, "deepseek_v3", "eager", padding(kind))
        found = logits(ours, "deepseek_v3", "attnpack", padding(kind))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
        assert torch.equal(generated(ours, "attnpack", padding(kind)), generated(theirs, "eager", padding(kind)))


def test_a_kv_b_proj_that_is_watched_or_replaced_is_called():
    """LoRA and quantised linears need the expanded path, which gives the same logits."""
    model = make_model("deepseek_v3")
    expected = logits(model, "deepseek_v3", "eager", padding("left"))
    attnpack.hf.replace_attention(model)
    calls = []
    for layer in layers(model):
        layer.kv_b_proj.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(
        logits(model, "deepseek_v3", "attnpack", padding("left")), expected, rtol=1e-4, atol=2e-5
    )
    assert len(calls) == 2


@pytest.mark.parametrize("offset", [0, 2, 7, torch.tensor([2, 2])], ids=str)
@pytest.mark.parametrize("q_len", [1, 3])
def test_latent_masks_say_what_their_ranges_say(q_len, offset):
    """One offset stays a tensor, as on CUDA."""
    mask = attnpack.hf.mask(2, q_len, 8, offset[0] if torch.is_tensor(offset) else offset)
    expected = mask.materialise()
    if torch.is_tensor(offset):
        mask.ranges = mask.ranges._replace(q_offset=offset)
    arguments = _latent_mask_arguments(mask, q_len, 8)
    query, key = torch.randn(2, 4, q_len, 8), torch.randn(2, 4, 8, 8)
    found = attnpack.attention(query, key, key, **arguments)
    torch.testing.assert_close(found, attnpack.attention(query, key, key, expected))


@pytest.mark.parametrize("kind", ["none", "left"])
def test_a_caller_makes_them_bidirectional(pair, kind):
    """is_causal, which transformers documents, makes an encoder of a decoder; its masks and layers read it."""
    family, theirs, ours = pair
    real, batch = padding(kind).bool(), inputs(family, padding(kind))
    if kind == "none":
        del batch["attention_mask"]
    theirs.set_attn_implementation("eager")
    with torch.no_grad():
        causal = theirs(**batch).logits[real]
        expected, found = (model(**batch, is_causal=False).logits[real] for model in (theirs, ours))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    assert (expected - causal).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_attentions_can_be_had_of_a_layer(family):
    theirs = make_model(family)
    ours = attnpack.hf.replace_attention(copy.deepcopy(theirs))
    found = []
    for model, name in ((theirs, "eager"), (ours, "attnpack")):
        model.set_attn_implementation(name)
        layers(model)[0].register_forward_hook(lambda _module, _args, out: found.append(out[1]))
        with torch.no_grad():
            model(**inputs(family, padding("none")), output_attentions=True)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("by", ["call", "config"])
@pytest.mark.parametrize("recorded_before", [False, True], ids=["new", "recorded before"])
def test_the_model_gives_its_attentions(pair, recorded_before, by):
    family, theirs, _ = pair
    theirs, ours, batch = copy.deepcopy(theirs), copy.deepcopy(theirs), inputs(family, padding("none"))
    theirs.set_attn_implementation("eager")
    for model in (theirs, ours):
        model.config.output_attentions = by == "config"
    asked = {"output_attentions": True} if by == "call" else {}
    with torch.no_grad():
        expected = theirs(**batch, **asked).attentions
        if recorded_before:
            ours(**batch, **asked)
        found = attnpack.hf.replace_attention(ours)(**batch, **asked).attentions
    assert len(found) == len(expected) == len(layers(ours))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


def test_replacing_again_changes_nothing():
    model = attnpack.hf.replace_attention(make_model("llama"))
    before = layers(model)
    assert attnpack.hf.replace_attention(model) is model
    assert layers(model) == before


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_compiles_to_one_graph(family):
    model = attnpack.hf.replace_attention(make_model(family))
    batch = inputs(family, padding("left"))
    with torch.no_grad():
        expected = model(**batch, use_cache=False).logits
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(**batch, use_cache=False).logits
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=2e-5)


SPLIT = """
import sys, torch, attnpack.hf, transformers

grouped, latent = (
    transformers.AutoModelForCausalLM.from_pretrained(f"{sys.argv[1]}/{name}", tp_plan="auto")
    for name in ("qwen3", "deepseek_v2")
)
attnpack.hf.replace_attention(grouped)
ids = torch.arange(3, 31).view(2, 14)
out = grouped(ids, labels=ids)
out.loss.backward()
norm = grouped.model.layers[0].self_attn.q_norm.weight.grad
if torch.distributed.get_rank() == 0:
    torch.save({"loss": out.loss.detach(), "logits": out.logits.detach(), "norm": norm}, sys.argv[1] + "/found")
layers = [type(layer.self_attn) for layer in latent.model.layers]
try:
    attnpack.hf.replace_attention(latent)
except ValueError as error:
    print(error)
assert [type(layer.self_attn) for layer in latent.model.layers] == layers
"""


@pytest.mark.long
def test_layers_split_by_tensor_parallelism(tmp_path):
    """Two processes with half of the heads each give the numbers and gradients of one; latent layers are refused."""
    model = make_model("qwen3")
    model.save_pretrained(tmp_path / "qwen3")
    make_model("deepseek_v2").save_pretrained(tmp_path / "deepseek_v2")
    ids = torch.arange(3, 31).view(2, 14)
    out = model(ids, labels=ids)
    out.loss.backward()
    (tmp_path / "split.py").write_text(SPLIT)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    process = run_program(
        sys.executable, *launch, tmp_path / "split.py", tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert process.returncode == 0, process.text
    assert "DeepseekV2Attention whose q_b_proj is split by tensor parallelism" in process.text
    expected = {"loss": out.loss, "logits": out.logits, "norm": model.model.layers[0].self_attn.q_norm.weight.grad}
    torch.testing.assert_close(torch.load(tmp_path / "found"), expected, rtol=1e-3, atol=2e-5)


def test_a_norm_that_is_watched_stays_the_models():
    model, calls = make_model("qwen3"), []
    watched = model.model.layers[0].self_attn.q_norm
    watched.register_forward_hook(lambda *_: calls.append(1))
    expected = logits(model, "qwen3", "eager", padding("left"))
    attnpack.hf.replace_attention(model)
    assert layers(model)[0].q_norm is watched and isinstance(layers(model)[1].q_norm, attnpack.RMSNorm)
    calls.clear()
    torch.testing.assert_close(logits(model, "qwen3", "attnpack", padding("left")), expected, rtol=1e-4, atol=2e-5)
    assert calls == [1]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_nested_tensor_is_named(family):
    layer = layers(attnpack.hf.replace_attention(make_model(family)))[0]
    x = torch.nested.nested_tensor([torch.zeros(2, 32), torch.zeros(3, 32)], layout=torch.jagged)
    table = torch.zeros(1, 3, 8)
    with pytest.raises(ValueError, match="attnpack: hidden_states is a nested tensor, wants a padded one"):
        layer(x, position_embeddings=(table, table))


def test_what_cannot_be_replaced_is_said():
    with pytest.raises(ValueError, match=r"model: got a BertForMaskedLM without a layer .*LlamaAttention"):
        attnpack.hf.replace_attention(make_model("bert"))
    with pytest.raises(TypeError, match="model is .*wants a model of transformers"):
        attnpack.hf.replace_attention(torch.nn.Linear(2, 2))


def test_a_cache_of_ours_and_a_cpp_twin_are_refused():
    layer = layers(attnpack.hf.replace_attention(make_model("llama")))[0]
    x, table = torch.zeros(1, 2, 32), torch.zeros(1, 2, 8)
    with pytest.raises(TypeError, match="is an attnpack DynamicCache, a replaced layer wants a cache of transf"):
        layer(x, (table, table), None, attnpack.DynamicCache())
    with pytest.raises(TypeError, match="no C.. twin, because the model rotates for it"):
        layer.cpp()
