"""Gates on the heads' outputs, keys as values, queries through a latent, and layers that read another layer's cache."""

import copy

import attnpack
import pytest
import torch
from attnpack import reference
from attnpack.ops import gate_heads
from module_cases import EMBED, LATENT
from torch import nn
from torch.library import opcheck
from torch.testing import assert_close

GATES = [("head", "sigmoid"), ("head", "softplus"), ("element", "sigmoid"), ("element", "softplus")]


def grouped(**settings):
    torch.manual_seed(0)
    return attnpack.GroupedQueryAttention(
        EMBED, 4, 2, **{"causal": True, "rope": attnpack.RotaryEmbedding(6)} | settings
    )


def heads(x, count):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def joined_of(module, x):
    """The joined heads, before the output projection."""
    q, k, v = module.project(x)
    out = reference.attention(q, k, v, causal=module.causal, scale=module.scale)
    return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("gate, activation", GATES)
def test_the_gate_is_a_factor_before_o_proj(gate, activation):
    module, x = grouped(gate=gate, gate_activation=activation, bias=True), torch.randn(2, 5, EMBED)
    assert module.gate_proj.weight.shape == (4 if gate == "head" else 24, EMBED)
    gated = reference.gate_heads(joined_of(module, x), module.gate_proj(x), 4, activation)
    wanted = module.o_proj(gated)
    for each in (module, module.cpp()):
        assert_close(each.forward(x), wanted)
        assert_close(each.forward(x, need_weights=True)[0], wanted)
    plain = grouped(bias=True)
    plain.load_state_dict(module.state_dict(), strict=False)
    assert not torch.allclose(plain(x), wanted, atol=1e-3)


@pytest.mark.parametrize("gate, activation", GATES)
def test_gradients_of_a_gate(gate, activation):
    joined, gates = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(2, 3, 4 if gate == "head" else 8).double()
    joined.requires_grad_(), gates.requires_grad_()
    torch.autograd.gradcheck(lambda j, g: gate_heads(j, g, 4, activation), (joined, gates))
    opcheck(torch.ops.attnpack.gate_heads.default, (joined, gates, 4, activation))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gate_in_few_bits(dtype):
    joined, gate = torch.randn(2, 3, 8).to(dtype), torch.randn(2, 3, 4).to(dtype)
    truth = reference.gate_heads(joined.double(), gate.double(), 4)
    error = (reference.gate_heads(joined, gate, 4).double() - truth).abs().max()
    out = gate_heads(joined, gate, 4)
    assert out.dtype == dtype and (out.double() - truth).abs().max() <= 2 * error


@pytest.mark.parametrize("gate", ["head", "element"])
@pytest.mark.parametrize("path", ["expanded", "absorbed"])
def test_the_gate_of_latent_attention(gate, path):
    torch.manual_seed(0)
    module = attnpack.MultiHeadLatentAttention(EMBED, 4, **LATENT, causal=True, gate=gate, path=path).eval()
    plain = attnpack.MultiHeadLatentAttention(EMBED, 4, **LATENT, causal=True, path=path).eval()
    plain.load_state_dict(module.state_dict(), strict=False)
    plain.o_proj = nn.Identity()
    x = torch.randn(2, 5, EMBED)
    wanted = module.o_proj(reference.gate_heads(plain(x), module.gate_proj(x), 4))
    assert_close(module(x), wanted)
    assert_close(module.cpp().forward(x), wanted)
    cache = attnpack.LatentCache()
    with torch.no_grad():
        assert_close(
            torch.cat([module(part, cache=cache) for part in x.split([2, 1, 2], 1)], 1), wanted, atol=1e-5, rtol=0
        )


def test_a_gate_by_element_cannot_be_folded():
    sizes = {**LATENT, "causal": True}
    by_head = attnpack.MultiHeadLatentAttention(EMBED, 4, **sizes, gate="head").eval()
    x = torch.randn(2, 5, EMBED)
    assert_close(by_head.fold()(x), by_head(x), atol=1e-5, rtol=0)
    module = attnpack.MultiHeadLatentAttention(EMBED, 4, **sizes, gate="element")
    for fold in (module.fold, module.cpp().fold):
        with pytest.raises(ValueError, match="gate: got 'element' for a folded layer.*take 'head'"):
            fold()


