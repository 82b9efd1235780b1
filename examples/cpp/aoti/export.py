"""Compiles a layer with AOTInductor: ``python export.py layer.pt2 inputs.pt``. Any batch size runs in C++."""

import sys

import attnpack
import torch
from torch.export import Dim


class Layer(torch.nn.Module):
    """A layer, and a call of the operator with optional tensors, a list and an optional number."""

    def __init__(self):
        super().__init__()
        self.layer = attnpack.GroupedQueryAttention(32, 4, 2, causal=True, rope=attnpack.RotaryEmbedding(8))
        self.sinks = torch.nn.Parameter(torch.randn(5))

    def forward(self, x, query, key, value, mask):
        out, lse = attnpack.attention(
            query, key, value, mask, causal=True, q_offset="end", sinks=self.sinks, head_map=[2, 0, 0, 1, 0],
            scale=0.3, return_lse=True,
        )  # fmt: skip
        return self.layer(x), out, lse


def make_inputs(batch: int) -> list[torch.Tensor]:
    shapes = (5, 32), (5, 3, 8), (3, 7, 8), (3, 7, 6)
    return [*(torch.randn(batch, *shape) for shape in shapes), torch.rand(7) > 0.2]


if __name__ == "__main__":
    torch.manual_seed(0)
    layer, batch = Layer().eval(), {0: Dim("batch", min=1, max=64)}
    with torch.no_grad():
        program = torch.export.export(layer, tuple(make_inputs(2)), dynamic_shapes=([batch] * 4 + [None]))
        torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1])
    torch.save(make_inputs(3), sys.argv[2])
