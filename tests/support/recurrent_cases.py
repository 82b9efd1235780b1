"""Inputs of linear attention, which several tests share."""

import torch
from op_cases import draw

NAMES = ("query", "key", "value", "log_decay", "beta", "initial_state")
DECAYS = {  # the log decays of each kind; a strong one underflows within a chunk
    "none": None,
    "per head": 0.2,
    "strong per head": 60.0,
    "per channel": 0.2,
    "strong per channel": 60.0,
}


def make(dtype=torch.float32, decay="per head", beta=True, length=70, heads=(2, 4), dims=(8, 6), state=True, batch=2):
    """Keys of about length 1, as all models have them: the delta rule needs that to stay stable."""
    (key_heads, num_heads), (dim, v_dim) = heads, dims
    wide = torch.promote_types(dtype, torch.float32)
    x = {
        "query": draw(batch, key_heads, length, dim, dtype=dtype, seed=1),
        "key": (draw(batch, key_heads, length, dim, seed=2) / dim**0.5).to(dtype),
        "value": draw(batch, num_heads, length, v_dim, dtype=dtype, seed=3),
    }
    if DECAYS[decay]:
        shape = (batch, num_heads, length, dim) if "channel" in decay else (batch, num_heads, length)
        x["log_decay"] = -DECAYS[decay] * draw(*shape, dtype=wide, seed=4).abs()
    if beta:
        x["beta"] = draw(batch, num_heads, length, dtype=dtype, seed=5).sigmoid()
    if state:
        x["initial_state"] = draw(batch, num_heads, dim, v_dim, dtype=wide, seed=6)
    return x
