"""Keys in pages: the bits of the call on packed keys, whatever the pages' size, order and layout."""

from itertools import accumulate

import attnpack
import pytest
import torch
from attnpack import attention_varlen, reference
from attnpack.tools.threads import threads
from marks import grid
from op_cases import DTYPES, HEADS, draw
from pages import GARBAGE, LAYOUTS, make_table, pages_of, put_into_pages
from torch.testing import assert_close

PAGE_SIZES = [1, 7, 16, 32, 64, 256]
# Query and key lengths: decode over several ranges of keys, chunks of a prefill, tiles, a few keys, none at all.
LENGTHS = {
    "decode": [(1, 1500), (1, 3), (1, 600), (1, 0), (1, 64)],
    "few rows": [(3, 700), (5, 530), (7, 600), (9, 70), (12, 300)],
    "chunks": [(130, 700), (3, 1030), (97, 97), (5, 3)],
    "short": [(1, 1), (5, 5), (0, 0), (17, 17), (0, 9)],
}
SETTINGS = {
    "plain": {},
    "causal": {"causal": True},
    "sliding": {"causal": True, "window": (40, 0)},
    "chunk": {"causal": True, "chunk": 30},
    "scores": {"softcap": 0.7, "sinks": True, "alibi": True, "causal": True, "scale": 0.4},
}
DIMS = [(64, 64), (16, 12), (65, 17), (128, 128), (7, 33)]


def ends(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def make(lengths, page_size=16, heads="gqa", dtype=torch.float32, settings=None, dims=(16, 12), layout="rows",
         order="shuffled"):  # fmt: skip
    """Packed q, k, v with their ends, the same keys in pages, and settings."""
    num_heads, num_kv_heads, head_map = HEADS[heads]
    rows, keys = [q for q, _ in lengths], [k for _, k in lengths]
    q = draw(sum(rows), num_heads, dims[0], dtype=dtype)
    k, v = (draw(sum(keys), num_kv_heads, d, dtype=dtype, seed=n) for n, d in enumerate(dims, 1))
    table = make_table(keys, page_size, order)
    pools = [put_into_pages(x, keys, table, page_size, layout) for x in (k, v)]
    made = dict(settings or {})
    if made.pop("alibi", False):
        made["alibi_slopes"] = draw(num_heads).abs()
    if made.get("sinks"):
        made["sinks"] = draw(num_heads, seed=7)
    if head_map:
        made["head_map"] = head_map
    paged = {"block_table": table, "kv_lens": torch.tensor(keys, dtype=torch.int32)}
    return (q, k, v, ends(rows), ends(keys)), (q, *pools, ends(rows)), paged, made


def assert_same_bits(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and not b.isnan().any()
        assert torch.equal(a, b)


def check_same_bits(*args, **kwargs):
    packed, pooled, paged, made = make(*args, **kwargs)
    expected = attention_varlen(*packed, return_lse=True, **made)
    assert_same_bits(attention_varlen(*pooled, return_lse=True, **paged, **made), expected)


@grid(3, dtype=DTYPES, lengths=LENGTHS, page_size=PAGE_SIZES)
def test_bits_of_packed_keys(dtype, lengths, page_size):
    turn = PAGE_SIZES.index(page_size) + list(LENGTHS).index(lengths) + DTYPES.index(dtype)
    for n, settings in enumerate(SETTINGS.values()):
        heads, dims, layout = (list(x)[(turn + n) % len(x)] for x in (HEADS, DIMS, LAYOUTS))
        check_same_bits(LENGTHS[lengths], page_size, heads, dtype, settings, dims, layout)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 13, 60, 100])
