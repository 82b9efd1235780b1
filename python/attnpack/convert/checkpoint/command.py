"""The command `attnpack convert`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from ...errors import DTYPES
from .conversion import ConversionReport, Request, convert_checkpoint
from .streams import LONGEST
from .to_gguf import write_gguf
from .to_mla import LatentReport, checkpoint_to_mla

# The options that say how heads are merged.
_OF_HEADS = ("method", "window", "groups", "seed", "encoder")


def main(args: argparse.Namespace) -> None:
    if args.to_gguf:
        _refuse(args, tuple(args.ungiven), "--to-gguf, which changes the format only")
        written = write_gguf(args.source, args.out, args.to_gguf)
        print(json.dumps(asdict(written)) if args.json else written)
        return
    if args.kv_lora_rank is not None:
        _refuse(args, _OF_HEADS, "--kv-lora-rank, which merges no heads")
        made = checkpoint_to_mla(
            args.source,
            args.out,
            args.kv_lora_rank,
            args.rope_dim,
            dtype=None if args.dtype is None else DTYPES[args.dtype],
            text=args.text,
            tokens=args.tokens,
        )
        print(json.dumps(asdict(made)) if args.json else "\n".join(describe_latent(made)))
        return
    if args.rope_dim is not None:
        raise ValueError("--rope-dim: got one without --kv-lora-rank; give both, or leave it out")
    if args.kv_heads is None:
        args.wrong_usage("give --kv-heads, --kv-lora-rank or --to-gguf: what OUT is, as --kv-heads 1")
    request = Request(
        kv_heads=args.kv_heads,
        method=args.method,
        window=args.window,
        groups=args.groups,
        seed=args.seed,
        dtype=None if args.dtype is None else DTYPES[args.dtype],
        text=args.text,
        tokens=args.tokens,
        encoder=args.encoder,
    )
    report = convert_checkpoint(args.source, args.out, request)
    print(json.dumps(asdict(report)) if args.json else "\n".join(describe_conversion(report)))


def _refuse(args: argparse.Namespace, names: tuple[str, ...], beside: str) -> None:
    if given := [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) != args.ungiven[name]]:
        raise ValueError(f"{', '.join(given)}: got together with {beside}; leave it out")


def describe_conversion(report: ConversionReport) -> list[str]:
    lines = [
        f"{report.out}: {report.layers} layers, {report.heads} query heads, {report.kv_heads_before} -> "
        f"{report.kv_heads} key-value heads by {report.method}, in {report.seconds:.1f} s",
        f"KV cache {report.kv_bytes_per_token_before} -> {report.kv_bytes_per_token} bytes per token",
        *(f"note: {note}" for note in report.notes),
        *(f"warning: {warning}" for warning in report.warnings),
    ]
    return lines + _perplexities(report, 1.0)


def describe_latent(report: LatentReport) -> list[str]:
    lines = [
        f"{report.out}: {report.layers} layers, {report.heads} query heads, {report.kv_heads_before} key-value heads "
        f"-> latents of {report.kv_lora_rank} and a rotating key of {report.qk_rope_head_dim}, in "
        f"{report.seconds:.1f} s",
        f"KV cache {report.kv_bytes_per_token_before} -> {report.kv_bytes_per_token} bytes per token",
        *(f"note: {note}" for note in report.notes),
    ]
    return lines + _perplexities(report, 1.001)  # an exact conversion differs by rounding


def _perplexities(report: ConversionReport | LatentReport, slack: float) -> list[str]:
    """The line about them, and the advice where the new one is above `slack` times the old one."""
    if report.perplexity is None or report.perplexity_before is None:
        return []
    figures = f"{report.perplexity_before:.2f} -> {report.perplexity:.2f}"
    lines = [f"perplexity on {report.tokens} tokens, at most {LONGEST} at a time: {figures}"]
    if report.perplexity > slack * report.perplexity_before:
        lines.append(
            f"That is worse than before: `attnpack uptrain {report.out} --text FILE --minutes N` trains it to do what "
            "the original does"
        )
    return lines
