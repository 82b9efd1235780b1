"""Writes a GGUF file again with its matrices in 8 or 4 bits, as llama.cpp reads it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from ...atomic_write import atomic_file
from ...checkpoints.gguf_file import GgufFile
from ...file_errors import naming
from ...nn.stored import to_stored
from ...progress import progress

BITS = {"Q8_0": 8, "Q4_0": 4}
_MOST_NUMBERS = 1 << 22  # that are widened at a time
# llama.cpp reads these row by row, or adds them up: they stay as they are.
_NO_MATRICES = ("position_embd.weight", "ffn_gate_inp.weight", "rope_freqs.weight")


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
    """Writes the GGUF file `source` to `out`, with matrices in the format `kind` ("Q8_0" or "Q4_0"). Vectors, and
    matrices whose rows are no multiple of 32, stay as they are.

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
    import gguf

    with naming(source, "cannot be converted", "get it again"), atomic_file(out) as partial:
        reader = gguf.GGUFReader(source)
        writer = gguf.GGUFWriter(partial, file.metadata["general.architecture"])
        _copy_metadata(reader, writer, kind)
        for tensor in progress(reader.tensors, f"writing {out.name}"):
            shape = file.tensors[tensor.name].shape
            if _is_matrix(tensor.name, shape):
                blocks = _blocks_of(file, tensor.name, BITS[kind]).view(*shape[:-1], -1)
                writer.add_tensor(tensor.name, blocks.numpy(), raw_dtype=gguf.GGMLQuantizationType[kind])
            else:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    before, after = (path.stat().st_size for path in (source, out))
    return GgufReport(str(out), kind, before, after, time.monotonic() - started)


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) >= 2 and name.endswith(".weight") and name not in _NO_MATRICES and shape[-1] % 32 == 0


def _blocks_of(file: GgufFile, name: str, bits: int) -> torch.Tensor:
    shape = file.tensors[name].shape
    rows = file.tensors[name].nbytes // file.tensors[name].row_bytes
    step, parts = max(1, _MOST_NUMBERS // shape[-1]), []
    for first in range(0, rows, step):
        numbers = torch.empty(min(step, rows - first), shape[-1])
        file.read(name, numbers, first)
        parts.append(to_stored(numbers, bits).flatten(1))
    return torch.cat(parts)


def _copy_metadata(reader, writer, kind: str) -> None:
    import gguf

    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
