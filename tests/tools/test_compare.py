"""`attnpack compare`: equal models, figures that agree with each other and with formulas by hand, and going on."""

import fcntl
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from attnpack.progress import counted, duration
from attnpack.tools import busy, cli
from attnpack.tools.compare import decoding, models, picture, runs, training, variants
from attnpack.tools.compare.record import Record, Run
from attnpack.tools.compare.report import Entry, format_table
from attnpack.tools.compare.text import guessing_loss, read_text
from attnpack.tools.threads import threads
from marks import long
from processes import ROOT, run_python

STATE = "attnpack_compare.pt"
VARIANTS = variants.default_variants()
SMALL = models.scale_of(20_000)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As the command takes for small models."""
    with threads(1):
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text("\n".join(topics[name] for name in sorted(topics))[:60_000])
    return path


def arguments(text, out, *more, names=("mha", "mqa"), steps=25) -> list[str]:
    given = ["--params", "20K", "--steps", steps, "--seeds", 2, "--text", text, "--out", out]
    return ["compare", *map(str, given), *map(str, more), "--variants", *names]


def saved(out) -> dict:
    return json.loads((out / "compare.json").read_text())


@pytest.fixture(scope="module")
def compared(text, tmp_path_factory):
    """The folder of two variants with two seeds."""
    out = tmp_path_factory.mktemp("out") / "compared"
    assert cli.main(arguments(text, out)) == 0
    return out


def test_the_table_holds_what_the_runs_say(compared):
    content = saved(compared)
    assert set(content["runs"]) == {"mha/0", "mha/1", "mqa/0", "mqa/1"}
    losses = {name: [content["runs"][f"{name}/{seed}"]["loss"] for seed in (0, 1)] for name in ("mha", "mqa")}
    for name, entry in content["variants"].items():
        assert entry["losses"] == losses[name] and losses[name][0] != losses[name][1]
        assert entry["loss"] == pytest.approx(statistics.mean(losses[name]))
        assert entry["loss_spread"] == pytest.approx(abs(losses[name][0] - losses[name][1]) / 2**0.5)
        apart = [loss - other for loss, other in zip(losses[name], losses["mha"], strict=True)]
        assert entry["difference"] == pytest.approx(sum(apart) / 2)
        assert entry["difference_spread"] == pytest.approx(abs(apart[0] - apart[1]) / 2**0.5)
        speeds = [content["runs"][f"{name}/{seed}"]["tokens_per_second"] for seed in (0, 1)]
        assert entry["tokens_per_second"] == pytest.approx(sum(speeds) / 2)
    for run in content["runs"].values():
        assert run["tokens_per_second"] * run["seconds"] == pytest.approx(25 * SMALL.batch * SMALL.length, rel=0.1)


def test_markdown_and_json_agree(compared):
    rows = re.findall(r"^\| (\w\S*) +\|(.*)\|$", (compared / "compare.md").read_text(), flags=re.M)
    cells = {name: [cell.strip() for cell in rest.split("|")] for name, rest in rows}
    assert list(cells) == ["variant", "mha", "mqa"]
    for name, entry in saved(compared)["variants"].items():
        against = f"{entry['difference']:+.3f} ± {entry['difference_spread']:.3f}"
        assert cells[name] == [
            f"{entry['parameters']:,}",
            f"{entry['loss']:.3f} ± {entry['loss_spread']:.3f}",
            "" if name == "mha" else against,
            f"{entry['cache_bytes_per_token']:,.0f}",
            f"{entry['ms_per_token']:.2f}",
            f"{entry['tokens_per_second']:,.0f}",
        ]
    assert "](compare.svg)" in (compared / "compare.md").read_text()


def test_training_lowers_the_loss(compared, text):
    data = read_text(text, SMALL.length)
    for name, entry in saved(compared)["variants"].items():
        for seed, loss in enumerate(entry["losses"]):
            torch.manual_seed(seed)
            untrained = training.held_out_loss(models.make_model(name, SMALL), data.held_out)
            assert loss < untrained - 1


def test_the_picture_names_each_variant_twice(compared):
    root = ElementTree.fromstring((compared / "compare.svg").read_text())
    words = [element.text for element in root.iter() if element.tag.endswith("}text")]
    assert [words.count(name) for name in ("mha", "mqa")] == [2, 2]
    assert len([element for element in root.iter() if element.tag.endswith("}circle")]) == 4


def test_a_finished_comparison_prints_its_figures_again(compared, text, capsys):
    before = {path.name: path.read_bytes() for path in compared.iterdir()}
    assert cli.main(arguments(text, compared)) == 0
    said = capsys.readouterr()
    assert said.err == "" and said.out.encode() == before["compare.md"]
    assert cli.main(arguments(text, compared, "--json")) == 0
    said = capsys.readouterr()
    assert said.err == "" and json.loads(said.out) == saved(compared)
    assert {path.name: path.read_bytes() for path in compared.iterdir()} == before


def test_the_table_says_that_the_machine_was_busy(tmp_path):
    """By what was so during the runs, not by what is so when the table is printed."""
    record = Record(tmp_path, {}, {})
    assert record.cores_of_others() is None and busy.warning_of(None) == busy.warning_of(0.1) == ""
    record.runs = {f"mha/{seed}": Run(2.0, 2.0, 1.0, 1.0, cores) for seed, cores in enumerate((None, 1.0, 2.0))}
    assert record.cores_of_others() == 1.5 and "took 1.5 of its" in busy.warning_of(1.5)


def test_variants_and_seeds_are_added(compared, text, capsys):
    before = saved(compared)["runs"]
    try:
        assert cli.main(arguments(text, compared, "--seeds", 3, names=("mqa", "gqa-3"))) == 0
        content = saved(compared)
        assert set(content["runs"]) == {*before, "gqa-3/0", "gqa-3/1", "gqa-3/2", "mqa/2"}
        assert {key: content["runs"][key] for key in before} == before
        assert list(content["variants"]) == ["mqa", "gqa-3"]
        assert [len(entry["losses"]) for entry in content["variants"].values()] == [3, 3]
        assert "4 of 6 runs" in capsys.readouterr().err
    finally:
        assert cli.main(arguments(text, compared)) == 0
    assert set(saved(compared)["variants"]) == {"mha", "mqa"}


@pytest.mark.parametrize(
    "changed, words",
    [
        (["--steps", 26], "was made with --steps 25, not 26"),
        (["--learning-rate", 0.001], "was made with --learning-rate 0.006, not 0.001"),
        (["--params", "21K"], "was made with --params 20000, not 21000"),
        (["--text", Path(__file__)], "was made with another --text"),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, list) else "",
)
def test_other_settings_are_refused(changed, words, compared, text, capsys):
    before = {path.name: path.read_bytes() for path in compared.iterdir()}
    assert cli.main(arguments(text, compared, *changed)) == 2
    error = capsys.readouterr().err
    assert words in error and "choose another --out" in error and error.count("\n") == 1
    assert {path.name: path.read_bytes() for path in compared.iterdir()} == before


TORCH_ALONE = """
import sys
for name in ("matplotlib", "tqdm", "transformers", "tokenizers", "safetensors", "gguf", "IPython"):
    sys.modules[name] = None  # importing it raises ImportError
