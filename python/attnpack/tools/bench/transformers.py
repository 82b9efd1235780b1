"""transformers' `generate`, for `attnpack bench model`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ... import CausalLM
from ...checkpoints import smollm2_path
from ...checkpoints.companions import config_json
from ...checkpoints.gguf import GgufCheckpoint
from .model_rows import Row
from .model_timed import Timed, timed


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
    """The function that transformers calls with each new token."""

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
