"""Writes a GGUF file again with its matrices in 8 or 4 bits, as llama.cpp reads it."""

from __future__ import annotations

import math
import re
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from ...atomic_write import atomic_file
from ...checkpoints.gguf_file import GgufFile, GgufTensor, padded
from ...file_errors import excerpt, naming
from ...nn.stored import STORED_LAYOUTS, to_stored
from ...progress import progress

BITS = {"Q8_0": 8, "Q4_0": 4}
_MOST_NUMBERS = 1 << 20  # that are widened at a time
_VERSION, _UINT32 = 3, 4  # of GGUF, and its number of the type

# The ends of the names of tensors that llama.cpp's quantiser does not round. These are norms, which may have a row per
# head, routers, tables of positions and token types, and small matrices of recurrent layers, Gemma 3n and indexers.
_LEFT = re.compile(
    r"""(^|[._])(norm(_2)? | position_embd | token_types | rope_freqs
    | ffn_gate_inp(_shexp)? | ffn_gate_tid2eid | attn_rel_b | indexer[.][kq]_proj
    | ssm_conv1d(_[qkv])? | shortconv[.]conv | time_mix_(first | ln | lerp_\w+ | decay_w[12] | [agvw][012] | [kr]_[akr])
    | altup_\w+ | laurel_[lr] | per_layer_model_proj)[.]weight$""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class GgufReport:
    """A GGUF file that was written: the format of its matrices, and the bytes of both files."""

    out: str
    format: str
    bytes_before: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        before, after = (size / 2**20 for size in (self.bytes_before, self.bytes))
        return f"{self.out}: matrices in {self.format}, {before:.0f} -> {after:.0f} MiB, in {self.seconds:.1f} s"


def write_gguf(source: Path, out: Path, kind: str) -> GgufReport:
    """Writes the GGUF file `source` to `out`, with matrices in the format `kind` ("Q8_0" or "Q4_0"). Vectors, matrices
    whose rows are no multiple of 32, and what llama.cpp's quantiser leaves (norms, routers, small matrices of recurrent
    layers) stay as they are. All other metadata are copied.

    Raises ValueError, and leaves no output, for a directory, a damaged file and weights that are not finite.
    """
    started = time.monotonic()
    if source.is_dir():
        raise ValueError(
            f"{source}: is a directory; --to-gguf takes a GGUF file, which llama.cpp's convert_hf_to_gguf.py makes"
        )
    if source.resolve() == out.resolve():
        raise ValueError(f"{out}: is the file to read, which stays as it is; choose another name")
    file = GgufFile(source)
    file.check_model()
    wanted = {name: _wanted(name, tensor, kind) for name, tensor in file.tensors.items()}
    with atomic_file(out) as partial, partial.open("xb") as to:
        to.write(_header(file, wanted, kind))
        for name, tensor in progress(wanted.items(), f"writing {out.name}"):
            _pad(to, file.alignment)
            for piece in _pieces(file, name, None if tensor is file.tensors[name] else BITS[kind]):
                to.write(piece)
        _pad(to, file.alignment)
    before, after = (path.stat().st_size for path in (source, out))
    return GgufReport(str(out), kind, before, after, time.monotonic() - started)


def _wanted(name: str, tensor: GgufTensor, kind: str) -> GgufTensor:
    """The tensor as it is written; its offset is nobody's yet."""
    from gguf import GGMLQuantizationType

    stays = len(tensor.shape) < 2 or tensor.shape[-1] % 32 or not name.endswith(".weight") or _LEFT.search(name)
    if stays or tensor.type == GGMLQuantizationType[kind]:
        return tensor
    numbers, size = STORED_LAYOUTS[kind]
    return GgufTensor(tensor.shape, int(GGMLQuantizationType[kind]), -1, tensor.shape[-1] // numbers * size)


def _header(file: GgufFile, wanted: dict[str, GgufTensor], kind: str) -> bytes:
    """All before the tensors, but for the padding: the metadata as the bytes that the file has, and what changes."""
    from gguf import GGML_QUANT_VERSION, LlamaFileType

    changed = {
        "general.file_type": int(LlamaFileType[f"MOSTLY_{kind}"]),
        "general.quantization_version": GGML_QUANT_VERSION,
    }
    with naming(file.path, "cannot be read", "get it again"), file.path.open("rb") as source:
        items = []
        for key, (begin, end) in file.metadata_places.items():
            source.seek(begin)
            items += [] if key in changed else [source.read(end - begin)]
    items += [_text(key) + struct.pack("<II", _UINT32, value) for key, value in changed.items()]
    infos, at = [], 0
    for name, tensor in wanted.items():
        sizes = tensor.shape[::-1]
        dims = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        infos.append(_text(name) + dims + struct.pack("<IQ", tensor.type, at))
        at = padded(at + tensor.nbytes, file.alignment)
    return b"".join([b"GGUF", struct.pack("<IQQ", _VERSION, len(infos), len(items)), *items, *infos])


def _text(text: str) -> bytes:
    letters = text.encode()
    return struct.pack("<Q", len(letters)) + letters


def _pad(to: BinaryIO, alignment: int) -> None:
    """Zeros up to a multiple of alignment, which a file may give as 2^31."""
    to.seek(to.truncate(padded(to.tell(), alignment)))


def _pieces(file: GgufFile, name: str, bits: int | None) -> Iterator[bytes | memoryview]:
    """The bytes of a tensor, some rows at a time: rounded to so many bits, or as they are."""
    tensor = file.tensors[name]
    rows, step = math.prod(tensor.shape[:-1]), max(1, _MOST_NUMBERS // tensor.shape[-1])
    with (
        naming(file.path, f"tensor {excerpt(name)} cannot be written in another format", "get the file again"),
        file.path.open("rb") as source,
    ):
        for first in range(0, rows, step):
            count = min(step, rows - first)
            if bits is None:
                source.seek(tensor.offset + first * tensor.row_bytes)
                yield source.read(count * tensor.row_bytes)
            else:
                numbers = torch.empty(count, tensor.shape[-1])
                file.read(name, numbers, first)
                yield memoryview(to_stored(numbers, bits).numpy()).cast("B")
