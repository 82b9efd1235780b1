"""Modules over a sequence, and caches, that 2 or 4 processes hold in parts: the numbers of one process."""

import contextlib
import copy
import pickle
import re

import attnpack
import pytest
import torch
import torch.distributed as dist
from attnpack.distributed import ShardedCache, context_parallel, shard_sequence, tensor_parallel, unshard_sequence
from marks import long
from op_cases import draw
from ranks import run_checks, unequal
from shared_modules import LATENT, MODELS, WIDTH, block, distance, grouped, latent, made
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from wire import CountedBytes

LENGTH = 16
WAYS = [("allgather", "contiguous"), ("allgather", "zigzag"), ("ulysses", "zigzag"), ("ring", "contiguous")]
WAYS += [("ring", "zigzag")]
MODULES = {
    "grouped": grouped,
    "all settings": lambda: grouped(2, sinks=True, alibi=True, qk_norm=True, softcap=1.5, window=(5, 0)),
    "head map": lambda: grouped(3, 8, head_map=[2, 2, 0, 1, 1, 0, 0, 2]),
    "latent": lambda: latent(q_lora_rank=9, bias=True),
    "latent, replaced": lambda: replaced(latent()),
    "folded": lambda: latent().fold(),
    "differential 1": lambda: differential(1),
    "differential 2": lambda: differential(2, window=(5, 0)),
    "block": lambda: block(grouped(1), cross_attention=grouped(2)),
    "encoder": lambda: attnpack.Encoder(
        [attnpack.EncoderBlock(grouped(causal=False), attnpack.FeedForward(WIDTH, 16)) for _ in range(2)]
    ),
}
CACHED = {
    "grouped": grouped,
    "softcap, sinks": lambda: grouped(2, sinks=True, softcap=1.5),
    "window": lambda: grouped(2, window=(5, 0)),
    "window, alibi": lambda: grouped(2, window=(7, 0), alibi=True, rope=None),
    "not causal": lambda: grouped(2, causal=False),
    "latent": latent,
    "latent, replaced": lambda: replaced(latent()),
    "folded": lambda: latent().fold(),
    "differential 1": lambda: differential(1),
    "differential 2": lambda: differential(2),
}


def differential(version, **settings):
    settings = {"version": version, "causal": True, "rope": attnpack.RotaryEmbedding(6)} | settings
    return attnpack.DifferentialAttention(WIDTH, 4, 2, head_dim=6, **settings)


def replaced(module):
    """Its kv_b_proj in a wrapper, as LoRA has it."""

    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    module.kv_b_proj = Wrapped(module.kv_b_proj)
    return module


def parts(x, layout):
    return x if x is None else shard_sequence(x, layout=layout)


def compare(make, method, layout, ids=None, **inputs):
    """Distance of outputs and of the gradients, added up over the ranks, from one process."""
    whole = made(make)
    spread = copy.deepcopy(whole)
    x = draw(2, LENGTH, WIDTH) if ids is None else ids
    context = draw(2, 8, WIDTH, seed=4) if getattr(whole, "has_cross_attention", False) else None
    upstream = draw(2, LENGTH, WIDTH if ids is None else whole.model.embed_tokens.num_embeddings, seed=5)
    given = [x] if context is None else [x, context]
    out = whole(*given, **inputs)
    (out * upstream).sum().backward()
    with context_parallel(method=method, layout=layout):
        own = spread(*(parts(each, layout) for each in given), **inputs)
        (own * parts(upstream, layout)).sum().backward()
    for parameter in spread.parameters():
        dist.all_reduce(parameter.grad)
    pairs = [
        (own, parts(out, layout)),
        *((b.grad, a.grad) for a, b in zip(whole.parameters(), spread.parameters(), strict=True)),
    ]
    return max(distance(*pair) for pair in pairs)


def with_lengths(make, method, layout):
    name = "kv_lens" if make is grouped else "lengths"
    ids = None if make is grouped else torch.arange(2 * LENGTH).view(2, LENGTH) % 5
    return compare(make, method, layout, ids, **{name: torch.tensor([LENGTH, 9])})


