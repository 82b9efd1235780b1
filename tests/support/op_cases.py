"""Cases of the operator, a pairwise covering of its arguments, and the rule that checks results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import attnpack
import torch
from attnpack import reference
from attnpack.tools.threads import threads
from torch import Tensor

INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Dimensions that are 0 at once (make_empty).
EMPTY = ["batch", "num_heads", "num_heads num_kv_heads", "q_len", "kv_len", "q_len kv_len", "head_dim", "v_head_dim"]
# (query heads, kv heads, head map)
HEADS = {
    "one": (1, 1, None),
    "mha": (3, 3, None),
    "gqa": (4, 2, None),
    "mqa": (5, 1, None),
    "uneven": (5, 3, [2, 0, 0, 1, 0]),
    "empty_group": (4, 3, [0, 2, 2, 0]),
}
# Decode (few rows, also over 512-key ranges), and prefill around tiles of 96 rows and blocks of 128 and 256 keys.
LENGTHS = [(1, 1), (1, 2), (2, 3), (3, 7), (7, 17), (17, 7), (33, 33), (63, 65), (65, 63), (127, 129), (129, 127)]
LENGTHS += [(1, 129), (1, 600), (2, 1100), (33, 260), (97, 257)]
AXES = {
    "dtype": DTYPES,
    "heads": list(HEADS),
    "lengths": LENGTHS,
    "dims": [(8, 8), (1, 1), (16, 5), (7, 33), (64, 64), (65, 17), (24, 130)],
    "mask": [None, "bool", "bool padding", "own", "own -inf", "float64 rows", "float32 heads", "bfloat16", "float16"],
    "positions": [
        {},
        {"causal": True},
        {"causal": True, "q_offset": 3},
        {"causal": True, "q_offset": -2},
        {"causal": True, "q_offset": "tensor"},
        {"causal": True, "q_offset": "end"},
        {"window": (3, 0)},
        {"window": (2, 40), "q_offset": 5},
        {"window": (-1, 1), "q_offset": "tensor"},
        {"window": (70, -1), "causal": True, "q_offset": "end"},
        {"window": (0, 0)},
        {"chunk": 5, "causal": True, "q_offset": "tensor"},
        {"chunk": 70, "q_offset": -3},
        {"chunk": 3, "window": (1, 0), "causal": True, "q_offset": "end"},
    ],
    "kv_lens": [None, torch.int64, torch.int32],
    "scores": [
        {},
        {"softcap": 2.0},
        {"sinks": True},
        {"alibi": True},
        {"scale": -0.3},
        {"softcap": 0.7, "sinks": True, "alibi": True},
    ],
    "layout": ["contiguous", "heads inside", "sliced", "expanded batch", "expanded heads", "offset", "columns outside"],
}
# The keys that rows name (key_index).
NAMES = ["keys", "keys of heads", "keys in order", "blocks of 3", "blocks of 64, of heads"]
GRID = AXES | {"names": [None, None, *NAMES]}


def covering(axes: dict[str, list]) -> Iterator[dict]:
    """Rows that contain every two values of different axes at least once: greedy, and the same in every run."""
    sizes = [len(values) for values in axes.values()]
    pairs = itertools.combinations(range(len(sizes)), 2)
    missing = {(a, i, b, j) for a, b in pairs for i in range(sizes[a]) for j in range(sizes[b])}
    while missing:
        a, i, b, j = min(missing)
        row = {a: i, b: j}
        for axis in set(range(len(sizes))) - {a, b}:

            def gain(value, axis=axis, row=row, missing=missing):
                return sum(sum(sorted([(axis, value), other]), ()) in missing for other in row.items())

            turn = len(missing) % sizes[axis]  # among equal values, a different one each time
            row[axis] = max(range(sizes[axis]), key=lambda value: (gain(value), (value + turn) % sizes[axis]))
        missing -= {(a, row[a], b, row[b]) for a, b in itertools.combinations(range(len(sizes)), 2)}
        yield {name: values[row[n]] for n, (name, values) in enumerate(axes.items())}


@dataclass
class Inputs:
    query: Tensor  # [B, Hq, Lq, D]
    key: Tensor  # [B, Hkv, Lkv, D]
    value: Tensor  # [B, Hkv, Lkv, Dv]
    mask: Tensor | None = None
    settings: dict = field(default_factory=dict)
    grad_out: Tensor | None = None  # [B, Hq, Lq, Dv]
    grad_lse: Tensor | None = None  # [B, Hq, Lq]

    def to(self, dtype: torch.dtype) -> Inputs:
        """All floats in another dtype. With float64 these are the inputs of the truth, with exactly these values."""

        def cast(x):
            return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

        settings = {name: cast(x) for name, x in self.settings.items()}
        tensors = (self.query, self.key, self.value, self.mask)
        return Inputs(*map(cast, tensors), settings, cast(self.grad_out), cast(self.grad_lse))


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers that depend only on shape and seed."""
    generator = torch.Generator().manual_seed(seed + 1000 * sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """x with other strides, and NaN between its elements; expanded and repeated ones hold only the numbers of index 0.

    "contiguous", "reversed", "stepped" and "repeated" are for any shape, the others for [B, H, L, D].
    """
    if layout == "heads inside":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        batch, heads, length, width = x.shape
        room = x.new_full((batch, heads, 2 * length, width + 3), NAN)
        return room[:, :, ::2, 2 : width + 2].copy_(x)
    if layout == "expanded batch":
        return x[:1].expand(x.shape)
    if layout == "expanded heads":
        return x[:, :1].expand(x.shape)
    if layout == "offset":
        return torch.cat([x.new_full((5,), NAN), x.flatten()])[5:].view(x.shape)
    if layout == "columns outside":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "reversed":
        backwards = list(reversed(range(x.dim())))
        return x.permute(backwards).contiguous().permute(backwards)
    if layout == "stepped":
        room = x.new_full([2 * n + 1 for n in x.shape], NAN if x.is_floating_point() else 1)
        return room[tuple(slice(1, None, 2) for _ in x.shape)].copy_(x)
    if layout == "repeated":
        return x[tuple(slice(0, 1) for _ in x.shape)].expand(x.shape) if x.numel() else x
    assert layout == "contiguous", layout
    return x


def make_mask(kind: str | None, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor | None:
    """One of AXES["mask"]; shape [B, Hq, Lq, Lkv], to which the result broadcasts."""
    batch, heads, q_len, kv_len = shape
    if kind is None:
        return None
    if kind == "bool":
        return draw(*shape, seed=7) > -0.5
    if kind == "bool padding":
        return draw(batch, 1, 1, kv_len, seed=7) > -0.8
    if kind == "own":
        return draw(*shape, dtype=dtype, seed=7)
    if kind == "own -inf":
        mask = draw(1, heads, q_len, kv_len, dtype=dtype, seed=7)
        return mask.masked_fill(mask > 0.5, -INF)
    if kind == "float64 rows":
        return draw(q_len, 1, dtype=torch.float64, seed=7)
    if kind == "float32 heads":
        return draw(heads, 1, kv_len, dtype=torch.float32, seed=7)
    return draw(q_len, kv_len, dtype=getattr(torch, kind), seed=7).t().contiguous().t()


def make_names(kind: str, batch: int, num_kv_heads: int, q_len: int, kv_len: int) -> dict:
    """key_index and key_block of one of NAMES: about half of the keys, some of them twice, and -1 between them."""
    key_block = int(kind.split()[2].strip(",")) if "blocks" in kind else 1
    heads, blocks = num_kv_heads if "heads" in kind else 1, -(-kv_len // key_block)
    score = draw(batch, heads, q_len, blocks, seed=9)
    score[:, :, 1::7] = -1  # rows that name no key
    order = score.argsort(-1) if kind != "keys in order" else torch.arange(blocks).expand_as(score)
    index = order.masked_fill(score.gather(-1, order) < 0, -1)
    index = torch.cat([index, order[..., : blocks // 5].masked_fill(score.max(-1, keepdim=True).values < 0, -1)], -1)
    return {"key_index": index.to([torch.int64, torch.int32][q_len % 2]), "key_block": key_block}


def at_names(probs: Tensor, inputs: Inputs) -> Tensor:
    """The numbers of `probs` [B, Hq, Lq, Lkv] at the keys that each row names, of equal names at the first."""
    index, block = inputs.settings["key_index"], inputs.settings["key_block"]
    batch, heads, q_len, kv_len = probs.shape
    group = heads // inputs.key.size(1)
    out = probs.new_zeros(batch, heads, q_len, index.size(3) * block)
    for b, h, i in itertools.product(range(batch), range(heads), range(q_len)):
        kv_head = inputs.settings["head_map"][h] if inputs.settings.get("head_map") else h // group
        names = index[b, kv_head if index.size(1) > 1 else 0, i].tolist()
        for place, name in enumerate(names):
            if name >= 0 and name not in names[:place]:
                part = probs[b, h, i, name * block : (name + 1) * block]
                out[b, h, i, place * block :][: len(part)] = part
    return out


def make_inputs(
    dtype: torch.dtype = torch.float32,
    heads: str = "gqa",
    lengths: tuple[int, int] = (5, 7),
    dims: tuple[int, int] = (8, 6),
    mask: str | None = None,
    positions: dict | None = None,
    kv_lens: torch.dtype | None = None,
    scores: dict | None = None,
    layout: str = "contiguous",
    names: str | None = None,
    batch: int = 2,
) -> Inputs:
    (num_heads, num_kv_heads, head_map), (q_len, kv_len), (dim, v_dim) = HEADS[heads], lengths, dims
    settings = dict(positions or {})
    if settings.get("q_offset") == "tensor":
        settings["q_offset"] = torch.tensor([kv_len // 2, -1, 4], dtype=kv_lens or torch.int64).repeat(batch)[:batch]
    if kv_lens:
        settings["kv_lens"] = torch.tensor([kv_len, kv_len // 2, 0], dtype=kv_lens).repeat(batch)[:batch]
    for name, setting in (scores or {}).items():
        if name == "sinks":
            settings["sinks"] = draw(num_heads, dtype=dtype, seed=8)
        elif name == "alibi":
            settings["alibi_slopes"] = 2.0 ** -torch.arange(1, num_heads + 1, dtype=torch.float32)
        else:
            settings[name] = setting
    if head_map:
        settings["head_map"] = head_map
    if names:
        settings |= make_names(names, batch, num_kv_heads, q_len, kv_len)
    query = draw(batch, num_heads, q_len, dim, dtype=dtype, seed=1)
    key, value = (draw(batch, num_kv_heads, kv_len, d, dtype=dtype, seed=2 + n) for n, d in enumerate((dim, v_dim)))
    shape = (batch, num_heads, q_len, kv_len)
    grad_out = laid_out(draw(*shape[:3], v_dim, dtype=dtype, seed=4), layout)
    grad_lse = draw(*shape[:3], dtype=torch.promote_types(dtype, torch.float32), seed=5)
    query, key, value = (laid_out(x, layout) for x in (query, key, value))
    return Inputs(query, key, value, make_mask(mask, shape, dtype), settings, grad_out, grad_lse)


def compute_results(attend: Callable, inputs: Inputs, *, gradients: bool = True) -> dict[str, Tensor]:
    """out and lse of attnpack.attention or reference.attention, and the gradients of all inputs that have one."""

    def leaf(x):
        wanted = gradients and isinstance(x, Tensor) and x.is_floating_point()
        return x.detach().requires_grad_() if wanted else x

    tensors = {name: leaf(getattr(inputs, name)) for name in ("query", "key", "value", "mask")}
    settings = dict(inputs.settings)
    if "sinks" in settings:
        tensors["sinks"] = settings["sinks"] = leaf(settings["sinks"])
    sources = {name: x for name, x in tensors.items() if isinstance(x, Tensor) and x.requires_grad}
    out, lse = attend(*(tensors[name] for name in ("query", "key", "value", "mask")), return_lse=True, **settings)
    results = {"out": out.detach(), "lse": lse.detach()}
    if gradients:
        grads = torch.autograd.grad((out, lse), list(sources.values()), (inputs.grad_out, inputs.grad_lse))
        results |= {f"grad of {name}": grad for name, grad in zip(sources, grads, strict=True)}
    return results


def floor(truth: Tensor, dtype: torch.dtype, accumulation: torch.dtype) -> float:
    """The error that rounding alone may cause: twice FlashAttention 3's max |(x + 0.3 - 0.3) - x| for the worst x of
    this size, and some steps of the accumulation dtype."""
    largest = truth.abs().max().item()
    ulp = torch.finfo(dtype).eps * 2 ** math.floor(math.log2(largest + 0.3))
    return ulp + 64 * torch.finfo(accumulation).eps * max(1.0, largest)


def check(ours: dict[str, Tensor], plain: dict[str, Tensor], truth: dict[str, Tensor], dtype: torch.dtype):
    """Each error against the fp64 truth is at most twice that of plain PyTorch in the same dtype, plus the floor."""
    accumulation = torch.promote_types(dtype, torch.float32)
    for name, exact in truth.items():
        got, simple = ours[name], plain[name]
        assert got.shape == exact.shape and got.dtype == simple.dtype, (name, got.shape, got.dtype)
        empty = exact == -INF
        assert torch.equal(got == -INF, empty), f"{name}: -inf at other places than the truth"
        if empty.all():
            continue
        got, simple, exact = (x.double().masked_fill(empty, 0) for x in (got, simple, exact))
        error, allowed = (got - exact).abs().max().item(), 2 * (simple - exact).abs().max().item()
        # lse is computed from the inputs, everything else from a result stored in their dtype.
        allowed += floor(exact, accumulation if name == "lse" else dtype, accumulation)
        assert error <= allowed and math.isfinite(error), f"{name}: error {error:.2e}, allowed {allowed:.2e}"


def check_against_reference(
    inputs: Inputs, *, gradients: bool = True, attend: Callable = attnpack.attention
) -> dict[str, Tensor]:
    """Checks the operator on the inputs, and returns its results."""
    ours = compute_results(attend, inputs, gradients=gradients)
    with threads(1):  # one thread: on a busy machine plain PyTorch is several times as fast so on small tensors
        plain = compute_results(reference.attention, inputs, gradients=gradients)
        truth = compute_results(reference.attention, inputs.to(torch.float64), gradients=gradients)
    check(ours, plain, truth, inputs.query.dtype)
    return ours


def describe(case: dict) -> str:
    """A test's name."""

    def word(x):
        if isinstance(x, dict):
            return "+".join(f"{k}={v}" for k, v in x.items()) or "plain"
        return str(x).removeprefix("torch.").replace(", ", "x").strip("()")

    return "-".join(word(x).replace(" ", "_") for x in case.values())


COVERING = list(covering(AXES))


def make_empty(empty: str, *, q_len: int, dtype: torch.dtype = torch.float32, dim: int = 8) -> list[torch.Tensor]:
    """Query, key and value of which these dimensions are 0."""
    full = {"batch": 2, "num_heads": 4, "num_kv_heads": 2, "q_len": q_len, "kv_len": 5, "head_dim": dim}
    size = full | {"v_head_dim": 6 if dim == 8 else dim} | dict.fromkeys(empty.split(), 0)
    names = [
        ("num_heads", "q_len", "head_dim"),
        ("num_kv_heads", "kv_len", "head_dim"),
        ("num_kv_heads", "kv_len", "v_head_dim"),
    ]
    return [draw(size["batch"], *(size[name] for name in dims), dtype=dtype) for dims in names]
