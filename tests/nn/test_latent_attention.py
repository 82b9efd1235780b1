"""MultiHeadLatentAttention: against a formula in fp64 and its own two paths, and as any module."""

import copy
import pickle

import attnpack
import pytest
import torch
from attnpack import reference
from latent_cases import HEADS, PATHS, SIZES, YARN, E, make_layer
from marks import long
from torch import nn
from torch.testing import assert_close

# ---- the formula -----------------------------------------------------------------------


def formula(module, x, context=None, causal=True, kv_lens=None):
    """The layer by DeepSeek-V2's equations, head by head, in the dtype of x, from only its parameters."""
    m, source = module, x if context is None else context

    def normed(t, norm):
        return t if norm is None else t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6) * norm.weight

    def linear(layer, t):
        return t @ layer.weight.T + (0 if layer.bias is None else layer.bias)

    def turned(t):
        if m.rope is None:
            return t
        theta = torch.tensor(m.rope.inv_freq, dtype=torch.float64)
        angle = torch.arange(t.size(1), dtype=torch.float64).unsqueeze(-1) * theta
        pairs = torch.view_as_complex(t.double().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.full_like(angle, m.rope.factor), angle)).flatten(-2).to(t)

    queries = (
        linear(m.q_proj, x)
        if m.q_proj is not None
        else linear(m.q_b_proj, normed(linear(m.q_a_proj, x), m.q_a_layernorm))
    )
    both = linear(m.kv_a_proj_with_mqa, source)
    c, k_rope = normed(both[..., : m.kv_lora_rank], m.kv_a_layernorm), turned(both[..., m.kv_lora_rank :])
    nope, outs = m.qk_nope_head_dim, []
    for h in range(m.num_heads):
        q = queries.unflatten(-1, (m.num_heads, -1))[:, :, h]
        rows = m.kv_b_proj.weight.unflatten(0, (m.num_heads, -1))[h]
        key = torch.cat([c @ rows[:nope].T, k_rope], -1)
        query = torch.cat([q[..., :nope], turned(q[..., nope:])], -1)
        arguments = {"causal": causal, "scale": m.softmax_scale, "kv_lens": kv_lens}
        outs.append(reference.attention(query[:, None], key[:, None], (c @ rows[nope:].T)[:, None], **arguments)[:, 0])
    return linear(m.o_proj, torch.cat(outs, -1))


