"""transformers' recurrent layers on attnpack's functions: models before and after register(), packed rows."""

import importlib

import attnpack.hf
import pytest
import torch
from attnpack.hf import layers as hf_layers
from attnpack.hf import recurrent
from hf_families import since
from processes import run_python
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

pytestmark = since("5.24")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
         "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
FAMILIES = {
    "qwen3_5": ("Qwen3_5TextConfig", DELTA | {"head_dim": 8}),
    "olmo_hybrid": ("OlmoHybridConfig", DELTA),
    "kimi_linear": ("KimiLinearConfig", {
        "linear_num_heads": 2, "linear_head_dim": 8, "layer_types": DELTA["layer_types"], "kv_lora_rank": 8,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4,
        "mlp_layer_types": ["dense", "dense"]}),
    "qwen3_next": ("Qwen3NextConfig", DELTA | {
        "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 20}),
    "granitemoehybrid": ("GraniteMoeHybridConfig", {
        "layer_types": DELTA["layer_types"], "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 6,
        "num_local_experts": 0, "shared_intermediate_size": 20}),
    "bamba": ("BambaConfig", {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_state": 6}),
    "mamba2": ("Mamba2Config", {"num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": 2}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "conv_bias": True}),
}  # fmt: skip
IDS = torch.randint(3, 64, (2, 70), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def unregistered():
    attnpack.hf.unregister()


def model_of(family):
    torch.manual_seed(0)
    name, settings = FAMILIES[family]
    config = getattr(importlib.import_module(f"transformers.models.{family}"), name)(**(SIZES | settings))
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture
def calls(monkeypatch):
    """The names of our functions that were called."""
    found = []

    takes = recurrent._takes
    monkeypatch.setattr(recurrent, "_takes", lambda name, *rest: (found.append(name), takes(name, *rest))[1])
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_existing_models_give_the_same_logits_tokens_and_gradients(family, calls):
    model = model_of(family)
    theirs = model(IDS)
    tokens = model.generate(IDS, max_new_tokens=6, do_sample=False)
    loss = theirs.logits.square().mean()
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    assert not calls
    attnpack.hf.register()
    ours = model(IDS)
    assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(ours.logits.square().mean(), list(model.parameters()))
    assert_close(found, wanted, rtol=2e-3, atol=1e-5)
    assert torch.equal(model.generate(IDS, max_new_tokens=6, do_sample=False), tokens)
    assert {"causal_conv1d_fn", "causal_conv1d_update"} <= set(calls)
    if family in ("granitemoehybrid", "bamba", "mamba2"):
        assert "mamba_chunk_scan_combined" in calls
    elif family != "lfm2":
        assert any("chunk" in name for name in calls) and any("fused_recurrent" in name for name in calls)
    calls.clear()
    attnpack.hf.unregister()
    assert torch.equal(model(IDS).logits, theirs.logits) and not calls


def test_models_that_are_imported_later_take_them_too():
    done = run_python(LATER)
    assert done.returncode == 0, done.text


LATER = """
import attnpack.hf
attnpack.hf.register()
from transformers.models.qwen3_next import modeling_qwen3_next as module
from attnpack.hf import recurrent
for function in (module.torch_chunk_gated_delta_rule, module.causal_conv1d_fn):
    assert recurrent._cells(function)["implementation"].cell_contents.is_attnpacks
attnpack.hf.unregister()
"""


def test_packed_sequences_stay_apart():
    """transformers' own code refuses them."""
    attnpack.hf.register()
    module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    x, weight = torch.randn(1, 6, 12), torch.randn(6, 4)
    numbers = torch.tensor([[0] * 5 + [1] * 7], dtype=torch.int32)
    out = module.causal_conv1d_fn(x, weight, None, activation="silu", seq_idx=numbers)
    parts = [module.causal_conv1d_fn(p, weight, None, activation="silu") for p in (x[..., :5], x[..., 5:])]
    assert_close(out, torch.cat(parts, -1))
    q, v, g = torch.randn(1, 12, 2, 4), torch.randn(1, 12, 2, 4), -torch.rand(1, 12, 2)
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    rule = module.torch_chunk_gated_delta_rule
    out, _ = rule(q, q, v, g=g, beta=g.exp(), cu_seqlens=ends, use_qk_l2norm_in_kernel=True)
    parts = [rule(q[:, s], q[:, s], v[:, s], g=g[:, s], beta=g[:, s].exp(), use_qk_l2norm_in_kernel=True)[0]
             for s in (slice(0, 5), slice(5, 12))]  # fmt: skip
    assert_close(out, torch.cat(parts, 1))


def test_a_wider_convolution_state_and_other_calls_go_their_way():
    attnpack.hf.register()
    module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    x, state, weight = torch.randn(2, 6, 1), torch.randn(2, 6, 7), torch.randn(6, 4)
    held, whole = state.clone(), torch.cat([state, x], -1)
    out = module.causal_conv1d_update(x, held, weight, None, "silu")
    assert_close(held, whole[..., 1:])
    plain = torch.nn.functional.silu((whole[..., -4:] * weight).sum(-1, keepdim=True))
    assert_close(out, plain)
    relu = module.causal_conv1d_fn(torch.randn(2, 6, 9), weight, None, activation="relu")
    assert (relu >= 0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_replaced_layers_give_the_same_logits_tokens_and_gradients(family):
    model = model_of(family)
    theirs, tokens = model(IDS).logits, model.generate(IDS, max_new_tokens=6, do_sample=False)
    padding = torch.ones_like(IDS)
    padding[1, :30] = 0  # to the left
    padded = model(IDS, attention_mask=padding).logits
    named = dict(model.named_parameters())
    wanted = torch.autograd.grad(theirs.square().mean(), list(named.values()))
    attnpack.hf.replace_attention(model)
    assert any(isinstance(layer, hf_layers.recurrent._Recurrent) for layer in model.modules())
    assert dict(model.named_parameters()).keys() == named.keys()
    assert_close(model(IDS).logits, theirs, rtol=1e-4, atol=1e-4)
    assert_close(model(IDS, attention_mask=padding).logits[1, 30:], padded[1, 30:], rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(model(IDS).logits.square().mean(), [dict(model.named_parameters())[n] for n in named])
    assert_close(found, wanted, rtol=2e-3, atol=1e-5)
    assert torch.equal(model.generate(IDS, max_new_tokens=6, do_sample=False), tokens)
    beams = model.generate(IDS, max_new_tokens=4, num_beams=2, do_sample=False)
    assert len(beams) == 2 and beams.size(1) > 70
    layer = next(layer for layer in model.modules() if type(layer).__name__.startswith("Hf"))
    with pytest.raises(TypeError, match="a layer that replaces one of transformers has no C\\+\\+ twin"):
        layer.cpp()
