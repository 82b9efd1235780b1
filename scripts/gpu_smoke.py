"""The first calls on a GPU: one of each kind of kernel, against the formula in fp64, and the kernels' names.

python -W error scripts/gpu_smoke.py [--names]    --names: ask the profiler too, not under compute-sanitizer
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

from attnpack import _C, attention, attention_varlen, reference  # noqa: E402

os.environ.setdefault("ATTNPACK_CUDA", "own")  # not torch's kernels in place of ours

MOST_ERROR = 2e-2
# The kernels of Hopper, in place of which others run elsewhere and with ATTNPACK_CUDA_SM90=0.
ON_SM90 = {
    "prefill_kernel": "forward_sm90_kernel",
    "latent_kernel": "latent_sm90_kernel",
    "gradient_mma_kernel": "key_gradient_kernel",
}

Case = tuple[str, tuple[str, ...], Callable[[], torch.Tensor], Callable[[], torch.Tensor]]


def make_cases(device: str) -> Iterator[Case]:
    """(name, kernels, our call on the device, the same in fp64 on the CPU)."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    def there(settings):
        return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in settings.items()}

    def pair(query, key, value, **settings):
        here = functools.partial(attention, *(x.to(device) for x in (query, key, value)), **there(settings))
        exact = functools.partial(reference.attention, *(x.double() for x in (query, key, value)), **settings)
        return here, exact

    # Two packed sequences: 100 queries of 130 keys, and 40 of 60.
    ends, lengths = {"q": torch.tensor([0, 100, 140]), "k": torch.tensor([0, 130, 190])}, ((100, 40), (130, 60))

    def packed(query, key, value, **pages):
        where = pages or {"cu_seqlens_k": ends["k"]}
        return attention_varlen(query, key, value, ends["q"].to(query.device), **there(where), causal=True)

    def each(query, key, value):
        pieces = zip(query.split(lengths[0]), key.split(lengths[1]), value.split(lengths[1]), strict=True)
        batches = ([x.unsqueeze(0).transpose(1, 2) for x in piece] for piece in pieces)
        return torch.cat([reference.attention(*x, causal=True, q_offset="end")[0].transpose(0, 1) for x in batches])

    def gradients(tensors, ours=attention, formula=reference.attention, **settings):
        def gradient(attend, where, dtype):
            leaves = [x.detach().to(where, dtype).requires_grad_() for x in tensors]
            out = attend(*leaves, **(there(settings) if where == device else settings))
            # One NaN would make the whole sum NaN, so numbers that are NaN count as 0.
            total = out.nan_to_num(0).square().sum()
            return torch.cat([x.flatten() for x in torch.autograd.grad(total, leaves)]).nan_to_num(0)

        return (
            functools.partial(gradient, ours, device, torch.bfloat16),
            functools.partial(gradient, formula, "cpu", torch.float64),
        )

    query, key, value = draw(2, 8, 1, 128), draw(2, 2, 3000, 128), draw(2, 2, 3000, 128)
    yield "decode", ("decode_kernel", "merge_kernel"), *pair(query, key, value)
    query, key, value = draw(1, 8, 300, 128), draw(1, 2, 300, 128), draw(1, 2, 300, 128)
    yield "prefill", ("prefill_kernel",), *pair(query, key, value, causal=True)
    yield "backward", ("gradient_mma_kernel",), *gradients((query, key, value), causal=True)
    few = [x[:, :heads, :140].contiguous() for x, heads in ((query, 4), (key, 1), (value, 1))]
    poisoned = [few[0], *(x.clone().index_fill_(2, torch.arange(90, 140), torch.nan) for x in few[1:])]
    lens = torch.tensor([90])
    yield "NaN behind the keys", ("prefill_kernel",), *pair(few[0], few[1], poisoned[2], kv_lens=lens)
    yield "backward, NaN behind the keys", ("gradient_mma_kernel",), *gradients(poisoned, kv_lens=lens)
    mask = torch.rand(300, 300, generator=generator) < 0.7
    yield "mask", ("prefill_kernel",), *pair(query, key, value, mask=mask)
    yield "backward, mask", ("gradient_mma_kernel",), *gradients((query, key, value), mask=mask)
    wide = draw(1, 8, 150, 192), draw(1, 2, 150, 192), draw(1, 2, 150, 128)
    yield "backward, D 192 and 128", ("gradient_mma_kernel",), *gradients(wide, causal=True)
    yield "mask and cap", ("prefill_kernel",), *pair(query, key, value, mask=mask, softcap=3.0)
    rules = {"mask": mask, "softcap": 3.0}
    yield "backward, mask and cap", ("gradient_mma_kernel",), *gradients((query, key, value), **rules)
    for dim in (64, 256):
        query, key, value = draw(1, 4, 200, dim), draw(1, 2, 200, dim), draw(1, 2, 200, dim)
        yield f"prefill, D {dim}", ("prefill_kernel",), *pair(query, key, value, causal=True)
        if dim == 64:
            yield "backward, D 64", ("gradient_mma_kernel",), *gradients((query, key, value), causal=True)
    rows = draw(140, 8, 128), draw(190, 2, 128), draw(190, 2, 128)
    here, exact = [x.to(device) for x in rows], functools.partial(each, *(x.double() for x in rows))
    yield "packed", ("prefill_kernel",), functools.partial(packed, *here), exact
    yield "packed, backward", ("gradient_mma_kernel",), *gradients(rows, packed, each)
    # 13 pages of 16 keys: nine of the first sequence, four of the second. Hopper has no kernel of its own for them.
    table = torch.tensor([[7, 2, 11, 0, 5, 12, 3, 9, 1], [6, 10, 4, 8, -1, -1, -1, -1, -1]], dtype=torch.int32)
    pools = [torch.full((13, 16, 2, 128), torch.nan, dtype=torch.bfloat16) for _ in range(2)]
    for pool, x in zip(pools, rows[1:], strict=True):
        for numbers, keys in zip(table, x.split(lengths[1]), strict=True):
            for number, page in zip(numbers, keys.split(16), strict=False):
                pool[number, : len(page)] = page
    pages = {"block_table": table, "kv_lens": torch.tensor(lengths[1])}
    call = functools.partial(packed, here[0], *(x.to(device) for x in pools), **pages)
    yield "packed, pages", ("prefill_kernel<",), call, exact
    empty = draw(2, 4, 64, 128), draw(2, 2, 0, 128), draw(2, 2, 0, 128)
    yield "no keys", (), *pair(*empty)
    yield "no keys, backward", (), *gradients(empty)
    yield "no queries, backward", (), *gradients((draw(2, 4, 0, 64), draw(2, 2, 64, 64), draw(2, 2, 64, 64)))
    query, latent = draw(1, 16, 1, 576), draw(1, 1, 700, 576).to(device)
    exact = functools.partial(
        reference.attention, query.double(), latent.cpu().double(), latent.cpu().double()[..., :512]
    )
    yield "latent", ("latent_kernel",), functools.partial(attention, query.to(device), latent, latent[..., :512]), exact
    query, key, value = (x.float() for x in (draw(1, 4, 20, 40), draw(1, 2, 50, 40), draw(1, 2, 50, 24)))
    yield "exact", ("exact_kernel",), *pair(query, key, value)


