"""GGUF files that contradict themselves: refused as the package gguf, or ggml's own reader, refuses them."""

import struct

import gguf
import numpy as np
import pytest
from attnpack.checkpoints.gguf_file import GgufFile

F32, Q8_0 = 0, 8
UINT16, UINT32, UINT64, STRING = 2, 4, 10, 8


def text(words: str | bytes) -> bytes:
    words = words.encode() if isinstance(words, str) else words
    return struct.pack("<Q", len(words)) + words


def key(name: str | bytes, kind: int, value: int | str) -> bytes:
    forms = {UINT16: "<H", UINT32: "<I", UINT64: "<Q"}
    return text(name) + struct.pack("<I", kind) + (text(value) if kind == STRING else struct.pack(forms[kind], value))


def tensor(name: str | bytes, dims: tuple[int, ...], at: int, kind: int = F32) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, at)


def write(path, tensors: list[bytes], keys: list[bytes] = (), alignment: int = 32, size: int = 512):
    """A GGUF file with these descriptions and `size` bytes of data: 0, 1, 2 ..."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join([*keys, *tensors])
    head += bytes(-len(head) % alignment)
    path.write_bytes(head + bytes(i % 256 for i in range(size)))
    return path


def align(to: int, kind: int = UINT32) -> bytes:
    return key("general.alignment", kind, to)


# Tensors and keys, words of the refusal, and whether the package gguf refuses too. If it does not, ggml does.
LIES = {
    "overlap": ([tensor("a", (16,), 0), tensor("b", (16,), 32)], [], "tensor b begins at byte 32", False),
    "all at 0": ([tensor("a", (16,), 0), tensor("b", (16,), 0)], [], "tensor b begins at byte 0", False),
    "unaligned": ([tensor("a", (15,), 0), tensor("b", (15,), 60)], [], "tensor b begins at byte 60", False),
    "first unaligned": ([tensor("a", (16,), 4)], [], "tensor a begins at byte 4", False),
    "gap": ([tensor("a", (16,), 0), tensor("b", (16,), 96)], [], "tensor b begins at byte 96", False),
    "alignment ignored": ([tensor("a", (16,), 0), tensor("b", (16,), 64)], [align(128)], "end at 128", False),
    "two tensors of a name": ([tensor("a", (16,), 0), tensor("a", (16,), 64)], [], "has tensor a twice", True),
    "two keys of a name": ([], [key("k", UINT32, 1), key("k", UINT32, 1)], "has the key k twice", True),
    "alignment 0": ([], [align(0)], "general.alignment is 0", True),
    "alignment 48": ([], [align(48)], "general.alignment is 48", True),
    "alignment 2 bytes long": ([], [align(32, UINT16)], "general.alignment is 32 (type 2)", True),
    "alignment 8 bytes long": ([], [align(32, UINT64)], "general.alignment is 32 (type 10)", True),
    "alignment a text": ([], [key("general.alignment", STRING, "32")], "general.alignment is '32'", True),
    "no dims": ([tensor("a", (), 0)], [], "tensor a has 0 dims, wants 1 to 4", False),
    "five dims": ([tensor("a", (1, 1, 1, 1, 1), 0)], [], "tensor a has 5 dims, wants 1 to 4", False),
    "a broken block": ([tensor("a", (33,), 0, Q8_0)], [], "rows of 33, which its type stores in blocks of 32", True),
    "a size that wraps": ([tensor("a", (2**62, 4), 0)], [], "the file is truncated", True),
    "a name that is no text": ([tensor(b"\xff", (16,), 0)], [], "is no GGUF file that can be read", True),
    "a key that is no text": ([], [key(b"\xff", UINT32, 1)], "is no GGUF file that can be read", True),
    "a type that is none": ([tensor("a", (16,), 0, 99)], [], "of a type the package gguf cannot dequantise", True),
    "a type that is no more": ([tensor("a", (16,), 0, 4)], [], "of type 4, which ggml has removed; use a file", True),
}


@pytest.mark.parametrize("name", LIES)
def test_a_file_that_contradicts_itself_is_refused(name, tmp_path):
    tensors, keys, words, theirs = LIES[name]
    path = write(tmp_path / "x.gguf", tensors, keys, alignment=128 if "128" in words else 32)
    with pytest.raises(ValueError) as caught:
        GgufFile(path)
    assert str(caught.value).startswith(f"{path}: ") and words in str(caught.value)
    try:
        gguf.GGUFReader(path)
        refused = False
    except (ValueError, KeyError):
        refused = True
    assert refused == theirs, "the table is wrong"


@pytest.mark.parametrize("alignment", [8, 32, 128, 4096])
def test_alignment_is_the_one_that_the_file_names(alignment, tmp_path):
    tensors = [tensor("a", (3,), 0), tensor("b", (2, 2), max(16, alignment))]
    path = write(tmp_path / "x.gguf", tensors, [align(alignment)], alignment, size=16 + max(16, alignment))
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    assert [t.offset for t in ours.tensors.values()] == [t.data_offset for t in theirs.tensors]
    data = path.read_bytes()
    for found in theirs.tensors:
        at = ours.tensors[found.name].offset
        assert np.array_equal(np.frombuffer(data[at : at + found.n_bytes], np.float32), found.data.flatten())


def test_alignment_is_32_where_the_file_names_none(tmp_path):
    path = write(tmp_path / "x.gguf", [tensor("a", (3,), 0), tensor("b", (3,), 32)])
    assert [t.offset for t in GgufFile(path).tensors.values()] == [t.data_offset for t in gguf.GGUFReader(path).tensors]
