"""Random GGUF files of every family: equal to transformers on the same weights, or refused. `scripts/fuzz.py ggufs`
draws any number."""

import random

import attnpack
import pytest
from fuzz import ggufs


def test_fifty_files():
    counts, wrong = ggufs.run(0, 50, 600)
    assert not wrong
    assert counts["equal"] > 35 and counts["refused"] > 2


@pytest.mark.long
def test_thousands_of_files():
    counts, wrong = ggufs.run(100_000, 3000, 1500)
    assert not wrong and counts["equal"] > 2000


@pytest.mark.parametrize("family", ggufs.FAMILIES)
def test_a_file_without_foreign_keys_is_read(family, tmp_path):
    """So that the random files do not pass by being refused."""
    outcomes = [ggufs.compare(family, ggufs.FAMILIES[family](random.Random(n)), {}, tmp_path / "x") for n in range(3)]
    assert ("equal", "") in outcomes and all(wrong == "" for _, wrong in outcomes)


CHANGING = {
    "attention.clamp_kqv": 8.0,
    "attention.key_length_swa": 3,
    "attention.output_scale": 0.5,
    "attention.shared_kv_layers": 1,
    "attention.value_length_swa": 3,
    "full_attention_interval": 2,
    "nextn_predict_layers": 1,
    "rope.dimension_count_swa": 2,
    "rope.dimension_sections": [1, 1],
    "rope.freq_base_swa": 30.0,
    "router_logit_softcapping": 2.0,
    "swiglu_clamp_exp": [0.5],
    "swin_norm": True,
}


@pytest.mark.parametrize("key", CHANGING)
def test_a_key_that_changes_the_mathematics_is_named(key, tmp_path):
    for family in ("llama", "qwen3moe"):
        file = ggufs.FAMILIES[family](random.Random(1))
        tensors = ggufs.gguf_models.tensors_of(ggufs.make_model(file), file.arch)
        ggufs.gguf_models.write(tmp_path / "x", file.arch, file.metadata | {key: CHANGING[key]}, tensors)
        with pytest.raises(ValueError, match=f"{file.arch}.{key}"):
            attnpack.CausalLM.from_gguf(tmp_path / "x")


@pytest.mark.parametrize(("key", "value"), [("expert_gating_func", 2), ("expert_weights_norm", False)])
def test_experts_that_are_weighted_otherwise_are_refused(key, value, tmp_path):
    file = ggufs.FAMILIES["qwen3moe"](random.Random(1))
    assert ggufs.compare("qwen3moe", file, {key: value}, tmp_path / "x") == ("refused", "")


def test_whether_weights_of_experts_are_normalised_is_a_bool(tmp_path):
    file = next(f for n in range(20) if (f := ggufs.FAMILIES["deepseek_v3"](random.Random(n))) and ggufs.make_model(f))
    tensors = ggufs.gguf_models.tensors_of(ggufs.make_model(file), file.arch, file.absorbed)
    ggufs.gguf_models.write(tmp_path / "x", file.arch, file.metadata | {"expert_weights_norm": 1}, tensors)
    with pytest.raises(ValueError, match="deepseek2.expert_weights_norm is 1, wants True or False"):
        attnpack.CausalLM.from_gguf(tmp_path / "x")


def test_a_factor_of_phi_3_comes_with_its_frequencies(tmp_path):
    files = (ggufs.FAMILIES["phi3"](random.Random(n)) for n in range(20))
    plain = next(file for file in files if "rope.scaling.attn_factor" not in file.metadata)
    for factor, outcome in ((1.0, "equal"), (1.5, "refused"), ([0.5], "refused")):
        assert ggufs.compare("phi3", plain, {"rope.scaling.attn_factor": factor}, tmp_path / "x") == (outcome, "")


@pytest.mark.parametrize(("value", "outcome"), [(False, "refused"), (2, "refused"), (True, "equal")])
def test_a_falcon_is_parallel(value, outcome, tmp_path):
    file = ggufs.FAMILIES["falcon"](random.Random(1))
    assert ggufs.compare("falcon", file, {"use_parallel_residual": value}, tmp_path / "x") == (outcome, "")


def test_sliding_layers_of_gemma_3_have_a_base_of_their_own(tmp_path):
    for seed in range(20):
        file = ggufs.FAMILIES["gemma3"](random.Random(seed))
        if file.metadata["rope.freq_base_swa"] == 70.0 and "sliding_attention" in file.settings["layer_types"]:
            assert ggufs.compare("gemma3", file, {}, tmp_path / "x") == ("equal", "")
