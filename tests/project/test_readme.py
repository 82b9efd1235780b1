"""The README and the pages of docs/ are true: their Python runs, their C++ is the example's, their names, links,
commands and figures exist."""

import itertools
import json
import re
import runpy
from pathlib import Path

import attnpack
import pytest
import torch
from attnpack.tools.plot import schematic
from marks import some_long

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
VARIANTS = README + (ROOT / "docs/variants.md").read_text(encoding="utf-8")


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)


def lines(text):
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_opens_with_what_it_is_and_where_it_runs():
    first, picture, second, third = README.split("\n\n")[1:5]
    assert first.startswith("attnpack is an attention library for PyTorch: ") and "Python and in C++" in first
    assert picture.startswith("![") and "a library for CPUs today" in second
    assert "**Take it** to" in third and "**Take something else** to" in third
    (state,) = re.findall(r"^\| state \|(.*)\|(.*)\|$", README, flags=re.M)
    assert "works" in state[0] and "no GPU" in state[1]
    assert "Python >= 3.11 and torch >= 2.11. The build needs a C++20 compiler" in README
    assert "set(CMAKE_CXX_STANDARD 20)" in (ROOT / "CMakeLists.txt").read_text()


def test_is_short():
    words = [word for word in README.split() if any(map(str.isalnum, word))]
    assert len(README.splitlines()) <= 150 and len(words) <= 1000


def test_the_picture_is_what_the_code_draws():
    write = (
        "python -c \"from attnpack.tools.plot import schematic as s; s.variants().save('docs/images/variants.svg')\""
    )
    assert (ROOT / "docs/images/variants.svg").read_text(encoding="utf-8") == str(schematic.variants()), write


DRAW = runpy.run_path(str(ROOT / "benchmarks/draw_model.py"))
PEERS = {
    "PyTorch's SDPA, heads packed by hand": "packed",
    "PyTorch's SDPA": "sdpa",
    "llama.cpp": "llama.cpp",
    "transformers": "transformers",
}


def test_the_headlines_figures_are_stored():
    stored = {}  # {case: (attnpack's figure, {peer: ratio})}
    for each in json.loads((ROOT / "benchmarks/results/quick.json").read_text())["results"]:
        name = f"{each['case']['name']} {each['case']['dtype']}"
        stored[name] = round(1e3 * each["seconds"], 3), {peer: round(x, 2) for peer, x in each["ratios"].items()}
    for line in (ROOT / "benchmarks/results/model.txt").read_text().splitlines():
        if found := re.match(r"((?:decode|prefill) .*?) +(fp32|bf16) +\S+ +([\d.]+) ", line):
            ratios = map(float, re.findall(r"([\d.]+)x", line))
            named = dict(zip(("transformers", "transformers+attnpack", "llama.cpp"), ratios, strict=False))
            stored[f"{found[1]} {found[2]}"] = float(found[3]), named
    cases = [
        "decode 32/8 D128 24576 keys, cold bf16",
        "prefill 8/2 D128 L1024 causal fp32",
        "decode batch 1 bf16",
        "prefill 512 tokens bf16",
    ]
    rows = re.findall(r"^\| [^|]+ \| ([\d.]+) [\w/]+ \| ([^|]+) \| ([\d.]+) \|$", README, flags=re.M)
    shown = [(float(figure), float(ratio)) for figure, _, ratio in rows]
    assert shown == [
        (stored[case][0], stored[case][1][PEERS[peer]]) for case, (_, peer, _) in zip(cases, rows, strict=True)
    ]
    avx2 = (ROOT / "benchmarks/results/model_avx2.txt").read_text()
    (step,) = re.findall(r"^decode batch 1 .* ([\d.]+)x *$", avx2, flags=re.M)
    assert f"With AVX2 it writes fp32 tokens {step} times as fast as llama.cpp" in README
    zen4 = (ROOT / "benchmarks/results/model_zen4.txt").read_text()
    (row,) = re.findall(r"^decode batch 1 +bf16.*$", zen4, flags=re.M)
    assert f"On Zen 4 it writes tokens {re.findall(r'([0-9.]+)x', row)[2]} (bf16)" in README


def test_the_picture_of_the_model_is_what_the_script_draws():
    assert (ROOT / "docs/images/model.svg").read_text() == DRAW["draw_stored"](), "python benchmarks/draw_model.py"