FORMS = {
    "deepseek": dict(scaling=YARN, q_lora_rank=20),
    "plain": dict(rope=False, qk_rope_head_dim=0, latent_norm=False),
    "plain q latent": dict(rope=False, qk_rope_head_dim=0, latent_norm=False, q_lora_rank=20),
    "unrotated": dict(rope=False, bias=True),
    "scaled": dict(scale=0.3, q_lora_rank=20, bias=True),
}
by_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@by_form
@pytest.mark.parametrize("path", PATHS)
def test_values_and_gradients_are_those_of_the_formula(form, path):
    module = make_layer(path=path, dtype=torch.float64, **form)
    x = torch.randn(2, 7, E, dtype=torch.float64, requires_grad=True)
    leaves = {"x": x, **dict(module.named_parameters())}
    weight = torch.randn(2, 7, E, dtype=torch.float64)
    results = [
        (out, torch.autograd.grad((out * weight).sum(), list(leaves.values())))
        for out in (module(x), formula(module, x))
    ]
    assert_close(results[0][0], results[1][0], rtol=1e-6, atol=1e-7)  # the tables are fp32
    for name, ours, wanted in zip(leaves, results[0][1], results[1][1], strict=True):
        assert_close(ours, wanted, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@by_form
def test_context(form):
    module = make_layer(dtype=torch.float64, **form)
    x, context = torch.randn(2, 5, E, dtype=torch.float64), torch.randn(2, 9, E, dtype=torch.float64)
    lens = torch.tensor([4, 9])
    for path in ("auto", *PATHS):
        module.path = path
        wanted = formula(module, x, context, causal=False, kv_lens=lens)
        assert_close(module(x, context, kv_lens=lens), wanted, rtol=1e-6, atol=1e-7)
        assert torch.equal(module(x, context), module.cpp().forward(x, context))


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 17, 33, 64])
@by_form
@torch.no_grad()
def test_absorbed_equals_expanded(form, length):
    module, x = make_layer(**form), torch.randn(2, length, E)
    mask = torch.rand(2, 1, 1, length) > 0.3
    outs = []
    for path in PATHS:
        module.path = path
        cache = attnpack.LatentCache()
        cached = torch.cat([module(part, cache=cache) for part in x.split([length // 2, length - length // 2], 1)], 1)
        outs.append((module(x), cached, *module(x, mask=mask, need_weights=True), module(x, causal=False)))
    for a, b in zip(*outs, strict=True):
        assert_close(a, b, rtol=1e-5, atol=2e-6)
    assert_close(outs[0][0], outs[0][1], rtol=1e-5, atol=2e-6)


def test_gradients_by_both_paths_agree_with_a_cache():
    results = []
    for path in PATHS:
        module, cache = make_layer(path=path, scaling=YARN, q_lora_rank=20), attnpack.LatentCache()
        x = torch.randn(2, 9, E, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            module(x[:, :5], cache=cache, kv_lens=torch.tensor([5, 2]))
        new = x[:, 5:].clone().requires_grad_()
        module(new, cache=cache, kv_lens=torch.tensor([3, 4])).square().sum().backward()
        results.append((new.grad, *(p.grad for p in module.parameters())))
        assert not cache.k.requires_grad
    for a, b in zip(*results, strict=True):
        assert a.abs().sum() > 0
        assert_close(a, b, rtol=1e-3, atol=1e-5)


def cost(path, q_len, kv_len, module):
    """Multiply-adds per head and sequence, counted term by term."""
    n, r, v, c = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim, module.kv_lora_rank
    if path == "expanded":
        return kv_len * c * n + kv_len * c * v + q_len * kv_len * (n + r) + q_len * kv_len * v
    return q_len * n * c + q_len * c * v + q_len * kv_len * (c + r) + q_len * kv_len * c


@pytest.mark.parametrize(
    "q_len, past", [(1, 0), (1, 1), (1, 30), (2, 30), (4, 40), (6, 40), (12, 40), (20, 0), (40, 3)]
)
@torch.no_grad()
def test_auto_takes_the_cheaper_path(q_len, past):
    module, x = make_layer(), torch.randn(1, q_len, E)
    operators = {}
    for path in ("auto", *PATHS):
        module.path, cache = path, attnpack.LatentCache()
        if past:
            module(torch.ones(1, past, E), cache=cache)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            module(x, cache=cache)
        operators[path] = [e.input_shapes[:3] for e in profile.events() if e.name == "attnpack::attention"]
    cheaper = min(PATHS, key=lambda path: cost(path, q_len, past + q_len, module))
    assert operators["auto"] == operators[cheaper] and operators["expanded"] != operators["absorbed"]


@torch.no_grad()
@pytest.mark.parametrize("folded", [False, True])
def test_absorbed_reads_latents_in_place(folded):
    """Keys are the cache's buffer and values its first columns, so no tensor of the cache's size is made."""
    module, cache = make_layer(path="absorbed"), attnpack.LatentCache()
    module = module.fold() if folded else module
    for length in (50, 1, 1):
        module(torch.randn(1, length, E), cache=cache)
    seen = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        module(torch.randn(1, 1, E), cache=cache)
    for event in profile.events():
        seen += [
            shape
            for shape in event.input_shapes
            if len(shape) == 4 and event.name in ("aten::copy_", "aten::cat", "aten::contiguous")
        ]
    assert all(shape[2] <= 1 for shape in seen), seen


# ---- folding -----------------------------------------------------------------------------


@by_form
@torch.no_grad()
def test_folding_keeps_the_outputs(form, capsys):
    module, x = make_layer(**form).eval(), torch.randn(2, 9, E)
    folded = module.fold()
    assert folded.kv_b_proj is None and "kv_b_proj.weight" not in folded.state_dict()
    assert_close(folded(x), module(x), rtol=1e-5, atol=5e-6)
    assert_close(folded(x, need_weights=True)[1], module(x, need_weights=True)[1], rtol=1e-5, atol=5e-6)
    cache = attnpack.LatentCache()
    steps = torch.cat([folded(part, cache=cache) for part in x.split([4, 1, 4], 1)], 1)
    assert_close(steps, module(x), rtol=1e-5, atol=5e-6)
    assert torch.equal(folded(x), folded.cpp().forward(x))
    assert torch.equal(folded(x), module.cpp().fold().forward(x))
    n, r, v, c = (
        getattr(module, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    inputs = E if module.q_lora_rank is None else module.q_lora_rank
    grown = HEADS * ((c - n) * inputs + (c - v) * E - (n + v) * c)
    count = [sum(p.numel() for p in m.parameters()) for m in (module, folded)]
    assert count[1] - count[0] == grown
    with pytest.raises(TypeError, match="is folded already"):
        folded.fold()
    with pytest.raises(ValueError, match="is folded already"):
        folded.cpp().fold()


@pytest.mark.parametrize("training", [False, True])
def test_folding_keeps_the_mode(training):
    module = make_layer().train(training)
    assert module.fold().training == module.cpp().fold().training == training


def test_folding_keeps_what_is_frozen_and_hooks_do_not_hinder():
    module, x = make_layer(q_lora_rank=20).eval(), torch.randn(2, 5, E)
    module.kv_a_proj_with_mqa.weight.requires_grad_(False)
    module.register_forward_hook(lambda *_: None)
    folded = module.fold()
    frozen = [name for name, parameter in folded.named_parameters() if not parameter.requires_grad]
    assert frozen == ["kv_a_proj_with_mqa.weight"]
    assert folded.kv_a_proj_with_mqa.weight.data_ptr() != module.kv_a_proj_with_mqa.weight.data_ptr()
    assert_close(folded(x), module(x), rtol=1e-5, atol=5e-6)
    folded(x).sum().backward()
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(parameter.is_meta for parameter in copy.deepcopy(module).to("meta").fold().parameters())


# ---- as any module -----------------------------------------------------------------------


class LowRank(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(0.1 * torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


@pytest.mark.parametrize("path", ["auto", "absorbed"])
@pytest.mark.parametrize("name", ["kv_b_proj", "q_b_proj", "kv_a_proj_with_mqa"])
def test_replaced_projections_run_and_learn(name, path):
    module = make_layer(q_lora_rank=20, path=path)
    merged = copy.deepcopy(module)
    setattr(module, name, LowRank(getattr(module, name)))
    changed = getattr(module, name)
    with torch.no_grad():
        getattr(merged, name).weight += changed.up @ changed.down
    x, lens = torch.randn(2, 6, E), torch.tensor([4, 6])
    for settings in ({}, {"kv_lens": lens}, {"causal": False, "mask": torch.rand(2, 1, 1, 6) > 0.2}):
        for a, b in zip(
            module(x, need_weights=True, **settings), merged(x, need_weights=True, **settings), strict=True
        ):
            assert_close(a, b, rtol=1e-4, atol=1e-5)
    caches = attnpack.LatentCache(), attnpack.LatentCache()
    with torch.no_grad():
        for part in x.split([3, 1, 2], 1):
            a, b = (m(part, cache=c, need_weights=True) for m, c in zip((module, merged), caches, strict=True))
            for ours, wanted in zip(a, b, strict=True):
                assert_close(ours, wanted, rtol=1e-4, atol=1e-5)
    for a, b in zip(module.project(x), merged.project(x), strict=True):
        if path == "auto" or name != "kv_b_proj":
            assert_close(a, b, rtol=1e-4, atol=1e-5)
    module(x).sum().backward()
    assert changed.up.grad.abs().sum() > 0
    with pytest.raises(TypeError, match=f"{name} is a LowRank, which C"):
        module.cpp()
    if name != "kv_a_proj_with_mqa":
        with pytest.raises(TypeError, match="is no plain nn.Linear, fold"):
            module.fold()


def test_a_hook_on_kv_b_proj_runs():
    module, seen = make_layer(path="absorbed"), []
    module.kv_b_proj.register_forward_hook(lambda *_: seen.append(1))
    module(torch.randn(1, 3, E))
    assert seen == [1]


@pytest.mark.parametrize("path", PATHS)
@torch.no_grad()
def test_what_lies_beyond_kv_lens_has_no_influence(path):
    module, x, lens = make_layer(path=path), torch.randn(2, 8, E), torch.tensor([3, 8])
    clean, poisoned = x.clone(), x.clone()
    poisoned[0, 3:] = float("nan")
    out = module(poisoned, kv_lens=lens)
    assert torch.equal(out[0, :3], module(clean, kv_lens=lens)[0, :3]) and torch.equal(
        out[1], module(x, kv_lens=lens)[1]
    )
    cache, other = attnpack.LatentCache(), attnpack.LatentCache()
    module(poisoned, cache=cache, kv_lens=lens), module(clean, cache=other, kv_lens=lens)
    cache.k[0, :, 3:] = float("inf")
    new = torch.randn(2, 2, E)
    assert torch.equal(module(new, cache=cache), module(new, cache=other))
    assert_close(cache.lengths, torch.tensor([5, 10]))


def test_gradients_do_not_meet_what_lies_beyond_kv_lens():
    module, cache = make_layer(path="expanded"), attnpack.LatentCache()
    with torch.no_grad():
        module(torch.randn(2, 6, E), cache=cache, kv_lens=torch.tensor([2, 6]))
    cache.k[0, :, 2:] = float("nan")
    module(torch.randn(2, 1, E), cache=cache).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize("path", ["auto", *PATHS])
@torch.no_grad()
def test_compiled_with_a_static_cache_is_one_graph(path):
    module, x = make_layer(scaling=YARN, path=path).eval(), torch.randn(2, 9, E)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    caches = [attnpack.StaticCache(2, 1, 12, 24, v_head_dim=0) for _ in range(2)]
    torch._dynamo.utils.counters.clear()
    for token in x.split(1, 1):
        assert_close(compiled(token, cache=caches[0]), module(token, cache=caches[1]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert_close(caches[0].k, caches[1].k)
    latents = attnpack.LatentCache()
    module(x, cache=latents)
    assert_close(caches[0].k, latents.k)


@pytest.mark.parametrize("raw_keys", [None, False])
@torch.no_grad()
def test_dynamic_rope_by_steps_equals_a_full_recompute(raw_keys):
    """Past the trained length of 8 steps equal the whole if keys are cached unrotated, but not if they are cached
    rotated."""
    torch.manual_seed(0)
    rope = attnpack.RotaryEmbedding(
        8, max_positions=8, scaling={"rope_type": "dynamic", "factor": 4.0}, raw_keys=raw_keys
    )
    module = attnpack.MultiHeadLatentAttention(E, HEADS, **SIZES, rope=rope, causal=True)
    for path in PATHS:
        module.path, cache, x = path, attnpack.LatentCache(), torch.randn(2, 14, E)
        errors = []
        for i in range(14):
            step, whole = module(x[:, i : i + 1], cache=cache)[:, 0], module(x[:, : i + 1])[:, -1]
            errors.append(float((step - whole).abs().max()))
        assert max(errors[:8]) < 1e-5 and (max(errors) < 1e-5) == (raw_keys is None)


@pytest.mark.parametrize(
    ("path", "cached"),
    [("auto", True), long("auto", False), *(long(path, cached) for path in PATHS for cached in (False, True))],
)
def test_opcheck(path, cached):
    """The ops of the layer; all but latent_expand may write a cache."""
    ops = torch.ops.attnpack
    draw = torch.randn
    query, latent, k_rope, kv_b = draw(2, 3, 4, 7), draw(2, 4, 5), draw(2, 4, 2), draw(3 * (5 + 6), 5)
    cache = (draw(2, 1, 9, 7), torch.tensor([2, 5])) if cached else (None, None)
    place = {"rope_inv_freq": [0.5], "rope_interleaved": True, "causal": True, "scale": 0.3}
    for op in (ops.latent_attend.default, ops.latent_attend_with_weights.default):
        torch.library.opcheck(op, (query, latent, k_rope, kv_b, 6, path, *cache), place)
    if path == "auto":
        torch.library.opcheck(ops.latent_append.default, (query, latent, k_rope, *cache), place)
        torch.library.opcheck(ops.latent_expand.default, (draw(2, 1, 4, 7), draw(2, 4, 33), 5, 3, 6))


@pytest.mark.long
def test_compiled_with_inductor_trains():
    module, x = make_layer(scaling=YARN, q_lora_rank=20), torch.randn(2, 6, E)
    module(x).square().sum().backward()
    wanted = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    module.zero_grad()
    torch._dynamo.reset()
    torch.compile(module, fullgraph=True)(x).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=1e-4)


def test_copies():
    module, x = make_layer(scaling=YARN, path="absorbed"), torch.randn(1, 4, E)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.path == "absorbed" and torch.equal(other(x), module(x))


def test_settings_changed_later_reach_the_twin():
    module, x = make_layer(), torch.randn(1, 4, E)
    module.path, module.scale, module.causal = "absorbed", 0.2, False
    assert torch.equal(module(x), module.cpp().forward(x))
    module.kv_a_layernorm.eps = 0.5
    with pytest.raises(TypeError, match="kv_a_layernorm is .*, C.. has RMSNorm with eps 1e-06 there"):
        module.cpp()


@pytest.mark.parametrize("path", PATHS)
def test_dropout_acts_in_training_alone(path):
    module, x = make_layer(path=path, dropout=0.4), torch.randn(1, 20, E).expand(300, -1, -1)
    with torch.no_grad():
        calm, drawn = module.eval()(x), module.train()(x)
        assert torch.equal(calm, make_layer(path=path)(x)) and not torch.equal(drawn[0], drawn[1])
    assert_close(drawn.mean(0), calm[0], rtol=0, atol=6 * float(drawn.std(0).max()) / 300**0.5)


@pytest.mark.parametrize("path", PATHS)
def test_autocast_and_low_precision(path):
    module, x = make_layer(path=path, scaling=YARN), torch.randn(2, 5, E)
    full = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        cache = attnpack.LatentCache()
        low = torch.cat([module(part, cache=cache) for part in x.split([3, 2], 1)], 1)
    assert low.dtype == torch.bfloat16 and cache.k.dtype == torch.bfloat16
    assert_close(low.float(), full, rtol=0.1, atol=0.1 * float(full.detach().abs().max()))


def test_in_a_decoder_with_a_model_cache():
    torch.manual_seed(0)
    blocks = [attnpack.DecoderBlock(make_layer(seed=i), attnpack.FeedForward(E, 64)) for i in range(2)]
    decoder, x = attnpack.Decoder(blocks).eval(), torch.randn(2, 7, E)
    with torch.no_grad():
        whole = decoder(x)
        latent = attnpack.ModelCache([attnpack.LatentCache() for _ in range(2)])
        for cache in (latent, attnpack.ModelCache(2)):
            out = torch.cat([decoder(part, cache=cache) for part in x.split([3, 1, 3], 1)], 1)
            assert_close(out, whole, rtol=1e-5, atol=1e-5)
            assert cache.nbytes == 2 * 2 * 7 * 24 * 4
        twin, native = decoder.cpp(), attnpack.cpp.ModelCache([attnpack.cpp.LatentCache() for _ in range(2)])
        assert_close(torch.cat([twin.forward(part, cache=native) for part in x.split([3, 1, 3], 1)], 1), whole)
        with latent.lent() as lent:
            twin.forward(x[:, :2], cache=lent)
        assert len(latent) == 9 and latent[0].c.shape == (2, 1, 9, 16)


@pytest.mark.parametrize("module", [attnpack, attnpack.cpp], ids=["python", "cpp"])
def test_a_layer_without_rope_says_that_nothing_is_rotated(module):
    def text(**settings):
        return repr(module.MultiHeadLatentAttention(E, HEADS, **SIZES | settings))

    assert "no dim is rotated" in text()
    assert "no dim is rotated" not in text(rope=module.RotaryEmbedding(8))
    assert "no dim is rotated" not in text(qk_rope_head_dim=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latents": torch.ones(2, 3, 10)}, r"latents has shape \[2, 3, 10\], wants \[batch, 1, length"),
        ({"latents": torch.ones(2, 2, 3, 10)}, r"latents has shape \[2, 2, 3, 10\], wants \[batch, 1, length"),
        (
            {"kv": torch.ones(2, 4, 16)},
            r"kv has shape \[2, 4, 16\], wants \[2, 3, 2 \* \(qk_nope_head_dim \+ v_dim\)\]",
        ),
        ({"kv": torch.ones(2, 3, 15)}, r"kv has shape \[2, 3, 15\], wants \[2, 3, 2 \* "),
        ({"kv": torch.ones(3, 16)}, r"kv has shape \[3, 16\]"),
        ({"kv": torch.ones(2, 3, 16, device="meta")}, "kv is on meta, latents on cpu: move one of them"),
        ({"latent_dim": 11}, "latent_dim is 11, wants 0 to 10, the width of latents"),
        ({"latent_dim": -1}, "latent_dim is -1, wants 0 to 10"),
        ({"num_heads": 0}, "num_heads is 0, wants at least 1"),
        ({"num_heads": -2}, "num_heads is -2, wants at least 1"),
        ({"v_dim": 9}, r"kv has shape \[2, 3, 16\], .* with v_dim = 9"),
        ({"v_dim": -1}, "v_dim is -1, wants 0 or more"),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(x),
)
def test_latent_expand_names_what_does_not_fit(change, message):
    good = {"latents": torch.ones(2, 1, 3, 10), "kv": torch.ones(2, 3, 16), "latent_dim": 6, "num_heads": 2, "v_dim": 5}
    torch.ops.attnpack.latent_expand(**good)
    with pytest.raises(ValueError, match=f"attnpack: {message}"):
        torch.ops.attnpack.latent_expand(**good | change)