def poisoned_latents():
    """NaN in a context beyond its lengths reaches no gradient of kv_b_proj."""
    whole, lens = made(latent), torch.tensor([8, 3])
    spread, x, context = copy.deepcopy(whole), draw(2, LENGTH, WIDTH), draw(2, 8, WIDTH, seed=4)
    context[1, 3:] = float("nan")
    whole(x, context, kv_lens=lens).sum().backward()
    with context_parallel():
        spread(parts(x, "contiguous"), parts(context, "contiguous"), kv_lens=lens).sum().backward()
    got = spread.kv_b_proj.weight.grad
    dist.all_reduce(got)
    assert got.isfinite().all()
    return distance(got, whole.kv_b_proj.weight.grad)


def shared_both_ways():
    """Heads over one dim of a mesh, the sequence over the other one, with the gradients of all parameters."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("cp", "tp"))
    whole = made(MODELS["tied"])
    both = tensor_parallel(copy.deepcopy(whole), mesh["tp"])
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) % 5
    upstream = draw(2, LENGTH, 19, seed=5)
    out = whole(ids)
    (out * upstream).sum().backward()
    own_ids, own_upstream, own_out = (shard_sequence(x, mesh["cp"], layout="zigzag") for x in (ids, upstream, out))
    with context_parallel(mesh["cp"], method="ring", layout="zigzag"):
        got = both(own_ids)
        (got * own_upstream).sum().backward()
    for parameter in both.parameters():
        dist.all_reduce(parameter.grad.to_local(), group=mesh["cp"].get_group())
    pairs = zip(whole.parameters(), both.parameters(), strict=True)
    return max(distance(got, own_out), *(distance(b.grad, a.grad) for a, b in pairs))


def checkpointed(reentrant):
    """Activations that backward computes again, in the same context."""
    whole = made(lambda: block(grouped(2)))
    spread, x, upstream = copy.deepcopy(whole), draw(2, LENGTH, WIDTH), draw(2, LENGTH, WIDTH, seed=5)
    (whole(x) * upstream).sum().backward()
    own = parts(x, "zigzag").requires_grad_()
    with context_parallel(layout="zigzag"):
        out = torch.utils.checkpoint.checkpoint(spread, own, use_reentrant=reentrant)
        (out * parts(upstream, "zigzag")).sum().backward()
    for parameter in spread.parameters():
        dist.all_reduce(parameter.grad)
    return max(distance(b.grad, a.grad) for a, b in zip(whole.parameters(), spread.parameters(), strict=True))


LEARNED = {"hidden_dim": 20, "position_embedding": "learned", "max_positions": LENGTH}


def learned_positions(layout):
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) % 5
    return compare(lambda: attnpack.CausalLM(19, WIDTH, 2, 4, 2, **LEARNED), "allgather", layout, ids)


def overflow():
    """The first rank, which holds one more position than the others, has no room for it."""
    held = ShardedCache(attnpack.StaticCache(2, 4, 2, 6))
    with torch.no_grad():
        made(grouped)(draw(2, 2 * dist.get_world_size() + 1, WIDTH), cache=held)


def compiled(method):
    """One graph with its gradient, in the context and outside."""
    module, found = made(grouped), []
    traced = torch.compile(module, fullgraph=True, backend="aot_eager")
    whole = draw(2, LENGTH, WIDTH)
    for context in (context_parallel(method=method), contextlib.nullcontext()):
        with context:
            x = (whole if len(found) else parts(whole, "contiguous")).clone().requires_grad_()
            outs = module(x), traced(x)
            grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in outs]
        found += [distance(*outs), distance(*grads)]
    return max(found)


def latent_bytes():
    """Bytes that a rank sends for one layer of latent attention."""
    module = made(latent)
    with torch.no_grad(), context_parallel(), CountedBytes() as wire:
        module(parts(draw(2, LENGTH, WIDTH), "contiguous"))
    return wire.sent


@torch.no_grad()
def steps(make, ragged=False, lengths=(5, 1, 1, 3, 1)):
    """Calls with a ShardedCache, beside those with a plain one."""
    module, found = made(make), []
    is_latent = isinstance(module, attnpack.MultiHeadLatentAttention)
    plain = attnpack.LatentCache() if is_latent else attnpack.DynamicCache()
    held = ShardedCache(copy.deepcopy(plain))
    for step, x in enumerate(draw(3, sum(lengths), WIDTH).split(lengths, 1)):
        lens = torch.tensor([x.size(1), max(x.size(1) - 2, 1), 1]) if ragged and step < 4 else None
        outs = [module(x, cache=cache, kv_lens=lens) for cache in (plain, held)]
        if lens is not None:  # rows of padding are unspecified
            outs = [out * (torch.arange(x.size(1)) < lens.unsqueeze(1)).unsqueeze(-1) for out in outs]
        found.append(distance(outs[1], outs[0]))
        assert torch.equal(held.lengths, plain.lengths) and len(held) == len(plain)
    total = torch.tensor(held.nbytes)
    dist.all_reduce(total)
    assert ragged or total == plain.nbytes
    return max(found)


@torch.no_grad()
def changes():
    """crop, reorder, clone, a failed call, reset."""
    module, plain, held = made(grouped), attnpack.DynamicCache(), ShardedCache(attnpack.DynamicCache())
    x, found = draw(3, 9, WIDTH), []

    def call(x):
        found.append(distance(module(x, cache=held), module(x, cache=plain)))

    call(x)
    for cache in (plain, held):
        cache.crop(6)
        cache.reorder(torch.tensor([2, 0, 0, 1]))
    copied = held.clone()
    call(draw(4, 2, WIDTH))
    assert len(copied) == 6 and len(held) == 8 and "8 positions over" in repr(held)
    assert held.k.size(0) == held.v.size(0) == 4 and held.k.size(2) == len(held.inner)  # of this rank
    with pytest.raises(TypeError, match="a ShardedCache belongs to the processes of its group and cannot be pickled"):
        pickle.dumps(held)
    with pytest.raises(ValueError):
        module(draw(2, 2, WIDTH), cache=held)
    model_cache = attnpack.ModelCache([held])
    with pytest.raises(KeyError), model_cache.rollback_on_error():
        module(draw(4, 3, WIDTH), cache=held)
        raise KeyError
    call(draw(4, 1, WIDTH))
    held.reset(), plain.reset()
    call(draw(2, 3, WIDTH))
    return max(found)


def step_bytes():
    """Bytes that one step of decoding sends, whatever the cache holds."""
    module, held, sent = made(grouped), ShardedCache(attnpack.DynamicCache()), []
    for length in (5, 1, 30, 1):
        with CountedBytes() as wire, torch.no_grad():
            module(draw(1, length, WIDTH), cache=held)
        sent.append(wire.sent)
    return sent[1], sent[3]


def inferred():
    """In inference mode, by parts of the sequence and by shares of the heads."""
    whole, x = made(lambda: block(grouped(1))), draw(2, LENGTH, WIDTH)
    with torch.inference_mode():
        with context_parallel(method="ring"):
            got = whole(parts(x, "contiguous"))
        wanted = whole(x)
        found = distance(got, parts(wanted, "contiguous"))
    shared = tensor_parallel(copy.deepcopy(whole), init_device_mesh("cpu", (dist.get_world_size(),)))
    with torch.inference_mode():
        return max(found, distance(shared(x), wanted))


def in_bf16(method):
    """Under autocast, against one process under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return compare(grouped, method, "zigzag")


