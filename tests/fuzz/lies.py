"""Small checkpoints, made by attnpack and the package gguf, and damaged copies of them, each from a seed."""

from __future__ import annotations

import functools
import json
import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attnpack
import gguf
import numpy as np
import torch
from attnpack.checkpoints.writer import SafetensorsWriter
from tokenizers import Tokenizer, models, pre_tokenizers

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
ROPE = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "original_max_position_embeddings": 32}
TEMPLATE = "{% for message in messages %}{{ bos_token }}{{ message['content'] }}{% endfor %}"
INDEX = "model.safetensors.index.json"
Files = dict[str, bytes]

_INTEGERS = [0, 1, 2, 3, 7, 8, 31, 33, 100, 255, 2**16, 2**28, 10**9, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1]
_INTEGERS += [2**63, 2**64 - 1, 2**64, -1, -8, -(2**31), -(2**63), 10**30]
_OTHERS = [
    None,
    True,
    False,
    "",
    "x",
    "F16",
    "../x",
    "a\nb",
    "\0",
    [],
    {},
    [1],
    {"a": 1},
    [[]],
    0.5,
    1e-300,
    1e300,
    8.0,
]


# ---- undamaged checkpoints -----------------------------------------------------------


def _state() -> dict[str, Any]:
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return attnpack.CausalLM(*(SIZES[name] for name in names), hidden_dim=24, max_positions=64).state_dict()


def _letters() -> list[str]:
    return [*sorted(pre_tokenizers.ByteLevel.alphabet())[:29], "()", "<s>", "</s>"]


