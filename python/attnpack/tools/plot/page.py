"""A page to look at a model's attention: one HTML file without network, to be opened in any browser."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...atomic_write import atomic_file
from ...errors import wrong_kind
from .findings import Finding, find
from .heads import MODELS, Heads, heads_of, number_range

MOST_TOKENS = 256


class AttentionPage(NamedTuple):
    """All layers and heads on a sentence: an overview, one head large, the weights of a token under the mouse, and the
    softmax of a query and the products of a key. A notebook shows it in a frame; `save` writes the file."""

    text: str
    findings: list[Finding]
    """The habits that the heads show most clearly: the buttons at the top of the page."""
    opened: Finding
    """The one at which the page opens."""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:  # notebooks store it beside the page
        return f"AttentionPage({len(self.text)} characters)"

    def _repr_html_(self) -> str:  # the name by which notebooks ask
        return f'<iframe srcdoc="{html.escape(self.text)}" width="100%" height="1200" style="border:0"></iframe>'

    def save(self, path: str | Path) -> None:
        """Writes the page to `path`, whole or not at all."""
        with atomic_file(Path(path)) as partial:
            partial.write_text(self.text, encoding="utf-8")


def attention_page(
    model: nn.Module,
    ids: Sequence[int] | Tensor,
    tokens: Sequence[str],
    *,
    layers: Sequence[int] | None = None,
    layer: int | None = None,
    name: str | None = None,
    **inputs: Any,
) -> AttentionPage:
    """The page of `model` on the tokens `ids`, whose texts are `tokens`. It opens at the most telling finding.

    Args:
        model: any module with attention layers of attnpack, or a model of transformers, which runs on attnpack in this
            call. Self-attention over the tokens is shown, cross-attention is not.
        ids: what the model's forward takes: the ids of one sequence, or a tensor [1, L] of ids or [1, L, E] of states.
        tokens: one text for each token, such as `[tokenizer.decode([id]) for id in ids]`.
        layers: the numbers of the layers to show; default all. Fewer make a smaller page.
        layer: the one of them at which the page opens, at its own finding.
        name: the model's name for the title; default the one that transformers knows, or the class.
        inputs: further arguments of the model's forward, such as its mask.

    Raises:
        TypeError: the model has no attention that attnpack can look into, or ids or tokens are of another kind.
        ValueError: there are no ids or more than 256, tokens are not as many, a layer does not exist, or a weight is
            not finite.
    """
    data = page_data(model, ids, tokens, layers=layers, layer=layer, **inputs)
    findings = [Finding(**each) for each in data["findings"]]
    return AttentionPage(page_text(name or _name(model), data), findings, Finding(**data["open"]))


def page_data(
    model: nn.Module,
    ids: Sequence[int] | Tensor,
    tokens: Sequence[str],
    *,
    layers: Sequence[int] | None = None,
    layer: int | None = None,
    **inputs: Any,
) -> dict[str, Any]:
    """The numbers of a page, for JSON: arguments and errors are those of `attention_page`."""
    x = _states(model, ids)
    _check_tokens(tokens, x.size(1))
    wanted = None if layers is None else _numbers(layers)
    if layer is not None and wanted is not None and layer not in wanted:
        raise ValueError(f"layer: got {layer!r}, want one of the layers that are shown, {wanted}")
    shown = heads_of(model, x, wanted, inputs)
    numbers = [each.number for each in shown]
    if layer is not None and layer not in numbers:
        raise ValueError(f"layer: got {layer!r}, want {number_range(numbers)}, the model's layers")
    packed = [_layer(each) for each in shown]
    findings = find(shown, tokens)
    opened = findings[0] if layer is None else find([each for each in shown if each.number == layer], tokens)[0]
    return {
        "tokens": list(tokens),
        "findings": [each._asdict() for each in findings],
        "open": opened._asdict(),
        "layers": packed,
    }


def page_text(name: str, data: dict[str, Any]) -> str:
    """The page of a model called `name`, from the numbers of a page."""
    parts = {"MODEL": html.escape(name), "DATA": json.dumps(data, allow_nan=False).replace("<", "\\u003c")}
    template = resources.files("attnpack").joinpath("tools/data/attention.html").read_text(encoding="utf-8")
    return re.sub("ATTENTION_(MODEL|DATA)", lambda found: parts[found[1]], template)


def _name(model: nn.Module) -> str:
    known = getattr(model, "name_or_path", "")
    return Path(known).name if isinstance(known, str) and known else type(model).__name__


def _states(model: nn.Module, ids: Sequence[int] | Tensor) -> Tensor:
    """The input of the forward, [1, L] or [1, L, E]."""
    if isinstance(ids, Sequence | range) and not isinstance(ids, str) and all(isinstance(each, int) for each in ids):
        x = torch.tensor([list(ids)])
    elif isinstance(ids, Tensor) and ids.dim() > 0:
        x = ids.unsqueeze(0) if ids.dim() == 1 else ids
    else:
        raise wrong_kind("ids", ids, "the ids of a sequence, such as tokenizer.encode(text)")
    if x.dim() > 3 or x.size(0) != 1:
        raise ValueError(f"ids: got shape {list(x.shape)}, want one sequence: [1, L], or [1, L, E] for states")
    if not 1 <= x.size(1) <= MOST_TOKENS:
        raise ValueError(f"ids: got {x.size(1)} tokens, want 1 to {MOST_TOKENS}: a page holds each weight of each head")
    if not isinstance(model, nn.Module):
        raise wrong_kind("model", model, MODELS)
    return x.to(next((each.device for each in model.parameters()), x.device))


def _check_tokens(tokens: Sequence[str], length: int) -> None:
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        raise wrong_kind("tokens", tokens, "a list of texts, one for each id")
    if len(tokens) != length:
        raise ValueError(
            f"tokens: got {len(tokens)} texts for {length} ids, want one for each: "
            "[tokenizer.decode([id]) for id in ids]"
        )
    for at, each in enumerate(tokens):
        if not isinstance(each, str):
            raise wrong_kind(f"tokens[{at}]", each, "a text")


def _numbers(layers: Sequence[int]) -> list[int]:
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise wrong_kind("layers", layers, "a list of numbers of layers, or None for all")
    if not (wanted := list(layers)):
        raise ValueError("layers: got none, want numbers of layers, or None for all")
    return wanted


def _layer(heads: Heads) -> dict[str, Any]:
    """The numbers of a layer, as the page reads them."""
    named = {"weights": heads.weights, "q": heads.query, "k": heads.key, "v": heads.value, "added": heads.added}
    for name, numbers in named.items():
        if numbers is not None and not numbers.isfinite().all():
            raise ValueError(
                f"model: layer {heads.number} has NaN or infinity in its {name}, want finite numbers: look for the "
                "first module whose output has some"
            )
    return {
        "number": heads.number,
        "heads": len(heads.weights),
        "dim": 0 if heads.query is None else heads.query.size(-1),
        "v_dim": 0 if heads.value is None else heads.value.size(-1),
        "kv": heads.kv,
        "mask": heads.mask,
        "hidden": {"heads": len(heads.hidden), "base64": _bits(heads.hidden)},
        "selects": heads.selects,
        "sinks": heads.sinks,
        "scale": heads.scale,
        "softcap": heads.softcap,
        "slopes": heads.slopes,
        **{name: None if numbers is None else _packed(numbers) for name, numbers in named.items()},
    }


def _bits(flags: Tensor) -> str:
    """Flags as bits in base64, the first in the lowest bit of the first byte."""
    flat = flags.flatten().to("cpu", torch.uint8)
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    return _base64((flat << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8))


def _base64(numbers: Tensor) -> str:
    return base64.b64encode(numbers.cpu().contiguous().numpy().tobytes()).decode("ascii")


def _packed(x: Tensor) -> dict[str, Any]:
    """Numbers as 16-bit integers in base64, with the factor that gives the numbers back."""
    factor = max(x.abs().max().item(), 1e-30) / 32767
    return {"factor": factor, "base64": _base64((x.float() / factor).round().to(torch.int16))}
