"""Draws docs/images/model.svg: SmolLM2-135M and single calls of attention, on attnpack and on its rivals.

python benchmarks/draw_model.py

It reads stored runs in benchmarks/results: model*.txt of `attnpack bench model`, quick*.json of `attnpack bench --quick
--json`, peers.txt of `attnpack bench --quick --peers`, and encoder_grid*.txt of `python benchmarks/encoder_grid.py`.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PICTURE = ROOT / "docs/images/model.svg"

Table = dict[tuple[str, str], dict[str, float]]
"""{(row, dtype): {peer: its time in units of ours}}"""


class Machine(NamedTuple):
    name: str
    processor: str
    runs: tuple[str, ...]  # files; a row is of the last file that has it


MACHINES = (
    Machine("Zen 5", "AVX-512", ("model.txt", "peers.txt", "encoder_grid_zen5.txt")),
    Machine("Zen 4", "AVX-512", ("model_zen4.txt", "encoder_grid.txt")),
    Machine("AVX2", "Zen 5 held to AVX2", ("model_avx2.txt", "quick-avx2.json", "encoder_grid_avx2.txt")),
)
PEERS = {"PyTorch's SDPA": "#cc79a7", "transformers": "#e69f00", "llama.cpp": "#0072b2", "zentorch": "#009e73"}
GROUPS = {
    "SmolLM2-135M": {
        "decode batch 1": "writes one token",
        "decode batch 16": "writes for 16 texts",
        "decode 8192 context": "writes after 8,192 tokens",
        "prefill 512 tokens": "reads 512 tokens",
        "prefill 2048 tokens": "reads 2,048 tokens",
    },
    "one call of attention": {
        "decode 32/8 D128 keys, cold": "one token, a long cache",
        "prefill 8/2 D128 L1024 causal": "a prompt of 1,024 tokens",
        "4 x 512 | D 64 | full": "4 texts of 512 tokens",
        "64 x 16 | D 64 | full": "64 texts of 16 tokens",
        "small 4/4 D64 L16": "one text of 16 tokens",
    },
}
ROWS = {row: words for rows in GROUPS.values() for row, words in rows.items()}
LEFT, PANEL, GAP, TOP, STEP = 200, 220, 18, 66, 17  # pixels
LEAST, MOST = 0.7, 16.0  # times as fast
RADIUS = 4  # of a point


def read_model(text: str) -> Table:
    """A table of `attnpack bench model`."""
    lines = text.splitlines()
    head = next(line for line in lines if line.startswith("row "))
    peers = head.split("share")[1].split()
    table = {}
    for line in lines[lines.index(head) + 1 :]:
        if found := re.match(r"(\w+ .*?) +(fp32|bf16) +\S+ +[\d.]+ +[\d.]+ \S+ +\d+%(.*)", line):
            times = re.findall(r"([\d.]+)x\*?|( -)(?= |$)", found[3])
            table[found[1], found[2]] = {
                peer: float(time) for peer, (time, _) in zip(peers, times, strict=True) if time and peer in PEERS
            }
    return table


def read_calls(text: str) -> Table:
    """`attnpack bench`, as JSON or as a table."""
    if text.startswith("{"):
        found = [(each["case"]["name"], each["case"]["dtype"], each["ratios"]) for each in json.loads(text)["results"]]
    else:
        head = next(line for line in text.splitlines() if line.startswith("case "))
        peers = head.split("share")[1].split()[:-1]
        rows = re.findall(r"^(\S.*?) {2,}(fp32|bf16) .*?%(.*?)\S+ MiB$", text, flags=re.M)
        found = [
            (name, dtype, {peer: float(x[:-1]) for peer, x in zip(peers, times.split(), strict=True) if x != "-"})
            for name, dtype, times in rows
        ]
    return {(re.sub(r" \d+ keys", " keys", name), dtype): _by_peer(ratios) for name, dtype, ratios in found}


def _by_peer(ratios: dict[str, float]) -> dict[str, float]:
    """Of SDPA's two forms, plain and with heads packed by hand, the faster one counts."""
    forms = [ratios[form] for form in ("sdpa", "packed") if form in ratios]
    sdpa = {"PyTorch's SDPA": min(forms)} if forms else {}
    return sdpa | {peer: ratio for peer, ratio in ratios.items() if peer in PEERS}


def read_grid(text: str) -> Table:
    """The lines of `python benchmarks/encoder_grid.py`."""
    table = {}
    for dtype, row, peers in re.findall(r"^(\w+) \| (.*?) {2,}.* of the peak(.*)$", text, flags=re.M):
        table[row, dtype] = _by_peer({peer: float(time) for peer, time in re.findall(r"(\w+) +([\d.]+)x", peers)})
    return table


READERS = {"model": read_model, "quick": read_calls, "peers": read_calls, "encoder_grid": read_grid}


def read(machine: Machine) -> Table:
    table: Table = {}
    for name in machine.runs:
        text = (RESULTS / name).read_text()
        reader = next(reader for beginning, reader in READERS.items() if name.startswith(beginning))
        table |= reader(text)
    return table


