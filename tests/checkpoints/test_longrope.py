"""LongRoPE past the trained length: generation fills its cache anew there, as transformers does for Phi-3."""

import attnpack
import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config

TRAINED, NEW = 16, 12
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 300.0, "short_factor": [1.0, 1.2, 1.4, 1.6],
    "long_factor": [2.0, 5.0, 9.0, 16.0],
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(transformers' Phi-3, ours) with random weights that are large enough to tell."""
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, original_max_position_embeddings=TRAINED,
        rope_parameters=LONGROPE, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    peer = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    directory = tmp_path_factory.mktemp("phi3")
    peer.save_pretrained(directory)
    return peer, attnpack.CausalLM.from_hf(directory)


def ids(length, seed=1, batch=2):
    return torch.randint(96, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("cache", ["dynamic", "static", "paged", "none"])
@pytest.mark.parametrize("length", [5, 10, TRAINED, TRAINED + 3])
def test_tokens_are_those_of_transformers(length, cache, models):
    peer, model = models
    prompt = ids(length)
    settings = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}
    wanted = peer.generate(prompt, max_new_tokens=NEW, **settings)
    assert torch.equal(model.generate(prompt, max_new_tokens=NEW, cache=cache), wanted)


def test_a_cache_that_is_not_filled_anew_gives_other_tokens(models):
    """Else the test above could not fail."""
    _, model = models
    kept = attnpack.ModelCache([attnpack.DynamicCache() for _ in range(3)])
    prompts = ids(10, batch=8)
    assert not torch.equal(
        model.generate(prompts, max_new_tokens=NEW, cache=kept), model.generate(prompts, max_new_tokens=NEW)
    )


def test_each_row_turns_at_its_own_length(models):
    _, model = models
    lengths = torch.tensor([12, 4, 9])
    prompts = ids(12, seed=3, batch=3)
    together = model.generate(prompts, max_new_tokens=NEW, lengths=lengths)[:, 12:]
    for row, length in enumerate(lengths.tolist()):
        alone = model.generate(prompts[row : row + 1, :length], max_new_tokens=NEW)
        assert torch.equal(together[row], alone[0, length:])


def test_several_answers(models):
    _, model = models
    settings = {"max_new_tokens": NEW, "num_return_sequences": 3, "temperature": 1.0, "seed": 5}
    wanted = model.generate(ids(10), cache="none", **settings)
    for cache in ("dynamic", "static", "paged"):
        assert torch.equal(model.generate(ids(10), cache=cache, **settings), wanted)
