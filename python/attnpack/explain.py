"""Error sentences for arguments of the wrong kind, in place of pybind's list of signatures."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import index
from typing import Any

from torch import Tensor

Wanted = tuple[Callable[[object], bool], str]
"""A test of whether a value is of the right kind, and the words that describe the right kind."""


def shown(value: object) -> str:
    """A wrong argument in the words of an error sentence: `'yes' (str)`, or its type alone if its text is long."""
    text, kind = repr(value), type(value).__name__
    return with_article(kind) if len(text) > 60 or "\n" in text else f"{text} ({kind})"


def with_article(noun: str) -> str:
    return ("an " if noun[0] in "AEIOUaeiou" else "a ") + noun


def wrong_kind(name: str, value: object, wanted: str) -> TypeError:
    return TypeError(f"attnpack: {name} is {shown(value)}, wants {wanted}")


def nested(name: str) -> ValueError:
    return ValueError(
        f"attnpack: {name} is a nested tensor, wants a padded one: call torch.nested.to_padded_tensor({name}, 0.0) "
        "and say by kv_lens or a mask which tokens are real"
    )


def unexpected_keyword(function: str, name: str, taken: Collection[str], cache: str) -> TypeError:
    """The error for a keyword that `function` does not have; `cache` says in words what its cache= takes."""
    hint = ""
    if name in ("kv_cache", "past_key_value", "past_key_values"):
        hint = f": use cache= with {cache}" if "cache" in taken else ": it keeps no cache, leave it out"
    elif name in ("attn_mask", "attention_mask") and "mask" in taken:
        hint = ": use mask=, which says where attention may go"
    return TypeError(f"attnpack: {function}() got an unexpected keyword argument '{name}'{hint}")


# Tests of kinds. They accept what pybind converts: numpy's numbers are numbers too.
def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _converts(to: Callable[[Any], Any], value: object) -> bool:
    """Tries the conversion: a tensor has the method for each of them, but refuses most."""
    try:
        to(value)
    except Exception:
        return False
    return True


def _is_int(value: object) -> bool:
    return _converts(index, value) and -(2**63) <= index(value) < 2**63


def _is_number(value: object) -> bool:
    return not isinstance(value, str | bytes) and _converts(float, value)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _are_ints(value: object) -> bool:
    return _is_list(value) and all(map(_is_int, value))


def _are_numbers(value: object) -> bool:
    return _is_list(value) and all(map(_is_number, value))


def is_pair(value: object) -> bool:
    return _are_ints(value) and len(value) == 2


def _is_bool(value: object) -> bool:
    return hasattr(value, "__bool__") and _converts(bool, value)


def _is_word(value: object) -> bool:
    return isinstance(value, str)


def _is_seed(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < 2**64


def _are_tokens(value: object) -> bool:
    return _is_int(value) or _are_ints(value)


def or_none(right: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or right(value)


_MAKE = ": torch.tensor() makes one of a list"
_LENGTHS = (or_none(is_tensor), "an int32 or int64 tensor [batch], or None" + _MAKE)
_TENSOR = (is_tensor, "a tensor" + _MAKE)
_OR_NONE = (or_none(is_tensor), "a tensor, or None" + _MAKE)
_MASK = "a bool or float tensor that broadcasts to [batch, num_heads, q_len, kv_len], or None" + _MAKE
_INT = (_is_int, "an int")
_INT_OR_NONE = (or_none(_is_int), "an int, or None")
SWITCH = (or_none(_is_bool), "True or False")
_NUMBER = (_is_number, "a number")

# The right kind for each argument name, in whichever function it appears.
_WANTED: dict[str, Wanted] = {
    "query": (is_tensor, "a tensor [batch, num_heads, q_len, head_dim]"),
    "key": (is_tensor, "a tensor [batch, num_kv_heads, kv_len, head_dim]"),
    "value": (is_tensor, "a tensor [batch, num_kv_heads, kv_len, v_head_dim]"),
    "ids": (is_tensor, "an int64 tensor [batch, length] of token numbers" + _MAKE),
    **dict.fromkeys(
        ("x", "q", "k", "v", "source", "target", "out_a", "lse_a", "out_b", "lse_b", "cos", "sin", "input", "weight"),
        _TENSOR,
    ),
    **dict.fromkeys(("context", "value_context"), _OR_NONE),
    **dict.fromkeys(("mask", "context_mask"), (or_none(is_tensor), _MASK)),
    **dict.fromkeys(("kv_lens", "lengths", "source_lens", "target_lens", "context_lens"), _LENGTHS),
    "positions": (or_none(is_tensor), "an int64 tensor [length] or [batch, length], or None" + _MAKE),
    "inv_freq": (_are_numbers, "a list of numbers: call .tolist() on a tensor"),
    "sinks": (or_none(is_tensor), "a float tensor [num_heads], or None" + _MAKE),
    "alibi_slopes": (or_none(is_tensor), "a float tensor [num_heads], or None" + _MAKE),
    "window": (or_none(is_pair), "two ints (left, right), -1 for unbounded"),
    "head_map": (or_none(_are_ints), "a list of num_heads ints, or None: call .tolist() on a tensor"),
    "softcap": (_is_number, "a number, 0 for none"),
    "dropout_p": (_is_number, "a number, 0 <= dropout_p < 1"),
    "dropout": (_is_number, "a number, 0 for none"),
    "scale": (or_none(_is_number), "a number, or None for 1 / sqrt(head_dim)"),
    "stage": (_is_word, "'scaled', 'capped', 'masked' or 'probs'"),
    "path": (_is_word, "'auto', 'expanded' or 'absorbed'"),
    "norm": (or_none(_is_word), "'rms' or 'layer'"),
    "activation": (_is_word, "'swiglu' or 'gelu'"),
    "stop_tokens": (_are_tokens, "a token number or a list of them, () for none"),
    "temperature": (or_none(_is_number), "a number, 0 for greedy, or None"),
    "callback": (or_none(callable), "a function of each step's tokens [B], or None"),
    "top_k": _INT_OR_NONE,
    "top_p": (or_none(_is_number), "a number in (0, 1], or None"),
    "seed": (or_none(_is_seed), "an int from 0 to 2**64 - 1, or None for torch's own generator"),
    **dict.fromkeys(
        ("head_dim", "kdim", "vdim", "v_head_dim", "hidden_dim", "num_kv_heads", "q_lora_rank"), _INT_OR_NONE
    ),
    **dict.fromkeys(
        ("embed_dim", "num_heads", "num_layers", "vocab_size", "max_positions", "max_new_tokens", "in_features",
         "out_features", "dim", "batch", "max_len", "n", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
        _INT,
    ),
    **dict.fromkeys(
        ("causal", "need_weights", "return_lse", "cross", "interleaved", "bias", "out_bias", "mlp_bias", "qk_norm",
         "alibi", "tie_embeddings", "pre_norm", "latent_norm", "folded", "raw_keys"),
        SWITCH,
    ),
    **dict.fromkeys(("eps", "base", "rope_base", "factor"), _NUMBER),
}  # fmt: skip


def explain(arguments: Mapping[str, object], **special: Wanted) -> None:
    """Raises the error for the first argument of the wrong kind; `special` replaces the right kind for some names."""
    for name, value in arguments.items():
        if is_tensor(value) and value.is_nested:
            raise nested(name) from None
        right, wanted = special.get(name) or _WANTED.get(name, (None, ""))
        if right is not None and not right(value):
            raise wrong_kind(name, value, wanted) from None


def explained(function: Callable[..., Any], called: str | None = None, /, **special: Wanted) -> Callable[..., Any]:
    """`function` of pybind with an error sentence for arguments that it cannot take; `called` is its name for users."""
    called = called or function.__name__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if "(): incompatible " not in str(error):
                raise
        names = _parameters(function)
        for name in kwargs:
            if name not in names:
                raise unexpected_keyword(called, name, names, special.get("cache", (None, ""))[1])
        explain(dict(zip(names, args, strict=False)) | kwargs, **special)
        raise TypeError(
            f"attnpack: {called}() lacks an argument, or has one of the wrong kind or too many: it takes "
            + ", ".join(name for name in names if name != "self")
        )

    return call


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters, read from the signature that pybind writes into the docstring."""
    signatures: Iterable[str] = re.findall(r"\((self: .*)\) ->", function.__doc__ or "")
    return list(dict.fromkeys(name for signature in signatures for name in re.findall(r"(\w+): ", signature)))
