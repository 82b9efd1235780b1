"""MultiHeadLatentAttention and LatentCache against transformers' DeepSeek layers."""

import attnpack
import pytest
import torch
from latent_cases import HEADS, PATHS, SIZES, YARN, E, make_layer
from torch.testing import assert_close
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers import DynamicCache as HfCache
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3


def theirs(version, q_lora_rank, scaling, **settings):
    """A DeepSeek attention layer of transformers, and a function from x and a cache to its output."""
    config = {2: DeepseekV2Config, 3: DeepseekV3Config}[version](
        hidden_size=E,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=q_lora_rank,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 10000.0, **(scaling or {"rope_type": "default"})},
        attn_implementation="eager",
        **SIZES,
        **settings,
    )
    torch.manual_seed(0)
    modeling = {2: v2, 3: v3}[version]
    layer = getattr(modeling, f"DeepseekV{version}Attention")(config, 0).eval()
    rotary = getattr(modeling, f"DeepseekV{version}RotaryEmbedding")(config)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) / parameter.size(-1) ** 0.5)

    def call(x, cache=None):
        past = cache.get_seq_length() if cache is not None else 0
        positions = past + torch.arange(x.size(1)).expand(x.size(0), -1)
        seen = torch.arange(past + x.size(1)) <= positions[0].unsqueeze(-1)
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        return layer(
            hidden_states=x,
            position_embeddings=rotary(x, positions),
            attention_mask=mask[None, None].expand(x.size(0), 1, -1, -1),
            past_key_values=cache,
        )[0]

    return layer, call


CHECKPOINTS = [
    (2, 24, None, {}),
    (2, None, YARN, {}),
    (3, 24, None, {"attention_bias": True}),
    (3, 24, YARN, {}),
    (3, None, None, {}),
    (3, None, YARN, {"rope_interleave": False}),
]


@pytest.mark.parametrize("version, q_lora_rank, scaling, settings", CHECKPOINTS, ids=str)
@torch.no_grad()
def test_equal_to_transformers_full_by_chunks_and_by_tokens(version, q_lora_rank, scaling, settings):
    layer, call = theirs(version, q_lora_rank, scaling, **settings)
    ours = make_layer(
        scaling=scaling,
        q_lora_rank=q_lora_rank,
        bias=settings.get("attention_bias", False),
        interleaved=settings.get("rope_interleave", True),
    ).eval()
    ours.load_state_dict(layer.state_dict(), strict=True)
    assert ours.softmax_scale == pytest.approx(layer.scaling, rel=1e-12)
    x = torch.randn(2, 20, E)
    wanted = call(x)
    for path in ("auto", *PATHS):
        ours.path = path
        assert_close(ours(x), wanted, rtol=0, atol=2e-5)
        assert_close(ours.cpp().forward(x), wanted, rtol=0, atol=2e-5)
        for sizes in ([7, 13], [9, 1, 10], [1] * 20):
            cache, native = attnpack.LatentCache(), attnpack.cpp.LatentCache()
            out = torch.cat([ours(part, cache=cache) for part in x.split(sizes, 1)], 1)
            assert_close(out, wanted, rtol=0, atol=2e-5)
            twin = ours.cpp()
            assert torch.equal(out, torch.cat([twin.forward(part, cache=native) for part in x.split(sizes, 1)], 1))


@pytest.mark.parametrize("version", [2, 3])
@torch.no_grad()
def test_caches_are_exchanged_with_transformers(version):
    """Each side continues from the latents that the other has cached."""
    layer, call = theirs(version, None, None)
    ours, x, half_split = make_layer().eval(), torch.randn(2, 9, E), version == 3
    ours.load_state_dict(layer.state_dict())
    mine, hf = attnpack.LatentCache(), HfCache()
    ours(x[:, :6], cache=mine), call(x[:, :6], hf)
    c, k_rope = mine.to_latents(half_split=half_split)
    assert_close(c, hf.layers[0].keys, rtol=0, atol=2e-5)
    assert_close(k_rope, hf.layers[0].values, rtol=0, atol=2e-5)
    taken = attnpack.LatentCache.from_latents(hf.layers[0].keys, hf.layers[0].values, half_split=half_split)
    assert_close(taken.k, mine.k, rtol=0, atol=2e-5)
    wanted = call(x)[:, 6:]
    assert_close(ours(x[:, 6:], cache=taken), wanted, rtol=0, atol=2e-5)
    given = HfCache()
    given.update(c, k_rope, 0)
    assert_close(call(x[:, 6:], given), wanted, rtol=0, atol=2e-5)


def test_scales_of_the_published_models():
    for mscale, wanted in ((1.0, 0.1352338), (0.707, 0.1147214)):
        scaling = {**YARN, "original_max_position_embeddings": 4096, "mscale": mscale, "mscale_all_dim": mscale}
        rope = attnpack.RotaryEmbedding(64, scaling=scaling, interleaved=True)
        sizes = dict(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
        module = attnpack.MultiHeadLatentAttention(7168, 128, rope=rope, device="meta", **sizes)
        assert module.softmax_scale == pytest.approx(wanted, abs=5e-8)
        assert module.cpp().softmax_scale == module.softmax_scale
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    assert shapes == {
        "q_a_proj.weight": (1536, 7168),
        "q_a_layernorm.weight": (1536,),
        "q_b_proj.weight": (24576, 1536),
        "kv_a_proj_with_mqa.weight": (576, 7168),
        "kv_a_layernorm.weight": (512,),
        "kv_b_proj.weight": (32768, 512),
        "o_proj.weight": (7168, 16384),
    }
