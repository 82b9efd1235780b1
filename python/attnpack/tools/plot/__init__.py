"""Pictures as PNG or SVG, a page, and `attnpack plot`. Pictures need matplotlib; the rest of attnpack does not.

The modules `memory`, `roofline` and `attention` draw: their functions `draw_*` take matplotlib axes, so that notebooks
show the same pictures as the command line. `schematic`, `walkthrough` and `newest` draw SVG,
and `page` makes a page of HTML, without matplotlib. `colours` has the colours of all.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...atomic_write import atomic_file, check_writable
from ...file_errors import naming
from .memory import MODELS, draw_kv_memory, kv_bytes, model_kv_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ...checkpoints import Tokenizer
    from ...nn.causal_lm import CausalLM

ENDINGS = (".png", ".svg")
DEFAULT_LAYER = 11
"""The layer of a picture; of a model with fewer layers the last."""


def new_figure(width: float = 7, height: float = 4.5) -> Figure:
    """A figure, sized in inches, that is made without pyplot: pyplot's backend stays as it is."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError("pictures need matplotlib, which is not installed: pip install matplotlib") from None
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def save(figure: Figure, path: str | Path) -> None:
    """Writes the figure as PNG or SVG, by the ending of the name; raises the errors of `check_picture`."""
    check_picture(path)
    path = Path(path)
    with atomic_file(path) as partial, partial.open("xb") as file:
        figure.savefig(file, format=path.suffix[1:].lower())


def check_picture(path: str | Path, option: str = "--out", endings: Sequence[str] = ENDINGS) -> None:
    """Raises ValueError if `path`, which `option` gave, could not be written or has another ending. A command calls it
    before its work, and not after it."""
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"{option}: {path} lies in no folder that exists; make {path.parent} first, or choose another")
    if path.is_dir():
        raise ValueError(f"{option}: {path} cannot be written (Is a directory); choose another file")
    if path.suffix.lower() not in endings:
        raise ValueError(f"{option}: got {str(path)!r}, want a name that ends in {' or '.join(endings)}")
    try:
        check_writable(path)
    except OSError as error:
        raise ValueError(f"{option}: {path} cannot be written ({error.strerror}); choose another file") from None


def plot_kv_memory(
    path: str | Path,
    variants: Mapping[str, int] | None = None,
    contexts: Sequence[int] = (1024, 4096, 16384, 65536, 131072),
    *,
    num_layers: int = 32,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, list[int]]:
    """Writes a picture of KV memory against context, with one line per variant, and returns its points in bytes.

    `variants` maps a name to a number of kv heads; the default is MHA, GQA-8 and MQA for 32 query heads.
    """
    variants = variants or {"MHA (32 kv heads)": 32, "GQA-8 (8 kv heads)": 8, "MQA (1 kv head)": 1}
    points = {
        name: [kv_bytes(heads, n, num_layers=num_layers, head_dim=head_dim, dtype=dtype) for n in contexts]
        for name, heads in variants.items()
    }
    figure = new_figure()
    title = f"KV memory against context: {num_layers} layers, head dim {head_dim}, {str(dtype).removeprefix('torch.')}"
    draw_kv_memory(figure.subplots(), contexts, points, title=title)
    save(figure, path)
    return points


def main(args: argparse.Namespace) -> None:
    """`attnpack plot`: writes one picture, or a page; with `args.json` prints its figures as one JSON object."""
    if getattr(args, "html", None):
        check_picture(args.html, "--html", (".html",))
        if args.out is not None:
            raise ValueError(f"--out: got {str(args.out)!r} beside --html, which writes only a page; leave one out")
        figures = _page(args)
        size = f"{args.html.stat().st_size / 2**20:.1f} MiB"
        print(json.dumps({"page": str(args.html), **figures}) if args.json else f"wrote {args.html}, {size}")
        return
    if getattr(args, "layers", None):
        raise ValueError("--layers: got some without --html; a picture shows one layer, --layer")
    args.out = args.out or args.default_out
    check_picture(args.out)
    figure, figures = {"kv-memory": _kv_memory, "roofline": _roofline, "attention": _attention}[args.picture](args)
    save(figure, args.out)
    print(json.dumps({"picture": str(args.out), **figures}) if args.json else f"wrote {args.out}")


