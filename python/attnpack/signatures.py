"""Types for type checkers and editors: the keywords that overloads share, and `__call__` with the types of forward.

The result of some functions depends on a flag such as `return_lse`. Each has an overload for True, for False and for a
bool that is not known. These name the other keywords together, by one of the classes below.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypedDict, TypeVar, cast, overload

from torch import Tensor

from . import _C

P = ParamSpec("P")
Result = TypeVar("Result", covariant=True)
Twin = TypeVar("Twin", covariant=True)
Function = TypeVar("Function")
Cache = TypeVar("Cache")  # the class in attnpack or in attnpack.cpp


class Rules(TypedDict, total=False):
    """The rules of every operator, as csrc/attnpack/ops/score_rules.h lists them (a type checker wants the list here
    too, and a test compares both): which keys a query may attend, and how scores become probabilities."""

    causal: bool
    window: tuple[int, int]
    chunk: int | None
    softcap: float
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    head_map: Sequence[int] | None
    dropout_p: float
    scale: float | None
    query_scale: Tensor | None


class AttentionRules(Rules, total=False):
    """Keywords of `attention`."""

    q_offset: int | Tensor | str
    kv_lens: Tensor | None
    key_index: Tensor | None
    key_block: int


class ScoresRules(AttentionRules, total=False):
    """Keywords of `attention_scores`."""

    stage: str


class PackedRules(Rules, total=False):
    """Keywords of `attention_varlen`."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None
    block_table: Tensor | None
    kv_lens: Tensor | None
    key_index: Tensor | None


def spelled_out(rules: type, op: Any) -> Callable[[Function], Function]:
    """A decorator: the keywords of a TypedDict stand in the signature in place of the function's `**`.

    Args:
        rules: the TypedDict.
        op: the op under torch.ops that has these keywords; their defaults come from its schema.
    """

    def spell(function: Function) -> Function:
        signature = inspect.signature(function)
        arguments = op.default._schema.arguments
        given = {one.name: one.default_value for one in arguments if one.has_default_value()} | _C.default_rules()
        kind, hidden = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
        keywords = [
            inspect.Parameter(name, kind, default=given.get(name), annotation=getattr(hint, "__forward_arg__", hint))
            for name, hint in rules.__annotations__.items()
        ]
        visible = [parameter for parameter in signature.parameters.values() if parameter.kind is not hidden]
        placed = [parameter for parameter in visible if parameter.kind is not kind]
        named = [parameter for parameter in visible if parameter.kind is kind]
        function.__signature__ = signature.replace(parameters=[*placed, *keywords, *named])
        return function

    return spell


class Inputs(TypedDict, Generic[Cache], total=False):
    """Keywords of the forward of every attention layer."""

    mask: Tensor | None
    causal: bool | None
    cache: Cache | None
    positions: Tensor | None
    kv_lens: Tensor | None


class SharedInputs(Inputs[Cache], total=False):
    """Keywords of a forward that may read the cache of another layer."""

    kv_from: Cache | None


class LatentInputs(SharedInputs[Cache], total=False):
    """Keywords of a forward that takes a context, and the keys that each query may attend."""

    value_context: Tensor | None
    key_index: Tensor | None


class ContextInputs(LatentInputs[Cache], total=False):
    """Keywords of a forward that takes blocks of keys too."""

    key_block: int


class Loop(TypedDict, Generic[Cache], total=False):
    """Keywords of `generate` beside `max_new_tokens`. Cache: the class of the ModelCache."""

    cache: str | Cache
    num_return_sequences: int
    lengths: Tensor | None
    stop_tokens: int | Iterable[int]
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    callback: Callable[[Tensor], bool | None] | None


class HasForward(Protocol[P, Result]):
    def forward(self, *args: P.args, **kwargs: P.kwargs) -> Result: ...


class HasTwin(Protocol[Twin]):
    """A module with a class in attnpack.cpp, which is `_cpp_class`."""

    @property
    def _cpp_class(self) -> type[Twin]: ...


def types_of(forward: Function) -> Callable[[Any], Function]:
    """A decorator for a method that takes and gives what forward does, with its overloads."""
    return lambda method: method


def made_as(kind: Callable[P, Any]) -> Callable[[Any], Callable[Concatenate[Any, P], None]]:
    """A decorator for an __init__ that takes what the class `kind` takes."""
    return lambda method: method


class WithProbs(Protocol[P]):
    """A function of flash-attn: with return_attn_probs it gives lse and S_dmask too."""

    @overload
    def __call__(
        self, *args: Any, return_attn_probs: Literal[True], **others: Any
    ) -> tuple[Tensor, Tensor, Tensor]: ...
    @overload
    def __call__(self, *args: Any, return_attn_probs: Literal[False], **others: Any) -> Tensor: ...
    @overload
    def __call__(
        self, *args: Any, return_attn_probs: bool, **others: Any
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Tensor: ...


class WithLse(Protocol[P]):
    """A function of flash-attn: with return_softmax_lse it gives lse too."""

    @overload
    def __call__(self, *args: Any, return_softmax_lse: Literal[True], **others: Any) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(self, *args: Any, return_softmax_lse: Literal[False], **others: Any) -> Tensor: ...
    @overload
    def __call__(self, *args: Any, return_softmax_lse: bool, **others: Any) -> Tensor | tuple[Tensor, Tensor]: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Tensor: ...


def with_probs(function: Callable[P, Any]) -> WithProbs[P]:
    return cast(Any, function)


def with_lse(function: Callable[P, Any]) -> WithLse[P]:
    return cast(Any, function)
