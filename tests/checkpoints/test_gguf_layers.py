"""GGUF files of models whose layers differ in more than a window: Gemma 4 and Llama 4, written as llama.cpp's converter
writes them, against transformers."""

import copy
import os

import attnpack
import gguf_models
import numpy as np
import pytest
import torch
import transformers
from attnpack.checkpoints.gguf import GgufCheckpoint
from families import peer_from, with_noise
from newer_families import RMS

SIZES = {"vocab_size": 96, "embedding_length": 32, "feed_forward_length": 48, "context_length": 64, "block_count": 6,
         "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}  # fmt: skip
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention",
         "full_attention"]  # fmt: skip
ROPES = {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 900.0},
         "sliding_attention": {"rope_type": "default", "rope_theta": 70.0}}  # fmt: skip
GEMMA4 = RMS | {"num_hidden_layers": 6, "head_dim": 8, "global_head_dim": 16, "layer_types": KINDS, "sliding_window": 5,
                "rope_parameters": ROPES}  # fmt: skip
GEMMA4_KEYS = {
    "attention.key_length": 16, "attention.value_length": 16, "attention.key_length_swa": 8,
    "attention.value_length_swa": 8, "attention.sliding_window": 5, "rope.dimension_count": 16,
    "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in KINDS],
    "rope.dimension_count_swa": 8, "rope.freq_base": 900.0, "rope.freq_base_swa": 70.0,
}  # fmt: skip
LLAMA4 = RMS | {
    "num_hidden_layers": 6, "head_dim": 8, "intermediate_size": 20, "intermediate_size_mlp": 48,
    "num_local_experts": 4, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
}  # fmt: skip
LLAMA4_KEYS = {
    "attention.key_length": 8, "attention.value_length": 8, "rope.dimension_count": 8, "rope.freq_base": 700.0,
    "interleave_moe_layer_step": 2, "expert_feed_forward_length": 20, "expert_count": 4, "expert_used_count": 2,
}  # fmt: skip
SCALED = {"rope_type": "llama3", "rope_theta": 700.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip

# name: (architecture of GGUF, config class, its settings, metadata beside the sizes)
CASES = {
    "gemma4": (
        "gemma4", "Gemma4TextConfig",
        GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 6,
                  "vocab_size_per_layer_input": 96, "final_logit_softcapping": 2.0},
        GEMMA4_KEYS | {"attention.shared_kv_layers": 2, "feed_forward_length": [48] * 4 + [96] * 2,
                       "embedding_length_per_layer_input": 6, "final_logit_softcapping": 2.0},
    ),
    "gemma4_keys_as_values": (
        "gemma4", "Gemma4TextConfig",
        GEMMA4 | {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0},
        GEMMA4_KEYS | {"attention.head_count_kv": [2, 1] * 3, "attention.shared_kv_layers": 0,
                       "embedding_length_per_layer_input": 0},
    ),
    "llama4": (
        "llama4", "Llama4TextConfig",
        LLAMA4 | {"rope_parameters": SCALED, "attention_bias": True}, LLAMA4_KEYS,
    ),
    "llama4_all_experts": (
        "llama4", "Llama4TextConfig",
        LLAMA4 | {"interleave_moe_layer_step": 1, "num_experts_per_tok": 1, "tie_word_embeddings": True},
        LLAMA4_KEYS | {"interleave_moe_layer_step": 1, "expert_used_count": 1},
    ),
    "llama4_of_128_experts": (
        "llama4", "Llama4TextConfig",
        LLAMA4 | {"num_local_experts": 128, "use_qk_norm": False, "interleave_moe_layer_step": 4},
        LLAMA4_KEYS | {"expert_count": 128, "interleave_moe_layer_step": 4},
    ),
}  # fmt: skip


def case(name, **changes):
    """The architecture, the model of transformers, and the metadata and tensors of its file."""
    torch.manual_seed(0)
    arch, config, settings, metadata = CASES[name]
    given = getattr(transformers, config)(**copy.deepcopy(settings | changes))
    model = with_noise(peer_from(given))
    return arch, model, SIZES | metadata, gguf_models.tensors_of(model, arch)


@pytest.mark.parametrize("name", CASES)
def test_logits_and_tokens_equal_transformers(name, tmp_path):
    arch, theirs, metadata, tensors = case(name)
    gguf_models.check_against(theirs, gguf_models.write(tmp_path / "x.gguf", arch, metadata, tensors))