@pytest.mark.parametrize("gate", ["head", "element"])
def test_a_gated_layer_by_tokens_nested_and_copied(gate):
    module = grouped(gate=gate, q_lora_rank=9).eval()
    x = torch.randn(1, 6, EMBED)
    with torch.no_grad():
        whole = module(x)
        cache = attnpack.DynamicCache()
        assert_close(torch.cat([module(part, cache=cache) for part in x.split([3, 1, 2], 1)], 1), whole)
        assert torch.equal(copy.deepcopy(module)(x), whole)
        nested = torch.nested.nested_tensor([x[0], x[0, :2]], layout=torch.jagged)
        first, second = module(nested).unbind()
        assert_close(first, whole[0])
        assert_close(second, whole[0, :2])
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert_close(compiled(x), whole)
    assert f"gate='{gate}'" in repr(module) or f"gate={gate}" in repr(module)
    assert f"gate={gate}, gate_activation=sigmoid" in repr(module.cpp())
    assert "gate" not in grouped().extra_repr() and "gate" not in repr(grouped().cpp())
    assert type(module).from_cpp(module.cpp()).gate == gate


def test_a_layer_in_chunks_by_tokens_nested_and_compiled():
    module, x = grouped(chunk=3, causal=True).eval(), torch.randn(1, 7, EMBED)
    plain = grouped(causal=True).eval()
    plain.load_state_dict(module.state_dict())
    row = torch.arange(7)
    with torch.no_grad():
        whole = plain(x, mask=row.unsqueeze(1) // 3 == row // 3)
        assert_close(module(x), whole)
        assert_close(module.cpp()(x), whole)
        for cache in (attnpack.DynamicCache(), attnpack.StaticCache(1, module.num_kv_heads, 9, module.head_dim)):
            assert_close(torch.cat([module(part, cache=cache) for part in x.split([3, 1, 3], 1)], 1), whole)
        nested = module(torch.nested.nested_tensor([x[0], x[0, :4]], layout=torch.jagged))
        for part, length in zip(nested.unbind(), (7, 4), strict=True):
            assert_close(part, whole[0, :length])
        assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(x), whole)
    with pytest.raises(ValueError, match="context: got one, but this module has chunks"):
        module(x, x)


def normed(x, eps=1e-6):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("qk_norm", [False, True, {"values": False}, {"eps": 0.5}], ids=str)
def test_keys_are_the_values_before_their_norm_and_rotation(qk_norm):
    module, x = grouped(keys_as_values=True, qk_norm=qk_norm), torch.randn(2, 5, EMBED)
    assert "v_proj.weight" not in module.state_dict()
    raw = heads(module.k_proj(x), 2)
    eps = qk_norm.get("eps", 1e-6) if isinstance(qk_norm, dict) else 1e-6
    wanted = raw if qk_norm in (False, {"values": False}) else normed(raw, eps)
    for each in (module, module.cpp()):
        assert_close(each.project(x)[2], wanted)
        assert_close(each.forward(x), module.o_proj(joined_of(module, x)))
    with torch.no_grad():
        cache = attnpack.DynamicCache()
        parts = [module.eval()(part, cache=cache) for part in x.split([2, 3], 1)]
        assert_close(torch.cat(parts, 1), module(x))
        assert_close(cache.v, wanted)


def test_values_are_normed_beside_v_proj():
    module, x = grouped(qk_norm={"values": True}), torch.randn(2, 5, EMBED)
    assert set(module.state_dict()) == {f"{name}_proj.weight" for name in "qkvo"} | {"q_norm.weight", "k_norm.weight"}
    for each in (module, module.cpp()):
        assert_close(each.project(x)[2], normed(heads(module.v_proj(x), 2)))
    assert type(module).from_cpp(module.cpp()).qk_norm["values"] is True


