"""tensor_parallel: modules shared by 2 and 4 processes give numbers and gradients of one process."""

import copy
import os
import re
from unittest import mock

import attnpack
import pytest
import torch
import torch.distributed as dist
from attnpack.distributed import tensor_parallel
from marks import long
from op_cases import draw
from ranks import run_checks, unequal
from shared_modules import MODELS, WIDTH, block, distance, grouped, latent, made, rope
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from wire import CountedBytes

LENGTH = 7
MODULES = {
    "kv heads divide": grouped,
    "each its own": lambda: attnpack.MultiHeadAttention(WIDTH, 4, bias=True, causal=True, rope=rope(), alibi=True),
    "one kv head": lambda: attnpack.MultiQueryAttention(WIDTH, 4, bias=True, causal=True, window=(3, 0)),
    "three kv heads": lambda: grouped(3, 12, out_bias=False),
    "head map": lambda: grouped(3, 8, head_map=[2, 2, 0, 1, 1, 0, 0, 2]),
    "sinks, alibi, norms": lambda: grouped(2, sinks=True, alibi=True, qk_norm=True, softcap=1.5),
    "gate by head": lambda: grouped(3, 12, gate="head", q_lora_rank=9),
    "gate by number": lambda: grouped(2, gate="element", gate_activation="softplus", qk_norm={"values": True}),
    "keys as values": lambda: grouped(2, keys_as_values=True, qk_norm=True),
    "latent, gate": lambda: latent(gate="element", q_lora_rank=9),
    "differential": lambda: attnpack.DifferentialAttention(WIDTH, 4, 2, version=1, causal=True, rope=rope()),
    "latent": lambda: latent(bias=True),
    "latent, queries low": lambda: latent(q_lora_rank=9, bias=True),
    "latent, absorbed": lambda: latent(path="absorbed"),
    "latent, no norm": lambda: latent(latent_norm=False, qk_rope_head_dim=0, rope=None),
    "folded": lambda: latent().fold(),
    "swiglu": lambda: attnpack.FeedForward(WIDTH, 20, bias=True),
    "gelu, uneven": lambda: attnpack.FeedForward(WIDTH, 5, activation="gelu"),
    "one head": lambda: attnpack.SelfAttention(WIDTH, causal=True),
    "norm": lambda: attnpack.RMSNorm(WIDTH),
    "decoder block": lambda: block(grouped(1)),
    "latent block": lambda: block(latent(), norm="layer", pre_norm=False),
    "encoder": lambda: attnpack.Encoder(
        [attnpack.EncoderBlock(grouped(), attnpack.FeedForward(WIDTH, 16)) for _ in range(2)]
    ),
    "others between": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), grouped(2), nn.GELU()),
}


class Foreign(nn.Module):
    """A layer of a user: it reads the weights of its children, beside attention that is shared."""

    def __init__(self):
        super().__init__()
        self.attention, self.theirs = grouped(2), nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x):
        x = x + self.attention(x)
        x = x + self.theirs(x, x, x, need_weights=False)[0]
        return nn.functional.linear(self.inner(x), self.inner[0].weight)


MODULES |= {"foreign": Foreign, "foreign, one class": lambda: nn.TransformerEncoderLayer(WIDTH, 4, 16, 0.0)}


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def both(make):
    """(module of one process, the same shared)."""
    whole = made(make)
    return whole, tensor_parallel(copy.deepcopy(whole), mesh())


def compare(whole, shared, *inputs, **settings):
    """Largest relative distance of the outputs, and of the gradients of inputs and parameters."""
    distances, grads = [], []
    for module in (whole, shared):
        given = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        out = module(*given, **settings)
        loss = out if isinstance(out, torch.Tensor) else out[0]
        (loss * draw(*loss.shape, seed=5)).sum().backward()
        parameters = dict(module.named_parameters())
        grads.append([out, *[x.grad for x in given if x.requires_grad], *[p.grad for p in parameters.values()]])
    names = [[name.removeprefix("_orig_mod.") for name, _ in module.named_parameters()] for module in (whole, shared)]
    assert names[0] == names[1]
    for wanted, got in zip(*grads, strict=True):
        for one, other in zip(wanted, got, strict=True) if isinstance(wanted, tuple) else [(wanted, got)]:
            distances.append(distance(other, one))
    return max(distances)


def module_check(make):
    whole, shared = both(make)
    assert all(isinstance(p, DTensor) for p in shared.parameters())
    return compare(whole, shared, draw(2, LENGTH, WIDTH))


def model_check(make):
    return compare(*both(make), torch.arange(2 * LENGTH).view(2, LENGTH) % 5)


def cross_check():
    whole, shared = both(lambda: block(grouped(), cross_attention=grouped(2, rope=None)))
    return compare(whole, shared, draw(2, LENGTH, WIDTH), draw(2, 5, WIDTH, seed=3), context_lens=torch.tensor([5, 2]))


