"""Damaged safetensors files: attnpack must accept what Rust's reader accepts, with the same tensors, and no other file.

A child process reads them one after the other, so that a crash is a failure with a seed.
`python scripts/fuzz.py weights` runs it.
"""

from __future__ import annotations

import functools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

MEMORY = 1 << 30  # that reading files may add
# Reasons by which load_safetensors refuses a file that Rust's reader takes.
_NO_TENSOR = ("which torch does not have", "is empty, and its other sizes are too large")
_LETTERS = '{}[]",:0123456789eE+-. \n\\utruefalsnF\x00\x7f\u00e9'


def main(seed: int, seconds: float) -> int:
    """Prints each failure with its seed; returns the number of failures."""
    return compare(seed, seconds=seconds)


def compare(seed: int, count: int = 10**9, seconds: float = 10**9) -> int:
    """Reads `count` files from `seed` on, as far as the time allows. Returns the number of failures."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as out:
        command = [sys.executable, __file__, str(seed), str(count), str(seconds), folder]
        ended = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"})
        out.seek(0)
        lines = out.read().splitlines()
        last = Path(folder, "seed").read_text() if Path(folder, "seed").exists() else seed
    wrong = [line for line in lines if line.startswith("seed ")]
    if ended.returncode != 0:
        wrong.append(f"seed {last}: the process ended with {ended.returncode} {' '.join(lines)[-500:]}")
    print("\n".join([*wrong, *(line for line in lines if line.startswith("weights: "))]), flush=True)
    return len(wrong)


@functools.cache
def whole() -> list[bytes]:
    """Undamaged files: one of a model, and one with every dtype, whose tensors begin at odd bytes too."""
    from fuzz import lies

    names = ("U8", "F64", "BOOL", "I16", "F16", "BF16", "I32", "U16", "U32", "F32", "I64", "U64", "C64", "F8_E4M3")
    sizes = dict(zip(names, (1, 8, 1, 2, 2, 2, 4, 2, 4, 4, 8, 8, 8, 1), strict=True))
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, size in [*sizes.items(), ("F4", 0.5), ("F6_E2M3", 0.75)]:
        shape = [4] if size < 1 else [3, 1]
        begin, end = end, end + int(size * (4 if size < 1 else 3))
        header[f"a {name}"] = {"dtype": name, "shape": shape, "data_offsets": [begin, end]}
    header["empty"] = {"dtype": "F32", "shape": [0, 5], "data_offsets": [end, end]}
    text = json.dumps(header).encode()
    mixed = len(text).to_bytes(8, "little") + text + random.Random(0).randbytes(end)
    return [lies.whole_hf(False)["model.safetensors"], mixed]


def reworded(data: bytes, draw: random.Random) -> bytes:
    """The file with a few letters of its header changed, added or lost; its length says so."""
    end = 8 + int.from_bytes(data[:8], "little")
    text = bytearray(data[8:end])
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        at = draw.randrange(len(text) + 1)
        new = draw.choice(_LETTERS).encode() if draw.random() < 0.7 else b""
        text[at : at + draw.choice([0, 1])] = new
    return len(text).to_bytes(8, "little") + text + data[end:]


def damaged(seed: int) -> bytes:
    from fuzz import lies

    draw = random.Random(seed)
    data = draw.choice(whole())
    for _ in range(draw.choice([1, 1, 2])):
        change = draw.choice([lies.damaged, lies.lying_header, lies.lying_header, reworded])
        try:
            data = change(data, draw)
        except ValueError:  # the header is no text any more
            data = lies.damaged(data, draw)
    return data


def check_bytes(data: bytes, path: Path) -> tuple[str, bool]:
    """The fault, or "", and whether Rust's reader takes the file."""
    import safetensors
    from attnpack.checkpoints.safetensors import SafetensorsFile, load_safetensors

    path.write_bytes(data)
    try:
        theirs, why = dict(safetensors.deserialize(data)), ""
    except safetensors.SafetensorError as error:
        theirs, why = None, str(error)
    said = ""
    try:
        SafetensorsFile(path)
    except ValueError as error:
        said = str(error)
        if not said.startswith(f"{path}: ") or "\n" in said:
            return f"no sentence that names the file: {said!r}", theirs is not None
    if "is in an object twice" in said:  # the format forbids it; Rust takes the last
        return "", theirs is not None
    if (theirs is None) != bool(said):
        return f"Rust says {why!r}, attnpack {said!r}", theirs is not None
    if theirs is None:
        return "", False
    try:
        ours = load_safetensors(path)
    except ValueError as error:
        return "" if any(words in str(error) for words in _NO_TENSOR) else f"load: {error}", True
    return differences(ours, theirs), True


def differences(ours: dict, theirs: dict) -> str:
    import numpy
    import torch

    if ours.keys() != theirs.keys():
        return f"other names: {ours.keys() ^ theirs.keys()}"
    for name, tensor in ours.items():
        expected = theirs[name]
        data = numpy.frombuffer(bytes(expected["data"]), numpy.uint8)
        found = tensor.reshape(-1).view(torch.uint8).numpy()
        same = (data != 0) if tensor.dtype == torch.bool else data
        if list(tensor.shape) != expected["shape"] or not numpy.array_equal(found, same):
            return f"{name} differs"
    return ""


def work(seed: int, count: int, seconds: float, folder: Path) -> None:
    """The child process."""
    from attnpack.tools.memory import resident_bytes

    for data in whole():
        check_bytes(data, folder / "x.safetensors")  # imports what is needed
    most = resident_bytes("VmSize") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    end, taken, first = time.monotonic() + seconds, 0, seed
    with (folder / "seed").open("w") as last:
        while seed - first < count and time.monotonic() < end:
            last.seek(0)
            last.write(str(seed))
            last.flush()
            complaint, accepted = check_bytes(damaged(seed), folder / "x.safetensors")
            taken += accepted
            if complaint:
                print(f"seed {seed}: {complaint}", flush=True)
            seed += 1
    print(f"weights: {seed - first} files from seed {first}, {taken} of them accepted")


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
