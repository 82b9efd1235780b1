"""The masks of attnpack.hf equal transformers' own masks, as ranges and as a tensor."""

import attnpack
import attnpack.hf
import pytest
import torch
from attnpack.hf.masks import LazyMask, Pattern, _pattern
from hf_families import padding
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

PATTERNS = {
    "causal": (causal_mask_function, (True, (-1, -1))),
    "bidirectional": (bidirectional_mask_function, (False, (-1, -1))),
    "window": (sliding_window_causal_mask_function(4), (True, (3, -1))),
    "window both ways": (sliding_window_bidirectional_mask_function(4), (False, (4, 4))),
    "window of windows": (
        and_masks(sliding_window_causal_mask_function(4), sliding_window_causal_mask_function(2)),
        (True, (1, -1)),
    ),
    "chunked": (chunked_causal_mask_function(4, torch.zeros(3, dtype=torch.int64)), None),
    "union": (or_masks(causal_mask_function, bidirectional_mask_function), None),
    "a user's": (lambda batch, head, query, key: key <= query, None),
}
# (q_length, kv_length, q_offset, kv_offset): a whole prompt, a step and a chunk after a cache, a static cache, a
# sliding cache that dropped its first keys.
PLACES = [(14, 14, 0, 0), (1, 14, 13, 0), (4, 14, 10, 0), (4, 20, 10, 0), (1, 6, 13, 8), (3, 7, 11, 7)]


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_are_recognised(name):
    """This holds for the installed transformers. Otherwise all masks would silently be tensors: right, but slow."""
    function, expected = PATTERNS[name]
    assert _pattern(function) == (expected and Pattern(*expected))


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("pad", ["absent", "none", "left", "right", "holes"])
@pytest.mark.parametrize("name", PATTERNS)
def test_a_mask_says_what_transformers_own_says(name, pad, place):
    q_length, kv_length, q_offset, kv_offset = place
    function, pattern = PATTERNS[name]
    if pad == "absent":
        attention_mask = None
    elif pad == "holes":
        attention_mask = (torch.arange(14) % 3 > 0).expand(3, -1)
    else:
        attention_mask = padding(pad).bool()
    arguments = {
        "batch_size": 3,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": function,
        "attention_mask": attention_mask,
    }
    expected = sdpa_mask(**arguments, allow_is_causal_skip=False)
    mask = attnpack.hf.mask(**arguments)
    assert isinstance(mask, LazyMask) and mask.shape == (3, 1, q_length, kv_length) and mask.dtype == torch.bool
    assert (mask.ranges is None) == (pattern is None)
    assert torch.equal(mask.materialise(), expected.expand_as(mask))

    torch.manual_seed(0)
    query, key = torch.randn(3, 2, q_length, 8), torch.randn(3, 2, kv_length, 8)
    module = torch.nn.Module()
    found, weights = attnpack.hf.attention_forward(module, query, key, key, mask, output_attentions=True)
    torch.testing.assert_close(found.transpose(1, 2), attnpack.attention(query, key, key, expected))
    assert torch.equal(weights > 0, expected.expand_as(weights))


def test_a_tensor_offset_is_the_length_of_a_static_cache_at_the_time():
    """When the first layer runs, the cache changes the offset in place, before the mask is read."""
    length = torch.tensor(4)
    mask = attnpack.hf.mask(2, 3, 10, length)
    length += 3
    assert mask.ranges == attnpack.hf.mask(2, 3, 10, 4).ranges
    assert torch.equal(mask.materialise(), sdpa_mask(2, 3, 10, 4, allow_is_causal_skip=False))


def test_bidirectional_masks_vanish_where_transformers_allows_it():
    function = bidirectional_mask_function
    for pad, vanishes in (("none", True), ("left", False)):
        mask = attnpack.hf.mask(
            3, 14, 14, mask_function=function, attention_mask=padding(pad).bool(), allow_is_bidirectional_skip=True
        )
        assert (mask is None) == vanishes
    windowed = sliding_window_bidirectional_mask_function(4)
    assert attnpack.hf.mask(3, 14, 14, mask_function=windowed, allow_is_bidirectional_skip=True) is not None


def test_a_lazy_mask_is_a_mask_to_models_that_compute_with_it():
    mask = attnpack.hf.mask(2, 3, 5, 2)
    expected = sdpa_mask(2, 3, 5, 2, allow_is_causal_skip=False)
    assert torch.equal(mask[:, :, :, :4], expected[:, :, :, :4])
    assert torch.equal(~mask, ~expected)
    assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(expected, 0.0, -1.0))
    assert torch.equal(mask.expand(2, 4, 3, 5), expected.expand(2, 4, 3, 5))


def test_what_a_model_writes_into_its_mask_counts():
    arguments = {"batch_size": 3, "q_length": 14, "kv_length": 14, "attention_mask": padding("left").bool()}
    mask, expected = attnpack.hf.mask(**arguments), sdpa_mask(**arguments, allow_is_causal_skip=False)
    for tensor in (mask, expected):
        tensor[:, :, :, 7] = True
    query = torch.randn(3, 2, 14, 8)
    found, _ = attnpack.hf.attention_forward(torch.nn.Module(), query, query, query, mask)
    torch.testing.assert_close(found.transpose(1, 2), attnpack.attention(query, query, query, expected))


def test_putting_a_lazy_mask_on_scores_is_refused():
    mask, scores = attnpack.hf.mask(2, 3, 5, 2), torch.zeros(2, 4, 3, 5)
    for use in (lambda: scores + mask, lambda: mask + scores, lambda: scores.masked_fill(mask, -1.0)):
        with pytest.raises(ValueError, match="this model puts its mask on scores of its own"):
            use()
    assert torch.equal(scores.masked_fill(~mask, -1.0), scores.masked_fill(~mask.materialise(), -1.0))


def test_no_memory_for_a_long_prompt():
    """A bool mask of this size would take 10 GiB."""
    mask = attnpack.hf.mask(1, 100_000, 100_000)
    assert mask.ranges.causal and mask._built is None
