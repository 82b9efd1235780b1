"""The functions of transformers' recurrent layers, by the door through which it takes those of flash-linear-attention,
causal-conv1d and mamba-ssm.

A decorator of transformers looks these functions up in their packages when the file of a model is imported, and takes
torch code if a package is absent. It keeps its choice in the cells of a closure: `replace_functions` puts ours there,
for models that are imported already, and for those that come later. Calls that ours do not take go where they went
before: other devices than the CPU, and keywords that ours do not know.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor

from ..ops import causal_conv1d, linear_attention, rms_norm

_DECORATOR = "use_kernel_func_from_hub_with_fallback"
_UNIT_EPS = 1e-6


def _of_length_one(x: Tensor) -> Tensor:  # x / sqrt(sum(x^2) + eps)
    dim = x.size(-1)
    return rms_norm(x, x.new_full((dim,), dim**-0.5), _UNIT_EPS / dim)


def _delta_rule(
    query: Tensor,  # [B, L, Hk, D]
    key: Tensor,  # [B, L, Hk, D]
    value: Tensor,  # [B, L, Hv, Dv]
    g: Tensor,  # [B, L, Hv], or [B, L, Hv, D]
    beta: Tensor,  # [B, L, Hv]
    scale: float | None = None,
    initial_state: Tensor | None = None,  # [B, Hv, D, Dv]
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,  # of the others
) -> tuple[Tensor, Tensor | None]:
    """The delta rule with a decay per head or per channel, as flash-linear-attention's functions compute it."""
    if use_qk_l2norm_in_kernel:
        query, key = _of_length_one(query), _of_length_one(key)
    value = value.to(query.dtype)
    out, state = linear_attention(
        *(x.transpose(1, 2) for x in (query, key, value)), log_decay=g.transpose(1, 2), beta=beta.transpose(1, 2),
        scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, return_state=True,
    )  # fmt: skip
    return out.transpose(1, 2), state if output_final_state else None


def _ends_of(seq_idx: Tensor) -> Tensor:  # [1, L], the number of each token's sequence -> [N + 1]
    starts = torch.nonzero(seq_idx[0].diff()).flatten() + 1
    return torch.cat([starts.new_zeros(1), starts, starts.new_full((1,), seq_idx.size(1))])


