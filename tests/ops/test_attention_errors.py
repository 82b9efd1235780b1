"""Every error of the operator names the argument, what it got, what it wants and the fix."""

import attnpack
import pytest
import torch
from attnpack import attention, attention_scores
from op_cases import draw


def arguments(**changes):
    """A valid call (query [2, 4, 5, 8], key [2, 2, 7, 8], value [2, 2, 7, 6]) with changes."""
    good = {"query": draw(2, 4, 5, 8), "key": draw(2, 2, 7, 8), "value": draw(2, 2, 7, 6)}
    return good | changes


BAD = {
    "query of rank 3": (
        {"query": draw(2, 5, 32)},
        r"query has shape \[2, 5, 32\], wants 4 dimensions \[batch, heads, length, head_dim\]: .*unflatten.*transpose",
    ),
    "key of rank 5": ({"key": draw(1, 2, 2, 7, 8)}, r"key has shape \[1, 2, 2, 7, 8\], wants 4 dimensions"),
    "value of rank 2": ({"value": draw(7, 6)}, r"value has shape \[7, 6\], wants 4 dimensions"),
    "integers": (
        {"query": torch.ones(2, 4, 5, 8, dtype=torch.int64)},
        "query has dtype Long, wants float64, float32, bfloat16 or float16",
    ),
    "complex": ({"query": draw(2, 4, 5, 8) + 0j}, "query has dtype ComplexFloat, wants"),
    "key in another dtype": (
        {"key": draw(2, 2, 7, 8).bfloat16()},
        r"key has dtype BFloat16, query Float: cast one .*\.to\(\)",
    ),
    "value in another dtype": ({"value": draw(2, 2, 7, 6).double()}, r"value has dtype Double, query Float: cast"),
    "key on another device": (
        {"key": draw(2, 2, 7, 8).to("meta")},
        r"key is on meta, query on cpu: move one .*\.to\(\)",
    ),
    "value on another device": ({"value": draw(2, 2, 7, 6).to("meta")}, "value is on meta, query on cpu: move"),
    "key of another batch": ({"key": draw(3, 2, 7, 8)}, "key has batch 3, query 2: expand one"),
    "value of another batch": ({"value": draw(1, 2, 7, 6)}, "value has batch 1, query 2: expand one"),
    "key of another head_dim": ({"key": draw(2, 2, 7, 9)}, "key has head_dim 9, query 8: they must agree"),
    "value of other heads": ({"value": draw(2, 4, 7, 6)}, "value has 4 heads, key 2: they must agree"),
    "value of another length": ({"value": draw(2, 2, 6, 6)}, "value has length 6, key 7: they must agree"),
    "heads that do not divide": (
        {"query": draw(2, 5, 5, 8)},
        "query has 5 heads, key 2, and 2 does not divide 5: pass head_map",
    ),
    "no kv heads": (
        {"key": draw(2, 0, 7, 8), "value": draw(2, 0, 7, 6)},
        "key has 0 heads, query 4: pass key and value with at least one head",
    ),
    "no kv heads and a head_map": (
        {"key": draw(2, 0, 7, 8), "value": draw(2, 0, 7, 6), "head_map": [0, 0, 0, 0]},
        "key has 0 heads, query 4: pass key and value",
    ),
    "short head_map": ({"head_map": [0, 1]}, "head_map has 2 entries, wants one for each of the 4 query heads"),
    "head_map too high": ({"head_map": [0, 1, 2, 0]}, "head_map names kv head 2, key has heads 0 to 1"),
    "head_map below 0": ({"head_map": [0, 1, -1, 0]}, "head_map names kv head -1, key has heads 0 to 1"),
    "integer mask": (
        {"mask": torch.ones(5, 7, dtype=torch.int64)},
        r"mask has dtype Long, wants bool .*, or float64, .* float16 .*: call \.bool\(\)",
    ),
    "odd float mask": (
        {"mask": torch.ones(5, 7).to(torch.float8_e4m3fn)},
        r"mask has dtype Float8_e4m3fn, wants bool .*: call .* or \.float\(\)",
    ),
    "mask on another device": ({"mask": torch.ones(5, 7, device="meta")}, "mask is on meta, query on cpu: move"),
    "mask of another shape": (
        {"mask": torch.ones(7, 5)},
        r"mask has shape \[7, 5\], which does not broadcast to .* = \[2, 4, 5, 7\]; a padding mask is \[batch, 1, 1",
    ),
    "padding mask of rank 2": (
        {"mask": torch.ones(2, 7, dtype=torch.bool)},
        r"mask has shape \[2, 7\], which does not",
    ),
    "mask of rank 5": ({"mask": torch.ones(1, 1, 1, 5, 7)}, r"mask has shape \[1, 1, 1, 5, 7\], which does not"),
    "short kv_lens": ({"kv_lens": torch.tensor([3])}, r"kv_lens has shape \[1\], wants \[batch\] = \[2\]"),
    "float kv_lens": (
        {"kv_lens": torch.tensor([3.0, 4.0])},
        r"kv_lens has dtype Float, wants int32 or int64: .*\.long\(\)",
    ),
    "kv_lens on another device": (
        {"kv_lens": torch.ones(2, device="meta").long()},
        "kv_lens is on meta, query on cpu: move",
    ),
    "negative kv_lens": ({"kv_lens": torch.tensor([7, -1])}, r"kv_lens\[1\] is -1, wants 0 to kv_len = 7"),
    "large kv_lens": (
        {"kv_lens": torch.tensor([8, 7], dtype=torch.int32)},
        r"kv_lens\[0\] is 8, wants 0 to kv_len = 7",
    ),
    "short q_offset": ({"q_offset": torch.tensor([3])}, r"q_offset has shape \[1\], wants \[batch\] = \[2\]"),
    "q_offset of rank 0": ({"q_offset": torch.tensor(3)}, r"q_offset has shape \[\], wants \[batch\] = \[2\]"),
    "float q_offset": ({"q_offset": torch.tensor([3.0, 4.0])}, "q_offset has dtype Float, wants int32 or int64"),
    "a word for q_offset": (
        {"q_offset": "start"},
        "q_offset is 'start', wants an int, an integer tensor .* or \"end\"",
    ),
    "a fraction for q_offset": ({"q_offset": 1.5}, "q_offset is 1.5, wants an int"),
    "end with short kv_lens": (
        {"q_offset": "end", "kv_lens": torch.tensor([3])},
        r"kv_lens has shape \[1\], wants \[batch\]",
    ),
    "end with float kv_lens": ({"q_offset": "end", "kv_lens": torch.tensor([3.0, 1.0])}, "kv_lens has dtype Float"),
    "end with bool kv_lens": ({"q_offset": "end", "kv_lens": torch.tensor([True, True])}, "kv_lens has dtype Bool"),
    "a q_offset beyond 64 bits": ({"q_offset": 2**64}, "q_offset is 18446744073709551616, wants an int"),
    "end with query of rank 3": ({"q_offset": "end", "query": draw(2, 5, 8)}, r"query has shape \[2, 5, 8\], wants 4"),
    "window below -1": ({"window": (-2, 0)}, r"window is \(-2, 0\), wants numbers >= 0, or -1 for unbounded"),
    "window below -1 on the right": ({"window": (0, -5)}, r"window is \(0, -5\), wants"),
    "a chunk of nothing": ({"chunk": 0}, r"chunk is 0, wants how many positions a chunk has, 1 to 576460752303423488"),
    "a negative chunk": ({"chunk": -4}, "chunk is -4, wants how many positions"),
    "a chunk beyond 2**59": ({"chunk": 2**59 + 1}, "chunk is 576460752303423489, wants how many positions"),
    "negative softcap": ({"softcap": -1.0}, "softcap is -1, wants a finite number > 0, or 0 for none"),
    "infinite softcap": ({"softcap": float("inf")}, "softcap is inf, wants a finite number"),
    "softcap that is no number": ({"softcap": float("nan")}, "softcap is -?nan, wants a finite number"),
    "scale that is no number": ({"scale": float("nan")}, "scale is -?nan, wants a finite number from .*, or none"),
    "scale beyond fp32": (
        {"scale": -1e39},
        r"scale is -1e\+39, wants a finite number from -1.7.*e\+38 to 1.7.* for queries not in float64",
    ),
    "infinite scale": ({"scale": float("inf")}, "scale is inf, wants a finite number"),
    "sinks for kv heads": ({"sinks": draw(2)}, r"sinks has shape \[2\], wants \[num_heads\] = \[4\]"),
    "integer sinks": ({"sinks": torch.ones(4).long()}, "sinks has dtype Long, wants a float dtype"),
    "sinks on another device": ({"sinks": torch.ones(4, device="meta")}, "sinks is on meta, query on cpu: move"),
    "slopes of rank 2": ({"alibi_slopes": draw(4, 1)}, r"alibi_slopes has shape \[4, 1\], wants \[num_heads\]"),
    "slopes that learn": (
        {"alibi_slopes": torch.ones(4, requires_grad=True)},
        r"alibi_slopes requires a gradient and has none: pass alibi_slopes\.detach\(\)",
    ),
    "key_index of rank 3": (
        {"key_index": torch.zeros(2, 5, 3).long()},
        r"key_index has shape \[2, 5, 3\], wants \[batch, 1 or num_kv_heads, q_len, n\] = \[2, 1 or 2, 5, n\]: .unsq",
    ),
    "key_index for query heads": (
        {"key_index": torch.zeros(2, 4, 5, 3).long()},
        r"key_index has shape \[2, 4, 5, 3\], wants \[batch, 1 or num_kv_heads",
    ),
    "key_index for one row": ({"key_index": torch.zeros(2, 1, 1, 3).long()}, r"key_index has shape \[2, 1, 1, 3\]"),
    "float key_index": (
        {"key_index": torch.zeros(2, 1, 5, 3)},
        r"key_index has dtype Float, wants int32 or int64, .* \.long\(\) on it",
    ),
    "bool key_index": (
        {"key_index": torch.zeros(2, 1, 5, 7).bool()},
        "key_index has dtype Bool, wants int32 or int64, .* pass a bool tensor as mask",
    ),
    "key_index on another device": (
        {"key_index": torch.zeros(2, 1, 5, 3, device="meta").long()},
        "key_index is on meta, query on cpu: move",
    ),
    "a name beyond the keys": (
        {"key_index": torch.full((2, 1, 5, 3), 7)},
        r"key_index\[0, 0, 0, 0\] is 7, wants 0 to 6, the keys of a sequence of 7, or -1 for none",
    ),
    "a name of int32 below -1": (
        {"key_index": torch.tensor([3, -2], dtype=torch.int32).expand(2, 2, 5, 2)},
        r"key_index\[0, 0, 0, 1\] is -2, wants 0 to 6",
    ),
    "a name beyond the blocks": (
        {"key_index": torch.tensor([0, 3]).expand(2, 1, 5, 2), "key_block": 3},
        r"key_index\[0, 0, 0, 1\] is 3, wants 0 to 2, the blocks of 3 keys in 7, or -1 for none",
    ),
    "key_block of 0": (
        {"key_index": torch.zeros(2, 1, 5, 3).long(), "key_block": 0},
        "key_block is 0, wants 1 to 2147483647, the number of keys of a block",
    ),
    "key_block alone": ({"key_block": 4}, "key_block is 4 without key_index, wants 1: pass the blocks"),
    "dropout of 1": ({"dropout_p": 1.0}, "dropout_p is 1, wants 0 <= dropout_p < 1"),
    "negative dropout": ({"dropout_p": -0.1}, "dropout_p is -0.1, wants"),
}


