"""Caches: against a list of tensors that is appended to by hand, and the state that a failed call leaves."""

import copy
import pickle

import attnpack
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

BATCH, HEADS, DIM, V_DIM, ROOM = 3, 2, 4, 5, 24


def append(cache, key, value, new_lens=None):
    """Does to a cache what a module does, without attention."""
    room, window = cache.reserve(key, value), getattr(cache, "window", (-1, -1))
    query = key.new_zeros(key.shape)
    attnpack.ops.attend(query, key, value, cache=room, kv_lens=new_lens, causal=True, window=window)
    cache.commit(key.size(2), new_lens)


class CacheMachine(RuleBasedStateMachine):
    """A cache beside a list of rows for each sequence; after every step both hold the same."""

    def make(self):
        raise NotImplementedError

    @initialize(seed=st.integers(0, 2**16))
    def start(self, seed):
        self.random = torch.Generator().manual_seed(seed)
        self.cache = self.make()
        self.rows = [(torch.zeros(HEADS, 0, DIM), torch.zeros(HEADS, 0, V_DIM)) for _ in range(BATCH)]

    @property
    def longest(self):
        return max(keys.size(1) for keys, _ in self.rows)

    @rule(length=st.integers(1, 5), ragged=st.lists(st.integers(0, 5), min_size=BATCH, max_size=BATCH) | st.none())
    def append(self, length, ragged):
        key = torch.randn(BATCH, HEADS, length, DIM, generator=self.random)
        value = torch.randn(BATCH, HEADS, length, V_DIM, generator=self.random)
        valid = [length] * BATCH if ragged is None else [min(n, length) for n in ragged]
        new_lens = None if ragged is None else torch.tensor(valid)
        full = any(keys.size(1) + n > ROOM for (keys, _), n in zip(self.rows, valid, strict=True))
        if full and isinstance(self.cache, attnpack.StaticCache):
            with pytest.raises(ValueError, match="cache"):
                append(self.cache, key, value, new_lens)
            return
        append(self.cache, key, value, new_lens)
        self.rows = [
            (torch.cat([keys, key[b, :, :n]], 1), torch.cat([values, value[b, :, :n]], 1))
            for b, ((keys, values), n) in enumerate(zip(self.rows, valid, strict=True))
        ]

    @rule(n=st.integers(0, 12))
    def crop(self, n):
        self.cache.crop(n)
        self.rows = [(keys[:, :n], values[:, :n]) for keys, values in self.rows]

    @rule(index=st.lists(st.integers(0, BATCH - 1), min_size=BATCH, max_size=BATCH))
    def reorder(self, index):
        self.cache.reorder(torch.tensor(index))
        self.rows = [self.rows[i] for i in index]

    @rule()
    def reset(self):
        self.cache.reset()
        self.rows = [(keys[:, :0], values[:, :0]) for keys, values in self.rows]

    @rule(how=st.sampled_from(["clone", "deepcopy", "pickle"]))
    def copy(self, how):
        before = self.cache
        self.cache = {
            "clone": lambda cache: cache.clone(),
            "deepcopy": copy.deepcopy,
            "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
        }[how](before)
        before.reset()  # the copy must not change

    @rule()
    def roll_back(self):
        cache = attnpack.ModelCache([self.cache])
        key, value = torch.randn(BATCH, HEADS, 1, DIM), torch.randn(BATCH, HEADS, 1, V_DIM)
        with pytest.raises(RuntimeError, match="stop"), cache.rollback_on_error():
            if self.longest < ROOM:
                append(self.cache, key, value)
            raise RuntimeError("stop")

    @precondition(lambda self: self.longest > 0)
    @rule(wrong=st.sampled_from(["heads", "dim", "v_dim", "batch", "dtype"]))
    def wrong_append(self, wrong):
        shape = {"heads": HEADS + (wrong == "heads"), "batch": BATCH + (wrong == "batch")}
        key = torch.zeros(shape["batch"], shape["heads"], 1, DIM + (wrong == "dim"))
        value = torch.zeros(shape["batch"], shape["heads"], 1, V_DIM + (wrong == "v_dim"))
        if wrong == "dtype":
            key, value = key.bfloat16(), value.bfloat16()
        with pytest.raises(ValueError, match="cache: got"):
            self.cache.reserve(key, value)

    @invariant()
    def same(self):
        if not hasattr(self, "cache"):
            return
        assert len(self.cache) == self.longest
        if self.longest == 0:
            assert self.cache.lengths.sum() == 0
            return
        assert self.cache.lengths.tolist() == [keys.size(1) for keys, _ in self.rows]
        assert self.cache.k.shape == (BATCH, HEADS, self.longest, DIM)
        for b, (keys, values) in enumerate(self.rows):
            assert torch.equal(self.cache.k[b, :, : keys.size(1)], keys)
            assert torch.equal(self.cache.v[b, :, : keys.size(1)], values)
        held = BATCH * HEADS * (DIM + V_DIM) * 4
        assert self.cache.nbytes == held * (ROOM if isinstance(self.cache, attnpack.StaticCache) else self.longest)


