"""How far loading a model raises a process's resident memory: `python memory_growth.py LOADER PATH DTYPE`, in bytes.

The tests of from_gguf and from_hf run it in its own process. It prints the growth and the size of the weights.
"""

import subprocess
import sys
from pathlib import Path


def measure(loader: str, path: str, dtype: str) -> None:
    import attnpack
    import torch
    from attnpack.tools.memory import peak_bytes

    models = []
    grown = peak_bytes(lambda: models.append(getattr(attnpack.CausalLM, loader)(path, dtype=getattr(torch, dtype))))
    weights = sum(p.untyped_storage().nbytes() for p in {p.data_ptr(): p for p in models[0].parameters()}.values())
    print(grown, weights)


def growth(loader: str, path: Path, dtype: str) -> tuple[int, int]:
    """The peak of resident memory minus the memory just before loading, and the bytes of the weights."""
    command = [sys.executable, __file__, loader, str(path), dtype]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    grown, weights = run.stdout.split()
    return int(grown), int(weights)


if __name__ == "__main__":
    measure(*sys.argv[1:])
