"""`attnpack uptrain` of checkpoints with latent attention: they learn from their original, and stay a DeepSeek-V3."""

import json

import attnpack
import pytest
import torch
from attnpack.convert.uptrain.distill import Distillation
from attnpack.tools import cli
from hf_checkpoints import random_model
from latent_checkpoints import FAMILIES
from transformers import AutoModelForCausalLM
from uptrain_cases import arguments, check_it_goes_on, convert_tiny_to_mla

STATE = "attnpack_uptrain.pt"


def distillation(student, teacher):
    """40 steps on the same random tokens."""
    ids = torch.randint(96, (65,), generator=torch.Generator().manual_seed(0))
    work = Distillation(attnpack.CausalLM.from_hf(student), attnpack.CausalLM.from_hf(teacher), ids, 64, 40.0, 3e-3, 0)
    for step in range(40):
        work.train_step()
        work.spent = float(step + 1)
    return work


@pytest.mark.parametrize("name", ["granite", "qwen2"])
def test_latents_learn_what_their_original_does(name, tmp_path):
    """granite: factors that lie in the weights; qwen2: biases, and so a query latent."""
    random_model(FAMILIES[name]).save_pretrained(tmp_path / "in")
    attnpack.convert.checkpoint_to_mla(tmp_path / "in", tmp_path / "out", 9, 4, tokens=0)
    losses = distillation(tmp_path / "out", tmp_path / "in").losses
    assert losses[-1] < 0.5 * losses[0]


def test_the_command_trains_by_a_teacher_and_transformers_opens_it(tmp_path, capsys):
    out = convert_tiny_to_mla(tmp_path, FAMILIES["qwen2"])
    before = attnpack.CausalLM.from_hf(out).state_dict()
    capsys.readouterr()
    teacher = ("--teacher", tmp_path / "in")
    assert cli.main(arguments(out, *teacher, "--json", "--learning-rate", 1e-3)) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["teacher"] == str(tmp_path / "in") and report["steps"] > 2
    assert report["written"] == (report["perplexity"] <= report["perplexity_before"])
    after = attnpack.CausalLM.from_hf(out).state_dict()
    changed = "model.layers.0.self_attn.kv_b_proj.weight"
    assert set(after) == set(before) and torch.equal(after[changed], before[changed]) != report["written"]
    theirs, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert theirs.config.model_type == "deepseek_v3" and not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.randint(96, (1, 40))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, attnpack.CausalLM.from_hf(out)(ids), rtol=0, atol=2e-3)
    # The state of another model's training is refused.
    torch.save({"about": {"latent": {"kv_lora_rank": 3}}}, out / STATE)
    assert cli.main(arguments(out, *teacher)) == 2
    assert "is of a training with another" in capsys.readouterr().err


def test_an_exact_conversion_begins_at_its_teacher(tmp_path):
    """At full rank the distillation has nothing to do: its first loss is a rounding error."""
    random_model(FAMILIES["llama"]).save_pretrained(tmp_path / "in")
    attnpack.convert.checkpoint_to_mla(tmp_path / "in", tmp_path / "out", 32, tokens=0)
    teacher = attnpack.CausalLM.from_hf(tmp_path / "in")
    student = attnpack.CausalLM.from_hf(tmp_path / "out")
    work = Distillation(student, teacher, torch.randint(96, (500,)), 64, 9.0, 1e-3, 0)
    work.train_step()
    assert work.losses[0] < 1e-4


def test_a_stopped_training_of_latents_goes_on_bit_by_bit(tmp_path):
    random_model(FAMILIES["qwen2"]).save_pretrained(tmp_path / "in")
    attnpack.convert.checkpoint_to_mla(tmp_path / "in", tmp_path / "out", 9, 4, tokens=0)
    teacher, ids = attnpack.CausalLM.from_hf(tmp_path / "in"), torch.randint(96, (500,))

    def work():
        return Distillation(attnpack.CausalLM.from_hf(tmp_path / "out"), teacher, ids, 32, 100.0, 1e-3, 0)

    check_it_goes_on(work, 2)
