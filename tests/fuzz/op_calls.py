"""Valid calls of every op of torch.ops.attnpack, drawn at random: (op name, arguments, check of the result)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import attnpack
import op_cases
import torch
import torch.nn.functional as F
from attnpack import reference
from attnpack.ops import flat_rules
from op_cases import DTYPES, GRID, Inputs, check, check_against_reference, compute_results, draw, laid_out, make_inputs
from pages import LAYOUTS, make_table, put_into_pages
from schemas import in_order, operator_keywords
from torch.testing import assert_close

from fuzz import entry_calls, layer_calls, newer_calls

WIDE = [torch.float64, torch.float32]
NO_CHECK = staticmethod(lambda result: None)
Call = tuple[str, list, Callable]


def layer(pick: Random, **fixed) -> Inputs:
    """Small inputs of attention, with one value from each axis."""
    case = {name: pick.choice(values) for name, values in GRID.items()} | fixed
    case["lengths"] = pick.choice([lengths for lengths in GRID["lengths"] if max(lengths) <= 130])
    return make_inputs(**case, batch=pick.choice([1, 2, 3]))


def op_settings(inputs: Inputs) -> dict:
    """The ops' keywords after the tensors."""
    return operator_keywords(inputs.query, inputs.key, inputs.mask, inputs.settings)


def attention(pick: Random) -> Call:
    inputs = layer(pick)

    def right(result):
        plain = compute_results(reference.attention, inputs, gradients=False)
        truth = compute_results(reference.attention, inputs.to(torch.float64), gradients=False)
        check(dict(zip(("out", "lse"), result, strict=True)), plain, truth, inputs.query.dtype)

    heads = inputs.query, inputs.key, inputs.value
    return "attention", in_order("attention", *heads, **op_settings(inputs)), right


def attention_backward(pick: Random) -> Call:
    inputs = layer(pick, dtype=pick.choice(WIDE))
    heads, settings = (inputs.query, inputs.key, inputs.value), op_settings(inputs)
    out, lse = torch.ops.attnpack.attention(*heads, **settings)
    grads = [inputs.grad_out, pick.choice([None, inputs.grad_lse])]
    mask_gradient = inputs.mask is not None and inputs.mask.is_floating_point() and pick.random() < 0.5
    sinks_gradient = "sinks" in inputs.settings and pick.random() < 0.5
    settings |= {"mask_gradient": mask_gradient, "sinks_gradient": sinks_gradient}
    arguments = in_order("attention_backward", *grads, *heads, out, lse, **settings)
    return "attention_backward", arguments, lambda result: check_against_reference(inputs)


def packed(pick: Random) -> tuple[list, dict, list[tuple[int, int, int, int]]]:
    """The tensors of attention_varlen, its rules, and the rows of query and key of each sequence."""
    lengths = [(pick.randint(0, 40), pick.randint(0, 40)) for _ in range(pick.randint(0, 5))]
    dtype, (heads, kv_heads) = pick.choice(WIDE), pick.choice([(4, 2), (3, 3), (2, 1)])
    ends = [torch.tensor([0, *x]).cumsum(0).to(pick.choice([torch.int32, torch.int64])) for x in
            ([q for q, _ in lengths], [k for _, k in lengths])]  # fmt: skip
    shapes = [(heads, 8), (kv_heads, 8), (kv_heads, 6)]
    tensors = [draw(int(ends[min(n, 1)][-1]), *shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes)]
    window = pick.choice([(-1, -1), (3, 0), (2, 2)])
    rules = {"causal": pick.random() < 0.5, "window": window, "softcap": pick.choice([0.0, 2.0])}
    rules["sinks"] = pick.choice([None, draw(heads)])
    rows = zip(*(x.tolist()[:-1] for x in ends), *(x.tolist()[1:] for x in ends), strict=True)
    return [*tensors, *ends], rules, list(rows)


def attention_varlen(pick: Random, paged: bool = False) -> Call:
    tensors, rules, rows = packed(pick)
    q, k, v = tensors[:3]

    def right(result):
        for a, c, b, d in rows:
            heads = [x.transpose(0, 1).unsqueeze(0) for x in (q[a:b], k[c:d], v[c:d])]
            expected = reference.attention(*heads, q_offset=(d - c) - (b - a), **rules)
            assert_close(result[0][a:b], expected[0].transpose(0, 1), atol=1e-4, rtol=1e-4)

    flat = flat_rules(q, rules)[1]
    if not paged:
        return "attention_varlen", in_order("attention_varlen", *tensors, **flat), right
    lengths, page_size = tensors[4].diff().tolist(), pick.choice([1, 3, 7, 16])
    table = make_table(lengths, page_size, pick.choice(["in order", "shuffled"]))
    layout = pick.choice(LAYOUTS)
    pools = [put_into_pages(x, lengths, table, page_size, layout) for x in (k, v)]
    flat |= {"block_table": table, "kv_lens": tensors[4].diff()}
    return "attention_varlen", in_order("attention_varlen", q, *pools, tensors[3], **flat), right


