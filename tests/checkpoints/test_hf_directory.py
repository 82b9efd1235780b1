"""from_hf against the transformers model that saved the checkpoint, and checkpoints that are refused."""

import json
import os
import threading
import time
from pathlib import Path

import attnpack
import pytest
import torch
import torch.nn.functional as F
from attnpack.checkpoints.hf_directory import HfCheckpoint
from hf_checkpoints import CONFIGS, SIZES, edit_config, edit_weights, from_hf_in_cpp, random_model, refused
from memory_growth import growth
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)


@pytest.fixture
def llama(tmp_path):
    """A saved tiny Llama: (transformers model, directory)."""
    model = random_model(CONFIGS["llama"])
    model.save_pretrained(tmp_path / "llama")
    return model, tmp_path / "llama"


def assert_same_logits(model, reference) -> None:
    ids = torch.randint(96, (2, 50))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), reference(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name, tmp_path):
    reference = random_model(CONFIGS[name])
    reference.save_pretrained(tmp_path)
    model, in_cpp = attnpack.CausalLM.from_hf(tmp_path), from_hf_in_cpp(tmp_path)
    assert_same_logits(model, reference)
    assert in_cpp.options() == model.cpp().options()
    for name, tensor in model.state_dict().items():
        assert torch.equal(in_cpp.state_dict()[name], tensor), name
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in reference.parameters())
    assert not model.training


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_gradients_equal_transformers(name, tmp_path):
    reference = random_model(CONFIGS[name])
    reference.save_pretrained(tmp_path)
    model = attnpack.CausalLM.from_hf(tmp_path)
    ids = torch.randint(96, (2, 20))
    for logits in (model(ids), reference(ids).logits):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    expected = dict(reference.named_parameters())
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[parameter_name].grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_greedy_tokens_equal_transformers(name, cache, tmp_path):
    reference = random_model(CONFIGS[name])
    reference.generation_config.eos_token_id = None
    reference.save_pretrained(tmp_path)
    ids = torch.randint(96, (2, 10))
    mask = torch.ones_like(ids)
    expected = reference.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=16, pad_token_id=0)
    assert expected.shape == (2, 26)
    assert torch.equal(attnpack.CausalLM.from_hf(tmp_path).generate(ids, max_new_tokens=16, cache=cache), expected)


def test_state_dict_names_are_those_of_llama(llama):
    reference, directory = llama
    expected = reference.state_dict()
    found = attnpack.CausalLM.from_hf(str(directory)).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_shards(tmp_path):
    reference = random_model(CONFIGS["qwen3"])
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_logits(attnpack.CausalLM.from_hf(tmp_path), reference)


def test_config_of_transformers_4(llama):
    reference, directory = llama
    stretched = AutoModelForCausalLM.from_config(CONFIGS["llama-linear-rope"]).eval()
    stretched.load_state_dict(reference.state_dict())
    scaling = {"type": "linear", "factor": 3.0}
    edit_config(directory, drop=("rope_parameters",), rope_theta=2000.0, rope_scaling=scaling)
    assert_same_logits(attnpack.CausalLM.from_hf(directory), stretched)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_dtypes_convert_as_torch_does(llama, stored, wanted):
    reference, directory = llama
    reference.to(stored).save_pretrained(directory)
    found = attnpack.CausalLM.from_hf(directory, dtype=wanted).state_dict()
    for name, tensor in reference.state_dict().items():
        assert found[name].dtype == wanted
        assert torch.equal(found[name], tensor.to(wanted)), name