@pytest.mark.parametrize("page_size", [1, 7, 8, 16, 24, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_every_group(dtype, page_size, group):
    """Up to 4 rows of a kv head stream the keys, more are multiplied; pages of few keys are packed before."""
    n = 600
    q, k, v = draw(1, group, 64, dtype=dtype), draw(n, 1, 64, dtype=dtype, seed=1), draw(n, 1, 32, dtype=dtype, seed=2)
    for order, layout in (("shuffled", "heads"), ("in order", "heads outside"), ("in order", "rows")):
        table = make_table([n], page_size, order)
        pools = [put_into_pages(x, [n], table, page_size, layout) for x in (k, v)]
        for length in (n, n - 1, 130):
            lens = torch.tensor([length])
            got = attention_varlen(q, *pools, ends([1]), block_table=table, kv_lens=lens, return_lse=True)
            assert_same_bits(
                got, attention_varlen(q, k[:length], v[:length], ends([1]), ends([length]), return_lse=True)
            )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ["in order", "shuffled"])
def test_layouts_are_views(order, layout):
    for heads in ("gqa", "mqa"):
        check_same_bits(LENGTHS["decode"], 16, heads, settings={"causal": True}, layout=layout, order=order)


def test_values_that_are_the_first_columns_of_the_keys():
    """Latents: one pool serves both."""
    n, page_size = 700, 16
    for dtype in (torch.float32, torch.bfloat16):
        for heads in (4, 9, 40):
            q, k = draw(2, heads, 96, dtype=dtype), draw(n, 1, 96, dtype=dtype, seed=1)
            table = make_table([n], page_size)
            pool = put_into_pages(k, [n], table, page_size)
            got = attention_varlen(q, pool, pool[..., :64], ends([2]), block_table=table, kv_lens=torch.tensor([n]))
            assert_same_bits([got], [attention_varlen(q, k, k[..., :64], ends([2]), ends([n]))])


def test_sequences_share_pages():
    """The first pages of both sequences are the same ones."""
    packed, pooled, paged, _ = make([(1, 100), (2, 90)])
    q, k, v, cu_q, _ = packed
    table = paged["block_table"]
    table[1, :3] = table[0, :3]
    own = [torch.cat([x[:48], x[100 + 48 :]]) for x in (k, v)]
    expected = attention_varlen(
        q, *(torch.cat([x[:100], y]) for x, y in zip((k, v), own, strict=True)), cu_q, ends([100, 90])
    )
    assert_same_bits([attention_varlen(*pooled, **paged)], [expected])


def test_strides_of_the_table_and_the_lengths():
    packed, pooled, paged, _ = make(LENGTHS["chunks"])
    expected = attention_varlen(*pooled, **paged)
    table = paged["block_table"]
    for other in (table.t().contiguous().t(), torch.stack([table, table], -1)[..., 1]):
        got = attention_varlen(*pooled, block_table=other, kv_lens=paged["kv_lens"].long())
        assert_same_bits([got], [expected])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_fp64_reference(dtype):
    packed, pooled, paged, made = make(LENGTHS["chunks"], 7, dtype=dtype, settings=SETTINGS["scores"])
    q, k, v, cu_q, cu_k = packed
    out = attention_varlen(*pooled, **paged, **made)
    for b in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        heads = [x.transpose(0, 1).unsqueeze(0) for x in (q[rows], k[keys], v[keys])]
        offset = int(keys.stop - keys.start - (rows.stop - rows.start))
        truth = reference.attention(*(x.double() for x in heads), q_offset=offset, **made)
        plain = reference.attention(*heads, q_offset=offset, **made)
        floor = 4 * torch.finfo(dtype).eps
        assert (out[rows] - truth[0].transpose(0, 1)).abs().max() <= 2 * (plain - truth).abs().max() + floor


@pytest.mark.parametrize("count", [1, 3])
def test_bits_do_not_depend_on_threads(count):
    _, pooled, paged, made = make(LENGTHS["decode"] + LENGTHS["chunks"], settings=SETTINGS["causal"])
    with threads(count):
        got = attention_varlen(*pooled, **paged, **made)
    with threads(2):
        assert_same_bits([got], [attention_varlen(*pooled, **paged, **made)])


def test_no_sequences_and_no_pages():
    _, pooled, paged, _ = make([])
    out, lse = attention_varlen(*pooled, return_lse=True, **paged)
    assert out.shape == (0, 4, 12) and lse.shape == (4, 0)
    empty = [torch.empty(0, 16, 2, d) for d in (16, 12)]
    none = {"block_table": torch.empty(1, 0).int(), "kv_lens": torch.tensor([0])}
    out, lse = attention_varlen(draw(3, 4, 16), *empty, ends([3]), return_lse=True, **none)
    assert (out == 0).all() and (lse == -float("inf")).all()


BAD = {
    "page below 0": (lambda c: c["block_table"].__setitem__((1, 0), -1),
                     r"block_table\[1, 0\] is -1, wants a page from 0 to 10: kv_lens\[1\] = 3 keys read it"),
    "page beyond": (lambda c: c["block_table"].__setitem__((0, 6), 11), r"block_table\[0, 6\] is 11, wants a page"),
    "more keys than pages": (lambda c: c["kv_lens"].__setitem__(1, 145), r"kv_lens\[1\] is 145, wants 0 to 144"),
    "keys of no memory": (lambda c: c.update(kv_lens=torch.tensor([99, 2**63 - 1])),
                          rf"kv_lens\[1\] is {2**63 - 1}, wants 0 to 144"),
    "keys below 0": (lambda c: c["kv_lens"].__setitem__(1, -1), r"kv_lens\[1\] is -1, wants 0 to 144"),
    "no kv_lens": (lambda c: c.pop("kv_lens"), r"kv_lens is missing with block_table: pass int32 or int64 \[seq"),
    "long table": (lambda c: c.update(block_table=c["block_table"].long()), r"block_table has dtype Long, wants int32"),
    "table of rank 1": (lambda c: c.update(block_table=c["block_table"][0]), r"block_table has shape \[9\], wants"),
    "table of other sequences": (lambda c: c.update(block_table=c["block_table"][:1]), r"block_table has shape \[1"),
    "lengths of other sequences": (lambda c: c.update(kv_lens=torch.tensor([1])), r"kv_lens has shape \[1\], wants"),
    "float lengths": (lambda c: c.update(kv_lens=torch.tensor([1.0, 2.0])), "kv_lens has dtype Float, wants int32 or"),
    "key ends": (lambda c: c.update(cu_seqlens_k=ends([99, 3])), "cu_seqlens_k is given with block_table, wants none"),
    "packed keys": (lambda c: c.update(key=draw(102, 2, 16)), r"key has shape \[102, 2, 16\], wants a pool"),
    "packed values": (lambda c: c.update(value=draw(102, 2, 12)), r"value has shape \[102, 2, 12\], wants a pool"),
    "fewer pages of values": (lambda c: c.update(value=c["value"][1:]), "value has 10 pages, key 11: they must agree"),
    "pages of other sizes": (lambda c: c.update(value=c["value"][:, :8]), "value has length 8, key 16: they"),
    "pages of no rows": (lambda c: c.update(key=c["key"][:, :0]), "key has pages of 0 rows, wants at least 1"),
    "other dtype": (lambda c: c.update(key=c["key"].double()), "key has dtype Double, query Float"),
    "other head_dim": (lambda c: c.update(key=draw(11, 16, 2, 9)), "key has head_dim 9, query 16"),
    "other heads": (lambda c: c.update(query=draw(2, 5, 16)), "query has 5 heads, key 2, and 2 does not divide 5"),
    "meta table": (lambda c: c.update(block_table=c["block_table"].to("meta")), "block_table is on meta, query on"),
    "key wants a gradient": (lambda c: c["key"].requires_grad_(), r"key requires a gradient, which a pool of pages"),
    "value wants a gradient": (lambda c: c["value"].requires_grad_(), r"value requires a gradient.*value.detach\(\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named(case):
    change, message = BAD[case]
    _, pooled, paged, _ = make([(1, 99), (1, 3)])
    call = dict(zip(("query", "key", "value", "cu_seqlens_q"), pooled, strict=True)) | paged
    attention_varlen(**call)
    change(call)
    with pytest.raises(ValueError, match=message) as error:
        attention_varlen(**call)
    assert "\n" not in str(error.value)


def test_kv_lens_go_with_pages():
    packed, _, paged, _ = make([(2, 5)])
    with pytest.raises(ValueError, match="kv_lens is given without block_table"):
        attention_varlen(*packed, kv_lens=paged["kv_lens"])


def test_gradients_of_query_and_sinks():
    packed, pooled, paged, made = make(LENGTHS["chunks"], dtype=torch.float64, settings=SETTINGS["scores"])
    grads = []
    for tensors, more in ((packed, {}), (pooled, paged)):
        q, sinks = (x.clone().requires_grad_() for x in (tensors[0], made["sinks"]))
        attention_varlen(q, *tensors[1:], **more, **(made | {"sinks": sinks})).square().sum().backward()
        grads.append([q.grad, sinks.grad])
    assert_same_bits(grads[1][:1], grads[0][:1])
    assert_close(grads[1][1], grads[0][1])


def test_the_backward_op_takes_no_pages():
    _, pooled, paged, _ = make([(2, 5)])
    out, lse = attention_varlen(*pooled, return_lse=True, **paged)
    with pytest.raises(ValueError, match="block_table is given, and keys in pages have no gradients"):
        torch.ops.attnpack.attention_varlen_backward(out, None, *pooled[:3], out, lse, pooled[3], **paged)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_opcheck(dtype):
    _, pooled, paged, _ = make([(1, 99), (3, 3)], dtype=dtype)
    torch.library.opcheck(torch.ops.attnpack.attention_varlen.default, pooled, paged | {"causal": True})


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_to_one_graph(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *x, **paged: attention_varlen(*x, causal=True, **paged), fullgraph=True, dynamic=dynamic
    )
    for lengths in ([(1, 99), (3, 3)], [(1, 10), (1, 17), (2, 30)]):
        _, pooled, paged, _ = make(lengths)
        assert_same_bits([compiled(*pooled, **paged)], [attention_varlen(*pooled, causal=True, **paged)])
        pooled[0].requires_grad_()
        with pytest.raises(Exception, match="query requires a gradient with block_table while a graph is traced"):
            compiled(*pooled, **paged)
        torch._dynamo.reset()


def test_meta():
    _, pooled, paged, _ = make([(1, 99), (3, 3)])
    out, lse = attention_varlen(*(x.to("meta") for x in pooled[:3]), pooled[3], return_lse=True, **paged)
    assert out.shape == (4, 4, 12) and lse.shape == (4, 4) and lse.dtype == torch.float32


def test_autocast_casts_the_query_alone():
    _, pooled, paged, _ = make([(1, 99), (3, 3)], dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        got = attention_varlen(pooled[0].float(), *pooled[1:], **paged)
        assert_same_bits([got], [attention_varlen(*pooled, **paged)])
        with pytest.raises(ValueError, match="key and value are pools in Float and Float, autocast's dtype is"):
            attention_varlen(pooled[0], *(x.float() for x in pooled[1:3]), pooled[3], **paged)


def test_transforms():
    packed, pooled, paged, _ = make([(1, 20), (3, 9)], dtype=torch.float64)

    def loss(q, k, v):
        return attention_varlen(q, k, v, packed[3], packed[4], causal=True).square().sum()

    def paged_loss(q):
        return attention_varlen(q, *pooled[1:], causal=True, **paged).square().sum()

    q = packed[0]
    assert_close(torch.func.grad(paged_loss)(q), torch.func.grad(loss)(*packed[:3]))
    tangent = draw(*q.shape, dtype=torch.float64, seed=9)
    _, got = torch.func.jvp(paged_loss, (q,), (tangent,))
    _, expected = torch.func.jvp(lambda x: loss(x, *packed[1:3]), (q,), (tangent,))
    assert_close(got, expected)
    samples = torch.stack([q, q.flip(0), 2 * q])
    assert_close(torch.vmap(paged_loss)(samples), torch.stack([paged_loss(x) for x in samples]))
    pools = torch.stack([pooled[1].nan_to_num(), pooled[1].nan_to_num().flip(3)])
    values = pooled[2].nan_to_num()
    over_pools = torch.vmap(lambda k: attention_varlen(q, k, values, pooled[3], **paged))(pools)
    assert_close(over_pools, torch.stack([attention_varlen(q, k, values, pooled[3], **paged) for k in pools]))


def test_dropout_draws_as_for_packed_keys():
    packed, pooled, paged, _ = make([(40, 64), (3, 300)])
    torch.manual_seed(5)
    expected = attention_varlen(*packed, dropout_p=0.3)
    torch.manual_seed(5)
    assert_same_bits([attention_varlen(*pooled, dropout_p=0.3, **paged)], [expected])


@pytest.mark.parametrize("offset", [0, 5, "tensor"])
def test_offsets_of_the_op(offset):
    packed, pooled, paged, _ = make([(3, 20), (9, 4)])
    given = torch.tensor([1, -1]) if offset == "tensor" else offset
    settings = {"causal": True, "q_offset": given}
    got = attnpack.ops.attend_packed(*pooled, **paged, **settings)
    assert_same_bits([got], [attnpack.ops.attend_packed(*packed, **settings)])
    with pytest.raises(ValueError, match=r"q_offset has shape \[3\], wants \[sequences\] = \[2\]"):
        attnpack.ops.attend_packed(*pooled, **paged, causal=True, q_offset=torch.zeros(3).long())


def test_flops():
    from torch.utils.flop_counter import FlopCounterMode

    packed, pooled, paged, _ = make([(3, 20), (9, 4)])
    counts = []
    for tensors, more in ((packed, {}), (pooled, paged)):
        with FlopCounterMode(display=False) as counter:
            attention_varlen(*tensors, **more)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_garbage_is_really_there():
    """The other tests mean something: unused pages hold NaN, and unused entries name pages that do not exist."""
    _, pooled, paged, _ = make([(1, 99), (3, 3)])
    assert all(int(x) in GARBAGE for x in paged["block_table"][1, pages_of(3, 16) :])
    assert pooled[1].isnan().any() and pooled[2].isnan().any()