def attention_paged(pick: Random) -> Call:
    """attention_varlen on the same keys in pages, whose other rows hold NaN."""
    return attention_varlen(pick, paged=True)


def attention_varlen_backward(pick: Random) -> Call:
    tensors, rules, _ = packed(pick)
    flat = flat_rules(tensors[0], rules)[1]
    out, lse = torch.ops.attnpack.attention_varlen(*tensors, **flat)
    grads = [draw(*out.shape, dtype=out.dtype), pick.choice([None, draw(*lse.shape, dtype=lse.dtype)])]
    flat["sinks_gradient"] = rules["sinks"] is not None and pick.random() < 0.5
    name = "attention_varlen_backward"
    return name, in_order(name, *grads, *tensors[:3], out, lse, *tensors[3:], **flat), NO_CHECK


def attention_scores(pick: Random) -> Call:
    inputs = layer(pick, dtype=torch.float64)
    named = ["named"] if "key_index" in inputs.settings else []
    stage = pick.choice(["scaled", "capped", "masked", "probs", *named])

    def right(result):
        settings = {"stage": "probs" if stage == "named" else stage, **inputs.settings}
        truth = reference.attention_scores(inputs.query, inputs.key, inputs.mask, **settings)
        assert_close(result, op_cases.at_names(truth, inputs) if stage == "named" else truth)

    settings = op_settings(inputs) | {"stage": stage}
    return "attention_scores", in_order("attention_scores", inputs.query, inputs.key, **settings), right


def cache(pick: Random, batch: int, heads: int, widths: tuple[int, ...], dtype: torch.dtype) -> list:
    """A cache's tensors of that width, and its lengths, between memory that no call may write."""
    capacity = pick.randint(1, 9)
    tensors = []
    for width in widths:
        room = torch.full((batch + 2, heads, capacity, width), 77.0, dtype=dtype)
        tensors.append(room[1:-1])
    return [*tensors, torch.tensor([pick.randint(0, capacity) for _ in range(batch)])]


def margins_are_whole(arguments: list) -> bool:
    """Checks that nothing was written around the tensors that `cache` made."""
    tensors = [x for each in arguments for x in (each if isinstance(each, list) else [each])]
    held = [x for x in tensors if isinstance(x, torch.Tensor) and x.dim() == 4 and x._base is not None]
    rooms = [x._base for x in held if x._base.shape == (x.size(0) + 2, *x.shape[1:])]
    rooms = [room for room in rooms if room.numel() and (room[0] == 77).all()]
    return all((room[-1] == 77).all() for room in rooms)


def append(pick: Random, rotated: bool = False) -> Call:
    batch, heads, length, dtype = pick.randint(1, 3), pick.randint(1, 3), pick.randint(0, 4), pick.choice(DTYPES)
    key, value = draw(batch, heads, length, 6, dtype=dtype), draw(batch, heads, length, 5, dtype=dtype)
    key = laid_out(key, pick.choice(GRID["layout"])) if length else key
    new_lens = pick.choice([None, torch.tensor([pick.randint(0, length) for _ in range(batch)])])
    held = cache(pick, batch, heads, (6, 5), dtype)
    before = [x.clone() for x in held]

    def right(result):
        for b in range(batch):
            start, count = before[2][b].item(), length if new_lens is None else new_lens[b].item()
            before[1][b, :, start : start + count] = value[b, :, :count]
            if not rotated:
                before[0][b, :, start : start + count] = key[b, :, :count]
            before[2][b] += count
        for got, expected in list(zip(held, before, strict=True))[1 if rotated else 0 :]:
            assert torch.equal(got, expected)

    if not rotated:
        return "kv_cache_append_", [*held, key, value, new_lens, pick.choice([None, 20])], right
    arguments = [*held, draw(batch, 4, length, 6, dtype=dtype), key, value, [1.0, 0.1], 1.0, pick.random() < 0.5]
    return "kv_cache_append_rotated_", [*arguments, new_lens, None], right


