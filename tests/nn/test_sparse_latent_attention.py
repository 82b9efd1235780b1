"""SparseLatentAttention against transformers' layer of DeepSeek-V3.2, against a dense mask of the same keys, and its
indexer's loss against plain PyTorch."""

import attnpack
import pytest
import torch
from attnpack import reference
from attnpack.distributed.shares import plan_of
from attnpack.nn.sharded_attention import ShardedAttention, sharded_sequence
from attnpack.ops import select_keys
from module_cases import YARN
from torch.testing import assert_close
from transformers import DeepseekV32Config
from transformers import DynamicCache as HfCache
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as hf

EMBED, HEADS = 24, 3
SIZES = {"q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
# Many heads: of few, relu makes many scores 0, and of equal scores transformers may take any.
INDEXER = {"top_k": 4, "index_heads": 16, "index_head_dim": 8}
LANGUAGES = pytest.mark.parametrize("language", ["python", "c++"])


def make(seed=0, scaling=None, **settings):
    torch.manual_seed(seed)
    usual = {"causal": True, "dtype": torch.float64}
    rope = attnpack.RotaryEmbedding(4, interleaved=True, max_positions=64, scaling=scaling)
    return attnpack.SparseLatentAttention(EMBED, HEADS, **SIZES | INDEXER | usual | {"rope": rope} | settings)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def spoken(module, language):
    """The module or its twin, and the classes of that language."""
    return (module, attnpack) if language == "python" else (module.cpp(), attnpack.cpp)


def low(module, x):
    return module.q_a_layernorm(module.q_a_proj(x))


def indexer(module, x, low):
    """The indexer's rotated queries and keys, and its weights, in plain PyTorch."""
    made, rope = module.indexer, attnpack.RotaryEmbedding(4, base=module.rope.base)
    query = (low @ made.wq_b.weight.T).unflatten(-1, (module.index_heads, -1)).transpose(1, 2)
    return rope(query), rope(made.k_norm(x @ made.wk.weight.T).unsqueeze(1)), x @ made.weights_proj.weight.T


def chosen(module, x, causal=True):
    """bool [B, 1, L, L]: the keys that each query is to attend."""
    index = select_keys(*indexer(module, x, low(module, x)), module.top_k, causal=causal).long()
    keys = x.size(1)
    named = torch.zeros(*index.shape[:3], keys + 1, dtype=torch.bool)
    return named.scatter(3, torch.where(index < 0, keys, index), True)[..., :keys]


def plain(module):
    """The MultiHeadLatentAttention of the same weights."""
    own = {*INDEXER, "index_interleaved"}
    shared = {name: value for name, value in module._live_config().items() if name not in own}
    other = attnpack.MultiHeadLatentAttention(**shared, rope=module.rope, dtype=module.o_proj.weight.dtype)
    other.load_state_dict({n: t for n, t in module.state_dict().items() if not n.startswith("indexer.")})
    return other.train(module.training)


def deepseek(scaling=None, **settings):
    """A small layer of transformers with random weights, and a function from x and a cache to its output."""
    torch.manual_seed(0)
    config = DeepseekV32Config(
        hidden_size=EMBED, num_attention_heads=HEADS, num_key_value_heads=HEADS, index_topk=INDEXER["top_k"],
        index_n_heads=INDEXER["index_heads"], index_head_dim=INDEXER["index_head_dim"], max_position_embeddings=64,
        num_hidden_layers=1, rope_parameters={"rope_theta": 10000.0, **(scaling or {"rope_type": "default"})},
        attn_implementation="eager", **SIZES, **settings,
    )  # fmt: skip
    layer, rotary = hf.DeepseekV32Attention(config, 0).double().eval(), hf.DeepseekV32RotaryEmbedding(config)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) / parameter.size(-1) ** 0.5)

    def call(x, cache=None):
        past = 0 if cache is None else cache.get_seq_length()
        positions = past + torch.arange(x.size(1)).expand(x.size(0), -1)
        seen = torch.arange(past + x.size(1)) <= positions[0].unsqueeze(-1)
        mask = torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, torch.finfo(x.dtype).min)
        cos, sin = rotary(x, positions)
        mask = mask[None, None].expand(x.size(0), 1, -1, -1)
        return layer(x, (cos.double(), sin.double()), mask, past_key_values=cache)[0]

    return layer, call, config


