"""from_hf for every family, in both languages: the model of transformers; what is not honoured is refused by name."""

import json

import attnpack
import pytest
import torch
import transformers
from attnpack._C import checkpoints
from families import FAMILIES, SIZES, peer_from, peer_of
from hf_checkpoints import edit_config, saved_once
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

TEXT = torch.randint(SIZES["vocab_size"], (2, 20), generator=torch.Generator().manual_seed(1))
EACH = pytest.mark.parametrize("name", FAMILIES)

# Settings that transformers' classes write, and that do not change the results of a loaded model.
HARMLESS = {
    "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "initializer_range", "use_cache",
    "transformers_version", "output_router_logits", "router_aux_loss_coef", "pretraining_tp", "resid_pdrop",
    "embd_pdrop", "attn_pdrop", "residual_dropout", "embedding_dropout", "hidden_dropout", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "reorder_and_upcast_attn",
    "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "num_nextn_predict_layers",
    "eod_token_id", "attention_dropout", "classifier_dropout", "router_jitter_noise",
    "tie_word_embeddings",  # where the file has a head of its own: test_partial_checkpoints.py
}  # fmt: skip
# Settings of layers that are refused.
MAMBA = {
    "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand",
    "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit",
}  # fmt: skip
NO_EXPERTS = {"num_experts", "top_k_experts", "moe_intermediate_size"}  # of Gemma 4
# Settings that follow from others in a family, or that transformers does not read either.
UNUSED = {
    "gemma3": {"_sliding_window_pattern"},  # layer_types say it
    "qwen2_windows": {"max_window_layers"},
    "gpt_bigcode": {"num_key_value_heads"},
    "gpt_bigcode_heads": {"num_key_value_heads"},
    "falcon_7b": {"num_kv_heads"},
    "falcon_in_turn": {"num_kv_heads", "num_ln_in_parallel_attn"},
    "deepseek_v2": {"head_dim", "qk_head_dim"},
    "deepseek_v3": {"head_dim", "qk_head_dim"},
    "qwen3_moe": {"use_sliding_window", "sliding_window"},  # each is off without the other
    "phi3": {"original_max_position_embeddings"},  # rope_parameters say it
    "falcon_40b": {"multi_query"},
    "smollm3": {"no_rope_layer_interval", "use_sliding_window", "sliding_window"},  # the layers' lists say it
    "smollm3_windows": {"no_rope_layer_interval", "use_sliding_window"},
    "exaone4": {"sliding_window_pattern"},
    "gpt_neox": {"is_decoder"},
    "mistral4": {"head_dim", "qk_head_dim"},
    "llama4": {"no_rope_layer_interval", "interleave_moe_layer_step"},
    "gemma4": NO_EXPERTS,
    "gemma4_keys_as_values": NO_EXPERTS | {"use_double_wide_mlp", "vocab_size_per_layer_input"},
    "granite_hybrid": MAMBA,
    "granite_hybrid_dense": MAMBA | {"num_experts_per_tok", "intermediate_size", "position_embedding_type"},
}


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    """Gives the directory of a family's checkpoint, which is written once."""
    return saved_once(tmp_path_factory, peer_of)


