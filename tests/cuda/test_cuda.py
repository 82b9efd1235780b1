"""The operator and the layers around it on a CUDA device: the grid of the CPU's tests, by the same rule, against fp64
on the CPU."""

import functools
import itertools
import os

import pytest
import torch
from attnpack import _C, _load, apply_rope, attention, attention_varlen, backend, reference
from attnpack.nn.linear import project
from attnpack.ops import dequantize_rows, quantize_rows
from op_cases import (
    COVERING,
    DTYPES,
    EMPTY,
    INF,
    NAN,
    Inputs,
    check,
    compute_results,
    describe,
    draw,
    make_empty,
    make_inputs,
)
from torch.testing import assert_close

if not torch.cuda.is_available():
    pytest.skip("torch has no CUDA device here", allow_module_level=True)

# Where no kernel fits, attnpack warns and runs ATen ops: nothing of ours would be tested.
pytestmark = pytest.mark.filterwarnings("error:attnpack:UserWarning")

HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def our_kernels(monkeypatch):
    """Plain calls run on our kernels on every device, but in the test of torch's."""
    monkeypatch.setenv("ATTNPACK_CUDA", "own")


def on_device(x):
    if isinstance(x, Inputs):
        settings = {name: on_device(each) for name, each in x.settings.items()}
        tensors = (x.query, x.key, x.value, x.mask)
        return Inputs(*map(on_device, tensors), settings, on_device(x.grad_out), on_device(x.grad_lse))
    if not isinstance(x, torch.Tensor):
        return x
    there = torch.empty(
        0, dtype=x.dtype, device="cuda"
    ).set_(  # with its strides, because layouts are part of the cases
        x.untyped_storage().cuda(), x.storage_offset(), x.shape, x.stride()
    )
    return there


def check_on_device(inputs: Inputs, *, gradients: bool = True):
    ours = compute_results(attention, on_device(inputs), gradients=gradients)
    plain = compute_results(reference.attention, on_device(inputs), gradients=gradients)
    truth = compute_results(reference.attention, inputs.to(torch.float64), gradients=gradients)
    check(
        {name: x.cpu() for name, x in ours.items()},
        {name: x.cpu() for name, x in plain.items()},
        truth,
        inputs.query.dtype,
    )


def test_the_kernels_run_here():
    assert _load.CUDA_LIBRARY.exists(), "build with -DATTNPACK_CUDA=ON"
    assert _load.load_cuda()
    assert _C.cuda_kernels_run(torch.cuda.current_device()), "device or driver too old for this build"


