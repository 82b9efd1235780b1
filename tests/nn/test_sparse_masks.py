"""Modules that select keys, under masks and autocast, over many rows, and with all kinds of index_cache."""

import copy

import attnpack
import pytest
import torch
from attnpack.ops import select_blocks, select_keys
from marks import long
from module_cases import EMBED
from torch.testing import assert_close
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as hf

LATENT = {"q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
INDEXER = {"top_k": 4, "index_heads": 16, "index_head_dim": 8}
BLOCKS = {"top_k": 2, "key_block": 3}
LANGUAGES = pytest.mark.parametrize("language", ["python", "c++"])


def make(kind, dtype=torch.float64, **settings):
    torch.manual_seed(0)
    usual = {"causal": True, "rope": attnpack.RotaryEmbedding(4), "dtype": dtype}
    if kind == "latent":
        return attnpack.SparseLatentAttention(EMBED, 3, **LATENT, **INDEXER | usual | settings)
    own = INDEXER if kind == "indexer" else BLOCKS | {"selector": kind}
    return attnpack.SparseAttention(EMBED, 4, 2, **own | usual | settings)


def spoken(module, language):
    return (module, attnpack) if language == "python" else (module.cpp(), attnpack.cpp)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def padded_left(x, pad):
    """x with rows of other numbers before it, its positions, and a mask that excludes these, [1, 1, 1, keys]."""
    length = pad + x.size(1)
    places = torch.arange(length)
    return torch.cat([draw(1, pad, EMBED), x], 1), (places - pad).clamp(min=0), (places >= pad).view(1, 1, 1, -1)


def additive(mask):
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)


@LANGUAGES
@pytest.mark.parametrize("kind", ["indexer", "latent"])
@pytest.mark.parametrize("form", [lambda mask: mask, additive], ids=["bool", "float"])
@torch.no_grad()
def test_padding_on_the_left_changes_nothing(kind, form, language):
    """In one call, and by steps with every place for the indexer's keys."""
    module, x = make(kind), draw(1, 11, EMBED)
    wanted = module(x)
    called, classes = spoken(module, language)
    wide, positions, mask = padded_left(x, 5)
    assert_close(called.forward(wide, mask=form(mask), positions=positions)[:, 5:], wanted, atol=1e-11, rtol=1e-11)
    assert not torch.allclose(called.forward(wide, positions=positions)[:, 5:], wanted, atol=1e-3)
    holder = classes.SparseCache if kind == "indexer" else classes.LatentCache
    for caches in ({"cache": holder()}, {"cache": classes.DynamicCache(), "index_cache": classes.LatentCache()}):
        outs, held = [], 0
        for part in wide.split([9, *[1] * 7], 1):
            here, held = positions[held : held + part.size(1)], held + part.size(1)
            outs.append(called.forward(part, mask=form(mask[..., :held]), positions=here, **caches))
        assert_close(torch.cat(outs, 1)[:, 5:], wanted, atol=1e-11, rtol=1e-11)


@LANGUAGES
@pytest.mark.parametrize("kind", ["indexer", "latent", "mean", "max"])
@torch.no_grad()
def test_documents_of_one_sequence_are_apart(kind, language):
    """Their bounds are bounds of blocks."""
    module, lengths = make(kind), [6, 9, 3]
    x = draw(2, sum(lengths), EMBED)
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    mask = document.unsqueeze(0) == document.unsqueeze(1)
    positions = torch.cat([torch.arange(n) for n in lengths])
    found = spoken(module, language)[0].forward(x, mask=mask, positions=positions)
    wanted = torch.cat([module(part) for part in x.split(lengths, 1)], 1)
    assert_close(found, wanted, atol=1e-11, rtol=1e-11)
    assert_close(found, module(x, mask=additive(mask)[None, None], positions=positions), atol=1e-11, rtol=1e-11)


