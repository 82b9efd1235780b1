"""Sizes and modules that the tests of latent attention share."""

import attnpack
import torch

E, HEADS = 48, 4
SIZES = {"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
}
PATHS = ("expanded", "absorbed")


def make_layer(rope=True, scaling=None, seed=0, interleaved=True, **settings):
    torch.manual_seed(seed)
    sizes = {**SIZES, "causal": True, **settings}
    if rope:
        sizes["rope"] = attnpack.RotaryEmbedding(
            sizes["qk_rope_head_dim"], max_positions=64, scaling=scaling, interleaved=interleaved
        )
    module = attnpack.MultiHeadLatentAttention(E, HEADS, **sizes)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module
