"""Runs code in a child process with little memory and time, to measure the cost of a file."""

import subprocess

from processes import run_python

# The arenas of libgomp and of the allocator take address space too.
_LIMITS = """
import resource
import attnpack, attnpack.checkpoints.gguf, gguf, tokenizers
from attnpack.tools.memory import resident_bytes
most = resident_bytes("VmSize") + {memory}
resource.setrlimit(resource.RLIMIT_AS, (most, most))
used = resource.getrusage(resource.RUSAGE_SELF)
resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + {seconds}, -1))
"""


def run_limited(code: str, memory: int = 1_500_000_000, seconds: int = 10) -> subprocess.CompletedProcess:
    """`code` with attnpack imported: SIGXCPU ends it after `seconds` of the CPU, MemoryError at `memory` bytes more."""
    return run_python(_LIMITS.format(memory=memory, seconds=seconds) + code)