def generated_on_a_mesh():
    """A model shared over one dim of a mesh, its cache over the other one; each rank draws for itself."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("cache", "tensor"))
    whole, ids = made(MODELS["tied"]), torch.arange(12).view(2, 6) % 5
    model = tensor_parallel(copy.deepcopy(whole), mesh["tensor"])
    found = []
    for settings in ({}, {"temperature": 1.2, "seed": 3}):
        cache = attnpack.ModelCache([ShardedCache(attnpack.DynamicCache(), mesh["cache"]) for _ in model.layers])
        settings = {"max_new_tokens": 6, **settings}
        found.append(torch.equal(model.generate(ids, cache=cache, **settings), whole.generate(ids, **settings)))
    torch.manual_seed(dist.get_rank())
    drawn = model.generate(ids, max_new_tokens=8, temperature=3.0, cache="dynamic")
    everywhere = [torch.empty_like(drawn) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, drawn)
    found.append(all(torch.equal(other, drawn) for other in everywhere[mesh.get_local_rank("cache") * 2 :][:2]))
    return 0.0 if all(found) else str(found)


def generated(name, shared_model, cache, **settings):
    """0.0 if the tokens are those of one process."""
    whole = made(MODELS[name])
    ids = torch.arange(12).view(2, 6) % 5
    settings = {"max_new_tokens": 7} | settings
    wanted = whole.generate(ids, **settings)
    model = copy.deepcopy(whole)
    if shared_model:
        model = tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    if cache == "sharded":
        kind = attnpack.LatentCache if "latent" in name else attnpack.DynamicCache
        cache = attnpack.ModelCache([ShardedCache(kind()) for _ in model.layers])
    if settings.get("temperature"):
        torch.manual_seed(dist.get_rank())
    seen = []
    got = model.generate(ids, cache=cache, callback=seen.append, **settings)
    assert len(seen) == got.size(1) - 6
    return float((got != wanted).sum()) if got.shape == wanted.shape else f"{got.shape}, {wanted.shape}"


def generate_checks():
    yield "greedy", ("model", True, "dynamic")
    yield "static", ("model", True, "static")
    yield "tied", ("tied", True, "dynamic")
    yield "latent", ("latent model", True, "static")
    yield "lengths", ("model", True, "dynamic", {"lengths": torch.tensor([6, 3])})
    yield "sampled", ("model", True, "dynamic", {"temperature": 1.5, "top_k": 9, "seed": 5})
    yield "answers", ("model", True, "dynamic", {"num_return_sequences": 2, "stop_tokens": [3]})
    yield "sharded cache", ("model", False, "sharded")
    yield "sharded cache, lengths", ("tied", False, "sharded", {"lengths": torch.tensor([2, 6])})
    yield "sharded latents", ("latent model", False, "sharded")


def run_by_transformers(name, ids):
    """A small model that attends by attnpack: by name, in sdpa's place, or with whole layers."""
    import attnpack.hf
    from hf_families import make_model

    model = make_model("deepseek_v3" if "latent" in name else "llama")
    try:
        if "layers" in name:
            model = attnpack.hf.replace_attention(model)
        else:
            attnpack.hf.register(replace_sdpa="sdpa" in name)
            model.set_attn_implementation("sdpa" if "sdpa" in name else "attnpack")
        return model(ids)
    finally:
        attnpack.hf.unregister()


