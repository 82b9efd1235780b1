"""The demo: its lines against a plain-PyTorch run on the same numbers, its table, its picture and its model."""

import json
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest
import torch
from attnpack import reference
from attnpack.tools import cli, demo
from attnpack.tools.bench import machine
from attnpack.tools.demo import model as demo_model
from attnpack.tools.demo import variants as demo_variants
from attnpack.tools.demo.mqa import chunkings, fold, rename_to_notebook, run_mqa
from attnpack.tools.plot import plot_kv_memory


def plain_lines(x, q, k, state_dict, num_heads):
    """The notebook's output if the plain classes of reference.py run on these numbers."""
    said = []
    weights = {rename_to_notebook(name): weight for name, weight in state_dict.items()}
    classes = (reference.MQAV1, reference.MQAV2, reference.MQAV3)
    versions = [version(x.shape[-1], num_heads, say=said.append) for version in classes]
    for module in versions:
        module.load_state_dict(weights)
    said.append(f"x.shape : {x.shape}")
    versions[0](x)
    for module in versions[1:]:
        said.append(f"x.shape : {x.shape}")
        cache = None
        for token in x.split(1, dim=1):
            said.append("\n" + "-" * 20)
            _, cache = module(token, cache)
    values = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5)[0, 0]
    hidden = torch.triu(torch.ones(5, 5, dtype=torch.bool), diagonal=1)
    return [*said, f"{values}", f"\n{hidden}", f"\n{values.masked_fill(hidden, -torch.inf)}"]


@pytest.mark.parametrize("sizes", [(2, 10, 64, 8), (3, 7, 48, 6)], ids=str)
def test_every_line_is_that_of_a_plain_pytorch_run(sizes):
    said = []
    ran = run_mqa(*sizes, say=said.append)
    wanted = plain_lines(ran["x"], ran["scores_q"], ran["scores_k"], ran["state_dict"], sizes[3])
    # A text may hold several lines, and the two sides may cut them differently.
    lines, wanted = ("\n".join(texts).splitlines() for texts in (said, wanted))
    assert lines[: len(wanted)] == wanted
    assert len(lines) == len(wanted) + 1 + len(ran["differences"])


def test_lines_are_those_of_the_notebook():
    said = []
    run_mqa(say=said.append)
    text = "\n".join(said)
    assert text.startswith("x.shape : torch.Size([2, 10, 64])\nshould be 1 if correct: tensor([[[1.0000, 1.0000, ")
    step = (
        "\n\n--------------------\nQ shape : torch.Size([2, 8, 1, 8])\nK.shape: torch.Size([2, 1, {t}, 8])\n"
        "V.shape: torch.Size([2, 1, {t}, 8])\nshape of out : torch.Size([2, 1, 64])"
    )
    steps = "x.shape : torch.Size([2, 10, 64])" + "".join(step.format(t=t) for t in range(1, 11))
    assert text.count(steps) == 2


def test_values_agree_and_v2_is_shown_to_be_causal_by_stepping_only():
    found = run_mqa(say=lambda text: None)["differences"]
    ahead = [name for name in found if "sees ahead" in name]
    assert [name.rpartition(" ")[2] for name in found if "chunks" in name] == ["10", "4+6", "1+3+6"]
    assert len(ahead) == 1 and found.pop(ahead[0]) > 1e-2
    assert max(found.values()) < 1e-6


@pytest.mark.parametrize("seq", [1, 2, 3, 10])
def test_chunkings_cover_the_sequence(seq):
    assert all(sum(parts) == seq and min(parts) > 0 for parts in chunkings(seq))


def test_variants_table():
    rows = demo_variants.compare_variants(64, 8, context=32, length=9, steps=3)
    latent = 64 * 8 * 12 + 64 * 36 + 32 + 32 * 8 * 16 + 64 * 64  # C 32, N 8, R 4, V 8
    kept = [4 * 64 * 64, 3 * 64 * 64, 64 * 2 * (64 + 8), 3 * 64 * 8, latent, 4 * 64 * 64]
    assert [row.parameters for row in rows] == kept
    assert [row.kv_bytes_per_token for row in rows] == [2 * heads * 8 * 4 for heads in (8, 4, 1, 1)] + [
        36 * 4,
        2 * 8 * 8 * 4,
    ]
    for row in rows:
        assert 0 < row.error < 2 * row.torch_error + 1e-6
        assert row.step_ms >= row.least_ms > 0 and row.sdpa_step_ms >= row.sdpa_least_ms > 0
    lines = demo_variants.format_table(rows).splitlines()
    assert len(lines) == 7 and len({len(line) for line in lines}) == 1


