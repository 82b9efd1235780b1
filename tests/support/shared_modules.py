"""Modules of attnpack that the tests of several processes share."""

import attnpack
import torch
from torch import nn
from torch.distributed.tensor import DTensor

WIDTH = 24
LATENT = {"kv_lora_rank": 10, "qk_nope_head_dim": 4, "qk_rope_head_dim": 6, "v_head_dim": 5, "causal": True}


def rope(dim=6):
    return attnpack.RotaryEmbedding(dim)


def grouped(kv_heads=4, heads=8, **settings):
    settings = {"causal": True, "head_dim": 6, "rope": rope(), "bias": True} | settings
    return attnpack.GroupedQueryAttention(WIDTH, heads, kv_heads, **settings)


def latent(**settings):
    return attnpack.MultiHeadLatentAttention(WIDTH, 4, **LATENT | {"rope": rope()} | settings)


def block(attention, **settings):
    return attnpack.DecoderBlock(attention, attnpack.FeedForward(WIDTH, 20, bias=True), **settings)


SIZES = (19, WIDTH, 2, 4)
MODELS = {
    "model": lambda: attnpack.CausalLM(*SIZES, 2, hidden_dim=20),
    "tied": lambda: attnpack.CausalLM(*SIZES, 1, hidden_dim=20, tie_embeddings=True, qk_norm=True, bias=True),
    "small vocabulary": lambda: attnpack.CausalLM(5, *SIZES[1:], 2),
    "latent model": lambda: attnpack.CausalLM(*SIZES, latent={k: v for k, v in LATENT.items() if k != "causal"}),
}


def made(make):
    torch.manual_seed(1)
    module = make()
    for parameter in module.parameters():  # biases, norms and sinks that matter
        nn.init.normal_(parameter, std=0.2)
    return module


def distance(got, wanted):
    got, wanted = ((x.full_tensor() if isinstance(x, DTensor) else x).detach() for x in (got, wanted))
    assert got.shape == wanted.shape
    return float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1))
