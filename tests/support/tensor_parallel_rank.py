"""One of two processes that divide modules by torch's own plan: `python tensor_parallel_rank.py RANK STORE`, where
STORE is a file that both name. Prints a JSON object: for each case the distance from the result of one process, or the
error."""

import copy
import json
import sys

import attnpack
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, IDS = 24, torch.arange(14).view(2, 7)
QKV, LATENT, MODEL = "q_proj k_proj v_proj", "q_proj kv_b_proj", "model.layers.*."
SIZES = {"kv_lora_rank": 10, "qk_nope_head_dim": 4, "qk_rope_head_dim": 6, "v_head_dim": 5, "causal": True}
SPLIT_MODEL = [MODEL + f"self_attn.{name}" for name in QKV.split()] + [MODEL + "mlp.gate_proj", MODEL + "mlp.up_proj"]
JOIN_MODEL = [MODEL + "self_attn.o_proj", MODEL + "mlp.down_proj"]


def grouped(kv_heads: int = 2, **settings) -> nn.Module:
    rope = attnpack.RotaryEmbedding(6)
    return attnpack.GroupedQueryAttention(WIDTH, 4, kv_heads, causal=True, rope=rope, bias=True, **settings)


def latent(**settings) -> nn.Module:
    rope = attnpack.RotaryEmbedding(6) if settings.get("qk_rope_head_dim", 6) else None
    return attnpack.MultiHeadLatentAttention(WIDTH, 4, **SIZES | settings, rope=rope)


def whole(module: nn.Module) -> Tensor:
    return module(torch.randn(2, 7, WIDTH))


@torch.no_grad()
def values(module: nn.Module) -> Tensor:
    return whole(module)


@torch.no_grad()
def steps(module: nn.Module) -> Tensor:
    latent = isinstance(module, attnpack.MultiHeadLatentAttention)
    cache = attnpack.LatentCache() if latent else attnpack.DynamicCache()
    return torch.cat([module(part, cache=cache) for part in torch.randn(2, 7, WIDTH).split([4, 1, 2], 1)], 1)


@torch.no_grad()
def masked(module: nn.Module, heads: int = 4) -> Tensor:
    return module(torch.randn(2, 7, WIDTH), mask=torch.ones(1, heads, 7, 7).tril() > 0)


def gradients(module: nn.Module) -> Tensor:
    whole(module).square().sum().backward()
    grads = (parameter.grad for parameter in module.parameters())
    return torch.cat([(grad.full_tensor() if hasattr(grad, "full_tensor") else grad).flatten() for grad in grads])


def compiled(module: nn.Module) -> Tensor:
    return whole(torch.compile(module, fullgraph=True, backend="eager"))


CASES = {
    "multi-head": (lambda: grouped(4), QKV, gradients),
    "grouped": (grouped, QKV, gradients),
    "grouped, compiled": (grouped, QKV, compiled),
    "grouped, steps": (grouped, QKV, steps),
    "norms without gradients": (lambda: grouped(qk_norm=True), QKV, values),
    "latent": (latent, LATENT, values),
    "latent, steps": (latent, LATENT, steps),
    "latent without rotated dims": (lambda: latent(qk_rope_head_dim=0), LATENT, gradients),
    "model": (lambda: attnpack.CausalLM(16, WIDTH, 2, 4, 2), " ".join(SPLIT_MODEL), lambda model: model(IDS)),
    "mask for all heads": (grouped, QKV, lambda module: masked(module, 1)),
    "mask by head": (grouped, QKV, masked),
    "latent, mask by head": (latent, LATENT, masked),
    "one kv head": (lambda: grouped(1), QKV, values),
    "queries alone": (grouped, "q_proj", values),
    "one head": (lambda: attnpack.SelfAttention(WIDTH), QKV, values),
    "sinks": (lambda: grouped(sinks=True), QKV, values),
    "alibi": (lambda: grouped(alibi=True), QKV, values),
    "head map": (lambda: grouped(head_map=[0, 0, 0, 1]), QKV, values),
    "norms": (lambda: grouped(qk_norm=True), QKV, whole),
    "latent with gradients": (latent, LATENT, whole),
    "latent, queries alone": (latent, "q_proj", values),
    "latent, latents alone": (latent, "kv_b_proj", values),
}


def outcome(case: str, mesh: DeviceMesh) -> float | str:
    make, split, measure = CASES[case]
    torch.manual_seed(0)
    module = make()
    plan = {name: ColwiseParallel() for name in split.split()}
    for name in JOIN_MODEL if case == "model" else ["o_proj"] if hasattr(module, "o_proj") else []:
        plan[name] = RowwiseParallel()
    divided = parallelize_module(copy.deepcopy(module), mesh, plan)
    torch.manual_seed(1)
    wanted = measure(module)
    torch.manual_seed(1)
    try:
        return float((measure(divided) - wanted).detach().abs().max() / wanted.detach().abs().max())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.set_num_threads(1)
    print(json.dumps({case: outcome(case, mesh) for case in CASES}))
    dist.destroy_process_group()
