"""Hundreds of damaged checkpoints; `scripts/fuzz.py files` makes any number of them."""

import random

import pytest
from fuzz import files, lies


def test_a_seed_makes_one_checkpoint(tmp_path):
    def made(seed: int, name: str) -> dict[str, bytes | int]:
        lies.write_lie(seed, tmp_path / name)
        small = {path.name: path.stat().st_size for path in (tmp_path / name).iterdir()}
        return {file: size if size > 10**6 else (tmp_path / name / file).read_bytes() for file, size in small.items()}

    for seed in range(30):
        assert made(seed, f"a{seed}") == made(seed, f"b{seed}")
    assert made(0, "c") != made(1, "d")


def test_lies_are_refused_by_a_sentence(capsys):
    failures = files.main(20261123, 5)
    assert failures == 0, capsys.readouterr().out


def test_a_crash_is_a_failure_with_its_seed(monkeypatch, capsys, tmp_path):
    child = tmp_path / "child.py"
    child.write_text("import os\nprint('begin 7')\nprint('begin 8', flush=True)\nos.abort()\n")
    monkeypatch.setattr(files, "__file__", str(child))
    assert files.main(7, 0) == 1
    assert "seed 8: the process ended with -6" in capsys.readouterr().out


@pytest.mark.long
def test_many_lies_are_refused_by_a_sentence(capsys):
    seed = random.randrange(2**31)
    print("seed", seed)
    failures = files.main(seed, 120)
    assert failures == 0, capsys.readouterr().out
