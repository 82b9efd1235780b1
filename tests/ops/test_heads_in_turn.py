"""Decode over kv heads that lie side by side, in packed keys and in pages: a unit reads several heads in turn, and the
bits are those of heads in one piece. One thread and four sequences, so that a unit has as many heads as it may."""

import attnpack
import pytest
import torch
from attnpack.tools.threads import threads

NAN, INF = float("nan"), float("inf")
# query heads, kv heads or head_map, queries, head_dim, v_head_dim
CASES = [
    (4, 4, 1, 64, 64),
    (6, 2, 1, 17, 10),
    (24, 8, 1, 128, 80),
    (12, 12, 2, 32, 32),  # more heads than a unit reads in turn
    (14, 2, 1, 64, 64),  # rows that share each load of a key
    (18, 3, 4, 16, 24),  # 24 rows
    (20, 2, 3, 16, 24),  # too many rows to stream
    (5, [0, 0, 3, 3, 3], 1, 33, 40),  # groups of several sizes, and one that is empty
]


@pytest.fixture(autouse=True)
def one_thread():
    with threads(1):
        yield


def draw(case, length, dtype, batch=4):
    heads, groups, rows, head_dim, v_head_dim = case
    settings = {"head_map": groups} if isinstance(groups, list) else {}
    kv_heads = 4 if settings else groups
    torch.manual_seed(0)
    query = torch.randn(batch, heads, rows, head_dim).to(dtype)
    return query, *(torch.randn(batch, kv_heads, length, d).to(dtype) for d in (head_dim, v_head_dim)), settings


def packed(x):
    """The same numbers as [B, tokens, heads, head_dim]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [70, 301, 1500])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_keys(case, length, dtype):
    query, key, value, settings = draw(case, length, dtype)
    settings |= {"causal": True, "q_offset": length - query.size(2), "window": (length - 9, -1)}
    for more in ({}, {"softcap": 2.0, "kv_lens": torch.tensor([length, 3, 0, length - 65])}):
        wanted = attnpack.attention(query, key, value, return_lse=True, **settings, **more)
        got = attnpack.attention(query, packed(key), packed(value), return_lse=True, **settings, **more)
        assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_excluded_keys_are_not_read(case, dtype):
    query, key, value, settings = draw(case, 300, dtype)
    mask = torch.rand(4, 1, 1, 300, generator=torch.Generator().manual_seed(1)) < 0.7
    wanted = attnpack.attention(query, key, value, mask, **settings)
    excluded = ~mask.transpose(2, 3)
    got = attnpack.attention(
        query, packed(key.masked_fill(excluded, NAN)), packed(value.masked_fill(excluded, INF)), mask, **settings
    )
    assert torch.equal(got, wanted)
    key[:, 0, 150] = NAN  # of only one head
    wanted = attnpack.attention(query, key, value, **settings)
    assert wanted.isnan().any() and not wanted.isnan().all()
    torch.testing.assert_close(
        attnpack.attention(query, packed(key), packed(value), **settings), wanted, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [1, 7, 16, 256])
@pytest.mark.parametrize("heads_outside", [False, True], ids=["rows", "heads"])
@pytest.mark.parametrize("case", CASES[:7], ids=str)
def test_pages(case, heads_outside, page_size, dtype):
    query, key, value, _ = draw(case, 301, dtype)
    count = -(-301 // page_size)
    table = torch.randperm(4 * count).view(4, count)
    pools = []
    for x in (key, value):
        pages = torch.nn.functional.pad(x, (0, 0, 0, count * page_size - 301), value=NAN)
        pages = pages.unflatten(2, (count, page_size)).transpose(1, 2)  # [B, count, heads, page_size, D]
        pages = pages.flatten(0, 1)
        # [pages, page_size, heads, D], with the rows of a head one after the other, or the heads of a row
        by_head, by_row = torch.empty(pages.shape, dtype=dtype), torch.empty(pages.transpose(1, 2).shape, dtype=dtype)
        pool = by_head.transpose(1, 2) if heads_outside else by_row
        pool[table.flatten()] = pages.transpose(1, 2)
        pools.append(pool)
    rows = query.size(2)
    got = attnpack.attention_varlen(
        query.transpose(1, 2).flatten(0, 1), *pools, torch.arange(5) * rows, block_table=table.int(),
        kv_lens=torch.full((4,), 301), causal=True,
    )  # fmt: skip
    wanted = attnpack.attention(query, key, value, causal=True, q_offset=301 - rows)
    assert torch.equal(got, wanted.transpose(1, 2).flatten(0, 1))