@pytest.mark.parametrize("scaling", [None, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_equal_to_deepseek_v32_by_names_and_numbers(scaling, bias):
    """In one call and in steps, theirs too."""
    layer, call, config = deepseek(scaling, attention_bias=bias)
    ours, x = make(scaling=scaling, bias=bias).eval(), draw(2, 15, EMBED)
    assert ours.load_state_dict(layer.state_dict(), strict=True)
    assert ours.softmax_scale == pytest.approx(layer.scaling, rel=1e-12)
    parts, wanted, theirs = [6, *[1] * 9], call(x), HfCache(config=config)
    assert_close(torch.cat([call(part, theirs) for part in x.split(parts, 1)], 1), wanted, atol=1e-6, rtol=1e-6)
    assert not torch.allclose(plain(ours)(x), wanted, atol=1e-3)  # over all keys
    for language in ("python", "c++"):
        called, classes = spoken(ours, language)
        assert_close(called.forward(x), wanted, atol=1e-6, rtol=1e-6)
        cache = classes.LatentCache()
        steps = torch.cat([called.forward(part, cache=cache) for part in x.split(parts, 1)], 1)
        assert_close(steps, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("path", ["auto", "expanded", "absorbed", "folded"])
@pytest.mark.parametrize("causal", [True, False])
def test_output_and_gradients_are_those_of_a_dense_mask(path, causal):
    module, x = make(bias=True, gate="head"), draw(2, 11, EMBED).requires_grad_()
    if path == "folded":
        module = module.fold()
    else:
        module.path = path
    leaves = [x, *(p for name, p in module.named_parameters() if not name.startswith("indexer."))]
    other = plain(module)
    wanted = other(x, mask=chosen(module, x, causal), causal=causal)
    weight = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view_as(wanted)
    wanted_grads = torch.autograd.grad((wanted * weight).sum(), [x, *other.parameters()])
    for each in (module, module.cpp()):
        out = each.forward(x, causal=causal)
        assert_close(out, wanted, atol=1e-11, rtol=1e-11)
        grads = torch.autograd.grad((out * weight).sum(), leaves)
        for ours, theirs in zip(grads, wanted_grads, strict=True):
            assert_close(ours, theirs, atol=1e-10, rtol=1e-10)
    assert not torch.allclose(other(x, causal=causal), wanted)


def test_weights_are_zero_where_no_key_is_named():
    module, x = make(), draw(2, 11, EMBED)
    allowed = chosen(module, x) & torch.ones(11, 11).bool().tril()
    for each in (module, module.cpp()):
        out, weights = each.forward(x, need_weights=True)
        assert_close(out, module(x), atol=1e-12, rtol=1e-12)
        assert torch.equal(weights > 0, allowed.expand(-1, HEADS, -1, -1))
    with torch.no_grad():
        cache = attnpack.LatentCache()
        module(x[:, :7], cache=cache)
        _, weights = module(x[:, 7:], cache=cache, need_weights=True)
    assert torch.equal(weights > 0, allowed[:, :, 7:].expand(-1, HEADS, -1, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_keys_are_exactly_latent_attention(dtype):
    module, x = make(top_k=11, dtype=dtype), torch.randn(2, 11, EMBED, dtype=dtype)
    other = plain(module)
    assert torch.equal(module(x), other(x)) and torch.equal(module.cpp().forward(x), other.cpp().forward(x))
    for ours, theirs in zip(module.project(x), other.project(x), strict=True):
        assert torch.equal(ours, theirs)


CACHES = {
    "latent": lambda classes: {"cache": classes.LatentCache()},
    "static": lambda classes: {
        "cache": classes.StaticCache(2, 1, 13, 16, v_head_dim=0, dtype=torch.float64),
        "index_cache": classes.LatentCache(),
    },
    "dynamic": lambda classes: {"cache": classes.DynamicCache(), "index_cache": classes.LatentCache()},
}


@LANGUAGES
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("settings", [{}, {"rope": None}, {"path": "expanded"}, {"gate": "element"}], ids=str)
@torch.no_grad()
def test_by_tokens_and_chunks_as_the_whole_sequence(kind, settings, language):
    module, x = make(**settings), draw(2, 11, EMBED)
    whole = module(x)
    called, classes = spoken(module, language)
    for parts in ([1] * 11, [4, 1, 3, 3]):
        caches = CACHES[kind](classes)
        outs = [called.forward(part, **caches) for part in x.split(parts, 1)]
        assert_close(torch.cat(outs, 1), whole, atol=1e-12, rtol=1e-12)


@LANGUAGES
@pytest.mark.parametrize("kind", CACHES)
@torch.no_grad()
def test_padded_sequences(kind, language):
    module, x, lens = make(), draw(2, 11, EMBED), torch.tensor([11, 7])
    called, classes = spoken(module, language)
    caches = CACHES[kind](classes)
    first = called.forward(x, kv_lens=lens, **caches)
    assert_close(first[:1], module(x[:1]), atol=1e-12, rtol=1e-12)
    assert_close(first[1:, :7], module(x[1:, :7]), atol=1e-12, rtol=1e-12)
    after = called.forward(x[:, :2], **caches)
    for b, row in enumerate([torch.cat([x[:1], x[:1, :2]], 1), torch.cat([x[1:, :7], x[1:, :2]], 1)]):
        assert_close(after[b], module(row)[0, -2:], atol=1e-12, rtol=1e-12)


@LANGUAGES
@torch.no_grad()
def test_one_cache_holds_latents_and_index_keys(language):
    """Its bytes, its copies, and what a changed cache gives."""
    module, x = make(), draw(2, 11, EMBED)
    called, classes = spoken(module, language)
    cache = module.new_cache() if language == "python" else classes.LatentCache()
    assert type(cache) is classes.LatentCache and cache.index is None
    called.forward(x[:, :8], cache=cache)
    assert cache.index.shape == (2, 1, 8, 8) and cache.k.shape == (2, 1, 8, 16) and cache.c.shape == (2, 1, 8, 12)
    assert cache.nbytes == 2 * 8 * (16 + 8) * 8 <= cache.nbytes_allocated
    assert_close(cache.index, indexer(module, x[:, :8], low(module, x[:, :8]))[1], atol=1e-6, rtol=1e-6)
    copied = cache.clone()
    cache.index.zero_()
    assert_close(called.forward(x[:, 8:], cache=copied), module(x)[:, 8:], atol=1e-12, rtol=1e-12)
    copied.crop(5)
    assert copied.nbytes == 2 * 5 * 24 * 8
    assert_close(called.forward(x[:, 5:], cache=copied), module(x)[:, 5:], atol=1e-12, rtol=1e-12)
    copied.crop(8)
    copied.reorder(torch.tensor([1, 1, 0]))
    rows = x[[1, 1, 0]]
    assert_close(called.forward(rows[:, 8:], cache=copied), module(rows)[:, 8:], atol=1e-12, rtol=1e-12)
    copied.reset()
    assert copied.index is None and copied.nbytes == 0 and copied.nbytes_allocated == 0
    plain(module)(x, cache=copied) if language == "python" else plain(module).cpp().forward(x, cache=copied)


@LANGUAGES
def test_gradients_with_a_cache(language):
    """The new tokens' gradients, with positions in the cache that have none."""
    module, x = make(), draw(1, 9, EMBED)
    called, classes = spoken(module, language)
    cache = classes.LatentCache()
    with torch.no_grad():
        called.forward(x[:, :5], cache=cache)
    new = x[:, 5:].clone().requires_grad_()
    (grad,) = torch.autograd.grad(called.forward(new, cache=cache).square().sum(), new)
    alone = x[:, 5:].clone().requires_grad_()
    (wanted,) = torch.autograd.grad(module(torch.cat([x[:, :5], alone], 1))[:, 5:].square().sum(), alone)
    assert_close(grad, wanted, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_the_loss_trains_the_indexer_alone(sparse, causal):
    module, x = make(causal=causal), draw(2, 9, EMBED).requires_grad_()
    allowed = torch.ones(2, 1, 9, 9, dtype=torch.bool)
    allowed = allowed.tril() if causal else allowed
    if sparse:
        allowed = allowed & chosen(module, x, causal)
    _, probs = plain(module)(x, mask=allowed, causal=False, need_weights=True)
    tokens = indexer(module, x.detach(), low(module, x).detach())
    scores = reference.index_scores(*tokens) / (module.index_heads * module.index_head_dim) ** 0.5
    wanted = reference.indexer_loss(scores, probs.detach(), allowed[:, 0])
    own = {n: p for n, p in module.named_parameters() if n.startswith("indexer.")}
    grads = torch.autograd.grad(wanted, own.values())
    for each in (module, module.cpp()):
        module.zero_grad()
        loss = each.indexer_loss(x, sparse=sparse)
        assert_close(loss, wanted, atol=1e-12, rtol=1e-12)
        loss.backward()
        for parameter, grad in zip(own.values(), grads, strict=True):
            assert_close(parameter.grad, grad, atol=1e-11, rtol=1e-11)
        assert x.grad is None and all(p.grad is None for n, p in module.named_parameters() if n not in own)
    module.zero_grad()
    module(x).sum().backward()
    assert all(p.grad is None for p in own.values())


def test_training_by_the_loss_finds_the_keys_of_attention():
    """Warmed up, the indexer names keys that hold more of the attention than the keys that it named before."""
    module, x = make(seed=1, dtype=torch.float32), torch.randn(4, 32, EMBED)
    with torch.no_grad():
        module.q_b_proj.weight.mul_(4)  # sharp attention: there is something to find
    optimiser = torch.optim.Adam(module.indexer.parameters(), lr=1e-2)

    @torch.no_grad()
    def held():
        _, probs = plain(module)(x, need_weights=True)
        return float((probs * chosen(module, x)).sum(-1).mean())

    before, first = held(), module.indexer_loss(x).item()
    for _ in range(150):
        optimiser.zero_grad()
        loss = module.indexer_loss(x)
        loss.backward()
        optimiser.step()
    assert loss < 0.7 * first
    assert held() > before + 0.1


def test_state_dict_round_trip_and_compile():
    module, x = make(dtype=torch.float32), torch.randn(2, 11, EMBED)
    other = make(dtype=torch.float32, seed=5)
    assert not torch.equal(other(x), module(x))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x), module(x))
    twin = other._make_cpp("cpu")
    assert twin.load_state_dict(module.state_dict()) == ([], [])
    assert torch.equal(twin.forward(x), module(x)) and torch.equal(twin.clone().forward(x), module(x))
    assert torch.equal(attnpack.SparseLatentAttention.from_cpp(twin)(x), module(x))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), module(x), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        cache = attnpack.LatentCache()
        parts = [compiled(part, cache=cache) for part in x.split([5, 1, 5], 1)]
    assert_close(torch.cat(parts, 1), module(x), atol=1e-5, rtol=1e-5)


def test_a_replaced_projection():
    module, x = make(), draw(2, 9, EMBED)
    wanted, losses = module(x), [module.indexer_loss(x, sparse=sparse) for sparse in (False, True)]
    module.kv_b_proj = torch.nn.Sequential(module.kv_b_proj)
    module.indexer.wq_b = torch.nn.Sequential(module.indexer.wq_b)
    assert_close(module(x), wanted, atol=1e-11, rtol=1e-11)
    assert_close([module.indexer_loss(x, sparse=sparse) for sparse in (False, True)], losses, atol=1e-11, rtol=1e-11)
    with pytest.raises(TypeError, match="which C\\+\\+ cannot run"):
        module.cpp()
    module = make()
    module.indexer.k_norm = torch.nn.LayerNorm(8, eps=1e-3, dtype=torch.float64)
    with pytest.raises(TypeError, match="indexer.k_norm is"):
        module.cpp()


def test_a_decoder_by_tokens():
    blocks = [
        attnpack.DecoderBlock(make(seed, dtype=torch.float32), attnpack.FeedForward(EMBED, 32)) for seed in range(2)
    ]
    decoder, x = attnpack.Decoder(blocks), torch.randn(2, 11, EMBED)
    with torch.no_grad():
        for called in (decoder, decoder.cpp()):
            cache = called.new_cache()
            parts = torch.cat([called.forward(part, cache=cache) for part in x.split(1, 1)], 1)
            assert_close(parts, decoder(x), atol=1e-5, rtol=1e-5)
            assert cache.layers[1].index.shape == (2, 1, 11, 8)


WRONG_OPTIONS = {
    "top_k: got 0": {"top_k": 0},
    "index_heads: got 0": {"index_heads": 0},
    "index_head_dim: got -1": {"index_head_dim": -1},
    "kv_lora_rank: got 0": {"kv_lora_rank": 0},
    "rope: got dim 4, want at most 2, index_head_dim": {"index_head_dim": 2},
}


@pytest.mark.parametrize("message", WRONG_OPTIONS)
def test_wrong_options(message):
    for classes in (attnpack, attnpack.cpp):
        settings = SIZES | INDEXER | WRONG_OPTIONS[message]
        with pytest.raises(ValueError, match=message):
            classes.SparseLatentAttention(EMBED, HEADS, **settings, rope=classes.RotaryEmbedding(4))
        for name in ("top_k", "q_lora_rank", "kv_lora_rank"):
            rest = {key: value for key, value in (SIZES | INDEXER).items() if key != name}
            with pytest.raises(TypeError, match=name):
                classes.SparseLatentAttention(EMBED, HEADS, **rest)
    with pytest.raises(ValueError, match="q_lora_rank: got none, want the width of the queries' latent"):
        attnpack.SparseLatentAttention(EMBED, HEADS, **SIZES | INDEXER | {"q_lora_rank": None})
    usual = attnpack.SparseLatentAttention(EMBED, HEADS, **SIZES, top_k=4)
    assert (usual.index_heads, usual.index_head_dim) == (HEADS, 10)


@LANGUAGES
def test_wrong_calls_leave_the_caches_as_they_were(language):
    module, x = make(), draw(2, 5, EMBED)
    other, (called, classes) = plain(module), spoken(module, language)
    full, latents, static = classes.LatentCache(), classes.LatentCache(), CACHES["static"](classes)["cache"]
    with torch.no_grad():
        called.forward(x, cache=full)
        (other if language == "python" else other.cpp()).forward(x, cache=latents)
    before = full.index.clone(), full.k.clone()
    wrong = [
        ("index_cache: got none beside cache", {"cache": static}),
        ("index_cache: got one without cache", {"index_cache": classes.LatentCache()}),
        ("index_cache: got one beside a LatentCache, which holds", {"cache": full, "index_cache": latents}),
        ("index_cache: holds 5 positions, cache 0", {"cache": static, "index_cache": latents}),
        ("cache: got one whose positions have no keys of an indexer", {"cache": latents}),
        ("cache: got a CrossCache, but SparseLatentAttention selects", {"cache": classes.CrossCache()}),
        ("mask", {"cache": full, "mask": torch.ones(3, 3).bool()}),
        ("kv_lens", {"cache": full, "kv_lens": torch.tensor([9, 1])}),
    ]
    for message, inputs in wrong:
        with pytest.raises(ValueError, match=message):
            called.forward(x, **inputs)
    with pytest.raises(ValueError, match="cache: got a LatentCache with the keys of an indexer"):
        (other if language == "python" else other.cpp()).forward(x, cache=full)
    for name in ("context", "key_index", "kv_from"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            called.forward(x, **{name: x})
    assert full.lengths.tolist() == latents.lengths.tolist() == [5, 5] and static.lengths.tolist() == [0, 0]
    assert torch.equal(full.index, before[0]) and torch.equal(full.k, before[1]) and latents.index is None
    with pytest.raises(ValueError, match="x: got shape"):
        called.indexer_loss(x[..., 1:])


def test_several_processes_are_refused():
    module, x = make(), draw(1, 5, EMBED)
    for call in (module, module.indexer_loss):
        with (
            sharded_sequence(ShardedAttention()),
            pytest.raises(ValueError, match="SparseLatentAttention under context_parallel"),
        ):
            call(x)
    with pytest.raises(ValueError, match="SparseLatentAttention has a parameter 'indexer.wq_b.weight'"):
        plan_of(module, 3, 0)
    rows = torch.nested.nested_tensor([x[0], x[0, :3]], layout=torch.jagged)
    with pytest.raises(ValueError, match="x: got a nested tensor, SparseLatentAttention wants a padded one"):
        module(rows)
