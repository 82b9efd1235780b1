"""Layers whose kv heads are equal in groups, so that fewer kv heads lose nothing."""

import torch


def share_heads(module, groups) -> None:
    """Gives all kv heads of a group the weights of its first head."""
    with torch.no_grad():
        for projection in (module.k_proj, module.v_proj):
            for tensor in projection.parameters():
                heads = tensor.unflatten(0, (module.num_kv_heads, -1))
                for group in groups:
                    heads[group] = heads[group[0]].clone()