def encoder_decoder_check():
    def make():
        layers = [attnpack.EncoderBlock(grouped(2, causal=False), attnpack.FeedForward(WIDTH, 16))]
        decoder = attnpack.Decoder([block(grouped(1), cross_attention=grouped(2, rope=None))])
        return attnpack.EncoderDecoder(attnpack.Encoder(layers), decoder)

    return compare(*both(make), draw(2, 5, WIDTH, seed=3), draw(2, LENGTH, WIDTH), source_lens=torch.tensor([5, 3]))


def translator():
    """19 source and target tokens; the decoder counts positions by a table."""
    encoder = attnpack.Encoder(
        [attnpack.EncoderBlock(grouped(2, causal=False), attnpack.FeedForward(WIDTH, 16))],
        embed_tokens=nn.Embedding(19, WIDTH),
    )
    decoder = attnpack.Decoder(
        [block(grouped(kv), cross_attention=grouped(2, rope=None, causal=False)) for kv in (1, 4)],
        embed_tokens=nn.Embedding(19, WIDTH),
        embed_positions=nn.Embedding(16, WIDTH),
    )
    return attnpack.EncoderDecoder(encoder, decoder)


def translated_check(cache, **settings):
    """0.0 if the tokens are those of one process."""
    whole, shared = both(translator)
    source, target = torch.arange(10).view(2, 5) % 7, torch.tensor([[1, 4, 2], [1, 2, 3]])
    settings = {"max_new_tokens": 6, "source_lens": torch.tensor([5, 3])} | settings
    wanted = whole.generate(source, target, **settings)
    if settings.get("temperature"):
        torch.manual_seed(dist.get_rank())
    got = shared.generate(source, target, cache=cache, **settings)
    return float((got != wanted).sum()) if got.shape == wanted.shape else f"{got.shape}, {wanted.shape}"


def head_of_its_own():
    torch.manual_seed(4)
    return nn.Linear(WIDTH, 11)


def mask_check(shape):
    whole, shared = both(grouped)
    return compare(whole, shared, draw(2, LENGTH, WIDTH), mask=draw(*shape, seed=8))


def weights_check():
    return compare(*both(lambda: grouped(2)), draw(2, LENGTH, WIDTH), need_weights=True)


def compiled_check():
    whole, shared = both(lambda: grouped(2))
    return compare(whole, torch.compile(shared, fullgraph=True, backend="aot_eager"), draw(2, LENGTH, WIDTH))


@torch.no_grad()
def steps_check(make, cache):
    whole, shared = both(make)
    parts = draw(2, LENGTH, WIDTH).split([4, 1, 2], 1)
    outs = []
    for module in (whole, shared):
        held = cache()
        outs.append(torch.cat([module(part, cache=held) for part in parts], 1))
    return distance(outs[1], outs[0])


def copied_check():
    """deepcopy and checkpointing of activations keep the shares."""
    whole, shared = both(lambda: block(grouped(1, qk_norm=True)))
    again = copy.deepcopy(shared)
    x = draw(2, LENGTH, WIDTH)
    found = compare(whole, again, x)
    again.zero_grad(), whole.zero_grad()
    leaf = x.clone().requires_grad_()
    out = torch.utils.checkpoint.checkpoint(again, leaf, use_reentrant=False)
    (out * draw(*out.shape, seed=5)).sum().backward()
    (whole(x) * draw(*out.shape, seed=5)).sum().backward()
    return max(found, *(distance(b.grad, a.grad) for a, b in zip(whole.parameters(), again.parameters(), strict=True)))


def after_an_error():
    """A call that raises leaves DTensors behind, and the next call is right."""
    whole, shared = both(lambda: grouped(1))
    try:
        shared(draw(2, LENGTH, WIDTH + 1))
    except ValueError as error:
        assert str(error).startswith("attnpack: x")
    assert all(isinstance(p, DTensor) for p in shared.parameters()) and shared.num_heads == 8
    return compare(whole, shared, draw(2, LENGTH, WIDTH))


def tied(make):
    """Weights that stand in two places, by parameter, stay one each, with the gradient of both places."""

    def tie():
        first, second = make(), make()
        second.q_proj.weight, second.k_proj = first.q_proj.weight, first.k_proj
        return nn.Sequential(first, second)

    whole, shared = both(tie)
    assert shared[0].q_proj.weight is shared[1].q_proj.weight
    return compare(whole, shared, draw(2, LENGTH, WIDTH))


def tied_head():
    def tie():
        model = MODELS["model"]()
        model.lm_head.weight = model.model.embed_tokens.weight
        return model

    return model_check(tie)