NESTED = torch.nested.nested_tensor([torch.zeros(3, 4, 8), torch.zeros(5, 4, 8)], layout=torch.jagged).transpose(1, 2)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_a_nested_tensor_is_named(name):
    good = {"query": draw(2, 4, 5, 8), "key": draw(2, 4, 5, 8), "value": draw(2, 4, 5, 8)}
    beside = (
        "key is a padded tensor beside nested ones" if name == "query" else f"{name} is a nested tensor, wants a pad"
    )
    with pytest.raises(ValueError, match=f"attnpack: {beside}"):
        attention(**good | {name: NESTED})
    if name != "value":
        with pytest.raises(ValueError, match=f"attnpack: {name} is a nested tensor"):
            attention_scores(**{"query": good["query"], "key": good["key"]} | {name: NESTED})


@pytest.mark.parametrize("case", BAD)
def test_attention_says_what_is_wrong(case):
    changes, message = BAD[case]
    with pytest.raises(ValueError, match=message) as error:
        attention(**arguments(**changes))
    assert str(error.value).startswith("attnpack: ") and "\n" not in str(error.value)


@pytest.mark.parametrize("case", [name for name in BAD if "value" not in name])
def test_attention_scores_says_the_same(case):
    changes, message = BAD[case]
    call = arguments(**changes)
    del call["value"]
    with pytest.raises(ValueError, match=message):
        attention_scores(**call)


