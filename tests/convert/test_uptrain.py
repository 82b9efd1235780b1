"""`attnpack uptrain`: a tiny converted model learns from its original; training resumes; weights are written whole."""

import json
import re
import signal
import subprocess
import sys

import attnpack
import pytest
import torch
from attnpack.tools import cli
from hf_checkpoints import MHA, random_model
from marks import long
from transformers import AutoModelForCausalLM, LlamaConfig
from uptrain_cases import arguments, check_it_goes_on, convert_tiny

STATE = "attnpack_uptrain.pt"


@pytest.fixture
def converted(tmp_path):
    return convert_tiny(tmp_path)


def weights(directory) -> dict[str, torch.Tensor]:
    return attnpack.CausalLM.from_hf(directory).state_dict()


def test_distillation_lowers_the_loss_and_transformers_opens_it(converted, capsys):
    before = weights(converted)
    assert cli.main(arguments(converted, "--json", "--learning-rate", 3e-3)) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["steps"] > 20 and report["loss_last"] < 0.8 * report["loss_first"]
    assert 2.9 < report["seconds"] < 20 and not report["resumed"] and report["written"]
    assert report["perplexity"] < 0.5 * report["perplexity_before"]
    after = weights(converted)
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert not torch.equal(
        after["model.layers.0.self_attn.k_proj.weight"], before["model.layers.0.self_attn.k_proj.weight"]
    )
    theirs, info = AutoModelForCausalLM.from_pretrained(converted, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.randint(96, (1, 20))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, attnpack.CausalLM.from_hf(converted)(ids), rtol=0, atol=1e-4)
    names = {path.name for path in converted.iterdir()}
    assert "model.safetensors" in names and not any(
        "-of-" in name or "partial" in name or name == STATE for name in names
    )
    assert json.loads((converted / "attnpack_convert.json").read_text())["uptrained"][0]["steps"] == report["steps"]


SLOW = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
from attnpack.tools import cli
from attnpack.convert.uptrain import command as uptrain
uptrain._SAVE_EVERY = 0.2
cli.main(sys.argv[1:-1] + ["--minutes", sys.argv[-1]])
"""


@pytest.mark.parametrize("number", [long(signal.SIGINT), signal.SIGKILL], ids=str)
def test_a_stopped_training_goes_on(number, converted, capsys):
    before = weights(converted)
    command = [sys.executable, "-c", SLOW, *arguments(converted), "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        printed = [process.stdout.readline() for _ in range(2)]
        while not (converted / STATE).is_file() and process.poll() is None:
            try:
                process.wait(0.2)
            except subprocess.TimeoutExpired:
                if number == signal.SIGINT:
                    break
        process.send_signal(number)
        try:
            process.wait(timeout=60)
        finally:
            process.kill()
    assert printed[0].startswith("loads and measures, trains for 60.0 minutes") and re.search(
        r"steps in the (59|60)\.\d minutes", printed[1]
    )
    assert (converted / STATE).is_file()
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(converted).items())
    done = torch.load(converted / STATE)["work"]["progress"]
    minutes = done["spent"] / 60 + 0.02
    capsys.readouterr()
    assert cli.main([*arguments(converted), "--minutes", str(minutes), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["resumed"] and report["steps"] > done["steps"] and not (converted / STATE).exists()


def test_it_goes_on_bit_by_bit(converted):
    """Three steps give the same as two steps, a save, a load, and one more step."""
    from attnpack.convert.uptrain.distill import Distillation

    ids = torch.randint(96, (500,))
    teacher = attnpack.CausalLM.from_hf(converted.parent / "in")

    def work():
        return Distillation(attnpack.CausalLM.from_hf(converted), teacher, ids, 32, 100.0, 1e-3, 0)

    check_it_goes_on(work, 3)


def test_what_became_worse_is_not_written(converted, capsys):
    before = weights(converted)
    worse = [*arguments(converted), "--learning-rate", "0.9", "--minutes", "0.01"]
    assert cli.main(worse) == 0
    printed = capsys.readouterr().out
    assert "That is worse than before, so" in printed and re.search("seconds? left", printed)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(converted).items())
    assert cli.main([*worse, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["resumed"] and not report["written"] and report["perplexity"] > report["perplexity_before"]
    assert cli.main([*worse, "--learning-rate", "0.001"]) == 2
    assert "is of a training with another learning_rate" in capsys.readouterr().err
    assert cli.main([*worse, "--learning-rate", "0.001", "--restart"]) == 0
    assert "That is worse" not in capsys.readouterr().out and not (converted / STATE).exists()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: (d.parent / "text.txt").write_text("short"), "want at least 260"),
        (lambda d: (d / "attnpack_convert.json").unlink(), "has no attnpack_convert.json that names its original"),
        (lambda d: (d.parent / "in").rename(d.parent / "gone"), "is there no more; give it as --teacher"),
        (lambda d: (d / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda d: (d / STATE).write_bytes(b"x"), "cannot be read"),
        (lambda d: torch.save({"about": {"seed": 3}}, d / STATE), "is of a training with another"),
        (lambda d: (d / "config.json").unlink(), "has no config.json"),
    ],
    ids=["text", "record", "teacher", "tokenizer", "state", "other", "config"],
)
def test_what_does_not_fit_is_one_sentence(damage, words, converted, capsys):
    damage(converted)
    before = {path.name: path.stat().st_mtime_ns for path in converted.iterdir()}
    capsys.readouterr()
    assert cli.main(arguments(converted)) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("attnpack uptrain: ") and printed.err.count("\n") == 1 and words in printed.err
    assert {path.name: path.stat().st_mtime_ns for path in converted.iterdir()} == before


def test_another_teacher_is_checked(converted, capsys):
    random_model(LlamaConfig(**{**MHA, "num_hidden_layers": 2})).save_pretrained(converted.parent / "other")
    assert cli.main(arguments(converted, "--teacher", converted.parent / "other")) == 2
    assert "has num_layers 2, the model to train 3" in capsys.readouterr().err
    (converted.parent / "empty").mkdir()
    for name, what in (("nowhere", "which is not there"), ("empty", "a directory without config.json")):
        assert cli.main(arguments(converted, "--teacher", converted.parent / name)) == 2
        wanted = f"--teacher: got {converted.parent / name}, {what}; give the original, a Hugging Face directory or a"
        assert wanted in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(arguments(converted, "--minutes", "0"))
    assert cli.main(arguments(converted, "--learning-rate", "-1")) == 2