def test_picture_shows_the_caches_own_bytes(tmp_path):
    path = tmp_path / "memory.png"
    kv_heads = {"MHA": 8, "GQA-2": 2, "MQA": 1}
    points = plot_kv_memory(path, kv_heads, [16, 64], num_layers=3, head_dim=4)
    assert points == {name: [2 * 3 * heads * 4 * 2 * n for n in (16, 64)] for name, heads in kv_heads.items()}
    pixels = matplotlib.image.imread(path)[..., :3]
    colours = {tuple(round(float(c) * 255) for c in pixel) for pixel in pixels.reshape(-1, 3)}
    assert {(0xD5, 0x5E, 0x00), (0x00, 0x72, 0xB2), (0x00, 0x9E, 0x73)} <= colours


@pytest.mark.long
def test_whole_demo_writes_with_the_real_model(tmp_path):
    out = tmp_path / "memory.png"
    command = [sys.executable, "-m", "attnpack", "demo", "--json", "--out", str(out)]
    figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert set(figures) == {"mqa", "variants", "model", "kv_memory_bytes", "picture"} and out.stat().st_size > 10_000
    model = figures["model"]
    assert model["all_tokens_equal"] and model["equal_tokens"] == {"chat": 64, "prose": 64, "code": 64}
    assert model["tokens_per_second"] > 0 and len(model["answer"].split()) > 20


def test_count_stops_at_the_first_other_token():
    class Fixed:
        def generate(self, ids, max_new_tokens):
            return torch.tensor([[7, 8, 1, 2, 3, 4]])

    assert demo_model.count_equal_tokens(Fixed(), {"prompt_ids": [7, 8], "tokens": [1, 2, 9, 4]}) == 2
    assert demo_model.count_equal_tokens(Fixed(), {"prompt_ids": [7, 8], "tokens": [1, 2, 3, 4]}) == 4


def test_text_output_names_the_parts_and_folds_the_last(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "compare_variants", lambda: [])
    command = ["demo", "--no-model", "--out", str(tmp_path / "memory.png")]
    assert cli.main(command) == 0
    text = capsys.readouterr().out
    assert "1. " not in text and text.index("\n2. ") < text.index("\n3. ") < text.index("\n4. ")
    assert cli.main([*command, "--all-lines"]) == 0
    whole = capsys.readouterr().out
    assert text.count("8 steps more") == 2 and len(text.splitlines()) < 80 < 150 < len(whole.splitlines())


def test_folding_keeps_the_first_and_the_last_step():
    texts = []
    run_mqa(2, 4, 16, 2, say=texts.append)
    text = "\n".join(fold(texts))
    shown = [f"K.shape: torch.Size([2, 1, {t}, 8])" in text for t in (1, 2, 3, 4)]
    assert shown == [True, False, False, True] and text.count("2 steps more") == 2
    assert "should be 1 if correct: tensor([[[1.0000, 1.0000, 1.0000, 1.0000], ...\n" in text
    assert text.endswith(texts[-1])
    texts = []
    run_mqa(2, 2, 16, 2, say=texts.append)
    assert [line for line in fold(texts) if "should be" not in line] == [t for t in texts if "should be" not in t]
    run_mqa(2, 1, 16, 2, say=(one := []).append)
    assert "\n".join(fold(one)).count("K.shape") == 2


@pytest.mark.long
def test_a_page_shows_what_the_demo_prints(capsys):
    """But for its figures and its machine, which are those of one place and moment."""
    page = (Path(__file__).parents[2] / "docs/start.md").read_text(encoding="utf-8")
    shown = re.search(r"```text\n(1\. A language model.*?)```", page, flags=re.S).group(1)
    said = []
    figures = demo_model.run_model(say=lambda text, end="\n": said.append(text + end))
    assert figures["all_tokens_equal"] and figures["equal_tokens"] == {"chat": 64, "prose": 64, "code": 64}
    printed = "1. A language model, SmolLM2-135M-Instruct, on attnpack's C++ modules\n\n" + "".join(said)
    # The page cuts the answer, with three dots.
    before, after = (part.split() for part in without_figures(shown).split(" ..."))
    calm = [line for line in printed.splitlines() if not line.startswith("The machine was busy")]
    words = without_figures("\n".join(calm)).split()
    assert re.search(rf"^machine +{re.escape(machine())}, \d+ threads?,", printed, flags=re.M)
    assert words[: len(before)] == before and words[-len(after) :] == after


def without_figures(text):
    elsewhere = re.sub(r"^machine .*? threads?,", "machine # threads,", text, flags=re.M)
    return re.sub(r"[\d.,]*\d", "#", elsewhere)