def error_of(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest error, as a share of the largest number; NaN where the results have different NaN."""
    got = got.cpu().double()
    if not got.numel() or not wanted.any():
        return float(got.any())
    return ((got - wanted).abs().max() / wanted.abs().max()).item()


def kernel_names(call: Callable) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    return {event.key for event in profile.key_averages()}


def main(names: bool) -> int:
    device = torch.cuda.current_device()
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, our kernels run: "
          f"{_C.cuda_kernels_run(device)}")  # fmt: skip
    failures = int(not _C.cuda_kernels_run(device))
    has_sm90 = torch.cuda.get_device_capability(device) == (9, 0) and os.environ.get("ATTNPACK_CUDA_SM90") != "0"
    for name, kernels, call, exact in make_cases("cuda"):
        error = error_of(call(), exact())
        missing = []
        if names:
            seen = kernel_names(call)
            wanted = [ON_SM90.get(kernel, kernel) if has_sm90 else kernel for kernel in kernels]
            missing = [kernel for kernel in wanted if not any(kernel in each for each in seen)]
        failures += bool(missing) or not error < MOST_ERROR
        print(f"{name:<30} largest error {error:.1e} of the largest number{', MISSING ' if missing else ''}"
              f"{' '.join(missing)}")  # fmt: skip
    return int(failures > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", action="store_true", help="ask the profiler which kernels ran")
    sys.exit(main(parser.parse_args().names))
