"""Fused projections are split as their models read them, and joined again bit for bit."""

import attnpack
import pytest
import torch
from attnpack import convert
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GPT2Config,
    GPTBigCodeConfig,
)

EMBED, HEADS, DIM = 24, 4, 6
FALCON = {"vocab_size": 32, "hidden_size": EMBED, "num_hidden_layers": 1, "num_attention_heads": HEADS, "bias": True}
GPT = {"vocab_size": 32, "n_embd": EMBED, "n_layer": 1, "n_head": HEADS}
# config, layout, kv heads, whether RoPE rotates
MODELS = {
    "falcon-new-decoder": (FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2), "grouped", 2, True),
    "falcon-7b": (FalconConfig(**FALCON, multi_query=True), "grouped", 1, True),
    "falcon-rw": (FalconConfig(**FALCON, multi_query=False), "grouped", HEADS, True),
    "gpt-bigcode": (GPTBigCodeConfig(**GPT, multi_query=True), "concat", 1, False),
    "gpt-bigcode-mha": (GPTBigCodeConfig(**GPT, multi_query=False), "grouped", HEADS, False),
    "gpt2": (GPT2Config(**GPT), "conv1d", HEADS, False),
}


def random_model(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def attention_of(model):
    """The layer, its fused projection, and its output projection."""
    block = model.transformer.h[0]
    if hasattr(block, "self_attention"):
        layer = block.self_attention
        return layer, layer.query_key_value, layer.dense
    return block.attn, block.attn.c_attn, block.attn.c_proj


def ours(q, k, v, out_weight, out_bias, kv_heads, rope):
    """GroupedQueryAttention with (weight, bias) of each projection."""
    module = attnpack.GroupedQueryAttention(
        EMBED, HEADS, kv_heads, bias=True, causal=True, rope=attnpack.RotaryEmbedding(DIM) if rope else None
    )
    state = {"o_proj.weight": out_weight, "o_proj.bias": out_bias}
    for name, (weight, bias) in {"q": q, "k": k, "v": v}.items():
        state |= {f"{name}_proj.weight": weight, f"{name}_proj.bias": bias}
    module.load_state_dict(state)
    return module


@pytest.mark.parametrize("name", MODELS)
def test_split_gives_what_the_model_of_transformers_computes(name):
    config, layout, kv_heads, rope = MODELS[name]
    model = random_model(config)
    layer, fused, out = attention_of(model)
    seen = []
    layer.register_forward_hook(
        lambda _, args, kwargs, result: seen.append(((*args, *kwargs.values())[0], result[0])), with_kwargs=True
    )
    with torch.no_grad():
        model(torch.randint(32, (2, 7)))
        weights = convert.split_qkv(fused.weight, layout, HEADS, kv_heads)
        biases = convert.split_qkv(fused.bias, layout, HEADS, kv_heads)
        out_weight = out.weight.T if layout == "conv1d" else out.weight
        module = ours(*zip(weights, biases, strict=True), out_weight, out.bias, kv_heads, rope)
        x, wanted = seen[0]
        torch.testing.assert_close(module(x), wanted, rtol=1e-4, atol=1e-5)
    for tensor, parts in ((fused.weight, weights), (fused.bias, biases)):
        assert torch.equal(convert.fuse_qkv(*parts, layout, HEADS, kv_heads), tensor)


def test_torchs_in_proj():
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(EMBED, HEADS, batch_first=True)
    nn.init.normal_(theirs.in_proj_bias)
    weights = convert.split_qkv(theirs.in_proj_weight, "concat", HEADS, HEADS)
    biases = convert.split_qkv(theirs.in_proj_bias, "concat", HEADS, HEADS)
    out = theirs.out_proj
    module = ours(*zip(weights, biases, strict=True), out.weight.detach(), out.bias.detach(), HEADS, False)
    x = torch.randn(2, 5, EMBED)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    torch.testing.assert_close(module(x), theirs(x, x, x, attn_mask=hidden)[0])
    assert torch.equal(convert.fuse_qkv(*weights, "concat", HEADS, HEADS), theirs.in_proj_weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("layout", ["concat", "grouped", "conv1d"])
def test_round_trip_is_bit_exact(layout, dtype):
    """Bits of NaN and integers stay too, because nothing is computed."""
    rows = (HEADS + 2 * 2) * DIM
    shape = (EMBED, rows) if layout == "conv1d" else (rows, EMBED)
    bits = torch.randint(-128, 128, (*shape, dtype.itemsize), dtype=torch.int8)
    weight = bits.view(dtype).squeeze(-1)
    parts = convert.split_qkv(weight, layout, HEADS, 2)
    assert [part.shape for part in parts] == [(HEADS * DIM, EMBED), (2 * DIM, EMBED), (2 * DIM, EMBED)]
    again = convert.fuse_qkv(*parts, layout, HEADS, 2)
    assert torch.equal(again.view(torch.int8), weight.view(torch.int8))


def test_what_does_not_fit_is_named():
    weight = torch.zeros(48, 24)
    for arguments, message in (
        ((weight, "falcon", 4, 2), "layout: got 'falcon', want 'concat', 'grouped' or 'conv1d'"),
        ((weight, "concat", 4, 3), "num_kv_heads: got 3, want a divisor of num_heads 4"),
        ((weight, "concat", 5, 1), "weight: got shape .*, whose 48 rows of q, k and v are not those of 5 query"),
        ((torch.zeros(2, 3, 4), "concat", 4, 2), "weight: got shape"),
    ):
        with pytest.raises(ValueError, match=f"^attnpack: {message}"):
            convert.split_qkv(*arguments)
    with pytest.raises(ValueError, match="v: got dtypes float, double and float of q, k and v, want one"):
        convert.fuse_qkv(torch.zeros(24, 24), torch.zeros(12, 24).double(), torch.zeros(12, 24), "concat", 4, 2)
    with pytest.raises(ValueError, match=r"k: got shape \[24, 24\], want \[12, 24\]"):
        convert.fuse_qkv(torch.zeros(24, 24), torch.zeros(24, 24), torch.zeros(12, 24), "concat", 4, 2)
