"""DifferentialAttention against its mathematics in plain PyTorch, and against DiffLlama of transformers."""

import attnpack
import pytest
import torch
from attnpack import reference
from module_cases import EMBED
from torch.testing import assert_close
from transformers import DiffLlamaConfig
from transformers import DynamicCache as HfCache
from transformers.models.diffllama import modeling_diffllama


def first(**settings):
    torch.manual_seed(0)
    rope = attnpack.RotaryEmbedding(6)
    settings = {"version": 1, "head_dim": 6, "causal": True, "rope": rope, "lambda_init": 0.4} | settings
    return attnpack.DifferentialAttention(EMBED, 8, 4, **settings)


def second(**settings):
    torch.manual_seed(0)
    return attnpack.DifferentialAttention(
        EMBED, 4, 2, **{"causal": True, "rope": attnpack.RotaryEmbedding(6)} | settings
    )


def rotated_heads(module, x):
    """q, k, v as the projections give them, rotated; v before any pairing."""
    q, k, v = (proj(x).unflatten(-1, (-1, 6)).transpose(1, 2) for proj in (module.q_proj, module.k_proj, module.v_proj))
    return module.rope(q), module.rope(k), v


def test_the_first_form_is_its_mathematics():
    module, x = first(eps=1e-3), torch.randn(2, 5, EMBED)
    factor = (module.lambda_q1 @ module.lambda_k1).exp() - (module.lambda_q2 @ module.lambda_k2).exp() + 0.4
    difference = reference.differential_attention(*rotated_heads(module, x), factor, version=1, causal=True)
    normed = difference / (difference.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    wanted = module.o_proj((0.6 * normed).transpose(1, 2).flatten(2))
    for each in (module, module.cpp()):
        assert_close(each.forward(x), wanted, atol=1e-5, rtol=1e-5)


def test_the_second_form_is_its_mathematics():
    """Published code: microsoft/unilm, Diff-Transformer-V2. The pair 2 h, 2 h + 1 reads one kv head."""
    module, x = second(), torch.randn(2, 5, EMBED)
    assert module.q_proj.weight.shape == (8 * 6, EMBED) and module.lambda_proj.weight.shape == (4, EMBED)
    factor = module.lambda_proj(x).sigmoid().transpose(1, 2).unsqueeze(-1)
    difference = reference.differential_attention(*rotated_heads(module, x), factor, version=2, causal=True)
    wanted = module.o_proj(difference.transpose(1, 2).flatten(2))
    for each in (module, module.cpp()):
        assert_close(each.forward(x), wanted, atol=1e-5, rtol=1e-5)


def their_layer(layer_idx=2, **settings):
    config = DiffLlamaConfig(
        hidden_size=EMBED, num_attention_heads=8, num_key_value_heads=4, head_dim=6, attn_implementation="eager",
        max_position_embeddings=64, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    layer = modeling_diffllama.DiffLlamaAttention(config, layer_idx).eval()
    rotary = modeling_diffllama.DiffLlamaRotaryEmbedding(config)

    def call(x, cache=None):
        past = cache.get_seq_length(layer_idx) if cache is not None else 0
        positions = past + torch.arange(x.size(1)).expand(x.size(0), -1)
        seen = torch.arange(past + x.size(1)) <= positions[0].unsqueeze(-1)
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        return layer(x, rotary(x, positions), mask[None, None], past_key_values=cache)

    return layer, call


@pytest.mark.parametrize("bias", [False, True])
def test_equal_to_diffllama_by_names_and_numbers(bias):
    layer, call = their_layer(attention_bias=bias)
    ours = first(bias=bias, lambda_init=layer.lambda_init, eps=layer.config.rms_norm_eps).eval()
    ours.load_state_dict(layer.state_dict(), strict=True)
    assert list(ours.state_dict()) and set(ours.state_dict()) == set(layer.state_dict())
    x = torch.randn(2, 9, EMBED)
    wanted, weights = call(x)
    for each in (ours, ours.cpp()):
        out, own_weights = each.forward(x, need_weights=True)
        assert_close(out, wanted, atol=1e-5, rtol=1e-5)
        assert_close(own_weights, weights, atol=1e-6, rtol=1e-5)
    wanted.sum().backward()
    ours(x).sum().backward()
    theirs = dict(layer.named_parameters())
    for name, parameter in ours.named_parameters():
        assert_close(parameter.grad, theirs[name].grad, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        cache, hf = attnpack.DynamicCache(), HfCache()
        for part in x.split([4, 1, 4], 1):
            assert_close(ours(part, cache=cache), call(part, hf)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [first, second])
@torch.no_grad()
def test_by_tokens_padded_nested_and_shared(make):
    module, x = make().eval(), torch.randn(2, 7, EMBED)
    whole, width = module(x), 12 if module.version == 1 else 6
    for cache in (
        attnpack.DynamicCache(),
        attnpack.StaticCache(2, module.num_kv_heads, 9, 6, v_head_dim=width),
        attnpack.SlidingWindowCache(20),
    ):
        layer = make(window=(20, 0)).eval() if isinstance(cache, attnpack.SlidingWindowCache) else module
        layer.load_state_dict(module.state_dict())
        assert_close(
            torch.cat([layer(part, cache=cache) for part in x.split([3, 1, 3], 1)], 1), whole, atol=1e-5, rtol=0
        )
    for each, held in ((module, attnpack.DynamicCache()), (module.cpp(), attnpack.cpp.DynamicCache())):
        each.forward(x, cache=held)
        assert_close(each.forward(x, kv_from=held), whole, atol=1e-5, rtol=0)
    nested = torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
    first_row, second_row = module(nested).unbind()
    assert_close(first_row, whole[0], atol=1e-5, rtol=0)
    assert_close(second_row, whole[1, :3], atol=1e-5, rtol=0)
    assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(x), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_heads", [1, 2])
def test_the_second_form_takes_masks(num_heads):
    """One of all heads, though 1 is num_heads; or one for each of its 2 num_heads query heads."""
    module, x = attnpack.DifferentialAttention(EMBED, num_heads, 1), torch.randn(2, 5, EMBED)
    keys = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool).view(2, 1, 1, 5)
    wanted = module(x, kv_lens=torch.tensor([3, 5]))
    for each in (module, module.cpp()):
        for mask in (keys, keys.expand(2, 2 * num_heads, 5, 5)):
            result = each.forward(x, mask=mask)
            assert_close(result[0, :3], wanted[0, :3])
            assert_close(result[1], wanted[1])


def test_a_block_takes_it():
    block = attnpack.DecoderBlock(first(), attnpack.FeedForward(EMBED, 32))
    x = torch.randn(2, 5, EMBED)
    assert torch.equal(block(x), block.cpp().forward(x))


@pytest.mark.parametrize("make", [first, second])
def test_dropout_acts_in_training_alone(make):
    module, plain, x = make(dropout=0.5), make(), torch.randn(2, 5, EMBED)
    plain.load_state_dict(module.state_dict())
    for each, other in ((module, plain), (module.cpp(), plain.cpp())):
        assert not torch.allclose(each.train().forward(x), other.forward(x), atol=1e-3)
        assert torch.equal(each.eval().forward(x), other.forward(x))


REFUSED = {
    "version: got 3, want 1 or 2": {"version": 3},
    "lambda_init, eps: got one for version 2": {"lambda_init": 0.5},
    "num_heads, num_kv_heads: got 4 and 1, version 1 wants even numbers": {"version": 1, "num_kv_heads": 1},
    "num_kv_heads: got 3, which does not divide num_heads 4": {"num_kv_heads": 3},
    "lambda_init: got nan": {"version": 1, "lambda_init": float("nan")},
    "eps: got -1": {"version": 1, "eps": -1.0},
    "rope: got dim 8, want at most head_dim 6": {"rope": 8},
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_options(message):
    for classes in (attnpack, attnpack.cpp):
        settings = {"num_kv_heads": 2} | REFUSED[message]
        if "rope" in settings:
            settings["rope"] = classes.RotaryEmbedding(settings["rope"])
        with pytest.raises(ValueError, match=message):
            classes.DifferentialAttention(EMBED, 4, **settings)
