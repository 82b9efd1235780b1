"""The contenders of `attnpack bench model`: attnpack's `generate` and those of other libraries, on the same weights.

A contender is a function of a row and its prompts [batch, prompt], which gives a `Timed`. All give greedy tokens, and
have torch's number of threads. transformers and transformers + attnpack run on the very tensors of attnpack's model.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import CausalLM, ModelCache
from ...checkpoints import smollm2_path
from ...checkpoints.companions import config_json
from ...checkpoints.gguf import GgufCheckpoint
from .model_rows import Row

Generate = Callable[[Tensor, int, Callable, bool], Tensor]
"""(prompts [B, L], number of new tokens, callback of each, whether to keep the prompt's keys) -> [B, L + new]."""


class Timed(NamedTuple):
    seconds: float  # of a prefill, or the median of the steps
    tokens: Tensor  # the prompts and the new tokens, [batch, prompt + new_tokens]


Contender = Callable[[Row, Tensor], Timed]


class LeftOut(Exception):
    """A peer does not take a row; the message says why."""


def timed(generate: Generate, row: Row, ids: Tensor) -> Timed:
    """Times a generation: as a whole if it is a prefill, else from one new token to the next."""
    stamps: list[float] = []
    start = time.perf_counter()
    tokens = generate(ids, row.new_tokens, lambda *_: stamps.append(time.perf_counter()), row.keep)
    if row.kind == "prefill":
        return Timed(time.perf_counter() - start, tokens)
    # transformers also streams the prompt, so only the last stamps are those of new tokens.
    return Timed(statistics.median(after - before for before, after in pairwise(stamps[-row.new_tokens :])), tokens)


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


class Transformers:
    """transformers' `generate` on the model that `make_transformers` gives: plain, or with attnpack under it.

    A kept prompt is computed once for both, by `fill` with attnpack under it: its time does not count.
    """

    def __init__(self, model: Any, fill: Callable | None = None) -> None:
        self._model, self._fill = model, fill or model
        self._kept: tuple[Any, Any] = (None, None)

    def plain(self, row: Row, ids: Tensor) -> Timed:
        if row.keep and self._kept[0] is not ids:
            from transformers import DynamicCache

            cache = DynamicCache(config=self._model.config)
            with attnpack_under(), torch.no_grad():
                self._fill(ids[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
            self._kept = ids, cache
        result = timed(self._generate, row, ids)
        if row.keep:
            self._kept[1].crop(-row.new_tokens)  # negative: so many positions less
        else:
            self._kept = None, None
        return result

    def replaced(self, row: Row, ids: Tensor) -> Timed:
        with attnpack_under():
            return self.plain(row, ids)

    def _generate(self, ids: Tensor, new_tokens: int, callback: Callable, keep: bool) -> Tensor:
        return self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            streamer=_Streamer(callback),
            past_key_values=self._kept[1] if keep else None,
        )


class _Streamer:
    """The object that transformers calls with each new token."""

    def __init__(self, callback: Callable) -> None:
        self.put = callback

    def end(self) -> None:
        pass


def make_transformers(ours: CausalLM) -> Any:
    """transformers' model on the tensors of our SmolLM2, with its default attention and without a token that ends a
    text."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = config_json(GgufCheckpoint(smollm2_path()), ours.num_kv_heads)
    config = AutoConfig.for_model(**{name: value for name, value in settings.items() if "_token_id" not in name})
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(ours.state_dict(), assign=True, strict=False)  # the head is the embedding
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies were on meta too
    return model.eval()


@contextlib.contextmanager
def attnpack_under() -> Iterator[None]:
    """transformers' default attention and torch's linear run on attnpack, for the time of a `with` block."""
    from transformers import AttentionInterface

    from ... import backend, hf

    known = hf.NAME in AttentionInterface()
    hf.register(replace_sdpa=True)
    try:
        with backend.enable("linear"):
            yield
    finally:
        hf.unregister()
        if known:
            hf.register()


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
    said = (str(error).splitlines() or [""])[0]
    return said if isinstance(error, LeftOut) else f"{type(error).__name__}: {said}"