def test_tied_head_that_is_stored_too(tmp_path):
    reference = random_model(CONFIGS["llama-tied"])
    reference.save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert_same_logits(attnpack.CausalLM.from_hf(tmp_path), reference)
    assert attnpack.CausalLM.from_hf(tmp_path).lm_head is None
    edit_weights(tmp_path, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    assert attnpack.CausalLM.from_hf(tmp_path).lm_head is not None  # see test_partial_checkpoints.py


def test_resident_memory_grows_by_the_weights_and_at_most_a_fifth(tmp_path):
    config = LlamaConfig(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=8,
        num_attention_heads=12, num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    grown, weights = growth("from_hf", tmp_path, "float32")
    assert weights == 4 * sum(p.numel() for p in model.parameters())
    assert grown <= 1.2 * weights, f"{grown / weights:.3f} times the weights"


# ---- refused checkpoints -------------------------------------------------------------


def test_no_checkpoint(tmp_path):
    refused(tmp_path / "none", "config.json")
    refused(tmp_path, "config.json")
    (tmp_path / "config.json").write_text("no json")
    refused(tmp_path, "config.json", "JSON")
    (tmp_path / "config.json").write_text("[]")
    refused(tmp_path, "config.json", "JSON")


def test_no_weights(llama):
    directory = llama[1]
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    refused(directory, "model.safetensors", "save_pretrained")


def test_other_model_types_are_refused_with_the_list(llama):
    edit_config(llama[1], model_type="gemma9")
    refused(llama[1], "'gemma9'", "llama, mistral, qwen2, qwen3, gemma2")


def test_norms_of_queries_and_keys_with_another_eps(tmp_path):
    reference = random_model(Qwen3Config(**SIZES, head_dim=16, rms_norm_eps=1e-1))
    reference.save_pretrained(tmp_path)
    assert_same_logits(attnpack.CausalLM.from_hf(tmp_path), reference)


def test_missing_setting(llama):
    edit_config(llama[1], drop=("intermediate_size",))
    refused(llama[1], "lacks intermediate_size")


@pytest.mark.parametrize(
    "setting",
    [
        {"attn_logit_softcapping": 50.0},
        {"final_logit_softcapping": 30.0},
        {"hidden_act": "gelu"},
        {"quantization_config": {"bits": 4}},
        {"partial_rotary_factor": 0.5},
        {"use_bidirectional_attention": True},
        {"is_causal": False},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_settings_of_later_issues_are_named(llama, setting):
    edit_config(llama[1], **setting)
    refused(llama[1], next(iter(setting)))


def test_dropout_of_training_is_left_out(llama):
    edit_config(llama[1], attention_dropout=0.1)
    model = attnpack.CausalLM.from_hf(llama[1])
    assert not model.training and model.attention_dropout == 0
    assert_same_logits(model, llama[0])


@pytest.mark.parametrize("said", [True, None])
def test_a_model_that_says_it_is_causal(said, llama):
    llama[0].float().save_pretrained(llama[1])  # the configuration remembers what other tests stored
    edit_config(llama[1], is_causal=said)
    assert_same_logits(attnpack.CausalLM.from_hf(llama[1]), llama[0])


def test_qwen3_has_heads_of_128_unless_its_configuration_says_otherwise(tmp_path):
    reference = random_model(Qwen3Config(**SIZES, head_dim=128))
    reference.save_pretrained(tmp_path)
    edit_config(tmp_path, head_dim=None)
    assert_same_logits(attnpack.CausalLM.from_hf(tmp_path), reference)


def test_the_trained_length_is_the_checkpoints(tmp_path):
    """The configuration's context counts, not the requested one, which may be shorter."""
    reference = random_model(CONFIGS["llama-dynamic"])
    reference.save_pretrained(tmp_path)
    model = attnpack.CausalLM.from_hf(tmp_path, max_positions=8)
    assert model.layers[0].self_attn.rope.trained_len == 32
    assert_same_logits(model, reference)


def test_dynamic_rope_grows_from_the_longest_position(tmp_path):
    """transformers takes max_position_embeddings, and ignores original_max_position_embeddings."""
    config = CONFIGS["llama-dynamic"].to_dict()
    config["rope_parameters"]["original_max_position_embeddings"] = 16
    reference = random_model(LlamaConfig.from_dict(config))
    reference.save_pretrained(tmp_path)
    edit_config(tmp_path, rope_parameters=config["rope_parameters"])
    model = attnpack.CausalLM.from_hf(tmp_path)
    assert model.layers[0].self_attn.rope.trained_len == 32
    assert_same_logits(model, reference)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "proportional"}, ("rope_type 'proportional'", "'llama3'")),
        ({"rope_type": "yarn", "factor": "4"}, ("scaling: factor is '4'", "a number")),
        ({"rope_type": "longrope", "short_factor": [1.0]}, ("scaling: got 1 numbers as short_factor, want 4",)),
        ({"rope_type": "llama3", "factor": 2.0, "mrope_section": [1]}, ("scaling: got 'mrope_section'",)),
        ({"rope_type": "yarn", "original_max_position_embeddings": "4"}, ("original_max_position_embeddings", "'4'")),
    ],
)
def test_bad_rope_parameters_are_named(llama, rope, words):
    edit_config(llama[1], rope_parameters={"rope_theta": 1e4} | rope)
    refused(llama[1], *words)