def _tokenizer() -> str:
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(_letters())}, merges=[("(", ")")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer.to_str()


def _safetensors(path: Path, tensors: dict[str, Any]) -> bytes:
    writer = SafetensorsWriter(path, {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        writer.write_tensor(name, tensor)
    writer.close()
    return path.read_bytes()


@functools.cache
def whole_hf(shards: bool) -> Files:
    """A Llama directory's files."""
    config = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_parameters": ROPE, **SIZES}
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    files = {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": _tokenizer().encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
        "generation_config.json": b'{"eos_token_id": [31]}',
    }
    state = _state()
    names = [f"model-{n}.safetensors" for n in (1, 2)] if shards else ["model.safetensors"]
    with tempfile.TemporaryDirectory() as folder:
        for n, file in enumerate(names):
            files[file] = _safetensors(Path(folder) / file, dict(list(state.items())[n :: len(names)]))
    if shards:
        places = {name: names[i % 2] for i, name in enumerate(state)}
        files[INDEX] = json.dumps({"weight_map": places}).encode()
    return files


@functools.cache
def whole_gguf(vocabulary: str = "gpt2") -> Files:
    """The same as a GGUF file, with a vocabulary of that kind."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, SIZES["num_hidden_layers"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_embedding_length(SIZES["hidden_size"])
        writer.add_block_count(SIZES["num_hidden_layers"])
        writer.add_feed_forward_length(SIZES["intermediate_size"])
        writer.add_context_length(SIZES["max_position_embeddings"])
        writer.add_head_count(SIZES["num_attention_heads"])
        writer.add_head_count_kv(SIZES["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_custom_alignment(32)
        writer.add_tokenizer_model(vocabulary)
        writer.add_token_list(_letters())
        if vocabulary == "gpt2":
            writer.add_tokenizer_pre("gpt-2")
            writer.add_token_merges(["( )"])
        else:
            writer.add_token_scores([float(-i) for i in range(len(_letters()))])
            writer.add_unk_token_id(0)
        writer.add_token_types([1] * 30 + [3, 3])
        writer.add_bos_token_id(30)
        writer.add_eos_token_id(31)
        writer.add_chat_template(TEMPLATE)
        for name, tensor in _state().items():
            writer.add_tensor(table.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(tensor.numpy()))
        writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return {"model.gguf": path.read_bytes()}


# ---- damage --------------------------------------------------------------------------


def damaged(data: bytes, draw: random.Random) -> bytes:
    """The data with bytes changed, moved, lost or added, mostly in headers."""
    data = bytearray(data)
    at = draw.randrange(min(len(data), draw.choice([16, 200, 2000, 10**9])) + 1)
    length = draw.choice([1, 1, 2, 4, 8, 30, 300])
    number = draw.choice(_INTEGERS) % 2**64
    kind = draw.randrange(8)
    if kind == 0:
        data[at : at + length] = draw.randbytes(length)
    elif kind == 1:
        data[at : at + 8] = number.to_bytes(8, "little")
    elif kind == 2:
        data[at : at + 4] = (number % 2**32).to_bytes(4, "little")
    elif kind == 3:
        del data[at:]
    elif kind == 4:
        del data[at : at + length]
    elif kind == 5:
        data[at:at] = data[draw.randrange(len(data) + 1) :][:length]
    elif kind == 6:
        data[at : at + length] = bytes(length)
    else:
        data += draw.randbytes(length)
    return bytes(data)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    pairs = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    found = [(value, key) for key, _ in pairs]
    for _, child in pairs:
        if isinstance(child, dict | list):
            found += _places(child)
    return found


def lying_json(data: bytes, draw: random.Random) -> bytes:
    """JSON with a value replaced, moved, lost, renamed or repeated, or with a long number."""
    value = json.loads(data)
    places = _places(value)
    if not places:
        return data
    container, key = draw.choice(places)
    other, its_key = draw.choice(places)
    kind = draw.randrange(8)
    if kind == 0:
        del container[key]
    elif kind in (1, 2):
        container[key] = draw.choice(_INTEGERS)
    elif kind == 3:
        container[key] = draw.choice(_OTHERS)
    elif kind == 4:
        container[key] = json.loads(json.dumps(other[its_key]))
    elif kind == 5 and isinstance(container, dict):
        container[draw.choice(["", "x", "__metadata__", "lm_head.weight", str(its_key)])] = container.pop(key)
    elif kind == 6 and isinstance(container[key], int):
        container[key] += draw.choice([-1, 1, -4, 4])
    text = json.dumps(value)
    if kind == 7:
        text = _raw(text, draw)
    return text.encode("utf-8", errors="surrogatepass")


def _raw(text: str, draw: random.Random) -> str:
    """JSON text that json.dumps does not write."""
    numbers = list(re.finditer(r"(?<=[\[ ])\d+(?=[,\]}])", text))
    pairs = list(re.finditer(r'"[^"]*": [^,\[\]{}]+', text))
    if draw.random() < 0.5 and numbers:
        found = draw.choice(numbers)
        new = draw.choice(["9" * 400, "9" * 4000, "9" * 5000, "1e400", "NaN", "-0", "01", "1.0", "[" * 126 + "]" * 126])
    elif pairs:
        found = draw.choice(pairs)
        new = f"{found[0]}, {found[0]}"
    else:
        return text + draw.choice(["x", "\0", " ", "{}"])
    return text[: found.start()] + new + text[found.end() :]


def lying_header(data: bytes, draw: random.Random) -> bytes:
    """A safetensors file whose header is damaged as JSON is."""
    end = 8 + int.from_bytes(data[:8], "little")
    try:
        text = lying_json(data[8:end], draw)
    except ValueError:  # the file is damaged already
        return damaged(data, draw)
    return len(text).to_bytes(8, "little") + text + data[end:]


def _liars(name: str) -> list[Callable[[bytes, random.Random], bytes]]:
    if name.endswith(".safetensors"):
        return [damaged, lying_header, lying_header]
    return [damaged, lying_json, lying_json, lying_json] if name.endswith(".json") else [damaged]


def write_lie(seed: int, folder: Path) -> Path:
    """Writes a checkpoint with one to three damages into the new `folder`. Returns the path to load."""
    draw = random.Random(seed)
    kinds = [whole_gguf, lambda: whole_gguf("llama"), lambda: whole_hf(False), lambda: whole_hf(True)]
    whole = draw.choice(kinds)()
    files = dict(whole)
    for _ in range(draw.choice([1, 1, 2, 3])):
        name = draw.choice(list(files))
        try:
            files[name] = draw.choice(_liars(name))(files[name], draw)
        except ValueError:
            files[name] = damaged(files[name], draw)
    path = write(files, folder)
    grown = folder / draw.choice(list(files))
    if draw.random() < 0.1:
        with grown.open("ab") as file:
            file.truncate(3 << 30)  # a hole, which takes no place on the disk
    return path


def write(files: Files, folder: Path) -> Path:
    """The path from which to load the checkpoint."""
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder / "model.gguf" if "model.gguf" in files else folder
