"""Values of the wrong kind that Python or pybind would convert, and calls that pybind would answer with signatures."""

import attnpack
import numpy as np
import pytest
import torch
from errors import X, attention, both, complaint, decoder_block, model
from latent_cases import HEADS, SIZES, E
from torch import nn

IDS = torch.tensor([[1, 2]])
HALF = np.float32(4.7)  # the constructor of pybind's int would take 4

BOTH = {
    "num_heads is .*4.7.*, wants an int": (TypeError, lambda m: m.MultiHeadAttention(24, HALF)),
    "num_heads is True .*, wants an int": (TypeError, lambda m: m.MultiHeadAttention(24, True)),
    "head_map is .*, wants a list of num_heads ints": (
        TypeError,
        lambda m: m.GroupedQueryAttention(24, 4, 2, head_map=[0, 0, 1, True]),
    ),
    r"window is \(True, False\) .*, wants two ints": (
        TypeError,
        lambda m: m.GroupedQueryAttention(24, 4, 2, window=(True, False)),
    ),
    "device is 'yes' .*, wants a torch.device or its name": (TypeError, lambda m: attention_on(m, "yes")),
    "device is 3.5 .*, wants a torch.device or its name": (TypeError, lambda m: m.StaticCache(1, 1, 1, 1, device=3.5)),
    "max_len is .*4.7.*, wants an int": (TypeError, lambda m: m.StaticCache(1, 1, HALF, 1)),
    "n is .*, wants an int, how many positions": (TypeError, lambda m: m.DynamicCache().crop(torch.tensor([5.0]))),
    "layers is True .*, wants": (TypeError, lambda m: m.ModelCache(True)),
    "num_layers: got 1099511627776, want 1 to 65536": (ValueError, lambda m: m.ModelCache(2**40)),
    "layers is .*, wants": (TypeError, lambda m: m.ModelCache(2**70)),
    "top_k is True .*, wants an int, or None": (
        TypeError,
        lambda m: model(m).generate(IDS, max_new_tokens=1, top_k=True),
    ),
    r"stop_tokens is \[1.5\] .*, wants a token number": (
        TypeError,
        lambda m: model(m).generate(IDS, max_new_tokens=1, stop_tokens=[1.5]),
    ),
    "embed_tokens is 'yes' .*, wants an": (
        TypeError,
        lambda m: m.Decoder([decoder_block(m)], embed_tokens="yes"),
    ),
    r"kv_lens has shape \[\], wants \[batch\]": (
        ValueError,
        lambda m: m.MultiHeadLatentAttention(E, HEADS, path="expanded", **SIZES).forward(
            torch.randn(1, 3, E), kv_lens=torch.tensor(2)
        ),
    ),
}
CPP = {
    "state_dict is 5 .*, wants a dict of names and tensors": lambda m: attention(m).load_state_dict(5),
    r"load_state_dict\(\) lacks the argument state_dict": lambda m: attention(m).load_state_dict(),
    "mode is 'x' .*, wants True or False": lambda m: attention(m).train("x"),
    r"eval\(\) got 1 arguments without names, takes none": lambda m: attention(m).eval(1),
    r"options\(\) got 1 arguments without names": lambda m: attention(m).options(1),
    r"clone\(\) got 1 arguments without names": lambda m: attention(m).clone(1),
    "device is 3.5 .*, wants": lambda m: attention(m).to(3.5),
    "to: got keyword bar, want device or dtype": lambda m: attention(m).to(bar=1),
    r"reset\(\) got 1 arguments without names": lambda m: m.DynamicCache().reset(1),
    r"reorder\(\) lacks the argument index": lambda m: m.DynamicCache().reorder(),
    r"DynamicCache\(\) got 1 arguments without names": lambda m: m.DynamicCache(3),
}
OPS = {
    "query has the layout Sparse, wants a dense tensor": lambda q: attnpack.attention(q.to_sparse(), q, q),
    r"q_offset is array\(.*\), wants an int": lambda q: attnpack.attention(q, q, q, q_offset=np.zeros(3)),
    "q_offset is True, wants an int": lambda q: attnpack.attention(q, q, q, q_offset=True),
}


def attention_on(m, device):
    return m.GroupedQueryAttention(24, 4, 2, device=device)


@both("message", BOTH)
def test_values_that_would_be_converted(message, m):
    kind, call = BOTH[message]
    complaint(kind, message, call, m)


@pytest.mark.parametrize("message", CPP)
def test_methods_of_cpp_modules(message):
    complaint(TypeError, message, CPP[message], attnpack.cpp)


@pytest.mark.parametrize("message", OPS)
def test_arguments_of_the_operator(message):
    complaint(ValueError, message, OPS[message], torch.randn(1, 2, 3, 4))


def test_ints_of_numpy_and_of_tensors_are_ints():
    module = attnpack.MultiHeadAttention(np.int64(24), torch.tensor(4), head_dim=np.int32(6))
    assert module(X).shape == X.shape and repr(attnpack.cpp.MultiHeadAttention(np.int64(24), 4)).count("num_heads=4")
    stops = (torch.tensor(3), {3, 4}, (3, np.int64(4)), iter([3]))
    for stop_tokens in stops:
        assert model(attnpack).generate(IDS, max_new_tokens=np.int64(1), stop_tokens=stop_tokens).shape == (1, 3)


def test_a_commit_of_more_than_the_room_is_refused():
    cache, new = attnpack.DynamicCache(), torch.randn(1, 2, 3, 4)
    cache.reserve(new, new)
    for new_len in (100, -1):
        complaint(ValueError, f"new_len: got {new_len} after 0 positions", cache.commit, new_len, None)
    cache.commit(3, None)
    for new_len in (1, 2**63 - 1):
        complaint(ValueError, f"new_len: got {new_len} after 3 positions", cache.commit, new_len, None)


@pytest.mark.parametrize("kind", ["MultiHeadAttention", "DynamicCache"])
def test_an_object_whose_constructor_has_not_run_does_not_crash(kind):
    made = getattr(attnpack.cpp, kind)
    with pytest.raises(RuntimeError, match="non-held"):
        made.clone(made.__new__(made))


def test_forward_with_weights_may_be_told_so():
    weights = [attention(attnpack.cpp).forward_with_weights(X, **more)[1] for more in ({}, {"need_weights": True})]
    assert weights[0].shape == weights[1].shape


def test_similar_groups_checks_its_arguments():
    layer = attention(attnpack)
    complaint(ValueError, "num_kv_heads: got 0, want at least 1", attnpack.convert.similar_groups, layer, 0)
    complaint(TypeError, "num_kv_heads is 'x' .*, wants an int", attnpack.convert.similar_groups, layer, "x")
    complaint(
        TypeError, "module is .*, wants a MultiHeadAttention", attnpack.convert.similar_groups, nn.Linear(2, 2), 1
    )
    of_cpp = attnpack.cpp.MultiHeadAttention(16, 4)
    complaint(
        TypeError, "module is an attnpack.cpp.MultiHeadAttention, wants", attnpack.convert.similar_groups, of_cpp, 1
    )


def test_a_block_names_a_part_that_cpp_cannot_run():
    block = attnpack.EncoderBlock(attention(attnpack), nn.Linear(24, 24))
    complaint(TypeError, "EncoderBlock.mlp is a Linear, which C\\+\\+ cannot run there", block.cpp)
