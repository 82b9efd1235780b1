# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Common mistakes in attention code: what the sources say, what is right, and the number that shows it
#
# *You need* the notebooks before this one. *You learn* mistakes that run without an error, and tests that find them.
# *Runs in* half a minute.
# The glossary has the [symbols](../docs/notebooks.md#glossary-of-symbols) and the
# [words](../docs/notebooks.md#glossary-of-words).
#
# Sources: [Vaswani et al. 2017](https://arxiv.org/abs/1706.03762), [Shazeer 2019](https://arxiv.org/abs/1911.02150),
# [Ainslie et al. 2023](https://arxiv.org/abs/2305.13245) and
# [DeepSeek-AI 2024](https://arxiv.org/abs/2405.04434), the papers that the texts explain.
#
# attnpack grew out of five public texts on attention. They are good texts; they also contain mistakes, some of which
# run without an error and give wrong numbers. Each is shown here with the wrong form, the right one, and a measurement.
# One entry is about a statement that is right and easily misread.
# Wrong forms are written down for this notebook, from the texts' formulas; nothing in the library uses them. The texts,
# by number (our copies of 001 to 004 name neither author nor address):
#
# | | |
# |---|---|
# | 000 | *[Swarm of Attention Variants](https://www.vxnuaj.com/infinity/attnvars)*, Juan Vera, 2025: MHA, MQA, GQA |
# | 001 | *Summary of Attention*: notes on self-attention, blocks, MQA, GQA |
# | 002 | a notebook on multi-query attention in three versions |
# | 003 | *Attention*: from queries, keys and values to latent attention |
# | 004 | *Multi & Grouped Query Attention*, and conversion |

# %%
import math

import attnpack
import matplotlib.pyplot as plt
import torch
from attnpack.tools import course, memory
from attnpack.tools.plot import attention as plot_attention
from attnpack.tools.plot.colours import BLUE, ORANGE

torch.manual_seed(0)
batch, length, num_heads, head_dim = 2, 10, 8, 16
d_model = num_heads * head_dim


def largest_difference(a, b):
    return (a - b).abs().max().item()


def scientific(number):
    return f"{number:.1e}" if number else "0"


