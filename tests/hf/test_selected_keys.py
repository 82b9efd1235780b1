"""Models that select keys for each query and hand them over: they run sparse, and their results are eager's.

In transformers 5.23 deepseek_v32, glm_moe_dsa, hy_v4, axk2, mistral_large4, dots3_note hand over `indices`, and
minimax_m3_vl `block_indices`. glm5_next, deepseek_v4 and qwen4_exp build a mask of their own, and hand over only that:
they run dense.
"""

from __future__ import annotations

import functools

import attnpack
import attnpack.hf
import pytest
import torch
from attnpack.hf import attention_function
from hf_families import SIZES, generated, inputs, logits, make_model, padding
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

# Older releases of transformers, which scripts/matrix.sh takes too, lack some of these models.
dots3, minimax, mistral = (
    pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    for name in ("dots3_note", "minimax_m3_vl", "mistral_large4")
)

attnpack.hf.register()

FP32 = {"rtol": 1e-4, "atol": 2e-5}
KEYS = ["deepseek_v32", "glm_moe_dsa", "hy_v4", "axk2", "dots3_note", "mistral_large4"]
FAMILIES = [*KEYS, "minimax_m3_vl"]

_SMALL = {n: SIZES[n] for n in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                                "moe_intermediate_size", "vocab_size", "max_position_embeddings", "head_dim",
                                "num_experts_per_tok", "pad_token_id")}  # fmt: skip
_LATENT = _SMALL | {n: SIZES[n] for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank",
                                          "kv_lora_rank", "n_routed_experts", "n_shared_experts", "n_group",
                                          "topk_group", "first_k_dense_replace")}  # fmt: skip
_LATENT |= {"num_key_value_heads": 4, "index_topk": 4, "index_n_heads": 4, "index_head_dim": 16}


def _spread(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval()


@functools.lru_cache(maxsize=1)
def model_of(family):
    torch.manual_seed(0)
    if family == "dots3_note":
        return _spread(dots3.Dots3NoteForCausalLM._from_config(dots3.Dots3NoteTextConfig(**_LATENT)))
    if family == "minimax_m3_vl":
        config = minimax.MiniMaxM3VLTextConfig(
            **_SMALL, num_key_value_heads=2, num_local_experts=4, layer_types=["minimax_m3_sparse"] * 2,
            index_n_heads=2, index_head_dim=8, index_block_size=3, index_topk_blocks=2, index_local_blocks=1,
        )  # fmt: skip
        return _spread(minimax.MiniMaxM3VLForCausalLM._from_config(config))
    if family == "mistral_large4":
        config = mistral.MistralLarge4TextConfig(**_LATENT)
        config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        return mistral_model(config)
    return make_model(family, index_head_dim=16)


def mistral_model(config):
    """There is no language model of the text alone, so its states take the place of logits."""
    model = mistral.MistralLarge4TextModel._from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def outputs(model, family, implementation, mask):
    if family != "mistral_large4":
        return logits(model, "llama", implementation, mask)
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**inputs("llama", mask)).last_hidden_state[mask.bool()]


@pytest.fixture
def calls(monkeypatch):
    """The calls of the operator."""
    found = []

    def spy(query, key, value, mask=None, **settings):
        found.append({"mask": mask, "kv_len": key.size(2), **settings})
        return attnpack.attention(query, key, value, mask, **settings)

    monkeypatch.setattr(attention_function, "attention", spy)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_family_runs_sparse_and_equals_eager(family, calls):
    model = model_of(family)
    for kind in ("none", "right") if family == "minimax_m3_vl" else ("none", "left", "right"):
        calls.clear()
        expected, found = (outputs(model, family, name, padding(kind)) for name in ("eager", "attnpack"))
        torch.testing.assert_close(found, expected, **FP32)
        assert not torch.equal(found, expected), "eager itself ran"
        assert calls and all(call["key_index"].size(-1) * call["key_block"] < call["kv_len"] for call in calls)
        if family == "minimax_m3_vl":  # the indexers of the others read the whole mask, so it is there
            assert all(call["mask"] is None or call["mask"].size(2) == 1 for call in calls), "a dense mask was built"
            assert all(call["key_block"] == 3 and call["key_index"].size(1) == 2 for call in calls)