def backward_arguments(**changes):
    """The arguments of torch.ops.attnpack.attention_backward."""
    call = {name: arguments()[name] for name in ("query", "key", "value")}
    out, lse = torch.ops.attnpack.attention(**call)
    saved = {"grad_out": torch.ones(2, 4, 5, 6), "grad_lse": torch.ones(2, 4, 5), "out": out, "lse": lse}
    return call | saved | {"mask_gradient": False, "sinks_gradient": False} | changes


BAD_BACKWARD = {
    "no lse": ({"lse": draw(0, 4, 5)}, r"lse has shape \[0, 4, 5\], wants \[2, 4, 5\]: pass what belongs to one call"),
    "lse of another dtype": (
        {"lse": draw(2, 4, 5).double()},
        r"lse has dtype Double, wants Float as query is Float: cast it with \.to\(\)",
    ),
    "lse on another device": ({"lse": draw(2, 4, 5).to("meta")}, "lse is on meta, query on cpu: move"),
    "short out": ({"out": draw(2, 4, 4, 6)}, r"out has shape \[2, 4, 4, 6\], wants \[2, 4, 5, 6\]"),
    "out of another dtype": ({"out": draw(2, 4, 5, 6).half()}, "out has dtype Half, wants Float"),
    "grad_out of rank 3": ({"grad_out": draw(4, 5, 6)}, r"grad_out has shape \[4, 5, 6\], wants \[2, 4, 5, 6\]"),
    "grad_out of integers": ({"grad_out": draw(2, 4, 5, 6).int()}, "grad_out has dtype Int, wants Float"),
    "grad_out on another device": ({"grad_out": draw(2, 4, 5, 6).to("meta")}, "grad_out is on meta, query on cpu"),
    "grad_lse that broadcasts": ({"grad_lse": draw(5)}, r"grad_lse has shape \[5\], wants \[2, 4, 5\]"),
    "gradient of no mask": ({"mask_gradient": True}, "mask_gradient is true, and mask is none or bool: pass a float"),
    "gradient of a bool mask": (
        {"mask_gradient": True, "mask": torch.ones(5, 7, dtype=torch.bool)},
        "mask_gradient is true, and mask is none or bool: pass a float",
    ),
    "gradient of no sinks": ({"sinks_gradient": True}, "sinks_gradient is true without sinks: pass them"),
    "key of another head_dim": ({"key": draw(2, 2, 7, 9)}, "key has head_dim 9, query 8: they must agree"),
    "large kv_lens": ({"kv_lens": torch.tensor([8, 7])}, r"kv_lens\[0\] is 8, wants 0 to kv_len = 7"),
}