def test_keys_of_layers_that_read_others_are_not_read(tmp_path):
    """Files made of older checkpoints hold keys for these layers."""
    arch, theirs, metadata, tensors = case("gemma4")
    more = {
        t.replace("blk.2", "blk.4"): a for t, a in tensors.items() if t.startswith(("blk.2.attn_k", "blk.2.attn_v"))
    }
    assert len(more) == 3
    tensors |= {t: a * np.nan for t, a in more.items()}
    gguf_models.check_against(theirs, gguf_models.write(tmp_path / "x", arch, metadata, tensors))


def test_a_tensor_is_read_again_after_another_could_not_be(tmp_path):
    arch, _, metadata, tensors = case("gemma4")
    path = gguf_models.write(tmp_path / "x", arch, metadata, tensors)
    checkpoint, numbers = GgufCheckpoint(path), torch.empty(1)
    first, last = (f"model.layers.{layer}.tail.scalar" for layer in (0, 5))
    checkpoint.read(first, numbers)
    wanted = numbers.clone()
    os.truncate(path, checkpoint.file.tensors["blk.5.layer_output_scale.weight"].offset)
    with pytest.raises(ValueError, match=r"blk\.5\.layer_output_scale\.weight cannot be read"):
        checkpoint.read(last, numbers)
    checkpoint.read(first, numbers)
    assert torch.equal(numbers, wanted)


@torch.no_grad()
def test_chunks_and_growth_of_llama_4(tmp_path):
    """They begin behind 8191 tokens, which llama.cpp keeps in its code. Without them logits there differ by 0.004 and
    more."""
    arch, theirs, metadata, tensors = case("llama4_all_experts", num_hidden_layers=4, max_position_embeddings=8300)
    metadata |= {"block_count": 4, "context_length": 8300}
    ours = attnpack.CausalLM.from_gguf(gguf_models.write(tmp_path / "x", arch, metadata, tensors))
    theirs.set_attn_implementation("sdpa")
    ids = torch.randint(96, (1, 8210))
    torch.testing.assert_close(ours(ids)[:, 8180:], theirs(ids).logits[:, 8180:], rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gemma4", {"expert_count": 8}, "gemma4.expert_count = 8 is not supported"),
        ("gemma4", {"attention__value_length_swa": 4}, "value_length_swa is 4, wants 8, which is attention.key_length"),
        ("gemma4", {"rope__dimension_count_swa": 4}, "rope.dimension_count_swa is 4, wants 8, which is attention"),
        ("gemma4", {"rope__dimension_count": 8}, "gemma4.rope.dimension_count is 8, wants 16, which is head_dim"),
        ("gemma4", {"attention__shared_kv_layers": 6}, "shared_kv_layers is 6, wants less than block_count, 6"),
        ("gemma4", {"attention__shared_kv_layers": 5}, "leaves no layer of the kind of layer 1 with keys of its own"),
        ("gemma4", {"feed_forward_length": [48, 96]}, "feed_forward_length lists 2 counts, wants one for each of 6"),
        ("gemma4", {"attention__head_count_kv": [2, 0] * 3}, "head_count_kv is [2, 0, 2, 0, 2, 0], wants ints of at"),
        ("gemma4", {"attention__sliding_window_pattern": [True]}, "wants True or False for each of 6 layers"),
        ("gemma4", {"attention__scale": 0.5}, "gemma4.attention.scale = 0.5 is not supported"),
        ("llama4", {"attention__sliding_window": 0}, "attention.sliding_window is 0, wants 8192 or no such key"),
        ("llama4", {"attention__sliding_window": 4}, "attention.sliding_window is 4, wants 8192 or no such key"),
        ("llama4", {"expert_count": 2**31 - 1}, "llama4.expert_count is 2147483647, wants at most 4096"),
        ("llama4", {"expert_gating_func": 1}, "llama4.expert_gating_func = 1 is not supported"),
        (
            "llama4",
            {"expert_weights_norm": True},
            "llama4.expert_weights_norm = True is not supported yet, wants False",
        ),
        ("llama4", {"interleave_moe_layer_step": None}, "lacks llama4.interleave_moe_layer_step"),
        ("llama4", {"attention__temperature_scale": 0.5}, "llama4.attention.temperature_scale = 0.5 is not supported"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(name, changes, words, tmp_path):
    arch, _, metadata, tensors = case(name)
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    gguf_models.refused(gguf_models.write(tmp_path / "x", arch, metadata, tensors), words)


def test_gemma_4_without_divisors_is_refused(tmp_path):
    arch, _, metadata, tensors = case("gemma4")
    del tensors["rope_freqs.weight"]
    with pytest.raises(ValueError, match="lacks rope_freqs.weight, the divisors of layers without a window"):
        attnpack.CausalLM.from_gguf(gguf_models.write(tmp_path / "x", arch, metadata, tensors))