@torch.no_grad()
def reordered_before_all_ranks_hold_one():
    """0.0 if a cache whose prompt is shorter than the ranks takes more rows, and more of them later."""
    whole, sharded = attnpack.DynamicCache(), ShardedCache(attnpack.DynamicCache())
    module, x = made(grouped), draw(1, 1, WIDTH)
    outs = []
    for cache in (whole, sharded):
        module(x, cache=cache)
        for rows in ([0, 0], [0, 1, 1]):
            cache.reorder(rows)
        outs.append(torch.cat([module(draw(3, n, WIDTH, seed=n), cache=cache) for n in (1, 2, 4)], 1))
    return distance(*outs)


@torch.no_grad()
def cropped_to_nothing():
    """0.0 if a cache that holds nothing any more takes another number of sequences."""
    cache, module = ShardedCache(attnpack.DynamicCache()), made(grouped)
    module(draw(2, 5, WIDTH), cache=cache)
    cache.crop(0)
    assert cache.lengths.tolist() == [] and len(cache) == 0
    x = draw(3, 4, WIDTH)
    return distance(module(x, cache=cache), module(x))


def wrong(name):
    x = draw(2, LENGTH, WIDTH)
    if name.startswith("cache"):
        module, held = made(latent if "latent" in name else grouped), ShardedCache(attnpack.LatentCache())
        if "mask" in name:
            module(x, cache=held, mask=torch.ones(LENGTH, LENGTH))
        if "weights" in name:
            module(x, cache=held, need_weights=True)
        if "room" in name:
            overflow()
        if "crop" in name:
            module(x, cache=(held := ShardedCache(attnpack.DynamicCache())))
            held.crop(-1)
        if "kind" in name:
            ShardedCache(attnpack.QuantizedCache(8))
        if "positions" in name:
            module(x, cache=ShardedCache(attnpack.DynamicCache()), positions=torch.arange(3))
        if "ranks" in name:
            module(x[:, : 3 + dist.get_rank() % 2], cache=held)
    if name == "ids":
        model = tensor_parallel(made(MODELS["model"]), init_device_mesh("cpu", (dist.get_world_size(),)))
        model.generate(torch.full((1, 3), dist.get_rank() % 2), max_new_tokens=2)
    if name.startswith("sequence"):
        shard_sequence(*{"a number": (3,)}.get(name[10:], (x,)), dim=5)
    if name == "whole, kind":
        unshard_sequence(3)
    if name == "whole, dim":
        unshard_sequence(x, dim=-4)
    if name == "parts":
        unshard_sequence(x[:, : 3 + dist.get_rank() % 2])
    with context_parallel(layout="zigzag"):
        if name == "mask":
            made(grouped)(x, mask=torch.ones(LENGTH, LENGTH))
        if name == "latent mask":
            made(latent)(x, mask=torch.ones(LENGTH, LENGTH))
        if name == "weights":
            made(grouped)(x, need_weights=True)
        if name == "cache":
            made(grouped)(x, cache=attnpack.DynamicCache())
        if name == "dropout":
            made(lambda: grouped(dropout=0.1))(x)
        if name == "nested":
            made(grouped)(torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged))
        if name == "generate":
            made(MODELS["model"]).generate(torch.zeros(1, 2).long(), max_new_tokens=1)
        if name == "rope":
            scaling = {"rope_type": "dynamic", "factor": 2.0}
            made(lambda: grouped(rope=attnpack.RotaryEmbedding(6, scaling=scaling)))(x)
        if "positions" in name:
            module = made(latent if "latent" in name else grouped)
            called = torch.compile(module, backend="eager") if "compiled" in name else module
            called(x[:, :6], positions=torch.arange(3))
        if name == "odd":
            made(grouped)(x[:, :3])
        if name in ("cpp", "cpp latent"):
            made(latent if "latent" in name else grouped).cpp().forward(x)
        if name.startswith("transformers"):
            run_by_transformers(name, torch.zeros(1, LENGTH).long())
        if name == "lengths":
            made(MODELS["model"])(torch.zeros(1, LENGTH).long(), lengths=torch.tensor([LENGTH * 99]))


