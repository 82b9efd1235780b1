"""Counts what a rank sends in collectives."""

import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountedBytes(CommDebugMode):
    """`collectives` counts them; `sent` adds up the bytes that this rank sends to others, in collectives of floats."""

    def __init__(self):
        super().__init__()
        self.collectives, self.sent = 0, 0

    def __enter__(self):  # without torch's tracker of modules, which fails where modules call each other
        return TorchDispatchMode.__enter__(self)

    def __exit__(self, *error):
        return TorchDispatchMode.__exit__(self, *error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if func._overloadpacket in self.comm_registry:
            self.collectives += 1
            x = tree_leaves(args)[0]
            if x.is_floating_point():
                self.sent += x.element_size() * self._numbers(func, x, args)
        return result

    def _numbers(self, func, x, args):
        name, ranks = func._overloadpacket.__name__, dist.get_world_size()
        if name == "all_gather_into_tensor":
            return x.numel() * (ranks - 1)
        if name == "reduce_scatter_tensor":
            return x.numel() // ranks * (ranks - 1)
        if name == "all_to_all_single":
            return sum(args[2]) - args[2][dist.get_rank()]
        if name == "all_reduce":
            return 2 * x.numel() * (ranks - 1) // ranks
        raise AssertionError(f"no rule for {name}")
