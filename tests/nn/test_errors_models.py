"""Wrong inputs of language models and of generate: one sentence with the argument's name and the fix, in both languages
alike."""

import attnpack
import pytest
import torch
from errors import A_TENSOR, IDS, NINE, both, complains_of_keywords, complaint, model


def generate(m, ids=IDS, **settings):
    return model(m).generate(ids, **{"max_new_tokens": 2} | settings)


KEYWORDS = {"forward": lambda m, **k: model(m).forward(IDS, **k), "generate": generate}


@both("where", KEYWORDS)
def test_other_names_of_the_cache(where, m):
    complains_of_keywords(KEYWORDS[where], m, r"ModelCache\(num_layers\)")


LISTS = {
    r"ids is \[\[1, 2\]\] \(list\), wants an int64 tensor \[batch, length\]": lambda m: model(m).forward([[1, 2]]),
    r"ids is \[\[1, 2\]\] \(list\), wants an int64 tensor": lambda m: generate(m, [[1, 2]]),
    r"lengths is \[1, 2\] \(list\), wants an int32 or": lambda m: model(m).forward(IDS, lengths=[1, 2]),
    r"lengths is \[0, 5\] \(list\), wants an int32 or int64 tensor": lambda m: generate(m, lengths=[0, 5]),
    r"positions is \[0, 1, 2\] \(list\), wants an int64": lambda m: model(m).forward(IDS, positions=[0, 1, 2]),
}


@both("message", LISTS)
def test_a_list_where_a_tensor_is_wanted(message, m):
    complaint(TypeError, message + A_TENSOR, LISTS[message], m)


VALUES = {
    r"ids has dtype .*[Ff]loat.*, wants int64 token numbers: call \.long\(\)": lambda m: model(m).forward(IDS.float()),
    r"ids: got shape \[3\], want token numbers \[B, L\]; .*unsqueeze": lambda m: model(m).forward(IDS[0]),
    "ids holds 11, wants 0 to 10, the tokens of vocab_size 11: use the tokenizer": lambda m: model(m).forward(IDS + 8),
    "ids holds -1, wants 0 to 10": lambda m: model(m).forward(IDS.int() - 2),
    "ids holds 13, wants 0 to 10": lambda m: generate(m, IDS + 12),
    r"lengths has dtype .*, wants int32 or int64: call \.long": lambda m: model(m).forward(
        IDS, lengths=torch.tensor([1.0, 2.0])
    ),
    r"lengths has shape \[3\], wants \[batch\] = \[2\]": lambda m: model(m).forward(IDS, lengths=IDS[0]),
    r"lengths\[1\] is 9, wants 0 to 3": lambda m: model(m).forward(IDS, lengths=NINE),
    r"lengths\[0\] is 0, wants 1 to 3": lambda m: generate(m, lengths=torch.tensor([0, 5])),
    r"lengths\[1\] is 5, wants 1 to 3: the valid tokens of that row": lambda m: generate(
        m, lengths=torch.tensor([1, 5])
    ),
}


@both("message", VALUES)
def test_a_tensor_that_does_not_fit(message, m):
    complaint(ValueError, message, VALUES[message], m)


def test_ids_out_of_the_vocabulary_leave_the_cache_alone():
    cache = attnpack.ModelCache(2)
    language_model = model(attnpack)
    language_model(IDS, cache)
    with pytest.raises(ValueError, match="ids holds 11"):
        language_model(torch.tensor([[11], [1]]), cache)
    with pytest.raises(ValueError, match="ids holds 11"):
        language_model.generate(torch.tensor([[11], [1]]), max_new_tokens=2, cache=cache)
    assert cache.lengths.tolist() == [3, 3]


SETTINGS = {
    r"seed is -1 \(int\), wants an int from 0 to 2\*\*64 - 1, or None": dict(seed=-1),
    r"seed is 1.5 \(float\), wants an int from 0": dict(seed=1.5),
    r"seed is 'a' \(str\), wants an int from 0": dict(seed="a"),
    r"stop_tokens is None \(NoneType\), wants a token number or a list of them, \(\) for none": dict(stop_tokens=None),
    r"stop_tokens is .*abc|stop_tokens is \['a'.*, wants a token number": dict(stop_tokens="abc"),
    r"stop_tokens is 1.5 \(float\), wants a token number": dict(stop_tokens=1.5),
    r"max_new_tokens is '2' \(str\), wants an int": dict(max_new_tokens="2"),
    r"temperature is 'hot' \(str\), wants a number": dict(temperature="hot"),
    r"top_k is 'all' \(str\), wants an int": dict(top_k="all"),
    r"cache is None \(NoneType\), generate wants 'dynamic', 'static', .*'none' .* or a ModelCache": dict(cache=None),
    r"cache is .*, generate wants .*a ModelCache": dict(cache=3),
    "callback is 3.*, wants a function of each step's tokens": dict(callback=3),
    "callback is 'tell me'.*, wants a function of each step's tokens": dict(callback="tell me"),
}


@both("message", SETTINGS)
def test_a_setting_of_generate_of_the_wrong_type(message, m):
    complaint(TypeError, message, generate, m, **SETTINGS[message])


def test_a_missing_argument_is_not_a_list_of_signatures():
    with pytest.raises(TypeError, match=r"generate\(\) lacks the argument max_new_tokens"):
        model(attnpack.cpp).generate(IDS)


def test_a_step_of_generate_that_gives_no_tensor_is_named():
    """The loop of C++ over a model of Python, whose steps are functions."""
    steps = {"states": lambda ids, lengths: torch.zeros(2, 4), "head": lambda state: 3}
    steps |= {"pick_rows": lambda index: None, "agreed": lambda tokens: tokens}
    with pytest.raises(TypeError, match=r"what head returns is 3 \(int\), wants a tensor"):
        attnpack._C.cpp.generate_by(**steps, ids=torch.tensor([[1], [2]]), max_new_tokens=1)