def place(times: float) -> float:
    """Pixels from the left side of a panel, on a logarithmic axis."""
    return PANEL * math.log(min(max(times, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)


def lines_of_rows() -> Iterator[tuple[float, str, str]]:
    """(y, row, dtype); a group's title takes a line too, with the group as its row and no dtype."""
    y = TOP
    for group, rows in GROUPS.items():
        yield y, group, ""
        y += STEP
        for row in rows:
            for dtype in ("fp32", "bf16"):
                yield y, row, dtype
                y += STEP
        y += STEP // 2


def draw(tables: dict[Machine, Table]) -> str:
    lines = list(lines_of_rows())
    bottom = lines[-1][0] + STEP
    width, height = LEFT + (PANEL + GAP) * len(tables), bottom + 60
    text = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        "<title>How many times as long the rivals take as attnpack, on three machines</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    x = LEFT
    for peer, colour in PEERS.items():
        text.append(f'<circle cx="{x}" cy="14" r="5" fill="{colour}"/><text x="{x + 10}" y="18">{peer}</text>')
        x += 30 + 7 * len(peer)
    for y, row, dtype in lines:
        if not dtype:
            text.append(f'<text x="0" y="{y + 12}" font-weight="bold">{row}</text>')
            continue
        if dtype == "fp32":
            text.append(f'<text x="0" y="{y + 12}">{ROWS[row]}</text>')
        text.append(f'<text x="{LEFT - 12}" y="{y + 12}" text-anchor="end" fill="#555">{dtype}</text>')
    for n, (machine, table) in enumerate(tables.items()):
        text += draw_panel(LEFT + (PANEL + GAP) * n, bottom, machine, table, lines)
        text += draw_absent(LEFT + (PANEL + GAP) * n, table, list(tables.values()), lines)
    notes = (
        "times as long as attnpack; in the shaded part the rival is faster. SDPA: plain, or with heads packed by hand",
        "Points of the same time stand one above the other. llama.cpp writes one text at a time.",
    )
    text += [f'<text x="{LEFT}" y="{height - 24 + 16 * n}" fill="#555">{note}</text>' for n, note in enumerate(notes)]
    return "\n".join([*text, "</svg>"]) + "\n"


def draw_panel(left: float, bottom: float, machine: Machine, table: Table, lines: list) -> list[str]:
    text = [
        f'<text x="{left + PANEL / 2}" y="46" text-anchor="middle"><tspan font-weight="bold">{machine.name}</tspan> '
        f"({machine.processor})</text>",
        f'<rect x="{left}" y="{TOP - 6}" width="{place(1):.1f}" height="{bottom - TOP + 8}" fill="#f3e6e6"/>',
    ]
    for times in (1, 2, 4, 8, 16):
        at, colour = left + place(times), "#333" if times == 1 else "#ccc"
        text.append(
            f'<line x1="{at:.1f}" y1="{TOP - 6}" x2="{at:.1f}" y2="{bottom + 2}" stroke="{colour}"/>'
            f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle" fill="#555">{times}x</text>'
        )
    for y, row, dtype in lines:
        if dtype and not table.get((row, dtype)):
            text.append(f'<text x="{left + place(1) + 8:.1f}" y="{y + 12}" fill="#888">not run</text>')
        for peer, times, x, up in points(table.get((row, dtype), {})):
            text.append(
                f'<circle cx="{left + x:.1f}" cy="{y + 8 + up:g}" r="{RADIUS}" fill="{PEERS[peer]}">'
                f"<title>{peer}: {times:.2f}x</title></circle>"
            )
    return text


def points(row: dict[str, float]) -> Iterator[tuple[str, float, float, float]]:
    """(peer, times, x, pixels below the middle of the line): those that would cover each other stand apart."""
    groups: list[list[tuple[float, str]]] = []
    for x, peer in sorted((place(times), peer) for peer, times in row.items()):
        if groups and x - groups[-1][-1][0] < 2 * RADIUS:
            groups[-1].append((x, peer))
        else:
            groups.append([(x, peer)])
    for group in groups:
        for n, (x, peer) in enumerate(group):
            yield peer, row[peer], x, 1.5 * RADIUS * (n - (len(group) - 1) / 2)


def absent(group: str, table: Table, tables: list[Table]) -> list[str]:
    """The rivals that other machines have in a group of rows, and this one has not."""

    def ran(table: Table) -> set[str]:
        return {peer for (row, _), times in table.items() if row in GROUPS[group] for peer in times}

    return [peer for peer in PEERS if peer in set().union(*map(ran, tables)) - ran(table)]


def draw_absent(left: float, table: Table, tables: list[Table], lines: list) -> list[str]:
    """A line beside the title of each group of rows."""
    return [
        f'<text x="{left + place(1) + 8:.1f}" y="{y + 12}" fill="#888">without {", ".join(peers)}</text>'
        for y, group, dtype in lines
        if not dtype and (peers := absent(group, table, tables))
    ]


def draw_stored() -> str:
    return draw({machine: read(machine) for machine in MACHINES})


if __name__ == "__main__":
    PICTURE.write_text(draw_stored())
    print(PICTURE.relative_to(ROOT))
