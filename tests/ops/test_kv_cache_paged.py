"""The op kv_cache_append_paged_: the rows that it writes in pools of pages; a refused append writes nothing."""

import pytest
import torch
from attnpack import attention_varlen
from op_cases import DTYPES, draw, laid_out
from pages import GARBAGE, LAYOUTS, empty_pool
from torch.library import opcheck

append = torch.ops.attnpack.kv_cache_append_paged_


def make(layout="rows", page_size=4, heads=3, dims=(4, 5), dtype=torch.float32, held=(2, 5), pages=9, row=4):
    """Pools of NaN, a shuffled table of which two sequences own four pages each, and the lengths."""
    pools = [empty_pool(layout, pages, page_size, heads, d, dtype) for d in dims]
    owned = torch.randperm(pages, generator=torch.Generator().manual_seed(3))[: 2 * row].view(2, row)
    table = torch.cat([owned, torch.tensor(GARBAGE).repeat(2, 1)], 1)[:, :row].int()
    return *pools, table, torch.tensor(held, dtype=torch.int64)


def new(length=3, batch=2, heads=3, dims=(4, 5), dtype=torch.float32):
    return [draw(batch, heads, length, d, dtype=dtype, seed=n) for n, d in enumerate(dims)]


def written(pool, table, x, held, counts):
    """The pool after an append of x [B, H, L, D], row by row."""
    pool = pool.clone()
    for b, (start, count) in enumerate(zip(held, counts, strict=True)):
        for n in range(count):
            page, row = divmod(start + n, pool.size(1))
            pool[int(table[b, page]), row] = x[b, :, n]
    return pool


def assert_same(got, expected):
    assert torch.equal(got.nan_to_num(99.0), expected.nan_to_num(99.0))


