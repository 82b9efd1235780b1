"""Thousands of random sequences of changes over every kind of cache, beside a list of rows for each sequence that is
kept by hand. A new kind is a row of KINDS."""

import dataclasses
import random
from collections.abc import Callable

import attnpack
import pytest
import torch
from attnpack.ops import index_keys
from attnpack.tools.threads import threads
from marks import long

BATCH, HEADS, DIM, V_DIM, ROOM, RANK = 3, 2, 2, 3, 700, 2
SEQUENCES, LONG_SEQUENCES, STEPS = 60, 700, 14


def all_positions(cache, b, length):
    return list(range(length))


def window_positions(cache, b, length):
    """The kept first positions and the rest. The window before the next position must be among them."""
    first, gone = cache.keep_first, 0 if cache.k is None else int(cache.dropped[b])
    assert gone == 0 or first + gone <= length - cache.window[0]
    return [p for p in range(length) if p < first or p >= first + gone]


@dataclasses.dataclass
class Kind:
    make: Callable[[], object]
    stored: Callable = all_positions  # the positions that k and v show of a sequence
    window: tuple[int, int] = (-1, -1)
    room: int | None = None  # the most positions of a sequence
    latent: bool = False
    allocated: int | None = None  # the most positions that take memory between calls
    bits: int = 0  # of quantised rows; 0: rows as they are
    tolerance: float = 1e-5  # of a mean of values
    pages: int | None = None  # of a pool, which takes memory for all of them
    sums: int = 0  # of blocks of so many keys that are kept beside them
    indexed: bool = False  # an indexer's keys are kept beside them: the first head's, doubled


KINDS = {
    "dynamic": Kind(attnpack.DynamicCache),
    "static": Kind(lambda: attnpack.StaticCache(BATCH, HEADS, ROOM, DIM, v_head_dim=V_DIM), room=ROOM, allocated=ROOM),
    "latent": Kind(attnpack.LatentCache, latent=True),
    "latent, an indexer": Kind(attnpack.LatentCache, latent=True, indexed=True),
    "sliding": Kind(lambda: attnpack.SlidingWindowCache(9), window_positions, (9, 0), allocated=9 + 256 + 64),
    "sliding of nothing": Kind(lambda: attnpack.SlidingWindowCache(0), window_positions, (0, 0), allocated=256 + 64),
    "sliding, first kept": Kind(
        lambda: attnpack.SlidingWindowCache(40, keep_first=5), window_positions, (40, 0), allocated=45 + 256 + 64
    ),
    "8 bits": Kind(lambda: attnpack.QuantizedCache(8), bits=8, tolerance=0.03),
    "4 bits": Kind(lambda: attnpack.QuantizedCache(4), bits=4, tolerance=0.4),
    "8 bits, some exact": Kind(
        lambda: attnpack.QuantizedCache(8, exact_first=4, exact_last=20), bits=8, tolerance=0.03
    ),
    "sparse": Kind(attnpack.SparseCache),
    "sparse, sums": Kind(attnpack.SparseCache, sums=8),
    "sparse, an indexer": Kind(attnpack.SparseCache, indexed=True),
    "paged": Kind(lambda: paged_cache(850), pages=850),
    "paged, often full": Kind(lambda: paged_cache(40), pages=40),
}


def paged_cache(num_pages):
    return attnpack.PagedCache(BATCH, HEADS, DIM, num_pages=num_pages, v_head_dim=V_DIM)


