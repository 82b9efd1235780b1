"""The families of CausalLM against transformers: logits, tokens, caches by layer, both languages."""

import attnpack
import pytest
import torch
from families import FAMILIES, SIZES, model_of, peer_of, state_of
from marks import long

TEXT = torch.randint(SIZES["vocab_size"], (2, 20), generator=torch.Generator().manual_seed(1))
EACH = pytest.mark.parametrize("name", FAMILIES)


@EACH
def test_logits_are_those_of_transformers(name):
    with torch.no_grad():
        logits, wanted = model_of(name)(TEXT), peer_of(name)(TEXT).logits
    assert wanted.std() > 0.1
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@EACH
def test_every_cache_gives_the_tokens_of_transformers(name):
    model = model_of(name)
    wanted = peer_of(name).generate(TEXT, max_new_tokens=8, do_sample=False)
    kinds = ["dynamic", "static", "sliding", "none"] + ([] if FAMILIES[name].latent else ["paged"])
    for cache in kinds:
        assert model.generate(TEXT, max_new_tokens=8, cache=cache).equal(wanted), cache


@EACH
def test_the_twin_has_the_same_numbers_and_comes_back(name):
    model = model_of(name)
    twin = model.cpp()
    with torch.no_grad():
        wanted = model(TEXT)
        torch.testing.assert_close(twin.forward(TEXT), wanted, rtol=1e-5, atol=1e-5)
        back = attnpack.CausalLM.from_cpp(twin)
        assert list(back.state_dict()) == list(model.state_dict())
        torch.testing.assert_close(back(TEXT), wanted, rtol=0, atol=0)


@EACH
def test_a_cache_continues_ragged_rows(name):
    """Two prompts of different lengths in one padded batch, then one more token, against each alone."""
    model = model_of(name)
    lengths = torch.tensor([20, 13])
    kinds = [attnpack.LatentCache() if FAMILIES[name].latent else attnpack.DynamicCache() for _ in range(3)]
    cache = attnpack.ModelCache(kinds)
    with torch.no_grad():
        model(TEXT, cache, lengths=lengths)
        after = model(TEXT[:, :1], cache)
        for row, length in enumerate(lengths.tolist()):
            alone = model(torch.cat([TEXT[row : row + 1, :length], TEXT[row : row + 1, :1]], 1))[:, -1:]
            torch.testing.assert_close(after[row : row + 1], alone, rtol=1e-4, atol=1e-4)


@EACH
def test_gradients_are_those_of_transformers(name):
    model, peer = model_of(name), peer_of(name)
    given = torch.randn(2, 20, 96, generator=torch.Generator().manual_seed(2))
    model(TEXT).backward(given)
    peer.zero_grad()
    peer(TEXT).logits.backward(given)
    wanted = state_of(name, gradients=True)
    for weight, parameter in model.named_parameters():
        if parameter.grad is None:  # frozen, or an expert that no token chose
            assert not parameter.requires_grad or not wanted[weight].any()
        else:
            torch.testing.assert_close(parameter.grad, wanted[weight], rtol=1e-3, atol=1e-3, msg=weight)
    peer.zero_grad()


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "deepseek_v3", *map(long, ("olmo2", "gpt2", "falcon_40b"))])
def test_one_graph(name):
    model = model_of(name)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(TEXT), model(TEXT), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "gpt_oss", "falcon_7b"])
def test_nested_rows_are_calls_of_their_own(name):
    model = model_of(name)
    rows = [TEXT[0, :13], TEXT[1]]
    with torch.no_grad():
        out = model(torch.nested.nested_tensor(rows, layout=torch.jagged)).unbind()
        for row, part in zip(rows, out, strict=True):
            torch.testing.assert_close(part, model(row[None])[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "qwen3_moe"])
def test_eight_bits_give_the_same_tokens_in_mixed_layers(name):
    model = model_of(name)
    exact = model.generate(TEXT, max_new_tokens=6)
    assert model.generate(TEXT, max_new_tokens=6, cache="int8").equal(exact)
    assert model.generate(TEXT, max_new_tokens=6, cache="int4").shape == exact.shape
