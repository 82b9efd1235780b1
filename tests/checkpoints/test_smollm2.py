"""The real model: SmolLM2-135M-Instruct on attnpack against transformers, from the same GGUF file."""

import copy
import json
import math
from importlib import resources

import attnpack
import attnpack.hf
import pytest
import torch
import torch.nn.functional as F
from attnpack.checkpoints import load_tokenizer, smollm2_path
from marks import long

REFERENCE = json.loads(
    resources.files("attnpack").joinpath("tools/data/smollm2_reference.json").read_text(encoding="utf-8")
)
PROMPTS = {prompt["name"]: prompt for prompt in REFERENCE["prompts"]}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(smollm2_path())


@pytest.fixture(scope="module")
def topics_ids(tokenizer, topics_text):
    """[1, about 5000]"""
    return torch.tensor([tokenizer.encode(topics_text[:20000])])


# First, before the fp32 model of ours is loaded: together they would take 2 GB.
def test_bf16_is_as_close_to_fp32_as_transformers(smollm2_hf, topics_ids):
    ids = topics_ids[:, :256]
    hf = smollm2_hf
    with torch.no_grad():
        truth = hf(ids).logits
        # A copy on rounded parameters, so that no second one in fp32 is made.
        rounded = {id(p): torch.nn.Parameter(p.to(torch.bfloat16)) for p in hf.parameters()}
        theirs = copy.deepcopy(hf, rounded)(ids).logits.float()
        del rounded
        found = attnpack.CausalLM.from_gguf(smollm2_path(), dtype=torch.bfloat16)(ids)
    assert found.dtype == torch.bfloat16
    assert (found.float() - truth).abs().mean() <= 1.2 * (theirs - truth).abs().mean()


def test_weights_are_bitwise_those_of_transformers(smollm2_hf, smollm2):  # ours last takes the least memory
    expected = smollm2_hf.state_dict()
    found = smollm2.state_dict()
    assert found.keys() <= expected.keys()
    assert expected.keys() - found.keys() <= {"lm_head.weight"}
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_logits_and_perplexity_of_512_tokens_equal_transformers(
    smollm2, smollm2_hf, smollm2_tokenizer_hf, topics_ids, topics_text
):
    ids = topics_ids[0, :512]
    assert ids.tolist() == smollm2_tokenizer_hf(topics_text[:20000]).input_ids[:512]
    with torch.no_grad():
        logits = smollm2(ids[None])[0], smollm2_hf(ids[None]).logits[0]  # 100 MB each
    for rows in zip(*logits, strict=True):
        torch.testing.assert_close(*rows, rtol=0, atol=2e-3)
    ours, theirs = (math.exp(F.cross_entropy(each[:-1], ids[1:]).item()) for each in logits)
    print(f"perplexity {ours:.4f}, of transformers {theirs:.4f}")
    assert math.isclose(ours, theirs, rel_tol=1e-4)
    assert 14 < ours < 21  # 17.47 on the text of Python 3.11


@pytest.mark.long
def test_stored_reference_is_what_transformers_gives(reference_script, smollm2_hf, smollm2_tokenizer_hf):
    made = reference_script.make_content(smollm2_hf, smollm2_tokenizer_hf)
    assert made["model"] == REFERENCE["model"]
    for new, stored in zip(made["prompts"], REFERENCE["prompts"], strict=True):
        for key in ("name", "prompt", "chat", "prompt_ids", "tokens", "text"):
            assert new[key] == stored[key], (stored["name"], key)


def test_our_tokenizer_gives_the_reference_prompts(tokenizer):
    for prompt in PROMPTS.values():
        encode = tokenizer.chat if prompt["chat"] else tokenizer.encode
        assert encode(prompt["prompt"]) == prompt["prompt_ids"]
        assert tokenizer.decode(prompt["tokens"], skip_special_tokens=False) == prompt["text"]


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("chat", "dynamic"),
        long("chat", "static"),
        ("prose", "static"),
        long("prose", "dynamic"),
        ("code", "dynamic"),
        long("code", "static"),
    ],
)
def test_greedy_tokens_equal_transformers(name, cache, smollm2):
    prompt = torch.tensor([PROMPTS[name]["prompt_ids"]])
    out = smollm2.generate(prompt, max_new_tokens=64, cache=cache)
    assert out[0, prompt.size(1) :].tolist() == PROMPTS[name]["tokens"]
    assert torch.equal(out[:, : prompt.size(1)], prompt)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_prompts_of_different_lengths_in_one_batch(cache, smollm2):
    lengths = torch.tensor([len(prompt["prompt_ids"]) for prompt in PROMPTS.values()])
    assert lengths.unique().numel() == len(PROMPTS)
    batch = torch.zeros(len(PROMPTS), int(lengths.max()), dtype=torch.int64)
    for row, prompt in zip(batch, PROMPTS.values(), strict=True):
        row[: len(prompt["prompt_ids"])] = torch.tensor(prompt["prompt_ids"])
    out = smollm2.generate(batch, max_new_tokens=32, lengths=lengths, cache=cache)
    for row, prompt in zip(out, PROMPTS.values(), strict=True):
        assert row[batch.size(1) :].tolist() == prompt["tokens"][:32]


@pytest.mark.parametrize("way", [long("register"), "replace_attention"])
def test_transformers_writes_the_same_text_on_our_operator(way, smollm2_hf):
    model = copy.deepcopy(smollm2_hf, {id(parameter): parameter for parameter in smollm2_hf.parameters()})
    attnpack.hf.register()
    model.set_attn_implementation("attnpack")
    if way == "replace_attention":
        attnpack.hf.replace_attention(model)
    for prompt in PROMPTS.values():
        ids = torch.tensor([prompt["prompt_ids"]])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)
        assert out[0, ids.size(1) :].tolist() == prompt["tokens"][:16], prompt["name"]
