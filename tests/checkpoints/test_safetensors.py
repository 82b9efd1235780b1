"""Safetensors files: accepted and refused as the Rust package does, which is the format's own reader."""

import json
import random
from pathlib import Path

import pytest
import safetensors
from attnpack.checkpoints.safetensors import SafetensorsFile
from fuzz import lies

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def file_of(header: dict | list | str, data: bytes = bytes(8)) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode("utf-8", errors="surrogatepass")
    return len(text).to_bytes(8, "little") + text + data


def rust_refuses(data: bytes) -> str | None:
    try:
        safetensors.deserialize(data)
    except safetensors.SafetensorError as error:
        return str(error)


def we_refuse(data: bytes, path: Path) -> str | None:
    path.write_bytes(data)
    try:
        SafetensorsFile(path)
    except ValueError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error), error
        return str(error)


def one(text: str) -> str:
    """A header of one tensor with `text`, which json.dumps might not write, in its description."""
    return json.dumps({"a": F32}).replace("}}", f", {text}}}}}")


def two(**second) -> dict:
    return {"a": F32, "b": F32 | second}


# The text of the header, whether the file is valid, and the number of bytes that follow (default 8).
TOLD = {
    "one tensor": ({"a": F32}, True),
    "metadata": ({"__metadata__": {"format": "pt"}, "a": F32}, True),
    "metadata null": ({"__metadata__": None, "a": F32}, True),
    "metadata of numbers": ({"__metadata__": {"format": 1}, "a": F32}, False),
    "metadata a list": ({"__metadata__": [], "a": F32}, False),
    "metadata a text": ({"__metadata__": "x", "a": F32}, False),
    "an unknown field": ({"a": F32 | {"more": [{}]}}, True),
    "an unknown dtype": ({"a": F32 | {"dtype": "F33"}}, False),
    "another dtype": ({"a": F32 | {"dtype": "I64", "shape": []}}, True),
    "half bytes": ({"a": F32 | {"dtype": "F4", "shape": [16]}}, True),
    "half a byte too few": ({"a": F32 | {"dtype": "F4", "shape": [15]}}, False),
    "a list": ([], False),
    "no tensors": ({}, False),
    "a float as size": ({"a": F32 | {"shape": [2.0]}}, False),
    "true as size": ({"a": F32 | {"dtype": "F64", "shape": [True]}}, False),
    "a gap before": ({"a": F32 | {"shape": [1], "data_offsets": [4, 8]}}, False),
    "a gap between": (two(data_offsets=[12, 20]), False, 20),
    "an overlap": (two(shape=[1], data_offsets=[4, 8]), False),
    "all at 0": (two(), False),
    "out of order": ({"b": F32 | {"data_offsets": [8, 16]}, "a": F32}, True, 16),
    "bytes after": ({"a": F32 | {"shape": [1], "data_offsets": [0, 4]}}, False),
    "begin after end": ({"a": F32 | {"data_offsets": [8, 0]}}, False),
    "empty at the end": (two(shape=[3, 0], data_offsets=[8, 8]), True),
    "empty at the start": (two(shape=[0], data_offsets=[0, 0]), True),
    "empty inside another": (two(shape=[0], data_offsets=[4, 4]), False),
    "a size that wraps to 0": (two(shape=[2**32, 2**32], data_offsets=[8, 8]), False),
    "a size that wraps, then 0": (two(shape=[2**32, 2**32, 0], data_offsets=[8, 8]), False),
    "0, then a size that would wrap": (two(shape=[0, 2**32, 2**32], data_offsets=[8, 8]), True),
    "bits that wrap": (two(shape=[2**60], data_offsets=[8, 8]), False),
    "125 lists in each other": (one('"x": ' + 125 * "[" + 125 * "]"), True),
    "126 lists in each other": (one('"x": ' + 126 * "[" + 126 * "]"), False),
    "30 digits": (one('"x": ' + 30 * "9"), True),
    "400 digits": (one('"x": ' + 400 * "9"), False),
    "NaN": (one('"x": NaN'), False),
    "-0 as size": (one('"shape": [-0]').replace('"shape": [2], ', ""), False),
    "half a character": (one(r'"\ud800": 1'), False),
    "both halves": (one(r'"\ud83d\ude00": 1'), True),
    "a control character": (one('"\n": 1'), False),
    "spaces after": (one('"x": 1') + "  ", True),
    "a zero after": (one('"x": 1') + "\0", False),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_rust_refuses_is_refused_and_nothing_else(name, tmp_path):
    header, whole, *size = TOLD[name]
    data = file_of(header, bytes(*size or [8]))
    ours = we_refuse(data, tmp_path / "x.safetensors")
    assert (rust_refuses(data) is None) == whole, "the table is wrong"
    assert (ours is None) == whole, ours


@pytest.mark.parametrize("header", [
    '{"a": %s, "a": %s}', '{"__metadata__": {"x": "1", "x": "2"}, "a": %s}', '{"a": {"dtype": "F32", "dtype": "F32"}}',
])  # fmt: skip
def test_duplicate_keys_are_refused(header, tmp_path):
    """The format forbids duplicate keys; Rust takes the last of most of them."""
    data = file_of(header.replace("%s", json.dumps(F32)))
    assert "is in an object twice" in we_refuse(data, tmp_path / "x.safetensors")


def test_a_header_longer_than_the_file_or_than_rust_takes(tmp_path):
    path = tmp_path / "x.safetensors"
    for length in (9, 2**63, 2**64 - 1, 2**64 - 8):
        assert "is no whole safetensors file (it has 16 bytes)" in we_refuse(
            length.to_bytes(8, "little") + bytes(8), path
        )
    for length, words in ((100_000_001, "100000000"), (100_000_000, "Expecting value")):
        with path.open("wb") as file:
            file.write(length.to_bytes(8, "little"))
            file.truncate(8 + length)  # a hole
        with pytest.raises(ValueError, match=words):
            SafetensorsFile(path)


def compare(seed: int, count: int, path: Path) -> None:
    """Whether Rust and attnpack accept damaged files."""
    draw = random.Random(seed)
    whole = lies.whole_hf(False)["model.safetensors"]
    refused = 0
    for case in range(count):
        data = whole
        for _ in range(draw.choice([1, 1, 2])):
            data = draw.choice([lies.damaged, lies.lying_header, lies.lying_header])(data, draw)
        theirs, ours = rust_refuses(data), we_refuse(data, path)
        twice = ours is not None and "is in an object twice" in ours
        assert (ours is None) == (theirs is None) or (twice and theirs is None), (seed, case, theirs, ours)
        refused += ours is not None
    assert count / 4 < refused < count, "the lies test little"


def test_verdicts_are_those_of_rust_on_files_with_lies(tmp_path):
    compare(0, 800, tmp_path / "x.safetensors")


@pytest.mark.long
def test_verdicts_are_those_of_rust_on_many_files_with_lies(tmp_path):
    seed = random.randrange(2**31)
    print("seed", seed)
    compare(seed, 100_000, tmp_path / "x.safetensors")
