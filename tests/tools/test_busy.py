"""The note that a busy machine gives beside times."""

import subprocess
import sys
import time

import pytest
from attnpack.tools import busy

LINUX = sys.platform == "linux"


@pytest.mark.skipif(not LINUX, reason="only Linux tells")
def test_another_process_is_counted_and_our_own_work_is_not():
    others = busy.OtherWork()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        try:
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                pass
            assert others.cores() > 0.4  # of one, on a machine whose cores may be taken
            assert others.warning().startswith("The machine was busy: other processes took ")
        finally:
            spinning.kill()


def test_times_of_a_quiet_machine_come_without_a_word(monkeypatch):
    numbers = iter([(0.0, 100.0, 5.0), (10.0, 112.0, 16.0)])  # 12 s of all cores, 11 of them ours
    monkeypatch.setattr(busy, "_times", lambda: next(numbers))
    assert busy.OtherWork().warning() == ""


def test_a_system_that_does_not_tell(monkeypatch, tmp_path):
    monkeypatch.setattr(busy, "_STAT", tmp_path / "none")
    assert busy.OtherWork().cores() is None and busy.OtherWork().warning() == ""
