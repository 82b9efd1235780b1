"""GGUF files of models with recurrent layers, written as llama.cpp's converter writes them, against transformers."""

import attnpack
import gguf
import gguf_models
import numpy as np
import pytest
import torch
from attnpack.checkpoints import gguf_file
from gguf_hybrids import hybrid_tensors
from hybrid_families import changed_peer

SIZES = {
    "vocab_size": 96,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "context_length": 64,
    "block_count": 3,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
LISTED = {"attention.head_count_kv": [0, 2, 0]}
SCALES = {"embedding_scale": 3.0, "residual_scale": 0.4, "attention.scale": 0.2, "logit_scale": 0.7}
MAMBA = {"ssm.conv_kernel": 4, "ssm.state_size": 6, "ssm.group_count": 1, "ssm.inner_size": 64,
         "ssm.time_step_rank": 8}  # fmt: skip
DELTA = {"ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 2, "ssm.inner_size": 36,
         "ssm.time_step_rank": 6, "full_attention_interval": 2, "rope.dimension_count": 4, "rope.freq_base": 500.0,
         "attention.key_length": 8, "attention.value_length": 8}  # fmt: skip
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_shared_feed_forward_length": 20}
LATENT = {"attention.head_count_kv": [0, 1, 0], "ssm.conv_kernel": 4, "kda.head_dim": 8, "attention.kv_lora_rank": 10,
          "rope.dimension_count": 8, "attention.key_length": 18, "attention.key_length_mla": 14,
          "attention.value_length_mla": 7, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 12,
          "expert_shared_count": 1, "leading_dense_block_count": 1, "expert_weights_scale": 2.446,
          "expert_gating_func": 2, "expert_group_count": 2, "expert_group_used_count": 1}  # fmt: skip
SIX_HEADS = {"linear_num_value_heads": 6}

# name: (architecture of GGUF, family of hybrid_families, its settings changed, metadata beside the sizes)
CASES = {
    "lfm2": (
        "lfm2", "lfm2", {"conv_bias": False},
        LISTED | {"feed_forward_length": 32, "shortconv.l_cache": 3, "rope.freq_base": 500.0},
    ),
    "lfm2_with_biases": (
        "lfm2", "lfm2", {},
        LISTED | {"feed_forward_length": 32, "shortconv.l_cache": 3, "rope.freq_base": 500.0},
    ),
    "granite_experts": (
        "granitehybrid", "granitemoehybrid", {"mamba_n_groups": 1, "position_embedding_type": None},
        LISTED | SCALES | MAMBA | EXPERTS | {"rope.scaling.finetuned": False},
    ),
    "granite_dense": (
        "granitehybrid", "granitemoehybrid",
        {"mamba_n_groups": 1, "num_local_experts": 0, "shared_intermediate_size": 48, "mamba_conv_bias": False},
        LISTED | SCALES | MAMBA | {"rope.dimension_count": 8},
    ),
    "qwen3_5": ("qwen35", "qwen3_5", SIX_HEADS, DELTA | {"rope.dimension_sections": [11, 11, 10, 0]}),
    "granite_groups": (
        "granitehybrid", "granitemoehybrid", {"num_local_experts": 0, "shared_intermediate_size": 48},
        LISTED | SCALES | MAMBA | {"ssm.group_count": 2},
    ),
    "lfm2moe": (
        "lfm2moe", "lfm2_moe", {},
        LISTED | EXPERTS | {"expert_feed_forward_length": 12, "leading_dense_block_count": 1, "shortconv.l_cache": 3,
                            "expert_gating_func": 2, "rope.freq_base": 500.0,
                            "expert_shared_feed_forward_length": None},
    ),
    "qwen3_5_moe": (
        "qwen35moe", "qwen3_5_moe", SIX_HEADS,
        DELTA | EXPERTS | {"rope.dimension_sections": [11, 11, 10, 0], "expert_feed_forward_length": 12,
                           "feed_forward_length": None},
    ),
    "kimi_linear": (
        "kimi-linear", "kimi_linear", {"linear_num_heads": 4},
        LATENT | {"attention.q_lora_rank": None},
    ),
    "kimi_linear_low_rank": (
        "kimi-linear", "kimi_linear",
        {"linear_num_heads": 4, "q_lora_rank": 12, "norm_topk_prob": True, "n_group": 1, "n_shared_experts": 2},
        LATENT | {"attention.q_lora_rank": 12, "expert_group_count": 1, "expert_shared_count": 2},
    ),
    "qwen3_next": (
        "qwen3next", "qwen3_next", SIX_HEADS | {"mlp_only_layers": []},
        DELTA | EXPERTS | {"expert_feed_forward_length": 12},
    ),
}  # fmt: skip
by_name = pytest.mark.parametrize("name", CASES)


def case(name):
    """The architecture, the model of transformers, and the metadata and tensors of its file."""
    arch, family, changes, metadata = CASES[name]
    model = changed_peer(family, **changes)
    return arch, model, SIZES | metadata, hybrid_tensors(model, arch)


@by_name
def test_logits_and_tokens_equal_transformers(name, tmp_path):
    arch, theirs, metadata, tensors = case(name)
    gguf_models.check_against(theirs, gguf_models.write(tmp_path / "x.gguf", arch, metadata, tensors))


def written(path, name, without="nothing", **changes):
    arch, _, metadata, tensors = case(name)
    metadata = metadata | {key.replace("__", "."): value for key, value in changes.items()}
    return gguf_models.write(path, arch, metadata, {t: array for t, array in tensors.items() if without not in t})


def test_listed_layers_and_layers_that_draft(tmp_path):
    """attention.recurrent_layers stands over the interval. Layers behind the last, which draft tokens, are not read."""
    arch, theirs, metadata, tensors = case("qwen3_5")
    drafts = {"blk.3.nextn.eh_proj.weight": np.full((32, 64), np.nan, np.float32)}
    drafts |= {f"blk.3.{t.removeprefix('blk.1.')}": array * np.nan for t, array in tensors.items() if "blk.1." in t}
    metadata |= {"block_count": 4, "nextn_predict_layers": 1, "full_attention_interval": 3}
    metadata["attention.recurrent_layers"] = [True, False, True, False]
    gguf_models.check_against(theirs, gguf_models.write(tmp_path / "x", arch, metadata, tensors | drafts))


def test_sources_of_one_tensor_come_together(tmp_path):
    for lacks, has in (("ssm_conv1d_k", "ssm_conv1d_q"), ("ssm_conv1d_q", "ssm_conv1d_k"), ("attn_v_b", "attn_k_b")):
        with pytest.raises(ValueError, match=rf"{has}.weight comes with blk.\d.{lacks}.weight, which the file lacks"):
            attnpack.CausalLM.from_gguf(written(tmp_path / "x", "kimi_linear", without=f"{lacks}.weight"))


def test_experts_in_one_tensor(tmp_path):
    """As the converter writes them with --fuse-gate-up-exps; convolutions without dims of 1, as quantised files may
    have them."""
    for name in ("qwen3_5_moe", "kimi_linear"):
        arch, theirs, metadata, tensors = case(name)
        for gate in [tensor for tensor in tensors if "ffn_gate_exps" in tensor]:
            both = [tensors.pop(gate), tensors.pop(gate.replace("gate", "up"))]
            tensors[gate.replace("gate", "gate_up")] = np.concatenate(both, 1)
        tensors = {t: array.squeeze() if "ssm_" in t else array for t, array in tensors.items()}
        gguf_models.check_against(theirs, gguf_models.write(tmp_path / "x", arch, metadata, tensors))


@torch.no_grad()
def test_each_source_is_read_once(tmp_path, monkeypatch):
    """The queries and their gate come of one tensor of the file. Python widens it here, which counts how often."""
    arch, _, metadata, tensors = case("qwen3_5")
    rows, counted = tensors["blk.1.attn_q.weight"].shape[0], []
    codes = np.random.default_rng(0).integers(0, 50, (rows, 18), dtype=np.uint8)
    path = gguf_models.write(tmp_path / "x", arch, metadata, tensors, {"blk.1.attn_q.weight": ("IQ4_NL", codes)})
    widen = gguf_file.widen
    monkeypatch.setattr(gguf_file, "widen", lambda kind, rows: (counted.append(len(rows)), widen(kind, rows))[1])
    attnpack.CausalLM.from_gguf(path)
    assert counted == [rows]


@pytest.mark.parametrize(
    ("name", "count"), [("lfm2", 18), ("qwen3_5", 21), ("qwen3_next", 21), ("lfm2moe", 11), ("kimi_linear", 24)]
)
@torch.no_grad()
def test_stored_weights_are_the_same(name, count, tmp_path):
    """Rows that change places do so as blocks; out_proj of Qwen3.5, whose columns do, becomes numbers."""
    arch, _, metadata, tensors = case(name)
    kind = gguf.GGMLQuantizationType.Q8_0
    wide = [t for t, array in tensors.items() if array.ndim == 2 and array.shape[1] == 32]
    blocks = {t: ("Q8_0", gguf.quants.quantize(tensors[t], kind)) for t in wide}
    path = gguf_models.write(tmp_path / "x.gguf", arch, metadata, tensors, blocks)
    stored = attnpack.CausalLM.from_gguf(path, weights="stored", dtype=torch.float64)
    assert sum(weight.dtype == torch.uint8 for weight in stored.state_dict().values()) == count
    expanded, ids = attnpack.CausalLM.from_gguf(path, dtype=torch.float64), torch.randint(96, (2, 9))
    torch.testing.assert_close(stored(ids), expanded(ids), rtol=1e-10, atol=1e-10)
    native = gguf_models.native_model(path, torch.float64, "stored").state_dict()
    assert all(torch.equal(native[key], weight) for key, weight in stored.state_dict().items())


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("lfm2", {"attention__head_count_kv": [0, 2]}, "head_count_kv lists 2 counts, wants one for each of 3 layers"),
        ("lfm2", {"attention__head_count_kv": [0, 2, 4]}, "head counts that differ from layer to layer"),
        ("lfm2", {"attention__head_count_kv": [0, 0, 0]}, "head counts that differ from layer to layer"),
        ("lfm2", {"attention__sliding_window": 8}, "sliding_window = 8 is not supported yet, wants no such key;"),
        ("lfm2", {"attention__causal": False}, "lfm2.attention.causal is False"),
        ("lfm2", {"shortconv__l_cache": None}, "lacks lfm2.shortconv.l_cache"),
        ("granite_dense", {"ssm__group_count": 2}, "conv1d.weight has shape [76, 1, 4], its configuration asks"),
        ("granite_groups", {"ssm__group_count": 3}, "num_groups: got 3, which does not divide num_heads 8"),
        ("lfm2moe", {"expert_gating_func": 1}, "lfm2moe.expert_gating_func = 1 is not supported"),
        ("lfm2moe", {"expert_weights_scale": 2.0}, "expert_weights_scale = 2.0 is not supported yet, wants 0 or 1"),
        ("qwen3_5_moe", {"expert_shared_feed_forward_length": None}, "lacks qwen35moe.expert_shared_feed_forward"),
        ("kimi_linear", {"attention__head_count_kv": [0, 0, 0]}, "head counts that differ from layer to layer"),
        ("kimi_linear", {"attention__head_count_kv": [0, -1, 0]}, "head_count_kv is [0, -1, 0], wants ints of at"),
        ("kimi_linear", {"kda__head_dim": None}, "lacks kimi-linear.kda.head_dim"),
        ("kimi_linear", {"expert_gating_func": 3}, "kimi-linear.expert_gating_func = 3 is not supported"),
        (
            "granite_dense",
            {"ssm__time_step_rank": 7},
            "ssm.inner_size is 64, wants a multiple of ssm.time_step_rank, 7",
        ),
        ("granite_dense", {"rope__dimension_count": 4}, "rope.dimension_count is 4, wants 8, which is head_dim"),
        ("qwen3_5", {"attention__recurrent_layers": [True, False]}, "wants True or False for each of 3 layers"),
        ("qwen3_5", {"nextn_predict_layers": 3}, "nextn_predict_layers is 3, wants less than block_count, 3"),
        ("qwen3_5", {"ssm__group_count": 4}, "which its configuration does not fit"),
        ("qwen3_5", {"attention__key_length": 6}, "attn_q.weight has shape [64, 32], which"),
        ("qwen3_next", {"expert_weights_scale": 2.0}, "qwen3next.expert_weights_scale = 2.0 is not supported"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(name, changes, words, tmp_path):
    gguf_models.refused(written(tmp_path / "x", name, **changes), words)
