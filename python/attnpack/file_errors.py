"""Errors about files that others made: one sentence that names the file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_LONGEST = 80  # characters that an error sentence quotes from a file


@contextlib.contextmanager
def naming(path: str | os.PathLike, failed: str, fix: str) -> Iterator[None]:
    """Turns an error of the block that does not begin with `path` into a ValueError "PATH: FAILED (the error); FIX".

    ImportError passes: a missing package is not the file's fault. The panic of a package in Rust is turned as well: it
    is a BaseException, but no Exception.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, ImportError) or not (isinstance(error, Exception) or _is_panic(error)):
            raise
        if isinstance(error, ValueError) and str(error).removeprefix("attnpack: ").startswith(str(path)):
            raise
        raise ValueError(f"{path}: {failed} ({_reason(error)}); {fix}") from error


def excerpt(text: object) -> str:
    """Words from a file, made fit for an error sentence: short, on one line, printable."""
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
    explains_itself = words and (isinstance(error, ValueError | RuntimeError) or str(error).startswith("attnpack: "))
    return words[:500] if explains_itself else ": ".join(filter(None, (type(error).__name__, words[:200])))
