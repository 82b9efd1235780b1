"""A small CausalLM of random weights whose greedy tokens differ, and these tokens by its Python modules."""

import attnpack
import torch


def small_lm():
    torch.manual_seed(0)
    model = attnpack.CausalLM(50, 24, 2, 4, 2, hidden_dim=48).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that tokens differ
    return model


@torch.no_grad()
def greedy(model, ids, new):
    """Greedy tokens of the Python module, which computes everything anew for each token."""
    for _ in range(new):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    return ids
