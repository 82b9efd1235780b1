"""Attention weights of a language model as heat maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .heads import watching

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


@torch.no_grad()
def lm_attention(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The attention weights of every layer, each [B, Hq, L, L], from one forward over ids [B, L]."""
    found: list[Tensor] = []
    with watching(model, lambda layer, args, kwargs, weights: found.append(weights)):
        model(ids)
    return found


def draw_weights(
    axes: Axes, weights: Tensor, tokens: Sequence[str] | None = None, *, title: str, vmax: float = 1
) -> AxesImage:
    """Draws the weights of one head, [Lq, Lkv]: one row per query, one column per key. Returns the image, for a colour
    bar."""
    image = axes.imshow(weights.detach().float().cpu().numpy(), cmap="cividis", vmin=0, vmax=vmax)
    axes.set_title(title, fontsize=9)
    if tokens is None:
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True)
    else:
        labels = [token.replace("\n", "\\n").replace("$", r"\$") for token in tokens]
        size = 9 if len(labels) <= 16 else 7
        axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=size)
        axes.set_yticks(range(len(labels)), labels, fontsize=size)
    return image


def draw_heads(figure: Figure, weights: Tensor, tokens: Sequence[str], *, title: str) -> None:
    """Draws all heads of a layer, weights [Hq, L, L], three per row, with one colour bar."""
    columns = min(3, len(weights))
    panels = figure.subplots(-(-len(weights) // columns), columns, squeeze=False, sharex=True, sharey=True)
    for head, panel in enumerate(panels.flat):
        if head >= len(weights):
            panel.set_axis_off()
            continue
        image = draw_weights(panel, weights[head], tokens, title=f"head {head}")
    figure.suptitle(f"Attention weights, {title}")
    figure.supxlabel("key (token that is read)", fontsize=9)
    figure.supylabel("query (token that reads)", fontsize=9)
    figure.colorbar(image, ax=panels, label="weight", shrink=0.6)
