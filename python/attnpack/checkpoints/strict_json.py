"""JSON from files that others made: takes what Rust's serde_json takes, refuses duplicate keys, and limits the cost."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from ..errors import with_article
from ..file_errors import brief, naming

LONGEST = 100_000_000  # bytes, the limit of Rust's safetensors for a header
_MOST_MARKS = 6_000_000  # of "[{:,", which limit the number of values; a vocabulary of 262,144 tokens has 2.1 million
_DEEPEST = 127  # levels of nested objects and lists
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises ValueError, naming the file, if there is none."""
    with naming(path, "cannot be read as JSON", "get the checkpoint again"):
        value = parse_json(read_bounded(path, LONGEST))
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds {with_article(type(value).__name__)}, a JSON object is needed")
    return value


def read_bounded(path: Path, most: int) -> bytes:
    """A file's bytes; raises ValueError if it has more than `most`."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most} bytes")
    return data


def check_values(data: bytes, most: int = _MOST_MARKS) -> None:
    """Raises ValueError for JSON with more than `most` values: each value may cost 200 bytes of memory."""
    if sum(map(data.count, (b"[", b"{", b":", b","))) > most:
        raise ValueError(f"it has more than {most} values")


def parse_json(data: bytes, most: int = _MOST_MARKS) -> Any:
    """The value in the JSON text. An integer that does not fit in 64 bits becomes a float.

    Raises ValueError, for more than `most` values too.
    """
    check_values(data, most)
    text = data.decode("utf-8")
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_no_number, parse_int=_integer, parse_float=_finite
        )
    except RecursionError:
        raise ValueError(f"values more than {_DEEPEST} deep in each other") from None
    if _is_deeper(value, _DEEPEST):
        raise ValueError(f"values more than {_DEEPEST} deep in each other")
    if _HALF_CHARACTER.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = set()
        twice = next(name for name, _ in pairs if name in names or names.add(name))
        raise ValueError(f"{brief(twice)} is in an object twice")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {brief(text)} is too large")
    return value


def _integer(text: str) -> int | float:
    value = int(text) if len(text) <= 20 and text != "-0" else None
    return value if value is not None and -(2**63) <= value < 2**64 else _finite(text)


def _is_deeper(value: Any, levels: int) -> bool:
    layer = [value] if isinstance(value, dict | list) else []
    while layer and levels:
        inside = (child for each in layer for child in (each.values() if isinstance(each, dict) else each))
        layer, levels = [child for child in inside if isinstance(child, dict | list)], levels - 1
    return bool(layer)