@pytest.mark.parametrize("case", BAD_BACKWARD)
def test_the_backward_op_says_what_is_wrong(case):
    changes, message = BAD_BACKWARD[case]
    with pytest.raises(ValueError, match=message) as error:
        torch.ops.attnpack.attention_backward(**backward_arguments(**changes))
    assert "\n" not in str(error.value)


OTHER_DEVICE_OR_SHAPE = {
    "cos is on meta, sin on meta, x on cpu": lambda o: o.apply_rope(X, *[torch.ones(7, 4, device="meta")] * 2, False),
    r"cos has shape \[4611686018427387904\], wants to broadcast": (
        lambda o: o.apply_rope(X, *[torch.ones(1).expand(2**62)] * 2, False)
    ),
    "lengths is on meta, positions on cpu": lambda o: o.rope_table_by_length(
        torch.arange(3), torch.ones(1, dtype=torch.int64, device="meta"), [1.0], 1.0, [], 1.0, 4
    ),
    "positions has dtype Float, wants int64": lambda o: o.rope_table(torch.ones(3, device="meta"), [1.0], 1.0),
    r"out_a has shape \[\] and dtype Float": lambda o: o.merge_states(*[torch.ones(())] * 4),
    "lse_a dtype Int, wants float": lambda o: o.merge_states(X, X[..., 0].int(), X, X[..., 0].int()),
}


