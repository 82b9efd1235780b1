"""Prints what a reader may find too much: crowded folders, long files, and in the FILEs the lines with strong words.

    python scripts/advice.py [FILE ...]

It is advice: an idea is never split to obey a number. Strong words (never, only, exactly ...) want a test that holds
them. tests/project/test_claims.py demands one for README and public docstrings.
"""

import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = {".py", ".cpp", ".cu", ".cuh", ".h"}
MOST_FILES, MOST_LINES = 16, 300
STRONG = re.compile(
    r"\b(?:raises?|refused?|never|always|every|(?<!-)only|cannot|nothing)\b"
    r"|\b(?:at most|exact(?:ly)?|bitwise|same bits)\b|Error:",
    re.I,
)


def source_files() -> list[Path]:
    return [file for room in ("csrc", "python", "tests") for file in sorted((ROOT / room).rglob("*"))
            if file.suffix in KINDS and "include" not in file.parts]  # fmt: skip


def main(given: list[str]) -> None:
    files = source_files()
    counts = Counter((file.parent.relative_to(ROOT), file.suffix) for file in files)
    for (folder, suffix), count in sorted(counts.items()):
        if count > MOST_FILES:
            print(f"{folder}: {count} files {suffix}")
    for file in files:
        lines = len(file.read_text(encoding="utf-8").splitlines())
        if lines > MOST_LINES:
            print(f"{file.relative_to(ROOT)}: {lines} lines")
    for name in given:
        for number, line in enumerate(Path(name).read_text(encoding="utf-8").splitlines(), 1):
            if STRONG.search(re.sub(r"`[^`]*`", "", line)):
                print(f"{name}:{number}: {line.strip()}")


if __name__ == "__main__":
    main(sys.argv[1:])