def append_paged(pick: Random) -> Call:
    batch, heads, length, dtype = pick.randint(1, 3), pick.randint(1, 3), pick.randint(0, 4), pick.choice(DTYPES)
    page_size, pages = pick.choice([1, 3, 7]), pick.randint(1, 4)
    count = batch * pages + 1
    rooms = [torch.full((count + 2, page_size, heads, width), 77.0, dtype=dtype) for width in (6, 5)]
    pools = [room[1:-1] for room in rooms]
    table = torch.randperm(count)[: batch * pages].view(batch, pages).int()
    most = page_size * pages
    held = torch.tensor([pick.randint(0, max(most - length, 0)) for _ in range(batch)])
    x = [draw(batch, heads, length, width, dtype=dtype) for width in (6, 5)]
    new_lens = torch.tensor([pick.randint(0, min(length, most)) for _ in range(batch)])
    before, starts = [pool.clone() for pool in pools], held.tolist()

    def right(result):
        for pool, expected, new in zip(pools, before, x, strict=True):
            for b, (start, some) in enumerate(zip(starts, new_lens.tolist(), strict=True)):
                for n in range(some):
                    page, row = divmod(start + n, page_size)
                    expected[int(table[b, page]), row] = new[b, :, n]
            assert torch.equal(pool, expected)
        assert held.tolist() == [n + c for n, c in zip(starts, new_lens.tolist(), strict=True)]

    return "kv_cache_append_paged_", [*pools, table, held, *x, new_lens, None], right


def cache_rule(pick: Random) -> Call:
    """An op that is a rule of a cache, on the state of such a cache."""
    kind = pick.choice(
        ["StaticCache", "DynamicCache", "LatentCache", "SlidingWindowCache", "CrossCache", "QuantizedCache"]
    )
    if kind == "QuantizedCache":
        return quantized_rule(pick)
    latent, batch, length, dtype = kind == "LatentCache", pick.randint(1, 3), pick.randint(0, 3), pick.choice(DTYPES)
    heads, *widths = (1, 10, 0) if latent else (pick.randint(1, 3), 6, 5)
    key, value, lengths = cache(pick, batch, heads, tuple(widths), dtype)
    longest = int(lengths.max())
    numbers = {
        "DynamicCache": [longest],
        "LatentCache": [longest, longest, 6],
        "SlidingWindowCache": [2, 1, longest],
    }.get(kind, [])
    named = {"lengths": lengths, "key": key, "value": value, "dropped": torch.zeros(batch, dtype=torch.int64)}
    new = [draw(batch, heads, length, width, dtype=dtype) for width in widths]
    rules = {
        **dict.fromkeys(("cache_clone", "cache_len", "cache_nbytes", "cache_reset", "cache_views"), []),
        "cache_nbytes_allocated": [],
        "cache_shared": [draw(batch, 0, 4), None, heads, widths[0], 6 if latent else widths[1]],
        "cache_commit": [key.size(2) - longest, pick.choice([None, lengths])],
        "cache_crop": [pick.randint(0, 9)],
        "cache_reorder": [torch.tensor([pick.randrange(batch) for _ in range(batch)])],
        **({"cache_reserve_latents": [new[0], 6]} if latent else {"cache_reserve": [*new, None]}),
    }
    if kind == "CrossCache":
        del rules["cache_shared"]
        for name in ("cache_commit", "cache_crop", "cache_reserve"):  # nothing is appended to it, and nothing cropped
            del rules[name]
        rules["cache_store"] = [*new, pick.choice([None, torch.full((batch,), length)])]
        rules["cache_check_call"] = [draw(batch, 1, 4), pick.choice([None, draw(batch, key.size(2), 4)])]
    if kind == "SlidingWindowCache":
        del rules["cache_shared"]
    parts = {"StaticCache": ["max_len"], "SlidingWindowCache": ["window", "dropped"], "LatentCache": ["kv_lora_rank"]}
    if kind in parts:
        rules["cache_part"] = [pick.choice(parts[kind])]
    name = pick.choice(list(rules))
    tensors = [named.get(part) for part in attnpack._C.cpp.cache_tensor_names(kind)]
    return name, [kind, tensors, numbers, *rules[name]], NO_CHECK


def quantized_rule(pick: Random) -> Call:
    _, arguments, _ = attend_quantized(pick)
    key, value, room = *arguments[1:3], attnpack.ops.CacheTensors(*arguments[3:14])
    dtypes = {torch.float32: 6, torch.float64: 7}  # torch's own numbers
    first, held = room.keep_first, int(room.lengths.max())
    named = {"bits": room.bits, "exact_first": first, "exact_last": room.window + 1, "len": held}
    named |= {"head_dim": key.size(3), "v_head_dim": value.size(3), "kv_lora_rank": 0, "dtype": dtypes[key.dtype]}
    named["exact_used"] = held
    numbers = [named[name] for name in attnpack._C.cpp.cache_number_names("QuantizedCache")]
    rules = dict.fromkeys(("clone", "len", "nbytes", "nbytes_allocated", "reset", "views"), [])
    rules |= {"crop": [pick.randint(0, 9)], "commit": [1, None], "reserve": [key, value, None]}
    rules["reorder"] = [torch.zeros(key.size(0), dtype=torch.int64)]
    name = pick.choice(list(rules))
    tensors = room._asdict() | {"exact_dropped": room.dropped}
    state = [tensors[part] for part in attnpack._C.cpp.cache_tensor_names("QuantizedCache")]
    return f"cache_{name}", ["QuantizedCache", state, numbers, *rules[name]], NO_CHECK


