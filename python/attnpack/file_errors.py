"""Errors of files that others made: one sentence, which names the file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_LONGEST = 80  # characters of a file's own words in a sentence


@contextlib.contextmanager
def naming(path: str | os.PathLike, failed: str, fix: str) -> Iterator[None]:
    """An error of the block that does not name `path` becomes a ValueError "PATH: FAILED (the error); FIX".

    A missing package is not the file's fault: ImportError passes. A panic of a package in Rust is no Exception.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, ImportError) or not (isinstance(error, Exception) or _is_panic(error)):
            raise
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(f"{path}: {failed} ({_reason(error)}); {fix}") from error


def brief(text: object) -> str:
    """Words from a file as a sentence can hold them: short, on one line, printable."""
    words = str(text)
    if not words.isprintable():
        words = repr(words[:_LONGEST])[1:-1]
    return words if len(words) <= _LONGEST else words[: _LONGEST - 3] + "..."


def _is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    words = str(error).strip().split("\n")[0].removeprefix("attnpack: ")
    said = words and (isinstance(error, ValueError | RuntimeError) or str(error).startswith("attnpack: "))
    return words[:500] if said else ": ".join(filter(None, (type(error).__name__, words[:200])))
