"""pool_kv_heads, by hand."""

import pytest
import torch
from attnpack import convert
from torch import nn

EMBED, HEADS, DIM = 24, 4, 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(HEADS * DIM, EMBED), (HEADS * DIM,)], ids=["weight", "bias"])
def test_pooling_by_hand(shape, dtype):
    weight = torch.randn(shape).to(dtype)
    heads = weight.double().split(DIM)
    by_hand = {
        "mean": torch.cat([(heads[0] + heads[1]) / 2, (heads[2] + heads[3]) / 2]),
        "first": torch.cat([heads[0], heads[2]]),
    }
    for method, wanted in by_hand.items():
        pooled = convert.pool_kv_heads(weight, HEADS, 2, method=method)
        assert pooled.dtype == dtype and torch.equal(pooled, wanted.to(dtype))
    uneven = convert.pool_kv_heads(weight, HEADS, 2, groups=[[3], [0, 2, 1]])
    assert torch.equal(uneven[:DIM], heads[3].to(dtype))
    torch.testing.assert_close(uneven[DIM:].double(), ((heads[0] + heads[1] + heads[2]) / 3).to(dtype).double())


def test_pooling_groups_consecutive_heads_not_strided_ones():
    """Heads h // G share a kv head, as the operator reads them; i mod Hkv is a known mistake."""
    weight = torch.arange(4.0).repeat_interleave(2)
    assert convert.pool_kv_heads(weight, 4, 2).tolist() == [0.5, 0.5, 2.5, 2.5]


@pytest.mark.parametrize("count", [2, 3, 7])
def test_the_mean_of_equal_heads_is_that_head(count):
    head = torch.randn(DIM, EMBED)
    assert torch.equal(convert.pool_kv_heads(head.repeat(count, 1), count, 1), head)


def test_pooling_to_as_many_heads_is_the_identity():
    weight = torch.randn(HEADS * DIM, EMBED, dtype=torch.bfloat16)
    pooled = convert.pool_kv_heads(weight, HEADS, HEADS)
    assert torch.equal(pooled, weight) and pooled.data_ptr() != weight.data_ptr()


def test_window_fills_regions_with_their_mean():
    weight = torch.randn(8, 6, dtype=torch.float64)
    wanted = nn.functional.avg_pool2d(weight[None], 2)[0].repeat_interleave(2, 0).repeat_interleave(2, 1)
    torch.testing.assert_close(convert.pool_kv_heads(weight, 2, 2, window=2), wanted)
    torch.testing.assert_close(convert.pool_kv_heads(weight, 2, 1, window=2), (wanted[:4] + wanted[4:]) / 2)
    bias = torch.tensor([1.0, 3.0, 5.0, 9.0])
    assert convert.pool_kv_heads(bias, 2, 2, window=2).tolist() == [2.0, 2.0, 7.0, 7.0]
    with pytest.raises(ValueError, match=r"window: got 4, which does not divide the sides \[8, 6\]"):
        convert.pool_kv_heads(weight, 2, 1, window=4)


def test_random_heads_have_the_weights_size_and_the_seeds_draw():
    weight = 0.02 * torch.randn(8 * 64, 128)
    drawn = convert.pool_kv_heads(weight, 8, 4, method="random", seed=5)
    assert torch.equal(drawn, convert.pool_kv_heads(weight, 8, 4, method="random", seed=5))
    assert not torch.equal(drawn, convert.pool_kv_heads(weight, 8, 4, method="random", seed=6))
    assert abs(drawn.std().item() / 0.02 - 1) < 0.05 and abs(drawn.mean().item()) < 1e-3
    torch.manual_seed(3)
    first = convert.pool_kv_heads(weight, 8, 4, method="random")
    again = convert.pool_kv_heads(weight, 8, 4, method="random")
    torch.manual_seed(3)
    assert torch.equal(first, convert.pool_kv_heads(weight, 8, 4, method="random")) and not torch.equal(first, again)
