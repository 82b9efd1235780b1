"""generate keeps the twin of a model between calls: never with old weights or settings, and at no cost in memory."""

import copy
import functools
import gc
import io
import threading
import weakref

import attnpack
import pytest
import torch
from attnpack.nn import cached_twin
from small_lm import greedy, small_lm
from torch import nn
from torch.overrides import TorchFunctionMode

IDS = torch.tensor([[3, 14, 15, 9, 26]])


@pytest.fixture
def model():
    model = small_lm()
    model.generate(IDS, max_new_tokens=1)
    return model


@pytest.fixture
def made(monkeypatch):
    """A list that grows by each twin that is made."""
    made, make = [], attnpack.CausalLM.cpp
    monkeypatch.setattr(attnpack.CausalLM, "cpp", lambda self: made.append(1) or make(self))
    return made


def check(model, before=None):
    """generate gives what the Python module gives, and not what it gave before."""
    tokens = model.generate(IDS, max_new_tokens=6)
    assert torch.equal(tokens, greedy(model, IDS, 6))
    assert before is None or not torch.equal(tokens, before)
    return tokens


def test_a_model_that_stays_keeps_its_twin(model, made):
    for _ in range(3):
        check(model)
    model.requires_grad_(False)
    check(model)
    assert not made


def test_steps_of_an_optimizer_are_seen(model, made):
    before, optimizer = check(model), torch.optim.SGD(model.parameters(), lr=2.0)
    model(IDS).logsumexp(-1).sum().backward()
    optimizer.step()
    check(model, before)
    assert not made


def test_replaced_parameters_are_seen(model):
    before = check(model)
    model.load_state_dict({name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}, assign=True)
    before = check(model, before)
    model.layers[1].mlp.down_proj.weight = nn.Parameter(torch.randn(24, 48))
    before = check(model, before)
    model.lm_head.weight.data = torch.randn(50, 24)
    before = check(model, before)
    model.layers[0].self_attn.k_proj = nn.Linear(24, 12, bias=False)
    before = check(model, before)
    model.model.embed_tokens = nn.Embedding(50, 24)
    check(model, before)


def test_a_weight_of_another_shape_is_refused(model):
    model.layers[0].self_attn.k_proj = nn.Linear(24, 24, bias=False)
    for _ in range(2):
        with pytest.raises(ValueError, match="k_proj.weight of shape"):
            model.generate(IDS, max_new_tokens=2)


def test_dtype_and_mode_are_those_of_now(model):
    wanted = copy.deepcopy(model).to(torch.bfloat16).cpp().generate(IDS, max_new_tokens=6)
    assert torch.equal(model.to(torch.bfloat16).generate(IDS, max_new_tokens=6), wanted)
    check(model.to(torch.float64))
    with cached_twin.cached_twin(model.train()) as twin:
        assert twin.training and dict(twin.named_parameters())["lm_head.weight"] is model.lm_head.weight
    with cached_twin.cached_twin(model.eval()) as twin:
        assert not twin.training


