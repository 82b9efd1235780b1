"""DTensors through the ops, forward and backward: the numbers of plain tensors, wherever the shares lie."""

import copy
import itertools
import re

import attnpack
import attnpack.distributed  # noqa: F401 (registers the rules)
import pytest
import torch
import torch.distributed as dist
from attnpack import ops
from marks import long
from op_cases import draw
from ranks import run_checks, unequal
from shared_modules import MODELS, WIDTH, block, distance, grouped, latent, made
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

R, BATCH, HEADS, ROWS = Replicate(), Shard(0), Shard(1), Shard(2)
OPS = torch.ops.attnpack


def over(mesh, x, *placements):
    """x as a DTensor; the last dims of the mesh that are not named hold it whole."""
    placements = [*placements, *[R] * (mesh.ndim - len(placements))]
    return distribute_tensor(x.detach().clone(), mesh, placements).requires_grad_(x.requires_grad)


def leaves(*shapes):
    return [draw(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def compare(call, plain, shared, keeps=None):
    """Largest distance of outputs and gradients of call(*shared) from those of call(*plain)."""
    outs, shared_outs = ([x for x in _listed(call(*given))] for given in (plain, shared))
    upstream = [draw(*out.shape, seed=9 + i) for i, out in enumerate(outs)]
    pairs = list(zip(outs, shared_outs, strict=True))
    if any(out.requires_grad for out in outs):
        torch.autograd.backward(outs, upstream)
        mesh = shared_outs[0].device_mesh
        torch.autograd.backward(shared_outs, [over(mesh, x) for x in upstream])
        wanting = [
            (x, y) for x, y in zip(plain, shared, strict=True) if isinstance(x, torch.Tensor) and x.requires_grad
        ]
        pairs += [(x.grad, y.grad) for x, y in wanting]
    assert all(isinstance(y, DTensor) for _, y in pairs)
    if keeps is not None:
        assert shared_outs[0].placements[-1] == keeps, shared_outs[0].placements
    return max(float((x - y.full_tensor()).detach().abs().max()) for x, y in pairs)


def _listed(result):
    return result if isinstance(result, list | tuple) else [result]


def attend(mesh, q_place, kv_place, kv_heads=4, mask=None, keeps=None, **settings):
    """With sinks, and a mask of that shape, both replicated."""
    shapes = [(4, 8, 6, 8), (4, kv_heads, 6, 8), (4, kv_heads, 6, 5), (8,), *([] if mask is None else [mask])]
    plain = leaves(*shapes)
    places = [q_place, kv_place, kv_place, [], []]
    shared = [over(mesh, x, *place) for x, place in zip(plain, places, strict=False)]

    def call(query, key, value, sinks, mask=None):
        return attnpack.attention(query, key, value, mask, sinks=sinks, causal=True, return_lse=True, **settings)

    return compare(call, plain, shared, keeps)


def lengths(mesh):
    plain = leaves((4, 8, 6, 8), (4, 4, 6, 8), (4, 4, 6, 8))
    lens, slopes = torch.tensor([6, 2, 0, 5]), torch.tensor(ops.alibi_slopes(8))
    mixed = [*plain, lens, slopes]

    def call(query, key, value, lens, slopes):
        offsets = (
            torch.tensor([0, 1, 0, 3]) if not isinstance(lens, DTensor) else over(mesh, torch.tensor([0, 1, 0, 3]))
        )
        return attnpack.attention(query, key, value, kv_lens=lens, q_offset=offsets, alibi_slopes=slopes, causal=True)

    shared = [*(over(mesh, x, BATCH) for x in plain), over(mesh, lens), over(mesh, slopes)]
    return compare(call, mixed, shared)


def named(mesh, place, heads, block, where):
    """Keys that the rows name, for all kv heads or for each, replicated or where the queries are."""
    plain = leaves((4, 8, 6, 8), (4, 4, 6, 8), (4, 4, 6, 5))
    index = torch.stack([(torch.arange(4 * heads * 6).view(4, heads, 6) * n) % (6 // block) for n in (1, 5)], -1)
    shared = [over(mesh, x, place) for x in plain] + [over(mesh, index, where)]
    return compare(
        lambda q, k, v, index: attnpack.attention(q, k, v, causal=True, key_index=index, key_block=block),
        [*plain, index], shared, place if mesh.ndim == 1 else None,
    )  # fmt: skip


def twice(mesh):
    """Shares of the batch on one dim of the mesh, of the heads on the other one."""
    return max(attend(mesh, [BATCH, HEADS], [BATCH, HEADS], keeps=HEADS), attend(mesh, [BATCH, HEADS], [BATCH], 1))


def odd_heads(mesh):
    """6 heads on 4 ranks: never 2, 2, 1, 1. 6 query heads of 3 kv heads on 2 ranks: never 3, 3 and 2, 1."""
    worst = 0.0
    for kv_heads in (6, 3):
        plain = leaves((1, 6, 4, 8), (1, kv_heads, 4, 8), (1, kv_heads, 4, 8))
        shared = [over(mesh, x, *[HEADS] * mesh.ndim) for x in plain]
        worst = max(worst, compare(lambda q, k, v: attnpack.attention(q, k, v, causal=True), plain, shared))
    return worst


def rows(mesh, call, shapes, places):
    plain = leaves(*shapes)
    return compare(call, plain, [over(mesh, x, *place) for x, place in zip(plain, places, strict=True)])


def rope(mesh, place):
    cos, sin = ops.rope_table(torch.arange(6), [1.0, 0.3, 0.1])
    (x,) = leaves((4, 4, 6, 8))
    inputs = [x, cos, sin], [over(mesh, x, place), over(mesh, cos), over(mesh, sin)]
    return compare(lambda x, cos, sin: ops.apply_rope(x, cos, sin), *inputs)


def append(mesh, place, rotated):
    """Two appends into a cache whose shares lie as `place` says."""
    cache = [torch.zeros(4, 4, 9, 6), torch.zeros(4, 4, 9, 6), torch.tensor([0, 3, 1, 0])]
    query, key, value = (draw(4, 4, 2, 6, seed=i) for i in range(3))
    held = [over(mesh, x, place) for x in cache[:2]] + [over(mesh, cache[2], BATCH if place == BATCH else R)]
    new = [over(mesh, x, place) for x in (query, key, value)]
    found = []
    for tensors, (q, k, v) in ((cache, (query, key, value)), (held, new)):
        for _ in range(2):
            if rotated:
                found.append(OPS.kv_cache_append_rotated_(*tensors, q, k, v, [1.0, 0.1], 1.0, False, None, None))
            else:
                OPS.kv_cache_append_(*tensors, k, v, None, None)
    pairs = [*zip(cache, held, strict=True), *zip(found[:2], found[2:], strict=True)]
    return max(float((x - y.full_tensor()).abs().max()) for x, y in pairs)


def append_elsewhere(mesh):
    cache = (
        over(mesh, torch.zeros(4, 4, 9, 6), HEADS),
        over(mesh, torch.zeros(4, 4, 9, 6)),
        over(mesh, torch.zeros(4).long()),
    )
    key = over(mesh, draw(4, 4, 2, 6))
    OPS.kv_cache_append_(*cache, key, key, None, None)


def compiled(mesh):
    plain = leaves((4, 8, 6, 8), (4, 4, 6, 8), (4, 4, 6, 8))
    shared = [over(mesh, x, HEADS) for x in plain]
    traced = torch.compile(
        lambda q, k, v: attnpack.attention(q, k, v, causal=True) * 2, fullgraph=True, backend="aot_eager"
    )
    return compare(traced, plain, shared, HEADS if mesh.ndim == 1 else None)


MODULES = {
    "grouped": grouped,
    "settings": lambda: grouped(4, alibi=True, sinks=True, qk_norm=True, window=(4, 0)),
    "latent": latent,
    "absorbed": lambda: latent(path="absorbed"),
    "block": lambda: block(grouped(4)),
    **{name: MODELS[name] for name in ("model", "latent model")},
}
SPLIT = dict.fromkeys(["q_proj", "k_proj", "v_proj", "kv_b_proj", "gate_proj", "up_proj"], 0)
SPLIT |= {"o_proj": 1, "down_proj": 1}


def module(mesh, make):
    """A module whose parameters and inputs are DTensors, with and without gradients."""

    def share(name, child, mesh):
        for own, parameter in list(child.named_parameters(recurse=False)):
            dim = SPLIT.get(name.split(".")[-1])
            place = R if dim is None or (dim == 1 and own == "bias") else Shard(dim)
            places = [R] * (mesh.ndim - 1) + [place]
            setattr(child, own, torch.nn.Parameter(distribute_tensor(parameter.detach().clone(), mesh, places)))

    whole = made(make)
    shared = distribute_module(copy.deepcopy(whole), mesh, share)
    x = torch.arange(16).view(2, 8) % 5 if hasattr(whole, "lm_head") else draw(2, 8, WIDTH)
    with torch.no_grad():
        found = [distance(shared(over(mesh, x)), whole(x))]
    for net, given in ((whole, x), (shared, over(mesh, x))):
        net(given).square().sum().backward()
    pairs = zip(whole.parameters(), shared.parameters(), strict=True)
    return max(found[0], *(distance(b.grad, a.grad) for a, b in pairs))


def plan_of_dtensors(mesh):
    """torch's plan where the projections give DTensors."""
    layer = attnpack.GroupedQueryAttention(32, 8, 4, causal=True, rope=attnpack.RotaryEmbedding(4), bias=True)
    whole = copy.deepcopy(layer)
    plan = {f"{name}_proj": ColwiseParallel(use_local_output=False) for name in "qkv"}
    parallelize_module(layer, mesh, plan | {"o_proj": RowwiseParallel()})
    x = draw(2, 6, 32)
    outs = [net(x) for net in (whole, layer)]
    for out in outs:
        out.square().sum().backward()
    pairs = zip(whole.parameters(), layer.parameters(), strict=True)
    grads = [float((a.grad - b.grad.full_tensor()).abs().max()) for a, b in pairs]
    return max(float((outs[0] - outs[1]).detach().abs().max()), *grads)


def quantized(mesh, place):
    """Keys and values of 8 bits, whose rows have been quantised as DTensors too."""
    query, key, value = (draw(4, n, 6, 8, seed=n) for n in (8, 4, 4))

    def call(query, key, value):
        rows = [ops.quantize_rows(x, 8) for x in (key, value)]
        return OPS.attention_quantized(query, *rows, 8, 8, causal=True)

    plain = (query, key, value)
    return compare(call, plain, [over(mesh, x, place) for x in plain], place if mesh.ndim == 1 else None)


def checks(mesh):
    cases = {}
    for q, kv in itertools.product([R, BATCH, HEADS, ROWS], repeat=2):
        cases[f"attention {q}{kv}"] = lambda q=q, kv=kv: attend(mesh, [q], [kv])
    for q, kv in itertools.product([R, BATCH, HEADS], [R, BATCH]):
        cases[f"one kv head {q}{kv}"] = lambda q=q, kv=kv: attend(mesh, [q], [kv], 1)
    for shape in [(6, 6), (4, 1, 6, 6), (1, 8, 6, 6), (8, 6, 6), (1, 1, 6, 6)]:
        for place in (R, BATCH, HEADS):
            cases[f"mask {shape} {place}"] = lambda p=place, shape=shape: attend(
                mesh, [p], [p], mask=shape, window=(3, 0)
            )
    for place in (BATCH, HEADS):
        head_map = [0, 3, 1, 1, 2, 0, 0, 3]
        cases[f"head map {place}"] = lambda place=place, m=head_map: attend(mesh, [place], [place], head_map=m)
        for heads, size in ((1, 1), (4, 2)):
            for where in (R, BATCH) if heads == 1 else (R, place):
                cases[f"named {heads} {place} {where}"] = lambda p=place, h=heads, b=size, w=where: named(
                    mesh, p, h, b, w
                )
        cases[f"quantized {place}"] = lambda place=place: quantized(mesh, place)
        cases[f"rope {place}"] = lambda place=place: rope(mesh, place)
        for rotated in (False, True):
            cases[f"append {place} {rotated}"] = lambda place=place, rotated=rotated: append(mesh, place, rotated)
    cases |= {"lengths": lambda: lengths(mesh), "odd heads": lambda: odd_heads(mesh)}
    for name, make in MODULES.items():
        cases[f"module {name}"] = lambda make=make: module(mesh, make)
    cases["compiled"] = lambda: compiled(mesh)
    if mesh.ndim == 2:
        few = ("attention S(0)R", "attention S(1)S(1)", "lengths", "odd heads", "module block", "append S(1) True")
        return {name: cases[name] for name in few} | {"two dims": lambda: twice(mesh)}
    for name, call, shapes, places in (
        ("rms_norm", lambda x, w: ops.rms_norm(x, w, 1e-6), [(4, 6, 8), (8,)], [[BATCH], []]),
        ("rms_norm, rows", lambda x, w: ops.rms_norm(x, w, 1e-6), [(4, 6, 8), (8,)], [[HEADS], []]),
        (
            "add_rms_norm",
            lambda x, y, w: ops.add_rms_norm(x, y, w, 1e-6),
            [(4, 6, 8), (4, 6, 8), (8,)],
            [[BATCH], [BATCH], []],
        ),
        ("swiglu", ops.swiglu, [(4, 6, 8), (4, 6, 8)], [[ROWS], [ROWS]]),
        ("linear, columns", ops.linear, [(4, 6, 8), (12, 8), (12,)], [[], [BATCH], [BATCH]]),
        ("linear, rows", lambda x, w: ops.linear(x, w), [(4, 6, 8), (12, 8)], [[ROWS], [HEADS]]),
        ("linears", lambda x, a, b: ops.linears(x, [a, b]), [(4, 6, 8), (12, 8), (4, 8)], [[BATCH], [], []]),
        ("merge_states", ops.merge_states, [(4, 4, 6, 8), (4, 4, 6)] * 2, [[HEADS]] * 4),
        ("linear_attention, batch", recurrent, RECURRENT, [[BATCH]] * 5),
        ("linear_attention, heads", recurrent, RECURRENT, [[HEADS], [], [HEADS], [HEADS], []]),
        ("causal_conv1d, batch", convolve, CONVOLVED, [[BATCH], [], [], [BATCH]]),
        ("causal_conv1d, channels", convolve, CONVOLVED, [[ROWS], [BATCH], [], []]),
    ):
        cases[name] = lambda call=call, shapes=shapes, places=places: rows(mesh, call, shapes, places)

    def varlen(q, k, v, sinks):
        ends = torch.tensor([0, 4, 9], dtype=torch.int32)
        ends = over(mesh, ends) if isinstance(q, DTensor) else ends
        return attnpack.attention_varlen(q, k, v, ends, causal=True, sinks=sinks, return_lse=True)

    shapes = [(9, 8, 8), (9, 4, 8), (9, 4, 6), (8,)]
    cases["varlen"] = lambda: rows(mesh, varlen, shapes, [[HEADS]] * 3 + [[]])
    cases["varlen, rows"] = lambda: rows(mesh, varlen, shapes, [[BATCH], [HEADS], [], []])
    cases["plan"] = lambda: plan_of_dtensors(mesh)
    with_dropout = {"dropout_p": 0.5}
    cases["dropout"] = lambda: attend_with_dropout(mesh, with_dropout)
    cases["dropout, other generators"] = lambda: dropout_of_each_rank(mesh)
    return cases | {"append elsewhere": lambda: append_elsewhere(mesh)}


RECURRENT = [(4, 4, 6, 8), (4, 4, 6, 8), (4, 8, 6, 5), (4, 8, 6), (4, 8, 6)]


def recurrent(query, key, value, decay, beta):
    return attnpack.linear_attention(
        query, key, value, log_decay=-decay.square(), beta=beta.sigmoid(), return_state=True
    )


CONVOLVED = [(4, 6, 8), (8, 3), (8,), (4, 8, 2)]


def convolve(x, weight, bias, state):
    return attnpack.causal_conv1d(x, weight, bias, activation="silu", initial_state=state, return_state=True)


def attend_with_dropout(mesh, settings):
    """torch's generator stands at the same place before both calls."""
    plain = leaves((4, 8, 6, 8), (4, 4, 6, 8), (4, 4, 6, 8))

    def call(*heads):
        torch.manual_seed(3)
        seed = torch.tensor([5])
        seed = over(mesh, seed) if isinstance(heads[0], DTensor) else seed
        return OPS.attention(*heads, causal=True, dropout_seed=seed, **settings)[0]

    return compare(call, plain, [over(mesh, x, HEADS) for x in plain])


def dropout_of_each_rank(mesh):
    """Each rank's generator stands elsewhere, and yet all draw the same."""
    torch.manual_seed(dist.get_rank())
    query, key, value = (over(mesh, x) for x in leaves((1, 4, 6, 8), (1, 4, 6, 8), (1, 4, 6, 8)))
    out = attnpack.attention(query, key, value, dropout_p=0.5)
    out.sum().backward()
    found = []
    for x in (out, query.grad):
        mine = x.to_local().detach().contiguous()
        of_all = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(of_all, mine)
        found.append(max(float((mine - other).abs().max()) for other in of_all))
    return max(found)


def program(shape):
    mesh = init_device_mesh("cpu", shape)
    assert Partial() and dist.get_world_size() == mesh.size()
    return run_checks(checks(mesh))


@pytest.fixture(scope="module", params=["two_ranks", long("four_ranks")])
def outcomes(request):
    return request.getfixturevalue(request.param).run(program, (2,) if request.param == "two_ranks" else (2, 2))


def test_shares_give_the_numbers_and_gradients_of_plain_tensors(outcomes):
    names = [name for name in outcomes[0] if name != "append elsewhere"]
    assert names and not unequal(outcomes, names)


def test_a_cache_whose_tensors_lie_differently_is_refused(outcomes):
    for rank in outcomes if len(outcomes) == 2 else ():
        assert re.search("attnpack: .*kv_cache_append_.* want all of them replicated", rank["append elsewhere"])
