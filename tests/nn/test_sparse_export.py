"""Layers that choose keys, exported for any length: with torch's own switch where they take blocks or windows."""

import attnpack
import pytest
import torch
from marks import long
from torch.export import Dim, export
from torch.testing import assert_close

E, ROPE = 24, attnpack.RotaryEmbedding(4, interleaved=True)
COMPRESSED = {"head_dim": 12, "q_lora_rank": 10, "o_lora_rank": 6, "o_groups": 2, "window": 5, "rope": ROPE}
LATENT = {"q_lora_rank": 10, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6}
LAYERS = {
    "indexer": lambda: attnpack.SparseAttention(E, 4, 2, top_k=4, causal=True),
    "mean": lambda: attnpack.SparseAttention(E, 4, 2, selector="mean", top_k=3, key_block=4, causal=True),
    "max": lambda: attnpack.SparseAttention(E, 4, 2, selector="max", top_k=3, key_block=4, causal=True),
    "latent": lambda: attnpack.SparseLatentAttention(
        E, 4, top_k=4, index_heads=2, index_head_dim=8, causal=True, rope=ROPE, **LATENT
    ),
    "sliding": lambda: attnpack.CompressedAttention(E, 4, **COMPRESSED),
    "heavily compressed": lambda: attnpack.CompressedAttention(E, 4, compress_rate=4, **COMPRESSED),
    "compressed sparse": lambda: attnpack.CompressedAttention(E, 4, compress_rate=3, top_k=2, **COMPRESSED),
}


@pytest.mark.parametrize("traced", [long(32), 35], ids="length_{}".format)
@pytest.mark.parametrize("name", LAYERS)
def test_one_program_for_any_length(name, traced):
    """Lengths with and without an unfinished block, whichever was traced."""
    torch.manual_seed(0)
    layer = LAYERS[name]().eval()
    length = {1: Dim("length", min=16, max=512)}
    program = export(
        layer, (torch.randn(1, traced, E),), dynamic_shapes=(length,), prefer_deferred_runtime_asserts_over_guards=True
    )
    for other in (24, 41, 60):
        x = torch.randn(1, other, E)
        assert_close(program.module()(x), layer(x))
