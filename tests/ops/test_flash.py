"""attnpack.flash against fp64 formulas written from flash-attn 2's documented meaning, argument by argument."""

import inspect

import pytest
import torch
from attnpack import flash
from op_cases import draw
from pages import make_table, put_into_pages
from torch.testing import assert_close

INF = float("inf")
SCORES = "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
SCORES += "deterministic=False, return_attn_probs=False"
ENDS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {SCORES}",
    "flash_attn_qkvpacked_func": f"qkv, {SCORES}",
    "flash_attn_kvpacked_func": f"q, kv, {SCORES}",
    "flash_attn_varlen_func": f"q, k, v, {ENDS}, {SCORES}, block_table=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {SCORES}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {ENDS}, {SCORES}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_flash_attn(name):
    found = inspect.signature(getattr(flash, name))
    plain = [each.replace(annotation=each.empty) for each in found.parameters.values()]
    assert str(found.replace(parameters=plain, return_annotation=found.empty)) == f"({SIGNATURES[name]})"
    assert name in flash.__all__ and len(flash.__all__) == len(SIGNATURES)


def truth(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None):
    """out [Lq, H, Dv] and lse [H, Lq] of one sequence, in fp64."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.size(1) // k.size(1)
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scale = q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(q.size(0))[:, None] + k.size(0) - q.size(0)
    column = torch.arange(k.size(0))
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * (place - column).abs()
    left, right = window_size
    allowed = torch.ones(q.size(0), k.size(0), dtype=torch.bool)
    if causal:
        allowed &= column <= place
    if left >= 0:
        allowed &= column >= place - left
    if right >= 0:
        allowed &= column <= place + right
    scores = scores.masked_fill(~allowed, -INF)
    probs = scores.softmax(-1).nan_to_num(0.0) if k.size(0) else scores
    return torch.einsum("hij,jhd->ihd", probs, v), scores.logsumexp(-1)


ARGUMENTS = {
    "nothing": {},
    "scale": {"softmax_scale": 0.2},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "left window": {"window_size": (3, -1), "causal": True},
    "softcap": {"softcap": 0.8},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1, 1.0, 0.0])},
    "alibi of each": {"alibi_slopes": draw(2, 4).abs(), "causal": True},
    "deterministic": {"deterministic": True},
    "all": {"softmax_scale": 0.3, "causal": True, "window_size": (4, 0), "softcap": 2.0, "alibi_slopes": draw(2, 4)},
}


def one(arguments, b):
    """The arguments of sequence b for `truth`."""
    kept = {name: value for name, value in arguments.items() if name != "deterministic"}
    if "alibi_slopes" in kept and kept["alibi_slopes"].dim() == 2:
        kept["alibi_slopes"] = kept["alibi_slopes"][b]
    return kept


def close(got, expected, dtype=torch.float64):
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    assert got.shape == expected.shape
    assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [(3, 7), (7, 3), (130, 130)], ids=str)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_dense(name, lengths, dtype):
    arguments = ARGUMENTS[name]
    q, k, v = (
        draw(2, lengths[0], 4, 16, dtype=dtype),
        *(draw(2, lengths[1], 2, 16, dtype=dtype, seed=s) for s in (1, 2)),
    )
    out, lse, mask = flash.flash_attn_func(q, k, v, return_attn_probs=True, **arguments)
    assert torch.equal(out, flash.flash_attn_func(q, k, v, **arguments)) and mask.numel() == 0
    assert torch.equal(out, flash.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **arguments))
    for b in range(2):
        expected, expected_lse = truth(q[b], k[b], v[b], **one(arguments, b))
        close(out[b], expected, dtype)
        close(lse[b], expected_lse, dtype if dtype != torch.float64 else dtype)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_gradients(name):
    arguments = ARGUMENTS[name]
    q, k, v = (x.requires_grad_() for x in (draw(2, 5, 4, 8, dtype=torch.float64),
               *(draw(2, 7, 2, 8, dtype=torch.float64, seed=s) for s in (1, 2))))  # fmt: skip
    grad = draw(2, 5, 4, 8, dtype=torch.float64, seed=3)
    expected = torch.stack([truth(q[b], k[b], v[b], **one(arguments, b))[0] for b in range(2)])
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    for got, want in zip(torch.autograd.grad(flash.flash_attn_func(q, k, v, **arguments), (q, k, v), grad), wanted,
                         strict=True):  # fmt: skip
        assert_close(got, want)
    ends = torch.tensor([0, 5, 10], dtype=torch.int32), torch.tensor([0, 7, 14], dtype=torch.int32)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    out = flash.flash_attn_varlen_func(*packed, *ends, 5, 7, **arguments)
    for got, want in zip(torch.autograd.grad(out, (q, k, v), grad.flatten(0, 1)), wanted, strict=True):
        assert_close(got, want)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_packed(name):
    arguments = ARGUMENTS[name]
    q, k, v = (draw(*shape, dtype=torch.float64) for shape in ((12, 4, 8), (11, 2, 8), (11, 2, 8)))
    ends = torch.tensor([0, 5, 12], dtype=torch.int32), torch.tensor([0, 8, 11], dtype=torch.int32)
    out, lse, _ = flash.flash_attn_varlen_func(q, k, v, *ends, 7, 8, return_attn_probs=True, **arguments)
    packed = flash.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), *ends, 7, 8, **arguments)
    assert torch.equal(out, packed)
    for b, (a, z, c, d) in enumerate([(0, 5, 0, 8), (5, 12, 8, 11)]):
        expected, expected_lse = truth(q[a:z], k[c:d], v[c:d], **one(arguments, b))
        close(out[a:z], expected)
        close(lse[:, a:z], expected_lse)


def test_all_three_packed():
    qkv = draw(2, 6, 3, 4, 8).requires_grad_()
    out = flash.flash_attn_qkvpacked_func(qkv, causal=True)
    assert torch.equal(out, flash.flash_attn_func(*qkv.unbind(2), causal=True))
    ends = torch.tensor([0, 6, 12], dtype=torch.int32)
    packed = flash.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), ends, 6, causal=True)
    assert torch.equal(packed, out.flatten(0, 1))
    grads = [torch.autograd.grad(x.square().sum(), qkv)[0] for x in (out, packed)]
    assert torch.equal(*grads)


def test_dropout():
    q, v = torch.zeros(1, 64, 1, 8), torch.eye(64).view(1, 64, 1, 64)
    out = flash.flash_attn_func(q, q, v, dropout_p=0.25)
    assert 0.7 < (out > 0).float().mean() < 0.8
    assert_close(out.max(), torch.tensor(1 / 64 / 0.75))
    packed = flash.flash_attn_varlen_func(q[0], q[0], v[0], *[torch.tensor([0, 64]).int()] * 2, 64, 64, 0.25)
    assert 0.7 < (packed > 0).float().mean() < 0.8
    with pytest.raises(ValueError, match="return_attn_probs is True with dropout_p 0.25, wants dropout_p 0.0"):
        flash.flash_attn_func(q, q, v, 0.25, return_attn_probs=True)


def rotated(x, places, cos, sin, interleaved):
    """x [L, H, D] with its first dims rotated."""
    half = cos.size(1)
    c, s = cos[places].double()[:, None], sin[places].double()[:, None]
    first, rest = x[..., : 2 * half].double(), x[..., 2 * half :].double()
    a, b = (first[..., ::2], first[..., 1::2]) if interleaved else (first[..., :half], first[..., half:])
    turned = [a * c - b * s, a * s + b * c]
    joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([joined, rest], -1)


def tables(positions=40, half=4):
    angle = torch.arange(positions)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01])[:half]
    return angle.cos().double(), angle.sin().double()


CACHED = {
    "nothing": {},
    "int length": {"cache_seqlens": 5},
    "lengths": {"cache_seqlens": torch.tensor([5, 0]).int()},
    "new": {"cache_seqlens": torch.tensor([5, 0]).int(), "new": 3},
    "causal": {"cache_seqlens": torch.tensor([5, 2]).int(), "new": 3, "causal": True},
    "window": {"cache_seqlens": torch.tensor([5, 9]).int(), "new": 3, "window_size": (3, 1)},
    "rows": {"cache_seqlens": torch.tensor([5, 2]).int(), "new": 3, "cache_batch_idx": torch.tensor([2, 0]).int()},
    "padding": {"cache_seqlens": torch.tensor([5, 4]).int(), "new": 3, "causal": True,
                "cache_leftpad": torch.tensor([2, 0]).int(), "window_size": (4, 0)},
    "rope": {"cache_seqlens": torch.tensor([5, 4]).int(), "new": 3, "rope": True},
    "rope causal": {"cache_seqlens": torch.tensor([5, 4]).int(), "new": 3, "rope": True, "causal": True},
    "rope halves": {"cache_seqlens": 4, "new": 3, "rope": True, "causal": True, "rotary_interleaved": False},
    "rope padding": {"cache_seqlens": torch.tensor([5, 4]).int(), "new": 3, "rope": True, "window_size": (9, 0),
                     "cache_leftpad": torch.tensor([1, 3]).int()},
    "scores": {"cache_seqlens": 6, "softcap": 0.9, "softmax_scale": 0.4, "alibi_slopes": draw(4).abs()},
    "slopes of each": {"cache_seqlens": torch.tensor([5, 2]).int(), "new": 3, "alibi_slopes": draw(2, 4).abs()},
    "slopes of rows": {"cache_seqlens": 5, "new": 1, "alibi_slopes": draw(2, 4).abs(), "num_splits": 3,
                       "cache_batch_idx": torch.tensor([1, 2]).int()},
}  # fmt: skip


@pytest.mark.parametrize("name", CACHED)
def test_cache(name):
    arguments = dict(CACHED[name])
    new, rope = arguments.pop("new", 0), arguments.pop("rope", False)
    rows = arguments.get("cache_batch_idx", torch.arange(2)).tolist()
    q = draw(2, 3, 4, 16, dtype=torch.float64)
    caches = [draw(3 if "cache_batch_idx" in arguments else 2, 12, 2, 16, dtype=torch.float64, seed=s) for s in (1, 2)]
    fresh = [draw(2, new, 2, 16, dtype=torch.float64, seed=s) for s in (3, 4)] if new else [None, None]
    given = [x.clone() for x in caches]
    turn = dict(zip(("rotary_cos", "rotary_sin"), tables(), strict=True)) if rope else {}
    out, lse = flash.flash_attn_with_kvcache(q, *given, *fresh, return_softmax_lse=True, **turn, **arguments)
    before = arguments.get("cache_seqlens", 12)
    interleaved = arguments.get("rotary_interleaved", True)
    scores = {n: arguments[n] for n in ("causal", "window_size", "softcap", "softmax_scale", "alibi_slopes")
              if n in arguments}  # fmt: skip
    for b, row in enumerate(rows):
        start = before if isinstance(before, int) else int(before[b])
        query, keys = q[b], [None if x is None else x[b] for x in fresh]
        if rope:
            moves = torch.arange(3) if "causal" in arguments or "window_size" in arguments else torch.zeros(3).long()
            query = rotated(query, start + moves, *tables(), interleaved)
            keys[0] = rotated(keys[0], start + torch.arange(new), *tables(), interleaved)
        for cache, key in zip(caches, keys, strict=True):
            if new:
                cache[row, start : start + new] = key
        pad = int(arguments["cache_leftpad"][b]) if "cache_leftpad" in arguments else 0
        expected, expected_lse = truth(query, *(x[row, pad : start + new] for x in caches), **one(scores, b))
        close(out[b], expected, torch.float32)
        close(lse[b], expected_lse, torch.float32)
    for got, want in zip(given, caches, strict=True):
        assert_close(got, want, atol=1e-6, rtol=1e-6)
    again = [x.clone() for x in given]
    if not new:
        assert torch.equal(flash.flash_attn_with_kvcache(q, *again, **arguments), out)


@pytest.mark.parametrize("name", [n for n in CACHED if not {"cache_batch_idx", "cache_leftpad"} & set(CACHED[n])])
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_cache_in_pages(page_size, name):
    """The numbers of the cache in one piece, and the pools hold what that cache holds."""
    arguments = dict(CACHED[name])
    new, rope = arguments.pop("new", 0), arguments.pop("rope", False)
    q = draw(2, 3, 4, 16, dtype=torch.float64)
    caches = [draw(2, 12, 2, 16, dtype=torch.float64, seed=s) for s in (1, 2)]
    table = make_table([12, 12], page_size, spare=0)
    pools = [put_into_pages(x.flatten(0, 1), [12, 12], table, page_size) for x in caches]
    if new:
        arguments |= {n: draw(2, new, 2, 16, dtype=torch.float64, seed=s) for n, s in (("k", 3), ("v", 4))}
    arguments |= dict(zip(("rotary_cos", "rotary_sin"), tables(), strict=True)) if rope else {}
    expected = flash.flash_attn_with_kvcache(q, *caches, return_softmax_lse=True, **arguments)
    got = flash.flash_attn_with_kvcache(q, *pools, block_table=table, return_softmax_lse=True, **arguments)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    for pool, cache in zip(pools, caches, strict=True):
        kept = put_into_pages(cache.flatten(0, 1), [12, 12], table, page_size)
        assert torch.equal(pool.nan_to_num(9.0), kept.nan_to_num(9.0))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_packed_rows_over_pages(name):
    arguments = ARGUMENTS[name]
    q, k, v = (draw(*shape, dtype=torch.float64) for shape in ((12, 4, 8), (11, 2, 8), (11, 2, 8)))
    ends = torch.tensor([0, 5, 12], dtype=torch.int32), torch.tensor([0, 8, 11], dtype=torch.int32)
    table = make_table([8, 3], 4)
    pools = [put_into_pages(x, [8, 3], table, 4) for x in (k, v)]
    expected = flash.flash_attn_varlen_func(q, k, v, *ends, 7, 8, return_attn_probs=True, **arguments)
    got = flash.flash_attn_varlen_func(q, *pools, *ends, 7, 8, return_attn_probs=True, block_table=table, **arguments)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_a_refused_call_writes_nothing_into_pages():
    pools, table = [K.clone(), K.clone()], torch.tensor([[0], [1]]).int()
    new = {"k": K[:, :1], "v": K[:, :1], "cache_seqlens": 1}
    wrong_page = table.clone()
    wrong_page[1, 0] = 2
    same_page = table * 0
    for wrong in ({"softcap": -1.0}, {"window_size": (-5, 0)}, {"alibi_slopes": torch.ones(4).requires_grad_()},
                  {"block_table": wrong_page}, {"block_table": same_page}, {"cache_seqlens": 5}):  # fmt: skip
        with pytest.raises(ValueError, match="attnpack: "):
            flash.flash_attn_with_kvcache(Q, *pools, **({"block_table": table} | new | wrong))
    assert all(torch.equal(x, K) for x in pools)
    flash.flash_attn_with_kvcache(Q, *pools, block_table=table, **new)
    assert not torch.equal(pools[0], K)


@pytest.fixture
def meta_by_default():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_a_default_device_changes_nothing(meta_by_default):
    """Tensors on the CPU, in a process that makes its models on the device "meta"."""
    cpu = {"device": "cpu"}
    q, pool = torch.randn(2, 1, 4, 8, **cpu), torch.randn(3, 4, 2, 8, **cpu)
    table, lens = torch.tensor([[0], [2]], dtype=torch.int32, **cpu), torch.tensor([3, 2], dtype=torch.int32, **cpu)
    for slopes in (None, torch.rand(4, **cpu), torch.rand(2, 4, **cpu)):
        settings = {"cache_seqlens": lens, "causal": True, "alibi_slopes": slopes}
        pages = flash.flash_attn_with_kvcache(q, pool, pool, block_table=table, **settings)
        cache = pool[table.squeeze(1).long()]
        assert_close(pages, flash.flash_attn_with_kvcache(q, cache, cache, **settings))


def test_a_cache_gives_no_gradients():
    q = draw(1, 1, 2, 8).requires_grad_()
    out = flash.flash_attn_with_kvcache(q, draw(1, 4, 2, 8), draw(1, 4, 2, 8), q, q, cache_seqlens=2)
    assert not out.requires_grad


def test_a_batch_without_sequences():
    cache = draw(2, 4, 2, 8)
    out, lse = flash.flash_attn_with_kvcache(draw(0, 3, 2, 8), cache, cache, return_softmax_lse=True)
    assert out.shape == (0, 3, 2, 8) and lse.shape == (0, 2, 3)
    q = draw(0, 2, 8)
    ends = torch.zeros(1, dtype=torch.int32)
    assert flash.flash_attn_varlen_func(q, q, q, ends, ends, 0, 0, alibi_slopes=draw(0, 2)).shape == (0, 2, 8)


Q, K = draw(2, 3, 4, 8), draw(2, 5, 2, 8)
E = torch.tensor([0, 1, 3], dtype=torch.int32)
BAD = {
    r"q is of shape \[3, 4, 8\], wants \[batch, length, heads": lambda: flash.flash_attn_func(Q[0], K, K),
    r"k is \[1\] \(list\), wants a tensor": lambda: flash.flash_attn_func(Q, [1], K),
    r"kv has shape \[2, 5, 2, 8\], wants \[batch, length, 2": lambda: flash.flash_attn_kvpacked_func(Q, K),
    r"qkv has shape \[2, 5, 2, 8\], wants \[tokens, 3": lambda: flash.flash_attn_varlen_qkvpacked_func(K, E, 3),
    r"alibi_slopes has shape \[3\], wants \[heads\] = \[4\] or": (
        lambda: flash.flash_attn_func(Q, K, K, alibi_slopes=torch.ones(3))
    ),
    "alibi_slopes is 0.5": lambda: flash.flash_attn_func(Q, K, K, alibi_slopes=0.5),
    "softcap is -1": lambda: flash.flash_attn_func(Q, K, K, softcap=-1.0),
    "window_size is 3 .*wants a tuple of two ints": lambda: flash.flash_attn_func(Q, K, K, window_size=3),
    "window_size is None": lambda: flash.flash_attn_with_kvcache(Q, K, K, window_size=None),
    "dropout_p is None": lambda: flash.flash_attn_func(Q, K, K, dropout_p=None, return_attn_probs=True),
    r"window_size is \(-3, 0\), wants numbers >= 0": lambda: flash.flash_attn_func(Q, K, K, window_size=(-3, 0)),
    "softmax_scale is nan": lambda: flash.flash_attn_func(Q, K, K, softmax_scale=float("nan")),
    "softmax_scale is 'x'": lambda: flash.flash_attn_varlen_func(Q[0], Q[0], Q[0], E, E, 2, 2, softmax_scale="x"),
    "q has dtype torch.int64, wants one of": lambda: flash.flash_attn_func(Q.long(), K.long(), K.long()),
    "k is torch.float64 on cpu, q torch.float32 on cpu": lambda: flash.flash_attn_func(Q, K.double(), K),
    "v_cache is torch.bfloat16 on cpu": lambda: flash.flash_attn_with_kvcache(Q, K, K.bfloat16()),
    "k has batch 1, q 2": lambda: flash.flash_attn_func(Q, K[:1], K[:1]),
    "k_cache has head_dim 4, q 8": lambda: flash.flash_attn_with_kvcache(Q, K[..., :4], K),
    r"v has shape \[2, 4, 2, 8\], k \[2, 5, 2, 8\]": lambda: flash.flash_attn_func(Q, K, K[:, :4]),
    "q has 4 heads, k 3, wants a multiple": (
        lambda: flash.flash_attn_varlen_func(Q[0], Q[0, :, :3], Q[0, :, :3], E, E, 2, 2)
    ),
    r"k is of shape \[5, 2, 8\], wants \[batch": (
        lambda: flash.flash_attn_varlen_func(Q[0], K[0], K[0], E, E, 2, 2, block_table=torch.zeros(2, 1).int())
    ),
    r"block_table is \[0\] \(list\), wants an int32": lambda: flash.flash_attn_with_kvcache(Q, K, K, block_table=[0]),
    r"block_table has shape \[2\], wants \[batch, pages\]": (
        lambda: flash.flash_attn_with_kvcache(Q, K, K, block_table=torch.zeros(2).int())
    ),
    r"block_table\[1, 0\] is 7, wants a page from 0 to 1": (
        lambda: flash.flash_attn_with_kvcache(Q, K, K, block_table=torch.tensor([[0], [7]]).int())
    ),
    r"cache_seqlens\[0\] is 11, wants 0 to 10: the cache has 10 positions": (
        lambda: flash.flash_attn_with_kvcache(Q, K, K, cache_seqlens=11, block_table=torch.zeros(2, 2).int())
    ),
    "cache_batch_idx is given with block_table": (
        lambda: flash.flash_attn_with_kvcache(Q, K, K, cache_batch_idx=E[:2], block_table=torch.zeros(2, 1).int())
    ),
    "cache_leftpad is given with block_table": (
        lambda: flash.flash_attn_with_kvcache(Q, K, K, cache_leftpad=E[:2], block_table=torch.zeros(2, 1).int())
    ),
    "cu_seqlens_k ends at 3, wants 5": lambda: flash.flash_attn_varlen_func(Q[0], K[0], K[0], E, E, 2, 2),
    r"cu_seqlens_k is \[0, 1, 3\], wants numbers from 0 to 5": (
        lambda: flash.flash_attn_varlen_func(Q[0], K[0], K[0], E, E, 2, 2, alibi_slopes=torch.ones(2, 4))
    ),
    "max_seqlen_q is 'x'": lambda: flash.flash_attn_varlen_func(Q[0], Q[0], Q[0], E, E, "x", 2),
    "cu_seqlens_q is None": lambda: flash.flash_attn_varlen_func(Q[0], Q[0], Q[0], None, E, 2, 2),
    "v is None, wants a tensor": lambda: flash.flash_attn_with_kvcache(Q, K, K, K[:, :1], cache_seqlens=1),
    "cache_seqlens is None, wants an int": lambda: flash.flash_attn_with_kvcache(Q, K, K, K[:, :1], K[:, :1]),
    r"cache_seqlens\[0\] is 5, wants 0 to 4": (
        lambda: flash.flash_attn_with_kvcache(Q, K, K, K[:, :1], K[:, :1], cache_seqlens=5)
    ),
    r"cache_seqlens has shape \[3\]": lambda: flash.flash_attn_with_kvcache(Q, K, K, cache_seqlens=E),
    r"cache_batch_idx\[1\] is 2, wants 0 to 1": (
        lambda: flash.flash_attn_with_kvcache(Q, K, K, cache_batch_idx=torch.tensor([0, 2]))
    ),
    r"cache_leftpad\[0\] is 3, wants 0 to cache_seqlens\[0\] = 2": (
        lambda: flash.flash_attn_with_kvcache(Q, K, K, cache_seqlens=2, cache_leftpad=torch.tensor([3, 0]))
    ),
    r"k has shape \[2, 1, 2, 4\]": (
        lambda: flash.flash_attn_with_kvcache(Q, K, K, K[:, :1, :, :4], K[:, :1], cache_seqlens=1)
    ),
    "rotary_cos is given without k and v": (
        lambda: flash.flash_attn_with_kvcache(Q, K, K, rotary_cos=tables()[0], rotary_sin=tables()[1])
    ),
    "rotary_sin is None": (
        lambda: flash.flash_attn_with_kvcache(Q, K, K, K[:, :1], K[:, :1], tables()[0], cache_seqlens=1)
    ),
    "rotary_cos has 2 positions, wants 4": (
        lambda: flash.flash_attn_with_kvcache(Q, K, K, K[:, :1], K[:, :1], *tables(2), 3)
    ),
    "num_splits is -1": lambda: flash.flash_attn_with_kvcache(Q, K, K, num_splits=-1),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_what_is_wrong_is_named(message):
    with pytest.raises((ValueError, TypeError), match=message):
        BAD[message]()


def test_a_refused_call_writes_nothing():
    cache = K.clone()
    for wrong in ({"softcap": -1.0}, {"window_size": (-5, 0)}, {"alibi_slopes": torch.ones(4).requires_grad_()}):
        with pytest.raises(ValueError, match="attnpack: "):
            flash.flash_attn_with_kvcache(Q, cache, cache, K[:, :1], K[:, :1], cache_seqlens=1, **wrong)
    assert torch.equal(cache, K)
