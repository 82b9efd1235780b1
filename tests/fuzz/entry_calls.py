"""Valid calls of the ops of compressed attention."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import attnpack
import torch
from attnpack import reference
from entries import attended
from op_cases import draw
from torch.testing import assert_close

Call = tuple[str, list, Callable]
WIDE = [torch.float64, torch.float32]


def compress_tokens(pick: Random) -> Call:
    overlap, rate, dtype = pick.choice([False, True]), pick.randint(1, 4), pick.choice(WIDE)
    width = pick.randint(1, 5) * (2 if overlap else 1)
    shape = pick.randint(1, 3), pick.randint(0, 9), width
    value, gate = (draw(*shape, dtype=dtype, seed=seed) for seed in (0, 1))
    bias = draw(rate, width, dtype=dtype, seed=2)

    def right(result):
        assert result.shape == (shape[0], shape[1] // rate, width // 2 if overlap else width)
        if result.numel():
            assert_close(result, reference.compress_tokens(value, gate, bias, overlap), atol=1e-4, rtol=1e-4)

    return "compress_tokens", [value, gate, bias, overlap], right


def _tokens(pick: Random):
    """query, key and entries, and the rotation as keywords."""
    batch, heads, length, dim = pick.randint(1, 3), pick.randint(1, 3), pick.randint(1, 9), pick.choice([4, 6, 8])
    rate, dtype = pick.randint(1, 4), pick.choice(WIDE)
    query, key, entries = (
        draw(batch, n, rows, dim, dtype=dtype, seed=seed)
        for seed, (n, rows) in enumerate([(heads, length), (1, length), (1, length // rate)])
    )
    cos, sin = attnpack.ops.rope_table(torch.arange(length), [1.0, 0.1][: pick.randint(1, 2)])
    return query, key, entries, {"cos": cos, "sin": sin, "interleaved": pick.choice([True, False]), "rate": rate}


def name_entries(pick: Random) -> Call:
    query, _, entries, rotation = _tokens(pick)
    weights, top_k = draw(query.size(0), query.size(2), query.size(1), dtype=query.dtype), pick.randint(1, 4)

    def right(result):
        seen = (torch.arange(query.size(2)) + 1) // rotation["rate"]
        assert ((result >= 0).sum(-1)[:, 0] == seen.clamp(max=top_k)).all()
        assert (result < seen.view(-1, 1)).all()

    return "name_entries", [query, entries, weights, top_k, *rotation.values()], right


def attend_entries(pick: Random) -> Call:
    query, key, entries, rotation = _tokens(pick)
    sinks, window = draw(query.size(1), dtype=query.dtype), pick.randint(1, 9)

    def right(result):
        expected = attended(query, key, entries, None, sinks, window, **rotation)
        assert_close(result, expected, atol=1e-4, rtol=1e-4)

    return "attend_entries", [query, key, entries, None, sinks, window, None, *rotation.values()], right


def project_groups(pick: Random) -> Call:
    groups, rank, width = (pick.randint(1, 3) for _ in range(3))
    dtype = pick.choice(WIDE)
    joined = draw(pick.randint(1, 3), pick.randint(0, 4), groups * width, dtype=dtype)
    weight = draw(groups * rank, width, dtype=dtype, seed=1)

    def right(result):
        rows = zip(joined.split(width, 2), weight.split(rank), strict=True)
        assert_close(result, torch.cat([part @ row.T for part, row in rows], 2), atol=1e-4, rtol=1e-4)

    return "project_groups", [joined, weight, groups], right


MAKERS = [compress_tokens, name_entries, attend_entries, project_groups]
