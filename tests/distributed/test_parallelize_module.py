"""Tensor parallelism by torch's own plan: two processes give the numbers of one, or an error in one sentence."""

import copy
import re
from functools import partial

import attnpack
import pytest
import torch
from ranks import run_checks
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


def distance(case: str, mesh: DeviceMesh) -> float:
    """From the result of one process, as a part of its largest number."""
    make, split, measure = CASES[case]
    module = make()
    plan = {name: ColwiseParallel() for name in split.split()}
    for name in JOIN_MODEL if case == "model" else ["o_proj"] if hasattr(module, "o_proj") else []:
        plan[name] = RowwiseParallel()
    divided = parallelize_module(copy.deepcopy(module), mesh, plan)
    torch.manual_seed(1)
    wanted = measure(module)
    torch.manual_seed(1)
    return float((measure(divided) - wanted).detach().abs().max() / wanted.detach().abs().max())


def all_outcomes() -> dict[str, float | str]:
    """For each case the distance, or the error."""
    mesh = init_device_mesh("cpu", (2,))
    return run_checks({case: partial(distance, case, mesh) for case in CASES})


REFUSED = {
    "one kv head": "give widths 12, 3, 3, want num_heads 4 and num_kv_heads 1 of head_dim 6",
    "queries alone": "give widths 12, 12, 12, want num_heads 4 and num_kv_heads 2",
    "one head": "give widths 12, 12, 12, want num_heads 1 and num_kv_heads 1 of head_dim 24",
    "mask by head": r"mask has shape \[1, 4, 7, 7\], one for each of num_heads 4 heads, but the projections give 2",
    "latent, mask by head": r"mask has shape \[1, 4, 7, 7\], one for each of num_heads 4 heads, but .* a rank's share",
    "sinks": "sinks: got it for 4 heads, but the projections give 2",
    "alibi": "alibi: got it for 4 heads, but the projections give 2",
    "head map": "head_map: got it for 4 heads, but the projections give 2",
    "norms": "q_norm.weight: its gradient would be that of only this rank's heads",
    "latent with gradients": "kv_a_proj_with_mqa.weight: its gradient would be that of only this rank's heads",
    "latent, queries alone": r"kv_b has shape \[36, 10\]",
    "latent, latents alone": "kv_b_proj gives width 18, want 4 heads of 9 dims",
}


@pytest.fixture(scope="module")
def outcomes(two_ranks):
    return two_ranks.run(all_outcomes)


@pytest.mark.parametrize("case", [case for case in CASES if case not in REFUSED])
def test_shares_give_the_numbers_of_one_process(outcomes, case):
    for rank in outcomes:
        assert isinstance(rank[case], float) and rank[case] < 1e-5, rank[case]


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shared_is_refused(outcomes, case):
    for rank in outcomes:
        assert re.match(f"ValueError: attnpack: .*{REFUSED[case]}", str(rank[case])), rank[case]
