"""The versions and the masking demo of the multi-query notebook, printed from tensors of the native code."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ... import DynamicCache, MultiQueryAttention, attention_scores, reference

RULE = "-" * 20


def run_mqa(
    batch: int = 2,
    seq: int = 10,
    d_model: int = 64,
    num_heads: int = 8,
    *,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> dict:
    """Runs V1, V2, V3 and the masking demo on attnpack's modules, then compares their values.

    `say` gets each printed text. Returns the inputs and weights (`x`, `scores_q`, `scores_k`, `state_dict`), so that
    another implementation can run on the same numbers, and the largest differences (`differences`).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        plain = MultiQueryAttention(d_model, num_heads).eval()
        x = torch.randn(batch, seq, d_model)
        square = torch.randn(2, 1, 1, 5, d_model // num_heads).unbind(0)
    causal = MultiQueryAttention(d_model, num_heads, causal=True).eval()
    causal.load_state_dict(plain.state_dict())

    v1 = run_v1(plain, x, say)
    v2 = run_steps(plain, x, say)
    v3 = run_steps(causal, x, say)
    run_masking(*square, say)
    with torch.no_grad():
        differences = compare(plain, causal, x, v1, v2, v3)
    say("")
    for what, difference in differences.items():
        say(f"{what:<52}{difference:.1e}")
    return {
        "x": x,
        "scores_q": square[0],
        "scores_k": square[1],
        "state_dict": plain.state_dict(),
        "differences": differences,
    }


def run_v1(module: nn.Module, x: Tensor, say: Callable[[str], None]) -> Tensor:
    """V1: the whole sequence at once, no cache, no mask."""
    say(f"x.shape : {x.shape}")
    q, k, _ = module.project(x)
    probs = attention_scores(q, k)  # [batch, num_heads, seq, seq]
    say(f"should be 1 if correct: {probs.sum(dim=-1)}")
    out = module(x)
    say(f"shape of out : {out.shape}")
    return out


def run_steps(module: nn.Module, x: Tensor, say: Callable[[str], None]) -> Tensor:
    """V2 and V3: one token at a time with a cache. Returns the outputs of all steps, [batch, seq, d_model]."""
    say(f"x.shape : {x.shape}")
    cache = DynamicCache()
    outs = []
    for token in x.split(1, dim=1):
        q, _, _ = module.project(token)
        outs.append(module(token, cache=cache))
        say(f"\n{RULE}")
        say(f"Q shape : {q.shape}\nK.shape: {cache.k.shape}\nV.shape: {cache.v.shape}")
        say(f"shape of out : {outs[-1].shape}")
    return torch.cat(outs, dim=1)


def run_masking(q: Tensor, k: Tensor, say: Callable[[str], None]) -> None:
    """Says the scores, the mask of the scores that causality hides (True = hidden, as in the notebook), and the scores
    with the hidden ones at -inf."""
    scores = attention_scores(q, k, stage="scaled")[0, 0]
    masked = attention_scores(q, k, stage="masked", causal=True)[0, 0]
    say(f"{scores}")
    say(f"\n{masked.isneginf()}")
    say(f"\n{masked}")


def fold(texts: list[str]) -> list[str]:
    """The texts of `run_mqa` with only the first line of the tensor of ones, and only the first and last step of each
    run of steps."""
    kept: list[str] = []
    step: list[list[str]] = []  # the steps of a run so far: each the texts from its rule on
    for text in [*texts, ""]:
        if text == f"\n{RULE}":
            step.append([text])
        elif step and len(step[-1]) < 3:
            step[-1].append(text)
        else:
            kept += _fold_steps(step)
            step = []
            kept.append(text.split("\n")[0] + " ..." if text.startswith("should be 1") else text)
    return kept[:-1]


def _fold_steps(steps: list[list[str]]) -> list[str]:
    hidden = [f"\n... {len(steps) - 2} steps more: attnpack demo --all-lines"] if len(steps) > 2 else []
    ends = [steps[0], hidden, steps[-1]] if len(steps) > 1 else steps
    return [text for each in ends for text in each]


def chunkings(seq: int) -> list[list[int]]:
    """Ways to cut a sequence: the whole, two unequal parts, three parts. For ten tokens: 10; 4+6; 1+3+6."""
    two = [seq * 4 // 10, seq - seq * 4 // 10]
    three = [1, seq * 3 // 10, seq - 1 - seq * 3 // 10]
    return [[seq], *(parts for parts in (two, three) if min(parts) > 0)]


def compare(plain: nn.Module, causal: nn.Module, x: Tensor, v1: Tensor, v2: Tensor, v3: Tensor) -> dict[str, float]:
    """Largest absolute differences between the versions, between ways to feed V3, and from plain PyTorch."""
    full = causal(x)
    found = {"V3 in full against steps of 1": _gap(full, v3)}
    for parts in chunkings(x.shape[1]):
        cache = DynamicCache()
        chunks = torch.cat([causal(part, cache=cache) for part in x.split(parts, dim=1)], dim=1)
        found[f"V3 in full against chunks of {'+'.join(map(str, parts))}"] = _gap(full, chunks)
    found["V2 by steps against V1, last row"] = _gap(v2[:, -1], v1[:, -1])
    found["V2 by steps against V1, other rows (V1 sees ahead)"] = _gap(v2[:, :-1], v1[:, :-1])
    for name, version, out in (("V1", reference.MQAV1, v1), ("V3", reference.MQAV3, full)):
        twin = version(x.shape[-1], plain.num_heads)
        twin.load_state_dict({rename_to_notebook(key): value for key, value in plain.state_dict().items()})
        wanted = twin(x)[0] if version is reference.MQAV3 else twin(x)
        found[f"{name} against the same in plain PyTorch"] = _gap(out, wanted)
    return found


def rename_to_notebook(name: str) -> str:
    """q_proj.weight -> W_q.weight: a parameter's name in the notebook's classes."""
    projection, kind = name.split(".")
    return f"W_{projection[0]}.{kind}"


def _gap(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item() if a.numel() else 0.0