def test_the_picture_of_the_model_shows_the_stored_ratios():
    """One point of each kind of file, read by hand here; of SDPA's two forms the faster one is drawn."""
    tables = {(machine.name, machine.processor): DRAW["read"](machine) for machine in DRAW["MACHINES"]}
    zen5, zen4, avx2 = (
        tables[("Zen 5", "AVX-512")],
        tables[("Zen 4", "AVX-512")],
        tables[("AVX2", "Zen 5 held to AVX2")],
    )
    assert zen4["decode batch 1", "bf16"] == {"transformers": 3.38, "llama.cpp": 0.96, "zentorch": 1.83}
    assert zen4["4 x 512 | D 64 | full", "fp32"] == {"PyTorch's SDPA": 1.41, "zentorch": 1.23}
    stored = json.loads((ROOT / "benchmarks/results/quick-avx2.json").read_text())["results"]
    cases = {(each["case"]["name"], each["case"]["dtype"]): each["ratios"] for each in stored}
    ratios = cases["decode 32/8 D128 24576 keys, cold", "bf16"]
    assert ratios["packed"] < ratios["sdpa"]
    assert avx2["decode 32/8 D128 keys, cold", "bf16"]["PyTorch's SDPA"] == ratios["packed"]
    peers = (ROOT / "benchmarks/results/peers.txt").read_text()
    (row,) = re.findall(r"^decode 32/32 D128 3072 keys, cold +fp32 .*", peers, flags=re.M)
    flex = re.findall(r"([\d.]+)x", row)[1]
    assert f"it decodes fp32 {flex} times as fast as compiled FlexAttention" in README
    (row,) = re.findall(r"^decode 32/8 D128 24576 keys, cold +bf16 .*", peers, flags=re.M)
    sdpa, packed, *_, zentorch = map(float, re.findall(r"([\d.]+)x", row))
    assert f"first row is {packed}" in README, "the table's row is of another run"
    assert zen5["decode 32/8 D128 keys, cold", "bf16"] == {"PyTorch's SDPA": min(sdpa, packed), "zentorch": zentorch}
    assert "Zen 5 held to AVX2" in (ROOT / "docs/images/model.svg").read_text()
    for row in DRAW["ROWS"]:
        assert any(row == found for found, _ in zen5), row


def test_the_readme_tells_each_row_of_the_picture_that_a_rival_wins():
    for machine in DRAW["MACHINES"]:
        for case, row in DRAW["read"](machine).items():
            for peer, times in row.items():
                told = re.search(rf"(?<![\d.]){times}(?: \(bf16\))?(?: and 0\.\d+)? times", README)
                assert times >= 1 or told, (machine.name, case, peer, times)


def test_the_picture_says_which_rivals_did_not_run():
    """A row, a group of rows, or the note: llama.cpp has one text at a time."""
    tables = [DRAW["read"](machine) for machine in DRAW["MACHINES"]]
    picture = (ROOT / "docs/images/model.svg").read_text()
    empty = left_out = 0
    for table in tables:
        for group, rows in DRAW["GROUPS"].items():
            absent = DRAW["absent"](group, table, tables)
            left_out += bool(absent)
            wanted = {"SmolLM2-135M": {"transformers", "llama.cpp", "zentorch"}}.get(
                group, {"PyTorch's SDPA", "zentorch"}
            )
            for row in rows:
                for dtype in ("fp32", "bf16"):
                    ran = set(table.get((row, dtype), {}))
                    empty += not ran
                    missing = wanted - ran - set(absent) if ran else set()
                    assert missing == ({"llama.cpp"} if ran and row == "decode batch 16" else set()), (row, dtype)
    assert picture.count(">not run<") == empty > 0 and picture.count(">without zentorch<") == left_out > 0
    assert "llama.cpp writes one text at a time" in picture


def test_no_point_of_the_picture_hides_another():
    for machine in DRAW["MACHINES"]:
        for row in DRAW["read"](machine).values():
            places = [(x, up) for _, _, x, up in DRAW["points"](row)]
            for (x, up), (other_x, other_up) in itertools.combinations(places, 2):
                assert (x - other_x) ** 2 + (up - other_up) ** 2 >= DRAW["RADIUS"] ** 2, (machine.name, row)


def test_the_readme_says_what_the_panel_of_avx2_is():
    assert "Zen 5 with all programs held to AVX2" in " ".join(README.split())
    assert "ATTNPACK_ISA=avx2" in (ROOT / "benchmarks/results/model_avx2.txt").read_text()
    assert json.loads((ROOT / "benchmarks/results/quick-avx2.json").read_text())["isa"] == "avx2"
    grid = (ROOT / "benchmarks/results/encoder_grid_avx2.txt").read_text()
    (slower,) = re.findall(r"^fp32 \| 64 x 16 \| D 64 \| full .* sdpa +([\d.]+)x", grid, flags=re.M)
    assert "(avx2)" in grid and f"64 texts of 16 tokens {slower} times as fast as SDPA" in README


