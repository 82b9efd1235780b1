"""QuantizedCache(8) under MultiHeadLatentAttention: c in 8 bits, the rotated part exact; against a LatentCache whose c
was rounded in the same way."""

import attnpack
import pytest
import torch
from attnpack import reference
from attnpack.ops import dequantize_rows, quantize_rows
from torch.testing import assert_close

EMBED, HEADS, RANK, NOPE, ROPE, V_DIM = 48, 4, 40, 16, 8, 12
CHUNKS = [9, 1, 1, 6, 1]


def layer(path="auto", dtype=torch.float32, **settings):
    torch.manual_seed(0)
    rope = attnpack.RotaryEmbedding(ROPE, interleaved=True)
    return attnpack.MultiHeadLatentAttention(
        EMBED, HEADS, kv_lora_rank=RANK, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=V_DIM, rope=rope,
        path=path, causal=True, **settings,
    ).to(dtype)  # fmt: skip


def rounded(c):
    return dequantize_rows(quantize_rows(c, 8), 8, c.size(-1), c.dtype)


def as_stored(cache):
    """The LatentCache that holds what a QuantizedCache makes of this one."""
    return attnpack.LatentCache.from_latents(rounded(cache.c.contiguous()), cache.k_rope.contiguous(), cache.lengths)


def steps(module, x, cache, **settings):
    outs = []
    for part in x.split(CHUNKS, 1):
        outs.append(module(part, cache=cache, **settings))
    return torch.cat(outs, 1)


def expected(module, x):
    """Each call over latents that are rounded as they are stored, its own ones too."""
    whole, outs, at = attnpack.LatentCache(), [], 0
    with torch.no_grad():
        module(x, cache=whole)
        for part in x.split(CHUNKS, 1):
            length = part.size(1)
            held = as_stored(whole)
            held.crop(at + length)
            # The new positions are in the cache already: attend over it without an append.
            outs.append(over(module, part, held, at))
            at += length
    return torch.cat(outs, 1)


def over(module, x, held, at):
    """Attention of x at positions at.. over latents that are held, by the expanded formula in fp64."""
    q = module.q_proj(x).unflatten(-1, (HEADS, NOPE + ROPE)).transpose(1, 2)
    positions = torch.arange(at, at + x.size(1))
    rotated = module.rope(q[..., NOPE:], positions)
    kv_b = module.kv_b_proj.weight.unflatten(0, (HEADS, NOPE + V_DIM)).double()
    out = reference.latent_attention(
        torch.cat([q[..., :NOPE], rotated], -1).double(), held.c[:, 0].double(), held.k_rope[:, 0].double(),
        kv_b[:, :NOPE], kv_b[:, NOPE:], causal=True, q_offset=at,
    )  # fmt: skip
    return module.o_proj(out.transpose(1, 2).flatten(2).to(x.dtype))


@torch.no_grad()
def test_latents_without_a_rotated_part():
    torch.manual_seed(0)
    sizes = {"kv_lora_rank": 7, "qk_nope_head_dim": 8, "qk_rope_head_dim": 0, "v_head_dim": 8}
    module, x = attnpack.MultiHeadLatentAttention(32, 4, **sizes, causal=True), torch.randn(2, 6, 32)
    cache, held = attnpack.QuantizedCache(8), attnpack.LatentCache()
    module(x[:, :5], cache=cache), module(x[:, :5], cache=held)
    stored = attnpack.LatentCache.from_latents(rounded(held.c.contiguous()), held.k_rope.contiguous(), held.lengths)
    assert cache.nbytes == 2 * 5 * (7 + 2)  # a byte per number, and one scale
    got = module(x[:, 5:], cache=cache)
    assert_close(got, module(x[:, 5:], cache=stored), atol=0.01, rtol=0.01)  # which has the last latent unrounded


