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
# # The newest variants of softmax attention, side by side
#
# *You need* [grouped_query_attention](grouped_query_attention.ipynb) and
# [latent_attention](latent_attention.ipynb). *You learn* what the models of 2025 and 2026 changed in attention: for
# each change a picture, the formula, a few lines of plain PyTorch, and one number; then what each caches and computes
# per token. *Runs in* half a minute.
#
# Gates, sinks, keys as values, shared keys, differential attention and sparse attention are options or classes of
# attnpack, and the plain lines are compared with them. **GTA, GLA, MTLA and TPA are shown by reference code only**:
# `attnpack.reference` has their mathematics, and attnpack has no module for them. Attention without a softmax has a
# notebook of its own, [linear_attention](linear_attention.ipynb).
#
# In the pictures blue asks, orange offers, green gives and pink is a latent; yellow frames are what a cache keeps.
# Each variant names its source.
# The glossary has the [symbols](../docs/notebooks.md#glossary-of-symbols) and the
# [words](../docs/notebooks.md#glossary-of-words).

# %%
import math
from functools import partial

import attnpack
import matplotlib.pyplot as plt
import torch
from attnpack import reference
from attnpack.tools import bench, course
from attnpack.tools.course import largest_difference, time_in_turn
from attnpack.tools.plot import attention as plot_attention
from attnpack.tools.plot import newest
from attnpack.tools.plot.colours import PLAIN, WEIGHT
from matplotlib.colors import ListedColormap

torch.manual_seed(0)
width, heads, groups, dim, length = 64, 4, 2, 16, 12  # E, query heads, key-value heads, D, tokens
x = torch.randn(2, length, width)
later = torch.ones(length, length, dtype=torch.bool).triu(1)


def rope():
    return attnpack.RotaryEmbedding(dim)


def grouped(**settings):
    return attnpack.GroupedQueryAttention(width, heads, groups, causal=True, rope=rope(), **settings)


def cut(x, count):
    """[B, L, count * D] -> [B, count, L, D]"""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def join(heads):
    """[B, H, L, D] -> [B, L, H * D]"""
    return heads.transpose(1, 2).flatten(2)


