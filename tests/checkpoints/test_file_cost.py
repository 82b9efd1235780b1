"""Files that ask for much memory or time are refused within 10 seconds of the CPU and 1.5 GB of address space."""

import json
import struct

import pytest
from fuzz import lies
from limited import run_limited

HOLE = 3 << 30


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_with(*values: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + b"".join(values)


def gguf_changed(key: str, value: int) -> bytes:
    """The undamaged GGUF file with another uint32."""
    data = lies.whole_gguf()["model.gguf"]
    at = data.index(key.encode()) + len(key) + 4
    return data[:at] + struct.pack("<I", value) + data[at + 4 :]


def config_with(**values) -> dict[str, bytes]:
    files = lies.whole_hf(False)
    return files | {"config.json": json.dumps(json.loads(files["config.json"]) | values).encode()}


def weights(header: str, length: int | None = None) -> dict[str, bytes]:
    text = header.encode()
    data = (len(text) if length is None else length).to_bytes(8, "little") + text
    return lies.whole_hf(False) | {"model.safetensors": data}


def empty_tensors(count: int) -> str:
    return json.dumps({f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(count)})


def index_of(count: int) -> dict[str, bytes]:
    places = {f"t{i}": "model-00001-of-00001.safetensors" for i in range(count)}
    files = lies.whole_hf(False) | {lies.INDEX: json.dumps({"weight_map": places}).encode()}
    del files["model.safetensors"]
    return files


def array(item: int, count: int) -> bytes:
    return string("x") + struct.pack("<IIQ", 9, item, count)


def gguf_layers(count: int, strings: int = 0) -> dict[str, bytes]:
    """A GGUF file with `count` layers, each with one tensor of no numbers, and so many strings in its metadata."""
    numbers = {"block_count": count, "embedding_length": 8, "attention.head_count": 1, "context_length": 8}
    keys = [string("general.architecture") + struct.pack("<I", 8) + string("llama")]
    keys += [string(f"llama.{key}") + struct.pack("<II", 4, value) for key, value in numbers.items()]
    keys += [string("llama.feed_forward_length") + struct.pack("<II", 4, 8)]
    keys += [string("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-6)]
    keys += [array(8, strings) + strings * string("ab")]
    tensors = [string("token_embd.weight") + struct.pack("<IQQIQ", 2, 8, 4, 0, 0)]
    tensors += [string(f"blk.{i}.ffn_up.weight") + struct.pack("<IQIQ", 1, 0, 0, 128) for i in range(count - 1)]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys + tensors)
    return {"model.gguf": head + bytes(-len(head) % 32 + 128)}


SHAPE = ", ".join(600 * ["9" * 4000])
ENTRY = '{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 8]}}'
SLIDING = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
# The files, words of the refusal, and a hole of 3 GB at the end of one of them.
CASES = {
    "layers": (config_with(num_hidden_layers=10**9), "asks for 1000000000 layers", None),
    "sliding layers": (config_with(num_hidden_layers=10**9, **SLIDING), "asks for 1000000000 layers", None),
    "head_dim": (config_with(head_dim=2**28), "2 heads of head_dim 268435456", None),
    "heads": (
        config_with(num_attention_heads=2**40, num_key_value_heads=2**40, head_dim=2),
        "asks for 1099511627776 heads",
        None,
    ),
    "digits of a shape": (weights(ENTRY.replace("%s", SHAPE)), "is too large", None),
    "header": (weights("{", HOLE - 8), "its header has 3221225464 bytes", "model.safetensors"),
    "header of lists": (weights('{"a": [' + 33_000_000 * "[]," + "0]}"), "more than 2000000 values", None),
    "header of keys": (weights('{"a": {' + 12_000_000 * '"ab":1,' + '"b":1}}'), "more than 2000000 values", None),
    "header of empty tensors": (weights(empty_tensors(150_000)), "describes 150000 tensors, where 100000", None),
    "header of many empty tensors": (weights(empty_tensors(450_000)), "more than 2000000 values", None),
    "index of tensors": (index_of(150_000), "index.json: describes 150000 tensors, where 100000", None),
    "config": (lies.whole_hf(False), "config.json: cannot be read as JSON", "config.json"),
    "index": (lies.whole_hf(True), "index.json: cannot be read as JSON", lies.INDEX),
    "gguf layers": ({"model.gguf": gguf_changed("llama.block_count", 2**31)}, "asks for 2147483648 layers", None),
    "gguf heads": (
        {"model.gguf": gguf_changed("llama.attention.head_count", 2**31)},
        "head_count = 2147483648 heads",
        None,
    ),
    "gguf width": (
        {"model.gguf": gguf_changed("llama.embedding_length", 2**31)},
        "head_dim 1073741824",
        None,
    ),
    "gguf bytes": ({"model.gguf": gguf_with(array(0, HOLE // 2))}, "values in arrays", "model.gguf"),
    "gguf small numbers": ({"model.gguf": gguf_with(array(1, 6 * 10**7))}, "values in arrays", "model.gguf"),
    "gguf layers and tensors": (gguf_layers(2**16), "asks for 65536 layers, of which", None),
    "gguf layers, tensors and strings": (gguf_layers(2**16, 2_999_999), "asks for 65536 layers", None),
    "gguf strings": ({"model.gguf": gguf_with(array(8, 10**7))}, "values in arrays", "model.gguf"),
    "gguf strings without bytes": ({"model.gguf": gguf_with(array(8, 2**61))}, "values in arrays", None),
    "gguf arrays": ({"model.gguf": gguf_with(array(9, 300_000))}, "architecture None", "model.gguf"),
    "gguf many arrays": ({"model.gguf": gguf_with(array(9, 300_001))}, "where 300000 are", "model.gguf"),
    "gguf empty strings": ({"model.gguf": gguf_with(array(8, 3_000_000))}, "architecture None", "model.gguf"),
    "gguf one string": ({"model.gguf": gguf_with(struct.pack("<Q", 2**31))}, "bytes, where 64000000", "model.gguf"),
    "gguf keys": ({"model.gguf": b"GGUF" + struct.pack("<IQQ", 3, 0, 10**8)}, "keys, where 65536", "model.gguf"),
    "gguf tensors": ({"model.gguf": b"GGUF" + struct.pack("<IQQ", 3, 10**8, 0)}, "tensors, where 65536", "model.gguf"),
}


def scored(tokens: list[str]) -> dict[str, bytes]:
    """A vocabulary with scores, all of which are 0."""
    values = [string("tokenizer.ggml.model") + struct.pack("<I", 8) + string("llama")]
    values += [string("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, len(tokens)) + b"".join(map(string, tokens))]
    values += [string("tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, len(tokens)) + bytes(4 * len(tokens))]
    return {"model.gguf": gguf_with(*values)}


# As many ways of making tokens as are allowed, and one more token.
RUNS = [chr(0x4E00 + i) * length for i in range(12_500) for length in range(1, 17)]
VOCABULARIES = {
    "a long token": (scored(["a", 10_000_000 * "b"]), "add up to 100000000000001, wants at most 50000000"),
    "many ways": (scored([*RUNS, "ab", "a", "b"]), "in more than 1500000 ways"),
    "most ways": (scored(RUNS), "it loads"),
}

CHILD = """
import json, sys, time
from pathlib import Path
found = {{}}
for name, path in json.loads({paths!r}).items():
    started, path = time.process_time(), Path(path)
    try:
        {load}(path)
        said = "it loads"
    except ValueError as error:
        said = str(error)
    found[name] = said, time.process_time() - started
    print(json.dumps(found), flush=True)
"""


def refusals(folder, cases, load):
    """The message and the seconds of each case; cases are missing if the child was killed."""
    paths = {}
    for name, (files, _, *hole) in cases.items():
        paths[name] = str(lies.write(files, folder / name))
        if any(hole):
            with (folder / name / hole[0]).open("ab") as file:
                file.truncate(HOLE)
    ended = run_limited(CHILD.format(paths=json.dumps(paths), load=load), seconds=60)
    return paths, json.loads((ended.stdout.splitlines() or ["{}"])[-1]), ended.stderr


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    load = "(attnpack.CausalLM.from_hf if path.is_dir() else attnpack.CausalLM.from_gguf)"
    return refusals(tmp_path_factory.mktemp("files"), CASES, load)


@pytest.fixture(scope="module")
def found_vocabularies(tmp_path_factory):
    return refusals(tmp_path_factory.mktemp("vocabularies"), VOCABULARIES, "attnpack.checkpoints.load_tokenizer")


@pytest.mark.parametrize("name", CASES)
def test_what_asks_for_much_is_refused_for_little(name, found):
    paths, answers, stderr = found
    assert name in answers, f"the process was killed at this case or before: {stderr[-500:]}"
    said, seconds = answers[name]
    assert said.startswith(paths[name]) and CASES[name][1] in said and "MemoryError" not in said, said
    assert seconds < (2 if name == "gguf layers and tensors" else 10)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_what_vocabularies_ask_for(name, found_vocabularies):
    paths, answers, stderr = found_vocabularies
    assert name in answers, f"the process was killed at this case or before: {stderr[-500:]}"
    said, seconds = answers[name]
    assert said.startswith((paths[name], "it loads")) and VOCABULARIES[name][1] in said, said
    assert seconds < 10


def test_largest_vocabularies_are_below_the_limits():
    """Gemma 3's vocabulary, the largest of the common GGUF files: 262,144 tokens, and twice as many merges."""
    from attnpack._C import checkpoints

    tokens, merges = 262_144, 524_288
    assert 2 * (3 * tokens + merges) < checkpoints.MOST_GGUF_ITEMS
    assert 2 * (tokens * (8 + 12 + 4 + 4) + merges * (8 + 14)) < checkpoints.LONGEST_GGUF_HEADER
