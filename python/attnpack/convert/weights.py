"""Conversion of weights. C++ computes it (csrc/attnpack/convert) from tensors to tensors, without modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .. import _C
from ..errors import wrong_kind

Groups = Sequence[Sequence[int]]
METHODS = ("mean", "first", "random", "similar", "aligned")


class LayerWeights(NamedTuple):
    """The projections of one attention layer: q [Hq * D, E], k [Hkv * D, Ek], v [Hkv * D, Ev], o [E, Hq * D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None


@dataclass(frozen=True)
class MergedHeads:
    """The result of `merge_kv_heads`."""

    weights: LayerWeights
    head_map: list[int]  # the new kv head of each query head
    head_order: list[int]  # the former place of each query head
    groups: list[list[int]]  # the former kv heads of each new kv head


def pool_kv_heads(
    weight: Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    method: str = "mean",
    window: int = 1,
    groups: Groups | None = None,
    seed: int | None = None,
) -> Tensor:
    """Merges `num_heads` heads of a key or value projection to `num_kv_heads` (Ainslie et al. 2023, section 2.1).

    Args:
        weight: [num_heads * head_dim, E], or a bias [num_heads * head_dim], of a floating dtype.
        num_heads, num_kv_heads: heads before and after.
        method: "mean": the mean of each group's heads; "first": the first head of each group; "random": a new head from
            a normal distribution with the root mean square of weight.
        window: if w > 1, each w x w region of the whole matrix (in a bias, w neighbours) is first replaced by its mean;
            w must divide both sides. The paper does not have this.
        groups: the heads of each group, which may be uneven; default consecutive heads.
        seed: seed for "random", 0 to 2**64 - 1; default torch's generator.

    Returns:
        [num_kv_heads * head_dim, E] in weight's dtype, computed in fp64; no gradient.

    Raises:
        ValueError: a size, the method, the window or the groups do not fit.
        TypeError: of the wrong kind.
    """
    return _C.convert.pool_kv_heads(
        weight=weight,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        method=method,
        window=window,
        groups=groups,
        seed=seed,
    )


def merge_kv_heads(
    weights: LayerWeights,
    num_heads: int,
    num_kv_heads: int,
    new_kv_heads: int,
    *,
    head_map: Sequence[int] | None = None,
    method: str = "mean",
    window: int = 1,
    groups: Groups | None = None,
    seed: int | None = None,
    calibration: Tensor | Sequence[Tensor | None] | None = None,
    rope_dim: int = 0,
    interleaved: bool = False,
    key_norm: bool = False,
    reorder: bool = False,
) -> MergedHeads:
    """A layer's weights with `new_kv_heads` in place of `num_kv_heads`.

    Args:
        weights: the present weights; they stay as they are.
        num_heads: number of query heads.
        head_map: the kv head that each query head reads; default consecutive query heads share a kv head.
        method: a method of `pool_kv_heads`, or one of two more. "similar": the mean of groups whose heads give similar
            keys and values on the calibration (groups are uneven if new_kv_heads does not divide num_kv_heads).
            "aligned": the heads of a group are aligned with each other before they merge, keys by a rotation and scale
            for each RoPE pair, values by any matrix; q and o compensate for this change.
        window, groups, seed: as in `pool_kv_heads`.
        calibration: the input of the layer on some text, [tokens, E] or [B, L, E], or (x, context, value_context) of a
            cross-attention. Without it "similar" and "aligned" give all directions of the input the same weight.
        rope_dim, interleaved: the number of dims that the layer's RoPE rotates, and its pairs.
        key_norm: keys pass a norm after their projection; "aligned" then takes the mean of the keys.
        reorder: put query heads in the order of their groups, so that consecutive query heads share a kv head. It needs
            the same number of query heads for each group.

    Raises:
        ValueError: a size, the method, the groups or the calibration do not fit, or a weight holds NaN or Inf.
    """
    tensors, *rest = _C.convert.merge_kv_heads(
        weights=list(weights),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        new_kv_heads=new_kv_heads,
        head_map=head_map,
        method=method,
        window=window,
        groups=groups,
        seed=seed,
        calibration=calibration_rows(calibration),
        rope_dim=rope_dim,
        interleaved=interleaved,
        key_norm=key_norm,
        reorder=reorder,
    )
    return MergedHeads(LayerWeights(*tensors), *rest)


def split_qkv(weight: Tensor, layout: str, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) of a fused projection, weight or bias, bit for bit.

    layout is "concat" for rows [Q | K | V] (torch's in_proj_weight, nanoGPT, GPTBigCode with one kv head), "grouped"
    for rows [its query heads | k | v] of each kv head (Falcon, GPTBigCode without multi_query), or "conv1d" for columns
    [Q | K | V] of a transposed weight (GPT-2). Raises ValueError if the rows are not those of these heads.
    """
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    return _C.convert.split_qkv(weight=weight, layout=layout, **sizes)


def fuse_qkv(q: Tensor, k: Tensor, v: Tensor, layout: str, num_heads: int, num_kv_heads: int) -> Tensor:
    """The fused projection, weight or bias, from its parts: the opposite of `split_qkv`."""
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    return _C.convert.fuse_qkv(q=q, k=k, v=v, layout=layout, **sizes)


def calibration_rows(calibration: Tensor | Sequence[Tensor | None] | None) -> list[Tensor | None]:
    """Inputs of a layer as rows of tokens."""
    if calibration is None or isinstance(calibration, Tensor):
        inputs = [calibration]
    elif isinstance(calibration, list | tuple) and calibration:
        inputs = list(calibration)
    else:
        raise wrong_kind("calibration", calibration, "a tensor [tokens, width], or (x, context, value_context)")
    for rows in inputs:
        if rows is not None and not isinstance(rows, Tensor):
            raise wrong_kind("calibration", rows, "a tensor [tokens, width], or (x, context, value_context)")
    return [None if rows is None else rows.detach().reshape(-1, rows.shape[-1]) for rows in inputs]
