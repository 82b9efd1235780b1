"""Wrong values for an argument, by its type in the op's schema."""

from __future__ import annotations

from random import Random

import torch

INTS = [0, 1, -1, 2, 7, -7, 2**31, -(2**31), 2**53, 2**62, 2**63 - 1, -(2**63), 2**63, -(2**64)]
FLOATS = [0.0, -0.0, 0.5, -1.0, 1e-300, 1e300, 1e39, 1e-40, 5e-324, float("inf"), -float("inf"), float("nan")]
STRINGS = ["", "probs", "scaled", "auto", "absorbed", "end", "\0", "é" * 1000]
DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint64, torch.complex64, torch.complex128,
]  # fmt: skip


def fill(pick: Random, x: torch.Tensor) -> torch.Tensor:
    """Some elements are extremes of the dtype."""
    if x.is_floating_point():
        extremes = FLOATS
    elif x.dtype == torch.bool or x.is_complex():
        extremes = [0, 1]
    else:
        info = torch.iinfo(x.dtype)
        extremes = [n for n in INTS + [info.min, info.max] if info.min <= n <= info.max]
    some = torch.tensor([pick.random() < 0.5 for _ in range(x.numel())], dtype=torch.bool).view(x.shape)
    return torch.where(some, torch.tensor(pick.choice(extremes)).to(x.dtype), x)


def resize(pick: Random, x: torch.Tensor) -> torch.Tensor:
    """One dimension more or less, or another size."""
    if x.dim() == 0:
        return x.expand(pick.choice([0, 1, 3]))
    dim = pick.randrange(x.dim())
    ways = [
        lambda: x.unsqueeze(dim),
        lambda: x.flatten(0, dim),
        lambda: x.select(dim, 0) if x.size(dim) else x,
        lambda: x.narrow(dim, 0, 0),
        lambda: x.narrow(dim, 0, x.size(dim) // 2),
        lambda: torch.cat([x, x.narrow(dim, 0, min(1, x.size(dim)))], dim),
        lambda: x.narrow(dim, 0, 1).expand(x.shape) if x.size(dim) else x,
        lambda: x.flatten()[0] if x.numel() else x,
    ]
    return pick.choice(ways)()


def lay_out(pick: Random, x: torch.Tensor) -> torch.Tensor:
    """The same numbers, or the same memory, by other strides."""
    ways = [
        lambda: x.movedim(0, -1).contiguous().movedim(-1, 0) if x.dim() else x,
        lambda: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
        lambda: torch.stack([x, x], -1)[..., 0],
        lambda: x.contiguous().as_strided(x.shape, (1,) * x.dim()) if x.numel() else x,
        lambda: x.contiguous().as_strided(x.shape, (0,) * x.dim()) if x.numel() else x,
        lambda: x.transpose(0, -1) if x.dim() > 1 else x,
    ]
    return pick.choice(ways)()


def disguise(pick: Random, x: torch.Tensor) -> torch.Tensor:
    """A tensor that is no plain tensor of numbers on the CPU."""
    ways = [
        lambda: x.to("meta"),
        lambda: x.to_sparse(),
        lambda: x.to_sparse_csr(),
        lambda: torch.nested.nested_tensor([x, x]),
        lambda: torch.nested.nested_tensor([x, x], layout=torch.jagged),
        lambda: x.float().to_mkldnn(),
        lambda: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
        lambda: torch._efficientzerotensor(x.shape, dtype=x.dtype),
        lambda: torch._neg_view(x),
        lambda: torch.view_as_complex(torch.stack([x.float(), x.float()], -1)).conj(),
        lambda: torch.view_as_complex(torch.stack([x.float(), x.float()], -1)).conj().imag,
        lambda: x.detach().clone().requires_grad_(),
        lambda: torch.nn.Parameter(x.detach().clone(), requires_grad=x.is_floating_point()),
        lambda: x.to(pick.choice(DTYPES)),
    ]
    return pick.choice(ways)()


def tensor(pick: Random, was: torch.Tensor | None, others: list[torch.Tensor]) -> object:
    if pick.random() < 0.05:
        return pick.choice([None, 1, [1.0], "x", torch.empty(0), torch.tensor(1.0), torch.tensor(True)])
    if not torch.is_tensor(was) or pick.random() < 0.1:
        was = pick.choice(others) if others else torch.zeros(2)
        return was if pick.random() < 0.5 else tensor(pick, was, others)
    return pick.choice([fill, resize, lay_out, disguise])(pick, was)


def value(pick: Random, kind: str, was: object, others: list[torch.Tensor]) -> object:
    """A wrong value for an argument of that type; `others`: the tensors of the call."""
    if kind.startswith("Optional[") and pick.random() < 0.2:
        return None
    kind = kind.removeprefix("Optional[").removesuffix("]")
    if kind == "Tensor":
        return tensor(pick, was, others)
    if kind == "List[Tensor":
        if was and pick.random() < 0.5:
            spoiled = pick.randrange(len(was))
            return [tensor(pick, x, others + was) if n == spoiled else x for n, x in enumerate(was)]
        return [tensor(pick, pick.choice(was) if was else None, others) for _ in range(pick.randint(0, 3))]
    if kind.startswith("List["):
        return [value(pick, kind.removeprefix("List["), None, others) for _ in range(pick.randint(0, 6))]
    choices = {"bool": [True, False], "float": FLOATS, "str": STRINGS}
    return pick.choice(choices.get(kind, INTS))
