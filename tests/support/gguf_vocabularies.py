"""GGUF files that hold a vocabulary only."""

from pathlib import Path
from typing import Any

import gguf

BYTES = [f"<0x{n:02X}>" for n in range(256)]


def write_vocabulary(
    path: Path, tokens: list[str], arch: str = "llama", name: str | None = None, **values: Any
) -> Path:
    """Values stand below tokenizer.ggml by their names, those that are None are left out."""
    writer = gguf.GGUFWriter(path, arch)
    if name is not None:
        writer.add_name(name)
    for key, value in {"tokens": tokens, **values}.items():
        key = f"tokenizer.ggml.{key}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, int) and not isinstance(value, bool):
            writer.add_uint32(key, value)
        elif value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
