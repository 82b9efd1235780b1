"""hf.register(replace_sdpa=True): models with transformers' default attention run on attnpack."""

import attnpack.hf
import pytest
import torch
from attnpack import backend
from attnpack.hf import attention_function
from hf_families import FAMILIES, inputs, make_model, padding, set_attention, since
from transformers import AttentionInterface

FP32 = {"rtol": 1e-4, "atol": 2e-5}


@pytest.fixture
def replaced(monkeypatch):
    """A function that counts the calls of the operator, under replace_sdpa."""
    calls = []
    original = attention_function.attention
    monkeypatch.setattr(attention_function, "attention", lambda *a, **k: calls.append(1) or original(*a, **k))
    attnpack.hf.register(replace_sdpa=True)
    yield lambda: len(calls)
    attnpack.hf.unregister()


def sdpa_model(family):
    model = make_model(family)
    set_attention(model, "sdpa")
    return model


def supported(family):
    try:
        sdpa_model(family)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("kind", ["none", "left", "right"])
@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen3", "gpt2", "bert", "roberta", "bart", "t5", "vit", "whisper"]
)
def test_a_model_of_the_default_attention_gives_the_same(family, kind, replaced):
    model = sdpa_model(family)
    given = inputs(family, padding(kind))
    with torch.no_grad():
        attnpack.hf.unregister()
        expected = model(**given).logits
        assert replaced() == 0
        attnpack.hf.register(replace_sdpa=True)
        found = model(**given).logits
    assert replaced() > 0
    torch.testing.assert_close(found, expected, **FP32)


@since("5.23")
def test_families_that_have_sdpa(replaced):
    """Each third family, if its default is sdpa: one forward."""
    done = 0
    for family in FAMILIES[::3]:
        if not supported(family):
            continue
        model, given = sdpa_model(family), inputs(family, padding("right"))
        with torch.no_grad():
            before = replaced()
            found = model(**given).logits
            if replaced() == before:  # attention code of its own
                continue
            attnpack.hf.unregister()
            torch.testing.assert_close(found, model(**given).logits, rtol=1e-3, atol=1e-4, msg=family)
            attnpack.hf.register(replace_sdpa=True)
        done += 1
    assert done > 20


def test_generate_and_gradients(replaced):
    model = sdpa_model("llama")
    ids = inputs("llama", padding("none", batch=2))["input_ids"]
    found = model.generate(ids, max_new_tokens=6, do_sample=False)
    loss = model(ids, labels=ids).loss
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    attnpack.hf.unregister()
    assert torch.equal(found, model.generate(ids, max_new_tokens=6, do_sample=False))
    for a, b in zip(gradients, torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_unregister_gives_back_transformers_own(replaced):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    assert AttentionInterface()["sdpa"] is not sdpa_attention_forward and "attnpack" in AttentionInterface()
    attnpack.hf.unregister()
    attnpack.hf.unregister()
    assert AttentionInterface()["sdpa"] is sdpa_attention_forward and "attnpack" not in AttentionInterface()


@since("5.23")
def test_what_sdpa_refuses_and_what_is_exported_goes_to_transformers(replaced):
    model = sdpa_model("llama")
    attend = AttentionInterface()["sdpa"]
    layer, x = model.model.layers[0].self_attn, torch.randn(1, 4, 5, 8)
    with pytest.raises(ValueError, match="does not support `softcap`"):
        attend(layer, x, x, x, None, softcap=3.0)
    short = torch.ones(5, 5, dtype=torch.bool)  # a mask that broadcasts
    layer.num_key_value_groups = 1
    attend(layer, x, x, x, short)
    assert replaced() == 0
    ids = inputs("llama", padding("none"))["input_ids"]
    with backend.sdpa():
        graph = torch.export.export(sdpa_model("llama"), (ids,), {"use_cache": False}, strict=False).graph
    assert "attnpack" not in str(graph) and replaced() == 0
