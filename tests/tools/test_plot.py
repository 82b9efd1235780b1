"""Pictures draw the computed numbers, and `attnpack plot` writes them."""

import json
import shlex

import attnpack
import matplotlib.image
import pytest
import torch
from attnpack.tools import cli
from attnpack.tools.plot import attention as plot_attention
from attnpack.tools.plot import memory as plot_memory
from attnpack.tools.plot import roofline as plot_roofline
from matplotlib.figure import Figure

BENCH = {
    "machine": "a machine",
    "limits": {"flops": 2e11, "bytes_per_second": 2e10},
    "results": [
        {
            "case": {"section": section, "name": f"{section} 8/2", "dtype": dtype},
            "seconds": seconds,
            "ratios": {"sdpa": ratio},
            "flops": 1e9,
            "bytes": size,
            "share": 0.5,
        }
        for section, dtype, seconds, ratio, size in (
            ("decode", "fp32", 0.5, 2.0, 1e9),
            ("decode", "bf16", 0.25, 4.0, 5e8),
            ("prefill", "fp32", 0.01, 1.5, 1e6),
        )
    ],
}


@pytest.fixture
def bench_file(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(BENCH))
    return path


def is_a_picture(path):
    if path.suffix == ".svg":
        return path.read_text().lstrip().startswith("<?xml") and "<svg" in path.read_text()
    pixels = matplotlib.image.imread(path)
    return len({tuple(pixel) for pixel in pixels.reshape(-1, pixels.shape[-1]).tolist()}) > 20


def test_memory_of_known_models_by_their_configurations():
    """Bytes per token in bf16, worked out from the models' published sizes."""
    wanted = {
        "llama-3-70b": 2 * 80 * 8 * 128 * 2,
        "llama-3-8b": 2 * 32 * 8 * 128 * 2,
        "deepseek-v3": 61 * (512 + 64) * 2,
        "smollm2-135m": 2 * 30 * 3 * 64 * 2,
    }
    assert {name: plot_memory.model_kv_bytes(sizes, 1) for name, sizes in plot_memory.MODELS.items()} == wanted
    assert plot_memory.model_kv_bytes(plot_memory.MODELS["llama-3-8b"], 2**20) == 128 * 2**30


