"""Plain eager calls of a function with a fast path never enter it; all others do, and nobody can tell by the result."""

import copy
import gc
import inspect
import pickle
import pydoc
import sys
import weakref

import attnpack
import pytest
import torch
from attnpack import apply_rope, attention, attention_scores, attention_varlen, merge_states
from op_cases import draw
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

HEADS = draw(2, 4, 5, 8), draw(2, 2, 7, 8, seed=1), draw(2, 2, 7, 6, seed=2)
MASK = draw(5, 7, seed=3)
PACKED = draw(9, 4, 8), draw(12, 2, 8, seed=1), draw(12, 2, 6, seed=2)
ENDS = torch.tensor([0, 4, 9]), torch.tensor([0, 7, 12])
STATE = draw(1, 2, 3, 8), draw(1, 2, 3, seed=1)
ANGLES = draw(5, 4, seed=4), draw(5, 4, seed=5)
RECURRENT = draw(2, 2, 6, 8), draw(2, 2, 6, 8, seed=1), draw(2, 4, 6, 5, seed=2)
CHANNELS = draw(2, 6, 3), draw(3, 4, seed=1)
NAMES = ("attention", "attention_scores", "attention_varlen", "merge_states", "apply_rope")
FUNCTIONS = {name: getattr(attnpack, name) for name in (*NAMES, "linear_attention", "causal_conv1d")}


