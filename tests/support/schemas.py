"""Arguments of the ops under torch.ops.attnpack by their schemas."""

import torch
from attnpack.ops.operator import flat_arguments


def in_order(name: str, *placed, **named) -> list:
    """All arguments of the op `name` in the order of its schema: those given, and the defaults of the others."""
    arguments = getattr(torch.ops.attnpack, name).default._schema.arguments[len(placed) :]
    unknown = named.keys() - {argument.name for argument in arguments}
    assert not unknown, f"{name} has no argument {sorted(unknown)}"
    return [*placed, *(named.get(argument.name, argument.default_value) for argument in arguments)]


def operator_keywords(query, key, mask, settings) -> dict:
    """The settings of `attention` as keywords of the op."""
    _, flat = flat_arguments(query, key, settings)
    return {"mask": mask, **flat}
