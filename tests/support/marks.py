"""Which cases of a test only `scripts/test.sh --long` runs."""

import itertools

import pytest


def long(*values, **options):
    """A case that takes long, and rarely finds what its neighbours do not."""
    return pytest.param(*values, marks=pytest.mark.long, **options)


def some_long(cases, normal):
    """The cases, of which those outside of `normal` are long."""
    return [case if case in normal else long(case) for case in cases]


def grid(every: int, **axes):
    """All combinations of the axes' values; one in `every` runs without --long, as an even spread: where three axes
    have that many values, each pair of values still meets."""
    lists = {name: list(values) for name, values in axes.items()}
    cases = [
        pytest.param(*values, marks=() if sum(places) % every == 0 else pytest.mark.long, id="-".join(map(str, values)))
        for places, values in zip(
            itertools.product(*(range(len(values)) for values in lists.values())),
            itertools.product(*lists.values()),
            strict=True,
        )
    ]
    return pytest.mark.parametrize(list(lists), cases)
