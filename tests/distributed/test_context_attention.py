"""Attention over a sequence that 2 or 4 processes hold: numbers and gradients of one process, and the bytes sent."""

import re

import attnpack
import attnpack.distributed as parallel
import pytest
import torch
import torch.distributed as dist
from marks import long
from op_cases import draw
from ranks import run_checks, unequal
from wire import CountedBytes

METHODS = ["allgather", "ulysses", "ring"]
LAYOUTS = ["contiguous", "zigzag"]
BATCH, LENGTH, DIM, V_DIM = 2, 48, 8, 6
HEADS = {"grouped": (8, 2, None), "one kv head": (6, 1, None), "each its own": (4, 4, None)}
HEADS |= {"uneven": (5, 3, [2, 0, 0, 1, 2]), "fewer than ranks": (3, 3, None)}
RULES = {
    "causal": {"causal": True},
    "all keys": {},
    "window": {"causal": True, "window": (9, 0)},
    "window to the right": {"window": (3, 14)},
    "soft cap": {"causal": True, "softcap": 1.5},
    "sinks": {"causal": True, "sinks": True},
    "sinks, lengths": {"sinks": True, "kv_lens": torch.tensor([5, 41])},
    "alibi": {"causal": True, "alibi_slopes": True, "scale": 0.7},
    "lengths": {"causal": True, "kv_lens": torch.tensor([48, 13], dtype=torch.int32)},
    "no keys": {"kv_lens": torch.tensor([0, 29])},
    "query scale": {"causal": True, "query_scale": True},
    "all at once": {"causal": True, "window": (20, 0), "softcap": 2.0, "sinks": True, "alibi_slopes": True,
                    "query_scale": True,
                    "kv_lens": torch.tensor([33, 48])},
}  # fmt: skip


def tensors(num_heads, num_kv_heads, dtype, kv_len=LENGTH):
    shapes = [(num_heads, LENGTH, DIM), (num_kv_heads, kv_len, DIM), (num_kv_heads, kv_len, V_DIM)]
    shapes += [(num_heads, LENGTH, V_DIM), (num_heads, LENGTH)]  # gradients of out and lse
    return [draw(BATCH, *shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def settings(rules, num_heads, head_map, dtype):
    chosen = dict(rules)
    if chosen.get("sinks"):
        chosen["sinks"] = draw(num_heads, dtype=dtype).requires_grad_()
    if chosen.get("alibi_slopes"):
        chosen["alibi_slopes"] = torch.tensor(attnpack.ops.alibi_slopes(num_heads), dtype=dtype)
    if chosen.get("query_scale"):
        chosen["query_scale"] = (1 + draw(BATCH, LENGTH, dtype=dtype) / 4).requires_grad_()
    return chosen | ({} if head_map is None else {"head_map": head_map})


def results(attention, query, key, value, grad_out, grad_lse, **chosen):
    """out, lse and the gradients; lse counts where it is finite."""
    inputs = [x.clone().requires_grad_() for x in (query, key, value)]
    out, lse = attention(*inputs, **chosen, return_lse=True)
    weight = torch.where(lse.isfinite(), grad_lse.to(lse.dtype), 0)
    ((out * grad_out).sum() + (torch.where(lse.isfinite(), lse, 0) * weight).sum()).backward()
    sinks, factors = chosen.get("sinks"), chosen.get("query_scale")
    rows = [] if factors is None else [factors.grad.unsqueeze(1)]  # [B, 1, Lq]
    return [out.detach(), lse.detach(), *(x.grad for x in inputs), *rows], None if sinks is None else sinks.grad


def distance(got, wanted):
    assert got.shape == wanted.shape
    got, wanted = (torch.where(x.isfinite(), x, 1e3).double() for x in (got, wanted))
    return float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1)) if wanted.numel() else 0.0


def compare(method, layout, rules, heads, kv_len=LENGTH, dtype=torch.float32):
    """Largest distance from one process in float64, over out, lse and all gradients."""
    num_heads, num_kv_heads, head_map = heads
    exact = tensors(num_heads, num_kv_heads, torch.float64, kv_len)
    wanted, wanted_sinks = results(attnpack.attention, *exact, **settings(rules, num_heads, head_map, torch.float64))
    own = [parallel.shard_sequence(x.to(dtype), dim=2, layout=layout) for x in exact]
    chosen = settings(rules, num_heads, head_map, dtype)
    if "query_scale" in chosen:
        part = parallel.shard_sequence(chosen["query_scale"].detach(), dim=1, layout=layout)
        chosen["query_scale"] = part.requires_grad_()
    got, got_sinks = results(parallel.attention, *own, **chosen, method=method, layout=layout)
    parts = [parallel.shard_sequence(x, dim=2, layout=layout) for x in wanted]
    distances = [distance(a, b) for a, b in zip(got, parts, strict=True)]
    if wanted_sinks is not None:
        dist.all_reduce(got_sinks)
        distances.append(distance(got_sinks, wanted_sinks))
    return max(distances)