def _kv_memory(args: argparse.Namespace) -> tuple[Figure, dict]:
    contexts = [2**n for n in range(10, 21, 2)]
    models = args.models or list(MODELS)
    for name in models:
        if name not in MODELS:
            raise ValueError(f"--models: got {name!r}, want some of {', '.join(MODELS)}")
    points = {MODELS[name].label: [model_kv_bytes(MODELS[name], n) for n in contexts] for name in models}
    figure = new_figure()
    draw_kv_memory(figure.subplots(), contexts, points, title="KV cache of one sequence in bfloat16")
    return figure, {"contexts": contexts, "bytes": points}


def _roofline(args: argparse.Namespace) -> tuple[Figure, dict]:
    from .roofline import draw_roofline, read_bench

    bench = read_bench(args.results)
    figure = new_figure()
    with naming(
        args.results, "not what `attnpack bench --json` prints", "write one with `attnpack bench --json > FILE`"
    ):
        draw_roofline(figure.subplots(), bench)
        points = {f"{each['case']['name']}, {each['case']['dtype']}": each["share"] for each in bench["results"]}
    return figure, {"machine": bench["machine"], "share_of_limit": points}


def _attention(args: argparse.Namespace) -> tuple[Figure, dict]:
    from .attention import draw_heads, lm_attention

    tokenizer, model, ids = _read(args)
    layer = min(DEFAULT_LAYER, len(model.layers) - 1) if args.layer is None else args.layer
    probs = lm_attention(model, torch.tensor([ids]))[layer][0]
    columns = min(3, len(probs))
    rows = -(-len(probs) // columns)
    figure = new_figure(3.2 * columns, 3.2 * rows + 0.4)
    draw_heads(figure, probs, _words(tokenizer, ids), title=f"layer {layer}")
    return figure, {"layer": layer, "tokens": ids, "weights": probs.tolist()}


def _page(args: argparse.Namespace) -> dict:
    from .page import MOST_TOKENS, attention_page

    tokenizer, model, ids = _read(args)
    if len(ids) > MOST_TOKENS:
        raise ValueError(f"text: got {len(ids)} tokens, want at most {MOST_TOKENS}; give a shorter one")
    page = attention_page(
        model, ids, _words(tokenizer, ids), layers=args.layers, layer=args.layer, name=_model_name(args.model)
    )
    page.save(args.html)
    return {
        "layers": len(args.layers or model.layers),
        "layer": page.opened.layer,
        "tokens": ids,
        "findings": [each._asdict() for each in page.findings],
    }


def _model_name(path: Path | None) -> str:
    """The name of a model's folder or file, without the ending and the type of its weights."""
    if path is None:
        return "SmolLM2-135M-Instruct"
    name = path.resolve().name
    return re.sub(r"(\.[A-Z]+\d+\w*)?\.gguf$", "", name)


def _read(args: argparse.Namespace) -> tuple[Tokenizer, CausalLM, list[int]]:
    """The tokenizer, the model, and the ids of `args.text`. Raises ValueError for a layer that the model lacks."""
    from ... import checkpoints

    path = args.model or checkpoints.smollm2_path()
    tokenizer, model = checkpoints.load_tokenizer(path), checkpoints.load(path)
    ids = tokenizer.encode(args.text)
    if not ids:
        raise ValueError("text: got an empty one, want a sentence whose tokens attend each other")
    if args.layer is not None and not 0 <= args.layer < len(model.layers):
        raise ValueError(f"--layer: got {args.layer}, want 0 to {len(model.layers) - 1}, the model's layers")
    return tokenizer, model, ids


def _words(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
