"""Which cases of a test only `scripts/test.sh --long` runs."""

import pytest


def long(*values, **options):
    """A case that takes long, and rarely finds what its neighbours do not."""
    return pytest.param(*values, marks=pytest.mark.long, **options)


def some_long(cases, normal):
    """The cases, of which those outside of `normal` are long."""
    return [case if case in normal else long(case) for case in cases]
