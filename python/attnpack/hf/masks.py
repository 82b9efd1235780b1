"""The mask function that transformers calls under the name "attnpack", and the mask that it makes.

transformers describes a mask by a function of positions and a padding mask [B, keys]. If the function means causality,
a window or both, the operator takes it as ranges and skips the excluded keys. Any other function becomes a bool mask,
which is built once, when it is first read. B batch, Lq / Lkv lengths of queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

from .internals import closure_variables

# Their model code joins columns of what to add to the scores, -inf or 0, to the mask that it gets.
_JOINED = ("deepseek_v4",)
# A model with its own attention code adds a float mask to its scores, or fills them where a bool mask excludes.
_ADDS = (torch.ops.aten.add, torch.ops.aten.add_)
_FILLS = (torch.ops.aten.masked_fill, torch.ops.aten.masked_fill_)


class Ranges(NamedTuple):
    """Arguments of `attnpack.attention` that together replace a mask."""

    causal: bool
    window: tuple[int, int]
    q_offset: int | Tensor
    kv_lens: Tensor | None  # [B]
    key_mask: Tensor | None  # [B, 1, 1, Lkv], bool
    sequences: Tensor | None = None  # [B, Lq]: each token attends its own sequence; the number of a token's sequence


class Pattern(NamedTuple):
    """The meaning of a mask function of transformers."""

    causal: bool
    window: tuple[int, int]
    sequences: Tensor | None = None  # as in Ranges


class LazyMask(Tensor):
    """A bool mask [B, 1, Lq, Lkv], True = may attend, that takes no memory until a model computes with it.

    `ranges` are the same mask as arguments of the operator; None if the mask cannot be expressed by ranges.
    """

    ranges: Ranges | None

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], device: torch.device, ranges: Ranges | None, build_mask: Callable[[], Tensor]
    ):
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.ranges = ranges
        mask._build_mask = build_mask
        mask._built = None
        return mask

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.overloadpacket in _ADDS or (func.overloadpacket in _FILLS and isinstance(args[1], cls)):
            raise ValueError(  # torch would turn a TypeError into "unsupported operand"
                'attnpack: this model puts its mask on scores of its own, so attn_implementation="attnpack" does not '
                'reach its attention; call model.set_attn_implementation("eager")'
            )
        plain = (tree_map(_plain_value, part) for part in (args, kwargs or {}))
        return func(*next(plain), **next(plain))

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """A compiled graph gets a mask that was made outside of it as the plain tensor."""
        self.materialise()
        return ["_built"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], _context: None, size: Any, _stride: Any) -> LazyMask:
        mask = LazyMask(size, parts["_built"].device, None, None)
        mask._built = parts["_built"]
        return mask

    def materialise(self) -> Tensor:
        """The mask as a plain tensor."""
        if self._built is None:
            self._built = self._build_mask()
        return self._built


def _plain_value(value: Any) -> Any:
    """The plain tensor of a mask, or `value` itself if it is no LazyMask.

    Code that has the tensor may write to it, so the tensor replaces the ranges from then on.
    """
    if not isinstance(value, LazyMask):
        return value
    value.ranges = None
    return value.materialise()


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,  # [B, keys]
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **settings: Any,
) -> Tensor | None:
    """The mask of queries from position q_offset over keys from position kv_offset, for
    `transformers.AttentionMaskInterface`.

    Returns:
        A LazyMask [batch_size, 1, q_length, kv_length]. While a graph is traced, a plain bool tensor, or None for a
        single query that sees all keys. None if every query may attend every key and `allow_is_bidirectional_skip` is
        set. DeepSeek-V4 gets the float tensor of "eager".
    """
    if getattr(settings.get("config"), "model_type", None) in _JOINED:
        return masking_utils.eager_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device=device,
            **settings,
        )  # fmt: skip

    def build_mask(**skips: bool) -> Tensor | None:
        return masking_utils.sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device=device,
            **{**settings, **skips},
        )  # fmt: skip

    if is_tracing(q_offset if attention_mask is None else attention_mask):
        # Layers may keep the last queries only, and cut the mask to them (Gemma 4). None would then mean causality from
        # the first key on, which is wrong unless there is a single query.
        causal_skip = settings.get("allow_is_causal_skip", True) and q_length == 1
        return build_mask(allow_is_causal_skip=causal_skip, allow_is_bidirectional_skip=allow_is_bidirectional_skip)
    if isinstance(q_offset, Tensor):
        # q_offset is the length of a static cache, and the first layer advances it in place, so keep its present value.
        # Reading it is free on the CPU, but would wait for another device.
        q_offset = int(q_offset) if q_offset.device.type == "cpu" else q_offset.clone()
    ranges = _ranges(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
    if allow_is_bidirectional_skip and ranges is not None and _all_allowed(ranges):
        return None
    plain = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return LazyMask((batch_size, 1, q_length, kv_length), torch.device(device), ranges, lambda: build_mask(**plain))


def _all_allowed(ranges: Ranges) -> bool:
    limits = (ranges.kv_lens, ranges.key_mask, ranges.sequences)
    return not ranges.causal and ranges.window == (-1, -1) and limits == (None, None, None)


def _ranges(
    batch: int,
    q_len: int,
    kv_len: int,
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: Callable,
    padding: Tensor | None,  # [B, keys]
) -> Ranges | None:
    pattern = _pattern(mask_function)
    if pattern is None or (padding is not None and padding.dim() != 2):
        return None
    q_offset = q_offset - kv_offset
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.reshape(-1).expand(batch)
    kv_lens, key_mask = _padding(padding, batch, kv_len, kv_offset)
    if pattern.sequences is not None and (q_len != kv_len or padding is not None):
        return None
    return Ranges(pattern.causal, pattern.window, q_offset, kv_lens, key_mask, pattern.sequences)


def _padding(padding: Tensor | None, batch: int, kv_len: int, kv_offset: int) -> tuple[Tensor | None, Tensor | None]:
    """(kv_lens, key_mask) of the keys from kv_offset on: lengths if all padding is on the right, else a mask."""
    if padding is None:
        return None, None
    valid = padding[:, kv_offset : kv_offset + kv_len].bool()
    if valid.size(1) == kv_len and valid.all():
        return None, None
    if (valid[:, 1:] <= valid[:, :-1]).all():
        return valid.sum(1).expand(batch), None
    # Keys past the end of the padding mask are not there yet.
    return None, torch.nn.functional.pad(valid, (0, kv_len - valid.size(1)))[:, None, None]


def is_packed(mask_function: Callable) -> bool:
    """Whether a mask function of transformers keeps packed sequences apart, and is known in all its parts."""
    pattern = _pattern(mask_function)
    return pattern is not None and pattern.sequences is not None


def _pattern(mask_function: Callable) -> Pattern | None:
    """The meaning of a mask function of transformers; None if it is another function.

    The overlays of transformers are closures without a public mark, so their names and cells are read. A function that
    is not recognised is built as a mask, which is slower but correct.
    """
    if mask_function is masking_utils.causal_mask_function:
        return Pattern(True, (-1, -1))
    if mask_function is masking_utils.bidirectional_mask_function:
        return Pattern(False, (-1, -1))
    if getattr(mask_function, "__module__", None) != masking_utils.__name__:
        return None
    name, variables = mask_function.__qualname__.partition(".")[0], closure_variables(mask_function)
    if name == "and_masks":
        patterns = [_pattern(part) for part in variables["mask_functions"]]
        if None in patterns:
            return None
        windows = zip(*(pattern.window for pattern in patterns), strict=True)
        left, right = (min((side for side in sides if side >= 0), default=-1) for sides in windows)
        packed = [pattern.sequences for pattern in patterns if pattern.sequences is not None]
        if len(packed) > 1:
            return None
        return Pattern(any(pattern.causal for pattern in patterns), (left, right), *packed)
    if name == "packed_sequence_mask_function":
        return Pattern(False, (-1, -1), variables["packed_sequence_mask"])
    if name == "remap_positions_for_packed_sequence":
        # Positions rise by 1 inside of a sequence, so their differences are those of the tokens' places.
        return _pattern(variables["mask_function"])
    width = variables.get("sliding_window")
    if not isinstance(width, int) or width < 1:
        return None
    if name == "sliding_window_overlay":  # keeps key > query - width
        return Pattern(False, (width - 1, -1))
    if name == "sliding_window_bidirectional_overlay":  # keeps abs(query - key) <= width
        return Pattern(False, (width, width))
    return None
