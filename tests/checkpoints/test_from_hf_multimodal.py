"""from_hf of models with pictures or sound: their language model, in both languages and in both layouts of names."""

import copy
import json

import attnpack
import pytest
import torch
import transformers
from attnpack._C import checkpoints
from families import FAMILIES, SIZES, peer_from, with_noise
from hf_checkpoints import CONFIGS, edit_config, edit_weights, from_hf_in_cpp, refused, saved_once
from hybrid_families import HYBRIDS

TEXT = torch.randint(SIZES["vocab_size"], (2, 20), generator=torch.Generator().manual_seed(1))
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
PATCHES = SMALL | {"image_size": 8, "patch_size": 4}
DEPTH = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4}
# The name in transformers, the family of the language model, and the settings of the encoder.
MODELS = {
    "gemma3": ("Gemma3", "gemma3", PATCHES),
    "gemma4": ("Gemma4", "gemma4", SMALL | {"num_key_value_heads": 2, "head_dim": 8}),
    "llama4": (
        "Llama4",
        "llama4",
        PATCHES | {"intermediate_size": 64, "vision_output_dim": 16}
        | {"projector_input_dim": 16, "projector_output_dim": 16},
    ),
    "mistral3": ("Mistral3", "mistral", PATCHES | {"model_type": "pixtral"}),
    "mistral3_ministral3": ("Mistral3", "ministral3", PATCHES | {"model_type": "pixtral"}),
    "mistral3_mistral4": ("Mistral3", "mistral4", PATCHES | {"model_type": "pixtral"}),
    "qwen3_5": ("Qwen3_5", "qwen3_5", DEPTH),
    "qwen3_5_moe": ("Qwen3_5Moe", "qwen3_5_moe", DEPTH),
}  # fmt: skip
NEW, OLD = ("model.language_model.", "lm_head."), ("language_model.model.", "language_model.lm_head.")


def model_of(name):
    """A tiny random model of transformers, which sees as well as it reads."""
    kind, family, vision = MODELS[name]
    if family == "mistral":
        text = copy.deepcopy(CONFIGS[family])
    else:
        row = (FAMILIES | HYBRIDS)[family]
        settings = copy.deepcopy(row.theirs) | {"pad_token_id": 0}  # Gemma 4 wants one
        text = getattr(transformers, row.config)(**settings)
    config = getattr(transformers, f"{kind}Config")(
        text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=text.tie_word_embeddings
    )
    config._attn_implementation = "eager"
    return with_noise(getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval())


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    """Gives the directory of a model, which is written once, with its logits of TEXT."""

    def make(name):
        model = model_of(name)
        # Llama 4's whole model cannot run without a picture.
        reads = model.language_model if name == "llama4" else model
        with torch.no_grad():
            logits[name] = reads(input_ids=TEXT).logits
        return model

    logits = {}
    directory = saved_once(tmp_path_factory, make)
    return lambda name: (directory(name), logits[name])


def changed(directory, tmp_path, rename=lambda name: name):
    """A copy of the checkpoint, of which tensors may have other names."""
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())

    def change(tensors):
        for name in list(tensors):
            tensors[rename(name)] = tensors.pop(name)

    edit_weights(tmp_path, change)
    return tmp_path


def in_layout(name, layout):
    for there, wanted in zip((*NEW, *OLD), (*layout, *layout), strict=True):
        if name.startswith(there):
            return wanted + name.removeprefix(there)
    return name


@pytest.mark.parametrize("layout", [NEW, OLD], ids=["model.language_model", "language_model.model"])
@pytest.mark.parametrize("name", MODELS)
def test_both_languages_load_the_language_model(name, layout, directory_of, tmp_path):
    directory, wanted = directory_of(name)
    directory = changed(directory, tmp_path, lambda stored: in_layout(stored, layout))
    with torch.no_grad():
        for model in (attnpack.CausalLM.from_hf(directory), from_hf_in_cpp(directory)):
            torch.testing.assert_close(model(TEXT), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
def test_the_head_is_tied_where_the_whole_model_says_so(name, directory_of, tmp_path):
    directory = changed(directory_of(name)[0], tmp_path)
    edit_config(directory, tie_word_embeddings=name == "mistral3")
    if name == "gemma3":
        refused(directory, "lacks lm_head.weight")
    else:  # the file has a head that differs
        torch.testing.assert_close(
            attnpack.CausalLM.from_hf(directory)(TEXT), directory_of(name)[1], rtol=1e-4, atol=1e-4
        )
        edit_weights(directory, lambda tensors: tensors.pop("language_model.lm_head.weight"))
        assert attnpack.CausalLM.from_hf(directory).tie_embeddings


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "text_config in config.json is None, wants the settings of the language model"),
        ([1], "text_config in config.json is [1], wants the settings"),
        ({"model_type": "gemma"}, "model_type 'gemma' is not supported; from_hf reads llama, "),
        ({}, "model_type None is not supported"),
    ],
)
def test_other_language_models_are_refused(text, words, directory_of, tmp_path):
    directory = changed(directory_of("gemma3")[0], tmp_path)
    edit_config(directory, text_config=text)
    refused(directory, words)
    edit_config(directory, model_type="paligemma")  # its text sees the text after it
    refused(directory, "model_type 'paligemma' is not supported", "and the language model of gemma3, gemma4, llama4")


@pytest.mark.parametrize("size", [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings",
])  # fmt: skip
def test_sizes_that_files_of_gemma_3_leave_out(size, tmp_path):
    """text_config of released files has only what differs from transformers' class."""
    small = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.Gemma3TextConfig(**{name: value for name, value in small.items() if name != size})
    peer_from(config).save_pretrained(tmp_path)
    options = checkpoints.HfCheckpoint(str(tmp_path), None).config
    edit_config(tmp_path, drop=(size,))
    assert checkpoints.HfCheckpoint(str(tmp_path), None).config == options
    assert (json.loads((tmp_path / "config.json").read_text())).keys().isdisjoint({size})


def test_gemma_3_as_transformers_4_wrote_it(tmp_path):
    """With the differences from the class only, and one RoPE scaling, which is that of the layers without a window."""
    text = {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    text |= {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 7, "sliding_window": 6}
    config = transformers.Gemma3Config(text_config=dict(text), vision_config=PATCHES)
    model = with_noise(transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager"))
    model.save_pretrained(tmp_path)
    edit_config(tmp_path, text_config=text)
    with torch.no_grad():
        wanted = model.eval()(input_ids=TEXT).logits
        for ours in (attnpack.CausalLM.from_hf(tmp_path), from_hf_in_cpp(tmp_path)):
            torch.testing.assert_close(ours(TEXT), wanted, rtol=1e-4, atol=1e-4)
