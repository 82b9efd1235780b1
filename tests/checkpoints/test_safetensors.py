"""Safetensors files: accepted and refused as the Rust package does, which is the format's own reader."""

import json
import os
import random
import re
import resource
from pathlib import Path

import pytest
import safetensors
import torch
from attnpack.checkpoints import load_safetensors, save_safetensors
from attnpack.checkpoints.safetensors import SafetensorsFile
from fuzz import weights
from processes import run_python

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
    "spaces before": (" " + json.dumps({"a": F32}), True),
    "a description as a list": ({"a": ["F32", [2], [0, 8]]}, True),
    "a description as a long list": ({"a": ["F32", [2], [0, 8], 1]}, False),
    "a dtype as an object": ({"a": F32 | {"dtype": {"F32": None}}}, True),
    "a dtype as an object with a value": ({"a": F32 | {"dtype": {"F32": 1}}}, False),
    "a number too small": (one('"x": 1e-400'), True),
    "a zero with a large exponent": (one('"x": 0e999999999999'), True),
    "an exponent that no int holds": (one('"x": 1e-99999999999999999999'), True),
    "a large exponent of a small number": (one('"x": 0.' + 400 * "0" + "1e410"), True),
    "a leading zero": (one('"x": 01'), False),
    "a plus": (one('"x": +1'), False),
    "a point without digits": (one('"x": 1.'), False),
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
    "-0 as size of an empty one": (json.dumps(two(shape=["Z"], data_offsets=[8, 8])).replace('"Z"', "-0"), False),
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


def compare(seed: int, count: int, capsys) -> None:
    """Whether Rust and attnpack accept the same damaged files, and give the same tensors of them."""
    failures = weights.compare(seed, count)
    printed = capsys.readouterr().out
    assert failures == 0, printed
    read, _, taken = re.search(r"weights: (\d+) files from seed (\d+), (\d+) of them", printed).groups()
    assert int(read) == count
    assert count / 20 < int(taken) < count * 3 / 4, "the lies test little"


def test_verdicts_and_tensors_are_those_of_rust_on_files_with_lies(capsys):
    compare(0, 3_000, capsys)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_verdicts_and_tensors_are_those_of_rust_on_many_files_with_lies(capsys):
    seed = random.randrange(2**31)
    print("seed", seed)
    compare(seed, 100_000, capsys)


def test_a_crash_is_a_failure_with_its_seed(monkeypatch, capsys, tmp_path):
    child = tmp_path / "child.py"
    child.write_text("import os, sys\nopen(sys.argv[4] + '/seed', 'w').write('8')\nos.abort()\n")
    monkeypatch.setattr(weights, "__file__", str(child))
    assert weights.compare(7, 5) == 1
    assert "seed 8: the process ended with -6" in capsys.readouterr().out


def test_a_weight_of_several_pieces_is_converted_as_torch_does(tmp_path):
    weight = torch.randn(3, 800_001, dtype=torch.float64)  # read in pieces of 2^20
    save_safetensors({"a": weight}, tmp_path / "x.safetensors")
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        out = torch.empty(3, 800_001, dtype=dtype)
        SafetensorsFile(tmp_path / "x.safetensors").read("a", out)
        assert torch.equal(out, weight.to(dtype))


def test_what_is_saved_is_what_the_other_library_reads(tmp_path):
    tensors = {"b": torch.randn(3, 4).t(), "a": torch.arange(3, dtype=torch.int8), "c": torch.tensor([True, False])}
    save_safetensors(tensors, tmp_path / "x.safetensors", {"format": "pt", "é\n": '"'})
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "é\n": '"'}
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)


