"""attn_implementation="attnpack" against transformers' eager attention, on tiny random models of many families."""

import copy
import functools

import attnpack
import attnpack.hf
import pytest
import torch
from hf_families import (
    DECODERS,
    ENCODER_DECODERS,
    FAMILIES,
    LATENT,
    VISION,
    generated,
    logits,
    make_model,
    padding,
    states,
)
from transformers import AttentionInterface, AttentionMaskInterface

attnpack.hf.register()

FP32 = {"rtol": 1e-4, "atol": 2e-5}
BF16 = 1e-2  # rtol and atol with which transformers compares eager with sdpa, in tests/test_modeling_common.py


_model = functools.lru_cache(maxsize=2)(make_model)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    """(family, model in fp32); built once for the tests of a family, which pytest runs one after the other."""
    return request.param, _model(request.param)


def paddings(family):
    return ["none"] if family in VISION else ["none", "left", "right"]


def test_fp32_logits_equal_eager(case):
    family, model = case
    for kind in paddings(family):
        expected, found = (logits(model, family, name, padding(kind)) for name in ("eager", "attnpack"))
        torch.testing.assert_close(found, expected, **FP32, msg=lambda text, kind=kind: f"{kind} padding: {text}")
        assert not torch.equal(found, expected), "eager itself ran"


def test_bf16_logits_equal_eager(case):
    """Weights as transformers draws them, and its rule: four of five tokens close, which leaves room for a
    router that the rounding sends another way."""
    family, _ = case
    model = make_model(family, spread=0.0).to(torch.bfloat16)
    for kind in paddings(family):
        expected, found = (logits(model, family, name, padding(kind)) for name in ("eager", "attnpack"))
        assert torch.isclose(found, expected, rtol=BF16, atol=BF16).all(-1).float().mean() >= 0.8


def test_bf16_is_as_close_to_fp32_as_eager(case):
    family, model = case
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    for kind in paddings(family):
        truth = states(model, family, "eager", padding(kind))
        theirs, ours = (
            (states(rounded, family, name, padding(kind)) - truth).abs().mean(-1).median()
            for name in ("eager", "attnpack")
        )
        assert ours <= 2 * theirs


def test_these_models_show_a_wrong_mask(case):
    """Without its mask, or for vision its scores, attention gives logits far from eager's: what is compared matters."""
    family, model = case

    def wrong(module, query, key, value, attention_mask, **settings):
        if family in VISION:
            return attnpack.attention(query * 0, key, value).transpose(1, 2), None
        settings["is_causal"] = False
        return attnpack.hf.attention_forward(module, query, key, value, None, **settings)

    AttentionInterface.register("attnpack_wrong", wrong)
    AttentionMaskInterface.register("attnpack_wrong", attnpack.hf.mask)
    mask = padding("none" if family in VISION else "left")
    expected, found = (logits(model, family, name, mask) for name in ("eager", "attnpack_wrong"))
    assert (found - expected).abs().max() > 100 * FP32["atol"]


@pytest.mark.parametrize("kind", ["none", "left", "right"])
@pytest.mark.parametrize("family", [*DECODERS, *LATENT, *ENCODER_DECODERS])
def test_generate_equals_eager(family, kind):
    model = _model(family)
    expected, found = (generated(model, name, padding(kind)) for name in ("eager", "attnpack"))
    assert expected.size(1) >= 8
    assert torch.equal(found, expected)
