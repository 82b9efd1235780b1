"""Draws docs/images/model.svg: SmolLM2-135M on attnpack and on its rivals, on two machines.

python benchmarks/draw_model.py    from benchmarks/results/model*.txt, the stored runs of `attnpack bench model`
"""

import math
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/images/model.svg"
MACHINES = {
    "Zen 5, AVX-512": "model.txt",
    "Zen 4, AVX-512": "model_zen4.txt",
    "Zen 5, only AVX2": "model_avx2.txt",
}
PEERS = {"transformers": "#e69f00", "llama.cpp": "#0072b2", "zentorch": "#009e73"}
ROWS = {
    "decode batch 1": "writes one token",
    "decode batch 16": "writes for 16 texts",
    "decode 8192 context": "writes after 8,192 tokens",
    "prefill 512 tokens": "reads 512 tokens",
    "prefill 2048 tokens": "reads 2,048 tokens",
}
LEFT, PANEL, GAP, TOP, STEP = 196, 220, 18, 66, 17  # pixels
LEAST, MOST = 0.7, 16.0  # times as fast


def read(path: Path) -> dict[tuple[str, str], dict[str, float]]:
    """{(row, dtype): {peer: its time in units of ours}} of a table of `attnpack bench model`."""
    lines = path.read_text().splitlines()
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


def place(times: float) -> float:
    """Pixels from the left side of a panel, on a logarithmic axis."""
    return PANEL * math.log(min(max(times, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)


def draw(tables: dict[str, dict]) -> str:
    rows = [(row, dtype) for row in ROWS for dtype in ("fp32", "bf16")]
    bottom = TOP + STEP * len(rows)
    width, height = LEFT + (PANEL + GAP) * len(tables), bottom + 44
    text = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        "<title>How many times as long the rivals take as attnpack, for SmolLM2-135M</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    x = LEFT
    for peer, colour in PEERS.items():
        text.append(f'<circle cx="{x}" cy="14" r="5" fill="{colour}"/><text x="{x + 10}" y="18">{peer}</text>')
        x += 30 + 7 * len(peer)
    for n, (row, dtype) in enumerate(rows):
        y = TOP + STEP * n + 12
        if dtype == "fp32":
            text.append(f'<text x="0" y="{y}">{ROWS[row]}</text>')
        text.append(f'<text x="{LEFT - 12}" y="{y}" text-anchor="end" fill="#555">{dtype}</text>')
    for n, (machine, table) in enumerate(tables.items()):
        left = LEFT + (PANEL + GAP) * n
        text.append(f'<text x="{left + PANEL / 2}" y="46" text-anchor="middle" font-weight="bold">{machine}</text>')
        text.append(
            f'<rect x="{left}" y="{TOP - 6}" width="{place(1):.1f}" height="{bottom - TOP + 8}" fill="#f3e6e6"/>'
        )
        for times in (1, 2, 4, 8, 16):
            at, colour = left + place(times), "#333" if times == 1 else "#ccc"
            text.append(
                f'<line x1="{at:.1f}" y1="{TOP - 6}" x2="{at:.1f}" y2="{bottom + 2}" stroke="{colour}"/>'
                f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle" fill="#555">{times}x</text>'
            )
        for m, row in enumerate(rows):
            for peer, times in table.get(row, {}).items():
                text.append(
                    f'<circle cx="{left + place(times):.1f}" cy="{TOP + STEP * m + 8}" r="4.5" fill="{PEERS[peer]}">'
                    f"<title>{peer}: {times}x</title></circle>"
                )
    note = "times as long as attnpack; in the shaded part the rival is faster"
    text.append(f'<text x="{LEFT}" y="{height - 8}" fill="#555">{note}</text></svg>')
    return "\n".join(text) + "\n"


def draw_stored() -> str:
    results = ROOT / "benchmarks/results"
    return draw({machine: read(results / name) for machine, name in MACHINES.items()})


if __name__ == "__main__":
    PICTURE.write_text(draw_stored())
    print(PICTURE.relative_to(ROOT))
