"""PagedCache: the bits of a DynamicCache, pages that sequences and caches share, and pages that come back."""

import copy
import gc
import pickle
import random

import attnpack
import pytest
import torch

SIZES = (24, 6, 2)  # width, heads, kv heads; a head has 4 dims
NTK = {"rope_type": "dynamic", "factor": 2}  # caches hold keys before rotation
SETTINGS = {
    "plain": {},
    "rope": {"rope": attnpack.RotaryEmbedding(4)},
    "partly rotated": {"rope": attnpack.RotaryEmbedding(2)},
    "raw keys": {"rope": attnpack.RotaryEmbedding(4, max_positions=20, scaling=NTK)},
    "window": {"window": (10, 0)},
    "window both ways": {"window": (10, 3), "causal": False},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "uneven groups": {"head_map": [0, 0, 0, 0, 1, 1]},
    "normed": {"qk_norm": True},
}  # fmt: skip
STEPS = (37, 1, 1, 20, 2, 1)


def layer_for(name="rope", dtype=torch.float32):
    torch.manual_seed(0)
    return attnpack.GroupedQueryAttention(*SIZES, **{"causal": True} | SETTINGS[name]).eval().to(dtype)


def paged_cache(batch=2, num_pages=60, page_size=5, **settings):
    return attnpack.PagedCache(batch, 2, 4, num_pages=num_pages, page_size=page_size, **settings)


def assert_same_rows(got, wanted, lens):
    for b, n in enumerate(lens):
        assert torch.equal(got[b, :n], wanted[b, :n])


def assert_same_content(paged, dynamic):
    assert torch.equal(paged.lengths, dynamic.lengths) and len(paged) == len(dynamic)
    lengths = dynamic.lengths.tolist()
    assert_same_rows(paged.k.transpose(1, 2), dynamic.k.transpose(1, 2), lengths)
    assert_same_rows(paged.v.transpose(1, 2), dynamic.v.transpose(1, 2), lengths)