SLIDING = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**SIZES, sliding_window=8),
        Qwen2Config(**SIZES, **SLIDING, max_window_layers=0),
        Qwen3Config(**SIZES, **SLIDING, max_window_layers=0, head_dim=16),
    ],
    ids=lambda config: config.model_type,
)
def test_a_sliding_window_is_that_of_transformers(config, tmp_path):
    reference = random_model(config)
    reference.generation_config.eos_token_id = None
    reference.save_pretrained(tmp_path)
    model = attnpack.CausalLM.from_hf(tmp_path)
    assert model.layers[2].self_attn.window == (7, 0)
    ids = torch.randint(96, (2, 20))
    with torch.no_grad():
        expected = reference(ids).logits
        torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(model.cpp().forward(ids), expected, rtol=0, atol=1e-4)
        model.layers[0].self_attn.window = None
        assert not torch.allclose(model(ids), expected, rtol=0, atol=1e-2)
        model.layers[0].self_attn.window = (7, 0)
        cache = attnpack.ModelCache(3)
        steps = [model(part, cache) for part in (ids[:, :13], *ids[:, 13:].split(1, dim=1))]
    torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=0, atol=1e-4)
    prompt = ids[:, :5]
    mask = torch.ones_like(prompt)
    tokens = reference.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=16, pad_token_id=0)
    for kind in ("dynamic", "static", "none"):
        assert torch.equal(model.generate(prompt, max_new_tokens=16, cache=kind), tokens)


def test_a_window_holds_beyond_the_positions_that_were_asked_for(tmp_path):
    """from_hf(max_positions=8) once gave a model without a window, which also read more than 8 tokens."""
    reference = random_model(MistralConfig(**SIZES, sliding_window=8))
    reference.save_pretrained(tmp_path)
    assert_same_logits(attnpack.CausalLM.from_hf(tmp_path, max_positions=8), reference)  # 50 tokens


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MistralConfig(**SIZES, sliding_window=16), [(15, 0)] * 3),
        (Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=16, max_window_layers=1), [None] + [(15, 0)] * 2),
        (Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=16, max_window_layers=3), [None] * 3),
        (Qwen3Config(**SIZES, use_sliding_window=False, sliding_window=16, max_window_layers=1), [None] * 3),
    ],
)
def test_a_sliding_window_of_some_layers_only(config, windows, tmp_path):
    reference = random_model(config)
    reference.save_pretrained(tmp_path)
    model = attnpack.CausalLM.from_hf(tmp_path)
    found = [layer.self_attn.window for layer in model.layers]
    assert [None if window in (None, (-1, -1)) else tuple(window) for window in found] == windows
    assert_same_logits(model, reference)  # 50 tokens


@pytest.mark.parametrize("kinds", ["ssss", "ffff", "sfsf", None])
def test_mistral_with_kinds_of_layers_is_that_of_transformers(kinds, tmp_path):
    """AutoModel would load it as a Ministral."""
    kinds = kinds and [{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in kinds]
    settings = SIZES | {"num_hidden_layers": 4, "head_dim": 8, "sliding_window": 16}
    random_model(MinistralConfig(**settings, layer_types=kinds)).save_pretrained(tmp_path)
    edit_config(tmp_path, model_type="mistral", layer_types=kinds)
    model = attnpack.CausalLM.from_hf(tmp_path)
    ids = torch.randint(96, (2, 50))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits
        torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-4)


def test_the_window_of_qwen_is_4096_where_no_width_is_given(tmp_path):
    random_model(Qwen2Config(**SIZES, use_sliding_window=True, max_window_layers=0)).save_pretrained(tmp_path)
    edit_config(tmp_path, drop=("sliding_window",))
    assert attnpack.CausalLM.from_hf(tmp_path).layers[0].self_attn.window == (4095, 0)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"layer_types": ["full_attention"]}, ("layer_types", "for each of 3 layers")),
        ({"layer_types": 3 * ["chunked_attention"]}, ("layer_types", "'chunked_attention'", "wants 'full_attention'")),
        ({"layer_types": "full_attention"}, ("layer_types in config.json is 'full_attention'",)),
        ({"layer_types": 3 * ["sliding_attention"], "sliding_window": None}, ("no sliding_window is in use",)),
    ],
    ids=["too few", "unknown", "text", "no window"],
)
@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_kinds_of_layers_that_are_not_known(name, setting, words, tmp_path):
    random_model(CONFIGS[name]).save_pretrained(tmp_path)
    edit_config(tmp_path, **setting)
    refused(tmp_path, *words)


