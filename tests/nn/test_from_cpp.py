"""from_cpp, the inverse of cpp(): the same parameters, settings, mode and bits, for every module."""

import attnpack
import pytest
import torch
from attnpack.nn.native import NativeModule
from module_cases import CASES, EMBED, make_case
from torch import nn

by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def settings(module):
    """Type and options of each of attnpack's modules, by its place; RoPE stands for its numbers."""
    found = {}
    for name, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, attnpack.RotaryEmbedding):
            found[name] = part._numbers()
        elif isinstance(part, NativeModule) and not isinstance(part, attnpack.EncoderDecoder):
            found[name] = type(part), _as_of_twin(part)
    return found


def _as_of_twin(part):
    """Its options, where those that are dicts have the defaults that the twin adds."""
    own = part._live_config()
    if not any(map(_is_group, own.values())):
        return own
    twin = part._make_cpp("meta").options()
    return own | {name: twin[name] for name, value in own.items() if _is_group(value) and name in twin}


def _is_group(value):
    return isinstance(value, dict) or (
        isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value)
    )


@by_name
def test_the_round_trip_is_the_module(case):
    module, inputs = make_case(case)
    module.eval()
    first = next(iter(module.parameters()), None)
    if first is not None:
        first.requires_grad_(False)
    twin = module.cpp()
    for back in (NativeModule.from_cpp(twin), type(module).from_cpp(twin)):
        assert settings(back) == settings(module)
        assert repr(back).count("\n") == repr(module).count("\n")
        ours, theirs = (dict(m.named_parameters(remove_duplicate=False)) for m in (module, back))
        assert ours.keys() == theirs.keys() and all(theirs[name] is ours[name] for name in ours)
        assert not any(part.training for part in back.modules())
        assert torch.equal(back(*inputs), module(*inputs))
        again = back.cpp()
        assert all(tensor is ours[name] for name, tensor in again.named_parameters())
        assert torch.equal(again.forward(*inputs), module(*inputs))


@by_name
def test_the_module_of_a_cpp_module_of_its_own(case):
    """Its parameters were never Python's; the gradients of either side are those of the other."""
    module, inputs = make_case(case)
    twin = module.cpp().clone()
    back = NativeModule.from_cpp(twin)
    assert type(back) is type(module) and back.training
    held = dict(twin.named_parameters())
    for name, parameter in back.named_parameters(remove_duplicate=False):
        assert type(parameter) is nn.Parameter and parameter is held[name]
    out = back(*inputs)
    assert torch.equal(out, module(*inputs)) and torch.equal(out, twin.forward(*inputs))
    out.sum().backward()
    assert all(
        tensor.grad is not None and tensor.grad is back.get_parameter(name).grad
        for name, tensor in held.items()
        if tensor.requires_grad
    )


def test_dtype_mode_and_frozen_parameters_are_those_of_the_twin():
    twin = attnpack.cpp.DecoderBlock(
        attnpack.cpp.MultiHeadAttention(EMBED, 4, dtype=torch.bfloat16),
        attnpack.cpp.FeedForward(EMBED, 8, dtype=torch.bfloat16),
    )
    dict(twin.named_parameters())["mlp.up_proj.weight"].requires_grad_(False)
    dict(twin.named_children().items())["self_attn"].eval()
    back = NativeModule.from_cpp(twin)
    assert all(parameter.dtype == torch.bfloat16 for parameter in back.parameters())
    assert [name for name, p in back.named_parameters() if not p.requires_grad] == ["mlp.up_proj.weight"]
    assert back.training and back.mlp.training and not back.self_attn.training and not back.self_attn.q_proj.training
    assert attnpack.MultiHeadAttention.from_cpp(
        attnpack.cpp.MultiHeadAttention(8, 2, device="meta")
    ).q_proj.weight.is_meta


def test_one_table_of_two_stacks_stays_one():
    def block(kind, **more):
        return kind(attnpack.MultiHeadAttention(EMBED, 4), attnpack.FeedForward(EMBED, 8), **more)

    table = nn.Embedding(11, EMBED)
    model = attnpack.EncoderDecoder(
        attnpack.Encoder([block(attnpack.EncoderBlock)], embed_tokens=table),
        attnpack.Decoder(
            [block(attnpack.DecoderBlock, cross_attention=attnpack.MultiHeadAttention(EMBED, 4))], embed_tokens=table
        ),
    )
    for twin in (model.cpp(), model.cpp().clone()):
        back = attnpack.EncoderDecoder.from_cpp(twin)
        assert back.encoder.embed_tokens.weight is back.decoder.embed_tokens.weight
        assert len(list(back.parameters())) == len(list(model.parameters()))
        ids = torch.randint(11, (2, 5))
        assert torch.equal(back(ids, ids), model(ids, ids))


def test_a_scaling_and_a_generation_survive():
    scaling = {"rope_type": "longrope", "short_factor": [1.0, 2.0, 3.0], "long_factor": [4.0, 5.0, 6.0], "factor": 2.0}
    model = attnpack.CausalLM(
        32, EMBED, 2, 4, hidden_dim=16, max_positions=8, rope_scaling=scaling, window=(3, 0), tie_embeddings=True
    ).eval()
    back = attnpack.CausalLM.from_cpp(model.cpp().clone())
    assert (
        back.window == (3, 0)
        and back.layers[0].self_attn.rope.long_inv_freq == model.layers[0].self_attn.rope.long_inv_freq
    )
    ids = torch.randint(32, (2, 12))
    assert torch.equal(back.generate(ids, max_new_tokens=4), model.generate(ids, max_new_tokens=4))


def test_a_class_of_ones_own_is_kept():
    class Mine(attnpack.MultiHeadAttention):
        pass

    twin = attnpack.cpp.MultiHeadAttention(8, 2)
    assert type(Mine.from_cpp(twin)) is Mine and type(NativeModule.from_cpp(twin)) is attnpack.MultiHeadAttention
    assert type(attnpack.GroupedQueryAttention.from_cpp(twin)) is attnpack.MultiHeadAttention


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (attnpack.MultiHeadAttention, lambda: attnpack.cpp.GroupedQueryAttention(8, 2, 1), "an attnpack.cpp.MultiHead"),
        (attnpack.FeedForward, lambda: attnpack.FeedForward(8, 8), "an attnpack.cpp.FeedForward: .cpp"),
        (NativeModule, lambda: attnpack.cpp.Linear(8, 2), "a module of attnpack.cpp that has a class in Python"),
        (NativeModule, lambda: None, "a module of attnpack.cpp"),
    ],
    ids=["sibling", "python", "linear", "none"],
)
def test_another_twin_is_refused(kind, given, message):
    with pytest.raises(TypeError, match=f"^attnpack: twin is .*wants {message}"):
        kind.from_cpp(given())
