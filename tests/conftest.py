"""Every test compiles anew. The real model, SmolLM2-135M-Instruct, is loaded by transformers and by attnpack, from the
same file. A module of tests gives back the memory that it took, so that a process of the suite stays near 2 GB."""

import contextlib
import ctypes
import gc
import re
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from script_modules import load_script


def pytest_collection_modifyitems(config, items):
    """Leaves the tests marked onednn out where linear layers take torch's kernel. test_linear_kernels.py runs them
    there too, in a process that pins oneDNN."""
    marked = [item for item in items if item.get_closest_marker("onednn")]
    if not marked:
        return
    from attnpack import _C

    if not _C.linear_kernels().startswith("oneDNN"):
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in marked]


gc.disable()  # imports leave no garbage
PEAKS: dict[str, float] = {}  # {module of tests: peak memory of this process meanwhile, in GB}


def reset_peak() -> None:
    """Peaks begin anew here, on Linux."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> float:
    """The peak of this process since reset_peak, in GB."""
    status = Path("/proc/self/status")
    held = re.search(r"VmHWM:\s*(\d+)", status.read_text()) if status.exists() else None
    return int(held[1]) * 1024 / 1e9 if held else 0.0


def pytest_collection_finish():
    gc.freeze()  # as after each module
    gc.enable()


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # a worker of xdist
        session.config.workeroutput["peaks"] = PEAKS


class PeakMemory:
    """Shows what each process took at most, and for which tests: CI's machines have little."""

    def __init__(self):
        self.of_workers = []

    @pytest.hookimpl(optionalhook=True)  # of xdist
    def pytest_testnodedown(self, node):
        self.of_workers.append(getattr(node, "workeroutput", {}).get("peaks", {}))

    def pytest_terminal_summary(self, terminalreporter):
        for peaks in self.of_workers or [PEAKS]:
            most = sorted(peaks.items(), key=lambda item: -item[1])[:3]
            text = ", ".join(f"{peak:.1f} GB in {module}" for module, peak in most)
            terminalreporter.write_line(f"peak memory of a process: {text}")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(PeakMemory())


@pytest.fixture(scope="session", autouse=True)
def graphs_of_this_build():
    """Keeps compiled graphs on disk apart from those of other builds, whose operators may give other strides."""
    import torch
    from attnpack._load import LIBRARY

    torch.compiler.config.cache_key_tag += f"build {LIBRARY.stat().st_mtime_ns};"


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Forgets the functions that earlier tests compiled: dynamo compiles one function at most eight times."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture(scope="session")
def reference_script():
    """scripts/make_reference_tokens.py as a module."""
    return load_script("scripts/make_reference_tokens.py")


def return_freed_memory() -> None:
    """Gives freed memory back to the system: glibc keeps what lies below a small block that is in use."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        gc.collect()
        trim(0)


@pytest.fixture(scope="module", autouse=True)
def memory_of_a_module(request):
    """Notes the peak of each module of tests, and lets the next one begin with little."""
    reset_peak()
    yield
    name = request.module.__name__
    PEAKS[name] = max(PEAKS.get(name, 0.0), peak_memory())
    return_freed_memory()
    gc.freeze()  # mostly imported packages, through which later collections would look for a quarter of a second


@pytest.fixture(scope="session")
def smollm2_tokenizer_hf(reference_script):
    """The tokenizer of transformers."""
    return reference_script.load_tokenizer()


@pytest.fixture(scope="module")
def smollm2_hf(reference_script):
    """The model of transformers, fp32."""
    model = reference_script.load_model()
    return_freed_memory()
    return model


@pytest.fixture(scope="module")
def smollm2():
    """attnpack's CausalLM, fp32."""
    import attnpack
    from attnpack.checkpoints import smollm2_path

    return attnpack.CausalLM.from_gguf(smollm2_path())


@pytest.fixture(scope="session")
def topics_text() -> str:
    """English prose without a network: the standard library's help topics, in the order of their names."""
    return "\n".join(topics[name] for name in sorted(topics))
