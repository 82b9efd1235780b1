"""The command `attnpack uptrain`: trains a converted checkpoint on a text for a given time; can be resumed."""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...atomic_write import atomic_file
from ...checkpoints import load
from ...checkpoints.hf_directory import HfCheckpoint
from ...checkpoints.strict_json import read_json
from ...checkpoints.tokenizer import load_tokenizer
from ...checkpoints.writer import SafetensorsWriter, write_json
from ...file_errors import naming
from ...nn.causal_lm import CausalLM
from ...progress import duration, finish, seconds_bar
from ...training import read_state, save_state
from ..checkpoint.conversion import RECORD
from ..checkpoint.streams import load_text, text_name
from .distill import Distillation, perplexity

STATE = "attnpack_uptrain.pt"
_SAVE_EVERY = 60.0  # seconds
_MEASURED = 2048  # tokens at the beginning of the text; they are measured, and not trained on


@dataclass(frozen=True)
class UptrainReport:
    directory: str
    teacher: str
    steps: int
    tokens: int
    seconds: float
    resumed: bool
    loss_first: float
    loss_last: float  # both are means, of the first and of the last steps, up to 20
    tokens_measured: int
    perplexity_teacher: float
    perplexity_before: float
    perplexity: float
    written: bool  # False if the perplexity rose


def main(args: argparse.Namespace) -> None:
    # Flushed: who reads through a pipe sees the estimate when it is made.
    report = uptrain(args, say=(lambda words: None) if args.json else functools.partial(print, flush=True))
    if args.json:
        print(json.dumps(asdict(report)))
        return
    print(
        f"{report.directory}: {report.steps} steps of distillation, loss {report.loss_first:.3f} -> "
        f"{report.loss_last:.3f}\nperplexity on {report.tokens_measured} tokens of the text's beginning "
        f"{report.perplexity_before:.2f} -> {report.perplexity:.2f}, of the original {report.perplexity_teacher:.2f}"
    )
    if not report.written:
        print(
            f"That is worse than before, so {report.directory} keeps its weights: the same command with more --minutes "
            "goes on, --restart with a lower --learning-rate begins anew"
        )