@pytest.mark.parametrize("counts", [None, (3, 0), (1, 3), (0, 0)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writes_after_what_each_sequence_holds(dtype, layout, counts):
    for page_size, of_new in ((4, "contiguous"), (1, "heads inside"), (3, "sliced"), (16, "columns outside")):
        row = -(-8 // page_size)
        keys, values, table, lengths = make(layout, page_size, dtype=dtype, pages=2 * row + 1, row=row)
        x = new(dtype=dtype)
        each = counts or (3, 3)
        expected = [written(pool, table, y, (2, 5), each) for pool, y in zip((keys, values), x, strict=True)]
        given = None if counts is None else torch.tensor(counts, dtype=torch.int32)
        append(keys, values, table, lengths, *(laid_out(y, of_new) for y in x), given, None)
        assert_same(keys, expected[0])
        assert_same(values, expected[1])
        assert lengths.tolist() == [2 + each[0], 5 + each[1]]


@pytest.mark.parametrize("counts", [(3, 3), (5, 0), (0, 6), (14, 11)], ids=str)
def test_packed_rows(counts):
    keys, values, table, lengths = make()
    x = new(max(counts))
    expected = [written(pool, table, y, (2, 5), counts) for pool, y in zip((keys, values), x, strict=True)]
    packed = [torch.cat([y[b, :, :n].transpose(0, 1) for b, n in enumerate(counts)]) for y in x]
    ends = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
    append(keys, values, table, lengths, *packed, None, ends)
    assert_same(keys, expected[0])
    assert_same(values, expected[1])
    assert lengths.tolist() == [2 + counts[0], 5 + counts[1]]


def test_only_the_entries_that_are_written_are_read():
    keys, values, table, lengths = make(held=(2, 5))
    table[0, 2:] = -1
    table[1, 0] = 2**31 - 1
    table[1, 2:] = -(2**31)
    append(keys, values, table, lengths, *new(3), None, None)
    assert lengths.tolist() == [5, 8]


def test_what_was_written_is_attended():
    keys, values, table, lengths = make(page_size=16, dims=(8, 8), held=(0, 0), pages=17, row=8)
    x = [new(n, dims=(8, 8)) for n in (40, 1, 1)]
    for key, value in x:
        append(keys, values, table, lengths, key, value, None, None)
    q = draw(2, 6, 8)
    ends = torch.tensor([0, 1, 2])
    got = attention_varlen(q, keys, values, ends, block_table=table, kv_lens=lengths)
    packed = [torch.cat([y[n] for y in x], 2).transpose(1, 2).flatten(0, 1) for n in range(2)]
    assert torch.equal(got, attention_varlen(q, *packed, ends, torch.tensor([0, 42, 84])))


def test_keys_and_values_side_by_side_in_one_tensor():
    """Layouts where a page holds both, and where half of the tensor holds each."""
    for both in (torch.full((9, 2, 4, 3, 4), 0.0), torch.full((9, 4, 3, 8), 0.0)):
        keys, values = both.unbind(1) if both.dim() == 5 else both.chunk(2, -1)
        _, _, table, lengths = make()
        x = new(dims=(4, 4))
        expected = [written(pool, table, y, (2, 5), (3, 3)) for pool, y in zip((keys, values), x, strict=True)]
        append(keys, values, table, lengths, *x, None, None)
        assert_same(keys, expected[0])
        assert_same(values, expected[1])


def test_stores_without_history_and_counts_as_a_write():
    cache = make()
    key, value = new()
    versions = [x._version for x in cache]
    append(*cache, key.requires_grad_(), value, None, None)
    assert not cache[0].requires_grad
    assert [x._version - v for x, v in zip(cache, versions, strict=True)] == [1, 1, 0, 1]
    with torch.inference_mode():
        append(*make(), *new(), None, None)


def shared_page(cache):
    cache[2][1, 1] = cache[2][0, 0]
    cache[3][:] = torch.tensor([2, 4])


def own_page_twice(cache):
    cache[2][0, 1] = cache[2][0, 0]
    cache[3][:] = torch.tensor([0, 4])


REFUSED = {
    "full": ({"x": new(12)}, r"block_table is full: sequence 1 holds 5 of 16 positions and 12 are to be appended"),
    "negative page": ({"table": ((1, 1), -1)}, r"block_table\[1, 1\] is -1, wants a page from 0 to 8: position 5 is"),
    "page beyond": ({"table": ((0, 1), 9)}, r"block_table\[0, 1\] is 9, wants a page from 0 to 8: position 4 is to be"),
    "two sequences in one row": ({"do": shared_page}, r"block_table gives row 2 of page \d+ to the new rows of seq"),
    "one page twice": ({"do": own_page_twice, "x": new(5)}, r"block_table gives row 0 of page \d+ to .* 0 and 0: seq"),
    "lengths below 0": ({"held": (-1, 5)}, r"lengths\[0\] is -1, wants 0 to 16, the positions"),
    "lengths beyond": ({"held": (2, 17)}, r"lengths\[1\] is 17, wants 0 to 16"),
    "too many new": ({"counts": [0, 4]}, r"new_lens\[1\] is 4, wants 0 to the number of new tokens, 3"),
    "negative new": ({"counts": [-1, 0]}, r"new_lens\[0\] is -1, wants 0 to"),
    "counts of another batch": ({"counts": [1]}, r"new_lens has shape \[1\] .*wants int32 or int64 \[batch\] = \[2\]"),
    "float counts": ({"counts": [1.0, 2.0]}, "new_lens has shape .* dtype Float"),
    "other batch": ({"x": new(batch=1)}, "key has batch 1, block_table 2 rows"),
    "other heads": ({"x": new(heads=1)}, "key has shape .* its pool .*: heads and head_dim must agree"),
    "other head_dim": ({"x": new(dims=(4, 4))}, "value has shape .* its pool .*: heads and head_dim must agree"),
    "other dtype": ({"x": new(dtype=torch.bfloat16)}, "key has dtype BFloat16, its pool Float"),
    "other lengths": ({"x": [new(3)[0], new(2)[1]]}, "key has shape .*, value .*: their rows must agree"),
    "packed without ends": ({"x": [y[0] for y in new()]}, r"key has shape \[3, 3, 4\], wants \[batch, .*cu_seqlens"),
    "ends without packed rows": ({"ends": [0, 3, 6]}, r"key has shape .*, wants \[tokens, num_kv_heads, head_dim\]"),
    "ends that fall": ({"x": [y[0].transpose(0, 1) for y in new()], "ends": [0, 4, 3]}, r"cu_seqlens\[2\] is 3 after"),
    "ends beyond": ({"x": [y[0].transpose(0, 1) for y in new()], "ends": [0, 2, 4]}, "cu_seqlens goes from 0 to 4"),
    "ends and counts": ({"x": [y[0] for y in new()], "ends": [0, 1, 3], "counts": [1, 2]}, "new_lens is given with"),
    "long table": ({"pools": lambda c: (c[0], c[1], c[2].long(), c[3])}, r"block_table has .* dtype Long, wants int32"),
    "int lengths": ({"pools": lambda c: (*c[:3], c[3].int())}, r"lengths have .* dtype Int, wants int64 \[batch"),
    "fewer pages": ({"pools": lambda c: (c[0], c[1][1:], *c[2:])}, "key_pool has shape .*: pages and page_size must"),
    "pool of rank 3": ({"pools": lambda c: (c[0][0], *c[1:])}, r"key_pool has shape \[4, 3, 4\], wants \[num_pages"),
    "expanded pool": ({"pools": lambda c: (c[0][:1].expand(9, -1, -1, -1), *c[1:])}, "keys have shape .*wants memory"),
    "one pool for both": ({"pools": lambda c: (c[0], c[0], *c[2:]), "x": new(dims=(4, 4))}, "values share memory with"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_append_writes_nothing(case):
    changes, message = REFUSED[case]
    cache = make(held=changes.get("held", (2, 5)))
    if "table" in changes:
        cache[2][changes["table"][0]] = changes["table"][1]
    if "do" in changes:
        changes["do"](cache)
    cache = changes.get("pools", lambda c: c)(cache)
    before = [x.clone() for x in cache]
    counts, ends = (torch.tensor(changes[n]) if n in changes else None for n in ("counts", "ends"))
    with pytest.raises(ValueError, match=message):
        append(*cache, *changes.get("x", new()), counts, ends)
    for x, expected in zip(cache, before, strict=True):
        assert_same(x, expected)


def test_new_rows_may_not_lie_in_the_pool():
    keys, values, table, lengths = make(dims=(4, 4), heads=3)
    with pytest.raises(ValueError, match="key shares memory with the cache's keys, which are written while it is read"):
        append(keys, values, table, lengths, keys[:2, :3].transpose(1, 2), new(dims=(4, 4))[1], None, None)


def test_sequences_share_pages_that_they_only_read():
    keys, values, table, lengths = make(held=(4, 4))
    table[1, 0] = table[0, 0]
    append(keys, values, table, lengths, *new(3), None, None)
    assert lengths.tolist() == [7, 7] and keys[int(table[0, 0])].isnan().all()


def test_opcheck():
    opcheck(append.default, (*(x.nan_to_num() for x in make()), *new(), torch.tensor([1, 3]), None))
    packed = [y[0].transpose(0, 1) for y in new()]
    opcheck(append.default, (*(x.nan_to_num() for x in make()), *packed, None, torch.tensor([0, 1, 3])))


def test_compiles_to_one_graph():
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(keys, values, table, lengths, key, value):
        torch.ops.attnpack.kv_cache_append_paged_(keys, values, table, lengths, key, value, None, None)
        return lengths + 1

    got, expected = make(), make()
    for length in (1, 3):
        x = new(length)
        assert step(*got, *x).tolist() == [n + length + 1 for n in expected[3].tolist()]
        append(*expected, *x, None, None)
        for a, b in zip(got, expected, strict=True):
            assert_same(a, b)


def test_lazy_minus():
    keys, values, table, lengths = make()
    x = [torch._neg_view(y) for y in new()]
    expected = written(keys, table, x[0].resolve_neg(), (2, 5), (3, 3))
    append(keys, values, table, lengths, *x, None, None)
    assert_same(keys, expected)
    with pytest.raises(ValueError, match="lazy minus or conjugate, wants memory to write to"):
        append(torch._neg_view(keys), values, table, lengths, *new(), None, None)