def test_memory_lines_are_the_points_in_gib():
    axes = Figure().subplots()
    plot_memory.draw_kv_memory(axes, [1024, 2**20], {"one": [2**30, 2**34]}, title="memory")
    (line,) = axes.get_lines()
    assert line.get_xydata().tolist() == [[1024, 1], [2**20, 16]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1k", "1M"]
    written = axes.yaxis.get_major_formatter()
    assert [written(gib) for gib in (64, 1, 0.25, 2**-6)] == ["64 GiB", "1 GiB", "256 MiB", "16 MiB"]


def test_positions_of_weights_are_whole_numbers():
    panels = Figure(figsize=(8, 3.5)).subplots(2, 4, sharex=True, sharey=True)
    for panel in panels.flat:
        plot_attention.draw_weights(panel, torch.rand(10, 10), title="a head")
    ticks = [*panels[0, 0].get_xticks(), *panels[0, 0].get_yticks()]
    assert ticks and all(tick == round(tick) for tick in ticks)


def test_roofline_points_lie_at_their_intensity_and_speed():
    axes = Figure().subplots()
    plot_roofline.draw_roofline(axes, BENCH)
    points = {each.get_label(): each.get_offsets().tolist() for each in axes.collections}
    assert points == {"decode, fp32": [[1, 2]], "decode, bf16": [[2, 4]], "prefill, fp32": [[1000, 100]]}
    roof = dict(axes.get_lines()[0].get_xydata().tolist())
    assert roof[1] == 20 and roof[2048] == 200


def test_warm_and_cold_decoding_look_different():
    """By colour and marker; what is in the processor's cache may lie above the roof."""
    cold, warm, prefill = ({**BENCH["results"][i], "case": dict(BENCH["results"][i]["case"])} for i in (0, 0, 2))
    cold["case"]["cold"], warm["case"]["cold"], prefill["case"]["cold"] = True, False, False
    axes = Figure().subplots()
    plot_roofline.draw_roofline(axes, BENCH | {"results": [cold, warm, prefill]})
    drawn = {each.get_label(): each for each in axes.collections}
    assert list(drawn) == ["decode, fp32", "decode, warm, fp32", "prefill, fp32"]
    assert len({tuple(each.get_edgecolor()[0]) for each in drawn.values()}) == 3
    assert len({each.get_paths()[0].vertices.tobytes() for each in drawn.values()}) == 3


def test_the_roofs_edge_is_the_ridge_of_the_machine():
    limits = {"flops": 3e11, "bytes_per_second": 2e10, "bf16_flops": 7e11}
    axes = Figure().subplots()
    plot_roofline.draw_roofline(axes, BENCH | {"limits": limits})
    for line, peak, ridge in zip(axes.get_lines(), (300, 700), (15, 35), strict=True):
        points = line.get_xydata().tolist()
        assert points == sorted(points) and [ridge, peak] in points
        assert all(y == min(peak, 20 * x) for x, y in points)


def test_bars_against_a_peer_are_its_ratios():
    axes = Figure().subplots()
    plot_roofline.draw_times_faster(axes, BENCH, "decode", "sdpa")
    assert [bar.get_x() + bar.get_width() for bar in axes.patches] == [2, 4]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["8/2, fp32", "8/2, bf16"]


def test_weights_of_a_model_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="eager",
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    mine = attnpack.CausalLM(50, 32, 3, 4, 2, hidden_dim=48, max_positions=64)
    mine.load_state_dict(theirs.state_dict())
    ids = torch.randint(50, (2, 9))
    before = mine(ids)
    found = plot_attention.lm_attention(mine, ids)
    torch.testing.assert_close(found, list(theirs(ids, output_attentions=True).attentions), atol=1e-5, rtol=1e-4)
    assert torch.equal(mine(ids), before), "hooks are gone"


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_command_writes_memory(ending, tmp_path, capsys):
    out = tmp_path / f"memory.{ending}"
    assert cli.main(["plot", "kv-memory", "--models", "llama-3-8b", "--out", str(out), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    (points,) = figures["bytes"].values()
    assert is_a_picture(out) and points[-1] == 128 * 2**30 and figures["contexts"][-1] == 2**20


def test_the_command_writes_a_roofline(bench_file, tmp_path, capsys):
    out = tmp_path / "roofline.png"
    assert cli.main(["plot", "--json", "roofline", str(bench_file), "--out", str(out)]) == 0
    assert is_a_picture(out) and json.loads(capsys.readouterr().out)["machine"] == "a machine"


def test_the_command_writes_attention_of_the_real_model(smollm2, tmp_path, capsys):
    out = tmp_path / "attention.png"
    assert cli.main(["plot", "attention", "The cat sat", "--layer", "29", "--out", str(out), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    weights = torch.tensor(figures["weights"])
    assert is_a_picture(out) and weights.shape == (9, 3, 3) == (9, *2 * [len(figures["tokens"])])
    torch.testing.assert_close(weights, plot_attention.lm_attention(smollm2, torch.tensor([figures["tokens"]]))[-1][0])


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["kv-memory", "--models", "gpt"], "--models: got 'gpt', want some of llama-3-70b"),
        (["kv-memory", "--out", "memory.jpg"], "--out: got 'memory.jpg', want a name that ends in .png or .svg"),
        (["kv-memory", "--out", "nowhere/memory.png"], "--out: nowhere/memory.png lies in no folder that exists"),
        (["roofline", "missing.json"], "missing.json: cannot be read (No such file or directory)"),
        (["attention", "hello", "--layer", "30"], "--layer: got 30, want 0 to 29, the model's layers"),
        (["attention", "hello", "--layer", "-1"], "--layer: got -1, want 0 to 29, the model's layers"),
        (["attention", "hello", "--model", "nosuch"], "nosuch: no such file or directory; give a Hugging Face dir"),
        (["kv-memory", "--out", "/proc/x.png"], "--out: /proc/x.png cannot be written"),
        (["attention", ""], "text: got an empty one"),
    ],
    ids=lambda given: " ".join(given)[:30] if isinstance(given, list) else "",
)
def test_an_error_is_one_sentence(arguments, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plot", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("attnpack plot: ") and said in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_benchmark(tmp_path):
    for text in ("[]", "{}", "not json"):
        path = tmp_path / "other.json"
        path.write_text(text)
        with pytest.raises(ValueError, match="not what `attnpack bench --json` prints"):
            plot_roofline.read_bench(path)


@pytest.mark.parametrize(
    "changed",
    [
        {"results": 3},
        {"results": [{}]},
        {"results": [{"case": {"section": "decode"}}]},
        {"results": [BENCH["results"][0] | {"bytes": 0}]},
        {"results": [BENCH["results"][0] | {"flops": "1"}]},
        {"limits": {}},
        {"limits": {"flops": 1e9, "bytes_per_second": 0}},
    ],
    ids=str,
)
def test_a_benchmark_with_other_contents(changed, tmp_path, capsys):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(BENCH | changed))
    assert cli.main(["plot", "roofline", str(path), "--out", str(tmp_path / "roofline.png")]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith(f"attnpack plot: {path}: not what `attnpack bench --json` prints (") and said.count("\n") == 1
    )
    assert [file.name for file in tmp_path.iterdir()] == ["bench.json"]


@pytest.mark.parametrize("picture", ["kv-memory", "roofline", "attention"])
def test_each_picture_shows_an_example_that_parses(picture, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["plot", picture, "--help"])
    assert stop.value.code == 0
    example = " ".join(capsys.readouterr().out.split("example: attnpack ")[1].split())
    assert cli.build_parser().parse_args(shlex.split(example)).picture == picture
