"""The ops of caches that keep a window: what they move, and what they refuse."""

import attnpack  # noqa: F401, registers the ops
import pytest
import torch

slide, crop = torch.ops.attnpack.kv_window_slide, torch.ops.attnpack.kv_window_crop
append = torch.ops.attnpack.kv_cache_append_


@pytest.mark.parametrize("keep_first", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slide_keeps_what_is_needed(keep_first, dtype):
    slots = torch.arange(600).view(1, 1, 600, 1).expand(3, 2, 600, 4).to(dtype)
    key, value = slots.clone(), -slots[..., :2].transpose(1, 2).contiguous().transpose(1, 2)
    lengths, dropped = torch.tensor([600, 820, 20]), torch.tensor([0, 256, 0])
    new_key, new_value, gone = slide(key, value, lengths, dropped, 400, 30, keep_first)
    assert gone.tolist() == [512, 768, 0]
    for b, length in enumerate(lengths.tolist()):
        held, moved = length - int(gone[b]), int(gone[b] - dropped[b])
        source = torch.arange(held)
        source = torch.where(source < keep_first, source, source + moved)
        assert torch.equal(new_key[b, :, :held], key[b][:, source])
        assert torch.equal(new_value[b, :, :held], value[b][:, source])
        assert not new_key[b, :, held:].any()
    assert new_key.shape == (3, 2, 400, 4) and new_value.shape == (3, 2, 400, 2)


def test_what_is_appended_goes_after_the_slots_in_use():
    key, value = torch.zeros(2, 1, 8, 3), torch.zeros(2, 1, 8, 3)
    lengths, dropped, new = torch.tensor([259, 5]), torch.tensor([256, 0]), torch.ones(2, 1, 2, 3)
    append(key, value, lengths, new, new, None, None, dropped)
    assert lengths.tolist() == [261, 7]
    assert key[0, 0, :, 0].tolist() == [0, 0, 0, 1, 1, 0, 0, 0] and key[1, 0, :, 0].tolist() == [0] * 5 + [1, 1, 0]
    with pytest.raises(ValueError, match="cache is full: sequence 1 holds 7 of 8 positions and 2"):
        append(key, value, lengths, new, new, None, None, dropped)
    with pytest.raises(ValueError, match="mask covers 261 keys, sequence 0 has 262"):
        append(key, value, lengths, new[:, :, :1], new[:, :, :1], None, 261, dropped)


def test_wrong_tensors_are_named():
    key, lengths, dropped = torch.zeros(2, 1, 8, 3), torch.tensor([3, 5]), torch.tensor([0, 0])
    for wrong in (dropped[:1], dropped.int()):
        with pytest.raises(ValueError, match="the cache's dropped has shape .* wants int64"):
            slide(key, key, lengths, wrong, 8, 3, 0)
        with pytest.raises(ValueError, match="the cache's dropped has shape .* wants int64"):
            append(key, key.clone(), lengths, key[:, :, :1].clone(), key[:, :, :1].clone(), None, None, wrong)
    new = torch.ones(2, 1, 1, 3)
    for gone in (torch.tensor([0, 6]), torch.tensor([-1, 0])):
        with pytest.raises(ValueError, match=r"the cache.s dropped\[\d\] is -?\d, wants 0 to its length"):
            append(key, key.clone(), lengths, new, new.clone(), None, None, gone)
    with pytest.raises(ValueError, match="capacity is 4, wants at least 5, the positions that sequence 1 keeps"):
        slide(key, key, lengths, dropped, 4, 3, 0)
    with pytest.raises(ValueError, match="window is -1"):
        slide(key, key, lengths, dropped, 8, -1, 0)
    with pytest.raises(ValueError, match="keep_first is -1"):
        crop(lengths, dropped, 2, 3, -1)
    with pytest.raises(ValueError, match="n is -2"):
        crop(lengths, dropped, -2, 3, 0)
    with pytest.raises(ValueError, match="key has shape"):
        slide(key[:1], key, lengths, dropped, 8, 3, 0)
    with pytest.raises(ValueError, match="they must agree"):
        slide(key, key.double(), lengths, dropped, 8, 3, 0)


@pytest.mark.parametrize(
    ("n", "window", "keep_first", "wanted"),
    [
        (290, 10, 0, ([290, 5], [256, 0])),
        (266, 10, 0, ([266, 5], [256, 0])),
        (265, 10, 0, None),
        (3, 10, 0, None),
        (3, 10, 4, ([3, 3], [0, 0])),
        (5, 10, 4, None),
        (270, 10, 4, ([270, 5], [256, 0])),
        (269, 10, 4, None),
        (100, 0, 0, ([100, 5], [100, 0])),
    ],
)
def test_crop_keeps_what_the_window_has(n, window, keep_first, wanted):
    lengths, dropped = torch.tensor([300, 5]), torch.tensor([256, 0])
    if wanted is None:
        with pytest.raises(ValueError, match=f"n: got {n}, but sequence 0 of length 300 has dropped"):
            crop(lengths, dropped, n, window, keep_first)
    else:
        assert tuple(x.tolist() for x in crop(lengths, dropped, n, window, keep_first)) == wanted
