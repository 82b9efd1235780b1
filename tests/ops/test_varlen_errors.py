"""Errors of packed sequences: each names the argument, what it got, what it wants and the fix."""

import pytest
import torch
from attnpack import attention_varlen
from op_cases import draw
from torch.library import opcheck

varlen = torch.ops.attnpack.attention_varlen
varlen_backward = torch.ops.attnpack.attention_varlen_backward


def ends(*numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype)


def arguments(**changes):
    """A valid call (query [9, 4, 8], key [11, 2, 8], value [11, 2, 6], two sequences) with changes."""
    good = {"query": draw(9, 4, 8), "key": draw(11, 2, 8), "value": draw(11, 2, 6)}
    return good | {"cu_seqlens_q": ends(0, 4, 9), "cu_seqlens_k": ends(0, 3, 11)} | changes


BAD = {
    "query of rank 4": ({"query": draw(1, 9, 4, 8)}, r"query has shape \[1, 9, 4, 8\], wants 3 dimensions \[tokens, h"),
    "key of rank 2": ({"key": draw(11, 16)}, r"key has shape \[11, 16\], wants 3 dimensions .*unflatten"),
    "value of rank 1": ({"value": draw(11)}, r"value has shape \[11\], wants 3 dimensions"),
    "fewer values": ({"value": draw(10, 2, 6)}, "value has 10 rows, key 11: they must agree"),
    "other dtypes": ({"key": draw(11, 2, 8).double()}, "key has dtype Double, query Float: cast"),
    "integers": ({"query": draw(9, 4, 8).int()}, "query has dtype Int, wants float64, float32"),
    "another head_dim": ({"key": draw(11, 2, 9)}, "key has head_dim 9, query 8"),
    "heads that do not divide": ({"query": draw(9, 5, 8)}, "query has 5 heads, key 2, and 2 does not divide 5"),
    "q starts late": ({"cu_seqlens_q": ends(1, 4, 9)}, r"cu_seqlens_q\[0\] is 1, wants 0: the first sequence"),
    "q falls": ({"cu_seqlens_q": ends(0, 10, 9)}, r"cu_seqlens_q\[2\] is 9 after 10, wants numbers that never fall"),
    "q ends early": ({"cu_seqlens_q": ends(0, 4, 8)}, "cu_seqlens_q ends at 8, wants 9, the rows of query"),
    "q beyond": ({"cu_seqlens_q": ends(0, 4, 2**31 - 1)}, "cu_seqlens_q ends at 2147483647, wants 9"),
    "q below 0": ({"cu_seqlens_q": ends(0, -(2**63), 9, dtype=torch.int64), "cu_seqlens_k": ends(0, 1, 11)},
                  r"cu_seqlens_q\[1\] is -9223372036854775808 after 0"),
    "k starts late": ({"cu_seqlens_k": ends(2, 3, 11)}, r"cu_seqlens_k\[0\] is 2, wants 0"),
    "k falls": ({"cu_seqlens_k": ends(0, 12, 11)}, r"cu_seqlens_k\[2\] is 11 after 12, wants numbers that never"),
    "k ends early": ({"cu_seqlens_k": ends(0, 3, 10)}, "cu_seqlens_k ends at 10, wants 11, the rows of key"),
    "other numbers of sequences": ({"cu_seqlens_k": ends(0, 11)}, r"cu_seqlens_k has shape \[2\], wants \[3\] as cu_s"),
    "no ends": ({"cu_seqlens_q": ends()}, r"cu_seqlens_q has shape \[0\], wants \[sequences \+ 1\]"),
    "ends of rank 2": ({"cu_seqlens_k": ends(0, 3, 11).view(1, 3)}, r"cu_seqlens_k has shape \[1, 3\], wants"),
    "float ends": ({"cu_seqlens_q": ends(0, 4, 9).float()}, r"cu_seqlens_q has dtype Float, wants int32 .*\.int\(\)"),
    "short ends": ({"cu_seqlens_k": ends(0, 3, 11).short()}, "cu_seqlens_k has dtype Short, wants int32 or int64"),
    "meta ends": ({"cu_seqlens_q": ends(0, 4, 9).to("meta")}, "cu_seqlens_q is on meta, query on cpu: pass numbers"),
    "keys of other rows": ({"cu_seqlens_k": None}, "key has 11 rows, query 9: pass cu_seqlens_k"),
    "kv_lens": ({"kv_lens": torch.tensor([3, 8])}, "kv_lens is given without block_table: cu_seqlens_k says"),
    "hint below 0": ({"max_seqlen_q": -1}, "max_seqlen_q is -1, wants the longest sequence's length, or none"),
    "key hint below 0": ({"max_seqlen_k": -7}, "max_seqlen_k is -7, wants"),
    "window": ({"window": (-2, 0)}, r"window is \(-2, 0\), wants numbers >= 0"),
    "softcap": ({"softcap": -1.0}, "softcap is -1, wants a finite number > 0"),
    "sinks": ({"sinks": draw(3)}, r"sinks has shape \[3\], wants \[num_heads\] = \[4\]"),
    "slopes": ({"alibi_slopes": draw(2, 4)}, r"alibi_slopes has shape \[2, 4\], wants \[num_heads\] = \[4\]"),
    "head_map": ({"head_map": [0, 1, 2, 0]}, "head_map names kv head 2, key has heads 0 to 1"),
    "dropout_p": ({"dropout_p": 1.0}, "dropout_p is 1, wants 0 <= dropout_p < 1"),
    "nested": ({"query": torch.nested.nested_tensor([draw(4, 4, 8), draw(5, 4, 8)], layout=torch.jagged)},
               "query is a nested tensor, wants"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_varlen_says_what_is_wrong(case):
    changes, message = BAD[case]
    with pytest.raises(ValueError, match=message) as error:
        attention_varlen(**arguments(**changes))
    assert "\n" not in str(error.value)


WRONG_KIND = {
    "cu_seqlens_q": ([0, 4, 9], r"cu_seqlens_q is \[0, 4, 9\] \(list\), wants an int32 .*torch.tensor\(\) makes"),
    "cu_seqlens_k": (3, r"cu_seqlens_k is 3 \(int\), wants an int32 or int64 tensor .*, or None"),
    "max_seqlen_q": ("long", r"max_seqlen_q is 'long' \(str\), wants an int"),
    "max_seqlen_k": (1.5, r"max_seqlen_k is 1.5 \(float\), wants an int"),
    "block_table": ([0], r"block_table is \[0\] \(list\), wants an int32 tensor \[sequences, max_pages\]"),
    "window": (3, r"window is 3 \(int\), wants two ints"),
}


@pytest.mark.parametrize("name", WRONG_KIND)
def test_a_value_of_the_wrong_kind_is_named(name):
    value, message = WRONG_KIND[name]
    with pytest.raises(TypeError, match=message):
        attention_varlen(**arguments(**{name: value}))


def backward_arguments(**changes):
    call = arguments()
    ends_k = call.pop("cu_seqlens_k")
    settings = {"cu_seqlens_k": ends_k, "causal": True}
    out, lse = varlen(**call, **settings)
    saved = {"grad_out": torch.ones_like(out), "grad_lse": torch.ones_like(lse), "out": out, "lse": lse}
    return call | settings | saved | {"sinks_gradient": False} | changes


BAD_BACKWARD = {
    "short out": ({"out": draw(8, 4, 6)}, r"out has shape \[1, 4, 8, 6\], wants \[1, 4, 9, 6\]"),
    "grad_out of rank 2": ({"grad_out": draw(9, 24)}, r"grad_out has shape \[9, 24\], wants 3 dimensions"),
    "lse of rank 3": ({"lse": draw(1, 4, 9)}, r"lse has shape \[1, 4, 9\], wants \[num_heads, tokens\]"),
    "grad_lse of another dtype": ({"grad_lse": draw(4, 9).double()}, "grad_lse has dtype Double, wants Float"),
    "no sinks": ({"sinks_gradient": True}, "sinks_gradient is true without sinks"),
    "other ends": ({"cu_seqlens_q": ends(0, 4, 10)}, "cu_seqlens_q ends at 10, wants 9"),
    "offsets": ({"q_offsets": torch.zeros(3, dtype=torch.int64)}, r"q_offset has shape \[3\], wants \[sequences\] = "),
    "float offsets": ({"q_offsets": torch.zeros(2)}, "q_offset has dtype Float, wants int32 or int64"),
    "meta offsets": ({"q_offsets": torch.zeros(2, device="meta").long()}, "q_offset is on meta, query on cpu"),
}


@pytest.mark.parametrize("case", BAD_BACKWARD)
def test_the_backward_op_says_what_is_wrong(case):
    changes, message = BAD_BACKWARD[case]
    with pytest.raises(ValueError, match=message):
        varlen_backward(**backward_arguments(**changes))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_opcheck(dtype):
    call = arguments()
    tensors = [call[name].to(dtype).requires_grad_() for name in ("query", "key", "value")]
    sinks = draw(4).requires_grad_()
    rest = {"max_seqlen_q": 5, "causal": True, "sinks": sinks, "alibi_slopes": draw(4), "head_map": [0, 0, 1, 0]}
    opcheck(varlen.default, (*tensors, call["cu_seqlens_q"], call["cu_seqlens_k"]), rest)
    opcheck(varlen.default, (*tensors[:1], *[x[:9] for x in tensors[1:]], call["cu_seqlens_q"]), rest)
    plain = [x.detach() for x in tensors]
    ends = call["cu_seqlens_q"], call["cu_seqlens_k"]
    settings = {"causal": True, "sinks": sinks.detach()}
    out, lse = varlen(*plain, *ends, **settings)
    for grad_lse, gradient in ((None, True), (torch.ones_like(lse), False)):
        opcheck(
            varlen_backward.default,
            (torch.ones_like(out), grad_lse, *plain, out, lse, *ends),
            settings | {"sinks_gradient": gradient},
        )


@pytest.mark.parametrize("shape", [(0, 0), (9, 0), (0, 11)])
def test_opcheck_without_elements(shape):
    tensors = draw(shape[0], 4, 8), draw(shape[1], 2, 8), draw(shape[1], 2, 6)
    opcheck(varlen.default, (*tensors, ends(0, shape[0]), ends(0, shape[1])), {"causal": True})
