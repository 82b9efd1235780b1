"""The examples in C++ that train, save and load whole models: built and run."""

import os
import re
import subprocess
from pathlib import Path

import attnpack
import pytest
import torch
from attnpack.tools.demo.mqa import run_mqa
from cpp_programs import EXAMPLES, cpp_program
from marks import long
from processes import ROOT, run_program
from stored_blocks import llama_file

PREFIX = Path(attnpack.__file__).parent


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, list[str]]:
    """The directory that `train` writes, and its lines."""
    folder = tmp_path_factory.mktemp("train")
    program, directory = cpp_program("train"), folder / "model"
    directory.mkdir()
    process = run_program(program, directory, env={"OMP_NUM_THREADS": "1"})
    assert process.returncode == 0, process.text
    return directory, process.stdout.splitlines()


def test_examples_are_built_as_hello_attention_is():
    """test_packaging.py builds that one by its own CMakeLists.txt, cpp_programs.py the others by copies of it."""
    texts = {path.parent.name: path.read_text().splitlines()[1:] for path in EXAMPLES.glob("*/CMakeLists.txt")}
    assert len(texts) == 8
    for name, lines in texts.items():
        assert lines == "\n".join(texts["hello_attention"]).replace("hello_attention", name).splitlines()


def counted(start: int, step: int, length: int) -> list[int]:
    return [(start + step * i) % 20 for i in range(length)]


def test_train_learns_to_count_and_python_opens_its_model(trained):
    directory, lines = trained
    losses = [float(line.split()[-1]) for line in lines]
    assert losses[0] > 2.5 and losses[-1] < 0.1
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors"]
    model = attnpack.CausalLM.from_hf(directory)
    prompt = torch.tensor([counted(start, step, 4) for start in range(20) for step in (1, 2, 3)])
    expected = torch.tensor([counted(start, step, 16) for start in range(20) for step in (1, 2, 3)])
    assert (model.generate(prompt, max_new_tokens=12) == expected).float().mean() > 0.99


def test_transformers_opens_what_train_writes(trained):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(trained[0]).eval()
    ids = torch.randint(20, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(attnpack.CausalLM.from_hf(trained[0])(ids), theirs(ids).logits, rtol=0, atol=1e-4)


def test_generate_gives_pythons_tokens_and_their_speed(trained, tmp_path):
    program, prompt = cpp_program("generate"), [3, 5, 7, 9]
    process = run_program(program, trained[0], 12, *prompt, env={})
    assert process.returncode == 0, process.text
    tokens = attnpack.CausalLM.from_hf(trained[0]).generate(torch.tensor([prompt]), max_new_tokens=12)
    assert list(map(int, process.stdout.split())) == tokens[0].tolist()
    assert float(process.stderr.split(" tokens per second")[0]) > 0
    missing = run_program(program, tmp_path / "none", 12, *prompt, env={})
    assert missing.returncode == 1
    assert (
        missing.stderr == f"{tmp_path / 'none'}: has no config.json; give the directory of a Hugging Face checkpoint\n"
    )


def test_generate_reads_gguf(tmp_path):
    path = llama_file(tmp_path / "model.gguf", ["Q8_0"])
    process = run_program(cpp_program("generate"), path, 6, 1, 2, 3, env={})
    assert process.returncode == 0, process.text
    model = attnpack.CausalLM.from_gguf(path, weights="stored")
    tokens = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=6)
    assert list(map(int, process.stdout.split())) == tokens[0].tolist()


def test_the_examples_say_which_libraries_give_ids():
    text = (ROOT / "examples/cpp/generate/main.cpp").read_text()
    assert "tokenizers-cpp" in text and "SentencePiece" in text


def test_the_multi_query_program_prints_the_lines_of_the_demo():
    """With the same seed C++ draws the same weights and inputs, so that every number is the same too."""
    process = run_program(cpp_program("mqa_notebook"))
    assert process.returncode == 0, process.text
    assert process.stdout == (ROOT / "examples/cpp/mqa_notebook/output.txt").read_text()
    said = []
    run_mqa(say=said.append)
    wanted = "\n".join(said).replace(", grad_fn=<SumBackward1>", "").splitlines()
    lines = process.stdout.splitlines()
    assert len(lines) > 150 and lines == wanted[: len(lines)]


@pytest.mark.long
def test_an_encoder_decoder_learns_to_write_backwards():
    process = run_program(cpp_program("encoder_decoder"), env={"OMP_NUM_THREADS": "1"})
    assert process.returncode == 0, process.text
    lines = process.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*(6 * ["step"]), "right"]
    assert float(lines[-1].split()[1]) > 99


@pytest.mark.long
def test_threads_share_a_model(trained):
    program = cpp_program("serve_threads")
    for arguments in ((), (trained[0],)):
        process = run_program(program, *arguments, env={})
        assert process.stdout == "12 requests, 3 threads, 12 answers as from one thread\n", process.text


@pytest.fixture(scope="module")
def distributed() -> Path:
    return cpp_program("distributed")


@pytest.mark.parametrize("ranks", [2, long(4)])
def test_processes_find_each_other_through_a_file_and_give_the_numbers_of_one(distributed, tmp_path, ranks):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    lines = [[distributed, str(rank), str(ranks), tmp_path / "store"] for rank in range(ranks)]
    processes = [subprocess.Popen(line, env=environment, text=True, stdout=-1, stderr=-1) for line in lines]
    for process in processes:
        text, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        found = re.fullmatch(r"heads (\S+) sequence (\S+) cache (\S+)\n", text)
        assert all(float(distance) < 1e-5 for distance in found.groups()), text


def test_a_process_that_is_alone_says_so(distributed, tmp_path):
    process = run_program(distributed, 0, 2, tmp_path / "store", 1, env={})
    assert process.returncode == 1
    assert process.stderr == (
        "attnpack: rank 0 did not find the other processes within 1000 ms, want 2 of them: start each with a rank of "
        "its own, and all with the same store (Wait timeout)\n"
    )


def test_nothing_of_gloo_is_made_in_our_code():
    """It knows names of gloo, whose headers torch's wheel lacks, and no layout: none of its symbols refers to gloo."""
    symbols = run_program("nm", "--dynamic", "--demangle", PREFIX / "lib/libattnpack.so")
    assert "c10d::ProcessGroupGloo::ProcessGroupGloo" in symbols.stdout
    assert [line for line in symbols.stdout.splitlines() if re.search(r"\bgloo::", line)] == []