@pytest.mark.parametrize("message", OTHER_DEVICE_OR_SHAPE)
def test_the_other_ops_say_it_too(message):
    with pytest.raises(ValueError, match=message):
        OTHER_DEVICE_OR_SHAPE[message](torch.ops.attnpack)


def test_an_unknown_stage():
    with pytest.raises(ValueError, match="stage is 'raw', wants 'scaled', 'capped', 'masked', 'probs' or 'named'"):
        attention_scores(draw(1, 1, 2, 3), draw(1, 1, 2, 3), stage="raw")
    with pytest.raises(ValueError, match="stage is 'named' without key_index, .*: give key_index, or take 'probs'"):
        attention_scores(draw(1, 1, 2, 3), draw(1, 1, 2, 3), stage="named")


def test_dropout_without_its_seed():
    x = draw(1, 1, 2, 3)
    with pytest.raises(ValueError, match="dropout_seed is missing: dropout_p > 0 wants an int64 tensor"):
        torch.ops.attnpack.attention(x, x, x, dropout_p=0.5)


WRONG_KIND = {
    "query": ([1.0], r"query is \[1.0\] \(list\), wants a tensor \[batch, num_heads, q_len, head_dim\]"),
    "key": (None, r"key is None \(NoneType\), wants a tensor \[batch, num_kv_heads"),
    "mask": ([True], r"mask is \[True\] \(list\), wants a bool or float tensor .*torch.tensor\(\) makes one"),
    "kv_lens": ([3, 4], r"kv_lens is \[3, 4\] \(list\), wants an int32 or int64 tensor .*torch.tensor\(\) makes one"),
    "window": (3, r"window is 3 \(int\), wants two ints \(left, right\)"),
    "window of nothing": (None, r"window is None \(NoneType\), wants two ints"),
    "window of huge ints": ((2**64, 0), r"window is \(18446744073709551616, 0\) \(tuple\), wants two ints"),
    "window of words": (("a", "b"), r"window is \('a', 'b'\) \(tuple\), wants two ints"),
    "chunk": (2.5, r"chunk is 2.5 \(float\), wants an int, or None"),
    "softcap": ("c", r"softcap is 'c' \(str\), wants a number, 0 for none"),
    "sinks": ([0.0] * 4, r"sinks is .* \(list\), wants a float tensor \[num_heads\]"),
    "alibi_slopes": (1.0, r"alibi_slopes is 1.0 \(float\), wants a float tensor \[num_heads\]"),
    "head_map": (3, r"head_map is 3 \(int\), wants a list of num_heads ints"),
    "head_map of a tensor": (torch.zeros(4), r"head_map is tensor.* \(Tensor\), wants a list .*: call .tolist\(\)"),
    "dropout_p": ("d", r"dropout_p is 'd' \(str\), wants a number"),
    "scale": ("large", r"scale is 'large' \(str\), wants a number, or None for 1 / sqrt\(head_dim\)"),
    "head_map of a word": ("", r"head_map is '' \(str\), wants a list of num_heads ints"),
    "key_index": (
        [[0]],
        r"key_index is \[\[0\]\] \(list\), wants an int32 or int64 tensor \[batch, 1 or num_kv_heads, ",
    ),
    "key_block": ("b", r"key_block is 'b' \(str\), wants an int"),
    "causal of a tensor": (torch.ones(2), r"causal is tensor.* \(Tensor\), wants True or False"),
    "causal": ("yes", r"causal is 'yes' \(str\), wants True or False"),
}


@pytest.mark.parametrize("function", [attention, attention_scores, attnpack.ops.attend], ids=lambda f: f.__name__)
@pytest.mark.parametrize("case", WRONG_KIND)
def test_a_value_of_the_wrong_kind_is_named(case, function):
    value, message = WRONG_KIND[case]
    if case.startswith("key_") and function is attnpack.ops.attend:
        pytest.raises(TypeError, attnpack.ops.attend, *[X] * 3, **{case: value})  # layers have no such argument
        return
    call = arguments(**{case.split()[0]: value})
    if function is attention_scores:
        del call["value"]
    with pytest.raises(TypeError, match=message) as error:
        function(**call)
    assert str(error.value).startswith("attnpack: ") and "\n" not in str(error.value)