def split(x):
    """[b, l, h * d] -> [b, h, l, d]: the last dim is cut into heads, then heads and positions change places."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def join(x):
    return x.transpose(1, 2).flatten(2)


# %% [markdown]
# ## 000: a view where a transpose is needed
#
# **Wrong**: `q.view(b, n_heads, l, d_head)` of a `[b, l, d_model]` tensor. **Right**: `view(b, l, n_heads, d_head)`,
# then `transpose(1, 2)`. A view never moves numbers. The wrong one cuts the memory of a sequence into n_heads runs of
# *tokens*, so that "head 0" holds all dimensions of the first tokens. The shapes are right and nothing raises.
#
# Is the result wrong? It depends. In MQA all rows read the same keys and values, so the names of the rows do not
# matter, and the same wrong view at the end restores the order. As soon as rows differ by more than their query,
# because they are rotated by position (RoPE), masked by position (causal), or read another group's keys (GQA), the
# numbers are wrong.

# %%
rope = attnpack.RotaryEmbedding(head_dim)


def attend(x_q, x_k, x_v, groups, *, wrong, rotate=False, causal=False):
    if wrong:
        q = x_q.reshape(batch, num_heads, length, head_dim)
        k, v = (each.reshape(batch, groups, length, head_dim) for each in (x_k, x_v))
    else:
        q, k, v = split(x_q), split(x_k), split(x_v)
    if rotate:
        q, k = rope(q), rope(k)
    out = attnpack.attention(q, k, v, causal=causal)
    return out.reshape(batch, length, d_model) if wrong else join(out)


x_q = torch.randn(batch, length, d_model)
one_k, one_v = torch.randn(2, batch, length, head_dim).unbind(0)
two_k, two_v = torch.randn(2, batch, length, 2 * head_dim).unbind(0)
cases = {
    "MQA": (one_k, one_v, 1, {}),
    "MQA, RoPE": (one_k, one_v, 1, {"rotate": True}),
    "MQA, causal": (one_k, one_v, 1, {"causal": True}),
    "GQA, 2 groups": (two_k, two_v, 2, {}),
}
errors = {
    name: largest_difference(attend(x_q, k, v, g, wrong=True, **how), attend(x_q, k, v, g, wrong=False, **how))
    for name, (k, v, g, how) in cases.items()
}
for name, error in errors.items():
    print(f"{name:<15} error of the view without transpose: {scientific(error)}")
assert errors["MQA"] < 1e-6 and min(list(errors.values())[1:]) > 0.5

# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(7, 2.6), dpi=110, layout="constrained")
bars = axes.bar(list(errors), list(errors.values()), color=[BLUE] + 3 * [ORANGE])
axes.bar_label(bars, [f"{error:.1f}" if error > 0.1 else scientific(error) for error in errors.values()], padding=2)
axes.margins(y=0.15)
axes.set(xlabel="case", ylabel="largest error of out", title="The view without a transpose")
plt.show()

# %% [markdown]
# ## 000: which square root
#
# **Wrong**: the first formula divides by $\sqrt{d_\text{model}}$, the code below it by $\sqrt{d_\text{head}}$.
# **Right**: the length of the vectors that are multiplied, $d_\text{head}$. With $d_\text{model}$ the scores are too
# small by $\sqrt{H}$, and attention is flatter than meant.

# %%
q, k = torch.randn(2, 1, num_heads, 256, head_dim).unbind(0)
for name, d in (("wrong, d_model", d_model), ("right, d_head", head_dim)):
    scores = attnpack.attention_scores(q, k, stage="scaled", scale=d**-0.5)
    top = attnpack.attention_scores(q, k, scale=d**-0.5).amax(-1).mean()
    print(f"{name:<15} variance of scores {scores.var():.3f}, largest of 256 weights on average {top:.3f}")

# %% [markdown]
# ## 000: RoPE is built and never applied
#
# **Wrong**: the GQA class makes a rotary embedding and its forward does not call it. **Right**: rotate q and k before
# the scores, as the MQA class next to it does. Without rotation nothing in the layer knows about order: if the tokens
# are permuted, the outputs are the same, permuted.

# %%
order = torch.randperm(length)
for name, how in (("wrong, never applied", {}), ("right", {"rotate": True})):
    straight = attend(x_q, two_k, two_v, 2, wrong=False, **how)
    mixed = attend(x_q[:, order], two_k[:, order], two_v[:, order], 2, wrong=False, **how)
    print(
        f"{name:<21} outputs of permuted tokens differ by {scientific(largest_difference(mixed, straight[:, order]))}"
    )

# %% [markdown]
# ## 000: four slips of counting
#
# - The number of key-value sets in GQA. **Wrong**: H / g. **Right**: g; H / g is how many heads share one.
# - The shared keys of MQA. **Wrong**: K, V with `n_heads` first. **Right**: one set, `[1, l, d_head]`, or nothing is
#   saved.
# - How often a set is repeated. **Wrong**: `interleave(d_head * g)`. **Right**: H / g times.
# - The projection. **Wrong**: $W X$ with X as `[l, d]`. **Right**: $X W^\top$ with W as PyTorch stores it,
#   `[out, in]`. With W as `[d_model, d_head]`, as the text defines it, it is $X W$.

# %%
heads, groups = 12, 2
layer = attnpack.GroupedQueryAttention(heads * head_dim, heads, groups)
x = torch.randn(1, length, heads * head_dim)
q, k, v = layer.project(x)
print(f"H = {heads}, g = {groups}: key-value sets {k.shape[1]} (wrong: H / g = {heads // groups})")
shared = attnpack.MultiQueryAttention(heads * head_dim, heads).project(x)[1]
print(f"MQA keys {tuple(shared.shape)}, {shared.numel()} numbers (wrong: n_heads first, {heads * shared.numel()})")
right, wrong = (k.repeat_interleave(times, dim=1).shape[1] for times in (heads // groups, head_dim * groups))
print(f"heads after repeating: {right}, as many as queries have (wrong: {wrong})")
weight = torch.randn(32, 64)  # [out, in], and X is [l, in]
tokens = torch.randn(length, 64)
try:
    weight @ tokens
except RuntimeError as error:
    print("W X:  ", str(error).split("\n")[0])
print("X W^T:", tuple((tokens @ weight.T).shape), "with W as [out, in]")
print("X W:  ", tuple((tokens @ torch.randn(64, 32)).shape), "with W as [d_model, d_head]")
assert k.shape[1] == groups and right == heads

# %% [markdown]
# ## 001: softmax over the wrong dimension
#
# **Wrong**: `softmax(W, dim=1)` of scores `[B, T, T]` whose dim 1 counts *queries*. **Right**: `dim=-1`, the keys. The
# wrong one makes columns sum to 1 instead of rows. And it leaks: a column's sum runs over later queries. So the result
# of token 0 depends on the tokens after it, even with a causal mask.

# %%
head_size, T = 16, 8
projections = [torch.nn.Linear(32, head_size, bias=False) for _ in range(3)]
x = torch.randn(1, T, 32)


def summary_attention(x, dim):
    q, k, v = (projection(x) for projection in projections)
    scores = q @ k.transpose(1, 2) / math.sqrt(head_size)
    scores = scores.masked_fill(torch.tril(torch.ones(T, T)) == 0, float("-inf"))
    weights = scores.softmax(dim=dim)
    return weights @ v, weights


changed = x.clone()
changed[:, -1] += 1.0
pictures = {}
with torch.no_grad():
    for name, dim in (("wrong: dim=1", 1), ("right: dim=-1", -1)):
        out, pictures[name] = summary_attention(x, dim)
        moved = largest_difference(summary_attention(changed, dim)[0][:, :-1], out[:, :-1])
        rows = [round(each, 2) for each in pictures[name].sum(-1)[0].tolist()]
        print(f"{name:<14} row sums {rows}; a change of the last token moves earlier outputs by {scientific(moved)}")
    native = attnpack.SelfAttention(32, head_size, causal=True)
    for mine, theirs in zip((native.q_proj, native.k_proj, native.v_proj), projections, strict=True):
        mine.weight.copy_(theirs.weight)
    torch.testing.assert_close(native(x), out)

# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure, panels = plt.subplots(1, 2, figsize=(6.4, 3), dpi=110, layout="constrained")
for panel, (name, weights) in zip(panels, pictures.items(), strict=True):
    image = plot_attention.draw_weights(panel, weights[0], title=f"softmax, {name}")
    panel.set(xlabel="key (position)", ylabel="query (position)")
figure.colorbar(image, ax=panels, label="weight")
plt.show()

# %% [markdown]
# ## 001: the scale after the softmax, and three lines that do not run
#
# **Wrong**: `softmax(W) / sqrt(head_size)`. **Right**: `softmax(W / sqrt(head_size))`. Divided afterwards, the scores
# are as large as before, and the weights of a row sum to $1 / \sqrt{16} = 0.25$.
#
# `torch.sqrt` wants a tensor, head_size is an int: `math.sqrt`. And torch has no `mask_fill`: the tensor method is
# `masked_fill`. Last, each token is said to emit *two* vectors, and then three are listed: query, key, value.

# %%
q, k = torch.randn(2, 1, 64, 256, head_size).unbind(0)
raw = attnpack.attention_scores(q, k, stage="scaled", scale=1.0)
wrong, right = raw.softmax(-1) / math.sqrt(head_size), attnpack.attention_scores(q, k)
print(f"divided after:  scores of variance {raw.var():.1f}, rows sum to {wrong.sum(-1).mean():.3f}")
print(f"divided before: scores of variance {(raw / 4).var():.1f}, rows sum to {right.sum(-1).mean():.3f}")
for text in ("torch.sqrt(head_size)", "torch.mask_fill"):
    try:
        eval(text)
    except (TypeError, AttributeError) as error:
        print(f"{text}: {type(error).__name__}: {str(error)[:80]}")
print("vectors that a token emits:", [name for name, _ in native.named_children()])
assert torch.allclose(wrong.sum(-1), torch.tensor(0.25))

# %% [markdown]
# ## 001: why GPT has no encoder
#
# **Wrong**: GPT is decoder-only *because* it is auto-regressive and generates from past outputs only. **Right**: the
# decoder of an encoder-decoder does both as well. GPT needs no encoder because it has no second sequence to read. The
# same block with and without a source is auto-regressive; only the one without is decoder-only:

# %%
target, source = torch.randn(1, 6, 32), torch.randn(1, 5, 32)
later = target.clone()
later[:, -1] += 1.0
for name, context in (("decoder of an encoder-decoder", [source]), ("decoder-only", [])):
    crossing = {"cross_attention": attnpack.MultiHeadAttention(32, 4)} if context else {}
    attend_past = attnpack.MultiHeadAttention(32, 4, causal=True)
    decoder = attnpack.Decoder([attnpack.DecoderBlock(attend_past, attnpack.FeedForward(32, 64), **crossing)])
    with torch.no_grad():
        moved = largest_difference(decoder(later, *context)[:, :-1], decoder(target, *context)[:, :-1])
    print(f"{name:<30} a change of the last token moves earlier outputs by {scientific(moved)}")
    assert moved == 0

# %% [markdown]
# ## 002: a mask that its demo never reaches
#
# The third version has a causal mask for more than one query row, and a demo that feeds one token at a time. **Wrong**:
# the demo shows that the mask works. It never builds one. **Wrong**: masking "wont work" for a single token, hence an
# `if`. **Right**: with t tokens in the cache, row 0 is at position t and may read all t + 1 keys: that mask is all
# False, and applying it is harmless.

# %%
hidden = [int(torch.ones(1, t + 1, dtype=torch.bool).triu(diagonal=t + 1).sum()) for t in range(10)]
print("keys hidden in the ten steps of the demo:", hidden)
x = torch.randn(2, 10, 64)
masked = attnpack.MultiQueryAttention(64, 8, causal=True)
unmasked = attnpack.MultiQueryAttention(64, 8)
unmasked.load_state_dict(masked.state_dict())


def fed(module, parts):
    cache = attnpack.DynamicCache()
    return torch.cat([module(part, cache=cache) for part in x.split(parts, dim=1)], dim=1)


with torch.no_grad():
    for parts in ([1] * 10, [4, 6]):
        gap = largest_difference(fed(masked, parts), fed(unmasked, parts))
        print(f"chunks of {parts}: with the mask against without: {scientific(gap)}")
    assert torch.equal(fed(masked, [1] * 10), fed(unmasked, [1] * 10))

# %% [markdown]
# Step by step the mask makes no difference at all; with chunks it does. So a broken mask would have passed the demo.
#
# **Wrong**: the demos print shapes only. A wrong cache has the right shapes too; here is one that forgets a key, by
# overwriting the last one at each step. **Right**: compare with an uncached run.

# %%
with torch.no_grad():
    uncached = masked(x)
    broken = []
    for t in range(10):
        q, k, v = masked.project(x[:, : t + 1])
        k = torch.cat([k[:, :, :-2], k[:, :, -1:], k[:, :, -1:]], dim=2) if t else k
        broken.append(masked.o_proj(join(attnpack.attention(q[:, :, -1:], k, v))))
    broken = torch.cat(broken, dim=1)
    steps = fed(masked, [1] * 10)
print("shapes:", tuple(broken.shape), tuple(steps.shape))
for name, outs in (("broken", broken), ("right", steps)):
    print(f"{name} cache against an uncached run: {scientific(largest_difference(outs, uncached))}")
torch.testing.assert_close(steps, uncached)

# %% [markdown]
# **Wrong names**: 002 calls the probabilities `attn_scores` and the weighted values `attn_weights`. **Right**: scores
# go into the softmax, weights come out of it, and the weighted values are the heads' outputs. The numbers tell which
# is which:

# %%
with torch.no_grad():
    q, k, v = masked.project(x)
    stages = {
        "scores": attnpack.attention_scores(q, k, stage="scaled"),
        "weights (called attn_scores)": attnpack.attention_scores(q, k),
        "heads' outputs (called attn_weights)": attnpack.attention(q, k, v),
    }
for name, each in stages.items():
    print(
        f"{name:<37} shape {tuple(each.shape)!s:<15} from {each.min():.2f} to {each.max():.2f}, "
        f"first row sums to {each[0, 0, 0].sum():.2f}"
    )

# %% [markdown]
# ## 003: a product of normals is not normal
#
# **Wrong**: each term of $q \cdot k$ is distributed as $N(0, 1)$. **Right**: the product of two independent unit
# normals has mean 0 and variance 1, but far heavier tails: kurtosis 9 where a normal has 3. The argument needs the
# variance only, so its conclusion stands, and by the central limit theorem the *sum* over d terms becomes normal: its
# kurtosis is $3 + 6 / d$.

# %%
a, b = torch.randn(2, 4_000_000, dtype=torch.float64).unbind(0)
product = a * b


def kurtosis(x):
    return ((x - x.mean()) ** 4).mean() / x.var() ** 2


summed = (torch.randn(200_000, 64) * torch.randn(200_000, 64)).sum(-1) / 8
print(f"a normal:             variance {a.var():.3f}, kurtosis {kurtosis(a):.2f}")
print(f"product of two:       variance {product.var():.3f}, kurtosis {kurtosis(product):.2f}")
print(
    f"64 of them, / sqrt64: variance {summed.var():.3f}, kurtosis {kurtosis(summed):.2f}, by the rule {3 + 6 / 64:.2f}"
)
assert abs(kurtosis(product) - 9) < 0.5 and abs(product.var() - 1) < 0.01

# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(7, 3), dpi=110, layout="constrained")
bins = torch.linspace(-12, 12, 241).tolist()
axes.hist(a[:500_000].numpy(), bins, density=True, histtype="step", color=BLUE, label="a normal: kurtosis 3")
axes.hist(
    product[:500_000].numpy(),
    bins,
    density=True,
    histtype="step",
    color=ORANGE,
    linestyle="--",
    label="a product of two: kurtosis 9",
)
axes.set_yscale("log")
axes.set(xlabel="value", ylabel="density", title="Same variance, other distribution")
axes.legend()
plt.show()

# %% [markdown]
# ## 003: a missing transpose
#
# **Wrong**: $\text{score} \propto c^Q_i\, (W_{UQ}^\top W_{UK})\, c^{KV}_j$ with column vectors $c$. **Right**:
# $(c^Q_i)^\top W_{UQ}^\top W_{UK}\, c^{KV}_j$.
#
# ## 003: folding W_UK into W_UQ
#
# It is right that $W_{UQK} = W_{UQ}^\top W_{UK}$ can be computed once. But two things are missing.
#
# *It needs keys without RoPE.* With rotations between them the product is $W_{UQ}^\top R_{j-i} W_{UK}$, another matrix
# for each distance. (DeepSeek therefore gives positions a few dimensions of their own, which all heads share.)

# %%
d_q, d_c, d_head = 1536, 512, 128  # DeepSeek-V3
w_uq, w_uk = torch.randn(d_head, d_q) / d_q**0.5, torch.randn(d_head, d_c) / d_c**0.5
c_q, c_kv = torch.randn(d_q, 1), torch.randn(d_c, 1)
w_uqk = w_uq.T @ w_uk
try:
    c_q @ w_uqk @ c_kv
except RuntimeError as error:
    print("without the transpose:", error)
folded, apart = (c_q.T @ w_uqk @ c_kv).item(), ((w_uq @ c_q).T @ (w_uk @ c_kv)).item()
print(f"with it: folded {folded:.4f}, in two steps {apart:.4f}")
assert abs(folded - apart) < 1e-3

turn = attnpack.RotaryEmbedding(d_head)
for distance in (0, 1, 16):
    turned = turn(w_uk.T[None, None], torch.full((d_c,), distance))[0, 0].T  # each column of W_UK, rotated
    off = (w_uq.T @ turned - w_uqk).norm() / w_uqk.norm()
    print(f"keys rotated by {distance:>2} positions: the folded matrix is off by {off:.0%}")

# %% [markdown]
# *It is larger than its factors.* $W_{UQK}$ is $d_c' \times d_c$ per head; the factors are $d_\text{head} \times d_c'$
# and $d_\text{head} \times d_c$, with a small $d_\text{head}$ between. So engines do not make it: they fold into the
# *activations*, $q' = W_{UK}^\top (W_{UQ} c^Q)$, which costs the same multiplications as the two factors.

# %%
factors = w_uq.numel() + w_uk.numel()
times = w_uqk.numel() / factors
print(f"numbers per head: W_UQK {w_uqk.numel():,}, its two factors {factors:,}: {times:.0f} times as many")
into_query = (w_uk.T @ (w_uq @ c_q)).T @ c_kv
print(f"folded into the query: {into_query.item():.4f}")
assert (w_uqk.numel(), factors) == (786_432, 262_144) and abs(into_query.item() - apart) < 1e-3

# %% [markdown]
# ## 003: memory without a cache
#
# **Right, and easily misread**: uncached passes need $O(n_\text{seq} \cdot d_\text{model} + n_\text{seq}^2)$ memory.
# Here O() says how the need grows with the length of the text. It leaves out constant factors, such as the number of
# heads. And if one head is computed after another, as the text says of layers, the scores of one head are all that is
# kept. So O() is no number of bytes: code that writes out the scores of all heads at once keeps $n_\text{seq}^2$
# numbers for each head. Nor is it the least: a softmax that runs over tiles keeps no term in $n_\text{seq}^2$.

# %%
n, heads = 2048, 8
q, k, v = torch.randn(3, 1, heads, n, 64).unbind(0)
written_out = memory.peak_bytes(lambda: (q @ k.transpose(-2, -1)).softmax(-1) @ v)
tiled = memory.peak_bytes(lambda: attnpack.attention(q, k, v))
print(f"n_seq^2: {n * n * 4 / 2**20:.0f} MiB; times {heads} heads: {heads * n * n * 4 / 2**20:.0f} MiB")
print(f"measured peak, scores written out (twice, before and after the softmax): {written_out / 2**20:.0f} MiB")
print(f"measured peak, attnpack.attention: {tiled / 2**20:.0f} MiB, of which the output {q.nbytes / 2**20:.0f} MiB")
assert written_out > heads * n * n * 4 > 5 * tiled

# %% [markdown]
# ## 004: G mod H, and whose queries
#
# **Wrong**: pick G such that $G \bmod H = 0$. **Right**: $H \bmod G = 0$ (and even that is a convenience, see
# [grouped_query_attention](grouped_query_attention.ipynb)). The wrong rule allows, of all G up to H, multi-head
# attention only:

# %%
H = 8
print("G mod H = 0:", [G for G in range(1, H + 1) if G % H == 0])
print("H mod G = 0:", [G for G in range(1, H + 1) if H % G == 0])

# %% [markdown]
# **Wrong**: "the query matrices will be shared by all groups under a given head". **Right**: each head has a query
# matrix of its own; keys and values are shared within a group. If queries were shared in a group as well, all its heads
# would compute the same:

# %%
x = torch.randn(1, 10, 64)
grouped = attnpack.GroupedQueryAttention(64, 8, 2)
with torch.no_grad():
    q, k, v = grouped.project(x)
    shared_q = q[:, [0, 0, 0, 0, 4, 4, 4, 4]]
    for name, queries in (("shared queries", shared_q), ("own queries", q)):
        heads = attnpack.attention(queries, k, v)
        spread = largest_difference(heads[:, :4], heads[:, :1])
        kinds = len({tuple(head.flatten().tolist()) for head in heads[0]})
        print(f"{name:<15} heads of a group differ by {scientific(spread)}; different heads: {kinds} of 8")

# %% [markdown]
# ## 004: regions of w x w
#
# **Said**: replace each w x w region of the key and value matrices by its mean, as a step of the conversion. **Right**:
# the paper on grouped-query attention pools *heads*, and has no such step. The text leaves open whether the matrix
# shrinks; if it did, its shape would no longer fit. Kept at its shape, the step mixes numbers of unrelated inputs:

# %%
layer = attnpack.MultiHeadAttention(64, 8, causal=True)
with torch.no_grad():
    x = torch.randn(1, 10, 64)
    for window in (1, 2, 4):
        smoothed = attnpack.convert.to_gqa(layer, 8, window=window)
        print(f"w = {window}: outputs change by {scientific(largest_difference(smoothed(x), layer(x)))}")

# %% [markdown]
# ## Summary
#
# - Shapes that fit prove little: views, masks and softmax dimensions go wrong silently.
# - One test finds most of these: compare values with a plain version, with all dimensions different.
#
# ## Exercises
#
# 1. Write a test that finds a softmax over the wrong dimension without looking at the code.
# 2. Write a test that finds a mask with the wrong meaning of True, without another attention to compare with.
# 3. *Implement* one test that finds five mistakes of the notebooks. `attend(query, key, value, num_heads, mask)` takes
#    `[B, L, E]` with the heads side by side, and a bool mask `[L, L]` where True means *may attend*. The cell below
#    calls your test with a right `attend` and with five wrong ones.


# %%
def is_right(attend):
    """Yours: True if `attend` is right, False if it is not."""


print(course.check_finds_mistakes(is_right))

# %% [markdown]
# The next cell has solutions. It is folded; try first.

# %% tags=["hide-cell"] jupyter={"source_hidden": true, "outputs_hidden": true}
# Solutions. Try first: each prints the difference between right and wrong.
x = torch.randn(1, 6, 64)
with torch.no_grad():
    q, k, v = attnpack.MultiHeadAttention(64, 4).project(x)
    scores = attnpack.attention_scores(q, k, stage="scaled")
    print("1. sums of rows over keys:", scores.softmax(-1).sum(-1)[0, 0, :2], scores.softmax(-2).sum(-1)[0, 0, :2])
    later = torch.ones(6, 6, dtype=torch.bool).triu(1)
    other = x.clone()
    other[:, -1] += 1  # change the future: row 0 must not move
    for name, mask in (("may attend", ~later), ("hidden", later)):
        moved = [attnpack.attention(a, a, a, mask)[:, :, 0] for a in (x[:, None], other[:, None])]
        print(f"2. True = {name}: row 0 moves by {scientific(largest_difference(*moved))}")


def is_right(attend):
    q, k, v = torch.randn(3, 2, 6, 20).unbind(0)  # 2 texts, 6 tokens, 4 heads of 5: all sizes differ
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    heads = [each.unflatten(-1, (4, 5)).transpose(1, 2) for each in (q, k, v)]
    wanted = attnpack.attention(*heads, mask).transpose(1, 2).flatten(2)
    return torch.allclose(attend(q, k, v, 4, mask), wanted, atol=1e-5)


print("3.", course.check_finds_mistakes(is_right))
assert course.check_finds_mistakes(is_right) == "right"