def grid():
    for method in METHODS:
        for layout in LAYOUTS:
            for name, rules in RULES.items():
                yield f"{method}, {layout}, {name}", (method, layout, rules, HEADS["grouped"])
            for name, heads in HEADS.items():
                yield f"{method}, {layout}, {name}", (method, layout, RULES["causal"], heads)
            yield f"{method}, {layout}, other length", (method, layout, RULES["lengths"], HEADS["grouped"], 64)


def sent(method, heads, kv_heads, dtype=torch.float32):
    """(bytes sent in forward, in backward) by this rank, beside the check of the arguments."""
    query, key, value, grad, _ = tensors(heads, kv_heads, dtype)
    own = [parallel.shard_sequence(x, dim=2).requires_grad_() for x in (query, key, value)]
    with CountedBytes() as forward:
        out = parallel.attention(*own, method=method, causal=True)
    with CountedBytes() as backward:
        out.backward(parallel.shard_sequence(grad, dim=2))
    return forward.sent, backward.sent


def refused(**wrong):
    query, key, value, *_ = (parallel.shard_sequence(x, dim=2) for x in tensors(4, 2, torch.float32))
    with CountedBytes() as wire:
        try:
            parallel.attention(**{"query": query, "key": key, "value": value} | wrong)
        except (ValueError, TypeError) as error:
            return str(error), wire.collectives
    return "no error", wire.collectives


def refused_in_a_graph(**wrong):
    """The error of a compiled call."""
    query, key, value, *_ = (parallel.shard_sequence(x, dim=2) for x in tensors(4, 2, torch.float32))
    call = torch.compile(lambda *heads: parallel.attention(*heads, **wrong), backend="eager")
    try:
        call(query, key, value)
    except (ValueError, TypeError) as error:
        return str(error)
    return "no error"


def differing(name):
    """The error where rank 1 gives other arguments than rank 0."""
    query, key, value, *_ = (parallel.shard_sequence(x, dim=2) for x in tensors(4, 2, torch.float32))
    other = dist.get_rank() == 1
    if name == "length" and other:
        query, key, value = (x[:, :, :-2] for x in (query, key, value))
    if name == "kv heads" and other:
        key, value = key[:, :1], value[:, :1]
    if name == "width" and other:
        key = key[..., :-1]
    if name == "gradient":
        query.requires_grad_(other)
    lens = torch.tensor([40, 40 - other])
    rules = {"causal": other if name == "causal" else True, "kv_lens": lens * (name == "lens")}
    if name == "query scale":
        rules["query_scale"] = torch.ones(query.size(2) + other)
    parallel.attention(query, key, value, **rules)


def without_rows(method):
    query = torch.zeros(2, 4, 0, 8, requires_grad=True)
    out = parallel.attention(query, query[:, :2], query[:, :2], method=method)
    out.sum().backward()
    return 0.0 if out.shape == query.grad.shape == (2, 4, 0, 8) else 1.0


def round_trip():
    x, found = draw(2, 16, 3), []
    for layout in LAYOUTS:
        leaf = x.clone().requires_grad_()
        whole = parallel.unshard_sequence(parallel.shard_sequence(leaf, layout=layout), layout=layout)
        (whole * x).sum().backward()
        dist.all_reduce(leaf.grad)
        found.append((torch.equal(whole, x), torch.equal(leaf.grad, x)))
    return found


def half_precision(method):
    return compare(method, "zigzag", RULES["all at once"], HEADS["grouped"], dtype=torch.bfloat16)


WRONG = {
    "mask": {"mask": torch.ones(1, 1, 8, 8)},
    "dropout_p": {"dropout_p": 0.1},
    "q_offset": {"q_offset": 3},
    "chunk": {"chunk": 8},
    "method": {"method": "star"},
    "layout": {"layout": "striped"},
    "group": {"group": 3},
    "window": {"window": None},
    "key": {"key": None},
    "query": {"query": torch.nested.nested_tensor([torch.zeros(2, 3)], layout=torch.jagged)},
}
IN_A_GRAPH = {
    r"attention\(\) got an unexpected keyword argument 'is_causal'": {"is_causal": True},
    "mask: got a tensor .* not supported over several processes": {"mask": torch.ones(1, 1, 8, 8)},
    "chunk: got 8, which is not supported over several processes": {"chunk": 8},
}
DIFFERENT = ["length", "kv heads", "width", "gradient", "causal", "lens", "query scale"]


