"""Renders chat templates in another process with little time and memory.

A template is a program that came with the checkpoint, and its author is unknown. A sandbox in this process cannot limit
time and memory: loops in loops, recursive macros and a filter that pads to a billion characters are all legal Jinja.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

LONGEST_TEMPLATE = 1_000_000  # characters
OLDEST_JINJA = "3.1.6"  # as transformers: templates leave the sandbox of older ones
_SECONDS = 2  # of CPU time
_BYTES = 1 << 30  # of address space
_LONGEST_ANSWER = 10_000_000  # characters
_PATIENCE = 30  # seconds by the clock: the machine may be busy
_PROGRAM = Path(__file__).with_name("chat_process.py")


def render_chat(source: str, template: str, /, **values: object) -> str:
    """The text that the template of the checkpoint `source` makes from `values`, which must fit into JSON.

    Raises ValueError, naming `source`, if the template refuses the prompt, fails, or takes too much time or memory;
    ImportError without jinja2 or with one that is too old.
    """
    _check_jinja()
    if not isinstance(template, str) or len(template) > LONGEST_TEMPLATE:
        raise ValueError(f"{source}: its chat template is no text of up to {LONGEST_TEMPLATE} characters")
    limits = {"seconds": _SECONDS, "bytes": _BYTES, "characters": _LONGEST_ANSWER}
    request = json.dumps({"template": template, "values": values, "limits": limits})
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", str(_PROGRAM)]  # -P: import no module from the folder of the program
    try:
        ended = subprocess.run(command, input=request.encode(), capture_output=True, env=environment, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        ended = None
    if ended is None or ended.returncode != 0:
        raise ValueError(
            f"{source}: its chat template takes more than {_SECONDS} seconds or {_BYTES >> 20} MiB; use "
            "encode(prompt), or another checkpoint"
        )
    answer = json.loads(ended.stdout)
    if "text" not in answer:
        raise ValueError(f"{source}: the chat template {answer['failed']}")
    return answer["text"]


def _check_jinja() -> None:
    found = importlib.util.find_spec("jinja2") and importlib.metadata.version("jinja2")
    if not found or _release(found) < _release(OLDEST_JINJA):
        raise ImportError(
            f"chat templates need jinja2 {OLDEST_JINJA} or later, found {found or 'none'}; run "
            f"`pip install 'jinja2>={OLDEST_JINJA}'`"
        )


def _release(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
