"""Text from a language model, for `attnpack generate` and the third part of the demo."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from .. import CausalLM, ModelCache, checkpoints
from ..errors import DTYPES
from ..ops.stored import inputs_of, is_stored


@dataclass(frozen=True)
class Answer:
    text: str
    prompt_tokens: int
    new_tokens: int
    seconds_to_first_token: float
    tokens_per_second: float  # after the first token
    positions: int  # in the cache at the end
    kv_bytes: int  # of the keys and values of these positions in all layers
    weight_bytes: int  # of the model's parameters


def answer(
    model: CausalLM,
    tokenizer: checkpoints.Tokenizer,
    prompt: str,
    *,
    write: Callable[[str], object],
    max_new_tokens: int = 128,
    **sampling,
) -> Answer:
    """Answers one user message. It calls `write` with each piece of text as it comes, and passes `sampling` to
    `model.generate`."""
    ids = tokenizer.chat(prompt) if tokenizer.chat_template else tokenizer.encode(prompt)
    if not ids:
        raise ValueError("prompt: got an empty one, want a text for the model to go on with")
    pieces: list[str] = []
    moments = [time.perf_counter()]

    def write_piece(piece: str) -> None:
        pieces.append(piece)
        write(piece)

    add_token = tokenizer.stream(write_piece)

    def on_token(token: torch.Tensor) -> None:
        moments.append(time.perf_counter())
        add_token(int(token))

    cache = ModelCache(len(model.layers))
    model.generate(
        torch.tensor([ids]),
        max_new_tokens=max_new_tokens,
        cache=cache,
        stop_tokens=tokenizer.stop_tokens,
        callback=on_token,
        **sampling,
    )
    new_tokens = len(moments) - 1
    return Answer(
        text="".join(pieces),
        prompt_tokens=len(ids),
        new_tokens=new_tokens,
        seconds_to_first_token=moments[1] - moments[0],
        tokens_per_second=(new_tokens - 1) / max(moments[-1] - moments[1], 1e-9),
        positions=len(cache),
        kv_bytes=cache.nbytes,
        weight_bytes=sum(parameter.nbytes for parameter in model.parameters()),
    )


def main(args: argparse.Namespace) -> None:
    """`attnpack generate`: streams the answer, and says on stderr how much memory stored weights take; with `args.json`
    prints the answer's figures as one JSON object."""
    greedy = args.temperature == 0 or (args.temperature, args.top_k, args.top_p) == (None, None, None)
    if args.seed is not None and greedy:
        raise ValueError(
            f"--seed: got {args.seed} without sampling, so that nothing is drawn; add --temperature, --top-k or --top-p"
        )
    path = args.model or checkpoints.smollm2_path()
    tokenizer = checkpoints.load_tokenizer(path)
    model = checkpoints.load(path, DTYPES[args.dtype], args.weights)
    sampling = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "seed")}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    write = (lambda piece: None) if args.json else write_to_stdout
    found = answer(model, tokenizer, args.prompt, write=write, max_new_tokens=args.max_new_tokens, **sampling)
    if args.json:
        print(json.dumps(asdict(found), indent=2))
        return
    print()
    if args.weights == "stored":
        wide = widened_bytes(model, DTYPES[args.dtype]) / 2**20
        print(f"weights: {found.weight_bytes / 2**20:.0f} MiB, and {wide:.0f} in {args.dtype}", file=sys.stderr)


def widened_bytes(model: CausalLM, dtype: torch.dtype) -> int:
    """The bytes of the parameters if all of them had this dtype."""
    rows = ((p.size(0) * inputs_of(p) if is_stored(p) else p.numel()) for p in model.parameters())
    return sum(rows) * dtype.itemsize


def write_to_stdout(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()