def stored_on_cuda() -> dict[str, tuple[tuple[str, ...], list[str]]]:
    """By case: the figures that a page may show, and the ratios to flash and cudnn, of both files of results."""
    stored = {}
    for line in (ROOT / "benchmarks/results/cuda.txt").read_text().splitlines():
        if found := re.match(r"(\S.*?) +bf16 +([\d.]+) +([\d.]+) +([\d.]+) .*%(.*)", line):
            shown = (f"{found[2]} ms", f"{float(found[3]) / 1e3:.0f} TFLOP/s", f"{float(found[4]) / 1e3:.1f} TB/s")
            stored[found[1]] = shown, found[5].replace("x", "").split()[:2]
    for line in (ROOT / "benchmarks/results/cuda_sm90.txt").read_text().splitlines():
        case = line.partition(": ")[0]
        for part, ms, rate, flash, cudnn in re.findall(r"(\w+) ([\d.]+) ms (\d+) TF flash (\d+) cudnn (\d+)", line):
            ratios = [f"{int(rate) / int(peer):.2f}" for peer in (flash, cudnn)]
            stored[f"{part} {case}"] = (f"{ms} ms", f"{rate} TFLOP/s"), ratios
        if found := re.match(r"latent \d+: \S+ ms (\S+) TB/s (\d+) TF", line):
            stored[line] = (f"{found[1]} TB/s", f"{found[2]} TFLOP/s"), ["-", "-"]
    return stored


def test_the_figures_of_cuda_are_stored():
    stored = stored_on_cuda()
    (heading,) = re.findall(r"^\| (.*times as fast as) \| FlashAttention-2 \| cuDNN \|$", README, flags=re.M)
    assert heading.startswith("earlier kernels on two H200, 2026-11-26 and 27 ([changed since](docs/cuda.md))")
    for day in ("2026-11-26", "2026-11-27"):
        assert f"bf16, {day}" in (ROOT / "docs/cuda.md").read_text(), "the days of the tables"
    assert "the worst row, times as fast" in heading
    shown = re.findall(r"^\| (?:decode|prefill|gradients) \| ([\d.]+) \| ([\d.]+) \|$", README, flags=re.M)
    least = []
    for kind in ("decode", "fwd", "bwd"):
        for peer in (0, 1):
            ratios = (ratios[peer] for case, (_, ratios) in stored.items() if case.startswith(kind))
            least.append(min(ratios, key=float))
    assert [ratio for row in shown for ratio in row] == least
    page = (ROOT / "docs/cuda.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*? \| ([\d.]+ (?:ms|TFLOP/s)) \| ([\d.]+) \| ([\d.]+) \|", page, flags=re.M)
    assert len(rows) == sum(case.startswith(("decode", "fwd", "bwd")) for case in stored)
    for figure, *ratios in rows:
        assert any(figure in shown and ratios == peers for shown, peers in stored.values()), figure


# tests/distributed/test_example.py runs the blocks of distributed.md, on several processes.
@pytest.mark.parametrize(
    "page",
    some_long(
        [page for page in PAGES if blocks(page, "python") and page.name != "distributed.md"],
        [page for page in PAGES if page.stem not in ("heads", "transformers")],  # both load and run whole models
    ),
    ids=lambda page: page.stem,
)
def test_python_snippets_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)
    if page.parent.parent.name == "python":  # a page of the API
        assert capsys.readouterr().out.splitlines() == printed(blocks(page, "python")[0])
    if page.name == "README.md":
        assert names["out"].shape == (1, 10, 512)
        assert [tuple(names[name].shape) for name in "qkv"] == [(1, 8, 10, 64), (1, 2, 10, 64), (1, 2, 10, 64)]


def test_pages_with_snippets_are_known():
    assert {
        "README",
        "torch",
        "transformers",
        "convert",
        "latent",
        "variants",
        "flash",
        "weights",
        "distributed",
        "sparse",
        "heads",
        "bits",
        "index",
        "onnx",
    } == {page.stem for page in PAGES if blocks(page, "python") and page.parent.parent.name != "python"}