def paged_rule(pick: Random) -> Call:
    """A rule of a PagedCache that holds some positions."""
    batch, heads, length, dtype = pick.randint(1, 3), pick.randint(1, 2), pick.randint(1, 7), pick.choice(WIDE)
    made = attnpack.PagedCache(
        batch, heads, 8, page_size=pick.choice([1, 3, 16]), num_pages=8 * batch, v_head_dim=6, dtype=dtype
    )
    q, k, v = (draw(batch, n, length, d, dtype=dtype) for n, d in ((2 * heads, 8), (heads, 8), (heads, 6)))
    attnpack.ops.attend(q, k, v, cache=made.reserve(k, v), causal=True)
    made.commit(length, None)
    rows = torch.tensor([pick.randrange(batch) for _ in range(batch)])
    new = [x[:, :, :1] for x in (k, v)]
    rules = dict.fromkeys(("clone", "len", "nbytes", "nbytes_allocated", "reset", "views", "give_back"), [])
    rules |= {"crop": [pick.randint(0, 9)], "reserve": [*new, None], "commit": [0, None], "reorder": [rows]}
    rules |= {"fork": [rows], "release": [rows[:1]]}
    name = pick.choice([*rules, "attend"])
    if name == "attend":
        name, room = pick.choice(["attend", "attend_with_weights"]), made.reserve(*new)
        return name, in_order(name, q[:, :, :1], *new, *room, causal=True), NO_CHECK
    state = [x.clone() for x in made._tensors]  # the cache gives its own pages back when it ends
    return f"cache_{name}", ["PagedCache", state, made._numbers, *rules[name]], NO_CHECK


def paged_cache(pick: Random) -> Call:
    sizes = [pick.randint(1, 4) for _ in range(5)]
    return "paged_cache", [*sizes, pick.choice([None, 5]), pick.choice(DTYPES), None], NO_CHECK


def kv_window(pick: Random) -> Call:
    """The slots of a cache that has dropped nothing: they keep their positions, or move as a whole."""
    batch, heads, keep_first = pick.randint(1, 3), pick.randint(1, 3), pick.choice([0, 0, 2])
    key, value, lengths = cache(pick, batch, heads, (6, 5), pick.choice(DTYPES))
    dropped, window, room = torch.zeros(batch, dtype=torch.int64), pick.randint(0, 9), key.size(2) + pick.randint(0, 4)

    def right(result):
        for b, length in enumerate(lengths.tolist()):
            assert torch.equal(result[0][b, :, :length], key[b, :, :length])
            assert torch.equal(result[1][b, :, :length], value[b, :, :length])

    if pick.random() < 0.5:
        return "kv_window_slide", [key, value, lengths, dropped, room, window, keep_first], right
    return "kv_window_crop", [lengths, dropped, pick.randint(0, 9), window, keep_first], NO_CHECK


def sliding_window_cache(pick: Random) -> Call:
    return "sliding_window_cache", [pick.randint(0, 9), 0, pick.randint(0, 3)], NO_CHECK


def quantized_cache(pick: Random) -> Call:
    return "quantized_cache", [pick.choice([4, 8]), pick.randint(0, 3), pick.randint(0, 3)], NO_CHECK


def new_cache(pick: Random) -> Call:
    return "new_cache", [pick.choice(["DynamicCache", "LatentCache", "SparseCache", "RecurrentCache"])], NO_CHECK


def static_cache(pick: Random) -> Call:
    sizes = [pick.randint(1, 4) for _ in range(4)]
    return "static_cache", [*sizes, pick.choice([None, 0, 5]), pick.choice(DTYPES), None], NO_CHECK


def attend(pick: Random) -> Call:
    inputs = layer(pick, dtype=pick.choice(WIDE), positions={}, kv_lens=None, mask=None, dims=(8, 6), names=None)
    q, k, v = inputs.query, inputs.key[:, :, : inputs.query.size(2)], inputs.value[:, :, : inputs.query.size(2)]
    q = q[:, :, : k.size(2)]
    batch, heads, length = k.shape[:3]
    held = pick.choice([[None] * 3, cache(pick, batch, heads, (8, 6), k.dtype)])
    rope, settings = pick.choice([None, [1.0, 0.1]]), inputs.settings
    left, dropped = -1, [None, -1, 0]
    if held[0] is not None and pick.random() < 0.5:  # a sliding window
        left, dropped = 2, [torch.zeros(batch, dtype=torch.int64), 2, pick.choice([0, 1])]
    flat = flat_rules(q, settings | {"causal": True, "window": (left, 0 if left >= 0 else -1)})[1]
    flat |= {"rope_inv_freq": rope, "cache_dropped": dropped[0], "cache_window": dropped[1]}
    flat["cache_keep_first"] = dropped[2]

    def right(result):
        if rope is None and held[0] is None and length:
            expected = reference.attention(q, k, v, causal=True, **settings).transpose(1, 2).flatten(2)
            assert_close(result if torch.is_tensor(result) else result[0], expected, atol=1e-4, rtol=1e-4)

    name = pick.choice(["attend", "attend_with_weights"])
    return name, in_order(name, q, k, v, *held, **flat), right