@pytest.mark.parametrize("cpp", [False, True], ids=["python", "cpp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("ragged", [False, True], ids=["full rows", "ragged"])
@torch.no_grad()
def test_bits_of_a_dynamic_cache(name, dtype, ragged, cpp):
    layer, kinds = layer_for(name, dtype), attnpack.cpp if cpp else attnpack
    layer = layer.cpp() if cpp else layer
    dynamic, paged = kinds.DynamicCache(), kinds.PagedCache(2, 2, 4, num_pages=60, page_size=5, dtype=dtype)
    for n in STEPS:
        x, lens = torch.randn(2, n, 24, dtype=dtype), [n, max(n - 3, 0)] if ragged else [n, n]
        kv_lens = torch.tensor(lens) if ragged else None
        wanted, got = (layer(x, cache=cache, kv_lens=kv_lens) for cache in (dynamic, paged))
        assert_same_rows(got, wanted, lens)
    assert_same_content(paged, dynamic)


MODULES = {
    "SelfAttention": (lambda: attnpack.SelfAttention(8, causal=True), 8, 1),
    "MultiHeadAttention": (lambda: attnpack.MultiHeadAttention(16, 2, causal=True), 16, 2),
    "MultiQueryAttention": (lambda: attnpack.MultiQueryAttention(16, 2, causal=True), 16, 1),
    "ProjectedAttention": (lambda: attnpack.ProjectedAttention(2, 1, 8, causal=True), 16, 1),
}


@pytest.mark.parametrize("cpp", [False, True], ids=["python", "cpp"])
@pytest.mark.parametrize("name", MODULES)
@torch.no_grad()
def test_every_module_with_heads_takes_it(name, cpp):
    make, width, heads = MODULES[name]
    torch.manual_seed(0)
    layer, kinds = make().eval(), attnpack.cpp if cpp else attnpack
    layer = layer.cpp() if cpp else layer
    dynamic, paged = kinds.DynamicCache(), kinds.PagedCache(2, heads, 8, num_pages=9, page_size=4)
    for n in (6, 1, 3):
        inputs = [torch.randn(2, n, width)]
        if name == "ProjectedAttention":
            inputs += [torch.randn(2, n, heads * 8) for _ in range(2)]
        assert torch.equal(layer(*inputs, cache=paged), layer(*inputs, cache=dynamic))
    assert torch.equal(paged.k, dynamic.k) and torch.equal(paged.v, dynamic.v)


@pytest.mark.parametrize("ragged", [False, True], ids=["full rows", "ragged"])
@pytest.mark.parametrize("kind", ["mask", "short mask", "weights", "dropout", "gradients"])
def test_calls_that_need_the_keys_in_one_piece(kind, ragged):
    layer = layer_for()
    layer.dropout = 0.5 if kind == "dropout" else 0.0
    layer.train(kind == "dropout")
    caches = attnpack.DynamicCache(), paged_cache()
    with torch.set_grad_enabled(kind == "gradients"):
        for n in STEPS:
            short = kind == "short mask"  # no sequence gets all tokens, and the mask covers only the valid ones
            x, lens = torch.randn(2, n, 24), [n - short, max(n - 3, 0)] if ragged else [n - short] * 2
            results = []
            for cache in caches:
                torch.manual_seed(1)
                inputs = {"kv_lens": torch.tensor(lens) if ragged or short else None, "need_weights": kind == "weights"}
                if "mask" in kind:
                    inputs["mask"] = torch.randn(2, 1, n, len(cache) + n - short)
                out = layer(x, cache=cache, **inputs)
                parts = list(out) if kind == "weights" else [out]
                if kind == "gradients":
                    loss = sum(parts[0][b, :m].square().sum() for b, m in enumerate(lens))
                    parts += torch.autograd.grad(loss, list(layer.parameters()))
                results.append(parts)
            wanted, got = results
            assert_same_rows(got[0], wanted[0], lens)
            for b, m in enumerate(lens) if kind == "weights" else ():
                assert torch.equal(got[1][b, :, :m], wanted[1][b, :, :m])
            for a, b in zip(got[1:], wanted[1:], strict=True) if kind == "gradients" else ():
                assert torch.equal(a, b)
    assert_same_content(caches[1], caches[0])


class World:
    """Several caches on one pool, and the keys [H, n, D] that each of their sequences should hold."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.pages = self.draw.randint(4, 30)
        size = self.draw.randint(1, 5)
        self.caches = [(attnpack.PagedCache(self.draw.randint(1, 3), 1, 2, page_size=size, num_pages=self.pages), None)]
        self.caches[0] = (self.caches[0][0], [torch.zeros(1, 0, 2)] * len(self.caches[0][0].lengths))
        self.full = 0

    def append(self, n, fails=False):
        cache, rows = self.caches[n]
        length = self.draw.randint(0, 7)
        lens = [self.draw.randint(0, length) for _ in rows]
        x = torch.randn(len(rows), 1, length, 2)
        try:
            with cache.rollback_on_error():
                room = cache.reserve(x, -x, torch.tensor(lens))
                attnpack.ops.attend(x, x, -x, cache=room, kv_lens=torch.tensor(lens), causal=True)
                cache.commit(length, torch.tensor(lens))
                if fails:
                    raise RuntimeError("stop")
        except ValueError as error:
            assert "the pool is full" in str(error) or "wants at most" in str(error)
            self.full += 1
        except RuntimeError:
            assert fails
        else:
            new = [x[b, :, :m] for b, m in enumerate(lens)]
            self.caches[n] = cache, [torch.cat(both, 1) for both in zip(rows, new, strict=True)]

    def change(self):
        n = self.draw.randrange(len(self.caches))
        cache, rows = self.caches[n]
        index = [self.draw.randrange(len(rows)) for _ in range(self.draw.randint(1, 4))]
        match self.draw.randrange(12):
            case 0 if len(self.caches) < 4:
                self.caches.append((cache.fork(index), [rows[i] for i in index]))
            case 1 if len(self.caches) > 1:
                del self.caches[n]
            case 2:
                cache.release(torch.tensor(index))
                self.caches[n] = cache, [row[:, : row.size(1) * (b not in index)] for b, row in enumerate(rows)]
            case 3:
                cache.reorder(index)
                self.caches[n] = cache, [rows[i] for i in index]
            case 4:
                length = self.draw.randint(0, 9)
                cache.crop(length)
                self.caches[n] = cache, [row[:, :length] for row in rows]
            case 5:
                with attnpack.ModelCache([cache]).lent() as lent:  # as generate does
                    lent.layers[0].reorder(index)
                    del lent
                self.caches[n] = cache, [rows[i] for i in index]
            case 6 if self.draw.random() < 0.3:
                cache.reset()
                self.caches[n] = cache, [row[:, :0] for row in rows]
            case 7:
                self.append(n, fails=True)
            case _:
                self.append(n)

    def check(self):
        used = set()
        for cache, rows in self.caches:
            assert cache.lengths.tolist() == [row.size(1) for row in rows]
            keys, values, table = cache.k, cache.v, cache.block_table
            used |= set(table[table >= 0].tolist())
            for b, row in enumerate(rows):
                assert (table[b] >= 0).sum() == -(-row.size(1) // cache.page_size)
                assert torch.equal(keys[b, :, : row.size(1)], row) and torch.equal(values[b, :, : row.size(1)], -row)
        for cache, _ in self.caches:
            assert cache.free_pages == self.pages - len(used)


@torch.no_grad()
def test_random_forks_appends_and_ends_of_caches_on_one_pool():
    full = 0
    for seed in range(150):
        world = World(seed)
        for _ in range(30):
            world.change()
            world.check()
        full += world.full
    assert full > 100


@torch.no_grad()
def test_a_cache_that_ends_gives_its_pages_back():
    layer, cache = layer_for(), paged_cache(num_pages=12, page_size=4)
    layer(torch.randn(2, 6, 24), cache=cache)
    assert cache.free_pages == 8
    fork = cache.fork([0, 0, 1])
    layer(torch.randn(3, 1, 24), cache=fork)
    assert cache.free_pages == 5
    loop = [fork]
    loop.append(loop)  # garbage that only the collector finds
    del fork, loop
    gc.collect()
    assert cache.free_pages == 8
    fork = cache.fork([1])
    del cache
    assert fork.free_pages == 10
    fork.release([0])
    assert fork.free_pages == 12
    fork.reset()
    assert fork.free_pages == 12


@torch.no_grad()
def test_a_fork_copies_no_page_and_each_side_goes_on_by_itself():
    layer, cache = layer_for(), paged_cache(num_pages=40)
    layer(torch.randn(2, 13, 24), cache=cache)
    whole = cache.clone()
    fork = cache.fork(torch.tensor([1, 0]))
    assert fork.k_pool is cache.k_pool and torch.equal(fork.block_table, cache.block_table[[1, 0]])
    whole_fork = whole.clone()
    whole_fork.reorder([1, 0])
    for n in (1, 9):
        x, y = torch.randn(2, 2, n, 24)
        assert torch.equal(layer(x, cache=cache), layer(x, cache=whole))
        assert torch.equal(layer(y, cache=fork), layer(y, cache=whole_fork))
    assert torch.equal(cache.k, whole.k) and torch.equal(fork.k, whole_fork.k)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@torch.no_grad()
def test_a_copy_has_a_pool_of_its_own(way):
    cache = paged_cache(num_pages=12)
    layer_for()(torch.randn(2, 6, 24), cache=cache)
    fork = cache.fork([0, 1, 1])
    layer_for()(torch.randn(3, 6, 24), cache=fork)
    copied = way(fork)
    wanted = fork.k
    used = set(fork.block_table[fork.block_table >= 0].tolist())
    assert copied.free_pages == 12 - len(used)
    copied.k_pool.zero_()
    assert torch.equal(fork.k, wanted)
    copied.reset()
    assert copied.free_pages == 12 and fork.lengths.tolist() == [12, 12, 12]


@torch.no_grad()
def test_a_model_cache_lends_pages_and_takes_them_back():
    torch.manual_seed(0)
    model = attnpack.CausalLM(32, 24, 2, 6, 2, hidden_dim=32).eval()
    layers = [paged_cache(num_pages=12) for _ in range(2)]
    cache, ids = attnpack.ModelCache(layers), torch.randint(32, (2, 7))
    wanted = model.generate(ids, max_new_tokens=6)
    assert torch.equal(model.generate(ids, max_new_tokens=6, cache=cache), wanted)
    assert cache.lengths.tolist() == [12, 12] and [layer.free_pages for layer in layers] == [6, 6]
    with pytest.raises(ValueError, match="cache: got 6 free pages of .*, want 8"):
        model.generate(torch.randint(32, (2, 1)), max_new_tokens=20, cache=cache)
    with pytest.raises(ValueError, match="the pool is full"):
        model(torch.randint(32, (2, 20)), cache)
    assert cache.lengths.tolist() == [12, 12] and [layer.free_pages for layer in layers] == [6, 6]
    assert torch.equal(model(wanted[:, -1:], cache)[:, -1].argmax(-1), model(wanted)[:, -1].argmax(-1))
    cache.reset()
    assert [layer.free_pages for layer in layers] == [12, 12]


@torch.no_grad()
def test_what_it_cannot_do_is_said():
    layer, cache = layer_for(), paged_cache(num_pages=4)
    layer(torch.randn(2, 6, 24), cache=cache)
    with pytest.raises(ValueError, match=r"the pool is full: 2 pages are needed and 0 of 4 are free: release\(\)"):
        layer(torch.randn(2, 5, 24), cache=cache)
    with pytest.raises(ValueError, match="sequence 0 holds 6 positions and 15 are to be appended, wants at most 20"):
        layer(torch.randn(2, 15, 24), cache=cache)
    assert cache.lengths.tolist() == [6, 6] and cache.free_pages == 0
    layer(torch.randn(2, 4, 24), cache=cache)
    latent = attnpack.MultiHeadLatentAttention(
        24, 2, kv_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=0, v_head_dim=4
    )
    with pytest.raises(ValueError, match="cache: got a PagedCache, want a LatentCache"):
        latent(torch.randn(2, 1, 24), cache=cache)
    with pytest.raises(ValueError, match="cache: got keys"):
        layer(torch.randn(3, 1, 24), cache=cache)
    for name in ("num_kv_heads", "head_dim", "num_pages", "page_size", "v_head_dim"):
        sizes = {"batch": 1, "num_kv_heads": 1, "head_dim": 4, "num_pages": 3, name: 0}
        with pytest.raises(ValueError, match=f"{name}: got 0, want 1 to"):
            attnpack.PagedCache(**sizes)
    with pytest.raises(ValueError, match=r"rows\[0\] is 2, wants 0 to 1"):
        cache.release([2])
    with pytest.raises(ValueError, match=r"index\[1\] is -1, wants 0 to 1"):
        cache.fork([0, -1])
    with pytest.raises(TypeError, match="rows"):
        cache.release("all")
    assert cache.lengths.tolist() == [10, 10] and cache.free_pages == 0


@torch.no_grad()
def test_a_compiled_layer_breaks_its_graph_at_the_cache():
    layer = layer_for()
    torch._dynamo.reset()
    compiled, eager, cache = torch.compile(layer, backend="aot_eager"), paged_cache(), paged_cache()
    for n in (6, 1, 1, 1):
        x = torch.randn(2, n, 24)
        torch.testing.assert_close(compiled(x, cache=cache), layer(x, cache=eager), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(cache.k, eager.k, rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()
    whole = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"PagedCache\._call_rule"):
        whole(torch.randn(2, 1, 24), cache=cache)
    assert cache.lengths.tolist() == [9, 9]