WRONG = {
    "mask": "mask: got one under context_parallel",
    "latent mask": "mask: got one under context_parallel",
    "weights": "need_weights: got one under context_parallel",
    "cache": "cache: got one under context_parallel",
    "dropout": "dropout: got 0.1 in training under context_parallel",
    "nested": "x is a nested tensor under context_parallel",
    "generate": "generate is called under context_parallel",
    "rope": "rope: got frequencies that follow the length under context_parallel",
    "cpp": "a module of attnpack.cpp runs under context_parallel",
    "cpp latent": "a module of attnpack.cpp runs under context_parallel",
    "transformers": "a model of transformers attends under context_parallel",
    "transformers, sdpa": "a model of transformers attends under context_parallel",
    "transformers, layers": "a model of transformers attends under context_parallel",
    "transformers, latent layers": "a model of transformers attends under context_parallel",
    "ids": "the ranks of a group give generate different arguments: rank 0 has numbers with hash",
    "sequence, a number": r"x is 3 \(int\), wants a tensor, the whole sequence",
    "sequence, dim": r"dim: got 5, want that of the sequence in x \[2, 16, \d+\], -3 to 2",
    "whole, kind": r"x is 3 \(int\), wants a tensor, the part of this rank",
    "whole, dim": "dim: got -4, want that of the sequence in x",
    "parts": "the ranks of a group give unshard_sequence different arguments: rank 0 has x float32",
    "positions": r"positions: got \[3\], want 6 of them: those of this rank's rows",
    "compiled positions": r"positions: got \[3\], want 6 of them: those of this rank's rows",
    "latent positions": r"positions: got \[3\], want 6 of them: those of this rank's rows",
    "odd": "(x: got 3 positions on a rank, want an even number)",
    "lengths": "kv_lens: got values from 1584 to 1584, want 0 to",
    "cache, mask": "mask: got one with a ShardedCache",
    "cache, latent weights": "need_weights: got one with a ShardedCache",
    "cache, positions": r"positions has shape \[3\] .* length 16",
    "cache, kind": r"cache is .*QuantizedCache.*wants a DynamicCache\(\), a LatentCache\(\) or a StaticCache",
    "cache, room": r"cache: got \d+ positions over \d ranks, want at most 2 on each",
    "cache, crop": "n: got -1, want how many positions to keep",
    "cache, ranks": "the ranks of a group give a ShardedCache different arguments",
}


