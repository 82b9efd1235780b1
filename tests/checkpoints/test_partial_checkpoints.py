"""Checkpoints that transformers completes: a head beside a "tied" embedding, a head alone, files of the base model."""

import copy
import functools

import attnpack
import pytest
import torch
import transformers
from families import FAMILIES, SIZES, Family
from hf_checkpoints import edit_weights, from_hf_in_cpp, refused

BASES = FAMILIES | {
    "llama": Family("LlamaConfig", SIZES, {}),
    "qwen3": Family("Qwen3Config", SIZES | {"head_dim": 12}, {}),
}
HEAD = "lm_head.weight"
# transformers' AutoModelForCausalLM has no Mistral 4, and Phi's head has a bias, so it is not tied.
UNTIED = {"phi"}
by_name = pytest.mark.parametrize("name", sorted(BASES.keys() - {"mistral4"}))


@functools.cache
def random_model(name, tied):
    torch.manual_seed(0)
    config = getattr(transformers, BASES[name].config)(
        **copy.deepcopy(BASES[name].theirs) | {"tie_word_embeddings": tied}
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def save(directory, name, tied, change):
    model = random_model(name, tied)
    model.save_pretrained(directory)
    embedding = next(n for n, p in model.named_parameters() if p is model.get_input_embeddings().weight)
    edit_weights(directory, lambda tensors: change(tensors, embedding, model.base_model_prefix + "."))


def other_head(tensors, embedding, prefix):
    tensors[HEAD] = tensors[embedding].flip(0).contiguous()


def head_alone(tensors, embedding, prefix):
    tensors[HEAD] = tensors.pop(embedding)


def base_names(tensors, embedding, prefix):
    for name in list(tensors):
        tensors[name.removeprefix(prefix)] = tensors.pop(name)


def base_file(tensors, embedding, prefix):
    for head in (HEAD, "embed_out.weight"):  # the second is GPT-NeoX's
        tensors.pop(head, None)
    base_names(tensors, embedding, prefix)


@by_name
@pytest.mark.parametrize(
    ("change", "tied"),
    [(other_head, True), (head_alone, True), (base_file, True), (base_names, False)],
    ids=["another head", "a head alone", "base model", "base names and a head"],
)
@torch.no_grad()
def test_logits_are_those_of_from_pretrained(name, change, tied, tmp_path):
    save(tmp_path, name, tied, change)
    if tied and name in UNTIED:
        refused(tmp_path, "tie_word_embeddings = true", "head with a bias")
        return
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids = torch.randint(96, (2, 20))
    for ours in (attnpack.CausalLM.from_hf(tmp_path), from_hf_in_cpp(tmp_path)):
        out = ours(ids) if isinstance(ours, torch.nn.Module) else ours.forward(ids)
        torch.testing.assert_close(out, theirs(ids).logits, rtol=0, atol=1e-4)
    if change is other_head:
        assert not torch.equal(theirs.lm_head.weight, theirs.get_input_embeddings().weight)


@by_name
def test_a_head_that_transformers_would_draw_is_refused(name, tmp_path):
    save(tmp_path, name, False, base_file)
    refused(tmp_path, "lacks lm_head.weight, as a file of the base model does", "set tie_word_embeddings to true")
