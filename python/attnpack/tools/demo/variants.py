"""One table of the variants: size, cache, error and time of a decode step, all measured in this run."""

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import (
    CrossCache,
    DynamicCache,
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
    SelfAttention,
    reference,
)
from ...progress import progress
from . import latent as demo_latent


@dataclass(frozen=True)
class Variant:
    name: str
    build: Callable[[int, int], nn.Module]  # (embed_dim, num_heads)
    cross: bool = False


VARIANTS = (
    Variant("multi-head (MHA)", lambda e, h: MultiHeadAttention(e, h, causal=True)),
    Variant("grouped, 4 kv heads (GQA-4)", lambda e, h: GroupedQueryAttention(e, h, 4, causal=True)),
    Variant("multi-query (MQA)", lambda e, h: MultiQueryAttention(e, h, causal=True)),
    Variant("one-head self-attention", lambda e, h: SelfAttention(e, e // h, causal=True)),
    Variant("latent (MLA)", demo_latent.build),
    Variant("cross-attention (MHA)", lambda e, h: MultiHeadAttention(e, h), cross=True),
)


@dataclass(frozen=True)
class Row:
    variant: str
    parameters: int
    kv_bytes_per_token: int
    error: float  # the largest of a forward against fp64
    torch_error: float  # the largest of plain PyTorch in the module's dtype against fp64
    step_ms: float  # the median
    sdpa_step_ms: float
    least_ms: float
    sdpa_least_ms: float

    @property
    def speed(self) -> float:
        """How many times as fast as the same step with SDPA."""
        return self.sdpa_step_ms / self.step_ms


@torch.inference_mode()
def compare_variants(
    embed_dim: int = 512, num_heads: int = 8, context: int = 2048, *, length: int = 128, steps: int = 40, seed: int = 0
) -> list[Row]:
    """Measures every variant in fp32: the error over `length` tokens, and the median and least time of `steps` decode
    steps after `context` tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shapes = (embed_dim, num_heads, context, length, steps)
        return [_measure_variant(variant, *shapes) for variant in progress(VARIANTS, "variants")]


def format_table(rows: list[Row]) -> str:
    head = f"{'variant':<29}{'parameters':>11}{'KV B/token':>12}{'error':>10}{'torch error':>13}"
    lines = [f"{head}{'ms/step':>10}{'(least)':>9}{'SDPA ms':>10}{'(least)':>9}{'speed':>8}"]
    for row in rows:
        sizes = f"{row.variant:<29}{row.parameters:>11,}{row.kv_bytes_per_token:>12,}"
        errors = f"{row.error:>10.1e}{row.torch_error:>13.1e}"
        times = f"{row.step_ms:>10.3f}{row.least_ms:>9.3f}{row.sdpa_step_ms:>10.3f}{row.sdpa_least_ms:>9.3f}"
        lines.append(f"{sizes}{errors}{times}{row.speed:>7.2f}x")
    return "\n".join(lines)


def rows_as_dicts(rows: list[Row]) -> list[dict]:
    return [asdict(row) | {"speed": row.speed} for row in rows]


def _measure_variant(variant: Variant, embed_dim: int, num_heads: int, context: int, length: int, steps: int) -> Row:
    module = variant.build(embed_dim, num_heads).eval()
    x = torch.randn(1, length, embed_dim)
    other = torch.randn(1, length, embed_dim) if variant.cross else None
    out = module(x) if other is None else module(x, other)
    truth = _plain_forward(copy.deepcopy(module).double(), x.double(), None if other is None else other.double())
    plain = _plain_forward(module, x, other)
    latent = isinstance(module, MultiHeadLatentAttention)
    make = _cross_steps if variant.cross else demo_latent.cached_steps if latent else _cached_steps
    ours, theirs, kv_bytes = make(module, torch.randn(1, context, embed_dim), steps)
    spent, sdpa_spent = _time_in_turn(ours, theirs, torch.randn(steps, 1, 1, embed_dim))
    return Row(
        variant=variant.name,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        kv_bytes_per_token=kv_bytes,
        error=(out - truth).abs().max().item(),
        torch_error=(plain - truth).abs().max().item(),
        step_ms=statistics.median(spent),
        sdpa_step_ms=statistics.median(sdpa_spent),
        least_ms=min(spent),
        sdpa_least_ms=min(sdpa_spent),
    )


def _split_heads(x: Tensor, head_dim: int) -> Tensor:
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)  # [B, H, L, head_dim]


def _join_heads(module: nn.Module, out: Tensor) -> Tensor:
    joined = out.transpose(1, 2).flatten(2)
    return module.o_proj(joined) if hasattr(module, "o_proj") else joined


def _plain_forward(module: nn.Module, x: Tensor, context: Tensor | None) -> Tensor:
    """The module's projections and the plain PyTorch reference, in the dtype of module and x."""
    if isinstance(module, MultiHeadLatentAttention):
        return demo_latent.plain_forward(module, x)
    source = x if context is None else context
    projected = module.q_proj(x), module.k_proj(source), module.v_proj(source)
    q, k, v = (_split_heads(each, module.head_dim) for each in projected)
    return _join_heads(module, reference.attention(q, k, v, causal=context is None))


def _cached_steps(module: nn.Module, prompt: Tensor, steps: int) -> tuple[Callable, Callable, int]:
    """(a decode step with attnpack, the same step with SDPA, bytes per token of the cache).

    The step with SDPA writes its cache tensors in place.
    """
    cache = DynamicCache()
    module(prompt, cache=cache)
    used, room = len(cache), len(cache) + steps
    keys, values = (F.pad(stored, (0, 0, 0, room - used)).contiguous() for stored in (cache.k, cache.v))
    kv_bytes = cache.nbytes // used

    def sdpa_step(token: Tensor) -> Tensor:
        nonlocal used
        q, k, v = (
            _split_heads(layer(token), module.head_dim) for layer in (module.q_proj, module.k_proj, module.v_proj)
        )
        keys[:, :, used], values[:, :, used] = k[:, :, 0], v[:, :, 0]
        used += 1
        return _join_heads(
            module, F.scaled_dot_product_attention(q, keys[:, :, :used], values[:, :, :used], enable_gqa=True)
        )

    return lambda token: module(token, cache=cache), sdpa_step, kv_bytes


def _cross_steps(module: nn.Module, context: Tensor, steps: int) -> tuple[Callable, Callable, int]:
    """The same for cross-attention: both steps read the context's keys and values, which were projected once."""
    cache = CrossCache()
    module(context[:, :1], context, cache=cache)
    projected = module.k_proj(context), module.v_proj(context)
    keys, values = (_split_heads(each, module.head_dim).contiguous() for each in projected)

    def sdpa_step(token: Tensor) -> Tensor:
        query = _split_heads(module.q_proj(token), module.head_dim)
        return _join_heads(module, F.scaled_dot_product_attention(query, keys, values))

    return lambda token: module(token, cache=cache), sdpa_step, cache.nbytes // len(cache)


def _time_in_turn(ours: Callable, theirs: Callable, tokens: Tensor) -> tuple[list[float], list[float]]:
    """Milliseconds of the steps of both. They take turns, and turns to be first, so that a busy machine slows both.
    Raises if their outputs differ."""
    spent: tuple[list[float], list[float]] = ([], [])
    for i, token in enumerate(tokens):
        outs = {}
        for step, times in list(zip((ours, theirs), spent, strict=True))[:: -1 if i % 2 else 1]:
            start = time.perf_counter()
            outs[step] = step(token)
            times.append(1e3 * (time.perf_counter() - start))
        torch.testing.assert_close(outs[ours], outs[theirs], atol=1e-4, rtol=1e-3)
    return spent