def _chunk_scan(
    hidden_states: Tensor,  # [B, L, H, P]
    dt: Tensor,  # [B, L, H]
    A: Tensor,  # [H], below 0
    B: Tensor,  # [B, L, G, N]
    C: Tensor,  # [B, L, G, N]
    chunk_size: int | None = None,  # of the others
    D: Tensor | None = None,  # [H]
    dt_bias: Tensor | None = None,  # [H]
    initial_states: Tensor | None = None,  # [B, H, P, N]
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    seq_idx: Tensor | None = None,  # [1, L]
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-2's recurrence, as mamba-ssm's function computes it."""
    x, dt = hidden_states.float(), dt.float()
    if dt_bias is not None:
        dt = dt + dt_bias.float()
    if dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    dt = dt.clamp(*dt_limit)
    out, state = linear_attention(
        C.float().transpose(1, 2), B.float().transpose(1, 2), (x * dt[..., None]).transpose(1, 2),
        log_decay=(A.float() * dt).transpose(1, 2), scale=1.0,
        initial_state=None if initial_states is None else initial_states.transpose(2, 3),
        cu_seqlens=None if seq_idx is None else _ends_of(seq_idx), return_state=True,
    )  # fmt: skip
    out = out.transpose(1, 2)
    if D is not None:
        out = out + D.float()[:, None] * x
    return (out, state.transpose(2, 3).contiguous()) if return_final_states else out


def _activation(name: str | None) -> str | None:
    return "silu" if name in ("silu", "swish") else name


def _conv_fn(
    hidden_states: Tensor,  # [B, C, L]
    weight: Tensor,  # [C, K]
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,  # [1, L]: the number of each token's sequence
) -> Tensor:
    """causal-conv1d's function for whole sequences."""
    ends = None if seq_idx is None else _ends_of(seq_idx)
    x = hidden_states.transpose(1, 2)
    return causal_conv1d(x, weight, bias, activation=_activation(activation), cu_seqlens=ends).transpose(1, 2)


def _conv_update(
    hidden_states: Tensor,  # [B, C, L] or [B, C]
    conv_state: Tensor,  # [B, C, at least K - 1], changed in place
    weight: Tensor,  # [C, K]
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """causal-conv1d's function for a step."""
    x = hidden_states.unsqueeze(-1) if hidden_states.dim() == 2 else hidden_states
    past, length = weight.size(1) - 1, conv_state.size(-1)
    out, last = causal_conv1d(
        x.transpose(1, 2), weight, bias, activation=_activation(activation),
        initial_state=conv_state[..., length - past :], return_state=True,
    )  # fmt: skip
    with torch.no_grad():
        conv_state.copy_(last if length == past else torch.cat([conv_state, x.to(conv_state.dtype)], -1)[..., -length:])
    return out.transpose(1, 2).reshape(hidden_states.shape)


OURS: dict[str, Callable[..., Any]] = {
    "chunk_gated_delta_rule": _delta_rule,
    "fused_recurrent_gated_delta_rule": _delta_rule,
    "chunk_kda": _delta_rule,
    "fused_recurrent_kda": _delta_rule,
    "mamba_chunk_scan_combined": _chunk_scan,
    "causal_conv1d_fn": _conv_fn,
    "causal_conv1d_update": _conv_update,
}
# Keywords that change what the packages' functions compute, and that ours do not have.
_OTHERS = ("use_gate_in_kernel", "A_log", "dt_bias", "lower_bound", "safe_gate", "head_first", "initial_states",
           "return_final_states", "conv_state_indices", "cache_seqlens", "z", "return_varlen_states")  # fmt: skip


def _parameters(function: Any) -> tuple[str, ...]:
    return function.__code__.co_varnames[: function.__code__.co_argcount]


# Those of _OTHERS that each of ours does not have.
_FOREIGN = {name: [other for other in _OTHERS if other not in _parameters(ours)] for name, ours in OURS.items()}


def _takes(name: str, x: Any, named: dict[str, Any]) -> bool:
    """Whether ours computes a call whose first tensor is x."""
    if not isinstance(x, Tensor) or not x.is_cpu or not x.is_floating_point():
        return False
    if any(named.get(other) is not None and named[other] is not False for other in _FOREIGN[name]):
        return False
    packed = named.get("seq_idx") is not None or named.get("cu_seqlens") is not None
    return _activation(named.get("activation")) in (None, "silu") and (not packed or x.size(0) == 1)


class _Everything:
    """A container that holds all names: the decorator drops keywords that a function's list of parameters lacks."""

    def __contains__(self, name: object) -> bool:
        return True


def _with_fallback(name: str, theirs: Callable[..., Any], known: Any) -> Callable[..., Any]:
    """Ours, or `theirs` with the keywords that are `known` to it, where ours does not take the call."""
    ours = OURS[name]
    own = _parameters(ours)

    @functools.wraps(theirs)
    def dispatch(*args: Any, **named: Any) -> Any:
        if _takes(name, args[0] if args else next(iter(named.values())), named):
            return ours(*args, **{key: value for key, value in named.items() if key in own})
        return theirs(*args, **{key: value for key, value in named.items() if key in known})

    dispatch.is_attnpacks = True  # type: ignore[attr-defined]
    return dispatch


_replaced: list[tuple[CellType, Any]] = []
_decorator: Callable[..., Any] | None = None


def _cells(function: Any) -> dict[str, CellType]:
    """The cells of the decorator's closure by their names, in a function or in one that it wraps; else nothing."""
    while isinstance(function, FunctionType):
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if {"implementation", "applicable_params", "is_new_implementation"} <= cells.keys():
            return cells
        function = getattr(function, "__wrapped__", None)
    return {}


def _put(name: str, function: Any) -> None:
    """Puts ours into the closure of a function that the decorator made for that name."""
    cells = _cells(function)
    if not cells or getattr(cells["implementation"].cell_contents, "is_attnpacks", False):
        return
    theirs, known = (cells[part].cell_contents for part in ("implementation", "applicable_params"))
    new = {"implementation": _with_fallback(name, theirs, known), "applicable_params": _Everything(),
           "is_new_implementation": True}  # fmt: skip
    for part, value in new.items():
        _replaced.append((cells[part], cells[part].cell_contents))
        cells[part].cell_contents = value


def _imported() -> Iterator[tuple[str, Any]]:
    """(name, function) for the functions of models that are imported already."""
    for path, module in list(sys.modules.items()):
        if path.startswith("transformers.models.") and ".modeling_" in path:
            for function in list(vars(module).values()):
                cells = _cells(function)
                name = cells["func_name"].cell_contents if "func_name" in cells else None
                if name in OURS:
                    yield name, function


def replace_functions() -> None:
    """Puts ours in the place of the functions of recurrent layers, now and in models that are imported later."""
    global _decorator
    from transformers.integrations import hub_kernels

    theirs = getattr(hub_kernels, _DECORATOR, None)
    if theirs is None or _decorator is not None:  # an older release, or they are in place
        return

    @functools.wraps(theirs)
    def named(func_name: str, *args: Any, **keywords: Any) -> Callable[[Callable], Callable]:
        decorate = theirs(func_name, *args, **keywords)

        def decorated(function: Callable) -> Callable:
            made = decorate(function)
            if func_name in OURS:
                _put(func_name, made)
            return made

        return decorated

    import transformers.integrations as names

    for name, function in _imported():
        _put(name, function)
    _decorator = theirs
    setattr(hub_kernels, _DECORATOR, named)
    setattr(names, _DECORATOR, named)


def restore_functions() -> None:
    """Undoes `replace_functions`."""
    global _decorator
    if _decorator is None:
        return
    import transformers.integrations as names
    from transformers.integrations import hub_kernels

    for holder in (hub_kernels, names):
        setattr(holder, _DECORATOR, _decorator)
    _decorator = None
    while _replaced:
        cell, before = _replaced.pop()
        cell.cell_contents = before