@pytest.mark.parametrize("folder", ["modules", "caches", "ops"])
def test_every_page_of_the_api_begins_with_an_example(folder):
    """test_python_snippets_run runs them, and compares what they print with what they say."""
    pages = sorted((ROOT / "docs/api/python" / folder).glob("*.md"))
    table = (ROOT / f"docs/api/python/{folder}.md").read_text()
    assert {page.stem for page in pages} <= set(re.findall(r"^~attnpack\.(\w+)$", table, flags=re.M))
    for page in pages:
        (example,) = blocks(page, "python")
        assert f"attnpack.{page.stem}" in example and printed(example), page.stem
        assert page.read_text().startswith(f"# {page.stem}\n\n```python\n")


def printed(block):
    """The lines that the block says it prints: the comments after its prints."""
    return re.findall(r"^ *print\(.* # (.*)$", block, flags=re.M)


def test_the_homes_figures_are_the_readmes():
    """Those of the README are stored; the ratios to the other peers of a row are in the same stored run."""
    shown = dict(re.findall(r"<b>([\d.]+)x</b><span>(.*?)</span>", (ROOT / "docs/index.md").read_text(), flags=re.S))
    in_readme = set(re.findall(r"\| ([\d.]+) \|$", README, flags=re.M))
    (line,) = re.findall(r"^decode batch 1 +bf16.*$", (ROOT / "benchmarks/results/model.txt").read_text(), flags=re.M)
    assert len(shown) == 3
    for figure, text in shown.items():
        if "transformers" in text:
            (llama,) = re.findall(r"([\d.]+)x as llama.cpp", " ".join(text.split()))
            assert re.findall(r"([\d.]+)x", line)[::2] == [figure, llama]
        else:
            assert figure in in_readme


@pytest.mark.parametrize("page", ["README.md", "docs/howto/cpp.md"])
@pytest.mark.parametrize("language, file", [("cpp", "main.cpp"), ("cmake", "CMakeLists.txt")])
def test_cpp_is_that_of_the_example_which_the_tests_build_and_run(page, language, file):
    sources = [ROOT / "examples/cpp/hello_attention" / file]
    if language == "cpp":
        sources.append(ROOT / "tests/cpp/modules/test_parts.cpp")
    example = iter([line for source in sources for line in lines(source.read_text())])
    found = blocks(ROOT / page, language)
    assert found or (page, language) == ("README.md", "cmake")
    for line in lines("".join(found)):
        assert line in example, f"{line!r} is not in {file}, or not in this order"


def test_the_table_of_caches_has_every_cache():
    caches = (ROOT / "docs/caches.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(\w+Cache)\(", caches.split("cache_error.py")[0], flags=re.M))
    others = {"ModelCache"}  # the list of a model's caches, in prose
    assert rows == {name for name in attnpack.__all__ if name.endswith("Cache")} - others
    assert len(rows) == 9 and "the nine caches" in " ".join(README.split())


def test_named_things_exist():
    tables = re.findall(r"^\| `(\w+)` \|", README, flags=re.M)
    prose = re.search(r"^Around them:.*?\.\s\[", VARIANTS, flags=re.S | re.M).group()
    names = tables + re.findall(r"`(\w+)`", prose)
    assert {"MultiQueryAttention", "CausalLM", "apply_rope"} <= set(names)
    assert [name for name in names if not hasattr(attnpack, name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_linked_files_and_scripts_exist(page):
    text = page.read_text(encoding="utf-8")
    paths = re.findall(r"\]\((?![a-z]+:)([^)#]+)(?:#[^)]*)?\)", text)
    scripts = re.findall(r"\b(?:bash|python) ((?:scripts|benchmarks)/\S+\.(?:sh|py))", text)
    assert paths or scripts or "api" in page.parts or page.parent.name in ("docs", "howto")
    assert [path for path in paths if not (page.parent / path).exists()] == []
    assert [path for path in scripts if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    "keyword, value", [("window", (3, 0)), ("softcap", 30.0), ("sinks", True), ("alibi", True), ("dropout", 0.1)]
)
def test_what_modules_are_said_to_take_they_take(keyword, value):
    assert f"`{keyword}`" in VARIANTS
    for module in (attnpack.MultiHeadAttention, attnpack.cpp.MultiHeadAttention):
        assert module(16, 2, **{keyword: value}).forward(torch.zeros(1, 2, 16)).shape == (1, 2, 16)
    if keyword not in ("sinks", "alibi"):
        attnpack.ProjectedAttention(2, 2, 8, **{keyword: value})


def test_rope_types_are_those_that_the_pages_name():
    (line,) = re.findall(r"`RotaryEmbedding` stretches positions.*?\.", VARIANTS, flags=re.S)
    for kind in re.findall(r"`(\w+)`", line)[2:]:
        lists = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
        attnpack.RotaryEmbedding(8, scaling={"rope_type": kind, "factor": 2.0, **lists})
