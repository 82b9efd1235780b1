"""The products of queries with keys, of which choices are made: against fp64, for all shapes, dtypes and strides."""

import attnpack  # noqa: F401  (which brings the ops)
import pytest
import torch
from attnpack.tools.threads import threads
from torch.library import opcheck
from torch.testing import assert_close

products = torch.ops.attnpack.key_products
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def exact(query, key):
    return query.double() @ key.double().repeat_interleave(query.size(1) // key.size(1), 1).transpose(2, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 9, 40, 200])
@pytest.mark.parametrize("dim", [5, 32, 67, 128])
def test_against_fp64(dtype, rows, dim):
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, rows, dim).to(dtype), torch.randn(2, 2, 531, dim).to(dtype)
    out = products(query, key)
    wide = torch.promote_types(dtype, torch.float32)
    assert out.dtype == wide
    plain = query.to(wide) @ key.to(wide).repeat_interleave(2, 1).transpose(2, 3)
    wanted = exact(query, key)
    error, allowed = (out.double() - wanted).abs().max(), (plain.double() - wanted).abs().max()
    assert error <= 2 * allowed + (1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_views_of_a_cache_and_rows_by_themselves(dtype):
    """Bits do not depend on the batch, on the threads, or on where the keys lie."""
    torch.manual_seed(0)
    query, cache = torch.randn(3, 8, 1, 64).to(dtype), torch.randn(3, 2, 1000, 64).to(dtype)
    key = cache[:, :, :777]
    out = products(query, key)
    assert torch.equal(out, products(query, key.contiguous()))
    apart = key.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(out, products(query.transpose(1, 2).contiguous().transpose(1, 2), apart))
    assert_close(products(query, key.transpose(2, 3).contiguous().transpose(2, 3)), out, atol=1e-4, rtol=1e-4)
    for b in range(3):
        assert torch.equal(products(query[b : b + 1], key[b : b + 1]), out[b : b + 1])
    with threads(1):
        assert torch.equal(products(query, key), out)


def test_opcheck_and_vmap():
    for shape in ((2, 4, 1, 40), (2, 4, 3, 7), (0, 4, 1, 40), (2, 4, 0, 40)):
        query, key = torch.randn(shape), torch.randn(shape[0], 2, 9, shape[3])
        opcheck(products.default, (query, key))
        assert products(query, key[:, :, :0]).shape == (*shape[:3], 0)
    query, key = torch.randn(3, 2, 4, 1, 40), torch.randn(3, 2, 2, 9, 40)
    wanted = torch.stack([products(q, k) for q, k in zip(query, key, strict=True)])
    assert_close(torch.func.vmap(products)(query, key), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("query", "key"), [((2, 4, 1), (2, 2, 3, 8)), ((2, 4, 1, 8), (1, 2, 3, 8)), ((2, 4, 1, 8), (2, 3, 3, 8)),
                       ((2, 4, 1, 8), (2, 2, 3, 9)), ((2, 4, 1, 8), (2, 0, 3, 8))]
)  # fmt: skip
def test_wrong_shapes(query, key):
    with pytest.raises(ValueError, match="query has shape|key has shape"):
        products(torch.randn(query), torch.randn(key))