@pytest.mark.parametrize("path", ["auto", "expanded", "absorbed"])
def test_attention_reads_the_rounded_latents(path):
    module, x = layer(path), torch.randn(2, sum(CHUNKS), EMBED)
    with torch.no_grad():
        got = steps(module, x, attnpack.QuantizedCache(8))
    assert_close(got, expected(module, x), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_rotated_part_is_stored_exactly(dtype):
    module, x = layer(dtype=dtype), torch.randn(2, 21, EMBED).to(dtype)
    exact, cache = attnpack.LatentCache(), attnpack.QuantizedCache(8)
    with torch.no_grad():
        module(x, cache=exact)
        module(x, cache=cache)
    assert torch.equal(cache.k[..., RANK:], exact.k_rope)
    assert torch.equal(cache.k[..., :RANK], rounded(exact.c.contiguous()))
    assert torch.equal(cache.v, cache.k[..., :RANK])
    blocks = -(-RANK // 32)
    assert cache.nbytes == 2 * 21 * (RANK + 2 * blocks + ROPE * dtype.itemsize)


@pytest.mark.parametrize("change", ["crop", "reorder", "clone", "lengths"])
def test_changes_are_those_of_the_rounded_cache(change):
    module, x = layer(), torch.randn(2, 13, EMBED)
    lengths = torch.tensor([13, 7]) if change == "lengths" else None
    exact, cache = attnpack.LatentCache(), attnpack.QuantizedCache(8)
    with torch.no_grad():
        for held in (exact, cache):
            module(x, cache=held, kv_lens=lengths)
        if change == "crop":
            exact.crop(5), cache.crop(5)
        elif change == "reorder":
            exact.reorder(torch.tensor([1, 0])), cache.reorder(torch.tensor([1, 0]))
        elif change == "clone":
            copy = cache.clone()
            module(x, cache=cache)
            cache = copy
        assert len(cache) == len(exact) and torch.equal(cache.lengths, exact.lengths)
        held = as_stored(exact)
        new = torch.randn(2, 1, EMBED)
        # One new latent is rounded in one and exact in the other: its share of the output is small, its error too.
        assert_close(module(new, cache=cache), module(new, cache=held), atol=3e-3, rtol=3e-3)
        for b, n in enumerate(exact.lengths.tolist()):
            assert torch.equal(cache.k[b, :, :n], held.k[b, :, :n])


def test_weights_masks_and_gradients():
    module, x = layer(), torch.randn(2, 6, EMBED, requires_grad=True)
    cache, exact = attnpack.QuantizedCache(8), attnpack.LatentCache()
    out, weights = module(x, cache=cache, need_weights=True)
    want, want_weights = module(x, cache=exact, need_weights=True)
    assert_close(weights, want_weights, atol=5e-3, rtol=0)
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    (want_grad,) = torch.autograd.grad(want.square().sum(), x)
    assert_close(grad, want_grad, atol=0.02 * want_grad.abs().max().item(), rtol=0)
    mask = torch.rand(1, 1, 2, 8) < 0.6
    mask[..., 0] = True
    new = torch.randn(2, 2, EMBED)
    with torch.no_grad():
        assert_close(module(new, cache=cache, mask=mask), module(new, cache=exact, mask=mask), atol=0.01, rtol=0.01)


@pytest.mark.parametrize("folded", [False, True])
def test_the_cpp_module_gives_the_same_bits(folded):
    module, x = layer(), torch.randn(2, sum(CHUNKS), EMBED)
    module = module.fold() if folded else module
    with torch.no_grad():
        python = steps(module, x, attnpack.QuantizedCache(8))
        native = steps(module.cpp(), x, attnpack.cpp.QuantizedCache(8))
    assert torch.equal(python, native)


@pytest.mark.long
def test_a_compiled_layer_gives_the_same():
    module, x = layer(), torch.randn(2, sum(CHUNKS), EMBED)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        assert_close(
            steps(compiled, x, attnpack.QuantizedCache(8)), steps(module, x, attnpack.QuantizedCache(8)),
            atol=1e-5, rtol=1e-5,
        )  # fmt: skip


@pytest.mark.parametrize("settings", [{"bits": 4}, {"bits": 8, "exact_first": 1}, {"bits": 8, "exact_last": 3}])
def test_other_settings_are_refused(settings):
    cache = attnpack.QuantizedCache(**settings)
    with pytest.raises(ValueError, match="want bits = 8 without exact positions, or a LatentCache"):
        layer()(torch.randn(1, 2, EMBED), cache=cache)
    assert len(cache) == 0


def test_a_failed_call_changes_nothing():
    module, x = layer(), torch.randn(2, 4, EMBED)
    cache = attnpack.QuantizedCache(8)
    with torch.no_grad():
        module(x, cache=cache)
        before = cache.k.clone()
        for broken in ({"mask": torch.ones(2, 1, 3, 99, dtype=torch.bool)}, {"kv_lens": torch.tensor([1, 5])}):
            with pytest.raises(ValueError):
                module(x, cache=cache, **broken)
            assert len(cache) == 4 and torch.equal(cache.k, before)
        with pytest.raises(ValueError, match="keys and values of kv_lora_rank 0"):
            attnpack.SelfAttention(EMBED)(x, cache=cache)
        with pytest.raises(ValueError, match="latents of kv_lora_rank"):
            held = attnpack.QuantizedCache(8)
            attnpack.SelfAttention(EMBED)(x, cache=held)
            module(x, cache=held)
    assert torch.equal(cache.k, before)