def test_queries_through_a_latent():
    """As Step-3 has them: wq(inter_norm(q_proj(x)))."""
    module, x = grouped(q_lora_rank=9), torch.randn(2, 5, EMBED)
    with torch.no_grad():
        module.q_a_layernorm.weight.normal_()
    wanted = heads(module.q_b_proj(normed(module.q_a_proj(x)) * module.q_a_layernorm.weight), 4)
    wanted = module.rope(wanted)
    for each in (module, module.cpp()):
        assert_close(each.project(x)[0], wanted)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters() if name.startswith("q_")}
    assert shapes == {"q_a_proj.weight": (9, EMBED), "q_a_layernorm.weight": (9,), "q_b_proj.weight": (24, 9)}


REFUSED = {
    "gate: got 'heads', want 'head' or 'element', or none": {"gate": "heads"},
    "gate_activation: got 'relu', want 'sigmoid' or 'softplus'": {"gate": "head", "gate_activation": "relu"},
    "gate_activation: got 'softplus' without a gate": {"gate_activation": "softplus"},
    "q_lora_rank: got 0, want at least 1": {"q_lora_rank": 0},
    "vdim: got 7, want that of the keys": {"keys_as_values": True, "vdim": 7},
    "qk_norm: got all_heads together with values": {"keys_as_values": True, "qk_norm": {"all_heads": True}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_options_that_do_not_go_together(message):
    for classes in (attnpack, attnpack.cpp):
        with pytest.raises(ValueError, match=message):
            classes.GroupedQueryAttention(EMBED, 4, 2, **REFUSED[message])


def test_keys_that_are_values_take_no_value_context():
    module, x = grouped(keys_as_values=True), torch.randn(2, 5, EMBED)
    for each in (module, module.cpp()):
        with pytest.raises(ValueError, match="value_context: got a tensor, but with keys_as_values"):
            each.forward(x, x, value_context=x)


CONVERSIONS = [("to_gqa", 2), ("to_mqa", None), ("to_mla", 32)]


@pytest.mark.parametrize("name, size", CONVERSIONS)
@pytest.mark.parametrize("gate", ["head", "element"])
def test_conversions_carry_the_gate(name, size, gate):
    torch.manual_seed(0)
    module = attnpack.GroupedQueryAttention(EMBED, 4, 2, causal=True, gate=gate, gate_activation="softplus")
    with torch.no_grad():
        for proj in (module.k_proj, module.v_proj):  # equal kv heads, so that merging loses nothing
            proj.weight[6:] = proj.weight[:6]
    x = torch.randn(2, 5, EMBED)
    made = getattr(attnpack.convert, name)(module, *([] if size is None else [size]))
    assert made.gate == gate and made.gate_activation == "softplus"
    assert torch.equal(made.gate_proj.weight, module.gate_proj.weight)
    assert_close(made(x), module(x), atol=1e-5, rtol=0)


def test_conversions_refuse_what_they_would_lose():
    convert = attnpack.convert
    for settings, message in (
        ({"keys_as_values": True}, "keys_as_values: got a layer with it"),
        ({"q_lora_rank": 9}, "q_lora_rank: got a layer with 9"),
    ):
        module = attnpack.GroupedQueryAttention(EMBED, 4, 2, **settings)
        for call in (lambda m: convert.to_gqa(m, 1), convert.to_mqa, lambda m: convert.to_mla(m, 24)):
            with pytest.raises(ValueError, match=message):
                call(module)
    gated = attnpack.MultiHeadAttention(EMBED, 4, gate="element")
    with pytest.raises(ValueError, match="gate: got 'element'.*'aligned'"):
        convert.to_gqa(gated, 2, method="aligned")


# ---- kv_from --------------------------------------------------------------------------------------------------------

MADE = {
    "DynamicCache": lambda m: m.DynamicCache(),
    "StaticCache": lambda m: m.StaticCache(2, 2, 12, 6),
    "PagedCache": lambda m: m.PagedCache(2, 2, 6, num_pages=8, page_size=4),
}
LAYERS = {
    "rope": {},
    "window": {"window": (3, 0), "sinks": True, "softcap": 2.0},
    "dynamic rope": {
        "rope": attnpack.RotaryEmbedding(6, max_positions=3, scaling={"rope_type": "dynamic", "factor": 4.0})
    },
    "alibi": {"rope": None, "alibi": True},
}


def with_kv_of(owner, reader):
    """A layer that has the owner's keys and values, and the reader's queries."""
    both = copy.deepcopy(reader)
    both.k_proj, both.v_proj = owner.k_proj, owner.v_proj
    return both


@pytest.mark.parametrize("settings", LAYERS)
@pytest.mark.parametrize("kind", MADE)
@torch.no_grad()
def test_a_layer_reads_the_cache_of_another(kind, settings):
    owner, reader = grouped(**LAYERS[settings]).eval(), grouped(**LAYERS[settings]).eval()
    for parameter in reader.parameters():
        parameter.normal_()
    wanted_layer, x, own = with_kv_of(owner, reader), torch.randn(2, 9, EMBED), attnpack.DynamicCache()
    for made, first, second in (
        (MADE[kind](attnpack), owner, reader),
        (MADE[kind](attnpack.cpp), owner.cpp(), reader.cpp()),
    ):
        own.reset()
        for part, lens in zip(x.split([4, 1, 3, 1], 1), (None, None, torch.tensor([1, 3]), None), strict=True):
            first.forward(part, cache=made, kv_lens=lens)
            before = made.lengths.clone()
            out, weights = second.forward(part, kv_from=made, kv_lens=lens, need_weights=True)
            assert torch.equal(made.lengths, before)
            wanted, wanted_weights = wanted_layer(part, cache=own, kv_lens=lens, need_weights=True)
            for b in range(2):
                valid = part.size(1) if lens is None else int(lens[b])
                assert_close(out[b, :valid], wanted[b, :valid], atol=1e-5, rtol=1e-5)
                assert_close(weights[b, :, :valid], wanted_weights[b, :, :valid], atol=1e-5, rtol=1e-5)
            assert torch.equal(second.forward(part, kv_from=made, kv_lens=lens), out)


@torch.no_grad()
def test_a_mask_over_a_shared_cache():
    owner, reader = grouped().eval(), grouped(gate="head").eval()
    wanted_layer, x = with_kv_of(owner, reader), torch.randn(2, 5, EMBED)
    mask = torch.rand(2, 1, 5, 5) > 0.3
    for made in (attnpack.DynamicCache(), attnpack.StaticCache(2, 2, 12, 6)):
        owner(x, cache=made, mask=mask)
        assert_close(reader(x, kv_from=made, mask=mask), wanted_layer(x, mask=mask))


@torch.no_grad()
def test_a_shared_static_cache_compiles_once():
    owner, reader = grouped().eval(), grouped(window=(3, 0)).eval()

    def step(x, cache):
        return owner(x, cache=cache) + reader(x, kv_from=cache)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    x, caches = torch.randn(2, 6, EMBED), [attnpack.StaticCache(2, 2, 12, 6) for _ in range(2)]
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for part in x.split(1, 1):
            assert_close(compiled(part, caches[0]), step(part, caches[1]))


def test_gradients_reach_the_reading_layer_alone():
    owner, reader, x, cache = grouped(), grouped(), torch.randn(2, 5, EMBED), attnpack.DynamicCache()
    owner(x, cache=cache)
    reader(x, kv_from=cache).sum().backward()
    assert reader.q_proj.weight.grad.abs().sum() > 0
    assert reader.k_proj.weight.grad is None and all(p.grad is None for p in owner.parameters())


@pytest.mark.parametrize("settings", LAYERS)
@pytest.mark.parametrize("kind", MADE)
def test_the_reader_has_the_gradients_of_its_own_queries(kind, settings):
    """Those of a layer with the owner's keys and values as constants: for x and for every parameter that is used."""
    owner, reader = grouped(**LAYERS[settings]), grouped(gate="head", **LAYERS[settings])
    for parameter in reader.parameters():
        torch.nn.init.normal_(parameter)
    used = [p for name, p in reader.named_parameters() if not name.startswith(("k_proj", "v_proj"))]
    x, weight = torch.randn(2, 9, EMBED), torch.linspace(-1, 1, 2 * 3 * EMBED).view(2, 3, EMBED)
    with torch.no_grad():
        keys, values = owner.k_proj(x), owner.v_proj(x)
    for made, first, second in (
        (MADE[kind](attnpack), owner, reader),
        (MADE[kind](attnpack.cpp), owner.cpp(), reader.cpp()),
    ):
        with torch.no_grad():
            first.forward(x, cache=made)
        new = x[:, 6:].clone().requires_grad_()
        grads = torch.autograd.grad((second.forward(new, kv_from=made) * weight).sum(), [new, *used])
        whole = torch.cat([x[:, :6], wanted_x := x[:, 6:].clone().requires_grad_()], 1)
        out = attend_constant(reader, whole, keys, values)[:, 6:]
        wanted = torch.autograd.grad((out * weight).sum(), [wanted_x, *used])
        for a, b in zip(grads, wanted, strict=True):
            assert_close(a, b, atol=1e-4, rtol=1e-4)


def attend_constant(layer, x, keys, values):
    """The layer's output of x over keys and values [B, L, Hkv * D] that are given, before rotation."""
    key, value = (each.unflatten(-1, (2, 6)).transpose(1, 2) for each in (keys, values))
    query = layer.q_proj(x).unflatten(-1, (4, 6)).transpose(1, 2)
    settings = layer._settings(query) | {"causal": True, "rope": None if layer.rope is None else layer.rope.settings}
    joined = attnpack.ops.attend(query, key, value, **settings)
    return layer._output(joined, x)


def filled(module, **made):
    cache = attnpack.DynamicCache()
    module(torch.randn(2, 5, EMBED), cache=cache)
    return cache


def test_kv_from_is_refused_where_it_cannot_be_read():
    module, x = grouped(), torch.randn(2, 5, EMBED)
    held, ring = filled(module), attnpack.SlidingWindowCache(3)
    cases = {
        "context: got one together with kv_from": {"kv_from": held, "context": x},
        "cache: got one together with kv_from": {"kv_from": held, "cache": attnpack.DynamicCache()},
        "kv_from: got an empty cache": {"kv_from": attnpack.DynamicCache()},
        "kv_from: got a SlidingWindowCache": {"kv_from": ring},
        "kv_from: got a CrossCache": {"kv_from": attnpack.CrossCache()},
        "kv_from: got keys of shape .*want 2 kv heads of head_dim 6": {
            "kv_from": filled(attnpack.MultiHeadAttention(EMBED, 4))
        },
    }
    for message, arguments in cases.items():
        with pytest.raises(ValueError, match=message):
            module(x, **arguments)
    with pytest.raises(ValueError, match="kv_from: holds 5 positions of sequence 0, but x has 7 new tokens"):
        module(torch.randn(2, 7, EMBED), kv_from=held)
    with pytest.raises(ValueError, match="kv_from: got a cache of batch 2, want 3"):
        module(torch.randn(3, 5, EMBED), kv_from=held)
    with pytest.raises(TypeError, match="kv_from is a list, GroupedQueryAttention wants"):
        module(x, kv_from=[held])
    twin = module.cpp()
    for message, arguments in (
        ("kv_from: got an empty cache", {"kv_from": attnpack.cpp.DynamicCache()}),
        ("kv_from: got a SlidingWindowCache", {"kv_from": attnpack.cpp.SlidingWindowCache(3)}),
        ("cache: got one together", {"kv_from": attnpack.cpp.DynamicCache(), "cache": attnpack.cpp.DynamicCache()}),
        ("context: got one together", {"kv_from": attnpack.cpp.DynamicCache(), "context": x}),
    ):
        with pytest.raises(ValueError, match=message):
            twin.forward(x, **arguments)


@pytest.mark.parametrize("native", [False, True], ids=["python", "cpp"])
def test_modules_that_read_no_other_layers_cache(native):
    x, classes = torch.randn(2, 5, EMBED), attnpack.cpp if native else attnpack
    cache = classes.DynamicCache()
    modules = {
        "SelfAttention": (classes.SelfAttention(EMBED), (x,)),
        "MultiHeadLatentAttention": (classes.MultiHeadLatentAttention(EMBED, 4, **LATENT), (x,)),
        "ProjectedAttention": (classes.ProjectedAttention(4, 4, 6), (x, x, x)),
    }
    for name, (module, inputs) in modules.items():
        with pytest.raises(ValueError, match=f"kv_from: got a cache, but {name} reads no other layer's"):
            module.forward(*inputs, kv_from=cache)