def attend_quantized(pick: Random) -> Call:
    """One token after those that a QuantizedCache holds."""
    batch, heads, bits, dtype = pick.randint(1, 3), pick.randint(1, 2), pick.choice([4, 8]), pick.choice(WIDE)
    made = attnpack.QuantizedCache(bits, exact_first=pick.choice([0, 2]), exact_last=pick.choice([0, 3]))
    for length in (pick.randint(1, 9), 1):
        q, k, v = (draw(batch, n, length, d, dtype=dtype) for n, d in ((2 * heads, 8), (heads, 8), (heads, 6)))
        room = made.reserve(k, v)
        if length > 1:
            attnpack.ops.attend(q, k, v, cache=room, causal=True)
            made.commit(length, None)
    name = pick.choice(["attend", "attend_with_weights"])
    return name, in_order(name, q, k, v, *room, causal=True), NO_CHECK


def latent(pick: Random) -> Call:
    batch, heads, length, dtype = pick.randint(1, 2), pick.randint(1, 4), pick.randint(1, 5), pick.choice(WIDE)
    query, latents, k_rope = (draw(batch, *s, dtype=dtype) for s in ((heads, length, 7), (length, 6), (length, 4)))
    # Latents that are held as bytes: c in 8 bits, then the rotated numbers.
    row_bytes = attnpack.ops.quantize_rows(latents, 8).size(-1) + 4 * dtype.itemsize
    held = pick.choice(
        [[None, None], cache(pick, batch, 1, (10,), dtype), cache(pick, batch, 1, (row_bytes,), torch.uint8)]
    )
    rope = pick.choice([None, [1.0, 0.1]])
    where = {"cache_latents": held[0], "cache_lengths": held[1], "rope_inv_freq": rope, "causal": True}
    name = pick.choice(["latent_attend", "latent_attend_with_weights", "latent_append"])
    if name == "latent_append":
        return name, in_order(name, query, latents, k_rope, **where), NO_CHECK
    kv_b, path = draw(heads * (3 + 5), 6, dtype=dtype), pick.choice(["auto", "expanded", "absorbed"])
    up = kv_b.view(heads, 8, 6)

    def right(result):
        if rope is None and held[0] is None:
            expected = reference.latent_attention(query, latents, k_rope, up[:, :3], up[:, 3:], causal=True)
            got = result if torch.is_tensor(result) else result[0]
            assert_close(got, expected.transpose(1, 2).flatten(2), atol=1e-3, rtol=1e-3)

    return name, in_order(name, query, latents, k_rope, kv_b, 5, path, **where), right


def latent_expand(pick: Random) -> Call:
    heads = pick.randint(1, 3)
    return "latent_expand", [draw(2, 1, 3, 10), draw(2, 3, heads * 8), 6, heads, 5], NO_CHECK


def latent_steps(pick: Random) -> Call:
    """The steps of latent attention, of which one gives what the operator takes."""
    batch, heads, length, dtype = pick.randint(1, 2), pick.randint(1, 4), pick.randint(1, 5), pick.choice(WIDE)
    query, latent, k_rope = (draw(batch, *s, dtype=dtype) for s in ((heads, length, 7), (length, 6), (length, 4)))
    latents = torch.cat([latent, k_rope], -1).unsqueeze(1)
    if pick.random() < 0.5:
        places = pick.choice([None, torch.arange(length)])

        def unrotated(result):
            assert torch.equal(result[0], query) and torch.equal(result[1], latents)

        return "latent_rotate", in_order("latent_rotate", query, latent, k_rope, positions=places), unrotated
    kv_b = draw(heads * (3 + 5), 6, dtype=dtype)
    up = kv_b.view(heads, 8, 6)

    def right(result):
        got = reference.attention(*result, scale=0.4)
        if path == "absorbed":
            got = torch.einsum("bhlc,hvc->bhlv", got.double(), up[:, 3:].double())
        expected = reference.latent_attention(query, latent, k_rope, up[:, :3], up[:, 3:], scale=0.4)
        assert_close(got.to(expected.dtype), expected, atol=1e-3, rtol=1e-3)

    path, lens = pick.choice(["expanded", "absorbed"]), pick.choice([None, torch.full((batch,), length)])
    return "latent_heads", [query, latents, 4, kv_b, 5, path, lens], right