def loaded():
    """A state dict of one process, as load_state_dict takes it."""
    whole, shared = both(MODELS["tied"])
    state = {name: tensor * 2 for name, tensor in whole.state_dict().items()}
    for model in (whole, shared):
        model.load_state_dict(state)
    assert all(isinstance(p, DTensor) for p in shared.parameters())
    return compare(whole, shared, torch.arange(2 * LENGTH).view(2, LENGTH) % 5)


def trained():
    """Three steps of AdamW with clipped gradients: the weights of one process."""
    whole, shared = both(MODELS["tied"])
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) % 19
    for model in (whole, shared):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            logits = model(ids)
            nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    return max(distance(b, a) for a, b in zip(whole.parameters(), shared.parameters(), strict=True))


def memory():
    """This rank's bytes of the parameters, as a share of all."""
    whole, shared = both(lambda: attnpack.CausalLM(64, 64, 2, 8, 4))
    held = sum(p.to_local().numel() for p in shared.parameters())
    return held / sum(p.numel() for p in whole.parameters())


@torch.no_grad()
def cached_heads():
    """kv heads that a rank's caches hold, of 4 and of 1."""
    found = []
    for kv_heads in (4, 1):
        cache = attnpack.DynamicCache()
        both(lambda kv_heads=kv_heads: grouped(kv_heads))[1](draw(2, LENGTH, WIDTH), cache=cache)
        found.append(cache.k.size(1))
    return found


def collectives():
    """Collectives of floats in one layer, forward and backward."""
    _, shared = both(lambda: grouped(4))
    x = draw(2, LENGTH, WIDTH).requires_grad_()
    with mock.patch.dict(os.environ, ATTNPACK_CHECK="0"), CountedBytes() as wire:
        out = shared(x)
    with CountedBytes() as back:
        out.sum().backward()
    return wire.collectives, back.collectives


def refused(make, *inputs, training=True):
    _, shared = both(make)
    shared.train(training)(*inputs)


def jagged(*rows):
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


REFUSED = {
    "heads": "num_heads: got 3 heads of GroupedQueryAttention for",
    "dropout": "dropout: got 0.1 in training",
    "nested": "x is a nested tensor, wants a padded one under tensor parallelism",
    "nested ids": "ids are nested, want padded ones under tensor parallelism",
    "ids": "the ranks of a group give the model different arguments: rank 0 has ids int64",
    "id": "ids holds 19",
    "draws": "the ranks of a group give the model different arguments: rank 0 has generator at",
    "draws of a block": "the ranks of a group give a DecoderBlock different arguments: rank 0 has generator at",
    "inputs": "the ranks of a group give a FeedForward different arguments: rank 0 has input 0 float32",
    "layers": "the ranks of a group give tensor_parallel different arguments: ",
    "kv heads": "the ranks of a group give tensor_parallel different arguments: rank 0 has .*0.k_proj.weight float32",
    "twice": ".* is a DTensor already",
    "twin": r"CausalLM has hooks, which C\+\+ would not run",
    "norm": "qk_norm: got a norm over all 8 heads",
    "places": r"1\.o_proj\.weight is a weight that stands in another place too",
    "wrapped": "GroupedQueryAttention has a parameter 'q_proj.extra'",
}


def wrapped():
    layer = grouped()
    layer.q_proj.extra = nn.Parameter(torch.zeros(2))
    return layer


def two_shares():
    first, second = grouped(4, 4), grouped(4, 4)
    second.o_proj.weight = first.q_proj.weight
    return nn.Sequential(first, second)


def different_modules(what):
    """One layer more, or more kv heads, on ranks with odd numbers."""
    odd = dist.get_rank() % 2
    layers, kv_heads = (1 + odd, 4) if what == "layers" else (1, 4 + 4 * odd)
    tensor_parallel(nn.Sequential(*(grouped(kv_heads) for _ in range(layers))), mesh())


def different_ids():
    _, shared = both(MODELS["model"])
    shared(torch.zeros(1, 3 + dist.get_rank() % 2, dtype=torch.int64))


def different_inputs():
    _, shared = both(lambda: attnpack.FeedForward(WIDTH, 20))
    shared(draw(2, 3 + dist.get_rank() % 2, WIDTH))


def dropping():
    return attnpack.CausalLM(19, WIDTH, 2, 4, dropout=0.3)


def dropped():
    """Dropout of states that all ranks have, with one seed: the numbers of one process."""
    outs = []
    for model in both(dropping):
        torch.manual_seed(1)
        outs.append(model.train()(torch.arange(2 * LENGTH).view(2, LENGTH) % 5))
    assert distance(outs[1], model.eval()(torch.arange(2 * LENGTH).view(2, LENGTH) % 5)) > 0.01
    return distance(outs[1], outs[0])


def different_draws(make, *inputs):
    _, shared = both(make)
    torch.manual_seed(dist.get_rank())
    shared.train()(*inputs)


