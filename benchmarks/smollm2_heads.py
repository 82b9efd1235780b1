"""The cells of uptraining.py for SmolLM2-135M with one kv head or with latent attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pydoc_data.topics import topics
from typing import Any

import attnpack
import torch
from attnpack import checkpoints, convert
from attnpack.convert.uptrain.distill import Distillation, perplexity
from small_models import time_decoding
from torch import Tensor, nn

LENGTH = 512
MEASURED = 4 * LENGTH  # the first tokens of the topics; training reads the tokens after them
RANKS = (64, 128, 192, 384)
LEARNING_RATE = 1e-3
CONTEXT = 1024  # tokens before the timed ones
THREADS = torch.get_num_threads()  # all threads of this process; uptraining.py uses one for its small models


@cache
def _text() -> Tensor:
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(checkpoints.load_tokenizer(checkpoints.smollm2_path()).encode(text))


@cache
def _original() -> attnpack.CausalLM:
    return attnpack.CausalLM.from_gguf(checkpoints.smollm2_path())


@cache
def _layer_inputs() -> list[Tensor]:
    """The input of each attention layer of the original on some text after the measured one, [1, L, E]."""
    seen: list[Tensor] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for layer in _original().layers
    ]
    with torch.no_grad():
        _original()(_text()[MEASURED : 3 * MEASURED // 2][None])
    for hook in hooks:
        hook.remove()
    return seen


def _replaced(make: Callable[[nn.Module, Tensor], nn.Module]) -> nn.Module:
    """The original with each attention layer replaced by make(layer, inputs of the layer)."""
    model = attnpack.CausalLM.from_gguf(checkpoints.smollm2_path())
    for layer, x in zip(model.layers, _layer_inputs(), strict=True):
        layer.self_attn = make(layer.self_attn, x)
    return model


def _one_head(method: str) -> nn.Module:
    extra = {"random": lambda x: {"seed": 0}, "aligned": lambda x: {"calibration": x}}.get(method, lambda x: {})
    return _replaced(lambda layer, x: convert.to_gqa(layer, 1, method, **extra(x)))


def _latent(rank: int) -> nn.Module:
    return _replaced(lambda layer, x: convert.to_mla(layer, rank, calibration=x))


def _figures(model: nn.Module, steps: int) -> dict[str, Any]:
    """The perplexity of the model, and that after `steps` of distillation (0: none)."""
    torch.set_num_threads(THREADS)
    held_out = _text()[:MEASURED].view(-1, LENGTH)
    figures = {"perplexity": perplexity(model, held_out), "uptrained": None, "minutes": 0}
    attention = model.layers[0].self_attn
    if isinstance(attention, attnpack.MultiHeadLatentAttention):
        numbers = attention.kv_lora_rank + attention.qk_rope_head_dim
    else:
        numbers = 2 * attention.num_kv_heads * attention.head_dim
    figures["kv_bytes_per_token"] = numbers * len(model.layers) * attention.o_proj.weight.element_size()
    if steps > 0:
        work = Distillation(model.train(), _original(), _text()[MEASURED:], LENGTH, steps, LEARNING_RATE, 0)
        seconds = 0.0
        while work.steps < steps:
            seconds += work.train_step()
            work.spent = work.steps  # the learning rate follows the steps, not the clock
        figures |= {"uptrained": perplexity(model.eval(), held_out), "steps": work.steps, "threads": THREADS}
        figures["minutes"] = round(seconds / 60, 1)
    return figures


def _decode(**attention: Any) -> dict[str, float]:
    """`time_decoding` of an untrained model with SmolLM2's sizes and other attention."""
    torch.set_num_threads(THREADS)
    names = {"vocab_size", "embed_dim", "num_layers", "num_heads", "hidden_dim", "rope_base", "tie_embeddings"}
    sizes = {name: value for name, value in _original()._live_config().items() if name in names}
    return time_decoding(attnpack.CausalLM(**sizes, **attention).eval(), CONTEXT)


def smollm2_cells(steps: int) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """(name, function that computes the figures) of each cell; the original is not trained."""
    cells = [("smollm2/original", lambda: _figures(_original(), 0))]
    for heads in (3, 1):
        cells.append((f"decode/SmolLM2, {heads} kv heads", lambda h=heads: _decode(num_kv_heads=h)))
    dims = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 64)
    for rank in RANKS:
        latent = {"kv_lora_rank": rank, **dims, "latent_norm": False}
        cells.append((f"decode/SmolLM2, latent, rank {rank}", lambda c=latent: _decode(latent=c)))
    for method in ("mean", "first", "random", "aligned"):
        cells.append((f"smollm2/1 kv head, {method}", lambda m=method: _figures(_one_head(m), steps)))
    for rank in RANKS:
        cells.append((f"smollm2/latent, rank {rank}", lambda r=rank: _figures(_latent(r), steps)))
    return cells