def apply_rope(pick: Random) -> Call:
    x = draw(*[pick.randint(1, 3) for _ in range(pick.randint(0, 3))], pick.randint(0, 5), 8, dtype=pick.choice(WIDE))
    half, interleaved = pick.randint(1, 4), pick.random() < 0.5
    cos, sin = (draw(x.shape[-2], half, seed=n) for n in (1, 2))

    def right(result):
        assert_close(result, reference.apply_rope(x, cos, sin, interleaved=interleaved))

    return "apply_rope", [x, cos, sin, interleaved], right


def rope_table(pick: Random) -> Call:
    positions = torch.tensor([pick.randint(-5, 5000) for _ in range(pick.randint(0, 6))], dtype=torch.int64)
    inv_freq = [pick.random() for _ in range(pick.randint(0, 3))]

    def right(result):
        angles = positions.double().unsqueeze(-1) * torch.tensor(inv_freq, dtype=torch.float64)
        for got, expected in zip(result, (angles.cos(), angles.sin()), strict=True):
            assert_close(got, (2 * expected).float())

    if pick.random() < 0.5:
        return "rope_table", [positions, inv_freq, 2.0], right
    lengths = torch.tensor([pick.randint(0, 50) for _ in range(2)])
    many = pick.choice([positions, positions.expand(2, -1)])
    arguments = [many, pick.choice([None, lengths]), inv_freq, 1.0, pick.choice([[], inv_freq]), 2.0, 16]
    return "rope_table_by_length", arguments, NO_CHECK


def linear(pick: Random) -> Call:
    rows, inputs, outputs, dtype = pick.randint(0, 20), pick.randint(1, 40), pick.randint(0, 30), pick.choice(WIDE)
    x, weight, bias = (draw(*s, dtype=dtype) for s in ((rows, inputs), (outputs, inputs), (outputs,)))

    def right(result):
        for got in result if isinstance(result, list) else [result]:
            assert_close(got, F.linear(x, weight, bias), atol=1e-4, rtol=1e-4)

    if pick.random() < 0.5:
        return "linear", [x, weight, bias], right
    return "linears", [x, [weight, weight], [bias, bias]], right


