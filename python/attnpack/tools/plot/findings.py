"""The habits that a model's heads show most clearly: the list of findings on the page of heads.

L tokens, H heads of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .heads import Heads

LEAST = 0.25
"""A habit with a smaller share of the weight is none."""
FAR = 3
"""From this distance on a key is "an earlier word"."""


class Finding(NamedTuple):
    """The head in which a habit is strongest, and the query and the key that show it best."""

    habit: str
    """The keys that the head reads, in words."""
    layer: int
    head: int
    query: int
    key: int
    share: float
    """The weight on such keys: the mean over the queries that have one, or, for one pair of tokens, its weight."""


class _Habit(NamedTuple):
    name: str
    pairs: Tensor
    """bool [L, L], the queries and keys that show it."""
    mean: bool
    """Whether its share is the mean over its queries, and not the weight of one pair."""


def find(layers: Sequence[Heads], tokens: Sequence[str]) -> list[Finding]:
    """The clearest head of each habit that some head has, the most telling habit first. Without any, the largest weight
    of all is the one finding."""

    def clearest(habit: _Habit) -> Finding:
        return max((_in_layer(layer, habit) for layer in layers), key=lambda each: each.share)

    found = [clearest(habit) for habit in _habits(tokens)]
    every = torch.ones(len(tokens), len(tokens), dtype=torch.bool)
    return [each for each in found if each.share >= LEAST] or [clearest(_Habit("one token", every, False))]


def _habits(tokens: Sequence[str]) -> Iterator[_Habit]:
    """Means leave out the first two queries, which have no choice."""
    at = torch.arange(len(tokens))
    distance = at[:, None] - at
    late = (at >= 2)[:, None]
    numbers = {token: n for n, token in enumerate(dict.fromkeys(tokens))}
    ids = torch.tensor([numbers[token] for token in tokens])
    copies = (ids[:, None] == ids) & (distance > 0)
    words = torch.tensor([any(map(str.isalnum, token)) for token in tokens])
    repeated = copies & words if (copies & words).any() else copies  # commas and full stops repeat by themselves
    followed = repeated.roll(1, 1) & (distance > 0)
    further = (distance >= FAR) & (at > 0) & words & words[:, None]
    yield _Habit("what followed the same token before", followed & late, True)
    yield _Habit("the same token before", repeated & late, True)
    yield _Habit("an earlier word", further & ~copies & ~followed, False)
    yield _Habit("the token before", (distance == 1) & late, True)
    yield _Habit("the token after", distance == -1, True)
    yield _Habit("itself", (distance == 0) & late, True)
    yield _Habit("the first token", (at == 0) & late, True)


def _in_layer(layer: Heads, habit: _Habit) -> Finding:
    """The finding of the layer's clearest head; its share is 0 where the habit cannot be."""
    on_pairs = layer.weights.float().cpu().masked_fill(~habit.pairs, 0)
    shares = on_pairs.sum(-1) if habit.mean else on_pairs.amax(-1)  # [H, L]
    queries = habit.pairs.any(-1)
    per_head = shares.sum(-1) / queries.sum().clamp(min=1) if habit.mean else shares.amax(-1)
    head = int(per_head.argmax())
    query = int(shares[head].argmax())
    key = int(on_pairs[head, query].argmax())
    return Finding(habit.name, layer.number, head, query, key, per_head[head].item())
