"""Attention over entries in plain PyTorch, for the tests of its op and of CompressedAttention."""

import torch
from attnpack import reference


def attended(query, key, entries, named, sinks, window, *, cos, sin, interleaved, rate):
    """`ops.attend_entries` by one dense mask over tokens and entries."""
    length, count, plain = query.size(2), entries.size(2), query.size(3) - 2 * cos.size(1)

    def turned(x, cos, sin):
        last = reference.apply_rope(x[..., plain:], cos, sin, interleaved=interleaved)
        return torch.cat([x[..., :plain], last], -1)

    behind = torch.arange(length).unsqueeze(1) - torch.arange(length)
    seen = (behind >= 0) & (behind < window)
    if named is None:
        past = (torch.arange(count) + 1) * rate <= torch.arange(length).unsqueeze(1) + 1
        past = past.expand(query.size(0), 1, -1, -1)
    else:
        past = (named.unsqueeze(-1) == torch.arange(count)).any(3)
    far = turned(entries, cos[::rate][:count], sin[::rate][:count])
    keys = torch.cat([turned(key, cos, sin), far], 2)
    mask = torch.cat([seen.expand(query.size(0), 1, -1, -1), past], 3)
    out = reference.attention(turned(query, cos, sin), keys, keys, mask, sinks=sinks)
    return turned(out, cos, -sin).transpose(1, 2).flatten(2)
