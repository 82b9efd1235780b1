"""Files of tests register attnpack as they are imported, and several run in one process."""

import attnpack.hf
import pytest


@pytest.fixture(autouse=True)
def stays_registered():
    """A test may unregister attnpack; the next file of this process finds it registered."""
    yield
    attnpack.hf.register()
