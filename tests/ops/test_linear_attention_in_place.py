"""linear_attention_, which reads and writes states of its caller: the bits of linear_attention, nothing half done."""

import attnpack
import pytest
import torch
from attnpack import linear_attention, ops
from attnpack.ops import linear_attention_
from marks import grid
from op_cases import draw
from recurrent_cases import DECAYS, make
from torch.library import opcheck

NAN = float("nan")


def without_state(x):
    """The tensors of a call, and the state that it begins with."""
    rest = dict(x)
    return [rest.pop(name) for name in ("query", "key", "value")], rest.pop("initial_state"), rest


def compare(x, **settings):
    tensors, state, rest = without_state(x)
    wanted = linear_attention(*tensors, initial_state=state, return_state=True, **rest, **settings)
    owned = state.clone()
    out = linear_attention_(*tensors, owned, **rest, **settings)
    assert torch.equal(out, wanted[0]) and torch.equal(owned, wanted[1])
    assert out.stride() == wanted[0].stride()


@grid(
    4,
    dtype=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    decay=DECAYS,
    beta=(True, False),
    length=(0, 1, 2, 3, 70),
)
def test_bits_are_those_of_linear_attention(dtype, decay, beta, length):
    compare(make(dtype, decay, beta, length, heads=(2, 6), dims=(8, 37)))


def test_lengths_and_packed_sequences():
    x = make(length=20, batch=3)
    x["query"][0, :, 7:] = NAN
    x["log_decay"][1] = 5  # of a sequence without tokens
    compare(x, kv_lens=torch.tensor([7, 0, 20]))
    packed = {name: t[:1] for name, t in make(length=20).items()} | {"initial_state": draw(3, 4, 8, 6)}
    compare(packed, cu_seqlens=torch.tensor([0, 4, 4, 20]))


def test_a_sequence_of_steps_keeps_the_memory():
    x = make(length=9)
    tensors, state, rest = without_state(x)
    whole = linear_attention(*tensors, initial_state=state, **rest)
    owned = state.clone()
    place = owned.data_ptr()
    steps = []
    for i in range(9):
        now = [t[:, :, i : i + 1] for t in tensors]
        steps.append(linear_attention_(*now, owned, **{name: t[:, :, i : i + 1] for name, t in rest.items()}))
    torch.testing.assert_close(torch.cat(steps, 2), whole, rtol=1e-5, atol=1e-5)
    assert owned.data_ptr() == place


BAD = {
    "log_decay: got 0.5, want at most 0": lambda x: x["log_decay"][1, 2, 3:4].fill_(0.5),
    r"state: got Double, want Float": lambda x: x.update(initial_state=x["initial_state"].double()),
    r"state: got strides .*, want a contiguous tensor": lambda x: x.update(
        initial_state=draw(2, 4, 6, 8).transpose(2, 3)
    ),
    r"state: got \[2, 4, 8, 5\], want \[sequences, Hv, D, Dv\]": lambda x: x.update(initial_state=draw(2, 4, 8, 5)),
    "value shares memory with state": lambda x: x.update(value=x["initial_state"].view(2, 4, 6, 8).transpose(2, 3)),
    r"beta: got \[2, 4, 7\], want": lambda x: x.update(beta=x["beta"][:, :, :7]),
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_wrong_is_named_before_anything_is_written(message):
    x = make(length=8)
    BAD[message](x)
    tensors, state, rest = without_state(x)
    before = state.clone()
    with pytest.raises(ValueError, match=message):
        linear_attention_(*tensors, state, **rest)
    assert torch.equal(state, before)


def test_tensors_that_want_gradients_are_refused():
    tensors, state, rest = without_state(make(length=3))
    for wants in (*tensors, state, rest["beta"]):
        wants.requires_grad_()
        with pytest.raises(RuntimeError, match="linear_attention_ writes the state in place and has no gradient"):
            linear_attention_(*tensors, state, **rest)
        with torch.no_grad():
            linear_attention_(*tensors, state.detach().clone(), **rest)
        wants.requires_grad_(False)
    version = state._version
    linear_attention_(*tensors, state, **rest)
    assert state._version > version


@pytest.mark.parametrize("settings", [{}, {"kv_lens": torch.tensor([4, 0])}])
def test_opcheck_compile_and_transforms(settings):
    tensors, state, rest = without_state(make(length=6))
    opcheck(torch.ops.attnpack.linear_attention_.default, (*tensors, state), rest | settings)
    wanted = linear_attention(*tensors, initial_state=state, return_state=True, **rest, **settings)
    owned = state.clone()
    compiled = torch.compile(lambda s: linear_attention_(*tensors, s, **rest, **settings) * 2, fullgraph=True,
                             backend="aot_eager")  # fmt: skip
    assert torch.equal(compiled(owned), wanted[0] * 2) and torch.equal(owned, wanted[1])
    if settings:
        return
    owned = state.clone()

    def one(q, k, v, s, g, b):
        return linear_attention_(q[None], k[None], v[None], s[None], log_decay=g[None], beta=b[None])[0]

    mapped = torch.func.vmap(one)(*tensors, owned, rest["log_decay"], rest["beta"])
    assert torch.equal(mapped, wanted[0]) and torch.equal(owned, wanted[1])


def test_autocast_casts_query_key_and_value():
    tensors, state, rest = without_state(make(length=20))
    low, owned, same = [t.bfloat16() for t in tensors], state.clone(), state.clone()
    with torch.autocast("cpu", torch.bfloat16):
        out = linear_attention_(*tensors, owned, **rest)
    assert torch.equal(out, linear_attention_(*low, same, **rest)) and torch.equal(owned, same)


@pytest.mark.parametrize("kind", ["gated_delta_net", "kimi_delta_attention", "linear_attention", "mamba2"])
def test_generate_writes_the_states_of_its_own_caches(kind):
    torch.manual_seed(0)
    model = attnpack.CausalLM(50, 32, 2, 2, head_dim=16, recurrent={"kind": kind, "head_k_dim": 16})
    ids = torch.randint(50, (2, 5))
    kept = model.model.new_cache()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        tokens = model.generate(ids, max_new_tokens=6)
    names = [event.name for event in profile.events()]
    assert names.count("attnpack::linear_attention_") == 2 * 5 and names.count("attnpack::linear_attention") == 2
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        given = model.generate(ids, max_new_tokens=6, cache=kept)
    assert torch.equal(given, tokens)  # a given cache can go back, so each call makes new states
    assert "attnpack::linear_attention_" not in {event.name for event in profile.events()}


def test_a_layer_refuses_two_states():
    x = torch.randn(1, 2, 8)
    state = torch.zeros(1, 2, 4, 4)
    with pytest.raises((RuntimeError, ValueError), match="owned_state: got one beside state"):
        torch.ops.attnpack.linear_attend(x, x, x, None, 2, "identity", "none", None, state, None, None, state.clone())


def test_layers_pass_opcheck_with_an_owned_state():
    x = torch.randn(1, 2, 8)
    rest = (None, 2, "identity", "none", None, None, None, None, torch.zeros(1, 2, 4, 4))
    opcheck(torch.ops.attnpack.linear_attend.default, (x, x, x, *rest))
    assert ops.linear_attend(x, x, x, None, num_heads=2)[1].shape == (1, 2, 4, 4)