def scores_of(q, k):
    """Causal scores [B, H, L, L]; key-value heads are repeated for their groups."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(later, -math.inf)


def average(weights, v):
    """The weighted values [B, H, L, D]."""
    return weights @ v.repeat_interleave(weights.shape[1] // v.shape[1], dim=1)


def attend(q, k, v):
    """The attention of the earlier notebooks, which the variants change."""
    return average(scores_of(q, k).softmax(-1), v)


def count(*layers):
    """The weights of layers."""
    return sum(p.numel() for layer in layers for p in layer.parameters())


# %% [markdown]
# ## Gates
#
# A head must give something, even where nothing fits. A gate lets it be silent: a factor between 0 and 1, made from the
# token's own vector, for each head (or for each number of it), before the output projection
# ([Qiu et al. 2025](https://arxiv.org/abs/2505.06708); Qwen3-Next and other families have it).
#
# $$o_h = \sigma(w_h \cdot x) \cdot \text{attention}_h(x)$$

# %%
newest.gate()

# %%
layer = grouped(gate="head")


def gated(x):
    q, k, v = layer.project(x)  # cut into heads, and rotated
    heads_out = attend(q, k, v)  # [B, H, L, D]
    gate = torch.sigmoid(layer.gate_proj(x))  # [B, L, H]: a factor for each head
    return layer.o_proj(join(heads_out * gate.transpose(1, 2).unsqueeze(-1)))


print("plain lines against the module:", largest_difference(gated(x), layer(x)))
print(f"the gate has {count(layer.gate_proj)} of {count(layer):,} weights, and nothing in the cache")

# %% [markdown]
# ## Sinks
#
# Another way to be silent: a learned logit of each head joins the softmax as one more key, with no value (gpt-oss). The
# weights of the real keys then sum to less than 1.
#
# $$w_j = \frac{e^{s_j}}{e^{\text{sink}} + \sum_i e^{s_i}}$$

# %%
layer = grouped(sinks=True)
with torch.no_grad():
    layer.sinks.copy_(torch.tensor([-9.0, 0.0, 1.0, 3.0]))


def with_sinks(x):
    q, k, v = layer.project(x)
    scores = scores_of(q, k)  # [B, H, L, L]
    sink = layer.sinks.view(1, heads, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]  # the sink has no value
    return layer.o_proj(join(average(weights, v))), weights


out, weights = with_sinks(x)
sums = weights.sum(-1).mean((0, 2))
print("plain lines against the module:", largest_difference(out, layer(x)))
print("mean sum of a row's weights:", [f"{s:.2f}" for s in sums.tolist()])

# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure, panels = plt.subplots(1, 4, figsize=(9, 2.6), dpi=110, layout="constrained", sharey=True)
for head, panel in enumerate(panels):
    title = f"sink {layer.sinks[head]:g}: rows sum to {sums[head]:.2f}"
    image = plot_attention.draw_weights(panel, weights[0, head], title=title, vmax=0.5)
    panel.set_xlabel("key")
panels[0].set_ylabel("query")
figure.colorbar(image, ax=panels, label="weight", extend="max")
plt.show()

# %% [markdown]
# ## Keys as values
#
# Gemma 4 has layers without `v_proj`: the value is the key before its rotation. The layer has fewer weights. A cache
# could hold half as much, if it rotated keys when it reads them. attnpack's caches store keys after the rotation, so
# they store both.
#
# $$v = W_k x, \qquad k = \text{rotate}(v)$$

# %%
newest.keys_as_values()

# %%
layer = grouped(keys_as_values=True)


def without_values(x):
    q, v = cut(layer.q_proj(x), heads), cut(layer.k_proj(x), groups)
    return layer.o_proj(join(attend(layer.rope(q), layer.rope(v), v)))


print("plain lines against the module:", largest_difference(without_values(x), layer(x)))
print(f"{count(layer):,} weights; with values of their own {count(grouped()):,}")

# %% [markdown]
# ## Keys shared between layers
#
# A layer may read the keys and values of an earlier layer
# ([Brandon et al. 2024](https://arxiv.org/abs/2405.12981); Gemma 3n and 4). It has queries of its own, and caches
# nothing:
#
# $$o^{(2)} = \text{attention}\big(W_q^{(2)} x^{(2)},\ k^{(1)},\ v^{(1)}\big)$$

# %%
newest.shared_keys()

# %%
below, above, cache = grouped(), grouped(), attnpack.DynamicCache()


def two_layers(x):
    q, k, v = below.project(x)
    first = below.o_proj(join(attend(q, k, v)))
    q2 = above.rope(cut(above.q_proj(first), heads))
    return above.o_proj(join(attend(q2, k, v)))  # k and v of the layer below


with torch.no_grad():
    first = below(x, cache=cache)
    print("plain lines against the modules:", largest_difference(two_layers(x), above(first, kv_from=cache)))
print(f"two layers cache {cache.nbytes:,} bytes; with a cache each {2 * cache.nbytes:,}")

# %% [markdown]
# ## Queries of low rank
#
# MFA ([Hu et al. 2024](https://arxiv.org/abs/2412.19255); Step-3) has many wide query heads over one key-value head. It
# makes the queries from a short latent, so that their projection stays small. The cache is MQA's.
#
# $$q = W_b\, \text{norm}(W_a x)$$

# %%
newest.low_rank_queries()

# %%
layer = attnpack.GroupedQueryAttention(width, heads, 1, causal=True, rope=rope(), q_lora_rank=8)


def low_rank(x):
    short = layer.q_a_proj(x)  # [B, L, 8]
    q = cut(layer.q_b_proj(layer.q_a_layernorm(short)), heads)
    k, v = cut(layer.k_proj(x), 1), cut(layer.v_proj(x), 1)
    return layer.o_proj(join(attend(layer.rope(q), layer.rope(k), v)))


print("plain lines against the module:", largest_difference(low_rank(x), layer(x)))
print(f"queries from {count(layer.q_a_proj, layer.q_b_proj):,} weights; without a latent {width * heads * dim:,}")

# %% [markdown]
# ## Differential attention
#
# The difference of two softmaxes cancels what both look at. [Version 1](https://arxiv.org/abs/2410.05258) pairs heads h
# and h + H/2, gives each pair the values of two heads, and norms the difference. Version 2 pairs heads 2h and 2h + 1,
# whose keys are the same. It doubles the query heads, and has a factor for each token and no norm. It is the shorter
# one, so it is shown:
#
# $$o_h = \big(\text{softmax}(q_{2h}\, k^\top) - \sigma(w_h \cdot x)\, \text{softmax}(q_{2h+1}\, k^\top)\big)\, v$$

# %%
newest.differential()

# %%
layer = attnpack.DifferentialAttention(width, heads, groups, version=2, causal=True, rope=rope())


def difference(x):
    q, k, v = layer.project(x)  # q has 2 H heads
    weights = scores_of(q, k).softmax(-1)
    factor = torch.sigmoid(layer.lambda_proj(x)).transpose(1, 2).unsqueeze(-1)  # [B, H, L, 1]
    weights = weights[:, 0::2] - factor * weights[:, 1::2]
    return layer.o_proj(join(average(weights, v))), weights


out, weights = difference(x)
print("plain lines against the module:", largest_difference(out, layer(x)))
print(f"weights may be negative: the least is {weights.min():.2f}; a row sums to {weights.sum(-1).mean():.2f} (mean)")

# %% [markdown]
# ## Sparse attention
#
# A long text has many keys, and a query needs few of them. A selector names the keys that a query reads:
#
# - DeepSeek-V3.2's *lightning indexer* scores all keys by small heads, and a query reads the keys with the best scores:
#   $I_j = \sum_h w_h\, \text{relu}(q_h \cdot k_j)$. (DeepSeek-V3.2 has it before latent attention:
#   `SparseLatentAttention`.)
# - MoBA ([Lu et al. 2025](https://arxiv.org/abs/2502.13189)) scores blocks of keys by the mean of the block's keys. A
#   query reads the best blocks and its own.
# - MiniMax-M3 scores a block by the greatest product of the query and one of its keys.
#
# The choice has no gradient. Scores of blocks have no weights. The indexer has some, and learns them by a loss of its
# own: the KL divergence (see the glossary) between attention's weights and the softmax of its scores.

# %%
newest.indexer()

# %%
layer = attnpack.SparseAttention(width, heads, groups, top_k=4, index_heads=2, causal=True, rope=rope())


def indexed(x):
    small_q = layer.rope(cut(layer.index_q_proj(x), 2))  # [B, 2, L, D]
    small_k = layer.rope(layer.index_k_norm(layer.index_k_proj(x)).unsqueeze(1))  # [B, 1, L, D]
    products = (small_q @ small_k.transpose(-2, -1)).relu()
    index = (products * layer.index_weights_proj(x).transpose(1, 2).unsqueeze(-1)).sum(1)  # [B, L, L]
    best = index.masked_fill(later, -math.inf).sort(dim=-1, descending=True, stable=True).indices[..., :4]
    named = torch.zeros_like(index, dtype=torch.bool).scatter(-1, best, True) & ~later
    q, k, v = layer.project(x)
    weights = scores_of(q, k).masked_fill(~named.unsqueeze(1), -math.inf).softmax(-1)
    return layer.o_proj(join(average(weights, v))), named


out, named = indexed(x)
print("plain lines against the module:", largest_difference(out, layer(x)))
print(f"a query reads at most {named.sum(-1).max()} of {length} keys")

# %% tags=["hide-input"] jupyter={"source_hidden": true}
blocks = attnpack.SparseAttention(width, heads, groups, selector="mean", top_k=2, key_block=3, causal=True, rope=rope())
_, weights = blocks(x, need_weights=True)
figure, panels = plt.subplots(1, 2, figsize=(6.6, 3.2), dpi=110, layout="constrained", sharey=True)
kinds = ((named[0], "indexer: 4 keys"), (weights[0, 0] > 0, "means: 2 blocks of 3"))
for panel, (picture, title) in zip(panels, kinds, strict=True):
    shown = torch.where(picture, 2, torch.where(later, 0, 1))
    image = panel.imshow(shown, cmap=ListedColormap(["white", PLAIN, WEIGHT]), vmin=0, vmax=2)
    panel.set(title=title, xlabel="key", xticks=range(0, length, 2), yticks=range(0, length, 2))
    panel.hlines([i - 0.5 for i in range(1, length)], -0.5, length - 0.5, color="white", linewidth=1)
    panel.vlines([i - 0.5 for i in range(1, length)], -0.5, length - 0.5, color="white", linewidth=1)
panels[0].set_ylabel("query")
bar = figure.colorbar(image, ax=panels, ticks=[1 / 3, 1, 5 / 3])
bar.set_ticklabels(["future", "not named", "read"])
plt.show()

# %% [markdown]
# ## GTA: a value that is half of a key
#
# [Zadouri et al. 2025](https://arxiv.org/abs/2505.21487): each group has one state s. It is the value, and its first
# half is the first half of the key. The other half is one rotated key for all heads.
#
# $$v = s = W_s x, \qquad k = [\,s_{1 \dots D/2}\,,\ \text{rotate}(W_r x)\,]$$

# %%
newest.tied()

# %%
half_rope = attnpack.RotaryEmbedding(dim // 2)
w_q, w_s, w_r = (torch.randn(size, width) / 8 for size in (heads * dim, groups * dim, dim // 2))


def tied_attention(x):
    q, s = cut(x @ w_q.T, heads), cut(x @ w_s.T, groups)
    q = torch.cat([q[..., : dim // 2], half_rope(q[..., dim // 2 :])], -1)
    rotated = half_rope((x @ w_r.T).unsqueeze(1))  # [B, 1, L, D / 2]
    k = torch.cat([s[..., : dim // 2], rotated.expand(-1, groups, -1, -1)], -1)
    return attend(q, k, s), (q, s, rotated)


out, made = tied_attention(x)
print("plain lines against attnpack.reference:", largest_difference(out, reference.tied_attention(*made, causal=True)))
print(f"cached per token: {groups * dim + dim // 2} numbers; GQA of the same heads {2 * groups * dim}")

# %% [markdown]
# ## GLA: two latents, for two devices
#
# The same paper: latent attention with two latents, each for half of the heads. Two devices can then hold one each,
# where each needs MLA's one latent whole.
#
# $$k^{(h)} = [\,W_{UK}^{(h)} c_{g(h)}\,,\ \text{rotate}(W_r x)\,], \qquad v^{(h)} = W_{UV}^{(h)} c_{g(h)}$$

# %%
newest.latents_in_groups()

# %%
latent_dim = 2 * dim
w_c, w_q2 = torch.randn(2 * latent_dim, width) / 8, torch.randn(heads * (dim + dim // 2), width) / 8
w_uk, w_uv = torch.randn(2, heads, dim, latent_dim).div(6).unbind(0)


def grouped_latents(x):
    q, c = cut(x @ w_q2.T, heads), cut(x @ w_c.T, 2)  # c: [B, 2, L, C]
    q = torch.cat([q[..., :dim], half_rope(q[..., dim:])], -1)
    rotated = half_rope((x @ w_r.T).unsqueeze(1))
    of_head = c.repeat_interleave(heads // 2, dim=1)  # the latent of each head
    k = torch.cat([of_head @ w_uk.transpose(-2, -1), rotated.expand(-1, heads, -1, -1)], -1)
    return attend(q, k, of_head @ w_uv.transpose(-2, -1)), (q, c, rotated[:, 0])


out, made = grouped_latents(x)
wanted = reference.grouped_latent_attention(*made, w_uk, w_uv, causal=True)
print("plain lines against attnpack.reference:", largest_difference(out, wanted))
print(f"each of two devices holds {latent_dim + dim // 2} of {2 * latent_dim + dim // 2} numbers per token")

# %% [markdown]
# ## MTLA: neighbours in time share a latent
#
# [Deng and Woodland 2025](https://arxiv.org/abs/2505.13544): the latents of s tokens are summed into one, each times a
# learned weight. A token reads the finished sums before it and its own, unfinished one.
#
# $$m_p = \sum_{t \,\in\, \text{part } p} \sigma(w \cdot x_t)\, c_t$$

# %%
newest.merged_latents(6, 2)

# %%
stride, w_one = 2, torch.randn(width) / 8


def merged(x):
    weighted = (x @ w_c.T[:, :latent_dim]) * torch.sigmoid(x @ w_one).unsqueeze(-1)  # [B, L, C]
    place = torch.arange(length)
    same_part = place[:, None] // stride == place // stride
    sums = (same_part & ~later).float() @ weighted  # of each token's part, as far as the token
    finished = (place % stride == stride - 1) & ~later
    return sums, finished | torch.eye(length, dtype=torch.bool)


def over_merged(q, sums, mask):
    k, v = (sums.unsqueeze(1) @ w.transpose(-2, -1) for w in (w_uk, w_uv))  # of each head, from the same latents
    scores = (q @ k.transpose(-2, -1) / math.sqrt(dim)).masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ v  # [B, H, L, D]


q = cut(x @ w_q.T, heads)
sums, mask = merged(x)
wanted = reference.merge_latents(x @ w_c.T[:, :latent_dim], torch.sigmoid(x @ w_one), stride)
k, v = (wanted[0].unsqueeze(1) @ w.transpose(-2, -1) for w in (w_uk, w_uv))
wanted_out = reference.attention(q, k, v, wanted[1])
print("plain sums against attnpack.reference:", largest_difference(sums, wanted[0]))
print("the output against attnpack.reference:", largest_difference(over_merged(q, sums, mask), wanted_out))
print(f"the same mask: {torch.equal(mask, wanted[1])}; token {length} reads {mask[-1].sum()} latents")

# %% [markdown]
# ## TPA: products of heads and dims
#
# [Zhang et al. 2025](https://arxiv.org/abs/2501.06425): queries, keys and values are means of R products of a vector
# over heads and a vector over dims. These vectors are cached, not the keys.
#
# $$k_{h,d} = \frac{1}{R} \sum_{r=1}^{R} a_{r,h}\, b_{r,d}$$

# %%
newest.tensor_products()

# %%
rank = 2
w_a = torch.randn(3, rank * heads, width) / 8  # for queries, keys, values
w_b = torch.randn(3, rank * dim, width) / 8


def tensor_product(x, w_a, w_b):
    a = (x @ w_a.T).unflatten(-1, (rank, heads))  # [B, L, R, H]
    b = (x @ w_b.T).unflatten(-1, (rank, dim))  # [B, L, R, D]
    return (a.unsqueeze(-1) * b.unsqueeze(-2)).mean(2).transpose(1, 2), (a, b)  # [B, H, L, D]


made = [tensor_product(x, *pair) for pair in zip(w_a, w_b, strict=True)]  # of q, k, v
out = attend(*(product for product, _ in made))
wanted = reference.attention(*(reference.tensor_product(*vectors) for _, vectors in made), causal=True)
print("plain lines against attnpack.reference:", largest_difference(out, wanted))
print(f"cached per token for keys: {rank * (heads + dim)} numbers; the keys of all heads have {heads * dim}")

# %% [markdown]
# ## The costs of each variant
#
# The table has the numbers cached per token and layer, and the multiplications for one new token over `n` cached keys,
# without the projections. The layer has 32 heads of 128, and 8 key-value heads where there are groups. The latent has
# 512 + 64 numbers, and is absorbed: no key is made of it. MFA has 64 query heads of 256 on one key-value head, as in
# Step-3. The indexer has 16 heads of 128 and names 2,048 keys. The selectors of blocks name 32 blocks of 64 keys. The
# means are made of the sum of each block, which is kept in fp32.

# %%
H, D, G, C, R = 32, 128, 8, 512, 64
dense = {
    "MHA": (2 * H * D, 2 * H * D),
    "GQA, gated, or with sinks": (2 * G * D, 2 * H * D),
    "keys as values": (2 * G * D, 2 * H * D),
    "keys shared by two layers": (G * D, 2 * H * D),
    "differential 1": (3 * G * D, 3 * H * D),
    "differential 2": (2 * G * D, 4 * H * D),
    "MFA": (2 * 256, 2 * 64 * 256),
    "MLA": (C + R, H * (2 * C + R)),
    "GTA": (G * D + D // 2, 2 * H * D),
    "GLA, two latents of 256": (2 * 256 + R, H * (2 * 256 + R)),
    "MTLA, two tokens per latent": ((C + R) // 2, H * (2 * C + R) // 2),
    "TPA, rank 2": (2 * 2 * (H + D), 2 * (2 * H * D + 2 * H)),
}
lengths = [2**10, 2**12, 2**14, 2**16, 2**18, 2**20]
work = {name: [per_key * n for n in lengths] for name, (_, per_key) in dense.items()}
bytes_per_token = {name: 2 * numbers for name, (numbers, _) in dense.items()}
work["sparse, indexer"] = [16 * D * n + 2 * H * D * min(n, 2048) for n in lengths]
work["sparse, means of blocks"] = [H * D * (n // 64) + 2 * H * D * min(n, 2048) for n in lengths]
work["sparse, greatest products"] = [H * D * n + 2 * H * D * min(n, 2048) for n in lengths]
work["sparse MLA, indexer"] = [16 * D * n + H * (2 * C + R) * min(n, 2048) for n in lengths]
bytes_per_token["sparse, greatest products"] = 2 * 2 * G * D
bytes_per_token["sparse MLA, indexer"] = 2 * (C + R + D)
bytes_per_token["sparse, indexer"] = 2 * (2 * G * D + D)
bytes_per_token["sparse, means of blocks"] = 2 * 2 * G * D + 4 * G * D // 64
heading = "".join(f"{n // 1024:>8,}k" for n in lengths)
print(f"{'':34}{'bytes':>8}   millions of multiplications at a length of\n{'':34}{'':>8}{heading}")
for name, row in work.items():
    print(f"{name:34}{bytes_per_token[name]:>8,}" + "".join(f"{w / 1e6:>9,.1f}" for w in row))
most, least = max(bytes_per_token.values()), min(bytes_per_token.values())
print(f"bytes: the largest cache is {most / least:.0f} times the smallest")
all_keys, named = work["GQA, gated, or with sinks"][-1], work["sparse, indexer"][-1]
print(f"work at 1,024k: the indexer takes 1/{all_keys / named:.0f} of GQA's")
assert work["sparse, means of blocks"][-1] < work["GQA, gated, or with sinks"][-1] / 50
assert work["sparse, indexer"][-1] > work["GQA, gated, or with sinks"][-1] / 5  # the indexer still reads every key

# %% [markdown]
# MHA's cache is 28 times as large as MTLA's. Over 1,024k keys the layer with an indexer takes 1/4 of GQA's work here.
# Longer texts gain hardly more, because the indexer still scores every key, by smaller heads. Means of blocks need one
# product for 64 keys.
#
# ## Time here
#
# One new token over 4,096 and 16,384 cached keys, for those that have modules: 16 heads of 64, 4 key-value heads, fp32,
# one thread. The selectors name 512 keys. The caches hold random numbers.

# %% tags=["hide-input"] jupyter={"source_hidden": true}
embed, many, few, size = 1024, 16, 4, 64
usual = {"causal": True}


def timed(**settings):
    return attnpack.GroupedQueryAttention(embed, many, few, **usual, **settings)


def sparse(**settings):
    return attnpack.SparseAttention(embed, many, few, **usual, **settings)


def differential(version):
    return attnpack.DifferentialAttention(embed, many, few, version=version, head_dim=size, **usual)


layers = {
    "GQA": timed(),
    "gate": timed(gate="head"),
    "sinks": timed(sinks=True),
    "keys as values": timed(keys_as_values=True),
    "shared keys": timed(),
    "differential 1": differential(1),
    "differential 2": differential(2),
    "sparse, indexer": sparse(top_k=512, index_heads=4),
    "sparse, means of blocks": sparse(selector="mean", top_k=8, key_block=64),
    "sparse, greatest products": sparse(selector="max", top_k=8, key_block=64),
}


def filled(name, n):
    """The keywords of a call over n random keys."""
    value_size = 2 * size if name == "differential 1" else size
    keys, values = torch.randn(1, few, n, size), torch.randn(1, few, n, value_size)
    if name in ("sparse, indexer", "sparse, means of blocks"):
        cache = attnpack.SparseCache()  # which keeps the indexer's keys, or the sums of blocks
        if name == "sparse, indexer":
            cache.reserve_index(keys[:, :1])[0].copy_(keys[:, :1])
        else:
            cache.keep_sums(64, n)
    else:
        cache = attnpack.StaticCache(1, few, n + 64, size, v_head_dim=value_size)
    held = cache.reserve(keys, values, None)
    held.key[:, :, :n], held.value[:, :, :n] = keys, values
    held.lengths.fill_(n)
    if held.block_sums is not None:
        held.block_sums[:, :, : n // 64] = keys.unflatten(2, (-1, 64)).sum(3)
    cache.commit(n, None)
    return {"kv_from" if name == "shared keys" else "cache": cache}


token = torch.randn(1, 1, embed)
threads = torch.get_num_threads()
torch.set_num_threads(1)
took = {}
with torch.inference_mode():
    for n in (4096, 16384):
        calls = {name: filled(name, n) for name in layers}
        took[n] = time_in_turn({name: partial(layer, token, **calls[name]) for name, layer in layers.items()}, 40)
print(f"milliseconds per token{'':10}{'4,096':>10}{'16,384':>10}")
for name in layers:
    print(f"{name:32}{took[4096][name]:>10.2f}{took[16384][name]:>10.2f}")
for name in ("sparse, indexer", "sparse, means of blocks", "sparse, greatest products"):
    gains = [took[n]["GQA"] / took[n][name] for n in took]
    print(f"{name}: {gains[0]:.2f} and {gains[1]:.2f} times as fast as GQA")
print(f"on {bench.conditions()}")
torch.set_num_threads(threads)

# %% [markdown]
# The sparse layers read 512 keys for the attention. To choose them, the indexer multiplies with each of its small keys.
# MoBA multiplies with the sum of each block, which a `SparseCache` keeps. For the greatest products every key is read.
# Over 4,096 keys the choice costs about what it saves: the three layers are 0.81, 1.07 and 0.94 times as fast as GQA.
# Over 16,384 keys all three are faster than GQA here: the means 2.58 times as fast, the indexer 1.62 times, the
# greatest products 1.15 times.
#
# ## Which one is best?
#
# That is a question for training runs with equal parameters, equal text and several seeds. `attnpack compare` does
# them, and writes a table and a picture of loss against cache and time
# ([how to use it, and a stored run](../docs/howto/compare.md)). The notebook
# [conversion_and_uptraining](conversion_and_uptraining.ipynb) shows its stored run.
#
# ## Summary
#
# - Gates and sinks let a head be silent. They cost no cache.
# - Caches shrink by sharing: of heads (GQA), of layers, of latents, of neighbours in time (MTLA).
# - Sparse attention bounds the keys that attention reads. The work of choosing them still grows with the length.
# - An indexer is trained by a loss of its own, because its choice has no gradient.
#
# ## Exercises
#
# 1. From how many cached keys on does the layer with an indexer multiply less than GQA? (Use the table's formulas.)
# 2. Train only the indexer of an untrained layer, on random inputs. How much of the attention's weight do its 4 keys
#    hold before and after?
# 3. *Implement* MoBA's choice for one head: a query reads the keys of its own block up to itself, and all keys of the
#    `count - 1` earlier blocks whose mean key has the largest product with it. The cell below checks it.


# %%
def choose(query, key, block, count):
    """Yours: bool [L, L] for query and key [L, D], True where the query of the row reads the key of the column."""


print(course.check_blocks(choose))

# %% [markdown]
# The next cell has solutions. It is folded; try first.

# %% tags=["hide-cell"] jupyter={"source_hidden": true, "outputs_hidden": true}
# Solutions. Try first.
cost = 16 * D  # of the indexer for a key
even = 2 * H * D * 2048 / (2 * H * D - cost)
print(f"1. from n = {even:,.0f} on: 2 H D n = {cost} n + 2 H D 2,048")
assert 2048 < even < 4096


torch.manual_seed(0)
student = attnpack.SparseAttention(width, heads, groups, top_k=4, index_heads=2, causal=True, rope=rope())
inputs = torch.randn(8, 24, width)
with torch.no_grad():
    student.q_proj.weight.mul_(4)  # sharper attention: there is something to find


@torch.no_grad()
def held():
    q, k, _ = student.project(inputs)
    _, named = student(inputs, need_weights=True)
    return (reference.attention_scores(q, k, causal=True) * (named > 0)).sum(-1)[..., 8:].mean().item()


before = held()
optimiser = torch.optim.Adam([p for name, p in student.named_parameters() if name.startswith("index_")], lr=1e-2)
for _ in range(150):
    optimiser.zero_grad()
    student.indexer_loss(inputs).backward()
    optimiser.step()
print(f"2. {before:.0%} before, {held():.0%} after")
assert held() > before


def choose(query, key, block, count):
    place = torch.arange(len(query))
    number, blocks = place // block, torch.arange(len(query) // block)
    scores = query @ key.unflatten(0, (-1, block)).mean(dim=1).T  # [L, blocks]
    past = blocks < number[:, None]
    best = scores.masked_fill(~past, -math.inf).topk(count - 1, dim=-1).indices
    named = torch.zeros_like(past).scatter(1, best, True) & past | (blocks == number[:, None])
    return named.repeat_interleave(block, dim=1) & (place <= place[:, None])


print("3.", course.check_blocks(choose))
assert course.check_blocks(choose) == "right"

# %% [markdown]
# Next: [linear_attention](linear_attention.ipynb).
