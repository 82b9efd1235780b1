"""attnpack.hf.replace_attention on small models of newer families, whose layers have gates, other norms, sinks, soft
caps, layers without RoPE, or indexers."""

import copy
import importlib

import attnpack
import attnpack.hf
import pytest
import torch
from attnpack.hf.layers.recurrent import RECURRENT
from attnpack.hf.recording import recording
from hf_families import backward, generated, inputs, logits, make_config, make_model, padding, since

FAMILIES = """
    qwen3_next qwen3_5_text qwen3_5_moe_text lfm3 laguna afmoe gpt_oss flint minimax_m2 olmo2 olmo3 flex_olmo
    minimax_m3_vl_text exaone4 exaone_moe kolibri1 smollm3 gemma2 gemma3_text cohere2 ernie4_5 ernie4_5_moe glm4 arcee
    dots1 glm4_moe granite granitemoe granite_swa granitemoe_swa hy_v3 mellum axk1 minicpm3 bailing_hybrid kimi_linear
    deepseek_v32 glm_moe_dsa
""".split()
# Those of test_layers.py.
OLDER = """
    llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe deepseek_v2 deepseek_v3 glm4_moe_lite youtu
""".split()


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    model = make_model(request.param)
    return request.param, model, attnpack.hf.replace_attention(copy.deepcopy(model))


@pytest.mark.parametrize("kind", ["none", "left"])
def test_logits_are_equal(pair, kind):
    family, theirs, ours = pair
    expected, found = logits(theirs, family, "eager", padding(kind)), logits(ours, family, "attnpack", padding(kind))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["none", "left"])
def test_generate_is_equal(pair, kind):
    _, theirs, ours = pair
    expected = generated(theirs, "eager", padding(kind))
    assert torch.equal(generated(ours, "attnpack", padding(kind)), expected)


def test_gradients_are_equal(pair):
    """For each parameter, which has its name still. An indexer's parameters have none."""
    family, theirs, ours = pair
    for model, name in ((theirs, "eager"), (ours, "attnpack")):
        backward(model, family, name)
    found = dict(ours.named_parameters())
    assert set(found) == {name for name, _ in theirs.named_parameters()}
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-3, atol=1e-5)


def test_the_model_gives_its_attentions(pair):
    family, theirs, ours = pair
    theirs.set_attn_implementation("eager")
    batch = inputs(family, padding("none"))
    with torch.no_grad():
        expected, found = (model(**batch, output_attentions=True).attentions for model in (theirs, ours))
    attend = attnpack.hf.hf_layers.KNOWN.keys() - RECURRENT.keys()  # recurrent layers have no attentions
    known = sum(type(module).__name__ in attend for module in theirs.modules())
    assert len(found) == len(expected) == known > 0
    if "_swa" not in family:  # their eager weights lack the sinks
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


@since("5.24")  # which has recurrent layers that are replaced
def test_every_known_class_is_tested():
    models = [make_model(family) for family in [*FAMILIES, *OLDER]]
    found = {type(module).__name__ for model in models for module in model.modules()}
    recurrent = {"Lfm2ShortConv", "OlmoHybridGatedDeltaNet", "Mamba2Mixer", "BambaMixer", "GraniteMoeHybridMambaLayer"}
    elsewhere = {"Step3p7Attention", *recurrent}  # below, and in test_recurrent_functions.py
    assert attnpack.hf.hf_layers.KNOWN.keys() - found == elsewhere


@torch.no_grad()
def test_the_text_model_of_step_3_7():
    modeling = importlib.import_module("transformers.models.step3p7.modeling_step3p7")
    config = make_config("step3p5", layer_types=["sliding_attention", "full_attention"])
    torch.manual_seed(0)
    theirs = modeling.Step3p7TextModel._from_config(config, attn_implementation="eager").eval()
    ours = attnpack.hf.replace_attention(copy.deepcopy(theirs))
    assert all(isinstance(layer.self_attn, attnpack.GroupedQueryAttention) for layer in ours.layers)
    batch = inputs("llama", padding("left"))
    expected, found = (model(**batch).last_hidden_state[padding("left").bool()] for model in (theirs, ours))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


SELECTING = {
    "deepseek_v32": {},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"]},
    "minimax_m3_vl_text": {"layer_types": ["minimax_m3_sparse"] * 2, "index_n_heads": 2, "index_block_size": 2,
                           "index_topk_blocks": 3, "index_local_blocks": 1},
}  # fmt: skip


@pytest.mark.parametrize("family", SELECTING)
def test_selected_keys_alone_are_read(family):
    """The operator gets them as numbers, by latent layers whose kv_b_proj is watched, and then called."""
    theirs = make_model(family, **SELECTING[family])
    kind = "right" if family == "minimax_m3_vl_text" else "left"  # it counts blocks from the first slot, padding too
    ours = attnpack.hf.replace_attention(copy.deepcopy(theirs))
    expected = logits(theirs, family, "eager", padding(kind))
    torch.testing.assert_close(logits(ours, family, "attnpack", padding(kind)), expected, rtol=1e-4, atol=2e-5)
    written = generated(theirs, "eager", padding("none"))
    assert torch.equal(generated(ours, "attnpack", padding("none")), written)
    for layer in ours.modules():
        if isinstance(layer, attnpack.MultiHeadLatentAttention):
            layer.kv_b_proj.register_forward_hook(lambda *_: None)
    with recording(ours) as calls:
        found = logits(ours, family, "attnpack", padding(kind))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    assert len(calls) == 2 and all(call.settings["key_index"].size(-1) < 7 for call in calls)


def test_packed_sequences_are_refused_by_layers_that_select():
    layer = attnpack.hf.replace_attention(make_model("deepseek_v32")).model.layers[0].self_attn
    x, table = torch.zeros(1, 6, 32), torch.zeros(1, 6, 8)
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match="indices: got keys that the model selected for packed sequences"):
        layer(x, position_embeddings=(table, table), cu_seq_lens_q=ends, cu_seq_lens_k=ends)


def test_a_layer_without_an_indexer_wants_a_selection():
    model = attnpack.hf.replace_attention(make_model("glm_moe_dsa", indexer_types=["full", "shared"]))
    layer = model.model.layers[1].self_attn
    x, table = torch.zeros(1, 6, 32), torch.zeros(1, 6, 8)
    with pytest.raises(ValueError, match="prev_topk_indices: got None for a layer without an indexer"):
        layer(x, position_embeddings=(table, table))


# No module of ours computes these layers: latent ones with more parts, other choices of keys, keys as values.
NOT_OURS = """
    axk2 deepseek_v4 diffllama dots3_note_text gemma4_text hunyuan_v1_dense hy_v4 longcat_flash mimo_v2_flash ministral3
    qwen4_exp_text
"""


@since("5.23")
@pytest.mark.parametrize("family", NOT_OURS.split())
def test_other_layers_are_left(family):
    model = make_model(family)
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=r"without a layer that replace_attention knows"):
        attnpack.hf.replace_attention(model)
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize("family", ["laguna", "gpt_oss", "deepseek_v32"])
def test_compiles_to_one_graph(family):
    model = attnpack.hf.replace_attention(make_model(family))
    batch = inputs(family, padding("left"))
    with torch.no_grad():
        expected = model(**batch, use_cache=False).logits
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(**batch, use_cache=False).logits
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=2e-5)
