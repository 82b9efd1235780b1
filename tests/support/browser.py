"""Headless Chromium for tests of pages, and the numbers that a page of heads holds."""

from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path

import torch
from torch import Tensor

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NO_CHROMIUM = "no Chromium is installed: apt-get install chromium"


def browse(profile: Path, address: str, *options: str) -> str:
    """The output of Chromium for the address."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", *options, address]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def unpack(packed: dict, *shape: int) -> Tensor:
    """Numbers that are stored as integers of 16 bits, times their factor."""
    integers = torch.frombuffer(bytearray(base64.b64decode(packed["base64"])), dtype=torch.int16)
    return (integers * packed["factor"]).view(shape)
