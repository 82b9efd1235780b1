"""`attnpack bench`: its counts, equal results of the compared calls, and its output."""

import dataclasses
import json
import warnings

import attnpack.tools.bench as bench
import pytest
import torch
from attnpack.tools import cli
from attnpack.tools.bench.cases import SECTIONS, Case, Limits, cases
from attnpack.tools.bench.peers import PEERS, make_inputs, ours

TINY = Case("decode", "tiny", "fp32", 8, 2, 1, 40, 16, 16, cold=True)


def test_work_and_traffic_by_hand():
    assert TINY.flops == 2 * 8 * 40 * 32
    assert TINY.bytes == (2 * 40 * 32 + 8 * 32) * 4
    assert dataclasses.replace(TINY, causal=True).flops == TINY.flops / 2
    assert dataclasses.replace(TINY, backward=True).flops == TINY.flops * 3.5
    latent = Case("latent", "tiny", "bf16", 4, 1, 1, 10, 24, 16, latent=True)
    assert latent.bytes == (10 * 24 + 4 * 40) * 2
    assert TINY.limit_seconds(Limits(1e9, 4e9, 1e12)) == TINY.flops / 1e9
    assert TINY.limit_seconds(Limits(1e15, 4e15, 1e9)) == TINY.bytes / 1e9
    assert dataclasses.replace(TINY, dtype="bf16").limit_seconds(Limits(1e9, 4e9, 1e12)) == TINY.flops / 4e9
    assert dataclasses.replace(TINY, dtype="fp16").limit_seconds(Limits(1e9, 4e9, 1e12)) == TINY.flops / 1e9


@pytest.mark.parametrize("peer", ["sdpa", "packed"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_peers_compute_the_same(peer, dtype):
    for case in (dataclasses.replace(TINY, dtype=dtype), Case("latent", "", dtype, 4, 1, 1, 10, 24, 16, latent=True)):
        query, key, value, _ = make_inputs(case)
        assert (value.data_ptr() == key.data_ptr()) == case.latent
        theirs, mine = PEERS[peer](case, query, key, value)(), ours(case, query, key, value)()
        torch.testing.assert_close(theirs, mine, atol=2e-2, rtol=2e-2)


@pytest.mark.long
def test_flex_attention_is_compiled_for_each_case(monkeypatch):
    """Beyond the limit of graphs too: torch would warn, and run the form that stores all scores."""
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "flex_attention called without torch.compile")
        for length in (40, 56, 72):
            case = dataclasses.replace(TINY, q_len=length, kv_len=length, causal=True)
            query, key, value, _ = make_inputs(case)
            found, wanted = PEERS["flex"](case, query, key, value)(), ours(case, query, key, value)()
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("peer", ["flash_attn", "flashinfer"])
def test_peers_for_cuda_leave_out_what_they_do_not_take(peer):
    case = dataclasses.replace(TINY, dtype="bf16")
    assert PEERS[peer](case, *make_inputs(case)[:3]) is None  # on the CPU


def test_every_section_has_cases_of_each_dtype():
    for section in SECTIONS:
        for quick in (False, True):
            found = list(cases([section], ["fp32", "fp16"], quick=quick))
            assert {case.dtype for case in found} == {"fp32", "fp16"} and {case.section for case in found} == {section}


def test_table_json_and_picture(capsys, monkeypatch, tmp_path):
    tiny = [TINY, dataclasses.replace(TINY, section="train", q_len=40, backward=True, causal=True)]
    monkeypatch.setattr(bench, "cases", lambda *_, **__: iter(tiny))
    picture = tmp_path / "roofline.png"
    assert cli.main(["bench", "decode", "--quick", "--json", "--out", str(picture)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["limits"]["bf16_flops"] > 1e9 and printed["limits"]["flops"] > 1e9
    assert printed["limits"]["bytes_per_second"] > 1e8
    first, second = printed["results"]
    assert 0 < first["share"] < 2 and set(first["ratios"]) == {"sdpa", "packed"} and set(second["ratios"]) == {"sdpa"}
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    assert cli.main(["bench", "--quick", "--peers"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-2:]] == ["tiny", "tiny"]


def test_cuda_cases_and_a_sentence_where_there_is_no_device(capsys):
    names = [case.name for case in cases(["decode", "latent"], ["bf16"], quick=True, device="cuda")]
    assert {"decode 32/8 D128 4096 keys", "decode 128/8 D128 131072 keys, 8 queries"} <= set(names)
    if not torch.cuda.is_available():
        assert cli.main(["bench", "--device", "cuda"]) == 2
        assert "this torch sees no CUDA device: pass --device cpu" in capsys.readouterr().err


def test_aten_is_not_timed_in_place_of_our_cuda_kernels(monkeypatch, capsys):
    if torch.cuda.is_available():
        monkeypatch.setattr("attnpack._C.cuda_kernels_run", lambda device: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert cli.main(["bench", "--device", "cuda"]) == 2
    assert "attnpack's CUDA kernels do not run there" in capsys.readouterr().err


def test_unknown_section_is_named(capsys):
    assert cli.main(["bench", "speed"]) == 2
    assert "SECTION: got 'speed', want some of decode, prefill" in capsys.readouterr().err
    assert cli.main(["bench", "--peers", "numpy"]) == 2
    assert "--peers: got 'numpy', want some of sdpa, packed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "picture, said",
    [
        ("none/x.png", "lies in no folder that exists"),
        ("x.bmp", "want a name that ends in .png or .svg"),
        (".", "cannot be written"),
    ],
)
def test_a_picture_that_cannot_be_written_stops_before_anything_is_timed(picture, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "run", lambda *_, **__: pytest.fail("it ran"))
    assert cli.main(["bench", "decode", "--out", picture]) == 2
    error = capsys.readouterr().err
    assert error.startswith("attnpack bench: --out: ") and said in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error, words", [(torch.OutOfMemoryError, "CUDA out of memory"), (RuntimeError, "head_dim is too wide")]
)
def test_a_peer_that_refuses_the_case_or_needs_more_memory_than_there_is_leaves_a_dash(
    error, words, capsys, monkeypatch
):
    def refusing(*_):
        def call():
            raise error(words)

        return call

    monkeypatch.setattr(bench, "cases", lambda *_, **__: iter([TINY]))
    monkeypatch.setitem(PEERS, "refusing", refusing)
    assert cli.main(["bench", "--quick", "--peers", "sdpa", "refusing"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[-3] == "-"
