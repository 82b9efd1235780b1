"""JSON of files from unknown authors; test_safetensors.py compares with Rust's reader."""

import json

import pytest
from attnpack.checkpoints.strict_json import parse_json, read_json


@pytest.mark.parametrize("value", [{"a": [1, -2, 0.5, 1e300, None, True, "é\n\U0001f642"], "b": {"c": {}}}, [], 3, "x"])
def test_it_reads_what_json_writes(value):
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


def test_integers_of_64_bits_are_exact_and_longer_ones_floats():
    found = parse_json(b"[18446744073709551615, -9223372036854775808, 18446744073709551616, -9223372036854775809]")
    assert found == [2**64 - 1, -(2**63), 2.0**64, -(2.0**63)]
    assert [type(number) for number in found] == [int, int, float, float]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"a": 1, "b": {"a": 1, "a": 1}}', "a is in an object twice"),
        (b"[NaN]", "line 1, column 2: .*invalid literal; last read: .*N"),
        (b"[\n-Infinity]", "line 2, column 2: .*invalid number; expected digit after '-'; last read: .*-I"),
        (b"1e400", "the number 1e400 is too large"),
        (b"9" * 5000, "the number 999.*is too large"),
        (b"[" * 128 + b"]" * 128, "more than 127 deep"),
        (b"[" * 10**6, "more than 127 deep"),
        (b'["\\ud800"]', "surrogate U.D800..U.DBFF must be followed by"),
        (b'["\xed\xa0\x80"]', r"ill-formed UTF-8 byte; last read: .*\\xed\\xa0"),
        (b'["\xe2\x80\xaea\xff"]', r"ill-formed UTF-8 byte; last read: .*\\u202ea\\xff"),
        (b"\xff", r"invalid literal; last read: .*\\xff"),
        (b'["\n"]', "control character U.000A .* must be escaped"),
        (b"[1] [", "column 5: .*unexpected '\\['; expected end of input"),
        (b"{} \0", "byte 3 is 0"),
        (b"", "empty input"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"[" + b"[]," * 3_000_000 + b"1]", "more than 6000000 values"),
    ],
    ids=[
        "duplicate",
        "nan",
        "infinity",
        "exponent",
        "digits",
        "deep",
        "deeper",
        "half",
        "surrogate",
        "hidden",
        "bytes",
        "control",
        "more",
        "zero",
        "empty",
        "bom",
        "many",
    ],  # fmt: skip
)
def test_what_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        parse_json(text)


def test_errors_name_the_file(tmp_path):
    path = tmp_path / "config.json"
    for content, words in ((b"{", "cannot be read as JSON"), (b"[]", "holds a list, a JSON object is needed")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"^{path}: {words}"):
            read_json(path)
    path.write_text(f'["{path}')  # the error quotes it as the last text that was read
    with pytest.raises(ValueError, match=f"^{path}: cannot be read as JSON .parse error at line 1, column "):
        read_json(path)
    with pytest.raises(ValueError, match=f"^{tmp_path / 'none'}: cannot be read as JSON .No such file or directory"):
        read_json(tmp_path / "none")
    with path.open("wb") as file:
        file.truncate(100_000_001)
    with pytest.raises(ValueError, match=f"^{path}: cannot be read as JSON .it has more than 100000000 bytes"):
        read_json(path)