def program(only=None):
    checks = {}
    for name, make in MODULES.items():
        for way in WAYS if name in ("all settings", "latent") else WAYS[1::2]:
            checks[f"context {name} {way}"] = lambda make=make, way=way: compare(make, *way)
    for way in WAYS[1:3]:
        checks[f"context lengths {way}"] = lambda way=way: with_lengths(grouped, *way)
        checks[f"context model {way}"] = lambda way=way: with_lengths(MODELS["tied"], *way)
    checks |= {
        "context poisoned": poisoned_latents,
        "context and heads": shared_both_ways,
        "context inferred": inferred,
        "context checkpointed": lambda: checkpointed(False),
        "context checkpointed, reentrant": lambda: checkpointed(True),
        **{f"context learned {way[1]}": lambda way=way: learned_positions(way[1]) for way in WAYS[:2]},
        **{
            f"context compiled {method}": lambda method=method: compiled(method)
            for method in ("allgather", "ulysses", "ring")
        },
        "changes": changes,
    }
    for name, make in CACHED.items():
        checks[f"cache {name}"] = lambda make=make: steps(make)
        checks[f"cache {name}, ragged"] = lambda make=make: steps(make, True)
    for name, case in generate_checks():
        settings = case[3] if len(case) > 3 else {}
        checks[f"generate {name}"] = lambda case=case, settings=settings: generated(*case[:3], **settings)
    checks["generate on a mesh"] = generated_on_a_mesh
    checks["cache reordered early"] = reordered_before_all_ranks_hold_one
    checks["cache cropped"] = cropped_to_nothing
    checks |= {f"bf16 {method}": lambda method=method: in_bf16(method) for method in ("allgather", "ring")}
    checks |= {"bytes latent": latent_bytes, "bytes step": step_bytes}
    checks |= {f"wrong {name}": lambda name=name: wrong(name) for name in WRONG}
    return run_checks({name: check for name, check in checks.items() if only is None or name in only})


@pytest.fixture(scope="module", params=["two_ranks", long("four_ranks")])
def outcomes(request):
    return request.getfixturevalue(request.param).run(program)


@pytest.mark.parametrize("what", ["context", "cache", "changes", "generate"])
def test_parts_give_the_numbers_of_one_process(outcomes, what):
    names = [name for name in outcomes[0] if name.startswith(what)]
    assert names and not unequal(outcomes, names)


def test_autocast_rounds_as_one_process(outcomes):
    assert not unequal(outcomes, ["bf16 allgather", "bf16 ring"], 0.02)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_done_is_refused(outcomes, name):
    for rank in outcomes:
        assert re.match(rf"\w+Error: attnpack: {WRONG[name]}", str(rank[f"wrong {name}"])), rank[f"wrong {name}"]


def test_latents_travel_in_place_of_heads(outcomes):
    ranks = len(outcomes)
    numbers = 2 * LENGTH // ranks * (LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"])
    assert all(rank["bytes latent"] == (ranks - 1) * numbers * 4 for rank in outcomes)


def test_a_step_sends_one_row_for_each_head(outcomes):
    """Its output and its lse, in fp32."""
    wanted = (len(outcomes) - 1) * 8 * (6 + 1) * 4
    assert all(rank["bytes step"] == (wanted, wanted) for rank in outcomes)


FEW = ["context all settings ('ring', 'zigzag')", "context latent ('allgather', 'zigzag')", "context and heads"]
FEW += ["cache grouped, ragged", "cache latent", "cache window, alibi", "changes", "generate on a mesh"]


def test_four_ranks_give_the_numbers_of_one_process(four_ranks):
    """The cases where four ranks are not as two; all of them are marked long."""
    assert not unequal(four_ranks.run(program, FEW), FEW)
