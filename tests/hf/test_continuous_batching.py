"""transformers' generate_batch on the operator: tokens of one request at a time, and work only for the requests."""

import random

import attnpack.hf
import pytest
import torch
from attnpack.hf import paged, sdpa
from hf_families import make_model
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache

# full and sliding layers, soft caps, and sinks
FAMILIES = ["llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss"]
LENGTHS = (3, 17, 70, 1, 40)
pytestmark = pytest.mark.skipif(not paged.HAS_ALLOCATORS, reason="pages before transformers 5.18 are refused")


@pytest.fixture(autouse=True)
def registered():
    attnpack.hf.unregister()
    attnpack.hf.register()


def settings(**more):
    return GenerationConfig(max_new_tokens=12, eos_token_id=[], pad_token_id=0, **{"do_sample": False} | more)


def prompts():
    numbers = random.Random(0)
    return [[numbers.randrange(3, 90) for _ in range(length)] for length in LENGTHS]


def batched(model, requests, budget=32, **more):
    """The new tokens of each request. 32 new tokens per step split the longer prompts."""
    config = ContinuousBatchingConfig(page_size=8, max_batch_tokens=budget, max_memory_percent=0.01)
    outputs = model.generate_batch(
        requests, generation_config=settings(**more), continuous_batching_config=config, progress_bar=False
    )
    assert not any(output.error for output in outputs.values()), [output.error for output in outputs.values()]
    return [output.generated_tokens for output in outputs.values()]


def alone(model, requests):
    return [
        model.generate(torch.tensor([ids]), generation_config=settings())[0, len(ids) :].tolist() for ids in requests
    ]


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each call of the operator: shape of keys, whether they stand in pages, and the soft cap."""
    seen = []

    def attend(query, key, value, cu_seqlens_q, cu_seqlens_k=None, **others):
        seen.append((key.shape, "block_table" in others, others["softcap"]))
        return attention_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, **others)

    attention_varlen = paged.attention_varlen
    monkeypatch.setattr(paged, "attention_varlen", attend)
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_one_request_at_a_time(family, calls):
    model = make_model(family)
    model.set_attn_implementation("attnpack")
    assert batched(model, prompts()) == alone(model, prompts())
    assert calls, "the operator was not asked"


def test_keys_are_read_in_their_pages_without_a_mask(calls, monkeypatch):
    model = make_model("llama")
    model.set_attn_implementation("attnpack")
    gathered, update = [], paged._UPDATE  # transformers' own, which from 5.24 on its layers call, or ours
    owner = (paged, "_UPDATE") if paged.LAYERS_UPDATE else (PagedAttentionCache, "update")
    monkeypatch.setattr(*owner, lambda *a, **k: gathered.append(1) or update(*a, **k))
    masks = []
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda layer, positional, named: masks.append(type(named["attention_mask"])), with_kwargs=True
    )
    batched(model, prompts())
    hook.remove()
    assert not gathered and torch.Tensor not in masks
    assert sum(in_pages for _, in_pages, _ in calls) > len(calls) // 2, "all but the first prompts read pages"
    assert all(shape[1] == 8 for shape, in_pages, _ in calls if in_pages)


def test_soft_caps_reach_the_operator(calls):
    """Greedy tokens hardly depend on them."""
    model = make_model("gemma2")
    model.set_attn_implementation("attnpack")
    batched(model, prompts()[:2])
    assert {softcap for _, _, softcap in calls} == {model.config.attn_logit_softcapping} != {0.0}


@pytest.mark.parametrize("replace_sdpa", [False, True])
@pytest.mark.parametrize("family", ["diffllama", "doge", "jetmoe"])
def test_layers_that_compute_with_stored_keys_are_refused(family, replace_sdpa, calls):
    """They halve or repeat what the cache gives them, or make a mask of it."""
    if not paged.LAYERS_UPDATE:
        pytest.skip("before transformers 5.24 these families have no pages")
    model = make_model(family)
    attnpack.hf.register(replace_sdpa=replace_sdpa)
    model.set_attn_implementation("sdpa" if replace_sdpa else "attnpack")
    config = ContinuousBatchingConfig(page_size=8, max_batch_tokens=32, max_memory_percent=0.01)
    outputs = model.generate_batch(
        prompts()[:2], generation_config=settings(), continuous_batching_config=config, progress_bar=False
    )
    assert not any(output.generated_tokens for output in outputs.values())
    for output in outputs.values():
        assert 'call model.set_attn_implementation("sdpa") before' in output.error


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_replaced_sdpa_takes_it_too(family, calls):
    model = make_model(family)
    model.set_attn_implementation("sdpa")
    theirs = batched(model, prompts())
    assert not calls
    attnpack.hf.register(replace_sdpa=True)
    assert batched(model, prompts()) == theirs
    assert calls


def test_what_a_replaced_sdpa_does_not_take_goes_to_transformers(calls, monkeypatch):
    """With its keys copied out of their pages, as transformers' function wants them."""
    model = make_model("llama")
    model.set_attn_implementation("sdpa")
    theirs = batched(model, prompts())
    attnpack.hf.register(replace_sdpa=True)
    monkeypatch.setattr(sdpa, "_is_taken", lambda *_: False)
    assert batched(model, prompts()) == theirs
    assert not calls


def test_unregistering_gives_transformers_its_cache_back():
    update = PagedAttentionCache.update
    attnpack.hf.unregister()
    theirs = PagedAttentionCache.update
    attnpack.hf.register()
    attnpack.hf.register()  # twice is once
    assert PagedAttentionCache.update is update
    attnpack.hf.unregister()
    assert PagedAttentionCache.update is theirs and theirs.__module__ == PagedAttentionCache.__module__


def test_replaced_layers(calls):
    model = attnpack.hf.replace_attention(make_model("llama"))
    assert batched(model, prompts()) == alone(model, prompts())
    assert calls


def test_answers_to_one_prompt_share_pages(calls):
    model = make_model("llama")
    model.set_attn_implementation("attnpack")
    answers = batched(model, prompts()[2:3], num_return_sequences=3, do_sample=True, top_k=1)
    assert answers == alone(model, prompts()[2:3]) * 3
    assert calls


def test_low_precision():
    model = make_model("llama").bfloat16()
    model.set_attn_implementation("sdpa")
    theirs = batched(model, prompts())
    model.set_attn_implementation("attnpack")
    ours = batched(model, prompts())
    same = sum(a == b for one, other in zip(theirs, ours, strict=True) for a, b in zip(one, other, strict=True))
    assert same >= 0.8 * 12 * len(LENGTHS)


def test_what_pages_cannot_honour_is_named():
    model = make_model("llama")
    cache = object.__new__(PagedAttentionCache)
    heads = torch.zeros(1, 4, 3, 8)
    for name in ("position_bias", "indices", "block_indices"):
        with pytest.raises(ValueError, match=f"attnpack: {name}: got Tensor, which attnpack cannot honour"):
            attnpack.hf.attention_forward(model, heads, heads, heads, None, cache=cache, **{name: heads})


def test_unregister_undoes_it():
    model = make_model("llama")
    model.set_attn_implementation("attnpack")
    attnpack.hf.unregister()
    with pytest.raises(ValueError, match="attnpack is not supported for continuous batching"):
        model.generate_batch([[3, 4, 5]], progress_bar=False)
    attnpack.hf.register()
    attnpack.hf.register()
    attnpack.hf.unregister()
    with pytest.raises(ValueError, match="attnpack is not supported for continuous batching"):
        model.generate_batch([[3, 4, 5]], progress_bar=False)
