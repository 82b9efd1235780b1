"""What `attnpack bench model` compares: attnpack's `generate` and those of other libraries, on the same weights.

A contender is a function of a row and its prompts [batch, prompt], which gives a `Timed`. All give greedy tokens, and
have torch's number of threads. transformers and transformers + attnpack run on the very tensors of attnpack's model.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import CausalLM, ModelCache
from .model_rows import Row
from .model_timed import Timed, timed
from .transformers import Transformers, make_transformers

Contender = Callable[[Row, Tensor], Timed]


class LeftOut(Exception):
    """A peer does not take a row; the message says why."""


class Ours:
    """attnpack's `generate`. Where the prompt is kept, it continues a cache that holds all prompt tokens but one."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._kept: tuple[Any, Any] = (None, None)  # prompts, and their cache

    def __call__(self, row: Row, ids: Tensor) -> Timed:
        if row.keep and self._kept[0] is not ids:
            cache = ModelCache(self._model.num_layers)
            self._model.generate(ids[:, :-1], max_new_tokens=1, cache=cache)
            self._kept = ids, cache
        result = timed(self._generate, row, ids)
        if row.keep:
            self._kept[1].crop(ids.size(1) - 1)
        else:
            self._kept = None, None
        return result

    def _generate(self, ids: Tensor, new_tokens: int, callback: Callable, keep: bool) -> Tensor:
        if not keep:
            return self._model.generate(ids, max_new_tokens=new_tokens, callback=callback)
        settings = {"max_new_tokens": new_tokens, "cache": self._kept[1], "callback": callback}
        return torch.cat([ids[:, :-1], self._model.generate(ids[:, -1:], **settings)], 1)


def _llama_cpp(dtype: str, context: int) -> Contender:
    from .llama_cpp import LlamaCpp

    model = LlamaCpp(dtype, context)

    def run(row: Row, ids: Tensor) -> Timed:
        if row.batch != 1:
            raise LeftOut("llama-cpp-python generates one text at a time")
        return timed(model.generate, row, ids)

    return run


def _zentorch(dtype: str, quick: bool) -> Contender:
    if quick:
        raise LeftOut("it compiles the model for minutes: leave out --quick")
    from .zentorch import Zentorch

    return Zentorch(dtype).run


class Package(NamedTuple):
    module: str  # that Python imports
    distribution: str  # that pip installs, and that has the version


PEERS = {
    "transformers": Package("transformers", "transformers"),
    "transformers+attnpack": Package("transformers", "transformers"),
    "llama.cpp": Package("llama_cpp", "llama-cpp-python"),
    "zentorch": Package("zentorch", "zentorch"),
}


def version(peer: str) -> str | None:
    """The version of the peer's package; None if it is not installed."""
    package = PEERS[peer]
    if importlib.util.find_spec(package.module) is None:
        return None
    try:
        return importlib.metadata.version(package.distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def make_contenders(
    ours: CausalLM, dtype: str, peers: list[str], context: int, quick: bool
) -> tuple[dict[str, Contender], dict[str, str]]:
    """The contenders, "attnpack" first, and for each peer that is left out the reason.

    Args:
        context: the most positions that a row needs.
    """
    contenders: dict[str, Contender] = {"attnpack": Ours(ours)}
    missing: dict[str, str] = {}
    theirs: list[Transformers] = []
    for name in peers:
        if version(name) is None:
            missing[name] = f"not installed: pip install {PEERS[name].distribution}"
            continue
        try:
            if PEERS[name].module == "transformers":
                theirs = theirs or [Transformers(make_transformers(ours))]
                contenders[name] = theirs[0].plain if name == "transformers" else theirs[0].replaced
            else:
                contenders[name] = _llama_cpp(dtype, context) if name == "llama.cpp" else _zentorch(dtype, quick)
        except Exception as error:  # a peer that is broken leaves a dash
            missing[name] = reason(error)
    return contenders, missing


def reason(error: Exception) -> str:
    """One line that says why a peer is left out."""
    line = (str(error).splitlines() or [""])[0]
    return line if isinstance(error, LeftOut) else f"{type(error).__name__}: {line}"