class DynamicMachine(CacheMachine):
    def make(self):
        return attnpack.DynamicCache()


class StaticMachine(CacheMachine):
    def make(self):
        return attnpack.StaticCache(BATCH, HEADS, ROOM, DIM, v_head_dim=V_DIM)


for machine in (DynamicMachine, StaticMachine):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestDynamicCache = DynamicMachine.TestCase
TestStaticCache = StaticMachine.TestCase


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return attnpack.GroupedQueryAttention(24, 4, 2, causal=True, rope=attnpack.RotaryEmbedding(6)).eval()


def caches(batch=2, room=16):
    return [attnpack.DynamicCache(), attnpack.StaticCache(batch, 2, room, 6)]


@pytest.mark.parametrize("kind", [0, 1], ids=["dynamic", "static"])
@pytest.mark.parametrize("chunks", [[9], [1] * 9, [4, 1, 3, 1]])
def test_steps_equal_the_whole(layer, kind, chunks):
    x, cache = torch.randn(2, 9, 24), caches()[kind]
    with torch.no_grad():
        out = torch.cat([layer(part, cache=cache) for part in x.split(chunks, 1)], 1)
        torch.testing.assert_close(out, layer(x), rtol=1e-5, atol=1e-6)
    _, keys, values = layer.project(x)
    torch.testing.assert_close(cache.k, keys.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(cache.v, values.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [0, 1], ids=["dynamic", "static"])
def test_ragged_rows_go_on_at_their_own_position(layer, kind):
    x, more = torch.randn(2, 5, 24), torch.randn(2, 2, 24)
    lens, cache = torch.tensor([3, 5]), caches()[kind]
    with torch.no_grad():
        layer(x, cache=cache, kv_lens=lens)
        assert cache.lengths.tolist() == [3, 5] and len(cache) == 5
        out = layer(more, cache=cache)
        for b, length in enumerate(lens.tolist()):
            whole = layer(torch.cat([x[b : b + 1, :length], more[b : b + 1]], 1))[:, length:]
            torch.testing.assert_close(out[b : b + 1], whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [0, 1], ids=["dynamic", "static"])
def test_a_ragged_append_is_as_long_as_its_longest_row(layer, kind):
    cache = caches()[kind]
    with torch.no_grad():
        layer(torch.randn(2, 5, 24), cache=cache, kv_lens=torch.tensor([1, 3]))
    assert cache.lengths.tolist() == [1, 3] and len(cache) == 3 and cache.k.size(2) == 3


@pytest.mark.parametrize("kind", [0, 1], ids=["dynamic", "static"])
@torch.no_grad()
def test_given_positions_rotate_what_is_appended(layer, kind):
    """Gives the rows of a call without a cache; an earlier call is only rotated."""
    x, positions = torch.randn(2, 5, 24), torch.tensor([3, 9, 2, 40, 7])
    wanted, cache = layer(x, positions=positions), caches()[kind]
    steps = [layer(part, cache=cache, positions=at) for part, at in zip(x.split(2, 1), positions.split(2), strict=True)]
    torch.testing.assert_close(torch.cat(steps, 1), wanted, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(layer(x), wanted, atol=1e-3)


@pytest.mark.parametrize("kind", [0, 1], ids=["dynamic", "static"])
def test_mask_covers_all_keys_after_the_append(layer, kind):
    x, mask = torch.randn(2, 6, 24), torch.rand(2, 1, 1, 6) > 0.3
    cache = caches()[kind]
    with torch.no_grad():
        layer(x[:, :4], cache=cache, mask=mask[..., :4])
        out, weights = layer(x[:, 4:], cache=cache, mask=mask, need_weights=True)
        wanted, all_weights = layer(x, mask=mask, need_weights=True)
        torch.testing.assert_close(out, wanted[:, 4:], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(weights[..., :6], all_weights[:, :, 4:], rtol=1e-5, atol=1e-6)
        if kind == 1:
            wide = torch.cat([mask, torch.ones(2, 1, 1, 10, dtype=torch.bool)], -1)
            cache.crop(4)
            torch.testing.assert_close(layer(x[:, 4:], cache=cache, mask=wide), out, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [0, 1], ids=["dynamic", "static"])
def test_gradients_flow_through_this_call_only(layer, kind):
    past, new = torch.randn(2, 4, 24, requires_grad=True), torch.randn(2, 3, 24, requires_grad=True)
    cache = caches()[kind]
    layer(past, cache=cache)
    assert not cache.k.requires_grad
    layer(new, cache=cache).square().sum().backward()
    assert past.grad is None
    # The same by hand, with the keys and values of the past as constants.
    x = new.detach().clone().requires_grad_()
    q, k, v = layer.project(x, positions=torch.arange(4, 7))
    with torch.no_grad():
        _, old_k, old_v = layer.project(past)
    out = attnpack.attention(q, torch.cat([old_k, k], 2), torch.cat([old_v, v], 2), causal=True, q_offset=4)
    layer.o_proj(out.transpose(1, 2).flatten(2)).square().sum().backward()
    torch.testing.assert_close(new.grad, x.grad, rtol=1e-4, atol=1e-5)


def test_backward_after_later_appends(layer):
    """A call keeps the lengths that it saw."""
    cache, losses, alone = attnpack.DynamicCache(), [], []
    for part in torch.randn(2, 6, 24).split(2, 1):
        copied = cache.clone()
        losses.append(layer(part, cache=cache).square().sum())
        alone.append(torch.autograd.grad(layer(part, cache=copied).square().sum(), list(layer.parameters())))
    got = torch.autograd.grad(sum(losses), list(layer.parameters()))
    torch.testing.assert_close(got, tuple(map(sum, zip(*alone, strict=True))))


@pytest.mark.parametrize("kind", [0, 1], ids=["dynamic", "static"])
def test_gradients_of_queries_alone_through_several_calls(layer, kind):
    """The gradient of a query reads keys that later calls must not change."""
    layer.requires_grad_(False)
    layer.q_proj.requires_grad_(True)
    parts, weight = torch.randn(2, 6, 24).split([3, 1, 2], 1), layer.q_proj.weight
    cache, alone = caches()[kind], caches()[kind]
    got = torch.autograd.grad(sum(layer(part, cache=cache).square().sum() for part in parts), weight)
    wanted = [torch.autograd.grad(layer(part, cache=alone).square().sum(), weight)[0] for part in parts]
    torch.testing.assert_close(got[0], sum(wanted))


@pytest.mark.parametrize("kind", [0, 1], ids=["dynamic", "static"])
@pytest.mark.parametrize("frozen", ["k_proj", "v_proj"])
def test_gradients_of_keys_or_of_values_alone(layer, kind, frozen):
    getattr(layer, frozen).requires_grad_(False)
    x = torch.randn(2, 5, 24)
    wanted, got = (
        torch.autograd.grad(layer(x, cache=cache).square().sum(), [p for p in layer.parameters() if p.requires_grad])
        for cache in (None, caches()[kind])
    )
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("kind", [0, 1], ids=["dynamic", "static"])
@pytest.mark.parametrize("filled", [False, True])
def test_failed_call_leaves_the_cache_as_it_was(layer, kind, filled):
    x, cache = torch.randn(2, 3, 24), caches(room=7)[kind]
    if filled:
        layer(x, cache=cache)
    before = cache.clone()
    wrong = [
        dict(mask=torch.ones(2, 1, 1, 99, dtype=torch.bool)),
        dict(kv_lens=torch.tensor([-1, 2])),
        dict(kv_lens=torch.tensor([1, 4])),
        dict(positions=torch.arange(7)),
    ]
    for arguments in wrong:
        with pytest.raises(ValueError, match="attnpack"):
            layer(x, cache=cache, **arguments)
    if filled or kind == 1:  # an empty DynamicCache takes any shape
        with pytest.raises(ValueError, match="cache: got keys of shape"):
            layer(x[:1], cache=cache)
    with pytest.raises(ValueError, match="n: got -1"):
        cache.crop(-1)
    if kind == 1:
        with pytest.raises(ValueError, match="(?i)cache.*(room|full|capacity|holds|wants)"):
            layer(torch.randn(2, 8, 24), cache=cache)
    assert len(cache) == len(before) and torch.equal(cache.lengths, before.lengths)
    assert (cache.k is None and before.k is None) or torch.equal(cache.k, before.k)
    with torch.no_grad():
        assert torch.equal(layer(x, cache=cache), layer(x, cache=before))


@pytest.mark.parametrize("kind", [0, 1], ids=["dynamic", "static"])
@pytest.mark.parametrize("filled", [False, True])
def test_failure_after_the_append_takes_it_back(layer, kind, filled):
    x, cache = torch.randn(2, 3, 24), caches()[kind]
    if filled:
        layer(x, cache=cache)
    broken = layer.o_proj.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        layer(x, cache=cache)
    broken.remove()
    assert len(cache) == 3 * filled and cache.lengths.tolist() in ([3 * filled] * 2, [])
    twin = layer.cpp()
    layer.o_proj.weight.data = torch.randn(24, 7)  # fits no heads; the twin shares it
    native = [attnpack.cpp.DynamicCache(), attnpack.cpp.StaticCache(2, 2, 16, 6)][kind]
    with pytest.raises(ValueError, match=r"input has shape \[2, 3, 24\], wants \[..., 7\]"):
        twin.forward(x, cache=native)
    assert len(native) == 0 and not native.lengths.any()


@pytest.mark.parametrize("package", [attnpack, attnpack.cpp], ids=["python", "cpp"])
@pytest.mark.parametrize("kind", [0, 1, 2], ids=["dynamic", "static", "latent"])
@pytest.mark.parametrize("filled", [False, True])
@torch.no_grad()
def test_a_failed_append_leaves_the_cache_as_it_was(package, kind, filled):
    """Also where the cache had to grow for it, and where the first append of an empty cache had another batch."""
    torch.manual_seed(0)
    sizes = {"kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 0, "v_head_dim": 4}
    layer = package.MultiHeadLatentAttention(24, 2, **sizes) if kind == 2 else package.GroupedQueryAttention(24, 4, 2)
    cache = [package.DynamicCache, lambda: package.StaticCache(2, 2, 8, 6), package.LatentCache][kind]()
    if filled:
        layer.forward(torch.randn(2, 3, 24), cache=cache)
    before, text = [None if x is None else x.clone() for x in (cache.k, cache.v, cache.lengths)], repr(cache)
    for batch in (2,) if filled or kind == 1 else (2, 4):
        with pytest.raises(ValueError, match=r"kv_lens\[1\] is 6, wants 0 to the number of new tokens, 5"):
            layer.forward(torch.randn(batch, 5, 24), cache=cache, kv_lens=torch.tensor([5, 6, 5, 5][:batch]))
        assert repr(cache) == text
        for got, wanted in zip((cache.k, cache.v, cache.lengths), before, strict=True):
            assert got is wanted or torch.equal(got, wanted)
    x = torch.randn(2, 4, 24)
    layer.forward(x, cache=cache)
    assert len(cache) == 3 * filled + 4 and cache.lengths.tolist() == [len(cache)] * 2


@torch.no_grad()
def test_a_failure_after_a_first_append_of_another_batch(layer):
    """An append of no valid token gives an empty cache the batch 2. The next one may have another, also if it fails."""
    cache = attnpack.DynamicCache()
    layer(torch.randn(2, 1, 24), cache=cache, kv_lens=torch.tensor([0, 0]))
    broken = layer.o_proj.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        layer(torch.randn(3, 2, 24), cache=cache)
    broken.remove()
    assert len(cache) == 0 and not cache.lengths.any()
    layer(torch.randn(3, 2, 24), cache=cache)
    assert cache.lengths.tolist() == [2, 2, 2]


@pytest.mark.parametrize("shared", ["rows", "keys and values"])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_cache_over_shared_memory_is_refused(layer, shared, gradients):
    key = torch.zeros(1, 2, 8, 6).expand(2, -1, -1, -1) if shared == "rows" else torch.zeros(2, 2, 8, 6)
    value = key if shared == "keys and values" else torch.zeros(2, 2, 8, 6)
    cache = attnpack.cpp.StaticCache.from_tensors(key, value, torch.zeros(2, dtype=torch.int64))
    with torch.set_grad_enabled(gradients), pytest.raises(ValueError, match="the cache's .* call clone"):
        layer.cpp().forward(torch.randn(2, 3, 24), cache=cache)
    assert not cache.lengths.any() and not key.any()


def test_model_cache_takes_all_layers_back():
    torch.manual_seed(0)
    model = attnpack.CausalLM(32, 24, 3, 4, 2, hidden_dim=32).eval()
    ids = torch.randint(32, (2, 4))
    for native in (False, True):
        package, run = (attnpack.cpp, model.cpp().forward) if native else (attnpack, model)
        # The last layer's cache is too small: the first two layers have appended when it raises.
        cache = package.ModelCache([package.StaticCache(2, 2, room, 6) for room in (16, 16, 6)])
        with torch.no_grad():
            run(ids, cache)
            before = [layer.lengths.tolist() for layer in cache.layers]
            with pytest.raises(ValueError, match="cache"):
                run(ids, cache)
        assert [layer.lengths.tolist() for layer in cache.layers] == before == [[4, 4]] * 3
        with pytest.raises(ValueError, match="cache: got one of 2 layers, want 3"):
            run(ids, package.ModelCache(2))


def test_model_cache_is_the_sum_of_its_layers():
    cache = attnpack.ModelCache(2)
    key = torch.randn(1, 2, 3, 4)
    for layer in cache:
        append(layer, key, key)
    assert len(cache) == 3 and cache.nbytes == 2 * 2 * key.nbytes and cache.lengths.tolist() == [3]
    copied = cache.clone()
    cache.crop(1)
    cache.reorder(torch.tensor([0, 0]))
    assert len(cache) == 1 and cache[1].k.shape == (2, 2, 1, 4) and len(copied) == 3
    cache.reset()
    assert len(cache) == 0 and cache[0].k is None
    with pytest.raises(ValueError, match="layers: got none"):
        attnpack.ModelCache([])


def test_empty_caches():
    for cache in (attnpack.DynamicCache(), attnpack.StaticCache(2, 2, 8, 4), attnpack.ModelCache(1)):
        assert cache and len(cache) == 0
    assert attnpack.DynamicCache().k is None and attnpack.DynamicCache().nbytes == 0
    with pytest.raises(ValueError, match="max_len: got 0"):
        attnpack.StaticCache(2, 2, 0, 4)
    with pytest.raises(ValueError, match="index"):
        attnpack.StaticCache(2, 2, 8, 4).reorder(torch.tensor([0]))


def filled(package, kind):
    """A cache of two sequences with 5 positions each: [2, 2, 5, 6]."""
    cache = {"dynamic": package.DynamicCache, "static": lambda: package.StaticCache(2, 2, 8, 6)}.get(kind)
    cache = cache() if cache else package.ModelCache([package.DynamicCache()])
    torch.manual_seed(0)
    layer = package.GroupedQueryAttention(24, 4, 2)
    layer.forward(torch.randn(2, 5, 24), cache=cache.layers[0] if kind == "model" else cache)
    return cache


packages = pytest.mark.parametrize("package", [attnpack, attnpack.cpp], ids=["python", "cpp"])
kinds = pytest.mark.parametrize("kind", ["dynamic", "static", "model"])
WRONG_INDEX = {
    r"index\[1\] is 2, wants 0 to 1: a sequence that the cache holds": torch.tensor([0, 2]),
    r"index\[0\] is -1, wants 0 to 1": [-1, 0],
    r"index: got .*[Ff]loat.* of shape \[2\], want int64": torch.tensor([0.0, 1.0]),
    r"index: got .* of shape \[1, 2\], want int64": torch.tensor([[0, 1]]),
    r"index is \[1.5, 0\] \(list\), wants int64 .*: a tensor, or a list of ints": [1.5, 0],
    r"index is 'ab' \(str\), wants int64": "ab",
}


@packages
@kinds
@pytest.mark.parametrize("message", WRONG_INDEX)
def test_reorder_names_what_does_not_fit(package, kind, message):
    cache = filled(package, kind)
    layer = cache.layers[0] if kind == "model" else cache
    before = layer.k.clone()
    with pytest.raises((ValueError, TypeError), match="attnpack: " + message):
        cache.reorder(WRONG_INDEX[message])
    assert torch.equal(layer.k, before)


@packages
@kinds
def test_reorder_takes_a_list(package, kind):
    cache, tensor_cache = filled(package, kind), filled(package, kind)
    cache.reorder([1, 0])
    tensor_cache.reorder(torch.tensor([1, 0]))
    if kind == "model":
        cache, tensor_cache = cache.layers[0], tensor_cache.layers[0]
    assert torch.equal(cache.k, tensor_cache.k) and cache.lengths.tolist() == [5, 5]


@packages
def test_caches_are_true_and_say_what_they_hold(package):
    for empty in (package.DynamicCache(), package.StaticCache(2, 2, 8, 6), package.ModelCache(2)):
        assert empty and len(empty) == 0
    assert repr(package.DynamicCache()) == "DynamicCache(len=0)"
    held = "(batch=2, num_kv_heads=2, len=5, head_dim=6, dtype=torch.float32, bytes="
    assert repr(filled(package, "dynamic")) == f"DynamicCache{held}960)"
    assert repr(filled(package, "static")) == f"StaticCache{held}1536)"
    assert repr(filled(package, "model")) == f"ModelCache(1 layers, bytes=960, first: DynamicCache{held}960))"


@packages
def test_lengths_below_zero_are_named(package):
    cache = filled(package, "static")
    cache.lengths.fill_(-3)
    for read in (len, repr, lambda cache: cache.k, lambda cache: cache.v):
        with pytest.raises(
            ValueError, match=r"attnpack: the cache's lengths\[0\] is -3, wants 0 to its 8 positions: call reset\(\)"
        ):
            read(cache)
    cache.reset()
    assert len(cache) == 0 and cache.k.size(2) == 0


def test_dynamic_cache_grows_by_doubling():
    cache, grown = attnpack.DynamicCache(), set()
    for _ in range(100):
        append(cache, torch.randn(1, 1, 1, 4), torch.randn(1, 1, 1, 4))
        grown.add(cache.k.untyped_storage().nbytes() // (4 * 4))
    assert grown == {1, 2, 4, 8, 16, 32, 64, 128}


@pytest.mark.parametrize("kind", [0, 1], ids=["dynamic", "static"])
def test_cache_made_under_inference_mode_can_be_written_outside(layer, kind):
    with torch.inference_mode():
        cache = caches()[kind]
        layer(torch.randn(2, 3, 24), cache=cache)
    layer(torch.randn(2, 3, 24, requires_grad=True), cache=cache).sum().backward()
    assert len(cache) == 6


@torch.no_grad()
def test_a_static_cache_reorders_what_it_holds():
    """In place. The room behind the held positions is neither read nor written: NaN there stays there."""
    cache, layer = attnpack.StaticCache(3, 2, 50, 4), attnpack.GroupedQueryAttention(16, 4, 2, head_dim=4)
    layer(torch.randn(3, 6, 16), cache=cache, kv_lens=torch.tensor([6, 2, 4]))
    _, *memory = cache._tensors
    for room in memory:
        room[:, :, 6:] = float("nan")
    before = [room.clone() for room in memory]
    cache.reorder(torch.tensor([2, 0, 0]))
    assert cache.lengths.tolist() == [4, 6, 6]
    assert all(now is room for now, room in zip(cache._tensors[1:], memory, strict=True))
    for room, old in zip(memory, before, strict=True):
        for row, (source, length) in enumerate(((2, 4), (0, 6), (0, 6))):
            assert torch.equal(room[row, :, :length], old[source, :, :length])
        assert room[:, :, 6:].isnan().all()
    cache.reorder(torch.arange(3))
    assert cache.lengths.tolist() == [4, 6, 6]


def test_the_fields_of_a_room_have_the_same_names_in_both_languages():
    """A field that the native caches do not give would have its default, whatever the cache holds."""
    fields = attnpack.ops.CacheTensors._fields
    assert sorted(attnpack._C.cpp.room_names()) == sorted(fields)
    flat = [argument.name for argument in torch.ops.attnpack.attend.default._schema.arguments]
    assert [name for name in flat if name.startswith("cache_")] == [f"cache_{name}" for name in fields]


PARTS = {
    "LatentCache": {"kv_lora_rank": 0, "index": None},
    "SparseCache": {"block": 0, "index": None},
    "StaticCache": {"max_len": 7},
    "SlidingWindowCache": {"window": 3, "keep_first": 1},
    "QuantizedCache": {"bits": 8, "exact_first": 2, "exact_last": 5, "kv_lora_rank": 0},
    "PagedCache": {"page_size": 4, "num_pages": 6, "free_pages": 6},
}
MADE = {
    "LatentCache": attnpack.LatentCache,
    "SparseCache": attnpack.SparseCache,
    "StaticCache": lambda: attnpack.StaticCache(1, 2, 7, 8),
    "SlidingWindowCache": lambda: attnpack.SlidingWindowCache(3, keep_first=1),
    "QuantizedCache": lambda: attnpack.QuantizedCache(8, exact_first=2, exact_last=5),
    "PagedCache": lambda: attnpack.PagedCache(1, 2, 8, page_size=4, num_pages=6),
}


@pytest.mark.parametrize("kind", PARTS)
def test_parts_are_asked_by_name(kind):
    cache = MADE[kind]()
    assert {name: cache._part(name) for name in PARTS[kind]} == PARTS[kind]
    with pytest.raises(ValueError, match=f"name: got lengthy, want something that a {kind} has"):
        cache._part("lengthy")
