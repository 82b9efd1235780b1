"""generate(num_return_sequences=): one run of the prompt, several answers, with every kind of cache."""

import attnpack
import pytest
import torch

KINDS = ["dynamic", "static", "sliding", "paged", "int8", "none"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return attnpack.CausalLM(97, 64, 2, 4, num_kv_heads=2).double().eval()


@pytest.mark.parametrize("lengths", [None, [9, 4]])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_those_of_one(model, kind, lengths):
    ids = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(1))
    lens = None if lengths is None else torch.tensor(lengths)
    one = model.generate(ids, max_new_tokens=20, cache=kind, lengths=lens)
    many = model.generate(ids, max_new_tokens=20, cache=kind, lengths=lens, num_return_sequences=3)
    assert torch.equal(many, one.repeat_interleave(3, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_answers_are_those_of_a_repeated_prompt(model, kind):
    ids = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(1))
    settings = {"max_new_tokens": 12, "cache": kind, "temperature": 1.0, "seed": 3}
    many = model.generate(ids, num_return_sequences=4, **settings)
    assert torch.equal(many, model.generate(ids.repeat_interleave(4, 0), **settings))
    assert len({tuple(row) for row in many[:4].tolist()}) == 4


def test_answers_share_the_pages_of_their_prompt(model):
    caches = attnpack.ModelCache(
        [attnpack.PagedCache(1, 2, 16, num_pages=9, dtype=torch.float64) for _ in range(2)]  # 4 for the prompt
    )
    ids = torch.randint(0, 97, (1, 64), generator=torch.Generator().manual_seed(1))
    many = model.generate(ids, max_new_tokens=8, cache=caches, num_return_sequences=5, temperature=1.0, seed=1)
    assert many.shape == (5, 72) and caches.lengths.tolist() == [71] * 5
    for layer in caches:
        assert (layer.block_table[:, :4] == layer.block_table[0, :4]).all()
        assert layer.block_table[:, 4].unique().numel() == 5
        assert layer.free_pages == 0


@pytest.mark.parametrize("cpp", [False, True], ids=["python", "cpp"])
def test_a_pool_that_is_too_small_is_refused_before_the_first_token(model, cpp):
    package, answering = (attnpack.cpp, model.cpp()) if cpp else (attnpack, model)
    pages = [package.PagedCache(2, 2, 16, num_pages=3, page_size=16, dtype=torch.float64) for _ in range(2)]
    caches, ids = package.ModelCache(pages), torch.randint(0, 97, (2, 10))
    with pytest.raises(ValueError, match="cache: got 3 free pages of 16 positions, want 4"):
        answering.generate(ids, max_new_tokens=8, cache=caches)
    assert len(caches) == 0
    assert answering.generate(ids, max_new_tokens=7, cache=caches).shape == (2, 17)


def test_both_languages(model):
    ids = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(1))
    for kind in KINDS:
        got = model.cpp().generate(ids, max_new_tokens=6, cache=kind, num_return_sequences=2)
        assert torch.equal(got, model.generate(ids, max_new_tokens=6, cache=kind, num_return_sequences=2))


def test_refused(model):
    ids = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="num_return_sequences: got 0"):
        model.generate(ids, max_new_tokens=2, num_return_sequences=0)
    fixed = attnpack.ModelCache([attnpack.StaticCache(1, 2, 9, 16, dtype=torch.float64) for _ in range(2)])
    with pytest.raises(ValueError, match="cache: got a StaticCache for 2 answers"):
        model.generate(ids, max_new_tokens=2, cache=fixed, num_return_sequences=2)


EMPTY = {
    "dynamic": (attnpack.DynamicCache, attnpack.GroupedQueryAttention),
    "quantized": (lambda: attnpack.QuantizedCache(8, exact_last=2), attnpack.GroupedQueryAttention),
    "sliding": (lambda: attnpack.SlidingWindowCache(8), attnpack.GroupedQueryAttention),
    "paged": (lambda: attnpack.PagedCache(3, 2, 8, num_pages=6, page_size=3), attnpack.GroupedQueryAttention),
    "an indexer's keys": (attnpack.SparseCache, lambda *sizes, **s: attnpack.SparseAttention(*sizes, top_k=3, **s)),
}


@pytest.mark.parametrize("kind", EMPTY)
@torch.no_grad()
def test_a_cache_that_holds_no_position_yet_takes_the_rows_of_a_reorder(kind):
    """A sequence whose tokens all were padding."""
    make_cache, make = EMPTY[kind]
    settings = {"window": (8, 0)} if kind == "sliding" else {}
    layer, cache, x = make(32, 4, 2, causal=True, **settings).eval(), make_cache(), torch.randn(3, 4, 32)
    rows = 3 if kind == "paged" else 1
    layer(x[:rows], cache=cache, kv_lens=torch.zeros(rows, dtype=torch.int64))
    for index in ([0, 0], [1, 0, 1]):
        cache.reorder(index)
    assert cache.lengths.tolist() == [0, 0, 0]
    torch.testing.assert_close(layer(x, cache=cache), layer(x), atol=2e-2 if kind == "quantized" else 1e-5, rtol=0)