def entered(function, call) -> int:
    """How many times a call enters the function of Python behind `function`."""
    frames = []
    sys.setprofile(lambda frame, event, arg: frames.append(frame.f_code) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return frames.count(function.__wrapped__.__code__)


PLAIN = {
    "three tensors": (attention, HEADS, {}),
    "a mask by place": (attention, (*HEADS, MASK), {}),
    "a mask by name": (attention, HEADS, {"mask": MASK}),
    "no mask": (attention, (*HEADS, None), {"causal": True}),
    "rules": (attention, HEADS, {"causal": True, "window": (3, 0), "softcap": 2.0, "q_offset": "end", "chunk": 4}),
    "lse": (attention, HEADS, {"return_lse": True, "sinks": torch.ones(4), "head_map": [0, 0, 1, 1]}),
    "lengths": (attention, HEADS, {"kv_lens": torch.tensor([3, 7]), "query_scale": torch.arange(5.0)}),
    "scores": (attention_scores, HEADS[:2], {"stage": "masked", "causal": True}),
    "states": (merge_states, (*STATE, *STATE), {}),
    "rotation": (apply_rope, (HEADS[0], *ANGLES), {}),
    "rotation of pairs": (apply_rope, (HEADS[0], *ANGLES), {"interleaved": True}),
    "recurrence": (attnpack.linear_attention, RECURRENT, {"beta": torch.full((2, 4, 6), 0.5), "scale": 1.0}),
    "recurrence with its state": (attnpack.linear_attention, RECURRENT, {"return_state": True}),
    "convolution": (attnpack.causal_conv1d, CHANNELS, {"activation": "silu"}),
    "convolution with its state": (attnpack.causal_conv1d, (*CHANNELS, torch.ones(3)), {"return_state": True}),
    "packed": (attention_varlen, (*PACKED, *ENDS), {"causal": True}),
    "packed, by name": (attention_varlen, (*PACKED, ENDS[0]), {"cu_seqlens_k": ENDS[1], "return_lse": True}),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_calls_do_not_enter_the_function(name):
    function, tensors, keywords = PLAIN[name]
    assert entered(function, lambda: function(*tensors, **keywords)) == 0
    for got, expected in zip(
        *(torch.utils._pytree.tree_leaves(call(*tensors, **keywords)) for call in (function, function.__wrapped__)),
        strict=True,
    ):
        assert torch.equal(got, expected)


def test_gradients_are_those_of_the_function():
    grads = []
    for call in (attention, attention.__wrapped__):
        leaves = [x.clone().requires_grad_() for x in HEADS]
        grads.append(torch.autograd.grad(call(*leaves, causal=True).square().sum(), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


NESTED = torch.nested.nested_tensor([draw(3, 2, 8), draw(5, 2, 8, seed=1)], layout=torch.jagged).transpose(1, 2)
OTHERS = {
    "tensors by name": lambda: attention(query=HEADS[0], key=HEADS[1], value=HEADS[2]),
    "nested tensors": lambda: attention(NESTED, NESTED, NESTED),
    "a symbolic trace": lambda: make_fx(lambda *x: attention(*x), tracing_mode="fake")(*HEADS),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_enter_it(name):
    assert entered(attention, OTHERS[name]) == 1


def test_fake_tensors_enter_it():
    with FakeTensorMode():
        heads = [torch.empty(x.shape) for x in HEADS]
        assert entered(attention, lambda: attention(*heads)) == 1
    assert entered(attention, lambda: attention(*heads)) == 1  # outside of their mode too


WRONG = {
    "too few": ((*HEADS[:2],), {}),
    "too many": ((*HEADS, None, True), {}),
    "a keyword that is not there": (HEADS, {"is_causal": True}),
    "a mask twice": ((*HEADS, None), {"mask": None}),
    "a query twice": (HEADS, {"query": HEADS[0]}),
    "a list": ((HEADS[0].tolist(), *HEADS[1:]), {}),
    "a nested key": ((HEADS[0], NESTED, HEADS[2]), {}),
    "a wrong kind": (HEADS, {"causal": "yes"}),
    "a shape": ((HEADS[0], HEADS[1], HEADS[0]), {}),
    "a keyword of attention_varlen": (HEADS, {"block_table": None}),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_those_of_the_function(name):
    tensors, keywords = WRONG[name]
    told = []
    for call in (attention, attention.__wrapped__):
        with pytest.raises((TypeError, ValueError)) as error:
            call(*tensors, **keywords)
        told.append((error.type, str(error.value)))
    assert told[0] == told[1]


def test_packed_sequences_take_no_q_offset():
    with pytest.raises(TypeError, match="unexpected keyword argument 'q_offset'"):
        attention_varlen(*PACKED, *ENDS, q_offset=1)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_looks_like_the_function(name):
    function, plain = FUNCTIONS[name], FUNCTIONS[name].__wrapped__
    assert inspect.signature(function) == inspect.signature(plain)
    assert "return_lse" in inspect.signature(attention).parameters
    assert inspect.signature(attention).parameters["window"].annotation == "tuple[int, int]"
    assert (function.__name__, function.__qualname__, function.__module__) == (name, name, plain.__module__)
    assert function.__doc__ == plain.__doc__ and repr(function) == repr(plain)
    assert inspect.isfunction(function.__wrapped__) and not inspect.isfunction(function)  # docs/api/python/ops.md
    assert inspect.isroutine(function) and inspect.getsource(function) == inspect.getsource(plain)
    first = next(iter(inspect.signature(plain).parameters))
    assert f"{name}({first}: 'Tensor', " in pydoc.render_doc(function, renderer=pydoc.plaintext)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_copies_are_the_function_itself(name):
    function = FUNCTIONS[name]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(function, protocol)) is function
    assert copy.copy(function) is function and copy.deepcopy([function])[0] is function
    assert weakref.ref(function)() is function and {function: 1}[function] == 1


def test_in_a_class_it_is_a_method():
    class Heads(torch.Tensor):
        attend = attention

    query = HEADS[0].as_subclass(Heads)
    assert torch.equal(query.attend(*HEADS[1:], causal=True), attention(*HEADS, causal=True))
    assert Heads.attend is attention


def test_it_is_freed_and_holds_no_argument():
    made = attnpack._C.FastPathFunction("attention", lambda *tensors, **rules: None)
    made.itself = made
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
    tensors = [draw(1, 2, 3, 8) for _ in range(3)]
    before = [sys.getrefcount(x) for x in tensors]
    for keywords in ({}, {"is_causal": True}, {"causal": "yes"}):
        try:
            attention(*tensors, **keywords)
        except TypeError:
            pass
    assert [sys.getrefcount(x) for x in tensors] == before
    with pytest.raises(KeyError, match="no fast path is named nothing"):
        attnpack._C.FastPathFunction("nothing", print)


def attend(query, key, value):
    return attention(query, key, value, None, causal=True, window=(3, 0), q_offset=key.size(2) - query.size(2)) * 2


class Layer(torch.nn.Module):
    def forward(self, query, key, value):
        return attend(query, key, value)


def test_compiled_graphs_hold_the_op():
    """torch.compile traces the function, whether it is called in a graph or is the graph."""
    graphs = []

    def keep(graph, inputs):
        graphs.append({node.target for node in graph.graph.nodes})
        return graph.forward

    expected = attend(*HEADS)
    assert torch.equal(torch.compile(attend, backend=keep, fullgraph=True, dynamic=True)(*HEADS), expected)
    bare = torch.compile(attention, backend=keep, fullgraph=True)
    assert torch.equal(bare(*HEADS, MASK, causal=True), attention(*HEADS, MASK, causal=True))
    assert torch.equal(torch.compile(Layer(), backend=keep, fullgraph=True)(*HEADS), expected)
    assert len(graphs) == 3 and all(any("attnpack.attention" in str(op) for op in ops) for ops in graphs)


@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs_hold_the_op(strict):
    length = torch.export.Dim("length", min=5, max=64)
    shapes = {"query": None, "key": {2: length}, "value": {2: length}}
    program = torch.export.export(Layer(), HEADS, dynamic_shapes=shapes, strict=strict)
    longer = HEADS[0], draw(2, 2, 11, 8, seed=4), draw(2, 2, 11, 6, seed=5)
    assert torch.equal(program.module()(*longer), attend(*longer))
    assert any("attnpack.attention" in str(node.target) for node in program.graph.nodes)


def test_a_wrong_keyword_has_our_words_in_a_graph_too():
    for call, name in (
        (lambda q, k, v: attention(q, k, v, is_causal=True), "attention"),
        (lambda q, k, v: attention_scores(q, k, is_causal=True), "attention_scores"),
        (lambda q, k, v: attention_varlen(q[0, 0], k[0, 0], v[0, 0], ENDS[0], is_causal=True), "attention_varlen"),
    ):
        words = rf"attnpack: {name}\(\) got an unexpected keyword argument 'is_causal'"
        with pytest.raises(Exception, match=words):
            torch.compile(call, backend="eager", fullgraph=True)(*HEADS)
        with pytest.raises(TypeError, match=words):
            torch.compile(call, backend="eager")(*HEADS)