def test_mapped_memory_is_resident_once_it_is_used(tmp_path):
    """A file of 128 MiB; a process of its own, whose resident memory nothing else changes."""
    save_safetensors({f"t{i}": torch.full((1 << 22,), float(i)) for i in range(8)}, tmp_path / "x.safetensors")
    ended = run_python(f"""
import time
import torch
from attnpack.checkpoints import load_safetensors
from attnpack.tools.memory import resident_bytes
load_safetensors({str(tmp_path / "x.safetensors")!r})
before = resident_bytes("VmRSS")
tensors = load_safetensors({str(tmp_path / "x.safetensors")!r})
mapped = resident_bytes("VmRSS")
assert [tensor[-1].item() for tensor in tensors.values()] == [float(i) for i in range(8)]
total = sum(tensor.sum().item() for tensor in tensors.values())
print(mapped - before, resident_bytes("VmRSS") - before, total)
""")
    mapped, used, total = map(float, ended.stdout.split())
    size = (tmp_path / "x.safetensors").stat().st_size
    assert mapped < 0.05 * size, f"{mapped / size:.3f} of the file"
    assert used > 0.9 * size and total == 28 * (1 << 22)


@pytest.mark.parametrize("tensors", [None, [torch.ones(1)], {1: torch.ones(1)}, {"a": [1.0]}])
def test_tensors_of_the_wrong_kind_are_refused(tensors, tmp_path):
    with pytest.raises(TypeError, match="attnpack: tensors is .*, wants a dict of tensors by name"):
        save_safetensors(tensors, tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_tensor_at_an_odd_byte_is_aligned(tmp_path):
    header = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "b": F32 | {"data_offsets": [1, 9]}}
    (tmp_path / "x.safetensors").write_bytes(file_of(header, b"\1" + bytes(8)))
    tensors = load_safetensors(tmp_path / "x.safetensors")
    assert tensors["b"].data_ptr() % 4 == 0 and tensors["b"].tolist() == [0.0, 0.0]


def test_saved_tensors_are_aligned(tmp_path):
    save_safetensors({"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(3)}, tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    places = {name: entry["data_offsets"] for name, entry in json.loads(data[8:start]).items() if name in "ab"}
    assert start % 8 == 0 and places == {"b": [0, 12], "a": [12, 15]}


def test_a_full_disk_leaves_nothing(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(ValueError, match=r"x: cannot be written \(File too large\), and nothing of it is kept"):
            save_safetensors({"a": torch.ones(100_000)}, tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("stored", "size"), [("F4", 16), ("F6_E2M3", 4), ("I64", 1), ("BOOL", 8), ("F8_E4M3", 8)])
def test_a_weight_of_another_dtype_is_refused_by_its_name(stored, size, tmp_path):
    entry = {"dtype": stored, "shape": [size], "data_offsets": [0, 3 if stored == "F6_E2M3" else 8]}
    (tmp_path / "x").write_bytes(file_of({"a": entry}, bytes(entry["data_offsets"][1])))
    file = SafetensorsFile(tmp_path / "x")
    for call in (lambda: file.read("a", torch.empty(size)), lambda: file.dtype("a")):
        with pytest.raises(ValueError, match=f"x: tensor a is {stored}; readable are F64, F32, F16, BF16"):
            call()
    with pytest.raises(ValueError, match=rf"x: tensor a has shape \[{size}\], and is read into one of shape \[3, 7\]"):
        file.read("a", torch.empty(3, 7))
    with pytest.raises(ValueError, match="x: has no tensor b"):
        file.dtype("b")


def test_a_path_that_is_no_utf8(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff.safetensors"
    save_safetensors({"a": torch.arange(3.0)}, path)
    assert os.listdir(os.fsencode(tmp_path)) == [b"\xff.safetensors"]
    for given in (path, os.fsdecode(path), Path(os.fsdecode(path))):
        assert torch.equal(load_safetensors(given)["a"], torch.arange(3.0))
    with pytest.raises(ValueError) as caught:
        load_safetensors(path + b"x")
    assert str(caught.value).startswith(f"{os.fsdecode(path)}x: is not a safetensors file (No such file or directory)")
