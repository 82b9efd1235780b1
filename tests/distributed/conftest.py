"""Processes that all tests of this folder share: a process costs seconds to start."""

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four_ranks():
    ranks = Ranks(4)
    yield ranks
    ranks.close()