from attnpack.tools import cli
sys.exit(cli.main(sys.argv[1:]))
"""


def test_needs_torch_alone(text, tmp_path):
    given = arguments(text, tmp_path / "out", "--seeds", 1, names=("gqa-2",), steps=2)
    done = run_python(TORCH_ALONE, argv=("-c", *given))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"compare.json", "compare.md", "compare.svg"}
    assert "±" not in done.stdout and saved(tmp_path / "out")["variants"]["gqa-2"]["loss_spread"] is None


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
from attnpack.tools import cli
from attnpack.tools.compare import runs
runs.SAVE_EVERY = 0.05
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [long(signal.SIGINT), signal.SIGKILL], ids=str)
def test_a_stopped_comparison_goes_on(number, text, tmp_path, capsys):
    """The run that was stopped ends as if nothing had happened, and those before it are kept."""
    command = arguments(text, tmp_path / "stopped", names=("mqa",), steps=80)
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED, *command], stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if re.match(r"mqa, seed 1: step \d+ of 80", line):
                break
        process.send_signal(number)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert ("kept the runs that ended" in said) == (number == signal.SIGINT)
    stopped = saved(tmp_path / "stopped")
    assert set(stopped["runs"]) == {"mqa/0"} and (tmp_path / "stopped" / STATE).is_file()
    assert cli.main(command) == 0
    error = capsys.readouterr().err
    assert "1 of 2 runs" in error and 0 < int(re.search(r"mqa, seed 1: goes on after (\d+) steps", error)[1]) < 80
    assert not (tmp_path / "stopped" / STATE).exists()
    content = saved(tmp_path / "stopped")
    assert content["runs"]["mqa/0"] == stopped["runs"]["mqa/0"]

    torch.manual_seed(1)
    data, model = read_text(text, SMALL.length), models.make_model("mqa", SMALL)
    settings = {"length": SMALL.length, "batch": SMALL.batch, "rate": SMALL.learning_rate, "seed": 1}
    work = training.ByteTraining(model, data.train, 80, **settings)
    while not work.done:
        work.train_step()
    assert content["runs"]["mqa/1"]["loss"] == pytest.approx(training.held_out_loss(model, data.held_out), abs=1e-4)


def test_the_first_run_that_was_stopped_is_not_lost(text, tmp_path, monkeypatch, capsys):
    """compare.json is not there yet: only the saved state says with which settings it began."""
    step, folder = training.ByteTraining.train_step, tmp_path / "stopped"

    def stops_at_ten(work):
        if work.steps == 10:
            raise KeyboardInterrupt
        return step(work)

    monkeypatch.setattr(training.ByteTraining, "train_step", stops_at_ten)
    assert cli.main(arguments(text, folder, "--seeds", 1, names=("mqa",))) == 130
    monkeypatch.undo()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert list(before) == [STATE]
    assert cli.main(arguments(text, folder, "--seeds", 1, names=("mqa",), steps=26)) == 2
    error = capsys.readouterr().err
    assert "was made with --steps 25, not 26" in error and {p.name: p.read_bytes() for p in folder.iterdir()} == before
    # It goes first, although the command names another variant before it.
    assert cli.main(arguments(text, folder, "--seeds", 1, names=("mha", "mqa"))) == 0
    assert "mqa, seed 0: goes on after 10 steps" in capsys.readouterr().err
    assert set(saved(folder)["runs"]) == {"mha/0", "mqa/0"} and not (folder / STATE).exists()


def test_a_damaged_record_is_told(compared, text, tmp_path, capsys):
    folder = tmp_path / "damaged"
    folder.mkdir()
    (folder / "compare.json").write_text((compared / "compare.json").read_text()[:50])
    assert cli.main(arguments(text, folder)) == 2
    error = capsys.readouterr().err
    assert "compare.json: holds no comparison" in error and "remove the file to begin anew" in error


@pytest.mark.parametrize("params", [20_000, 200_000, 5_000_000, 100_000_000])
def test_models_are_equal_in_parameters(params):
    scale = models.scale_of(params)
    for name in [*VARIANTS, "gqa-1", "gqa-3", "gqa-8"]:
        model = models.make_model(name, scale, device="meta")
        assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(params, rel=0.005)
        assert len(model.decoder.layers) == scale.num_layers
        assert {layer.self_attn.embed_dim for layer in model.decoder.layers} == {scale.embed_dim}


def test_the_sizes_of_the_docs_are_those_of_the_code():
    page = (ROOT / "docs/howto/compare.md").read_text()
    shown = re.findall(r"^\| (?:up to (\w+)|more) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, flags=re.M)
    assert len(shown) == 4
    for most, *sizes in shown:
        scale = models.scale_of(cli._params(most or "1000M"))
        assert [scale.num_layers, scale.length, scale.batch, scale.steps] == list(map(int, sizes))
    (least, without) = re.findall(r"from (\w+) to 1000M.*without `mla` and `gdn` (\w+) is", " ".join(page.split()))[0]
    others = [name for name in VARIANTS if name not in ("mla", "gdn")]
    for params, names, refused in ((least, VARIANTS, "mla"), (without, others, "mha")):
        count = cli._params(params)
        for name in names:
            models.make_model(name, models.scale_of(count), device="meta")
        with pytest.raises(ValueError, match="want at least"):
            models.make_model(refused, models.scale_of(count - 1000), device="meta")


def test_heads_are_shared_as_the_name_says():
    scale = models.scale_of(200_000)
    kv_heads = {name: variants.make_attention(name, scale.sizes).k_proj.out_features // 16 for name in ("mha", "mqa")}
    kv_heads |= {f"gqa-{n}": variants.make_attention(f"gqa-{n}", scale.sizes).num_kv_heads for n in (1, 2, 3)}
    assert kv_heads == {"mha": 8, "mqa": 1, "gqa-1": 1, "gqa-2": 2, "gqa-3": 3}
    assert list(variants.make_attention("gqa-3", scale.sizes).head_map) == [0, 0, 0, 1, 1, 1, 2, 2]


def test_caches_have_the_bytes_of_their_formulas():
    scale, context = models.scale_of(200_000), 256
    found = decoding.measure_decoding({name: models.make_model(name, scale) for name in VARIANTS}, context)
    dims = {"mha": 2 * 8 * 16, "gqa-4": 2 * 4 * 16, "gqa-2": 2 * 2 * 16, "mqa": 2 * 16, "diff": 2 * 2 * 16}
    dims |= {"mla": 4 * 16 + 8, "sparse": 2 * 2 * 16 + 2 * 16 / 8}  # a latent and a rotated key; sums of blocks of 8
    dims["gdn"] = (8 * 16 * 16 + 3 * (3 * 8 * 16)) / context  # a state, and three tokens of its short convolution
    for name, numbers in dims.items():
        assert found[name].cache_bytes_per_token == 4 * numbers * scale.num_layers, name
    assert all(0 < cost.ms_per_token < 1000 for cost in found.values())


def test_the_time_of_filling_caches_is_told(monkeypatch):
    ticks = itertools.count(0, 2)  # 2 seconds from one look at the clock to the next
    monkeypatch.setattr(decoding.time, "perf_counter", lambda: next(ticks))
    said: list[str] = []
    decoding.measure_decoding({name: models.make_model(name, SMALL) for name in ("mha", "mqa", "mla")}, 8, said.append)
    assert len(said) == 1 and said[0].startswith("the first of 3 caches is full; about 4 seconds left, until ")


@pytest.mark.parametrize("name", VARIANTS)
def test_models_are_causal_and_learn(name):
    torch.manual_seed(0)
    model = models.make_model(name, SMALL)
    sequences = (torch.arange(4 * 65).view(4, 65) % 7 + 60).to(torch.uint8)
    changed = sequences.clone()
    changed[:, -2] += 1
    with torch.no_grad():
        before, after = model(sequences[:, :-1].long()), model(changed[:, :-1].long())
    torch.testing.assert_close(after[:, :-1], before[:, :-1])
    assert not torch.allclose(after[:, -1], before[:, -1])
    work = training.ByteTraining(model, sequences.flatten(), 12, length=64, batch=4, rate=0.01, seed=0)
    while not work.done:
        work.train_step()
    assert work.losses[-1] < work.losses[0] - 0.5


class Reader(torch.nn.Module):
    """Keeps what it was given to read."""

    def __init__(self, width):
        super().__init__()
        self.table, self.seen = torch.nn.Embedding(256, width), []
        self.head = torch.nn.Linear(width, 256)

    def forward(self, ids):
        self.seen.append(ids)
        return self.head(self.table(ids))


def test_models_of_one_seed_read_the_same_text():
    data = torch.arange(200, dtype=torch.uint8)
    seen = []
    for width, seed in ((4, 0), (8, 0), (4, 1)):
        model = Reader(width)
        work = training.ByteTraining(model, data, 5, length=16, batch=3, rate=0.1, seed=seed)
        while not work.done:
            work.train_step()
        seen.append(torch.stack(model.seen))
        assert (model.seen[0].diff(dim=1) == 1).all(), "sequences are pieces of the text"
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])


def test_what_is_measured_is_not_trained_on(tmp_path):
    words = " ".join(str(number**3) for number in range(3000))
    (tmp_path / "numbers.txt").write_text(words)
    data = read_text(tmp_path / "numbers.txt", 64)
    train = bytes(data.train.tolist())
    assert 0.85 < len(train) / len(words) < 0.92
    for row in data.held_out.tolist():
        assert bytes(row) in words.encode() and bytes(row) not in train
    counts = torch.bincount(data.train.long(), minlength=256) + 1
    wanted = -(counts[data.held_out[:, 1:].long()] / counts.sum()).log().mean()
    assert guessing_loss(data) == pytest.approx(wanted.item(), abs=1e-5)


def test_the_default_text_is_long_and_the_same_each_time():
    first, second = read_text(None, 128), read_text(None, 128)
    assert first.sha256 == second.sha256 and len(first.train) > 1_000_000 and first.held_out.shape == (256, 129)


def test_the_estimate_counts_what_is_left(text):
    data = read_text(text, SMALL.length)
    estimate = runs.Estimate(SMALL, data, {"mha": 0.5, "mqa": 0.25})
    forwards = len(data.held_out) / SMALL.batch / 3
    left = [("mha", 0), ("mqa", 0), ("mqa", 1)]
    assert estimate.seconds(left) == pytest.approx(SMALL.steps + forwards)
    assert estimate.seconds(left, 100) == pytest.approx(SMALL.steps + forwards - 50)
    assert estimate.seconds([]) == 0
    estimate.try_out(["sparse"])
    assert 0 < estimate.seconds_per_step["sparse"] < 10


def test_times_and_counts_in_words():
    assert [counted(n, "thread") for n in (0, 1, 2, 1000)] == ["0 threads", "1 thread", "2 threads", "1,000 threads"]
    assert [duration(s) for s in (0.7, 1.4, 8, 90, 9000)] == [
        "1 second", "1 second", "8 seconds", "1.5 minutes", "2.5 hours",
    ]  # fmt: skip


def entry(loss, cache, ms, spread: float | None = 0.02):
    losses = [loss] if spread is None else [loss - spread, loss + spread]
    return Entry(loss, spread, losses, 0.0, spread, 1, cache, int(cache), ms, 1.0)


def test_the_line_of_the_picture_joins_the_best():
    entries = {"mha": entry(1.9, 1024, 0.5), "gqa-2": entry(1.95, 256, 0.3), "mqa": entry(2.1, 128, 0.2)}
    entries["mla"] = entry(2.0, 300, 0.6)  # worse than gqa-2 in all
    drawn = str(picture.draw(entries, "title", 4096))
    assert drawn.count("stroke-dasharray") == 4 and "grey line" in drawn and "bars:" in drawn
    single = str(picture.draw({"mha": entry(1.9, 1024, 0.5, None)}, "title", 4096))
    assert "stroke-dasharray" not in single and "grey line" not in single and "bars:" not in single


def test_a_point_that_was_moved_shows_its_own_cost():
    """A line from where it stands to where its cost is, and a sentence about it."""
    apart = {"mha": entry(1.9, 1024, 0.5), "mqa": entry(2.0, 128, 0.2)}
    assert "short line" not in str(picture.draw(apart, "title", 4096))
    root = ElementTree.fromstring(str(picture.draw({**apart, "gqa-1": entry(2.01, 128, 0.3)}, "title", 4096)))
    words = [each.text for each in root.iter() if each.tag.endswith("}text")]
    assert any("short line" in word for word in words)
    dots = [each for each in root.iter() if each.tag.endswith("}circle")]
    ways = [re.findall(r"[\d.]+", each.get("d")) for each in root.iter() if each.tag.endswith("}path")]
    places = {(float(dot.get("cx")), dot.get("cy")) for dot in dots if float(dot.get("cx")) < 480}
    stubs = [(float(x1), float(x2), y1) for x1, y1, x2, y2 in ways if y1 == y2 and (float(x2), y1) in places]
    assert len(stubs) == 2 and len({x1 for x1, _, _ in stubs}) == 1, "mqa and gqa-1 cost the same"
    assert sorted(x2 - x1 for x1, x2, _ in stubs) == pytest.approx([-6, 6])


def test_no_name_of_the_picture_covers_another():
    costs = [1024, 512, 256, 128, 288, 256, 260, 5]
    entries = {f"name-{i}": entry(2 + 0.01 * i, cost, 0.4 + 0.002 * i) for i, cost in enumerate(costs)}
    root = ElementTree.fromstring(str(picture.draw(entries, "title", 4096)))
    texts = [e for e in root.iter() if e.tag.endswith("}text") and (e.text or "").startswith("name-")]
    assert len(texts) == 16
    begins = {"start": 0.0, "middle": 22.5, "end": 45.0}
    areas = [(float(e.get("x")) - begins[e.get("text-anchor")], float(e.get("y"))) for e in texts]
    for (x, y), (other_x, other_y) in itertools.combinations(areas, 2):
        assert abs(y - other_y) >= 11 or abs(x - other_x) >= 40


def test_the_stored_run_is_shown_in_the_docs():
    stored, page = ROOT / "benchmarks/results/compare", (ROOT / "docs/howto/compare.md").read_text()
    entries = {name: Entry(**figures) for name, figures in saved(stored)["variants"].items()}
    table = format_table(entries)
    assert table in (stored / "compare.md").read_text() and table in page
    assert (stored / "compare.svg").read_text() == str(picture.draw(entries, saved(stored)["title"], decoding.CONTEXT))
    counts = [entry.parameters for entry in entries.values()]
    assert max(counts) / min(counts) < 1.01, "the page says less than 1%"
    assert "gqa-2" in entries and all(len(entry.losses) == 3 for entry in entries.values())


@pytest.mark.parametrize(
    "changed, words",
    [
        (["--variants", "mha", "foo"], "--variants: got 'foo', want some of mha, gqa-N, mqa, mla, diff, sparse, gdn"),
        (["--variants", "gqa-0"], "with N from 1 to 8"),
        (["--variants", "gqa-9"], "with N from 1 to 8"),
        (["--variants", "mqa", "mqa"], "--variants: got 'mqa' twice"),
        (["--params", "5000"], "--params: got 5,000"),
        (["--learning-rate", "0"], "--learning-rate: got 0.0, want a number between 0 and 1"),
        (["--text", "{tmp}/missing.txt"], "missing.txt: no such file"),
        (["--text", "{tmp}/short.txt"], "has 300 bytes, want at least 1,300; give a longer text"),
        (["--text", "{tmp}/binary"], "cannot be read as UTF-8 text"),
        (["--out", "{tmp}/none/out"], "none/out lies in no folder that exists"),
        (["--out", "{tmp}/short.txt"], "short.txt cannot be written (File exists); choose another folder"),
        (["--out", "/proc/compared"], "/proc/compared cannot be written"),
        (["--out", "{tmp}/taken"], "taken; wait for it, or choose another folder"),
        (["--out", "{tmp}/broken"], "holds no comparison"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_what_does_not_fit_is_named(changed, words, text, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("x" * 300)
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 100)
    for name in ("taken", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "broken" / "compare.json").write_text('{"settings": {}}')
    handle = os.open(tmp_path / "taken", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        given = [each.format(tmp=tmp_path) for each in changed]
        assert cli.main([*arguments(text, tmp_path / "out"), *given]) == 2
    finally:
        os.close(handle)
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("attnpack compare: ") and said.err.count("\n") == 1
    assert words in said.err
    assert not (tmp_path / "out").exists()


def test_a_loss_that_explodes_ends_the_command(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runs.Estimate, "try_out", lambda self, names: self.seconds_per_step.update(mqa=1.0))
    monkeypatch.setattr(training, "loss_of", lambda model, sequences: model(sequences[:, :-1].long()).sum() * torch.inf)
    assert cli.main(arguments(text, tmp_path / "out", names=("mqa",))) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("attnpack compare: mqa, seed 0: the loss is ")
    assert error.endswith("after 0 steps; choose a smaller --learning-rate")


@pytest.mark.parametrize("number", ["x", "0", "5G", "-1", "2000M"])
def test_a_number_of_parameters_that_is_none(number, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["compare", f"--params={number}", "--out", "out"])
    assert stop.value.code == 2
    assert f"got '{number}', expected a number up to 1000M, such as 200K or 5M" in capsys.readouterr().err


def test_params_take_a_suffix():
    given = {text: cli.build_parser().parse_args(["compare", "--params", text, "--out", "x"]).params for text in
             ("200K", "5M", "1.5m", "150000")}  # fmt: skip
    assert given == {"200K": 200_000, "5M": 5_000_000, "1.5m": 1_500_000, "150000": 150_000}