def kernel_names(call) -> set[str]:
    """The kernels that a call launches, by the profiler."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    return {event.key for event in profile.key_averages()}


ON_SM90 = {
    "prefill_kernel": "forward_sm90_kernel",
    "latent_kernel": "latent_sm90_kernel",
    "gradient_mma_kernel": "key_gradient_kernel",
}
HAS_SM90 = torch.cuda.get_device_capability() == (9, 0) and os.environ.get("ATTNPACK_CUDA_SM90") != "0"


@pytest.mark.parametrize(
    "kernels, heads, lengths, dims",
    [
        (("decode_kernel", "merge_kernel"), (8, 2), (1, 5000), (128, 128)),
        (("prefill_kernel", "gradient_mma_kernel", "sum_gradient_kernel"), (8, 2), (300, 300), (128, 128)),
        (("latent_kernel",), (16, 1), (1, 300), (576, 512)),
        (("exact_kernel",), (2, 2), (20, 30), (40, 20)),
    ],
)
def test_our_kernels_run(kernels, heads, lengths, dims):
    dtype = torch.float32 if kernels == ("exact_kernel",) else torch.bfloat16
    query = draw(1, heads[0], lengths[0], dims[0], dtype=dtype).cuda()
    key = draw(1, heads[1], lengths[1], dims[0], dtype=dtype).cuda()
    value = key[..., : dims[1]] if kernels == ("latent_kernel",) else draw(*key.shape[:3], dims[1], dtype=dtype).cuda()
    if "gradient_mma_kernel" in kernels:
        query.requires_grad_()

    def call():
        out = attention(query, key, value)
        if out.requires_grad:
            out.sum().backward()

    names = kernel_names(call)
    for kernel in kernels:
        wanted = ON_SM90.get(kernel, kernel) if HAS_SM90 else kernel
        assert any(wanted in name for name in names), names


@pytest.mark.parametrize("causal", [False, True])
def test_torch_kernels_give_our_results(causal, monkeypatch):
    """Where the table names a kernel of torch (docs/cuda.md)."""
    monkeypatch.setenv("ATTNPACK_CUDA", "fastest")
    backend.reset_report()
    check_on_device(make_inputs(torch.bfloat16, "gqa", (130, 130), (64, 64), positions={"causal": causal}))
    ran = backend.report()["cuda"]["ran_torch"]
    wanted = {(8, 0): "flash", (8, 6): "flash", (8, 9): "flash", (12, 0): "flash", (10, 0): "cudnn", (10, 3): "cudnn"}
    name = wanted.get(torch.cuda.get_device_capability())
    assert set(ran) == ({f"{name}, forward", f"{name}, backward"} if name else set())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("q_len", [3, 50])
@pytest.mark.parametrize("empty", EMPTY)
def test_empty_tensors(empty, q_len, dtype):
    """No kernel starts without blocks, and the driver refuses maps of size 0."""
    results = []
    for where in ("cuda", "cpu"):
        torch.manual_seed(0)
        leaves = [x.to(where).requires_grad_() for x in make_empty(empty, q_len=q_len, dtype=dtype, dim=64)]
        out, lse = attention(*leaves, causal=True, q_offset=2, scale=0.5, return_lse=True)
        gradients = torch.autograd.grad(out.sum() + lse.sum(), leaves, allow_unused=True)
        results.append([out, lse, *gradients])
    for here, there in zip(*results, strict=True):
        assert_close(here.cpu(), there, atol=0.05 if dtype == torch.bfloat16 else 1e-5, rtol=0.05)


@pytest.mark.parametrize("case", COVERING, ids=describe)
def test_the_operator_grid(case):
    check_on_device(make_inputs(**case))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "heads, lengths, dims",
    [
        ("mqa", (1, 5000), (64, 64)),  # decode: packed group, keys in parts
        ("gqa", (4, 3000), (128, 128)),
        ("one", (1, 2000), (256, 256)),
        ("gqa", (300, 300), (64, 64)),  # prefill
        ("mqa", (200, 700), (128, 128)),
        ("one", (130, 257), (192, 128)),
        ("one", (100, 300), (256, 256)),
        ("mqa", (3, 900), (576, 512)),  # too wide for tensor cores
    ],
)
def test_shapes_of_the_tensor_core_kernels(heads, lengths, dims, dtype):
    for positions in (
        {},
        {"causal": True, "q_offset": "end"},
        {"window": (100, 0), "q_offset": "end"},
        {"chunk": 100, "q_offset": "end"},
    ):
        check_on_device(make_inputs(dtype, heads, lengths, dims, positions=positions), gradients=lengths[0] > 16)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("heads, q_len", [(16, 1), (20, 1), (128, 1), (16, 3)])
def test_latent_decode(heads, q_len, dtype):
    query, key = draw(2, heads, q_len, 576, dtype=dtype), draw(2, 1, 1000, 576, dtype=dtype, seed=1)
    lens = torch.tensor([1000, 700])
    latent = key.cuda()
    got = attention(query.cuda(), latent, latent[..., :512], kv_lens=lens.cuda(), q_offset="end", causal=True)
    settings = {"kv_lens": lens, "q_offset": lens - q_len, "causal": True}
    plain = reference.attention(query, key, key[..., :512], **settings)
    exact = reference.attention(query.double(), key.double(), key[..., :512].double(), **settings)
    check({"out": got.cpu()}, {"out": plain}, {"out": exact}, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [(1, 700), (70, 130)], ids=["decode", "prefill"])
def test_excluded_keys_never_reach_a_result(dtype, lengths):
    inputs = make_inputs(dtype, "gqa", lengths, (64, 64), mask="bool")
    inputs.mask[:, :, :, 5] = False
    inputs.mask[:, :, : lengths[0] // 2, 6] = False
    inputs.mask[:, :, lengths[0] // 2 :, 6] = True
    clean = compute_results(attention, on_device(inputs))
    for poison in (NAN, INF):
        inputs.key[:, :, 5], inputs.value[:, :, 5] = poison, poison
        for name, got in compute_results(attention, on_device(inputs)).items():
            assert torch.equal(got, clean[name]), name
    inputs.value[:, :, 6] = NAN  # some rows see this key
    out = attention(*(on_device(x) for x in (inputs.query, inputs.key, inputs.value, inputs.mask)))
    assert torch.equal(out[:, :, : lengths[0] // 2], clean["out"][:, :, : lengths[0] // 2])
    assert out[:, :, lengths[0] // 2 :].isnan().all()


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("lengths", [(1, 700), (70, 130)], ids=["decode", "prefill"])
def test_the_smallest_number_in_a_mask_excludes_nothing(dtype, lengths):
    """As Hugging Face's models mark padding: whole steps of keys hold fp32's least number."""
    inputs = make_inputs(dtype, "gqa", lengths, (64, 64), mask="float")
    inputs.mask = inputs.mask.clone()
    inputs.mask[..., :70] = torch.finfo(inputs.mask.dtype).min
    check_on_device(inputs)


def test_an_allowed_nan_reaches_the_rows_that_attend_it():
    query, key, value = (draw(1, 2, 40, 64, dtype=torch.bfloat16, seed=n).cuda() for n in range(3))
    value[:, :, 20] = NAN
    out = attention(query, key, value, causal=True)
    assert out[:, :, :20].isfinite().all() and out[:, :, 20:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_draws_as_on_the_cpu(dtype):
    tensors = [draw(2, 4, 40, 64, dtype=dtype, seed=n).requires_grad_() for n in range(3)]
    seed = torch.tensor([123])
    for device in ("cpu", "cuda"):
        here = [x.detach().to(device).requires_grad_() for x in tensors]
        out = torch.ops.attnpack.attention(*here, causal=True, dropout_p=0.3, dropout_seed=seed)[0]
        results = [out, *torch.autograd.grad(out.sum(), here)]
        if device == "cpu":
            wanted = results
    for got, cpu in zip(results, wanted, strict=True):
        assert_close(got.cpu(), cpu, atol=3e-2 if dtype == torch.bfloat16 else 1e-5, rtol=2e-2)


def test_lengths_out_of_range_are_clamped_or_refused(monkeypatch):
    query, key, value = (draw(2, 4, n, 64, dtype=torch.bfloat16).cuda() for n in (1, 300, 300))
    lens, clamped = torch.tensor([500, -3], device="cuda"), torch.tensor([300, 0], device="cuda")
    wanted = attention(query, key, value, kv_lens=clamped)
    assert torch.equal(attention(query, key, value, kv_lens=lens), wanted)
    monkeypatch.setenv("ATTNPACK_CHECK", "1")
    assert torch.equal(attention(query, key, value, kv_lens=clamped), wanted)
    with pytest.raises(ValueError, match="kv_lens"):
        attention(query, key, value, kv_lens=lens)
    monkeypatch.delenv("ATTNPACK_CHECK")
    end = {"q_offset": "end", "window": (5, 0)}
    wanted = attention(query, key, value, kv_lens=clamped, **end)
    assert torch.equal(attention(query, key, value, kv_lens=lens, **end), wanted)


@pytest.mark.parametrize("lengths", [(1, 3000), (200, 200)], ids=["decode", "prefill"])
def test_results_are_bitwise_the_same_again(lengths):
    inputs = on_device(make_inputs(torch.bfloat16, "gqa", lengths, (64, 64)))
    first = compute_results(attention, inputs)
    for _ in range(5):
        for name, got in compute_results(attention, inputs).items():
            assert torch.equal(got, first[name]), name


def test_other_streams_and_graphs():
    query, key, value = (draw(1, 4, n, 64, dtype=torch.bfloat16).cuda() for n in (1, 2000, 2000))
    wanted = attention(query, key, value)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            got = attention(query, key, value)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(got, wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attention(query, key, value)
    graph.replay()
    assert torch.equal(got, wanted)


def test_a_captured_graph_draws_new_pairs_at_every_replay():
    query, key, value = (draw(1, 4, n, 64).cuda() for n in (64, 300, 300))
    attention(query, key, value, dropout_p=0.5)  # one call before the capture, so that everything is loaded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attention(query, key, value, dropout_p=0.5)
    graph.replay()
    first = got.clone()
    graph.replay()
    assert not torch.equal(got, first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_are_captured(dtype):
    inputs = [draw(1, 4, 130, 64, dtype=dtype, seed=n).cuda() for n in range(4)]
    other = [draw(1, 4, 130, 64, dtype=dtype, seed=10 + n).cuda() for n in range(4)]

    def gradients(query, key, value, grad_out):
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        return torch.autograd.grad(attention(*leaves, causal=True), leaves, grad_out)

    wanted = gradients(*other)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gradients(*inputs)
    for x, y in zip(inputs, other, strict=True):
        x.copy_(y)
    graph.replay()
    for x, y in zip(got, wanted, strict=True):
        assert torch.equal(x, y)


def test_a_rotating_append_is_captured():
    """It runs once before the capture, so that its frequencies are on the device."""
    new = [draw(1, heads, 1, 64, dtype=torch.bfloat16).cuda() for heads in (4, 2, 2)]
    held, plain = ([torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2)] for _ in range(2))
    length, plain_length = (torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2))
    append = functools.partial(torch.ops.attnpack.kv_cache_append_rotated_, inv_freq=[1.0, 0.1], factor=1.0,
                               interleaved=False, new_lens=None, limit=None)  # fmt: skip
    wanted = [append(*plain, plain_length, *new) for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = append(*held, length, *new)
    for each in wanted:
        graph.replay()
        assert torch.equal(got, each)
    assert torch.equal(length, plain_length) and all(map(torch.equal, held, plain))


@pytest.mark.long
@pytest.mark.parametrize("shape", [(2, 8, 70_000, 2048), (1, 1, 17_000_000, 128)], ids=["wide rows", "long"])
def test_beyond_32_bits(shape):
    batch, heads, length, stride = shape
    key = torch.zeros(batch, heads, length, stride, dtype=torch.bfloat16, device="cuda")[..., :64]
    assert key.stride(1) * heads * batch > 2**31
    value = key.clone(memory_format=torch.preserve_format)
    value[..., -1, :] = 1
    out = attention(key[:, :, :1], key, value, kv_lens=torch.full((batch,), length, device="cuda"))
    assert_close(out.float(), torch.full_like(out, 1 / length, dtype=torch.float32), rtol=2e-2, atol=0)


@pytest.mark.long
def test_gradients_beyond_32_bits():
    batch, heads, length, stride = 2, 8, 70_000, 2048
    base = torch.zeros(batch, heads, length, stride, dtype=torch.bfloat16, device="cuda")
    key = base[..., :64]
    assert key.stride(1) * heads * batch > 2**31
    value = torch.zeros_like(key, memory_format=torch.preserve_format)
    query = draw(batch, heads, 1, 64, dtype=torch.bfloat16).cuda()
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    out = attention(*leaves)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert_close(grads[2].float(), torch.full_like(grads[2], 1 / length, dtype=torch.float32), rtol=2e-2, atol=0)
    assert not grads[0].any() and not grads[1].any()


@pytest.mark.parametrize("page_size, dims", [(16, (64, 64)), (7, (128, 128)), (64, (192, 256))])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_pages_give_the_bits_of_one_tensor(page_size, dims, dtype):
    lens = torch.tensor([700, 33])
    pages = -(-700 // page_size)
    table = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(0)).int().view(2, pages)
    pools = [draw(2 * pages, page_size, 2, dim, dtype=dtype, seed=n).cuda() for n, dim in enumerate(dims)]
    query = draw(2, 8, dims[0], dtype=dtype, seed=2).cuda()
    ends = torch.arange(3, dtype=torch.int32, device="cuda")
    plain = [
        pool[table.flatten().cuda()].view(2, pages * page_size, 2, -1)[:, :700].transpose(1, 2).contiguous()
        for pool in pools
    ]
    wanted = attention(query.unsqueeze(2), *plain, kv_lens=lens.cuda(), causal=True, q_offset="end").squeeze(2)
    call = functools.partial(
        attention_varlen,
        query,
        *pools,
        ends,
        block_table=table.cuda(),
        kv_lens=lens.cuda(),
        max_seqlen_q=1,
        causal=True,
    )
    assert_close(call(), wanted, rtol=2e-2, atol=2e-2)
    assert any("decode_source_kernel" in name for name in kernel_names(call))


# Packed sequences: without queries, without keys, of one query, and of lengths that end within a tile.
QUERIES, KEYS = (70, 0, 3, 1, 200), (300, 40, 0, 64, 200)
PACKED_RULES = {
    "plain": {},
    "causal": {"causal": True},
    "rules": {"causal": True, "window": (90, 0), "softcap": 5.0, "sinks": torch.linspace(-1, 1, 4)},
}


def ends_of(lengths) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], device="cuda")


def draw_packed(dims, dtype) -> list[torch.Tensor]:
    shapes = (sum(QUERIES), 4, dims[0]), (sum(KEYS), 2, dims[0]), (sum(KEYS), 2, dims[1])
    return [draw(*shape, dtype=dtype, seed=n).cuda() for n, shape in enumerate(shapes)]


def each_sequence(query, key, value, **rule) -> torch.Tensor:
    pieces = zip(query.split(QUERIES), key.split(KEYS), value.split(KEYS), strict=True)
    batches = ([x.unsqueeze(0).transpose(1, 2) for x in piece] for piece in pieces)
    return torch.cat([attention(*x, q_offset="end", **rule)[0].transpose(0, 1) for x in batches])


@pytest.mark.parametrize("rule", PACKED_RULES)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_packed_sequences_are_one_call_that_waits_for_nothing(dims, dtype, rule):
    rule = on_device_rules(PACKED_RULES[rule])
    leaves = [x.requires_grad_() for x in draw_packed(dims, dtype)]
    hints = {"max_seqlen_q": max(QUERIES), "max_seqlen_k": max(KEYS)}
    call = functools.partial(attention_varlen, *leaves, ends_of(QUERIES), ends_of(KEYS), **hints, **rule)
    grad = draw(sum(QUERIES), 4, dims[1], dtype=dtype, seed=9).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = call()
        grads = torch.autograd.grad(out, leaves, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = each_sequence(*leaves, **rule)
    assert_close(out, wanted, rtol=2e-2, atol=2e-2)
    for got, each in zip(grads, torch.autograd.grad(wanted, leaves, grad), strict=True):
        assert_close(got, each, rtol=5e-2, atol=5e-2)
    names = [name for name in kernel_names(call) if "prefill_kernel" in name or "forward_sm90_kernel" in name]
    assert len(names) == 1


def on_device_rules(rule):
    return {name: on_device(x) for name, x in rule.items()}


def test_no_number_of_another_packed_sequence_reaches_a_row():
    query, key, value = draw_packed((128, 128), torch.bfloat16)
    call = functools.partial(attention_varlen, cu_seqlens_q=ends_of(QUERIES), cu_seqlens_k=ends_of(KEYS), causal=True)
    wanted = call(query, key, value)
    for x, lengths in ((query, QUERIES), (key, KEYS), (value, KEYS)):
        x[-lengths[-1] :] = NAN
    assert torch.equal(call(query, key, value)[: -QUERIES[-1]], wanted[: -QUERIES[-1]])


def test_a_captured_packed_call_reads_the_ends_of_each_replay():
    tensors, ends, key_ends = draw_packed((128, 128), torch.bfloat16), ends_of(QUERIES), ends_of(KEYS)
    call = functools.partial(attention_varlen, *tensors, ends, key_ends, causal=True)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    ends.copy_(ends_of(QUERIES[::-1]))
    key_ends.copy_(ends_of(KEYS[::-1]))
    graph.replay()
    assert_close(out, call(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("page_size, dims", [(16, (64, 64)), (7, (128, 128)), (64, (192, 256))])
@pytest.mark.parametrize("rule", PACKED_RULES)
def test_packed_queries_over_pages(page_size, dims, rule):
    rule = on_device_rules(PACKED_RULES[rule])
    query, *keys = draw_packed(dims, torch.bfloat16)
    most = -(-max(KEYS) // page_size)
    table = torch.randperm(len(KEYS) * most, generator=torch.Generator().manual_seed(0)).int().view(len(KEYS), most)
    pools = [torch.full((table.numel(), page_size, 2, x.size(-1)), NAN, dtype=x.dtype, device="cuda") for x in keys]
    for pool, x in zip(pools, keys, strict=True):
        for numbers, rows in zip(table.tolist(), x.split(KEYS), strict=True):
            for number, page in zip(numbers, rows.split(page_size), strict=False):
                pool[number, : len(page)] = page
    pages = {"block_table": table.cuda(), "kv_lens": torch.tensor(KEYS, device="cuda")}
    call = functools.partial(attention_varlen, query, *pools, ends_of(QUERIES), **pages, **rule)
    assert_close(call(), each_sequence(query, *keys, **rule), rtol=2e-2, atol=2e-2)
    assert sum("prefill_kernel" in name for name in kernel_names(call)) == 1


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_quantised_rows(bits, dtype):
    x = draw(2, 2, 500, 128, dtype=dtype)
    rows = quantize_rows(x.cuda(), bits)
    assert (rows.cpu() != quantize_rows(x, bits)).float().mean() < 1e-3
    plain = dequantize_rows(rows, bits, 128, dtype)
    assert_close(plain.cpu(), dequantize_rows(rows.cpu(), bits, 128, dtype))
    query, lens = draw(2, 8, 1, 128, dtype=dtype, seed=1).cuda(), torch.tensor([500, 44], device="cuda")
    exact = reference.attention(query.double(), plain.double(), plain.double(), kv_lens=lens)
    out = torch.ops.attnpack.attention_quantized(query, rows, rows, bits, 128, kv_lens=lens)[0]
    expanded = reference.attention(query, plain, plain, kv_lens=lens)
    assert (out - exact).abs().max() <= 2 * (expanded - exact).abs().max()


def test_pages_are_appended_to_as_on_the_cpu():
    pools = torch.zeros(2, 6, 4, 2, 64, dtype=torch.bfloat16)
    table, lengths = torch.tensor([[3, 0, 5], [1, 4, 2]], dtype=torch.int32), torch.tensor([2, 7])
    fresh, results = draw(2, 2, 3, 64, dtype=torch.bfloat16), []
    for device in ("cpu", "cuda"):
        keys, values = pools.to(device, copy=True)
        held = lengths.to(device, copy=True)
        new = fresh.to(device)
        torch.ops.attnpack.kv_cache_append_paged_(keys, values, table.to(device), held, new, -new, None, None)
        results.append([x.cpu() for x in (keys, values, held)])
    for cpu, cuda in zip(*results, strict=True):
        assert torch.equal(cpu, cuda)


def test_cache_append_rope_and_few_row_linear(monkeypatch):
    cache = torch.zeros(2, 3, 50, 64, dtype=torch.bfloat16)
    fresh, lengths, lens = draw(2, 3, 7, 64, dtype=torch.bfloat16), torch.tensor([0, 30]), torch.tensor([7, 4])
    results = []
    for device in ("cpu", "cuda"):
        k, v, n = cache.to(device, copy=True), cache.to(device, copy=True), lengths.to(device, copy=True)
        torch.ops.attnpack.kv_cache_append_(k, v, n, fresh.to(device), -fresh.to(device), lens.to(device), None)
        results.append([x.cpu() for x in (k, v, n)])
    for cpu, cuda in zip(*results, strict=True):
        assert torch.equal(cpu, cuda)
    results = []
    for device in ("cpu", "cuda"):
        held = [cache.to(device, copy=True), cache.to(device, copy=True), lengths.to(device, copy=True)]
        new = [x.to(device) for x in (draw(2, 6, 7, 64, dtype=torch.bfloat16), fresh, -fresh)]
        rotated = torch.ops.attnpack.kv_cache_append_rotated_(
            *held, *new, [1.0, 0.1], 1.5, False, lens.to(device), None
        )
        results.append([x.cpu() for x in (rotated, *held)])
    for cpu, cuda in zip(*results, strict=True):
        assert_close(cuda, cpu)
    angles = draw(7, 16)
    for interleaved in (False, True):
        got = apply_rope(fresh.cuda(), angles.cos().cuda(), angles.sin().cuda(), interleaved=interleaved)
        assert_close(got.cpu(), apply_rope(fresh, angles.cos(), angles.sin(), interleaved=interleaved))
    monkeypatch.setenv("ATTNPACK_CUDA_LINEAR", "attnpack")
    for dtype in (torch.float32, *HALF):
        layer = torch.nn.Linear(300, 130, device="cuda", dtype=dtype)
        x = draw(2, 300, dtype=dtype).cuda()
        with torch.no_grad():
            exact = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
            error = (project(layer, x).double() - exact).abs().max()
            assert error <= 2 * (layer(x).double() - exact).abs().max() + 64 * torch.finfo(dtype).eps
