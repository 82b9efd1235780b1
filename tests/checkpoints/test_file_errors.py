"""An error of a file becomes one sentence that names the file, whatever a reader raised."""

import json

import pytest
from attnpack.file_errors import excerpt, naming


class PanicException(BaseException):
    """The exception of pyo3 for a panic in Rust."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("rope"), "KeyError: 'rope'"),
        (IndexError(), "IndexError"),
        (MemoryError(), "MemoryError"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ValueError("attnpack: factor is 0\nC++ stack"), "factor is 0"),
        (TypeError("attnpack: factor is 'x'"), "factor is 'x'"),
        (json.JSONDecodeError("Expecting value", "", 0), "Expecting value: line 1 column 1 (char 0)"),
        (RuntimeError("x" * 9999), "x" * 500),
        (PanicException("index out of range"), "PanicException: index out of range"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_any_error_becomes_a_sentence(error, words):
    with pytest.raises(ValueError) as caught, naming("a/file", "cannot be read", "get it again"):
        raise error
    assert str(caught.value) == f"a/file: cannot be read ({words}); get it again"
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [ValueError("a/file: is damaged"), ImportError("pip install"), KeyboardInterrupt()])
def test_what_says_it_already_passes(error):
    with pytest.raises(type(error)) as caught, naming("a/file", "cannot be read", "get it again"):
        raise error
    assert caught.value is error


def test_words_of_a_file_stay_short_and_on_one_line():
    assert excerpt("model.norm.weight") == "model.norm.weight"
    assert excerpt("a\nb\x1b[2J") == r"a\nb\x1b[2J"
    assert excerpt("x" * 10**6) == "x" * 77 + "..."
    assert len(excerpt("\0" * 10**6)) == 80
