"""Scripts of the repository as modules, for tests that call their functions."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def load_script(path: str) -> ModuleType:
    """The file at this path below the repository's root, run as a module of its stem's name."""
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(f"script_{file.stem}", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look for their module
    spec.loader.exec_module(module)
    return module