def test_rope_scaling_that_repeats_rope_parameters(tmp_path):
    reference = random_model(CONFIGS["llama-yarn"])
    reference.save_pretrained(tmp_path)
    repeated = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    edit_config(tmp_path, rope_theta=2000.0, rope_scaling=repeated)
    assert_same_logits(attnpack.CausalLM.from_hf(tmp_path), reference)


@pytest.mark.parametrize(
    "scaling",
    [{"type": "linear", "factor": 4.0}, {"type": "yarn", "factor": 4.0}, {"rope_type": "default"}, {"rope_theta": 1e6}],
    ids=str,
)
def test_rope_scaling_that_contradicts_rope_parameters(scaling, tmp_path):
    """transformers reads rope_scaling in this case."""
    random_model(CONFIGS["llama-yarn"]).save_pretrained(tmp_path)
    edit_config(tmp_path, rope_theta=2000.0, rope_scaling=scaling)
    refused(tmp_path, "rope_parameters and rope_scaling", "different things")


def test_rope_parameters_of_kinds_of_layers_are_named(llama):
    edit_config(llama[1], rope_parameters={"full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}})
    refused(llama[1], "rope_parameters", "full_attention")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"hidden_size": "32"}, ("hidden_size", "'32'", "an int of at least 1")),
        ({"num_hidden_layers": 0}, ("num_hidden_layers", "is 0", "at least 1")),
        ({"num_key_value_heads": 2.0}, ("num_key_value_heads", "is 2.0", "an int")),
        ({"rms_norm_eps": "1e-6"}, ("rms_norm_eps", "'1e-6'", "a number")),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, ("factor of rope_scaling", "None", "a number")),
        ({"rope_parameters": [1]}, ("rope_parameters", "[1]", "an object")),
        ({"model_type": "mistral", "sliding_window": "8"}, ("sliding_window", "'8'", "an int")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_of_the_wrong_kind_are_named(llama, setting, words):
    edit_config(llama[1], **setting)
    refused(llama[1], *words)


def test_arguments_of_the_wrong_kind(llama):
    for call, message in (
        (lambda: attnpack.CausalLM.from_hf(None), "directory is None .*, wants a path"),
        (lambda: attnpack.CausalLM.from_hf(llama[1], dtype="bf16"), r"dtype is 'bf16' \(str\), wants a torch.dtype"),
        (
            lambda: attnpack.CausalLM.from_hf(llama[1], max_positions=1.5),
            r"max_positions is 1.5 \(float\), wants an int",
        ),
    ):
        with pytest.raises(TypeError, match=f"^attnpack: {message}"):
            call()


def edit_header(directory: Path, change) -> None:
    """Changes the safetensors header; the data stay what they are."""
    path = directory / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "F16"}, ("F16", "takes 6144 bytes")),  # 96 * 32 numbers of 2 bytes
        ({"dtype": "F64"}, ("F64", "takes 24576 bytes")),
        ({"data_offsets": [10, 2]}, ("[10, 2]", "takes 12288 bytes")),
        ({"data_offsets": [-4, 124]}, ("[-4, 124]",)),
        ({"data_offsets": [-4, 12284]}, ("[-4, 12284]",)),
        ({"data_offsets": [0, 1]}, ("[0, 1]",)),
        ({"data_offsets": [0, 10**9]}, ("truncated",)),
        ({"data_offsets": [0]}, ("described as",)),
        ({"data_offsets": None}, ("described as",)),
        ({"shape": [-96, -32]}, ("described as",)),
        ({"shape": "96"}, ("described as",)),
        ({"dtype": 3}, ("described as",)),
    ],
    ids=str,
)
def test_a_header_that_its_bytes_contradict(llama, change, words):
    """Such files once gave weights that were the bytes of other tensors, or no weights."""
    llama[0].float().save_pretrained(llama[1])  # the configuration remembers what other tests stored
    edit_header(llama[1], lambda header: header["lm_head.weight"].update(change))
    refused(llama[1], "model.safetensors: tensor lm_head.weight", *words)


