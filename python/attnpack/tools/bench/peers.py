"""The calls that `attnpack bench` compares: those of attnpack and of other libraries, on the same tensors."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import attention
from ..memory import available_bytes
from .cases import DTYPES, Case

Call = Callable[[], Tensor]


def make_inputs(case: Case, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key, value (a view of key in a latent case) and the gradient of the output."""
    generator = torch.Generator(device).manual_seed(0)
    dtype, kv = DTYPES[case.dtype], (case.batch, case.num_kv_heads, case.kv_len)
    rows = (case.batch, case.num_heads, case.q_len)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_(case.backward)

    query, key = draw(*rows, case.head_dim), draw(*kv, case.head_dim)
    value = key[..., : case.v_head_dim] if case.latent else draw(*kv, case.v_head_dim)
    return query, key, value, draw(*rows, case.v_head_dim).detach()


def ours(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Call:
    return lambda: attention(query, key, value, causal=case.causal)


def sdpa(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Call | None:
    if query.device.type == "cpu" and case.latent:
        # On a CPU, SDPA repeats keys and values for every head in fp32, and scales a copy of them.
        repeated = case.batch * case.num_heads * case.kv_len * (case.head_dim + case.v_head_dim) * 4
        if 2 * repeated > available_bytes():
            return None
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=case.causal, enable_gqa=True)


def _sdpa_backend(name: str) -> Callable[..., Call | None]:
    """SDPA with one of its CUDA backends; None if this backend refuses the case."""

    def make_call(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Call | None:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def attend() -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, name)):
                return sdpa(case, query, key, value)()

        try:
            attend()
        except RuntimeError:
            return None
        return attend

    return make_call


def packed(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Call | None:
    """SDPA with the query heads of a group packed by hand as rows. This gives the right result for one query."""
    if case.q_len != 1 or case.num_heads == case.num_kv_heads:
        return None
    rows = query.view(case.batch, case.num_kv_heads, -1, case.head_dim)
    return lambda: F.scaled_dot_product_attention(rows, key, value).view(case.batch, case.num_heads, 1, -1)


def flex(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Call | None:
    """Compiled FlexAttention; on a CPU without the backward pass."""
    if (case.backward and query.is_cpu) or case.head_dim != case.v_head_dim:
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = None
    if case.causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, case.q_len, case.kv_len, device=query.device)
    torch.compiler.reset()  # torch keeps eight graphs; for a ninth case it would run its slow form
    return functools.partial(torch.compile(flex_attention), query, key, value, block_mask=mask, enable_gqa=True)


def flash_attn(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Call | None:
    """The package flash-attn, if it is installed."""
    if not _dense_half(case, query):
        return None
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return None

    def attend() -> Tensor:
        return flash_attn_func(*(x.transpose(1, 2) for x in (query, key, value)), causal=case.causal).transpose(1, 2)

    return attend


def flashinfer(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Call | None:
    """FlashInfer's call for a single sequence, if it is installed; without the backward pass."""
    if not _dense_half(case, query) or case.batch != 1 or case.backward:
        return None
    try:
        from flashinfer import single_prefill_with_kv_cache
    except ImportError:
        return None
    rows = query[0].transpose(0, 1).contiguous()  # [q_len, num_heads, head_dim]

    def attend() -> Tensor:
        out = single_prefill_with_kv_cache(rows, key[0], value[0], causal=case.causal, kv_layout="HND")
        return out.transpose(0, 1).unsqueeze(0)

    return attend


def zentorch(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Call | None:
    """AMD's attention for its CPUs, if the package zentorch is installed; without the backward pass."""
    if case.backward or case.head_dim != case.v_head_dim or not query.is_cpu:
        return None
    try:
        importlib.import_module("zentorch")  # registers the op
    except ImportError:
        return None
    return lambda: torch.ops.zentorch.zentorch_sdpa(query, key, value, is_causal=case.causal)[0]


def _dense_half(case: Case, query: Tensor) -> bool:
    """Whether packages for CUDA take the case. Their causal mask is aligned with the last key, ours with the first."""
    square = case.q_len == case.kv_len or not case.causal
    return not query.is_cpu and case.dtype != "fp32" and case.head_dim == case.v_head_dim and square


def onnxruntime(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Call | None:
    """ONNX Runtime's GroupQueryAttention, with all keys but the last in its past; for decoding in fp32."""
    if case.q_len != 1 or case.dtype != "fp32" or case.latent or case.batch != 1 or not query.is_cpu:
        return None
    import onnxruntime as ort
    from onnx import TensorProto, helper

    def tensor(name: str, kind: int, shape: list) -> object:
        return helper.make_tensor_value_info(name, kind, shape)

    inputs = ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total"]
    past = [case.batch, case.num_kv_heads, None, case.head_dim]
    node = helper.make_node(
        "GroupQueryAttention",
        inputs,
        ["out", "present_key", "present_value"],
        domain="com.microsoft",
        num_heads=case.num_heads,
        kv_num_heads=case.num_kv_heads,
    )
    kinds = [TensorProto.FLOAT] * 5 + [TensorProto.INT32] * 2
    shapes = [[case.batch, 1, None]] * 3 + [past] * 2 + [[case.batch], [1]]
    graph = helper.make_graph(
        [node],
        "attention",
        [tensor(*each) for each in zip(inputs, kinds, shapes, strict=True)],
        [tensor("out", TensorProto.FLOAT, [case.batch, 1, None])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feed = {
        "query": query.transpose(1, 2).flatten(2),
        "key": key[:, :, -1:].transpose(1, 2).flatten(2),
        "value": value[:, :, -1:].transpose(1, 2).flatten(2),
        "past_key": key[:, :, :-1],
        "past_value": value[:, :, :-1],
        "seqlens_k": torch.full((case.batch,), case.kv_len - 1, dtype=torch.int32),
        "total": torch.tensor([case.kv_len], dtype=torch.int32),
    }
    feed = {name: each.contiguous().numpy() for name, each in feed.items()}
    heads = (case.batch, 1, case.num_heads, -1)
    return lambda: torch.from_numpy(session.run(["out"], feed)[0]).view(heads).transpose(1, 2)


PEERS = {
    "sdpa": sdpa,
    "packed": packed,
    "flex": flex,
    "onnxruntime": onnxruntime,
    "zentorch": zentorch,
    "flash": _sdpa_backend("FLASH_ATTENTION"),
    "cudnn": _sdpa_backend("CUDNN_ATTENTION"),
    "efficient": _sdpa_backend("EFFICIENT_ATTENTION"),
    "flash_attn": flash_attn,
    "flashinfer": flashinfer,
}