def program(only=None):
    checks = {name: (lambda make=make: module_check(make)) for name, make in MODULES.items()}
    checks |= {name: (lambda make=make: model_check(make)) for name, make in MODELS.items()}
    checks |= {
        "cross": cross_check,
        "encoder-decoder": encoder_decoder_check,
        "translation": lambda: translated_check("dynamic", lengths=torch.tensor([3, 2])),
        "translation, answers": lambda: translated_check("dynamic", num_return_sequences=2, temperature=2.0, seed=3),
        "translation, static": lambda: translated_check("static", head=head_of_its_own(), stop_tokens=[5]),
        "weights": weights_check,
        "compiled": compiled_check,
        "copied": copied_check,
    }
    for shape in ((LENGTH, LENGTH), (8, 1, LENGTH), (2, 8, LENGTH, LENGTH), (2, 1, 1, LENGTH)):
        checks[f"mask {shape}"] = lambda shape=shape: mask_check(shape)
    checks["steps"] = lambda: steps_check(lambda: grouped(2), attnpack.DynamicCache)
    checks["steps, one kv head"] = lambda: steps_check(lambda: grouped(1), attnpack.DynamicCache)
    checks["steps, int8"] = lambda: steps_check(lambda: grouped(2), lambda: attnpack.QuantizedCache(8))
    checks["steps, latent"] = lambda: steps_check(latent, attnpack.LatentCache)
    checks |= {"error": after_an_error, "trained": trained, "memory": memory, "cached": cached_heads}
    checks |= {
        "tied weights": lambda: tied(lambda: grouped(1)),
        "tied head": tied_head,
        "loaded": loaded,
        "dropped": dropped,
    }
    checks["collectives"] = collectives
    checks["refused norm"] = lambda: both(lambda: grouped(4, qk_norm={"all_heads": True}))
    checks["refused places"] = lambda: both(two_shares)
    checks["refused heads"] = lambda: both(lambda: grouped(3, 3))
    checks["refused dropout"] = lambda: refused(lambda: grouped(dropout=0.1), draw(2, LENGTH, WIDTH))
    checks["refused nested"] = lambda: refused(grouped, jagged(draw(3, WIDTH), draw(2, WIDTH)))
    checks["refused nested ids"] = lambda: refused(MODELS["model"], jagged(torch.arange(3), torch.arange(2)))
    checks["refused ids"] = different_ids
    checks["refused inputs"] = different_inputs
    checks["refused draws"] = lambda: different_draws(dropping, torch.arange(LENGTH).unsqueeze(0) % 5)
    checks["refused draws of a block"] = lambda: different_draws(
        lambda: block(grouped(), dropout=0.1), draw(2, LENGTH, WIDTH)
    )
    checks["refused id"] = lambda: refused(MODELS["model"], torch.full((1, 2), 19))
    checks |= {f"refused {what}": lambda what=what: different_modules(what) for what in ("layers", "kv heads")}
    checks["refused twice"] = lambda: tensor_parallel(both(grouped)[1], mesh())
    checks["refused twin"] = lambda: both(MODELS["model"])[1].cpp()
    checks["refused wrapped"] = lambda: both(wrapped)
    return run_checks({name: check for name, check in checks.items() if only is None or name in only})


@pytest.fixture(scope="module", params=["two_ranks", long("four_ranks")])
def outcomes(request):
    return request.getfixturevalue(request.param).run(program)


def test_shares_give_the_numbers_and_gradients_of_one_process(outcomes):
    others = ("refused", "memory", "cached", "collectives")
    assert not unequal(outcomes, [name for name in outcomes[0] if not name.startswith(others)])


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shared_is_refused(outcomes, name):
    for rank in outcomes:
        assert re.match(rf"\w+Error: attnpack: .*{REFUSED[name]}", str(rank[f"refused {name}"])), rank[
            f"refused {name}"
        ]


def test_a_rank_holds_its_share_of_the_weights(outcomes):
    """All but the norms."""
    for rank in outcomes:
        assert 1 / len(outcomes) < rank["memory"] < 1 / len(outcomes) + 0.01


def test_a_cache_holds_the_heads_of_its_rank(outcomes):
    assert all(rank["cached"] == [4 // len(outcomes), 1] for rank in outcomes)


def test_a_layer_needs_one_sum_forward_and_one_backward(outcomes):
    assert all(rank["collectives"] == (1, 1) for rank in outcomes)


FEW = [
    "translation, answers",
    "one kv head",
    "three kv heads",
    "head map",
    "latent, queries low",
    "gelu, uneven",
    "small vocabulary",
    "trained",
]


def test_four_ranks_give_the_numbers_of_one_process(four_ranks):
    """The cases where four ranks are not as two; all of them are marked long."""
    assert not unequal(four_ranks.run(program, FEW), FEW)
