"""Each Python module and its C++ twin: the same parameters by name, bitwise the same outputs and gradients."""

import copy
import pickle

import attnpack
import pytest
import torch
from attnpack.ops import select_blocks
from module_cases import CASES, EMBED, make_case
from processes import run_python

by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def gradients(module, inputs, call):
    """Output, and gradients by name of parameters and inputs."""
    named = dict(module.named_parameters())
    leaves = {**named, **{f"input {i}": x for i, x in enumerate(inputs) if x.requires_grad}}
    for leaf in leaves.values():
        leaf.grad = None
    out = call(*inputs)
    weight = torch.linspace(-1, 1, out.numel()).view_as(out)
    (out * weight).sum().backward()
    return out.detach(), {name: leaf.grad for name, leaf in leaves.items()}


@by_name
def test_twin_has_the_same_parameters(case):
    module, _ = make_case(case)
    twin = module.cpp()
    ours, theirs = dict(module.named_parameters()), dict(twin.named_parameters())
    assert set(ours) == set(theirs)
    assert all(theirs[name].data_ptr() == ours[name].data_ptr() for name in ours)
    assert twin.training == module.training


@by_name
def test_twin_gives_bitwise_the_same(case):
    module, inputs = make_case(case)
    out, grads = gradients(module, inputs, module)
    native_out, native_grads = gradients(module, inputs, module.cpp())
    assert torch.equal(out, native_out)
    assert set(grads) == set(native_grads)
    for name in grads:
        if name.endswith(("e_score_correction_bias", "scalar")):  # frozen
            continue
        assert grads[name] is not None and torch.equal(grads[name], native_grads[name]), name


SINGLE = [case for case in CASES if case.name.split("_")[0] not in ("encoder", "decoder")]


@pytest.mark.parametrize("case", SINGLE, ids=lambda case: case.name)
def test_twin_of_its_own_loads_and_agrees(case):
    """A C++ module with its own storage, filled by name, in another dtype."""
    module, inputs = make_case(case, dtype=torch.float64)
    twin = module._make_cpp("cpu").to(torch.float64)
    assert twin.load_state_dict(module.state_dict()) == ([], [])
    inputs = tuple(x.detach().double() if x.is_floating_point() else x for x in inputs)
    assert torch.equal(module(*inputs), twin.forward(*inputs))
    parameters = dict(twin.named_parameters())
    assert all(parameters[name].data_ptr() != ours.data_ptr() for name, ours in module.named_parameters())


def test_load_state_dict_checks_before_it_writes():
    twin = attnpack.cpp.MultiHeadAttention(24, 4)
    before = {name: tensor.clone() for name, tensor in twin.state_dict().items()}
    good = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    wrong_shape = good | {"v_proj.weight": torch.zeros(3, 3)}
    missing = {name: tensor for name, tensor in good.items() if name != "o_proj.weight"}
    for wrong, message in (
        (wrong_shape, "v_proj.weight of shape"),
        (missing, "o_proj.weight"),
        (good | {"other": torch.zeros(1)}, "other"),
    ):
        for load in (twin.load_state_dict, twin.assign_state_dict):
            with pytest.raises(ValueError, match=message):
                load(wrong)
    assert all(torch.equal(tensor, before[name]) for name, tensor in twin.state_dict().items())
    assert twin.load_state_dict(missing, strict=False) == (["o_proj.weight"], [])


@by_name
def test_clone_keeps_the_type_and_copies(case):
    module, inputs = make_case(case)
    twin = module.cpp()
    copy = twin.clone()
    assert type(copy) is type(twin)
    assert torch.equal(twin.forward(*inputs), copy.forward(*inputs))
    originals = dict(twin.named_parameters())
    for name, parameter in copy.named_parameters():
        assert parameter.data_ptr() != originals[name].data_ptr()
        with torch.no_grad():
            parameter.add_(1.0)
    if originals:
        assert not torch.equal(twin.forward(*inputs), copy.forward(*inputs))


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_initial_values_are_those_of_the_python_module(name):
    torch.manual_seed(3)
    module = attnpack.MultiHeadAttention(EMBED, 4, bias=True)
    torch.manual_seed(3)
    twin = dict(attnpack.cpp.MultiHeadAttention(EMBED, 4, bias=True).named_parameters())
    for kind in ("weight", "bias"):
        torch.testing.assert_close(twin[f"{name}.{kind}"], getattr(getattr(module, name), kind), rtol=1e-6, atol=1e-7)


