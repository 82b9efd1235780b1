"""Trains a small language model on several processes: heads over one dim of a mesh, the sequence over the other one.

    torchrun --nproc-per-node 4 examples/distributed/train.py --tensor 2 --context 2
    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        examples/distributed/train.py --tensor 2 --context 2

The second line is for two machines: the same on both, HOST being one of them. A run that was killed goes on from its
last checkpoint, also on another number of processes.
"""

import argparse
import os
from pathlib import Path

import attnpack
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from attnpack.distributed import context_parallel, shard_sequence, tensor_parallel
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

LENGTH, BATCH, VOCABULARY = 64, 4, 64


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels [B, L]: counting, from a place and by a stride that the model must find out."""
    generator = torch.Generator().manual_seed(step)
    start, stride = (torch.randint(1, 9, (BATCH, 1), generator=generator) for _ in range(2))
    ids = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    return ids[:, :-1], ids[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share the heads")
    parser.add_argument("--context", type=int, default=1, help="ranks that share each sequence")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpoint", type=Path, help="folder to go on from, and to write to")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (args.context, args.tensor), mesh_dim_names=("context", "tensor"))

    torch.manual_seed(0)
    model = attnpack.CausalLM(VOCABULARY, 64, 2, 4, 2, qk_norm=True)
    tensor_parallel(model, mesh["tensor"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = 0
    if args.checkpoint and args.checkpoint.exists():
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True), step=0)
        dcp.load(state, checkpoint_id=args.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first = state["step"]

    for step in range(first, args.steps):
        inputs, labels = (shard_sequence(x, mesh["context"], layout="zigzag") for x in batch(step))
        optimizer.zero_grad()
        with context_parallel(mesh["context"], layout="zigzag"):
            logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / args.context  # a share of the mean
        loss.backward()
        for parameter in model.parameters():  # each rank's gradients are those of its part of the sequences
            dist.all_reduce(parameter.grad.to_local(), group=mesh["context"].get_group())
        optimizer.step()
        shown = loss.detach()
        dist.all_reduce(shown, group=mesh["context"].get_group())
        if dist.get_rank() == 0 and (step % 10 == 9 or step + 1 == args.steps):
            print(f"step {step + 1}: loss {float(shown):.4f}", flush=True)
    if args.checkpoint:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True), step=args.steps)
        dcp.save(state, checkpoint_id=args.checkpoint)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
