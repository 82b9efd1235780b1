"""torch's own wrappers around our modules: FSDP2, DistributedDataParallel, checkpoints, and all of them over
tensor_parallel."""

import copy

import attnpack
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from attnpack.distributed import context_parallel, shard_sequence, tensor_parallel
from ranks import run_checks, unequal
from shared_modules import MODELS, distance, made
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

LENGTH, BATCH, STEPS = 8, 4, 3
IDS = (torch.arange(BATCH * (LENGTH + 1)) * 7 % 5).view(BATCH, LENGTH + 1)


def ranks():
    return dist.get_world_size()


def line(name="all", size=None):
    return init_device_mesh("cpu", (size or ranks(),), mesh_dim_names=(name,))


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def step(model, optimizer, inputs, labels, scale=1.0):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    (loss * scale).backward()
    optimizer.step()


def train(model, share=slice(None), steps=STEPS, optimizer=None):
    """Steps on a share of the batch; wrappers average the gradients."""
    optimizer = optimizer or optimizer_of(model)
    for _ in range(steps):
        step(model, optimizer, IDS[share, :-1], IDS[share, 1:])
    return optimizer


def own_rows(groups=None, group=None):
    groups, group = groups or ranks(), dist.get_rank() if group is None else group
    return slice(group * BATCH // groups, (group + 1) * BATCH // groups)


def weights(model):
    return {name.removeprefix("module."): p for name, p in model.named_parameters()}


def farthest(model, wanted):
    got, wanted = weights(model), weights(wanted)
    assert list(got) == list(wanted)
    return max(distance(got[name], wanted[name]) for name in wanted)


def sharded(model, mesh, **settings):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def fsdp(name):
    whole = made(MODELS[name])
    model = sharded(copy.deepcopy(whole), line())
    train(whole), train(model, own_rows())
    return farthest(model, whole)


def fsdp_in_bf16():
    """Against the same rounding in one process."""
    model = made(MODELS["model"])
    wanted = copy.deepcopy(model).bfloat16()(IDS).float()
    sharded(model, line(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return distance(model(IDS).float(), wanted)


def ddp(name):
    whole = made(MODELS[name])
    model = nn.parallel.DistributedDataParallel(copy.deepcopy(whole))
    train(whole), train(model, own_rows())
    return farthest(model, whole)


def ddp_over_context():
    """Every rank has all sequences and a part of each; DDP averages what should be a sum."""
    whole = made(MODELS["tied"])
    model = nn.parallel.DistributedDataParallel(copy.deepcopy(whole))
    train(whole, steps=1)
    inputs, labels = (shard_sequence(x, layout="zigzag") for x in (IDS[:, :-1], IDS[:, 1:]))
    with context_parallel(layout="zigzag"):
        step(model, optimizer_of(model), inputs, labels)  # the mean over tokens makes it one again
    return farthest(model, whole)


def two_dims(name):
    """FSDP2 over one dim of a mesh, tensor parallelism over the other one."""
    mesh = init_device_mesh("cpu", (ranks() // 2, 2), mesh_dim_names=("dp", "tp"))
    whole = made(MODELS[name])
    model = sharded(tensor_parallel(copy.deepcopy(whole), mesh["tp"]), mesh["dp"])
    train(whole), train(model, own_rows(ranks() // 2, mesh.get_local_rank("dp")))
    return farthest(model, whole)


def loaded(name):
    """Whole tensors into a model with both: the rows are divided twice, in numbers that do not divide."""
    mesh = init_device_mesh("cpu", (ranks() // 2, 2), mesh_dim_names=("dp", "tp"))
    whole = made(MODELS[name])
    model = sharded(tensor_parallel(copy.deepcopy(whole), mesh["tp"]), mesh["dp"])
    state = {key: tensor * 2 for key, tensor in whole.state_dict().items()}
    model.load_state_dict(state)
    found = max(distance(p, state[key]) for key, p in weights(model).items())
    whole.load_state_dict(state)
    return max(found, distance(model(IDS), whole(IDS)))


def divided_alone():
    """fully_shard of one projection, under attention that has shares."""
    mesh = init_device_mesh("cpu", (ranks() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(made(MODELS["model"]), mesh["tp"])
    fully_shard(model.layers[0].self_attn.q_proj, mesh=mesh["dp"])
    model(IDS)


def generated():
    mesh = init_device_mesh("cpu", (ranks() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = sharded(tensor_parallel(made(MODELS["tied"]), mesh["tp"]), mesh["dp"])
    model.generate(IDS, max_new_tokens=2)


def saved(folder):
    """Two steps, a checkpoint, one more step."""
    model = tensor_parallel(made(MODELS["tied"]), line("tp"))
    optimizer = train(model, steps=2)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=folder)
    train(model, steps=1, optimizer=optimizer)
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def resume(model, folder):
    """Does as a run after a kill: reads the checkpoint, and goes on with the step that was lost."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = optimizer_of(model)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(model, steps=1, optimizer=optimizer)
    return model


def resumed(folder, how):
    model = made(MODELS["tied"])
    model = tensor_parallel(model, line("tp")) if how == "tensor" else sharded(model, line())
    return {name: p.full_tensor().detach() for name, p in resume(model, folder).named_parameters()}


def from_one_process():
    """A state dict of one process goes into a shared model, and comes back."""
    whole = made(MODELS["model"])
    model = tensor_parallel(made(lambda: attnpack.CausalLM(19, 24, 2, 4, 2, hidden_dim=20)), line("tp"))
    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in whole.state_dict().items():
            assert own[name].shape == tensor.shape
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, {n: t.clone() * 2 for n, t in whole.state_dict().items()}, options=options)
    back = get_model_state_dict(model, options=options)
    doubled = {name: tensor * 2 for name, tensor in whole.state_dict().items()}
    if dist.get_rank() == 0 or back:
        assert list(back) == list(doubled)
        return max(distance(back[name], doubled[name]) for name in doubled)
    return 0.0


WRONG = {"projection": divided_alone, "generate": generated}
SAYS = {"projection": "fully_shard divides a single linear layer", "generate": "generate: got a "}


def program(only=None):
    checks = {f"fsdp {name}": lambda name=name: fsdp(name) for name in ("model", "tied", "latent model")}
    checks |= {f"ddp {name}": lambda name=name: ddp(name) for name in ("tied", "latent model")}
    checks |= {"ddp over context": ddp_over_context, "full state": from_one_process}
    if ranks() == 4:
        checks = {f"two dims {name}": lambda name=name: two_dims(name) for name in ("model", "tied", "latent model")}
        checks |= {f"loaded {name}": lambda name=name: loaded(name) for name in ("model", "tied", "latent model")}
        checks |= {f"wrong {name}": check for name, check in WRONG.items()}
    return run_checks(checks)


def test_two_ranks_train_as_one(two_ranks):
    outcomes = two_ranks.run(program)
    assert not unequal(outcomes, outcomes[0], 2e-5)


def test_mixed_precision_of_fsdp_rounds_as_one_process(two_ranks):
    assert max(two_ranks.run(fsdp_in_bf16)) < 0.02


def test_four_ranks_train_as_one(four_ranks):
    outcomes = four_ranks.run(program)
    equal = [name for name in outcomes[0] if not name.startswith("wrong")]
    assert len(equal) == 6 and not unequal(outcomes, equal, 2e-5)
    for rank in outcomes:
        assert all(str(rank[f"wrong {name}"]).startswith(f"ValueError: attnpack: {SAYS[name]}") for name in WRONG)


@pytest.fixture(scope="module")
def checkpoint(four_ranks, tmp_path_factory):
    """(folder, weights after one more step) of four ranks."""
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    return folder, four_ranks.run(saved, folder)[0]


@pytest.mark.parametrize("how", ["tensor", "fsdp"])
def test_a_checkpoint_of_four_ranks_is_read_by_two(checkpoint, two_ranks, how):
    folder, wanted = checkpoint
    for got in two_ranks.run(resumed, folder, how):
        assert max(distance(got[name], wanted[name]) for name in wanted) < 1e-5


def test_a_checkpoint_of_four_ranks_is_read_by_one(checkpoint):
    folder, wanted = checkpoint
    model = resume(made(MODELS["tied"]), folder)
    assert max(distance(p, wanted[name]) for name, p in model.named_parameters()) < 1e-5