def test_a_header_that_is_no_table(llama):
    edit_header(llama[1], lambda header: header.update({"lm_head.weight": 3}))
    refused(llama[1], "model.safetensors: tensor lm_head.weight is described as 3")


def test_missing_and_unexpected_tensors(llama):
    directory = llama[1]
    edit_weights(directory, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}))
    refused(directory, "unexpected model.layers.0.self_attn.q_proj.bias")
    edit_weights(directory, lambda t: t.pop("model.layers.0.self_attn.q_proj.bias"))
    edit_weights(directory, lambda t: t.pop("model.norm.weight"))
    refused(directory, "lacks model.norm.weight")


def test_wrong_shape(llama):
    edit_weights(llama[1], lambda t: t.update({"model.norm.weight": torch.ones(31)}))
    refused(llama[1], "model.norm.weight", "[31]", "[32]")


def test_a_tied_head_of_another_shape(tmp_path):
    random_model(CONFIGS["llama-tied"]).save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"][:95].clone()}))
    refused(tmp_path, "lm_head.weight has shape [95, 32], its configuration asks for [96, 32]")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.json", '{"model_type": "llama", "rope_theta": ' + 400 * "9" + "}", "is too large"),
        ("config.json", '{"model_type": "llama", "model_type": "qwen2"}', "model_type is in an object twice"),
        ("config.json", "[" * 100_000, "more than 127 deep in each other"),
        ("model.safetensors.index.json", '{"weight_map": {"a": ["model.safetensors"]}}', "names the file ['model.saf"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "tokenizer.json"}}',
            "wants the name of one in the same folder",
        ),
        ("model.safetensors.index.json", '{"weight_map": {"a": ".."}}', "wants the name of one in the same folder"),
        ("model.safetensors.index.json", r'{"weight_map": {"a": "\u0000.safetensors"}}', "lacks \\x00.saf"),
    ],
    ids=["digits", "duplicate", "deep", "list", "other file", "folder", "null"],
)
def test_an_error_names_the_file(llama, name, text, words):
    (llama[1] / name).write_text(text)
    if name != "config.json":
        (llama[1] / "model.safetensors").unlink()
    refused(llama[1], name, words)


def test_unreadable_dtype(llama):
    edit_weights(llama[1], lambda t: t.update({"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}))
    refused(llama[1], "model.norm.weight", "F8_E4M3")


def test_truncated_and_foreign_weights(llama):
    directory = llama[1]
    path = directory / "model.safetensors"
    data = path.read_bytes()
    for length in [0, 4, 100, len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:length])
        refused(directory, "model.safetensors")
    path.write_bytes(b"\x80\x02}q\x00." * 100)  # a pickle
    refused(directory, "model.safetensors")


def test_a_directory_that_is_no_utf8(llama, tmp_path):
    model, directory = llama
    moved = directory.rename(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")))
    for given in (moved, str(moved), os.fsencode(moved)):
        assert_same_logits(attnpack.CausalLM.from_hf(given), model)
    assert_same_logits(from_hf_in_cpp(moved), model)
    (moved / "model.safetensors").unlink()
    refused(moved, f"{moved}: has neither model.safetensors nor")
    os.mkfifo(moved / "model.safetensors")
    refused(moved, f"{moved}/model.safetensors: is a named pipe, wants a readable file with data")


def test_other_threads_run_while_a_tensor_is_read(tmp_path):
    """A fused tensor is cut in C++: that holds no GIL."""
    sizes = SIZES | {"num_hidden_layers": 1, "intermediate_size": 1 << 18}
    random_model(Phi3Config(**sizes, pad_token_id=0)).save_pretrained(tmp_path)
    checkpoint, name = HfCheckpoint(tmp_path), "model.layers.0.mlp.gate_proj.weight"
    assert not checkpoint.is_plain
    out, ran, ended = torch.empty(checkpoint.shapes[name]), [], threading.Event()

    def tick():
        while not ended.wait(0.0005):
            ran.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    inside = []
    for _ in range(50):
        checkpoint = HfCheckpoint(tmp_path)  # its first read takes 9 ms
        begin = time.perf_counter()
        checkpoint.read(name, out)
        end = time.perf_counter()
        inside += [at for at in ran if begin + 2e-3 < at < end - 2e-3]
    ended.set()
    thread.join()
    assert inside
