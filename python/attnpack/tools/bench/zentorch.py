"""transformers compiled by AMD's zentorch, for `attnpack bench model`.

It runs in a process of its own: torch forgets all compiled graphs when `attnpack.backend.enable` changes a function.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from ...errors import DTYPES
from .model_rows import Row
from .model_timed import Timed

WARM_UPS = 3  # calls of a new row that are not timed: the first ones compile


class Zentorch:
    """The model of SmolLM2's file, with `forward` compiled by the backend "zentorch", in another process.

    Args:
        dtype: "fp32", "bf16" or "fp16".
    """

    def __init__(self, dtype: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, dtype, torch.get_num_threads()), daemon=True)
        self._process.start()
        theirs.close()
        self._receive()

    def run(self, row: Row, ids: Tensor):
        """A Timed of the row on its prompts [batch, prompt]."""
        self._pipe.send((row, ids.tolist()))
        seconds, tokens = self._receive()
        return Timed(seconds, torch.tensor(tokens))

    def _receive(self):
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer


def _serve(pipe: Connection, dtype: str, threads: int) -> None:
    """Answers (row, ids) with (seconds, tokens), or with a line that says what went wrong, until the pipe closes."""
    torch.set_num_threads(threads)
    known: tuple[Row | None, Tensor | None] = (None, None)
    try:
        run = _make_runner(dtype)
        pipe.send((0.0, []))
        while True:
            row, ids = pipe.recv()
            new = row != known[0]
            if new:
                known = row, torch.tensor(ids)
            try:
                for _ in range(WARM_UPS if new else 0):
                    run(*known)
                seconds, tokens = run(*known)
                pipe.send((seconds, tokens.tolist()))
            except Exception as error:
                pipe.send(_line(error))
    except EOFError:  # the other process has ended
        return
    except Exception as error:
        pipe.send(_line(error))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _make_runner(dtype: str):
    import zentorch  # noqa: F401  (registers the backend)

    from ... import CausalLM
    from ...checkpoints import smollm2_path
    from .transformers import Transformers, make_transformers

    model = make_transformers(CausalLM.from_gguf(smollm2_path(), dtype=DTYPES[dtype]))
    fill = model.forward
    model.forward = torch.compile(fill, backend="zentorch", dynamic=True)
    return Transformers(model, fill).plain
