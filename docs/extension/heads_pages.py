"""The pages of heads of the site: docs/heads has their numbers, and a build writes them with the template of today.

`python docs/extension/heads_pages.py` computes the numbers again, from SmolLM2, and draws docs/images/heads.png, by
Chromium. With `picture` it only draws.
"""

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "heads"
MODEL = "SmolLM2-135M-Instruct"
TEXTS = {
    "pronoun": "The animal did not cross the street because it was too tired.",
    "names": "Mr. Dursley left. Mrs. Potter saw Mr. Durs",
    "capitals": "France: Paris\nJapan: Tokyo\nItaly: Rome\nSpain:",
}
OPENED = {"pronoun": {"query": 8, "key": 1}}
"""Where a page opens at another query than that of its first finding: here at "it", of which the text asks."""
BACK = '<body>\n<p class="note"><a href="../howto/heads.html">attnpack: look at heads</a></p>'


@functools.cache
def smollm2() -> tuple:
    """(model, tokenizer)"""
    from attnpack import checkpoints

    path = checkpoints.smollm2_path()
    return checkpoints.load(path), checkpoints.load_tokenizer(path)


def compute(text: str) -> dict:
    """The numbers of a page: all layers of SmolLM2 on the text."""
    import torch
    from attnpack.tools.plot.page import page_data

    model, tokenizer = smollm2()
    ids = tokenizer.encode(text)
    with torch.no_grad():
        return page_data(model, ids, [tokenizer.decode([token]) for token in ids])


def write_pages(folder: Path) -> None:
    """The finished pages, into `folder`."""
    from attnpack.tools.plot.page import page_text

    folder.mkdir(parents=True, exist_ok=True)
    for name in TEXTS:
        data = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        data["open"] |= OPENED.get(name, {})
        page = page_text(MODEL, data).replace("<body>", BACK)
        (folder / f"{name}.html").write_text(page, encoding="utf-8")


def draw_picture() -> None:
    """docs/images/heads.png: the page of names, as it opens."""
    with tempfile.TemporaryDirectory() as folder:
        write_pages(Path(folder))
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        command += [f"--user-data-dir={folder}/profile", "--window-size=1280,910", "--virtual-time-budget=4000"]
        command += [f"--screenshot={FOLDER.parent / 'images/heads.png'}", f"file://{folder}/names.html"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    for name, text in ({} if "picture" in sys.argv else TEXTS).items():
        (FOLDER / f"{name}.json").write_text(json.dumps(compute(text)) + "\n", encoding="utf-8")
    draw_picture()
