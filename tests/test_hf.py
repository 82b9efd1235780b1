"""attn_implementation="attnpack" against transformers' eager attention, on tiny random models of many families."""

import attnpack
import attnpack.hf
import pytest
import torch
from hf_families import DECODERS, ENCODER_DECODERS, FAMILIES, LATENT, VISION, generated, logits, make_model, padding
from transformers import AttentionInterface, AttentionMaskInterface

attnpack.hf.register()

# As transformers compares eager with sdpa (tests/test_modeling_common.py), but for fp32, which is held tighter.
FP32 = {"rtol": 1e-4, "atol": 2e-5}
BF16 = {"rtol": 1e-2, "atol": 1e-2}


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    """(family, model in fp32); built once for the tests of a family, which pytest runs one after the other."""
    return request.param, make_model(request.param)


@pytest.fixture(scope="module")
def case_bf16(case):
    family, model = case
    return family, make_model(family).to(torch.bfloat16)


def paddings(family):
    return ["none"] if family in VISION else ["none", "left", "right"]


def test_fp32_logits_equal_eager(case):
    family, model = case
    for kind in paddings(family):
        expected, found = (logits(model, family, name, padding(kind)) for name in ("eager", "attnpack"))
        torch.testing.assert_close(found, expected, **FP32, msg=lambda text, kind=kind: f"{kind} padding: {text}")
        assert not torch.equal(found, expected), "eager itself ran"


def test_bf16_logits_equal_eager(case_bf16):
    family, model = case_bf16
    for kind in paddings(family):
        expected, found = (logits(model, family, name, padding(kind)) for name in ("eager", "attnpack"))
        assert found.dtype == torch.bfloat16
        print(family, kind, (found-expected).abs().max().item(), torch.isclose(found, expected, **BF16).float().mean().item())
        assert torch.isclose(found, expected, **BF16).float().mean() >= 0.8


def test_these_models_show_a_wrong_mask(case):
    """Without its mask, or for vision its scores, attention gives logits far from eager's: what is compared matters."""
    family, model = case

    def wrong(module, query, key, value, mask, **settings):
        if family in VISION:
            return attnpack.attention(query * 0, key, value).transpose(1, 2), None
        settings["is_causal"] = False
        return attnpack.hf.attention_forward(module, query, key, value, None, **settings)

    AttentionInterface.register("attnpack_wrong", wrong)
    AttentionMaskInterface.register("attnpack_wrong", attnpack.hf.mask)
    mask = padding("none" if family in VISION else "left")
    expected, found = (logits(model, family, name, mask) for name in ("eager", "attnpack_wrong"))
    assert (found - expected).abs().max() > 100 * FP32["atol"]


@pytest.mark.parametrize("kind", ["none", "left"])
def test_generate_equals_eager(case, kind):
    family, model = case
    if family not in (*DECODERS, *LATENT, *ENCODER_DECODERS):
        assert not model.can_generate() or family not in DECODERS
        return
    expected, found = (generated(model, name, padding(kind)) for name in ("eager", "attnpack"))
    assert torch.equal(found, expected)
