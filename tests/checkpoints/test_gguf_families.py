"""GGUF files of the families beside Llama's, written as llama.cpp's converter writes them, against transformers."""

import copy

import gguf_models
import numpy as np
import pytest
import torch
import transformers
from attnpack.checkpoints.gguf import GgufCheckpoint
from families import peer_from, with_noise
from gguf_models import LAYER_NORM, refused
from transformers import AutoModelForCausalLM

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
NORM = {"rms_norm_eps": 1e-5}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 96, "layer_norm_epsilon": 1e-5}
FALCON = {k: v for k, v in SIZES.items() if k not in ("intermediate_size", "num_key_value_heads")}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}
EXPERTS = {"num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "rope_theta": 700.0, "factor": 4.0, "original_max_position_embeddings": 16}
TURNS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 300.0,
    "short_factor": [1.0, 1.2, 1.3, 1.4],
    "long_factor": [2.0, 5.0, 6.0, 7.0],
}
DEEPSEEK = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"} | NORM | EXPERTS
DEEPSEEK |= {"kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 9, "n_routed_experts": 6}
DEEPSEEK |= {"moe_intermediate_size": 16, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1}
DEEPSEEK |= {"topk_group": 1, "num_key_value_heads": 4, "routed_scaling_factor": 1.0}
LATENT = {"attention.kv_lora_rank": 10, "rope.dimension_count": 6, "leading_dense_block_count": 1}
LATENT |= {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 16, "expert_shared_count": 2}
PARTIAL = {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5}
WIDTHS = {"attention.key_length": 12, "attention.value_length": 12}
YARN_KEYS = {"rope.freq_base": 700.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
YARN_KEYS |= {"rope.scaling.original_context_length": 16}
GROWTH = {"llama_4_scaling_beta": 0.4, "mscale": 1.0, "mscale_all_dim": 1.0}
LATE = YARN | GROWTH | {"original_max_position_embeddings": 24}
MISTRAL4 = DEEPSEEK | {"q_lora_rank": 12, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
MISTRAL4_KEYS = LATENT | YARN_KEYS
MISTRAL4_KEYS |= {"attention.head_count_kv": 1, "attention.q_lora_rank": 12, "attention.key_length": 16,
                  "attention.value_length": 10, "attention.key_length_mla": 14, "attention.value_length_mla": 9,
                  "expert_group_count": 1, "expert_group_used_count": 1, "expert_weights_norm": True,
                  "rope.scaling.yarn_log_multiplier": 0.1, "rope.scaling.original_context_length": 24}  # fmt: skip
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 0.7}
GRANITE_KEYS = {"embedding_scale": 3.0, "residual_scale": 0.4, "attention.scale": 0.2, "logit_scale": 0.7}
GRANITE_KEYS |= {"rope.freq_base": 700.0}
ALL_FULL = {"sliding_window": None, "layer_types": ["full_attention"] * 4}

# name: (architecture of GGUF, config class, its settings, metadata beside the sizes)
CASES = {
    "gemma2": (
        "gemma2",
        "Gemma2Config",
        SIZES | NORM | ROPE | TURNS
        | {"head_dim": 12, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
        {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "attention.sliding_window": 5,
         "attention.key_length": 12, "attention.value_length": 12, "rope.freq_base": 700.0},
    ),
    "gemma3": (
        "gemma3",
        "Gemma3TextConfig",
        SIZES | NORM
        | {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 5,
           "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
           "rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 8.0},
                               "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
        {"attention.sliding_window": 5, "attention.sliding_window_pattern": 3, "attention.key_length": 12,
         "attention.value_length": 12, "rope.freq_base": 900.0, "rope.scaling.type": "linear",
         "rope.scaling.factor": 8.0},
    ),
    "phi3": (
        "phi3",
        "Phi3Config",
        SIZES | NORM | {"sliding_window": 7, "rope_parameters": LONG, "original_max_position_embeddings": 16},
        {"attention.sliding_window": 7, "rope.freq_base": 300.0, "rope.scaling.original_context_length": 16,
         "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(4) / np.log(16))), "rope.dimension_count": 8},
    ),
    "olmo2": ("olmo2", "Olmo2Config", SIZES | NORM | ROPE, {"rope.freq_base": 700.0}),
    "starcoder2": (
        "starcoder2",
        "Starcoder2Config",
        SIZES | ROPE | {"norm_epsilon": 1e-5, "sliding_window": None},
        {"rope.freq_base": 700.0},
    ),
    "gpt2": ("gpt2", "GPT2Config", GPT2, {}),
    "starcoder": ("starcoder", "GPTBigCodeConfig", GPT2, {"attention.head_count_kv": 1}),
    "falcon_7b": ("falcon", "FalconConfig", FALCON, {"attention.head_count_kv": 1}),
    "falcon_40b": (
        "falcon",
        "FalconConfig",
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"attention.head_count_kv": 2},
    ),
    "qwen3moe": (
        "qwen3moe",
        "Qwen3MoeConfig",
        SIZES | NORM | EXPERTS
        | {"head_dim": 12, "num_experts": 6, "moe_intermediate_size": 16, "norm_topk_prob": True},
        {"attention.key_length": 12, "attention.value_length": 12, "expert_count": 6, "expert_used_count": 2,
         "expert_feed_forward_length": 16},
    ),
    "gpt_oss": (
        "gpt-oss",
        "GptOssConfig",
        SIZES | NORM | EXPERTS | TURNS
        | {"head_dim": 8, "num_local_experts": 4, "rope_parameters": YARN | {"truncate": False}},
        {"attention.key_length": 8, "attention.value_length": 8, "expert_count": 4, "expert_used_count": 2,
         "expert_feed_forward_length": 48, "attention.sliding_window": 5, "rope.freq_base": 700.0,
         "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
    ),
    # The older form with attn_kv_b.
    "deepseek_v2_lite": (
        "deepseek2",
        "DeepseekV2Config",
        DEEPSEEK | {"q_lora_rank": None, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
        LATENT
        | {"attention.head_count_kv": 4, "attention.key_length": 14, "attention.value_length": 9,
           "rope.freq_base": 700.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
           "rope.scaling.original_context_length": 16, "rope.scaling.yarn_log_multiplier": 0.07},
    ),
    # The newer one with attn_k_b and attn_v_b, for absorbed heads.
    "deepseek_v3": (
        "deepseek2",
        "DeepseekV3Config",
        DEEPSEEK
        | {"q_lora_rank": 12, "n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5}
        | ROPE,
        LATENT
        | {"attention.head_count_kv": 1, "attention.q_lora_rank": 12, "attention.key_length": 16,
           "attention.value_length": 10, "attention.key_length_mla": 14, "attention.value_length_mla": 9,
           "expert_group_count": 2, "expert_group_used_count": 1, "expert_weights_norm": True,
           "expert_weights_scale": 1.5, "expert_gating_func": 2, "rope.freq_base": 700.0},
    ),
    # Its scores grow only behind the text, so the converter leaves the growth out.
    "mistral4": ("mistral4", "Mistral4Config", MISTRAL4 | {"rope_parameters": LATE}, MISTRAL4_KEYS),
    # Growth as files of the consolidated format have it.
    "mistral4_growth": (
        "mistral4",
        "Mistral4Config",
        MISTRAL4 | {"rope_parameters": YARN | GROWTH | {"original_max_position_embeddings": 6}},
        MISTRAL4_KEYS
        | {"rope.scaling.original_context_length": 6, "attention.temperature_scale": 0.4,
           "attention.temperature_length": 6},
    ),
    "olmo3": (
        "olmo2",
        "Olmo3Config",
        SIZES | NORM
        | {"sliding_window": 5, "layer_types": [*["sliding_attention"] * 3, "full_attention"],
           "rope_parameters": {"full_attention": YARN, "sliding_attention": ROPE["rope_parameters"]}},
        YARN_KEYS | {"attention.sliding_window": 5, "attention.sliding_window_pattern": [True, True, True, False]},
    ),
    "mixtral": (
        "llama",
        "MixtralConfig",
        SIZES | NORM | ROPE | EXPERTS | {"num_local_experts": 4},
        {"rope.freq_base": 700.0, "expert_count": 4, "expert_used_count": 2},
    ),
    "smollm3": ("smollm3", "SmolLM3Config", SIZES | NORM | ROPE, {"rope.freq_base": 700.0}),
    "granite": ("granite", "GraniteConfig", SIZES | NORM | ROPE | GRANITE, GRANITE_KEYS),
    "granite_without_rope": (
        "granite",
        "GraniteMoeHybridConfig",
        SIZES | NORM | ROPE | GRANITE
        | {"layer_types": ["attention"] * 4, "mamba_n_heads": 8, "num_local_experts": 0,
           "shared_intermediate_size": 48},
        GRANITE_KEYS | {"rope.scaling.finetuned": False},
    ),
    "granite_moe": (
        "granitemoe",
        "GraniteMoeHybridConfig",
        SIZES | NORM | ROPE | GRANITE
        | {"layer_types": ["attention"] * 4, "mamba_n_heads": 8, "num_local_experts": 4, "shared_intermediate_size": 20,
           "position_embedding_type": "rope"},
        GRANITE_KEYS | {"expert_count": 4, "expert_used_count": 2, "expert_shared_feed_forward_length": 20},
    ),
    "cohere2": (
        "cohere2",
        "Cohere2Config",
        SIZES | ROPE | {"layer_norm_eps": 1e-5, "sliding_window": 5, "logit_scale": 0.4},
        {"rope.freq_base": 700.0, "attention.sliding_window": 5, "logit_scale": 0.4},
    ),
    "glm4": (
        "glm4",
        "Glm4Config",
        SIZES | NORM | {"head_dim": 12, "rope_parameters": PARTIAL},
        WIDTHS | {"rope.freq_base": 700.0, "rope.dimension_count": 6},
    ),
    "exaone4": (
        "exaone4",
        "Exaone4Config",
        SIZES | NORM | ROPE | {"sliding_window": 5},
        {"rope.freq_base": 700.0, "attention.sliding_window": 5,
         "attention.sliding_window_pattern": [True, True, True, False]},
    ),
    "exaone4_all": ("exaone4", "Exaone4Config", SIZES | NORM | ROPE | ALL_FULL, {"rope.freq_base": 700.0}),
    "mistral3": (
        "mistral3",
        "Ministral3Config",
        SIZES | NORM | {"head_dim": 12, "rope_parameters": YARN | GROWTH | {"original_max_position_embeddings": 6}},
        YARN_KEYS | WIDTHS
        | {"attention.temperature_scale": 0.4, "rope.scaling.original_context_length": 6,
           "rope.scaling.yarn_log_multiplier": 1.0},
    ),
    "seed_oss": (
        "seed_oss",
        "SeedOssConfig",
        SIZES | NORM | ROPE | {"head_dim": 12},
        WIDTHS | {"rope.freq_base": 700.0},
    ),
    "hunyuan": (
        "hunyuan-dense",
        "HunYuanDenseV1Config",
        SIZES | NORM
        | {"head_dim": 12,
           "rope_parameters": {"rope_type": "dynamic", "rope_theta": 300.0, "alpha": 9.0, "factor": 1.0}},
        WIDTHS | {"rope.freq_base": float(300 * 9.0 ** (12 / 10))},
    ),
    "ernie4_5": (
        "ernie4_5",
        "Ernie4_5Config",
        SIZES | NORM | ROPE | {"head_dim": 12},
        WIDTHS | {"rope.freq_base": 700.0},
    ),
    "arcee": ("arcee", "ArceeConfig", SIZES | NORM | ROPE, {"rope.freq_base": 700.0}),
    "phi2": (
        "phi2",
        "PhiConfig",
        SIZES | {"layer_norm_eps": 1e-5, "rope_parameters": PARTIAL},
        {"rope.freq_base": 700.0, "rope.dimension_count": 4},
    ),
    "gptneox": (
        "gptneox",
        "GPTNeoXConfig",
        {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
        | {"layer_norm_eps": 1e-5, "rope_parameters": PARTIAL},
        {"rope.freq_base": 700.0, "rope.dimension_count": 4, "use_parallel_residual": True},
    ),
    "stablelm": (
        "stablelm",
        "StableLmConfig",
        SIZES | {"layer_norm_eps": 1e-5, "rope_parameters": PARTIAL, "use_qkv_bias": True},
        {"rope.freq_base": 700.0, "rope.dimension_count": 4, "use_parallel_residual": False},
    ),
    "minimax_m2": (
        "minimax-m2",
        "MiniMaxM2Config",
        SIZES | NORM | EXPERTS | {"head_dim": 12, "num_local_experts": 4, "rope_parameters": PARTIAL},
        WIDTHS
        | {"rope.freq_base": 700.0, "rope.dimension_count": 6, "expert_count": 4, "expert_used_count": 2,
           "expert_feed_forward_length": 48, "expert_gating_func": 2},
    ),
}  # fmt: skip
by_name = pytest.mark.parametrize("name", CASES)


def random_model(name):
    torch.manual_seed(0)
    _, config, settings, _ = CASES[name]
    return with_noise(peer_from(getattr(transformers, config)(**copy.deepcopy(settings))))


def write(path, name, model, without="nothing", tensors=None, **changes):
    """The file without some tensors, or with others, and with changed metadata; a change to None leaves a key out."""
    arch, _, settings, metadata = CASES[name]
    config = model.config
    values = {
        "vocab_size": config.vocab_size,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": settings.get("intermediate_size", 128),
        "context_length": config.max_position_embeddings,
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_epsilon" if arch in LAYER_NORM else "attention.layer_norm_rms_epsilon": 1e-5,
    }
    if "num_key_value_heads" in settings:
        values["attention.head_count_kv"] = settings["num_key_value_heads"]
    values |= metadata | {key.replace("__", "."): value for key, value in changes.items()}
    if tensors is None:
        tensors = gguf_models.tensors_of(model, arch, absorbed=name == "deepseek_v3" or arch == "mistral4")
    return gguf_models.write(path, arch, values, {t: array for t, array in tensors.items() if without not in t})


@by_name
def test_logits_and_tokens_equal_transformers(name, tmp_path):
    theirs = random_model(name)
    gguf_models.check_against(theirs, write(tmp_path / "model.gguf", name, theirs))


@pytest.mark.parametrize("name", ["gemma2", "starcoder2", "gpt2", "qwen3moe"])
def test_transformers_reads_the_same_weights(name, tmp_path):
    """The file is what other readers of GGUF take for that architecture."""
    model = random_model(name)
    write(tmp_path / "model.gguf", name, model)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", config=model.config).state_dict()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(theirs[key], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["mistral3", "seed_oss", "glm4"])
def test_queries_keys_and_values_in_one_tensor(name, tmp_path):
    """As the converter writes them with --fuse-qkv: also where rows are stored as pairs, and with biases."""
    theirs = random_model(name)
    tensors = gguf_models.tensors_of(theirs, CASES[name][0])
    for q in [tensor for tensor in tensors if ".attn_q." in tensor]:
        parts = [tensors.pop(q.replace("attn_q", f"attn_{part}")) for part in "qkv"]
        tensors[q.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
    gguf_models.check_against(theirs, write(tmp_path / "x", name, theirs, tensors=tensors))


def test_settings_that_are_not_honoured_are_refused_by_name(tmp_path):
    path = tmp_path / "model.gguf"
    model = random_model("qwen3moe")
    refused(write(path, "qwen3moe", model, expert_shared_count=2), "expert_shared_count = 2 is not supported")
    refused(write(path, "qwen3moe", model, expert_weights_scale=2.5), "expert_weights_scale = 2.5")
    refused(write(path, "qwen3moe", model, expert_used_count=None), "lacks qwen3moe.expert_used_count")
    pattern = {"attention__sliding_window": 5, "attention__sliding_window_pattern": [True]}
    refused(write(path, "olmo2", random_model("olmo2"), **pattern), "True or False for each of 4 layers")
    refused(write(path, "stablelm", random_model("stablelm"), use_parallel_residual=3), "use_parallel_residual is 3")
    minimax = random_model("minimax_m2")
    refused(write(path, "minimax_m2", minimax, expert_gating_func=1), "expert_gating_func = 1 is not supported")
    refused(write(path, "gpt2", random_model("gpt2"), attn_logit_softcapping=1.5), "attn_logit_softcapping")


def test_conversion_names_the_architecture(tmp_path):
    from attnpack.convert.checkpoint.sources import open_source

    path = write(tmp_path / "model.gguf", "olmo2", random_model("olmo2"))
    with pytest.raises(ValueError, match="architecture olmo2 is not supported; conversion knows llama, mistral"):
        open_source(path, None, False)


def test_rows_that_do_not_fit_are_refused(tmp_path):
    path, model = tmp_path / "model.gguf", random_model("starcoder")
    refused(write(path, "starcoder", model, attention__head_count_kv=2), "attn_qkv", "rows, its configuration asks for")
    phi3 = random_model("phi3")
    refused(write(path, "phi3", phi3, rope__dimension_count=4), "rope_factors_short.weight has shape [4]")
    refused(write(path, "phi3", phi3, attention__head_count_kv=4), "attn_qkv")


def test_halves_of_latent_heads_come_together(tmp_path):
    path, model = tmp_path / "model.gguf", random_model("deepseek_v3")
    for half, other in (("attn_k_b", "attn_v_b"), ("attn_v_b", "attn_k_b")):
        words = f"blk.0.{other}.weight comes with blk.0.{half}.weight, which the file lacks"
        refused(write(path, "deepseek_v3", model, without=half), words)
    tensors = gguf_models.tensors_of(model, "deepseek2", absorbed=True)
    tensors["blk.0.attn_v_b.weight"] = tensors["blk.0.attn_v_b.weight"][:, :, 1:]
    refused(
        write(path, "deepseek_v3", model, tensors=tensors),
        "attn_k_b.weight has shape [4, 10, 8], blk.0.attn_v_b.weight has shape [4, 9, 9], which its config",
    )
    refused(write(path, "deepseek_v3", model, nextn_predict_layers=1), "nextn_predict_layers = 1 is not supported")
    refused(write(path, "deepseek_v3", model, leading_dense_block_count="x"), "leading_dense_block_count is 'x'")
    refused(write(path, "deepseek_v3", model, expert_gating_func=3), "expert_gating_func = 3 is not supported")


@pytest.mark.parametrize(("arch", "largest"), [("gemma2", 46), ("gemma3", 62)])
def test_a_largest_gemma_scales_by_the_mean_width_of_a_head(arch, largest, tmp_path):
    """llama.cpp keeps that in its code; the file does not say it."""
    sizes = {"embedding_length": 4608, "attention.head_count": 32, "attention.key_length": 128}
    sizes |= {"attention.value_length": 128, "feed_forward_length": 8, "context_length": 8}
    sizes |= {"attention.layer_norm_rms_epsilon": 1e-5}
    for layers, width in ((largest, 144), (26, 128)):
        norms = {f"blk.{i}.attn_norm.weight": np.ones(4608, np.float32) for i in range(layers)}
        path = gguf_models.write(tmp_path / f"{layers}", arch, sizes | {"block_count": layers}, norms)
        assert GgufCheckpoint(path).config["scores"]["scale"] == width**-0.5
