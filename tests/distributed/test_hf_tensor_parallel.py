"""transformers' own tensor parallelism with attn_implementation="attnpack": the logits and tokens of one process."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def program(folder):
    """(distance of the logits, whether the tokens are equal, this rank's share of the weights)"""
    import attnpack.hf
    from transformers import AutoModelForCausalLM

    attnpack.hf.register()
    ids = torch.arange(20).view(2, 10)
    whole = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), str(dist.get_rank())
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(dist.get_world_size())}  # as by torchrun
    with mock.patch.dict(os.environ, launched):
        shared = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="attnpack", tp_plan="auto", device_mesh=mesh
        ).eval()
    with torch.no_grad():
        logits = shared(ids).logits
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        distance = float((logits - whole(ids).logits).abs().max())
    settings = {"max_new_tokens": 6, "do_sample": False}
    tokens = [model.generate(ids, **settings) for model in (whole, shared)]
    held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in shared.parameters())
    return distance, torch.equal(*tokens), held / sum(p.numel() for p in whole.parameters())


@pytest.mark.long
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_a_plan_of_transformers_runs_on_the_operator(two_ranks, tmp_path, kv_heads):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=kv_heads)).save_pretrained(
        tmp_path
    )
    for distance, equal, share in two_ranks.run(program, str(tmp_path)):
        assert distance < 1e-5 and equal and share < 0.51