def program(only=None):
    checks = {name: (lambda case=case: compare(*case)) for name, case in grid()}
    checks |= {f"bytes {m} {h}": (lambda m=m, h=h: sent(m, *h)) for m in METHODS for h in ((8, 2), (8, 1), (8, 8))}
    checks |= {f"wrong {name}": (lambda wrong=wrong: refused(**wrong)) for name, wrong in WRONG.items()}
    checks |= {f"graph {name}": (lambda wrong=wrong: refused_in_a_graph(**wrong)) for name, wrong in IN_A_GRAPH.items()}
    checks |= {f"differing {name}": (lambda name=name: differing(name)) for name in DIFFERENT}
    checks |= {f"bf16 {method}": (lambda method=method: half_precision(method)) for method in METHODS}
    checks |= {f"no rows {method}": (lambda method=method: without_rows(method)) for method in METHODS}
    checks["round trip"] = round_trip
    return run_checks({name: check for name, check in checks.items() if only is None or name in only})


@pytest.fixture(scope="module", params=["two_ranks", long("four_ranks")])
def outcomes(request):
    return request.getfixturevalue(request.param).run(program)


@pytest.mark.parametrize("method", METHODS)
def test_parts_give_the_numbers_and_gradients_of_one_process(outcomes, method):
    names = [name for name, _ in grid() if name.startswith(method)]
    assert len(names) == 2 * (len(RULES) + len(HEADS) + 1)
    assert not unequal(outcomes, names)


def test_a_sequence_may_be_empty(outcomes):
    assert not unequal(outcomes, [f"no rows {method}" for method in METHODS])


def test_half_precision_is_as_near_as_one_process(outcomes):
    assert not unequal(outcomes, [f"bf16 {method}" for method in METHODS], 0.02)


def test_keys_travel_with_as_many_heads_as_they_have(outcomes):
    """Numbers of float32 that a rank sends, in forward and backward, where it has n positions."""
    ranks = len(outcomes)
    n = LENGTH // ranks
    for heads, kv_heads in ((8, 2), (8, 1), (8, 8)):
        kv = BATCH * kv_heads * n * (DIM + V_DIM) * 4
        for rank in outcomes:
            assert rank[f"bytes allgather {(heads, kv_heads)}"] == ((ranks - 1) * kv, (ranks - 1) * kv)
            assert rank[f"bytes ring {(heads, kv_heads)}"] == ((ranks - 1) * kv, (2 * ranks - 1) * kv)
        away = BATCH * n * 4 * (ranks - 1)  # numbers for one head of every other rank
        share, read = heads // ranks, max(kv_heads // ranks, 1)
        there = away * (share * DIM + read * (DIM + V_DIM))
        back = away * share * (V_DIM + 1)  # out and lse
        for rank in outcomes:
            assert rank[f"bytes ulysses {(heads, kv_heads)}"] == (there + back, there + back - away * share)


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_done_is_refused_before_anything_is_sent(outcomes, name):
    for rank in outcomes:
        message, collectives = rank[f"wrong {name}"]
        assert re.match(f"attnpack: {name}: got|attnpack: {name} is ", message) and collectives == (name == "window")


@pytest.mark.parametrize("message", IN_A_GRAPH)
def test_a_graph_refuses_the_same(outcomes, message):
    assert all(re.search(f"attnpack: {message}", rank[f"graph {message}"]) for rank in outcomes)


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_differ_are_told_so(outcomes, name):
    for rank in outcomes:
        assert re.match(r"ValueError: attnpack: the ranks .* rank 0 has .*, rank 1 has ", rank[f"differing {name}"])


def test_a_sequence_comes_back(outcomes):
    assert all(rank["round trip"] == [(True, True), (True, True)] for rank in outcomes)


FEW = [f"{method}, zigzag, {name}" for method in METHODS for name in ("all at once", "one kv head", "uneven")]


def test_four_ranks_give_the_numbers_of_one_process(four_ranks):
    """Some cases; all of them are marked long."""
    assert not unequal(four_ranks.run(program, FEW), FEW)