def test_arguments_of_forward_reach_the_twin():
    torch.manual_seed(0)
    module = attnpack.GroupedQueryAttention(EMBED, 4, 2, rope=attnpack.RotaryEmbedding(6))
    twin = module.cpp()
    x, context, value_context = torch.randn(2, 5, EMBED), torch.randn(2, 7, EMBED), torch.randn(2, 7, EMBED)
    mask = torch.rand(2, 1, 5, 7) > 0.3
    for arguments in (
        {"context": context, "value_context": value_context, "mask": mask},
        {"context": context, "kv_lens": torch.tensor([3, 7])},
        {"causal": True, "positions": torch.tensor([3, 4, 9, 1, 0])},
        {"causal": True, "kv_lens": torch.tensor([3, 5])},
    ):
        out, weights = module(x, need_weights=True, **arguments)
        native_out, native_weights = twin.forward(x, need_weights=True, **arguments)
        assert torch.equal(out, native_out) and torch.equal(weights, native_weights)
        assert torch.equal(twin.forward_with_weights(x, **arguments)[1], weights)
        assert not torch.equal(out, module(x))
        if set(arguments) <= {"context", "positions"}:
            for ours, theirs in zip(module.project(x, **arguments), twin.project(x, **arguments), strict=True):
                assert torch.equal(ours, theirs)


def test_project_is_what_enters_the_operator():
    torch.manual_seed(0)
    for case in CASES:
        module, inputs = make_case(case)
        if not hasattr(module, "project"):
            continue
        query, key, value = module.project(*inputs)
        for ours, theirs in zip((query, key, value), module.cpp().project(*inputs), strict=True):
            assert torch.equal(ours, theirs)
        if getattr(module, "path", None) == "absorbed" or getattr(module, "folded", False):
            assert key.shape[1::2] == (1, 16) and value.shape[1::2] == (
                1,
                10,
            )  # the latents; the outputs are not unfolded yet
            continue
        crosses = hasattr(module, "kdim") or hasattr(module, "kv_lora_rank")
        causal = module.causal and not (crosses and len(inputs) > 1)
        named = {}
        if getattr(module, "top_k", 9) * getattr(module, "key_block", 1) < query.size(2):
            settings = {"local_blocks": module.num_local, "scorer": module.selector, "causal": causal}
            index = select_blocks(query, key, module.key_block, module.top_k, **settings)
            named = {"key_index": index, "key_block": module.key_block}
        out = attnpack.attention(
            query,
            key,
            value,
            **named,
            causal=causal,
            window=module.window or (-1, -1),
            chunk=module.chunk,
            softcap=module.softcap,
            sinks=getattr(module, "sinks", None),
            alibi_slopes=torch.tensor(attnpack.ops.alibi_slopes(module.num_heads)) if module.alibi else None,
            head_map=module.head_map,
            scale=getattr(module, "softmax_scale", module.scale),
        )
        joined = out.transpose(1, 2).flatten(2)
        assert torch.equal(module._output(joined, inputs[0]), module(*inputs)), case.name


def test_caches_of_both_languages_agree():
    torch.manual_seed(0)
    module = attnpack.GroupedQueryAttention(EMBED, 4, 2, causal=True, rope=attnpack.RotaryEmbedding(6)).eval()
    twin, x = module.cpp(), torch.randn(2, 9, EMBED)
    pairs = [
        (attnpack.DynamicCache(), attnpack.cpp.DynamicCache()),
        (attnpack.StaticCache(2, 2, 12, 6), attnpack.cpp.StaticCache(2, 2, 12, 6)),
    ]
    with torch.no_grad():
        for ours, theirs in pairs:
            for chunk, lens in zip(x.split([4, 1, 3, 1], 1), (None, None, torch.tensor([1, 3]), None), strict=True):
                out = module(chunk, cache=ours, kv_lens=lens)
                assert torch.equal(out, twin.forward(chunk, cache=theirs, kv_lens=lens))
                assert len(ours) == len(theirs) and torch.equal(ours.lengths, theirs.lengths)
                assert ours.nbytes == theirs.nbytes
                for b, length in enumerate(ours.lengths.tolist()):
                    assert torch.equal(ours.k[b, :, :length], theirs.k[b, :, :length])
                    assert torch.equal(ours.v[b, :, :length], theirs.v[b, :, :length])


