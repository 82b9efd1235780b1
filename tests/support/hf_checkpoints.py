"""Tiny checkpoints of transformers, and changes to them."""

import copy
import json
from pathlib import Path

import attnpack
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MHA = {**SIZES, "num_key_value_heads": 4}
LINEAR = {"rope_type": "linear", "rope_theta": 2000.0, "factor": 3.0}
YARN = {"rope_type": "yarn", "rope_theta": 2000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 2000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 2000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 4.0, 6.0, 8.0],
    "original_max_position_embeddings": 32,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 2000.0, "factor": 3.0}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama-yarn": LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama3-rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama-longrope": LlamaConfig(**SIZES, rope_parameters=LONGROPE),
    "llama-dynamic": LlamaConfig(**{**SIZES, "max_position_embeddings": 32}, rope_parameters=DYNAMIC),
    "llama-biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-linear-rope": LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "llama-mha": LlamaConfig(**MHA),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral-wide-heads": MistralConfig(**SIZES, head_dim=24, sliding_window=128),
    "qwen2": Qwen2Config(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True, use_sliding_window=False, sliding_window=16),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3-biases": Qwen3Config(**SIZES, head_dim=16, attention_bias=True, tie_word_embeddings=True),
}


def random_model(config):
    """A transformers model whose biases and norms are not trivial."""
    torch.manual_seed(0)
    # A copy, because a model writes its dtype into its config, and tests share configs.
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def saved_once(tmp_path_factory, make):
    """A function from a name to the directory of the model that make(name) gives; each is written once."""
    made = {}

    def directory(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            make(name).save_pretrained(made[name])
        return made[name]

    return directory


def write_tokenizer(directory) -> None:
    """Writes a tokenizer whose tokens are bytes."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())[:96])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def edit_config(directory: Path, *, drop: tuple[str, ...] = (), **values) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in drop}))


def edit_weights(directory: Path, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def from_hf_in_cpp(path, max_positions: int | None = None):
    """The model that C++ builds of a checkpoint."""
    return attnpack._C.checkpoints.causal_lm_from_hf(str(path), torch.float32, max_positions)


def refused(path, *words, **keywords):
    """C++ refuses the checkpoint too, in the same words."""
    with pytest.raises(ValueError) as caught:
        attnpack.CausalLM.from_hf(path, **keywords)
    message = str(caught.value)
    with pytest.raises(ValueError) as in_cpp:
        from_hf_in_cpp(path, **keywords)
    assert str(in_cpp.value) == message
    assert str(path) in message
    for word in words:
        assert word in message, message