X = draw(2, 2, 7, 8)
OTHER_OPS = {
    r"rope is 'yes' \(str\), wants \(inv_freq, factor": lambda o: o.attend(X, X, X, rope="yes"),
    r"cache is 5 \(int\), wants the tensors": lambda o: o.attend(X, X, X, cache=5),
    r"positions is \[0\] \(list\), wants an int64 tensor": lambda o: o.attend(X, X, X, positions=[0]),
    r"x is a list, wants a tensor": lambda o: o.apply_rope(X.tolist(), X, X),
    r"cos is \[1.0\] \(list\), wants a tensor": lambda o: o.apply_rope(X, [1.0], X),
    r"positions is \[1\] \(list\), wants an int64 tensor: torch.tensor": lambda o: o.rope_table([1], [1.0]),
    r"inv_freq is 1.0 \(float\), wants a list of numbers": lambda o: o.rope_table(torch.arange(3), 1.0),
    r"factor is 'f' \(str\), wants a number": lambda o: o.rope_table(torch.arange(3), [1.0], "f"),
    r"lse_b is None \(NoneType\), wants a tensor": lambda o: o.merge_states(X, X[..., 0], X, None),
    r"weight is \[1.0\] \(list\), wants a tensor": lambda o: o.linear(X, [1.0]),
    r"bias is True \(bool\), wants a tensor \[out\]": lambda o: o.linear(X, X, True),
}


@pytest.mark.parametrize("message", OTHER_OPS)
def test_the_other_ops_name_it_too(message):
    with pytest.raises(TypeError, match="attnpack: " + message) as error:
        OTHER_OPS[message](attnpack.ops)
    assert "\n" not in str(error.value)


def test_packed_and_nested_sequences_refuse_key_index():
    index = torch.zeros(2, 1, 5, 3).long()
    with pytest.raises(ValueError, match="key_index is given, attention_varlen wants none: call attention for each"):
        attnpack.attention_varlen(*[draw(5, 4, 8)] * 3, torch.tensor([0, 5]), key_index=index)
    with pytest.raises(ValueError, match="key_index is given with nested tensors, wants to be left out"):
        attention(NESTED, NESTED, NESTED, key_index=index)


def test_an_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="is_causal"):
        attention(**arguments(), is_causal=True)
    with pytest.raises(TypeError):
        attention(draw(1, 1, 2, 3), draw(1, 1, 2, 3), draw(1, 1, 2, 3), None, True)  # after mask: keyword only


def test_a_window_of_three_is_refused_when_compiled_too():
    x = torch.randn(1, 2, 3, 8)
    attend = torch.compile(lambda x: attention(x, x, x, window=(1, 2, 3)), backend="eager")
    with pytest.raises(TypeError, match=r"window is \(1, 2, 3\).* wants two ints \(left, right\)"):
        attend(x)


def test_requires_grad_changes_no_message():
    call = arguments(query=draw(2, 5, 5, 8).requires_grad_())
    with pytest.raises(ValueError, match="does not divide 5: pass head_map"):
        attention(**call)


def test_a_refused_call_leaves_torchs_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="dropout_p"):
        attention(**arguments(dropout_p=-0.5))
    assert torch.equal(torch.get_rng_state(), before)


OTHER_SHAPES = {
    "value is None .*, wants a tensor .batch, num_v_heads, length, v_head_dim.": lambda o: attnpack.linear_attention(
        X, X, None
    ),
    r"key is \[1.0\] .*, wants a tensor .batch, num_k_heads, length, head_dim.": lambda o: o.linear_attention_(
        X, [1.0], X, X
    ),
    "key is None .*, wants a tensor .key tokens, num_kv_heads, head_dim., or a pool": lambda o: (
        attnpack.attention_varlen(X[0, 0], None, X[0, 0], torch.tensor([0, 3]))
    ),
    "weights is 3 .*, wants a tensor .batch, length, heads.": lambda o: o.select_keys(X, X, 3, 1),
    "weights is 3 .*, wants a list of tensors": lambda o: attnpack._C.linears(X, 3, []),
}


@pytest.mark.parametrize("message", OTHER_SHAPES)
def test_a_value_of_the_wrong_kind_is_told_the_shapes_of_its_function(message):
    with pytest.raises(TypeError, match="attnpack: " + message):
        OTHER_SHAPES[message](attnpack.ops)