def test_settings_changed_later_reach_the_twin():
    torch.manual_seed(0)
    attention = attnpack.MultiHeadAttention(EMBED, 4, causal=True, rope=attnpack.RotaryEmbedding(6))
    block = attnpack.DecoderBlock(attention, attnpack.FeedForward(EMBED, 32))
    x = torch.randn(2, 5, EMBED)
    before = block(x)
    attention.scale, attention.rope.interleaved, block.pre_norm = 0.1, True, False
    block.input_layernorm.eps = 0.5
    with pytest.raises(TypeError, match="norms: got .*side by side"):
        block.cpp()
    block.post_attention_layernorm.eps = 0.5
    assert torch.equal(block(x), block.cpp().forward(x)) and not torch.equal(block(x), before)
    attention.causal = False
    assert torch.equal(attention(x), attention.cpp().forward(x))
    attention.rope.inv_freq = (1.0, 0.5, 0.1)
    with pytest.raises(TypeError, match="inv_freq"):
        block.cpp()


def test_repr_shows_the_children():
    text = repr(attnpack.cpp.GroupedQueryAttention(EMBED, 4, 2, qk_norm=True))
    assert "GroupedQueryAttention" in text and "q_proj" in text and "RMSNorm(dim=6" in text


def test_cpp_attention_shows_its_sizes():
    for name, sizes in (("MultiHead", (4,)), ("GroupedQuery", (4, 2)), ("MultiQuery", (4,))):
        shown = repr(getattr(attnpack.cpp, f"{name}Attention")(24, *sizes, causal=True))
        kv_heads = ", num_kv_heads=2" if name == "GroupedQuery" else ""
        assert f"{name}Attention(embed_dim=24, num_heads=4{kv_heads}, head_dim=6, causal=true)" in shown
    assert "SelfAttention(embed_dim=24, head_dim=6)" in repr(attnpack.cpp.SelfAttention(24, 6))
    projected = attnpack.cpp.ProjectedAttention(4, 2, 6, causal=True)
    assert repr(projected).endswith("ProjectedAttention(num_heads=4, num_kv_heads=2, head_dim=6, causal=true)")


def test_device_dtype_and_mode_of_a_bound_module():
    with torch.device("meta"):
        by_context = attnpack.cpp.MultiHeadAttention(EMBED, 4)
    by_argument = attnpack.cpp.MultiHeadAttention(EMBED, 4, device="meta", dtype=torch.bfloat16)
    assert all(tensor.is_meta for module in (by_context, by_argument) for tensor in module.state_dict().values())
    assert by_argument.state_dict()["q_proj.weight"].dtype == torch.bfloat16
    module = attnpack.cpp.MultiHeadAttention(EMBED, 4).to("cpu", torch.float64).eval()
    assert module.state_dict()["o_proj.weight"].dtype == torch.float64 and not module.training
    assert module.train().training and not module.to(dtype=torch.float32).train(False).training
    with pytest.raises(TypeError, match="to: got keyword memory"):
        module.to(memory="cpu")


def test_a_meta_embedding_does_not_import_dynamo():
    made = "import attnpack, sys; attnpack.cpp.Embedding(10, 4, device='meta'); print('torch._dynamo' in sys.modules)"
    assert run_python(made).stdout.strip() == "False"


def test_a_native_module_says_how_it_is_copied():
    native = attnpack.MultiQueryAttention(16, 4).cpp()
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"attnpack.cpp.MultiQueryAttention cannot be .* call .clone\(\)"):
            copied(native)
    assert torch.equal(native.clone().forward(torch.ones(1, 2, 16)), native.forward(torch.ones(1, 2, 16)))
