"""Converts whole checkpoints to latent attention: reads, converts and writes layer by layer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import _C, cpp
from ...atomic_write import atomic_directory
from ...checkpoints.companions import latent_config_json, write_companions
from ...checkpoints.writer import Announced, ShardWriter, write_json
from ...errors import as_path, check_dtype
from ...file_errors import naming
from ...progress import progress
from .conversion import RECORD, check_outside, with_dtype
from .sources import DecoderOnly, open_decoder
from .streams import LONGEST, Streams, load_tokens

_WEIGHTS_ONLY = (
    "without a text the latents are made by the weights, which is worse where they are narrow; give a text and a "
    "checkpoint with its tokenizer"
)


@dataclass(frozen=True)
class LatentReport:
    """A checkpoint that was written with latent attention: its sizes, and the perplexity before and after."""

    source: str
    out: str
    layers: int
    heads: int
    kv_heads_before: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    kv_bytes_per_token_before: int  # in the written dtype
    kv_bytes_per_token: int
    tokens: int  # on which the perplexities are measured
    perplexity_before: float | None
    perplexity: float | None
    notes: list[str]  # parts that were left out, with the reasons
    seconds: float


def checkpoint_to_mla(
    source: str | bytes | os.PathLike,
    out: str | bytes | os.PathLike,
    kv_lora_rank: int,
    rope_dim: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    text: str | bytes | os.PathLike | None = None,
    tokens: int = 2048,
) -> LatentReport:
    """Writes a checkpoint with latent attention to the new directory `out`, as a DeepSeek-V3 with dense feed-forwards.
    transformers and `CausalLM.from_hf` open it as it is.

    Without rope_dim the rotated keys of all kv heads together are the one key that rotates, and from kv_lora_rank =
    2 * num_kv_heads * head_dim on the logits are those of the original but for rounding. A smaller rope_dim keeps the
    dims whose rotation matters most to the scores; the rest of the keys goes into the latent, without rotation. A
    smaller kv_lora_rank keeps the leading components of the values and of that rest. One number of each latent is a
    constant for the norm that DeepSeek-V3 has there. The cache then holds kv_lora_rank + rope_dim numbers per token and
    layer. Memory holds one layer (or the embedding) and the states of some tokens.

    Args:
        source: a Hugging Face directory or a GGUF file of Llama, SmolLM2, Mistral, Granite or Qwen2, or of another
            family that differs from Llama only in its sizes, its RoPE, biases of q, k, v and o, and factors.
        kv_lora_rank: width of the latents, at least 2.
        rope_dim: dims of the one key that rotates, an even number up to num_kv_heads times the dims that rotate in a
            head.
        dtype: of the result; default the stored one, fp32 from GGUF.
        text: the text on which the model's states say what counts, and on which the perplexity is measured; default
            Python's help topics. Without a tokenizer, and with tokens=0, the weights say it.
        tokens: how many tokens to measure on, and as many more to learn from.

    Raises:
        ValueError: the checkpoint is damaged; its model has settings that latent attention cannot hold (norms of
            queries and keys, soft caps, windows and others), and the message names them; or the sizes do not fit. `out`
            is not made then.
    """
    started, notes = time.monotonic(), []
    source, out = as_path("source", source), as_path("out", out)
    check_dtype(dtype)
    with naming(source, "cannot be converted", "get the checkpoint again, or give another"):
        checkpoint = open_decoder(source, dtype)
    check_outside(source, out)
    conversion = _open_conversion(checkpoint, kv_lora_rank, rope_dim)
    text = None if text is None else as_path("text", text)
    positions = checkpoint.config["max_positions"]
    measured, calibration = load_tokens(source, text, tokens, True, positions, notes)
    if calibration is None:
        notes.append(_WEIGHTS_ONLY)
    if conversion.learns:
        _learn(checkpoint, conversion, calibration)
    config = _plain_factors(conversion.config())
    streams = Streams(checkpoint.config, measured, calibration, config)
    with atomic_directory(out) as folder:
        writer = ShardWriter(folder, _announced(checkpoint, config))
        if note := write_companions(source, folder):
            notes.append(note)
        _convert(checkpoint, conversion, streams, writer.write_tensor)
        perplexities = streams.perplexities(checkpoint.read, lambda name: _with_factors(checkpoint, name))
        writer.close()
        write_json(folder / "config.json", with_dtype(latent_config_json(checkpoint.checkpoint, config), dtype))
        report = _make_report(checkpoint, out, config, streams.tokens, perplexities, notes, time.monotonic() - started)
        write_json(folder / RECORD, asdict(report) | {"source": str(source.absolute())})
    return report


def _open_conversion(source: DecoderOnly, kv_lora_rank: int, rope_dim: int | None) -> Any:
    """The conversion of this checkpoint. Raises ValueError for sizes that do not fit, and for settings that latent
    attention or the format cannot hold."""
    config = source.config
    with naming(source.path, "has no form of latent attention", "give another checkpoint"):
        _C.convert.LatentConversion(2, None, LONGEST, **config)  # the model is checked before the sizes
        _check_format(config)
    whole = config["num_kv_heads"] * ((config["scores"] or {}).get("rope_dim") or config["head_dim"])
    full = 2 * config["num_kv_heads"] * config["head_dim"]
    if type(kv_lora_rank) is not int or kv_lora_rank < 2:
        raise ValueError(
            f"--kv-lora-rank: got {kv_lora_rank!r}, want an int of at least 2; from {full} on nothing is lost"
        )
    if rope_dim is None:
        rope_dim = whole
    if type(rope_dim) is not int or not 2 <= rope_dim <= whole or rope_dim % 2:
        raise ValueError(
            f"--rope-dim: got {rope_dim!r}, want an even number from 2 to {whole}, the dims that rotate in the "
            f"{config['num_kv_heads']} key-value heads of {source.path} together"
        )
    try:
        return _C.convert.LatentConversion(kv_lora_rank, rope_dim, LONGEST, **config)
    except ValueError as error:
        raise ValueError(str(error).replace("kv_lora_rank: ", "--kv-lora-rank: ")) from None


def _check_format(config: dict[str, Any]) -> None:
    """Raises ValueError, naming them, for settings of the rest of the model that a DeepSeek-V3 with dense feed-forwards
    does not have."""
    lost = [
        name
        for name, given in {
            f"activation {config['activation']!r}": config["activation"] != "swiglu",
            "mlp_bias (biases in the feed-forwards)": config["mlp_bias"],
            "head_bias (a bias on the logits)": config["head_bias"],
            "final_softcap (a soft cap on the logits)": config["final_softcap"] != 0,
            "experts (a mixture of experts)": config["experts"] is not None,
        }.items()
        if given
    ]
    if lost:
        raise ValueError(f"the format of DeepSeek-V3 cannot hold its {', '.join(lost)}")


def _learn(source: DecoderOnly, conversion: Any, calibration: Tensor | None) -> None:
    """Shows all layers to the conversion, which deals the rotating dims out to the frequencies."""
    streams = Streams(source.config, None, calibration)
    layers = source.layers()
    if "model.embed_tokens.weight" in layers.pop("") and streams.learns:
        streams.embed_tokens(source.read("model.embed_tokens.weight"))
    for prefix, names in progress(layers.items(), f"reading {source.path.name}"):
        tensors = {name: source.read(name) for name in names}
        conversion.learn(_within(prefix, tensors), streams.attention_input(prefix, tensors))
        streams.pass_layer(prefix, tensors, None)


def _convert(
    source: DecoderOnly, conversion: Any, streams: Streams, write_tensor: Callable[[str, Tensor], None]
) -> None:
    layers = source.layers()
    for name in layers.pop(""):
        old = source.read(name)
        new = _C.convert.with_multipliers(name, old, **source.config)
        if name == "model.embed_tokens.weight":
            streams.embed_tokens(old, new)
        write_tensor(name, new)
    for prefix, names in progress(layers.items(), f"converting {source.path.name}"):
        old = {name: source.read(name) for name in names}
        made = conversion.convert(_within(prefix, old), streams.attention_input(prefix, old))
        new = {prefix + name: tensor for name, tensor in made.items()}
        new = {name: _C.convert.with_multipliers(name, tensor, **source.config) for name, tensor in new.items()}
        streams.pass_layer(prefix, old, new)
        for name, tensor in new.items():
            write_tensor(name, tensor)


def _within(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _with_factors(source: DecoderOnly, name: str) -> Tensor:
    return _C.convert.with_multipliers(name, source.read(name), **source.config)


def _plain_factors(config: dict[str, Any]) -> dict[str, Any]:
    """The model whose weights hold the factors on embeddings, residuals and logits."""
    return config | {"embed_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0, "layer_settings": None}


def _announced(source: DecoderOnly, config: dict[str, Any]) -> Announced:
    """The tensors of the result by file: those of an attention stand in the file of its o_proj."""
    places = {name: file for file, names in source.by_file().items() for name in names}
    files: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {file: {} for file in source.by_file()}
    for name, parameter in cpp.CausalLM(**config, device="meta").named_parameters():
        like = name
        if ".self_attn." in name:
            like = name[: name.index("self_attn.")] + "self_attn.o_proj.weight"
        files[places[like]][name] = (tuple(parameter.shape), source.dtype(like))
    return {file: tensors for file, tensors in files.items() if tensors}


def _make_report(
    source: DecoderOnly,
    out: Path,
    config: dict[str, Any],
    tokens: int,
    perplexities: tuple[float | None, float | None],
    notes: list[str],
    seconds: float,
) -> LatentReport:
    old, latent = source.config, config["latent"]
    layer_bytes = old["num_layers"] * source.dtype("model.layers.0.self_attn.k_proj.weight").itemsize
    return LatentReport(
        source=str(source.path),
        out=str(out),
        layers=old["num_layers"],
        heads=old["num_heads"],
        kv_heads_before=old["num_kv_heads"],
        kv_lora_rank=latent["kv_lora_rank"],
        qk_rope_head_dim=latent["qk_rope_head_dim"],
        kv_bytes_per_token_before=layer_bytes * 2 * old["num_kv_heads"] * old["head_dim"],
        kv_bytes_per_token=layer_bytes * (latent["kv_lora_rank"] + latent["qk_rope_head_dim"]),
        tokens=tokens,
        perplexity_before=perplexities[0],
        perplexity=perplexities[1],
        notes=notes,
        seconds=round(seconds, 2),
    )