@torch.no_grad()
def test_padding_on_the_left_as_transformers():
    torch.manual_seed(0)
    config = DeepseekV32Config(
        hidden_size=EMBED, num_attention_heads=3, num_key_value_heads=3, index_topk=4, index_n_heads=16,
        index_head_dim=8, max_position_embeddings=64, num_hidden_layers=1, attn_implementation="eager",
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}, **LATENT,
    )  # fmt: skip
    layer, rotary = hf.DeepseekV32Attention(config, 0).double().eval(), hf.DeepseekV32RotaryEmbedding(config)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn_like(parameter) / parameter.size(-1) ** 0.5)
    ours = make("latent", rope=attnpack.RotaryEmbedding(4, interleaved=True))
    ours.load_state_dict(layer.state_dict())
    wide, positions, mask = padded_left(draw(1, 11, EMBED), 5)
    cos, sin = rotary(wide, positions.unsqueeze(0))
    seen = mask & torch.ones(16, 16, dtype=torch.bool).tril()
    wanted, _ = layer(wide, (cos.double(), sin.double()), additive(seen))
    found = ours(wide, mask=mask, positions=positions)
    assert_close(found[:, 5:], wanted[:, 5:], atol=1e-6, rtol=1e-6)


@LANGUAGES
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kind", ["indexer", "latent"])
def test_the_loss_of_an_indexer_knows_the_mask(kind, sparse, language):
    module, x = make(kind), draw(1, 11, EMBED)
    called = spoken(module, language)[0]
    wide, positions, mask = padded_left(x, 5)
    own = [p for name, p in module.named_parameters() if name.startswith("index")]
    wanted = module.indexer_loss(x, sparse=sparse)
    grads = torch.autograd.grad(wanted, own)
    rows = mask & mask.transpose(2, 3)  # padding attends nothing
    found = called.indexer_loss(wide, sparse=sparse, mask=rows, positions=positions)
    assert_close(found, wanted, atol=1e-11, rtol=1e-11)
    for ours, theirs in zip(torch.autograd.grad(found, own), grads, strict=True):
        assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


def test_of_masks_by_head_the_largest_counts():
    query, key, weights = draw(1, 3, 2, 5), draw(1, 1, 8, 5), draw(1, 2, 3)
    first, second = torch.arange(8) < 3, torch.arange(8) == 6
    mask = torch.stack([first, second]).view(1, 2, 1, 8)
    index = select_keys(query, key, weights, 8, mask=mask)
    assert sorted(index[0, 0, 0].tolist()) == [-1, -1, -1, -1, 0, 1, 2, 6]
    keys = draw(1, 2, 8, 5)
    for scorer in ("mean", "max"):  # each kv head has a mask of its own
        blocks = select_blocks(draw(1, 2, 2, 5), keys, 2, 4, local_blocks=1, scorer=scorer, mask=mask)
        assert blocks[0, :, 0].sort(-1).values.tolist() == [[-1, -1, 0, 1], [-1, -1, -1, 3]]
    with pytest.raises(ValueError, match=r"mask has shape \[3, 8\] .*, wants bools or floating numbers that broadcast"):
        select_keys(query, key, weights, 8, mask=torch.ones(3, 8, dtype=torch.bool))


@pytest.mark.parametrize("kind", ["indexer", "latent", "mean", "max"])
@torch.no_grad()
def test_autocast_chooses_the_same_in_steps_and_in_graphs(kind):
    module, x = make(kind, torch.float32).eval(), torch.randn(1, 96, EMBED)
    with torch.autocast("cpu", torch.bfloat16):
        whole, cache = module(x), module.new_cache()
        steps = torch.cat([module(part, cache=cache) for part in x.split([64, *[1] * 32], 1)], 1)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
    rounded = copy.deepcopy(module).bfloat16()(x.bfloat16())
    for other in (steps, compiled, rounded):
        assert (whole.float() - other.float()).abs().max() < 0.02 * whole.float().abs().max()


@pytest.mark.parametrize("kind", ["indexer", "latent"])
def test_the_loss_is_exact_under_autocast(kind):
    module, x = make(kind, torch.float32), torch.randn(1, 40, EMBED)
    with torch.autocast("cpu", torch.bfloat16):
        loss = module.indexer_loss(x)
    assert loss.dtype == torch.float32
    rounded = copy.deepcopy(module).bfloat16().indexer_loss(x.bfloat16())
    assert_close(loss, rounded, atol=0, rtol=5e-3)


