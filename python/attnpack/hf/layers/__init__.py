"""Replaces attention layers of transformers by modules of attnpack; `KNOWN` lists the classes that it can replace."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from . import families
from .adopted import Adopted
from .grouped import HfGroupedQueryAttention
from .latent import HfLatentAttention
from .recurrent import RECURRENT
from .sparse import HfSparseLatentAttention

KNOWN: dict[str, type[nn.Module]] = {
    **dict.fromkeys(families.GROUPED, HfGroupedQueryAttention),
    **{name: HfSparseLatentAttention if its.selects else HfLatentAttention for name, its in families.LATENT.items()},
    **RECURRENT,
}


def replace_layers(model: PreTrainedModel) -> int:
    """Replaces all known layers. Returns the number of attnpack's layers in the model afterwards, including those of an
    earlier call."""
    found = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if type(child).__module__.startswith("transformers.models.") and type(child).__name__ in KNOWN
    ]
    made = {child: KNOWN[type(child).__name__](child) for _, _, child in found}
    for parent, name, child in found:
        setattr(parent, name, made[child])
        _keep_recording(child, made[child])
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            _record_ours_too(part)
    return sum(isinstance(layer, Adopted) for layer in model.modules())


def _record_ours_too(model: PreTrainedModel) -> None:
    """Adds our classes to the classes whose weights the model returns for `output_attentions=True`.

    transformers looks for layers by their class, and silently leaves out the layers of other classes.
    """
    recorded = getattr(model, "_can_record_outputs", None) or {}
    for output, layers in recorded.items():
        layers = list(layers) if isinstance(layers, list) else [layers]
        ours = {KNOWN[layer.__name__] for layer in layers if isinstance(layer, type) and layer.__name__ in KNOWN}
        if new := [layer for layer in ours if layer not in layers]:
            recorded[output] = layers + new


def _keep_recording(theirs: nn.Module, ours: nn.Module) -> None:
    """Keeps the hooks on the results of a layer: the user's, and those with which transformers records results."""
    for hooks in ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
        getattr(ours, hooks).update(getattr(theirs, hooks))
