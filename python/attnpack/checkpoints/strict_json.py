"""JSON from files that others made. C++ reads it (csrc/attnpack/weights): takes what Rust's serde_json takes, refuses
duplicate keys, and limits the cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .._C import checkpoints

LONGEST: int = checkpoints.LONGEST_JSON  # bytes, the limit of Rust's safetensors for a header

# The value in the JSON text (bytes). An integer that does not fit in 64 bits becomes a float. Raises ValueError, for
# more than 6,000,000 values too.
parse_json = checkpoints.parse_json
# Raises ValueError for JSON text with more values than that.
check_values = checkpoints.check_json_values


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises ValueError, naming the file, if there is none."""
    return checkpoints.read_json(path)


def read_bounded(path: Path, most: int) -> bytes:
    """A file's bytes; raises ValueError if it has more than `most`."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most} bytes")
    return data