def recurrent_inputs(pick: Random) -> tuple[list, dict]:
    """The tensors of linear attention, and some of its options."""
    batch, group, heads, length = pick.randint(0, 3), pick.randint(1, 3), pick.randint(1, 2), pick.randint(0, 90)
    dims, dtype = (pick.randint(1, 20), pick.randint(1, 20)), pick.choice(WIDE)
    packed = pick.random() < 0.2
    batch = 1 if packed else batch
    query, key, value = (
        draw(batch, h, length, d, dtype=dtype, seed=n)
        for n, (h, d) in enumerate([(heads, dims[0]), (heads, dims[0]), (heads * group, dims[1])])
    )
    shape = (batch, heads * group, length)
    strength = pick.choice([0.1, 100.0])
    options = {"log_decay": -strength * draw(*shape, *pick.choice([(), dims[:1]]), dtype=dtype, seed=3).abs(),
               "beta": draw(*shape, dtype=dtype, seed=4).sigmoid()}  # fmt: skip
    options = {name: x for name, x in options.items() if pick.random() < 0.7}
    if packed:
        options["cu_seqlens"] = torch.tensor([0, length // 3, length])
    elif pick.random() < 0.3:
        options["kv_lens"] = torch.tensor([pick.randint(0, length) for _ in range(batch)], dtype=torch.int32)
    if pick.random() < 0.5:
        options["initial_state"] = draw(2 if packed else batch, heads * group, *dims, dtype=dtype, seed=5)
    return [query, key / dims[0] ** 0.5, value], options


def check_gradients(results, grads: list, leaves: list, found) -> None:
    """Whether `found` are the gradients of the leaves, from those of the formula's results that depend on them."""
    known = [(y, g) for y, g in zip(results, grads, strict=True) if g is not None and y.requires_grad]
    if not known:  # without tokens nothing depends on the inputs
        return
    outputs, upstream = zip(*known, strict=True)
    expected = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)
    for got, x in zip(found, expected, strict=True):
        if x is not None:
            assert_close(got, x, atol=1e-3, rtol=1e-3)


def linear_attention(pick: Random) -> Call:
    tensors, options = recurrent_inputs(pick)

    def right(result):
        if "cu_seqlens" not in options:
            for got, expected in zip(result, reference.linear_attention(*tensors, **options), strict=True):
                assert_close(got, expected, atol=1e-4, rtol=1e-4)

    return "linear_attention", in_order("linear_attention", *tensors, **options), right


def linear_attention_in_place(pick: Random) -> Call:
    tensors, options = recurrent_inputs(pick)
    query, _, value = tensors
    wide = torch.promote_types(query.dtype, torch.float32)
    sequences = 2 if "cu_seqlens" in options else query.size(0)
    state = options.pop("initial_state", torch.zeros(sequences, value.size(1), query.size(3), value.size(3))).to(wide)
    before = state.clone()

    def right(result):
        if "cu_seqlens" not in options:
            wanted, _ = reference.linear_attention(*tensors, initial_state=before, **options)
            assert_close(result, wanted, atol=1e-4, rtol=1e-4)

    return "linear_attention_", in_order("linear_attention_", *tensors, state, **options), right


def linear_attention_backward(pick: Random) -> Call:
    tensors, options = recurrent_inputs(pick)
    out, state = torch.ops.attnpack.linear_attention(*tensors, **options)
    grads = [draw(*out.shape, dtype=out.dtype, seed=6), pick.choice([None, draw(*state.shape, dtype=out.dtype)])]

    def right(result):
        if "cu_seqlens" in options:
            return
        leaves = [x.detach().requires_grad_() for x in tensors]
        check_gradients(reference.linear_attention(*leaves, **options), grads, leaves, result[:3])

    return "linear_attention_backward", in_order("linear_attention_backward", *grads, *tensors, **options), right


def conv_inputs(pick: Random) -> tuple[list, dict]:
    """The tensors of a causal convolution, and some of its options."""
    batch, length, channels, taps = pick.randint(0, 3), pick.randint(0, 150), pick.randint(0, 40), pick.randint(1, 6)
    dtype, packed = pick.choice(WIDE), pick.random() < 0.2
    batch = 1 if packed else batch
    sequences = 2 if packed else batch
    options = {"bias": draw(channels, dtype=dtype, seed=3),
               "initial_state": draw(sequences, channels, taps - 1, dtype=dtype, seed=4), "silu": True}  # fmt: skip
    options = {name: x for name, x in options.items() if pick.random() < 0.6}
    if packed:
        options["cu_seqlens"] = torch.tensor([0, length // 3, length])
    elif pick.random() < 0.3:
        options["kv_lens"] = torch.tensor([pick.randint(0, length) for _ in range(batch)], dtype=torch.int32)
    x = draw(batch, length, channels, dtype=dtype, seed=1)
    x = x.mT.contiguous().mT if pick.random() < 0.3 else x
    return [x, draw(channels, taps, dtype=dtype, seed=2)], options


def convolved(tensors: list, options: dict) -> tuple:
    named = {name: value for name, value in options.items() if name != "silu"}
    return reference.causal_conv1d(*tensors, activation="silu" if "silu" in options else None, **named)


def causal_conv1d(pick: Random) -> Call:
    tensors, options = conv_inputs(pick)

    def right(result):
        if "cu_seqlens" not in options and tensors[0].size(0):
            for got, expected in zip(result, convolved(tensors, options), strict=True):
                assert_close(got, expected, atol=1e-4, rtol=1e-4)

    return "causal_conv1d", in_order("causal_conv1d", *tensors, **options), right


def causal_conv1d_backward(pick: Random) -> Call:
    tensors, options = conv_inputs(pick)
    out, state = torch.ops.attnpack.causal_conv1d(*tensors, **options)
    grads = [draw(*out.shape, dtype=out.dtype, seed=6), pick.choice([None, draw(*state.shape, dtype=out.dtype)])]

    def right(result):
        if "cu_seqlens" in options or not tensors[0].size(0):
            return
        leaves = [x.detach().requires_grad_() for x in tensors]
        check_gradients(convolved(leaves, options), grads, leaves, result[:2])

    return "causal_conv1d_backward", in_order("causal_conv1d_backward", *grads, *tensors, **options), right


def add_rms_norm(pick: Random) -> Call:
    dtype = pick.choice(WIDE)
    rows = pick.randint(0, 5)
    x, added = (draw(rows, 9, dtype=dtype, seed=n) for n in range(2))
    weight = draw(9, dtype=dtype, seed=3)

    def right(result):
        assert_close(result[0], x + added)
        assert_close(result[1], F.rms_norm(x + added, (9,), weight, 1e-5))

    return "add_rms_norm", [x, added, weight, 1e-5], right


def swiglu(pick: Random) -> Call:
    rows, dtype = pick.randint(0, 5), pick.choice(WIDE)
    gate, up = draw(rows, 9, dtype=dtype), draw(1, 9, dtype=dtype, seed=1).expand(rows, 9)
    return "swiglu", [gate, up], lambda result: assert_close(result, F.silu(gate) * up)


def rms_norm(pick: Random) -> Call:
    x, weight = draw(pick.randint(0, 5), 9, dtype=pick.choice(WIDE)), draw(9, seed=1)
    weight = weight.to(x.dtype)
    return "rms_norm", [x, weight, 1e-5], lambda result: assert_close(result, F.rms_norm(x, (9,), weight, 1e-5))


def attention_quantized(pick: Random) -> Call:
    inputs, bits = layer(pick, dtype=pick.choice(WIDE)), pick.choice([4, 8])
    rows = [attnpack.ops.quantize_rows(x, bits) for x in (inputs.key, inputs.value)]
    held = [attnpack.ops.dequantize_rows(x, bits, like.size(-1), like.dtype)
            for x, like in zip(rows, (inputs.key, inputs.value), strict=True)]  # fmt: skip

    def right(result):
        settings = inputs.settings
        expected = reference.attention(inputs.query, *held, inputs.mask, **settings)
        assert_close(result[0], expected, atol=1e-3, rtol=1e-3)

    v_dim = inputs.value.size(-1)
    arguments = in_order("attention_quantized", inputs.query, *rows, bits, v_dim, **op_settings(inputs))
    return "attention_quantized", arguments, right


def dequantize_rows(pick: Random) -> Call:
    x, bits, dtype = draw(2, pick.randint(0, 5), pick.randint(1, 70)), pick.choice([4, 8]), pick.choice(DTYPES)

    def right(back):
        assert back.dtype == dtype
        assert back.shape == x.shape

    return "dequantize_rows", [attnpack.ops.quantize_rows(x, bits), bits, x.size(-1), dtype], right


def quantize_rows(pick: Random) -> Call:
    x, bits = draw(2, pick.randint(0, 5), pick.randint(1, 70), dtype=pick.choice(WIDE)), pick.choice([4, 8])

    def right(rows):
        back = attnpack.ops.dequantize_rows(rows, bits, x.size(-1), torch.float64)
        if x.numel():
            assert ((back - x).norm() <= 0.3 * x.double().norm()).item()

    return "quantize_rows", [x, bits], right


def merge_states(pick: Random) -> Call:
    states = [draw(2, 3, 4, *width, seed=n) for n, width in enumerate([(5,), (), (5,), ()])]

    def right(result):
        for got, expected in zip(result, reference.merge_states(*states), strict=True):
            assert_close(got, expected)

    return "merge_states", states, right


def scale_queries(pick: Random) -> Call:
    batch, heads, length = (pick.randint(0, 3) for _ in range(3))
    packed, dtype = pick.random() < 0.3, pick.choice(DTYPES)
    query = draw(length, heads, 6, dtype=dtype) if packed else draw(batch, heads, length, 6, dtype=dtype)
    scale = draw(*([length] if packed else pick.choice([[length], [batch, length]])), dtype=pick.choice(DTYPES), seed=1)
    shape = (length, 1, 1) if packed else (batch, 1, length, 1) if scale.dim() == 2 else (length, 1)

    def right(result):
        assert result.dtype == dtype
        assert_close(result.double(), query.double() * scale.double().view(shape), atol=2e-2, rtol=1e-2)

    return "scale_queries", [query, scale], right


def query_factors(pick: Random) -> Call:
    counted = torch.tensor([pick.randint(0, 99) for _ in range(pick.randint(0, 4))], dtype=torch.int64)
    given = pick.choice([None, counted + 7])
    size, growth = pick.choice([1.0, 8.0]), pick.choice([0.1, 1.0])
    if pick.random() < 0.5:
        places, numbers = counted + 1, {"type": "llama4", "floor_scale": size, "attn_scale": growth}
    else:
        numbers = {"type": "log", "original_max_position_embeddings": size, "llama_4_scaling_beta": growth}
        places = counted if given is None else given

    def right(result):
        assert_close(result, 1 + growth * (1 + (places / size).floor()).log())

    return "query_factors", in_order("query_factors", counted, given, 1, **numbers), right


def null(pick: Random) -> Call:
    x = draw(*[pick.randint(0, 3) for _ in range(pick.randint(0, 3))])
    return "null", [x], lambda result: assert_close(result, x)


MAKERS: list[Callable[[Random], Call]] = [
    attention, attention_backward, attention_varlen, attention_paged, attention_varlen_backward, attention_scores,
    append, append_paged, lambda pick: append(pick, rotated=True), cache_rule, paged_rule, kv_window, new_cache,
    static_cache, sliding_window_cache, quantized_cache, paged_cache, attend, attend_quantized, latent, latent_expand,
    latent_steps, apply_rope, rope_table, linear, linear_attention, linear_attention_in_place,
    linear_attention_backward, causal_conv1d, causal_conv1d_backward, rms_norm, add_rms_norm, swiglu, quantize_rows,
    dequantize_rows, attention_quantized, merge_states, scale_queries, query_factors, null, *layer_calls.MAKERS,
    *entry_calls.MAKERS,
    *newer_calls.MAKERS,
]  # fmt: skip