def uptrain(args: argparse.Namespace, say) -> UptrainReport:
    """Trains the layers of the checkpoint `args.directory` for `args.minutes`, then writes the new weights into it.

    During the training the directory gains a single file, the state of the training; the same command resumes from it.
    If the perplexity on the beginning of the text rose, the old weights stay. Raises ValueError if text, teacher or
    checkpoint do not fit.
    """
    directory: Path = args.directory
    if not 0 < args.learning_rate < 1:
        raise ValueError(f"--learning-rate: got {args.learning_rate}, want a number between 0 and 1")
    with naming(directory, "cannot be trained", "give what attnpack convert made"):
        checkpoint = HfCheckpoint(directory)
        if not checkpoint.is_plain:
            raise ValueError(
                f"{directory}: its weights are not stored as plain tensors with the names of Llama, as training "
                "writes them"
            )
    teacher_path = _given_teacher(args.teacher) if args.teacher else _recorded_teacher(directory)
    ids = torch.tensor(load_tokenizer(directory).encode(load_text(args.text)))
    length = min(args.length, checkpoint.config["max_positions"])
    measured = min(_MEASURED, len(ids) // 4) // length * length
    if measured < length or len(ids) - measured <= length:
        raise ValueError(
            f"{text_name(args.text)}: has {len(ids)} tokens, want at least {4 * length + 4}; give a longer text"
        )
    say(f"loads and measures, trains for {duration(60 * args.minutes)}, then measures once more")
    teacher, student = load(teacher_path), CausalLM.from_hf(directory)
    _check_pair(student, teacher, teacher_path)
    held_out, ids = ids[:measured].view(-1, length), ids[measured:]
    work = Distillation(student, teacher, ids, length, 60 * args.minutes, args.learning_rate, args.seed)
    about = _identity(args, teacher_path, checkpoint, ids)

    state_path = directory / STATE
    resumed = state_path.is_file() and not args.restart
    if resumed:
        figures = _load_state(work, state_path, about)
        say(f"going on after {work.steps} steps and {duration(work.spent)}")
    else:
        figures = {"before": perplexity(student, held_out), "teacher": perplexity(teacher, held_out)}
        student.train()
    _train_and_save(work, lambda: _save_state(work, state_path, about, figures), say)
    student.eval()
    few = min(20, max(1, len(work.losses) // 2))
    after = perplexity(student, held_out)
    report = UptrainReport(
        directory=str(directory),
        teacher=str(teacher_path),
        steps=work.steps,
        tokens=work.steps * length,
        seconds=round(work.spent, 1),
        resumed=resumed,
        loss_first=_mean(work.losses[:few]),
        loss_last=_mean(work.losses[-few:]),
        tokens_measured=measured,
        perplexity_teacher=figures["teacher"],
        perplexity_before=figures["before"],
        perplexity=after,
        written=after <= figures["before"],
    )
    if report.written:
        _write_weights(checkpoint, student.state_dict())
        _write_record(directory, report)
        state_path.unlink(missing_ok=True)
    else:
        _save_state(work, state_path, about, figures)
    return report


def _train_and_save(work: Distillation, save, say) -> None:
    saved = work.spent
    if work.spent < work.seconds:
        took = work.train_step()
        took = work.train_step() if work.spent < work.seconds else took  # the first step warms up
        left = max(0.0, work.seconds - work.spent)
        if left >= took:
            say(
                f"{work.length} tokens take {took:.2f} s: about {int(left / took)} steps in the {duration(left)} "
                f"left, until {finish(left)}; Ctrl-C keeps what is done, and the same command goes on"
            )
    with seconds_bar(work.seconds, work.spent, "uptraining") as show:

        def after_step() -> None:
            nonlocal saved
            show(work.spent, f"step {work.steps}, loss {_mean(work.losses[-20:]):.3f}")
            if work.spent - saved > _SAVE_EVERY:
                save()
                saved = work.spent

        try:
            work.train(after_step)
        except KeyboardInterrupt:
            save()
            say(f"\nkept {work.steps} steps and {duration(work.spent)}; the same command goes on")
            raise


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def _given_teacher(path: Path) -> Path:
    if not (path.is_file() or (path / "config.json").is_file()):
        what = "a directory without config.json" if path.is_dir() else "which is not there"
        raise ValueError(f"--teacher: got {path}, {what}; give the original, a Hugging Face directory or a .gguf file")
    return path


def _recorded_teacher(directory: Path) -> Path:
    path = directory / RECORD
    if not path.is_file():
        raise ValueError(f"{directory}: has no {RECORD} that names its original; give it as --teacher")
    with naming(path, "names no original", "give it as --teacher"):
        teacher = Path(read_json(path)["source"])
    if not teacher.exists():
        raise ValueError(f"{teacher}: the original of {directory} is there no more; give it as --teacher")
    return teacher


def _check_pair(student: CausalLM, teacher: CausalLM, path: Path) -> None:
    theirs, ours = teacher._live_config(), student._live_config()
    for name in ("vocab_size", "embed_dim", "num_layers"):
        if theirs[name] != ours[name]:
            raise ValueError(f"{path}: has {name} {theirs[name]}, the model to train {ours[name]}; give its original")


def _identity(args: argparse.Namespace, teacher: Path, checkpoint: HfCheckpoint, ids: Tensor) -> dict[str, Any]:
    """The settings that must be the same when a training is resumed."""
    return {
        "teacher": str(teacher.absolute()),
        "kv_heads": checkpoint.config["num_kv_heads"],
        "latent": checkpoint.config["latent"],
        "text": hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
        "length": args.length,
        "learning_rate": args.learning_rate,
        "seed": args.seed,
    }


def _save_state(work: Distillation, path: Path, about: dict[str, Any], figures: dict[str, float]) -> None:
    save_state(path, {"about": about, "figures": figures, "work": work.state()})


def _load_state(work: Distillation, path: Path, about: dict[str, Any]) -> dict[str, float]:
    state = read_state(path, "pass --restart to begin anew")
    with naming(path, "cannot be read", "pass --restart to begin anew"):
        for name, value in about.items():
            if state["about"].get(name) != value:
                raise ValueError(f"{path}: is of a training with another {name}; go on with that, or pass --restart")
        work.load_state(state["work"])
        return {name: float(state["figures"][name]) for name in ("before", "teacher")}


def _write_weights(checkpoint: HfCheckpoint, state: dict[str, Tensor]) -> None:
    """Writes the weights as model.safetensors, which appears whole, and then removes the old shards."""
    path = checkpoint.path / "model.safetensors"
    dtypes = {name: checkpoint.dtype(name) for name in checkpoint.files}
    with atomic_file(path) as partial:
        writer = SafetensorsWriter(partial, {name: (tuple(state[name].shape), dtype) for name, dtype in dtypes.items()})
        for name, dtype in dtypes.items():
            writer.write_tensor(name, state[name].to(dtype))
        writer.close()
    index = checkpoint.path / "model.safetensors.index.json"
    for old in [index, *{file.path for file in checkpoint.files.values()}]:
        if old != path:
            old.unlink(missing_ok=True)


def _write_record(directory: Path, report: UptrainReport) -> None:
    path = directory / RECORD
    record = read_json(path) if path.is_file() else {"source": report.teacher}
    with atomic_file(path) as partial:
        write_json(partial, record | {"uptrained": [*record.get("uptrained", []), asdict(report)]})