@pytest.mark.parametrize(
    ("kind", "sparse"), [long("indexer", False), ("indexer", True), long("latent", False), long("latent", True)]
)
def test_the_loss_as_one_graph(kind, sparse):
    """With 4 tokens the indexer names all, which a graph does not see."""
    module = make(kind)
    compiled = torch.compile(lambda x: module.indexer_loss(x, sparse=sparse), fullgraph=True, backend="aot_eager")
    own = [p for name, p in module.named_parameters() if name.startswith("index")]
    for length in (4, 11, 17):
        x = draw(2, length, EMBED)
        wanted, found = module.indexer_loss(x, sparse=sparse), compiled(x)
        assert_close(found, wanted, atol=1e-12, rtol=1e-12)
        grads = zip(*(torch.autograd.grad(loss, own) for loss in (found, wanted)), strict=True)
        for ours, theirs in grads:
            assert_close(ours, theirs, atol=1e-12, rtol=1e-11)


def test_many_rows_choose_what_few_rows_choose():
    """All scores of these rows would take 64 MiB, so they are made in pieces."""
    query, key, weights = draw(1, 4, 2048, 8), draw(1, 1, 2048, 8), draw(1, 2048, 4)
    mask = torch.rand(1, 1, 2048, 2048) < 0.5
    keys = draw(1, 2, 2048, 8)

    def choose(rows, first):
        n = rows.stop - rows.start
        place = {"causal": True, "q_offsets": torch.tensor([first]), "mask": mask[:, :, rows]}
        names = [select_keys(query[:, :, rows], key, weights[:, rows], 20, local_keys=3, **place)]
        assert names[0].shape == (1, 1, n, 20)
        for scorer in ("mean", "max"):
            names.append(select_blocks(query[:, :, rows], keys, 16, 5, scorer=scorer, **place))
        return names

    whole = choose(slice(0, 2048), 0)
    for first in (0, 500, 1900):
        for all_rows, few in zip(whole, choose(slice(first, first + 100), first), strict=True):
            assert torch.equal(all_rows[:, :, first : first + 100], few)
    plain = select_keys(query, key, weights, 20, causal=True)
    assert torch.equal(plain[:, :, :100], select_keys(query[:, :, :100], key, weights[:, :100], 20, causal=True))


@pytest.mark.parametrize("kind", ["indexer", "latent", "max"])
@torch.no_grad()
def test_a_long_sequence_holds_a_part_of_its_scores(kind):
    module, x = make(kind, torch.float32), torch.randn(1, 3000, EMBED)
    with torch.profiler.profile(profile_memory=True) as profile:
        module(x)
    assert 0 < max(event.cpu_memory_usage for event in profile.events() if not event.cpu_children) < 8 << 20


@pytest.mark.parametrize("kind", ["indexer", "latent", "mean", "max"])
@torch.no_grad()
def test_vmap(kind):
    module, x = make(kind), draw(3, 2, 9, EMBED)
    wanted = torch.stack([module(each) for each in x])
    assert_close(torch.vmap(module)(x), wanted, atol=1e-11, rtol=1e-11)


@LANGUAGES
@pytest.mark.parametrize("kind", ["indexer", "latent"])
@torch.no_grad()
def test_static_caches_for_keys_and_index(kind, language):
    """In Python as one graph, which serves all steps."""
    module, x = make(kind), draw(2, 11, EMBED)
    called, classes = spoken(module, language)
    heads, width, values = (2, module.head_dim, module.head_dim) if kind == "indexer" else (1, 16, 0)
    caches = {
        "cache": classes.StaticCache(2, heads, 13, width, v_head_dim=values, dtype=torch.float64),
        "index_cache": classes.StaticCache(2, 1, 13, 8, v_head_dim=0, dtype=torch.float64),
    }
    outs = [called.forward(part, **caches) for part in x.split([4, 1, 3, 3], 1)]
    assert_close(torch.cat(outs, 1), module(x), atol=1e-11, rtol=1e-11)
    with pytest.raises(ValueError, match="got 3 new positions|no room|capacity|max_len"):
        called.forward(x[:, :3], **caches)
    assert len(caches["cache"]) == len(caches["index_cache"]) == 11
    if language == "c++":
        return
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for cache in caches.values():
        cache.reset()
    outs = [compiled(x[:, :4], **caches), compiled(x[:, 4:5], **caches)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        outs += [compiled(part, **caches) for part in x[:, 5:].split(1, 1)]
    assert_close(torch.cat(outs, 1), module(x), atol=1e-11, rtol=1e-11)