def pages_of(cache):
    """The pages that each sequence needs for its positions."""
    counts = [-(-n // cache.page_size) for n in cache.lengths.tolist()]
    return [row[:n] for row, n in zip(cache.block_table.tolist(), counts, strict=True)]


def missing_pages(cache, valid):
    """How many pages an append lacks: each sequence takes new ones, and a copy of a shared page that it writes to."""
    size, pages, lengths = cache.page_size, pages_of(cache), cache.lengths.tolist()
    wanted, written = 0, {}
    for row, length, n in zip(pages, lengths, valid, strict=True):
        wanted += -(-(length + n) // size) - len(row)
        if n and length % size:
            written[row[-1]] = written.get(row[-1], 0) + 1
    for page, writers in written.items():
        wanted += writers - (writers == sum(page in row for row in pages))
    return wanted - (cache.num_pages - len({page for row in pages for page in row}))


def stored_positions(cache):
    """How many positions the pages hold, with those that sequences share once."""
    rows = {}
    for pages, length in zip(pages_of(cache), cache.lengths.tolist(), strict=True):
        for i, page in enumerate(pages):
            rows[page] = max(rows.get(page, 0), min(cache.page_size, length - i * cache.page_size))
    return sum(rows.values())


class Machine:
    """A cache, and the rows that it should hold: for each sequence keys [H, n, D] and values [H, n, Dv]."""

    def __init__(self, kind, seed):
        self.kind, self.draw = kind, random.Random(seed)
        self.random = torch.Generator().manual_seed(seed)
        self.cache = kind.make()
        self.heads, self.v_dim = (1, 0) if kind.latent else (HEADS, V_DIM)
        self.clear()

    def clear(self):
        empty = torch.zeros(self.heads, 0, DIM), torch.zeros(self.heads, 0, self.v_dim)
        self.rows = [empty for _ in range(BATCH)]

    def lengths(self):
        return [keys.size(1) for keys, _ in self.rows]

    def new(self, length, batch=BATCH, dim=DIM):
        return tuple(torch.randn(batch, self.heads, length, d, generator=self.random) for d in (dim, self.v_dim))

    def write(self, key, value, new_lens):
        """Does as a module: reserve, attend, commit."""
        with self.cache.rollback_on_error():
            if self.kind.indexed:
                self.write_index(key[:, :1], new_lens)
            if self.kind.latent:
                room, lengths = self.cache.reserve_latents(key, RANK)
                query, context = key.new_zeros(key.shape), key.new_zeros(BATCH, key.size(2), DIM)
                attnpack.ops.latent_append(
                    query, key[:, 0, :, :RANK], context[..., RANK:], cache=(room, lengths), kv_lens=new_lens
                )
                out = None
            else:
                query, chosen = key.new_zeros(key.shape), {}
                if self.kind.sums:
                    self.cache.keep_sums(self.kind.sums, key.size(2))
                    chosen = {"key_block": self.kind.sums, "top_blocks": 1000, "local_blocks": 1}
                out = attnpack.ops.attend(
                    query, key, value, cache=self.cache.reserve(key, value, new_lens), kv_lens=new_lens,
                    causal=True, window=self.kind.window, **chosen,
                )  # fmt: skip
            self.cache.commit(key.size(2), new_lens)
        return out

    def write_index(self, key, new_lens):
        weights, room = key.new_zeros(BATCH, key.size(2), 1), self.cache.reserve_index(2 * key)
        index_keys(torch.zeros_like(key), 2 * key, weights, 1, cache=room, kv_lens=new_lens)

    def append(self):
        length = self.draw.choice([1, 1, 2, 5, 60, 130, 300])
        valid = [length] * BATCH
        if self.draw.random() < 0.5:
            valid = [self.draw.choice([0, length, self.draw.randint(0, length)]) for _ in range(BATCH)]
        new_lens = None if valid == [length] * BATCH else torch.tensor(valid)
        key, value = self.new(length)
        if self.kind.room and any(n + more > self.kind.room for n, more in zip(self.lengths(), valid, strict=True)):
            with pytest.raises(ValueError, match="cache is full"):
                self.write(key, value, new_lens)
            return
        if self.kind.pages and missing_pages(self.cache, valid) > 0:
            with pytest.raises(ValueError, match="the pool is full|are to be appended, wants at most"):
                self.write(key, value, new_lens)
            return
        out = self.write(key, value, new_lens)
        past = self.lengths()
        self.rows = [
            (torch.cat([keys, key[b, :, :n]], 1), torch.cat([values, value[b, :, :n]], 1))
            for b, ((keys, values), n) in enumerate(zip(self.rows, valid, strict=True))
        ]
        if out is not None:
            self.check_output(out, past, valid)

    def check_output(self, out, past, valid):
        """A query of zeros gives the mean of the values that it sees, here that of each sequence's last valid token."""
        first = getattr(self.cache, "keep_first", 0)
        left = self.kind.window[0]
        for b, (before, n) in enumerate(zip(past, valid, strict=True)):
            if n == 0:
                continue
            position = before + n - 1
            begin = 0 if left < 0 else max(position - left, 0)
            values = self.rows[b][1]
            seen = torch.cat([values[:, : min(first, begin)], values[:, begin : position + 1]], 1)
            wanted = seen.double().mean(1).flatten()
            torch.testing.assert_close(out[b, n - 1].double(), wanted, rtol=1e-4, atol=self.kind.tolerance)

    def crop(self):
        longest = max(self.lengths())
        n = self.draw.choice([0, 3, longest, max(longest - self.draw.randint(0, 70), 0), self.draw.randint(0, 600)])
        stored = [self.kind.stored(self.cache, b, length) for b, length in enumerate(self.lengths())]
        lost = False
        for length, positions in zip(self.lengths(), stored, strict=True):
            if length > n:  # what position n sees must be stored
                left, held = self.kind.window[0], set(positions)
                lost |= any(p not in held for p in range(0 if left < 0 else max(n - left, 0), n))
        if lost:
            with pytest.raises(ValueError, match=f"n: got {n}, but sequence"):
                self.cache.crop(n)
            return
        self.cache.crop(n)
        self.rows = [(keys[:, :n], values[:, :n]) for keys, values in self.rows]

    def reorder(self):
        index = [self.draw.randrange(BATCH) for _ in range(BATCH)]
        self.cache.reorder(index)
        self.rows = [self.rows[i] for i in index]

    def clone(self):
        before, self.cache = self.cache, self.cache.clone()
        if before.k is not None:
            (before.k_pool if self.kind.pages else before.k).fill_(7)
        if getattr(before, "index", None) is not None:
            before.index.fill_(7)
        before.reset()

    def reset(self):
        self.cache.reset()
        self.clear()

    def failed_append(self):
        """Errors before the append, in it, and after it: nothing may change."""
        length = self.draw.choice([1, 5, 130, 400])
        memory = self.cache.nbytes_allocated
        table = self.kind.pages and self.cache.block_table.clone()
        empty = self.cache.k is None
        kind = self.draw.choice(["shape", "lens", "after"])
        if kind == "shape":
            if max(self.lengths()) > 0:
                with pytest.raises(ValueError, match="cache: got keys"):
                    self.write(*self.new(length, dim=DIM + 1), None)
        elif kind == "lens":
            with pytest.raises(ValueError, match=r"kv_lens\[1\] is"):
                self.write(*self.new(length), torch.tensor([0, length + 1, 0]))
        else:
            model = attnpack.ModelCache([self.cache])
            full = self.kind.room and max(self.lengths()) + length > self.kind.room
            full = full or (self.kind.pages and missing_pages(self.cache, [length] * BATCH) > 0)
            with pytest.raises(RuntimeError, match="stop"), model.rollback_on_error():
                if not full:
                    self.write(*self.new(length), None)
                raise RuntimeError("stop")
        assert self.cache.nbytes_allocated == memory
        assert not self.kind.pages or torch.equal(self.cache.block_table, table)
        assert (self.cache.k is None) == empty

    def check(self):
        lengths, cache = self.lengths(), self.cache
        if self.kind.pages:
            self.check_pages()
        assert len(cache) == max(lengths)
        if max(lengths) == 0:
            assert cache.lengths.sum() == 0
            return
        assert cache.lengths.tolist() == lengths
        most = 0
        for b, (keys, values) in enumerate(self.rows):
            positions = self.kind.stored(cache, b, lengths[b])
            most = max(most, len(positions))
            self.check_rows(cache.k[b, :, : len(positions)], keys[:, positions])
            if not self.kind.latent:
                self.check_rows(cache.v[b, :, : len(positions)], values[:, positions])
        assert cache.k.shape == (BATCH, self.heads, most, DIM)
        beside = self.check_beside(most)
        if self.kind.bits:
            assert cache.nbytes <= cache.nbytes_allocated
            return
        position = BATCH * self.heads * (DIM + self.v_dim) * 4
        stored = BATCH * (self.kind.room or most) if not self.kind.pages else stored_positions(cache)
        assert cache.nbytes == position // BATCH * stored + beside <= cache.nbytes_allocated
        if self.kind.allocated is not None:
            assert cache.nbytes_allocated <= position * self.kind.allocated

    def check_rows(self, shown, rows):
        """Each row as it was, or of a QuantizedCache as it is after it was quantised once."""
        same = (shown == rows).all(-1)
        if self.kind.bits:
            held = attnpack.ops.quantize_rows(rows, self.kind.bits)
            back = attnpack.ops.dequantize_rows(held, self.kind.bits, rows.size(-1), rows.dtype)
            same |= (shown == back).all(-1)
            exact_first = self.cache.exact_first
            assert torch.equal(shown[:, :exact_first], rows[:, :exact_first])
        assert same.all()

    def check_beside(self, most):
        """Checks a selector's state for each position or whole block. Returns its bytes."""
        sums, index = self.kind.sums, getattr(self.cache, "index", None)
        if not sums and not self.kind.indexed:
            assert index is None
            return 0
        for b, (keys, _) in enumerate(self.rows):
            if sums:
                whole = keys.size(1) // sums
                assert torch.equal(index[b, :, :whole], keys[:, : whole * sums].unflatten(1, (whole, sums)).sum(2))
            else:
                assert torch.equal(index[b, :, : keys.size(1)], 2 * keys[:1])
        assert index.shape == ((BATCH, HEADS, -(-most // sums), DIM) if sums else (BATCH, 1, most, DIM))
        return index.numel() * 4

    def check_pages(self):
        """Each sequence holds the pages of its positions and no other, and the other pages are free."""
        table, pages = self.cache.block_table, pages_of(self.cache)
        assert [(row >= 0).sum() for row in table] == [len(row) for row in pages]
        assert self.cache.free_pages == self.kind.pages - len({page for row in pages for page in row})


CHANGES = [Machine.append] * 6 + [Machine.crop] * 2 + [Machine.failed_append] * 2
CHANGES += [Machine.reorder, Machine.clone, Machine.reset]


@pytest.fixture
def one_thread():
    """The tensors are small: threads would wait for each other."""
    with threads(1):
        yield


@pytest.mark.parametrize("seeds", [range(SEQUENCES), long(range(SEQUENCES, LONG_SEQUENCES))], ids=["first", "more"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("one_thread")
@torch.no_grad()
def test_random_sequences_of_changes(kind, seeds):
    for seed in seeds:
        machine = Machine(KINDS[kind], seed)
        done = []
        try:
            for _ in range(STEPS):
                change = machine.draw.choice(CHANGES)
                done.append(change.__name__)
                change(machine)
                machine.check()
        except Exception as error:
            error.add_note(f"seed {seed}: {', '.join(done)}")
            raise
