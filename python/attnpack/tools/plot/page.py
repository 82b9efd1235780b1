"""A page to look at a model's attention: one HTML file without network, to be opened in any browser."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...whole import whole_file
from .attention import capture_attention

if TYPE_CHECKING:
    from ...nn.causal_lm import CausalLM

MOST_TOKENS = 256


class AttentionPage(NamedTuple):
    """All layers and heads on a sentence: an overview, one head large, the weights of a token under the mouse, and the
    products of a query and a key. A notebook shows it in a frame; `save` writes the file."""

    text: str

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:  # notebooks store it beside the page
        return f"AttentionPage({len(self.text)} characters)"

    def _repr_html_(self) -> str:  # the name by which notebooks ask
        return f'<iframe srcdoc="{html.escape(self.text)}" width="100%" height="1130" style="border:0"></iframe>'

    def save(self, path: str | Path) -> None:
        """Writes the page to `path`, whole or not at all."""
        with whole_file(Path(path)) as partial:
            partial.write_text(self.text, encoding="utf-8")


@torch.no_grad()
def attention_page(
    model: CausalLM, ids: Sequence[int], tokens: Sequence[str], *, layers: Sequence[int] | None = None
) -> AttentionPage:
    """The page of `model` on the tokens `ids`, whose texts are `tokens`.

    Args:
        layers: the layers to show; default all. Fewer make a smaller page.

    Raises:
        ValueError: ids is empty or longer than 256, or a layer does not exist.
    """
    if not 1 <= len(ids) <= MOST_TOKENS:
        raise ValueError(f"text: got {len(ids)} tokens, want 1 to {MOST_TOKENS}: a page holds each weight of each head")
    shown = list(range(len(model.layers)) if layers is None else layers)
    for layer in shown:
        if not 0 <= layer < len(model.layers):
            raise ValueError(f"layers: got {layer}, want 0 to {len(model.layers) - 1}, the model's layers")
    seen = capture_attention(model, torch.tensor([list(ids)]))
    data = {"tokens": list(tokens), "layers": [_layer(layer, *seen[layer]) for layer in shown]}
    return AttentionPage(_template().replace("ATTENTION_DATA", json.dumps(data).replace("<", "\\u003c")))


def _template() -> str:
    return resources.files("attnpack").joinpath("tools/data/attention.html").read_text(encoding="utf-8")


def _layer(number: int, attention: Any, x: Tensor, weights: Tensor) -> dict:
    """The numbers of a layer, with weights [1, H, L, L]. Queries and keys are those that enter the operator."""
    q, k, _ = attention.project(x)
    num_heads, length, head_dim = q.shape[1:]
    group = num_heads // k.shape[1]
    left, _ = getattr(attention, "window", None) or (-1, -1)
    return {
        "number": number,
        "heads": num_heads,
        "dim": head_dim,
        "kv": list(getattr(attention, "head_map", None) or [head // group for head in range(num_heads)]),
        "window": left if left >= 0 else length,
        "sinks": getattr(attention, "sinks", None) is not None,
        "scale": getattr(attention, "softmax_scale", None) or getattr(attention, "scale", None) or head_dim**-0.5,
        "weights": _packed(weights[0]),  # [H, L, L]
        "q": _packed(q[0]),  # [H, L, D]
        "k": _packed(k[0]),  # [Hkv, L, D]
    }


def _packed(x: Tensor) -> dict:
    """Numbers as 16-bit integers in base64, with the factor that gives the numbers back."""
    factor = max(x.abs().max().item(), 1e-30) / 32767
    integers = (x.float() / factor).round().to(torch.int16).contiguous()
    return {"factor": factor, "base64": base64.b64encode(integers.numpy().tobytes()).decode("ascii")}
