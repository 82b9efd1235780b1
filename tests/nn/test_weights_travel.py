"""Weights between the languages through safetensors files, for every module: the same names and the same bits."""

import pytest
import torch
from attnpack.checkpoints import load_safetensors, save_safetensors
from module_cases import CASES, make_case
from safetensors.torch import load_file, save_file


def trained(module, inputs) -> dict[str, torch.Tensor]:
    """The tensors of a C++ module after a step of training there."""
    module.train()
    out = module.forward(*inputs)
    (out[0] if isinstance(out, tuple) else out).square().mean().backward()
    before = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    with torch.no_grad():
        for _, parameter in module.named_parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad)
    after = module.state_dict()
    learned = [name for name, parameter in module.named_parameters() if parameter.grad is not None]
    assert not learned or any(not torch.equal(after[name], tensor) for name, tensor in before.items())
    return after


def assert_same(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_weights_trained_in_cpp_load_in_python_and_back(case, tmp_path):
    module, inputs = make_case(case)
    other = make_case(case, seed=1)[0]
    in_cpp = module.cpp().clone()
    tensors = trained(in_cpp, inputs)
    save_safetensors(tensors, tmp_path / "cpp.safetensors")
    missing, unexpected = other.load_state_dict(load_file(tmp_path / "cpp.safetensors"), strict=True)
    assert not missing and not unexpected
    assert_same(other.state_dict(), tensors)

    save_file(module.state_dict(), tmp_path / "python.safetensors")
    assert in_cpp.load_state_dict(load_safetensors(tmp_path / "python.safetensors")) == ([], [])
    assert_same(in_cpp.state_dict(), module.state_dict())
