"""torch's own samples of `scaled_dot_product_attention` (OpInfo), forward and backward, against its fp64 results."""

import warnings
from functools import cache

import torch
import torch.nn.functional as F
from attnpack import attention, reference
from marks import grid
from op_cases import check, draw
from torch.testing import assert_close

NUM_SAMPLES = 25
P = 0.5  # for the samples with dropout


@cache
def op_info():
    """Imports the samples late: that takes seconds, for which other tests need not wait."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return next(op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")


def samples(dtype: torch.dtype, *, requires_grad: bool = True) -> list:
    torch.manual_seed(0)
    return list(op_info().sample_inputs("cpu", dtype, requires_grad=requires_grad))


def four_dimensions(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """SDPA broadcasts all dimensions before length and width; attnpack wants [batch, heads] there."""
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in tensors))
    return [x.expand(*lead, *x.shape[-2:]).reshape((1,) * (2 - len(lead)) + lead + x.shape[-2:]) for x in tensors]


def ours(query, key, value, attn_mask=None, is_causal=False, dropout_p=0.0):
    torch.manual_seed(1)
    return attention(*four_dimensions(query, key, value), attn_mask, causal=is_causal, dropout_p=dropout_p)


def kept(query, key, value, **settings) -> torch.Tensor:
    """Each probability after dropout, times 1 / (1 - p), found with unit vectors as values: [B, H, Lq, Lkv]."""
    unit = torch.eye(key.shape[-2], dtype=key.dtype).expand(*key.shape[:-1], -1)
    with torch.no_grad():
        dropped = ours(query, key, unit, **settings) != 0
        return dropped.to(key.dtype) / (1 - settings["dropout_p"])


def torchs(query, key, value, attn_mask=None, is_causal=False, dropout_p=0.0, kept=None):
    query, key, value = four_dimensions(query, key, value)
    settings = {"attn_mask": attn_mask, "is_causal": is_causal}
    if dropout_p == 0:
        return F.scaled_dot_product_attention(query, key, value, **settings)
    unit = torch.eye(key.shape[-2], dtype=key.dtype).expand(*key.shape[:-1], -1)
    return (F.scaled_dot_product_attention(query, key, unit, **settings) * kept.to(key.dtype)) @ value


def plain(query, key, value, attn_mask=None, is_causal=False, dropout_p=0.0, kept=None):
    query, key, value = four_dimensions(query, key, value)
    probs = reference.attention_scores(query, key, attn_mask, causal=is_causal)
    return (probs if kept is None else probs * kept.to(key.dtype)) @ value


def results(attend, tensors: dict, settings: dict) -> dict[str, torch.Tensor]:
    out = attend(**tensors, **settings)
    grads = torch.autograd.grad(out, list(tensors.values()), draw(*out.shape, dtype=out.dtype))
    return {"out": out.detach()} | {f"grad of {name}": grad for name, grad in zip(tensors, grads, strict=True)}


@grid(4, dtype=[torch.float64, torch.float32, torch.bfloat16, torch.float16], index=range(NUM_SAMPLES))
def test_sample(dtype, index):
    sample = samples(dtype)[index]
    tensors = dict(zip(("query", "key", "value"), (sample.input, *sample.args), strict=True))
    settings = dict(sample.kwargs)
    settings.pop("enable_gqa", None)  # torch 2.14 gives it; no sample has groups
    if "attn_mask" in settings:
        tensors["attn_mask"] = settings.pop("attn_mask")
    got = results(ours, tensors, settings)
    if settings["dropout_p"] > 0:  # random, so it is compared with the same dropped probabilities
        settings["kept"] = kept(**tensors, **settings)
    truth = results(torchs, {k: x.detach().double().requires_grad_() for k, x in tensors.items()}, settings)
    if dtype == torch.float64:
        # As exact as torch's fp64 result itself; with scores of up to 200 both are wrong by a few hundred eps.
        assert_close(got, truth, atol=1e-12, rtol=1e-12)
    else:
        check(got, results(plain, tensors, settings), truth, dtype)


def test_no_sample_is_lost():
    kinds = samples(torch.float32)
    assert len(kinds) == NUM_SAMPLES
    assert {len(sample.input.shape) for sample in kinds} == {3, 4}
    assert all(sample.input.shape[-3] == x.shape[-3] for sample in kinds for x in sample.args)
    assert {sample.kwargs["is_causal"] for sample in kinds} == {False, True}
    assert {sample.kwargs["dropout_p"] for sample in kinds} == {0.0, P}
    assert sum("attn_mask" in sample.kwargs for sample in kinds) == 1