@pytest.mark.parametrize("family", FAMILIES)
def test_these_models_show_a_selection_that_is_ignored(family, monkeypatch):
    model = model_of(family)
    expected = outputs(model, family, "eager", padding("none"))
    monkeypatch.setattr(attention_function, "_selected_keys", lambda *_: {})
    found = outputs(model, family, "attnpack", padding("none"))
    assert (found - expected).abs().max() > 100 * FP32["atol"]


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"mistral_large4"}))
def test_generating_equals_eager(family, calls):
    model = model_of(family)
    expected, found = (generated(model, name, padding("none")) for name in ("eager", "attnpack"))
    assert torch.equal(found, expected)
    assert any(call["kv_len"] > 14 and "key_index" in call for call in calls)


@pytest.mark.parametrize("family", ["deepseek_v32", "minimax_m3_vl"])
def test_gradients_equal_eager(family):
    model, ids = model_of(family), inputs("llama", padding("none"))["input_ids"]
    gradients = []
    for name in ("eager", "attnpack"):
        model.zero_grad()
        model.set_attn_implementation(name)
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-3, atol=1e-5)


def test_a_text_with_no_more_keys_than_the_model_selects_runs_as_a_whole(calls):
    model = make_model("deepseek_v32", index_topk=64, index_head_dim=16)
    expected, found = (logits(model, "deepseek_v32", name, padding("none")) for name in ("eager", "attnpack"))
    torch.testing.assert_close(found, expected, **FP32)
    assert calls and not any("key_index" in call for call in calls)


@pytest.mark.parametrize("padded", ["none", "left"])
def test_deepseek_v4_equals_eager_where_entries_are_compressed(padded):
    """Its layers join the compressed entries to the keys, and columns of 0 and -inf to the mask."""
    torch.manual_seed(0)
    config = DeepseekV4Config(
        **_SMALL | {"num_hidden_layers": 3, "head_dim": 16}, q_lora_rank=16, n_routed_experts=4, o_groups=2,
        o_lora_rank=8, index_n_heads=2, index_head_dim=16, index_topk=3, sliding_window=8,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    )  # fmt: skip
    model, ids = _spread(DeepseekV4ForCausalLM(config)), torch.randint(1, 60, (2, 40))
    mask = torch.ones_like(ids)
    if padded == "left":
        mask[0, :5] = 0
    states, texts = [], []
    for name in ("eager", "attnpack"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            states.append(model(input_ids=ids, attention_mask=mask).logits[mask.bool()])
            texts.append(model.generate(ids[:, :20], attention_mask=mask[:, :20], max_new_tokens=8, do_sample=False))
    torch.testing.assert_close(states[1], states[0], **FP32)
    assert torch.equal(texts[1], texts[0])


def test_packed_sequences_refuse_selected_blocks_by_positions():
    """The model numbers blocks from the first slot on, so eager's choice is not that of separate calls."""
    model, ids = model_of("minimax_m3_vl"), torch.randint(1, 60, (1, 9))
    model.set_attn_implementation("attnpack")
    positions = torch.cat([torch.arange(4), torch.arange(5)])[None]
    with pytest.raises(ValueError, match="attnpack: block_indices: got blocks .* call it once per sequence"):
        model(input_ids=ids, position_ids=positions, use_cache=False)


def test_packed_sequences_refuse_selected_blocks():
    x = torch.randn(1, 2, 3, 8)
    index = torch.zeros(1, 1, 3, 1, dtype=torch.int64)
    packed = {"cu_seq_lens_q": torch.tensor([0, 1, 3]), "cu_seq_lens_k": torch.tensor([0, 1, 3])}
    module = torch.nn.Module()
    module.indexer = torch.nn.Module()
    module.indexer.block_size = 2
    with pytest.raises(ValueError, match="attnpack: block_indices: got blocks that the model selected for packed"):
        attnpack.hf.attention_forward(module, x, x, x, None, block_indices=index, **packed)