@pytest.fixture
def changed(directory_of, tmp_path):
    """Gives a directory with a family's weights and a changed config.json."""

    def directory(name, drop=(), **values):
        source = directory_of(name)
        (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
        (tmp_path / "config.json").write_text((source / "config.json").read_text())
        edit_config(tmp_path, drop=drop, **values)
        return tmp_path

    return directory


@EACH
def test_both_languages_load_the_model_of_transformers(name, directory_of):
    directory, peer = directory_of(name), peer_of(name)
    model = attnpack.CausalLM.from_hf(directory)
    native = checkpoints.causal_lm_from_hf(str(directory), torch.float32, None)
    with torch.no_grad():
        wanted = peer(TEXT).logits
        for logits in (model(TEXT), native.forward(TEXT)):
            torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    tokens = peer.generate(TEXT, max_new_tokens=6, do_sample=False)
    assert model.generate(TEXT, max_new_tokens=6, cache="sliding").equal(tokens)
    assert native.generate(TEXT, max_new_tokens=6).equal(tokens)
    ours, theirs = model.state_dict(), native.state_dict()
    assert ours.keys() == theirs.keys() and all(ours[key].equal(theirs[key]) for key in ours)


def test_heads_of_cohere_2_may_have_a_width_of_their_own(tmp_path):
    config = transformers.Cohere2Config(**FAMILIES["cohere2"].theirs, head_dim=12)
    peer = peer_from(config)
    peer.save_pretrained(tmp_path)
    native = checkpoints.causal_lm_from_hf(str(tmp_path), torch.float32, None)
    with torch.no_grad():
        for logits in (attnpack.CausalLM.from_hf(tmp_path)(TEXT), native.forward(TEXT)):
            torch.testing.assert_close(logits, peer(TEXT).logits, rtol=1e-4, atol=1e-4)


@EACH
def test_the_windows_of_the_layers_are_those_of_the_configuration(name, directory_of):
    settings = checkpoints.causal_lm_from_hf(str(directory_of(name)), torch.float32, None).resolved_layers()
    windows = [0 if layer["window"] in (None, [-1, -1]) else layer["window"][0] + 1 for layer in settings]
    assert windows == (FAMILIES[name].windows or [0, 0, 0])


def strange(value):
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + (1 if isinstance(value, int) else 0.37)
    return {str: "strange", list: ["strange"], dict: {"rope_type": "strange"}, type(None): 3}[type(value)]


@EACH
def test_every_setting_of_the_class_is_honoured_or_refused(name, directory_of, tmp_path):
    """Each setting that transformers writes for the family is changed in turn. Then the options differ, or it raises
    and says which setting."""
    source = directory_of(name)
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")

    def options(changed):
        (tmp_path / "config.json").write_text(json.dumps(changed))
        return checkpoints.HfCheckpoint(str(tmp_path), None).config

    usual = options(config)
    # transformers 5.17 writes partial_rotary_factor twice, and reads the one in rope_parameters only.
    written_twice = set(config.get("rope_parameters") or {})
    dropped = []
    for key, value in config.items():
        if key in HARMLESS | UNUSED.get(name, set()) | written_twice | {"model_type"}:
            continue
        try:
            if options(config | {key: strange(value)}) == usual:
                dropped.append(key)
        except ValueError as error:
            assert "attnpack" in str(error) or str(tmp_path) in str(error)
    assert not dropped


def test_a_setting_that_nobody_knows_is_refused_by_its_name(changed):
    with pytest.raises(ValueError, match=r"residual_multiplier = 0.5 in config.json is not known here"):
        attnpack.CausalLM.from_hf(changed("llama", residual_multiplier=0.5, other=None))


def test_the_kinds_of_layers_may_be_said_twice(changed):
    """Some configurations of Granite have transformers' list and that of older checkpoints."""
    directory = changed("granite_hybrid")
    kinds = json.loads((directory / "config.json").read_text())["layer_types"]
    before = attnpack.CausalLM.from_hf(directory).state_dict()
    edit_config(directory, layers_block_type=kinds)
    after = attnpack.CausalLM.from_hf(directory).state_dict()
    assert before.keys() == after.keys()


REFUSED = [
    ("falcon_7b", {"alibi": True}, "alibi = True"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
    ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit in config.json is not 7"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy' in config.json is not supported"),
    ("gemma2", {"hidden_activation": "relu"}, "hidden_activation 'relu' in config.json is not supported"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ("qwen3_moe", {"num_experts": 10**7, "num_local_experts": 10**7}, "wants 4096 at most"),
    ("phi3", {"quantization_config": {"bits": 4}}, "quantization_config ="),
    ("qwen2_windows", {"layer_types": ["sliding_attention"]}, "layer_types in config.json is"),
    ("phi", {"qk_layernorm": True}, "qk_layernorm = True"),
    ("phi", {"tie_word_embeddings": True}, "tie_word_embeddings = true"),
    ("stablelm", {"qk_layernorm": True}, "qk_layernorm = True"),
    ("mistral4", {"n_group": 2}, "n_group and topk_group in config.json are not 1"),
    ("gemma4", {"enable_moe_block": True}, "enable_moe_block = True"),
    ("gemma4", {"num_kv_shared_layers": 3}, "num_kv_shared_layers in config.json is 3, wants fewer than 3"),
    ("gemma4", {"num_kv_shared_layers": 2}, "leaves no layer of the kind of layer 1"),
    ("gemma4", {"layer_types": ["sliding_attention"] * 3}, "ends with 'sliding_attention'"),
    ("gemma4", {"per_layer_config": {"1": {"rope": 3}}}, "per_layer_config of layer 1"),
    ("llama4", {"attention_chunk_size": None}, "attention_chunk_size is null"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers in config.json has 1 numbers"),
    ("gemma3", {"attn_logit_softcapping": 3.0}, "attn_logit_softcapping = 3.0"),  # transformers does not apply it
    ("gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping in config.json is 0"),  # all logits are 0
    ("gemma3", {"final_logit_softcapping": 0}, "final_logit_softcapping in config.json is 0"),
    ("gemma4", {"final_logit_softcapping": 0.0}, "final_logit_softcapping in config.json is 0"),
    ("hunyuan", {"use_qk_norm": False}, "use_qk_norm = false in config.json is not supported"),
    *((name, {"rope_parameters": None}, "has no rope_parameters") for name in ("gpt_oss", "ministral3", "mistral4")),
]


@pytest.mark.parametrize("name, values, message", REFUSED)
def test_what_is_not_honoured_is_refused(name, values, message, changed):
    with pytest.raises(ValueError, match=message):
        attnpack.CausalLM.from_hf(changed(name, **values))


@pytest.mark.parametrize("name", ["gpt2", "phi3", "falcon_40b", "gpt_oss", "gpt_bigcode_heads"])
def test_a_fused_tensor_of_another_shape_is_named(name, directory_of, tmp_path):
    source = directory_of(name)
    tensors = load_file(source / "model.safetensors")
    fused = next(
        key for key in tensors if any(part in key for part in ("c_attn.weight", "qkv", "query_key", "gate_up_proj"))
    )
    save_file(tensors | {fused: tensors[fused][:-1, :-1].contiguous()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(ValueError, match=r"layers\.\d|\.h\.\d"):
        attnpack.CausalLM.from_hf(tmp_path)


def test_the_first_names_of_gpt2_and_further_layers_of_deepseek(directory_of, tmp_path):
    """GPT-2's first checkpoints have no "transformer." and hold their masks; DeepSeek-V3's have one layer more."""
    for name, change in (
        (
            "gpt2",
            lambda t: {k.removeprefix("transformer."): v for k, v in t.items()} | {"h.0.attn.bias": torch.ones(1)},
        ),
        ("deepseek_v3", lambda t: t | {"model.layers.3.eh_proj.weight": torch.ones(2)}),
    ):
        source, directory = directory_of(name), tmp_path / name
        directory.mkdir()
        save_file(change(load_file(source / "model.safetensors")), directory / "model.safetensors")
        (directory / "config.json").write_text((source / "config.json").read_text())
        with torch.no_grad():
            logits = attnpack.CausalLM.from_hf(directory)(TEXT)
            torch.testing.assert_close(logits, peer_of(name)(TEXT).logits, rtol=1e-4, atol=1e-4)


OLDER = {
    "gemma2": ({}, ["layer_types"]),
    "gpt_oss": ({"num_experts_per_tok": 2, "experts_per_token": 2}, ["layer_types"]),
    "gemma3": (
        {
            "sliding_window_pattern": 2,
            "rope_theta": 900.0,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        ["layer_types", "rope_parameters", "_sliding_window_pattern"],
    ),
    "phi3": (
        {
            "rope_theta": 300.0,
            "partial_rotary_factor": 0.5,
            "rope_scaling": {"type": "su", "short_factor": [1.0, 1.2], "long_factor": [2.0, 5.0]},
        },
        ["rope_parameters"],
    ),
    "starcoder2": ({"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True}, []),
    "deepseek_v2": ({"scoring_func": "softmax", "moe_layer_freq": 1, "seq_aux": True}, ["qk_head_dim", "head_dim"]),
    "smollm3": ({"max_window_layers": 28}, []),
    "hunyuan": ({"use_qk_norm": True, "use_cla": False}, []),
}


@pytest.mark.parametrize("name", OLDER)
def test_configurations_as_they_were_released(name, changed):
    """Settings by their older names, and those that were left to the class."""
    added, dropped = OLDER[name]
    directory = changed(name, drop=dropped, **added)
    with torch.no_grad():
        logits = attnpack.CausalLM.from_hf(directory)(TEXT)
        torch.testing.assert_close(logits, peer_of(name)(TEXT).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "tied"), [("gpt2", True), ("gemma2", True), ("phi3", False)])
def test_heads_are_tied_as_the_class_says_where_the_configuration_does_not(name, tied, changed):
    directory = changed(name, drop=("tie_word_embeddings",))
    assert (attnpack.CausalLM.from_hf(directory).lm_head is None) == tied


# Settings that these families call otherwise. transformers ignores the usual name there, and takes its default.
IGNORED = {
    "gemma2": ({"hidden_act": "silu"}, "hidden_activation"),
    "gemma3": ({"hidden_act": "silu"}, "hidden_activation"),
    "falcon_7b": ({"hidden_act": "relu", "rms_norm_eps": 0.3}, "activation"),
    "starcoder2": ({"rms_norm_eps": 0.5}, "norm_epsilon"),
    "gpt2": ({"rms_norm_eps": 0.3}, "layer_norm_epsilon"),
}


@pytest.mark.parametrize("name", IGNORED)
def test_the_usual_name_of_a_setting_counts_where_it_does_for_transformers(name, changed):
    added, own = IGNORED[name]
    directory = changed(name, drop=(own,), **added)
    peer = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = attnpack.CausalLM.from_hf(directory)(TEXT)
        torch.testing.assert_close(logits, peer(TEXT).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "switch, value", [("attention_bias", "false"), ("tie_word_embeddings", "yes"), ("mlp_bias", 2)]
)
def test_a_switch_is_true_or_false(switch, value, changed):
    with pytest.raises(ValueError, match=f"{switch} in config.json is .*, wants true or false"):
        attnpack.CausalLM.from_hf(changed("llama", **{switch: value}))
