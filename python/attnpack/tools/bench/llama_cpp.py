"""llama.cpp on SmolLM2: `pip install llama-cpp-python gguf` builds it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch

from ...checkpoints import smollm2_path


class LlamaCpp:
    """Greedy tokens with plain weights of a dtype and torch's number of threads; keys and values are fp16.

    Args:
        dtype: "fp32", "bf16" or "fp16".
        context: positions of its cache, for the prompt and the new tokens.
    """

    def __init__(self, dtype: str, context: int) -> None:
        from llama_cpp import Llama

        threads = torch.get_num_threads()
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "model.gguf"
            write_plain(path, dtype)
            self._model = Llama(str(path), n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False)

    def generate(
        self, ids: torch.Tensor, new_tokens: int, callback: Callable[[int], object], keep: bool = False
    ) -> torch.Tensor:
        """ids [1, L] -> [1, L + new_tokens].

        Args:
            callback: called with each new token.
            keep: take the prompt's keys and values from the call before, if it had the same prompt.
        """
        if not keep:
            self._model.reset()  # otherwise llama.cpp would reuse the prompt from its cache
        tokens = ids[0].tolist()
        with contextlib.closing(self._model.generate(tokens[:], temp=0.0, repeat_penalty=1.0)) as stream:
            for token in islice(stream, new_tokens):
                callback(token)
                tokens.append(token)
        return torch.tensor([tokens])


def write_plain(path: Path, dtype: str) -> None:
    """Writes SmolLM2's file with each matrix in the given dtype."""
    import gguf

    plain = getattr(gguf.GGMLQuantizationType, {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}[dtype])
    kind = {"fp32": "ALL_F32", "bf16": "MOSTLY_BF16", "fp16": "MOSTLY_F16"}[dtype]
    reader = gguf.GGUFReader(smollm2_path())
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(getattr(gguf.LlamaFileType, kind))
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        to = plain if numbers.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(numbers, to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