CHANGES = {
    "scale": lambda model: setattr(model.model.layers[0].self_attn, "scale", 2),
    "eps": lambda model: setattr(model.model.norm, "eps", 0.5),
    "hidden_dim": lambda model: setattr(model, "hidden_dim", 3),
    "rope": lambda model: setattr(model.layers[0].self_attn.rope, "interleaved", True),
    "numbers": lambda model: setattr(model.layers[0].self_attn.rope, "inv_freq", (1.0, 0.5, 0.25)),
    "pre_norm": lambda model: setattr(model.layers[1], "pre_norm", False),
    "fewer layers": lambda model: setattr(model.model, "layers", model.model.layers[:1]),
    "child": lambda model: setattr(model.layers[0].mlp, "up_proj", nn.Sequential(model.layers[0].mlp.up_proj)),
    "no head": lambda model: setattr(model, "lm_head", None),
    "hook": lambda model: model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None),
    "pre hook": lambda model: model.model.register_forward_pre_hook(lambda *_: None),
    "forward": lambda model: setattr(model.lm_head, "forward", lambda x: x),
    "max_norm": lambda model: setattr(model.model.embed_tokens, "max_norm", 1.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_cpp_refuses_is_refused_after_a_call_too(model, change):
    change(model)
    try:
        model.cpp()
    except (TypeError, ValueError) as error:
        refused = error
    for _ in range(2):
        with pytest.raises(type(refused)) as raised:
            model.generate(IDS, max_new_tokens=2)
        assert str(raised.value) == str(refused)


def test_a_scaling_that_changes_in_place_is_refused():
    model = attnpack.CausalLM(50, 24, 1, 4, rope_scaling={"rope_type": "linear", "factor": 2.0})
    model.generate(IDS, max_new_tokens=2)
    model.rope_scaling["factor"] = 8.0
    with pytest.raises(TypeError, match="other layers or settings"):
        model.generate(IDS, max_new_tokens=2)


def test_a_hook_that_goes_again(model, made):
    handle = model.register_forward_hook(lambda *_: None)
    with pytest.raises(TypeError, match="has hooks"):
        model.generate(IDS, max_new_tokens=2)
    handle.remove()
    check(model)
    assert made == [1, 1]


def test_hooks_of_all_modules_are_refused(model, made):
    check(model)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        for call in (model.cpp, lambda: model.generate(IDS, max_new_tokens=2)):
            with pytest.raises(TypeError, match="attnpack: torch has hooks for all modules"):
                call()
    finally:
        handle.remove()
    check(model)


PATCHED = {
    nn.Linear: "q_proj",
    nn.Embedding: "embed_tokens",
    attnpack.FeedForward: "mlp",
    attnpack.RMSNorm: "norm",
    attnpack.GroupedQueryAttention: "self_attn",
    attnpack.DecoderBlock: "0",
}


@pytest.mark.parametrize("named_alike", [False, True])
@pytest.mark.parametrize("kind", PATCHED)
def test_a_patched_class_is_refused(model, monkeypatch, kind, named_alike):
    theirs = kind.forward

    def forward(self, *args, **keywords):
        return 2 * theirs(self, *args, **keywords)

    check(model)  # keeps a twin
    monkeypatch.setattr(kind, "forward", functools.wraps(theirs)(forward) if named_alike else forward)
    with pytest.raises(TypeError, match=f"{PATCHED[kind]} is a {kind.__name__} whose class was given another forward"):
        model.generate(IDS, max_new_tokens=2)


def test_a_mode_that_sees_torchs_functions_is_refused(model):
    class Seeing(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), keywords=None):
            return function(*args, **(keywords or {}))

    check(model)
    with Seeing(), pytest.raises(TypeError, match="a TorchFunctionMode is active"):
        model.generate(IDS, max_new_tokens=2)
    with torch.device("cpu"):  # is such a mode, and sees only what makes tensors
        check(model)


def test_a_list_that_changes_in_place_counts(model, made):
    model.layers[0].note = {"a": [1, (2, [3])]}
    check(model)
    model.layers[0].note["a"][1][1].append(4)
    check(model)
    check(model)
    assert made == [1, 1]


def test_copies_have_twins_of_their_own(model):
    before = check(model)
    twins = [copy.deepcopy(model)]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twins.append(torch.load(file, weights_only=False))
    for twin in twins:
        assert torch.equal(check(twin), before)
        with torch.no_grad():
            twin.lm_head.weight.neg_()
        check(twin, before)
        assert torch.equal(check(model), before)


def test_nothing_is_kept_alive(model):
    """Replaced parameters go at once: between calls the twin holds no weight."""
    old = [weakref.ref(parameter) for parameter in model.parameters()]
    storage = weakref.ref(model.lm_head.weight.untyped_storage())
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    gc.collect()
    assert all(reference() is None for reference in old) and storage() is None
    _, twin, _ = cached_twin._cache[model]
    assert all(tensor.is_meta for tensor in twin.state_dict().values())


def test_a_model_that_goes_takes_its_twin_along():
    model = attnpack.CausalLM(50, 24, 1, 4)
    model.generate(IDS, max_new_tokens=1)
    gc.collect()
    count, gone = len(cached_twin._cache), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and len(cached_twin._cache) == count - 1


def test_calls_at_a_time_have_a_twin_each(model):
    """One in the callback of another, and one in another thread while the first waits."""
    wanted, results = check(model), []

    def call(tokens=None):
        results.append(model.generate(IDS, max_new_tokens=6))

    assert torch.equal(model.generate(IDS, max_new_tokens=6, callback=call), wanted)

    def call_in_thread(tokens):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    assert torch.equal(model.generate(IDS, max_new_tokens=6, callback=call_in_thread), wanted)
    assert len(results) == 12 and all(torch.equal(result, wanted) for result in results)
    check(model)


def test_a_call_that_raises_leaves_the_twin_usable(model, made):
    def broken(tokens):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        model.generate(IDS, max_new_tokens=2, callback=broken)
    check(model)
    assert not made
