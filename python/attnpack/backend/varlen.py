"""A CPU for torch.nn.attention.varlen: kernels for its private ops, registered while they are wanted.

`attnpack.backend.enable("varlen")` holds a `Registration`.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

from ..ops import attend_packed, flat_rules

_lock = threading.Lock()
_users = 0
_library: torch.library.Library | None = None


class Registration:
    """CPU kernels for the ops of torch.nn.attention.varlen, until `disable` is called. Registrations are counted: after
    the last one torch's own errors are back.

    Raises:
        RuntimeError: this torch has no torch.nn.attention.varlen.
    """

    def __init__(self) -> None:
        global _users, _library
        self.enabled = False
        try:
            from torch.nn.attention import varlen
        except ImportError:
            raise RuntimeError(
                f"attnpack: torch {torch.__version__} has no torch.nn.attention.varlen, wants a torch that has it: "
                "update torch, or call attnpack.attention_varlen"
            ) from None
        with _lock:
            if _library is None:
                library = torch.library.Library("torch_attn", "IMPL")
                for name, kernel in _KERNELS.items():
                    if hasattr(varlen, name):
                        library.impl(name, kernel, "CPU")
                _library = library
            _users += 1
            self.enabled = True

    def disable(self) -> None:
        """Undoes this registration. A second call does nothing."""
        global _users, _library
        with _lock:
            if not self.enabled:
                return
            self.enabled = False
            _users -= 1
            if _users == 0 and _library is not None:
                _library._destroy()
                _library = None


def is_enabled() -> bool:
    return _users > 0


def _refuse_pages(block_table: Tensor | None) -> None:
    if block_table is not None:
        raise ValueError(
            "attnpack: block_table is given, and keys in pages are not built yet: pass packed key and value with "
            "cu_seq_k, or disable the backend 'varlen'"
        )


def _used_keys(
    key: Tensor,  # [S, H, D]
    value: Tensor,
    cu_seq_k: Tensor | None,  # [N + 1]
    seqused_k: Tensor | None,  # [N]
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of key and value that the sequences use, packed, and where each sequence's begin."""
    if cu_seq_k is None:
        raise ValueError(
            "attnpack: cu_seq_k is None, wants an int32 tensor [sequences + 1] where block_table is None: pass "
            "cu_seq_q if keys and queries are the same tokens"
        )
    if seqused_k is None:
        return key, value, cu_seq_k
    room, used = cu_seq_k.diff(), seqused_k.to(cu_seq_k.dtype)
    if used.shape != room.shape or bool(((used < 0) | (used > room)).any()):
        raise ValueError(
            f"attnpack: seqused_k is {used.tolist()}, wants one number for each sequence, from 0 to its keys, "
            f"{room.tolist()}"
        )
    begins = zip(cu_seq_k.tolist(), used.tolist(), strict=False)
    rows = [torch.arange(begin, begin + n, device="cpu") for begin, n in begins]
    index = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *rows])
    return key[index], value[index], torch.cat([cu_seq_k[:1], used.cumsum(0).to(cu_seq_k.dtype)])


def _check_width(query: Tensor, value: Tensor) -> None:
    if query.size(-1) == value.size(-1):
        return
    # torch takes two head dims from 2.15 on, where its ops also name a backend.
    if "backend" not in str(torch.ops.torch_attn._varlen_attn.default._schema):
        raise ValueError(
            f"attnpack: value has head_dim {value.size(-1)}, query {query.size(-1)}: varlen_attn wants one head_dim, "
            "and attnpack.attention_varlen takes two"
        )


def _window(window_size: list[int] | None, is_causal: bool) -> dict:
    left, right = (-1, -1) if window_size is None else window_size
    return {"window": (left, right), "causal": is_causal}


def _forward(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, scale=None, window_size=None,
             enable_gqa=False, seqused_k=None, block_table=None, num_splits=None, backend=None):  # fmt: skip
    """out [T, H, Dv] and lse [H, T]. Neither the number of splits nor torch's choice of a CUDA backend (from 2.15 on)
    changes them."""
    _refuse_pages(block_table)
    _check_width(query, value)
    key, value, cu_seq_k = _used_keys(key, value, cu_seq_k, seqused_k)
    window = _window(window_size, is_causal)
    return attend_packed(query, key, value, cu_seq_q, cu_seq_k, scale=scale, return_lse=True, **window)


def _in_layout_of(like: Tensor, x: Tensor) -> Tensor:
    """x with the strides that torch's traced graphs expect: those of `like`, or for other sizes its order of dims."""
    if x.shape == like.shape:
        made = torch.empty_like(like)
    else:
        order = sorted(range(x.dim()), key=lambda dim: like.stride(dim) or math.inf, reverse=True)
        made = x.new_empty([x.size(dim) for dim in order]).permute([order.index(dim) for dim in range(x.dim())])
    return x if made.stride() == x.stride() else made.copy_(x)


def _varlen_attn(query, *arguments, **keywords):
    out, lse = _forward(query, *arguments, **keywords)
    return _in_layout_of(query, out), lse.float(), torch.zeros((2,), dtype=torch.uint64, device="cpu")


def _varlen_attn_out(out, query, *arguments, **keywords):
    result, lse = _forward(query, *arguments, **keywords)
    out.copy_(result)
    return lse.float()


def _varlen_attn_backward(grad_out, query, key, value, out, lse, cu_seq_q, cu_seq_k, max_q, max_k, is_causal,
                          rng_state, scale=None, window_size=None, backend=None):  # fmt: skip
    window = _window(window_size, is_causal)
    if query.dtype == torch.float64:  # torch's lse is fp32
        lse = attend_packed(query, key, value, cu_seq_q, cu_seq_k, scale=scale, return_lse=True, **window)[1]
    grads = torch.ops.attnpack.attention_varlen_backward(
        grad_out, None, query, key, value, out, lse, cu_seq_q, cu_seq_k, **flat_rules(query, window)[1], scale=scale
    )
    return tuple(_in_layout_of(x, grad) for x, grad in zip((query, key, value), grads[:3], strict=True))


_KERNELS = {
    "_varlen_attn": _varlen_attn,
    "_varlen_attn_out": _varlen_attn_out,
    "_varlen_attn_backward": _varlen_attn_backward,
}
