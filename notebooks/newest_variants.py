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
# [latent_attention](latent_attention.ipynb). *You learn* what the models of 2025 and 2026 changed in attention, each
# change in a few lines; what each caches and computes per token; and how little a small model says about which is best.
# *Runs in* about a minute.
#
# Gates, sinks, keys as values, shared keys, differential attention and sparse attention are options or classes of
# attnpack. **GTA, GLA, MTLA and TPA are shown by reference code only**:
# `attnpack.reference` has their mathematics, and attnpack has no module for them. Linear attention is not shown here:
# [Gated DeltaNet](https://arxiv.org/abs/2412.06464), which most layers of Qwen3-Next have, and Kimi Delta Attention of
# [Kimi-Linear](https://arxiv.org/abs/2510.26692). It keeps a state of fixed size, and no cache that grows.
#
# Sources stand at each variant. Symbols: [glossary](../docs/notebooks.md).

# %%
import math
import statistics
import time

import attnpack
import matplotlib.pyplot as plt
import torch
from attnpack import reference
from attnpack.tools import bench
from attnpack.tools.compare import models, training
from attnpack.tools.compare.text import guessing_loss, read_text
from torch import nn
from torch.testing import assert_close

torch.manual_seed(0)
threads = torch.get_num_threads()
torch.set_num_threads(1)
width, heads, groups, dim, length = 64, 4, 2, 16, 12
x = torch.randn(2, length, width)


def rope():
    return attnpack.RotaryEmbedding(dim)


def grouped(**settings):
    return attnpack.GroupedQueryAttention(width, heads, groups, causal=True, rope=rope(), **settings)


def joined(out):
    """[B, H, L, D] -> [B, L, H * D]"""
    return out.transpose(1, 2).flatten(2)


# %% [markdown]
# ## Gates
#
# `o = attention(q, k, v) * sigmoid(W_g x)`, one factor for each head or for each number, before the output projection
# ([Qiu et al. 2025](https://arxiv.org/abs/2505.06708); Qwen3-Next and other families have it). A head can say
# "nothing here" without a token to look at.

# %%
for gate in ("head", "element"):
    layer = grouped(gate=gate)
    out = joined(reference.attention(*layer.project(x), causal=True))
    assert_close(layer(x), layer.o_proj(reference.gate_heads(out, layer.gate_proj(x), heads)))
    print(f"gate={gate!r}: {layer.gate_proj.weight.numel():,} more parameters, nothing more in the cache")

# %% [markdown]
# ## Sinks
#
# A learned logit of each head joins the denominator: `w_j = exp(s_j) / (exp(sink) + sum_i exp(s_i))` (gpt-oss). It too
# lets a head look at nothing: the weights no longer sum to 1.

# %%
layer = grouped(sinks=True)
with torch.no_grad():
    layer.sinks.copy_(torch.tensor([-9.0, 0.0, 1.0, 3.0]))
    out, weights = layer(x, need_weights=True)
    wanted = reference.attention(*layer.project(x), causal=True, sinks=layer.sinks)
assert_close(out, layer.o_proj(joined(wanted)))
print("mean sum of a row's weights:", [f"{s:.2f}" for s in weights.sum(-1).mean((0, 2)).tolist()])

# %% [markdown]
# ## Keys as values, and keys shared between layers
#
# Gemma 4 has layers without `v_proj`: the value is the key before its rotation. A layer may also read the keys and
# values of an earlier layer ([Brandon et al. 2024](https://arxiv.org/abs/2405.12981); Gemma 3n and 4): it has queries
# of its own, and caches nothing. A cache of keys as values could hold half as much, if it rotated the keys when it
# reads them. attnpack's caches hold rotated keys, and the values too.

# %%
layer = grouped(keys_as_values=True)
q, k, v = layer.project(x)
assert layer.v_proj is None and torch.equal(layer.rope(v), k)
below, above, cache = grouped(), grouped(), attnpack.DynamicCache()
with torch.no_grad():
    below(x, cache=cache)
    out = above(x, kv_from=cache)
_, k, v = below.project(x)
assert_close(out, above.o_proj(joined(reference.attention(above.project(x)[0], k, v, causal=True))))
print(f"two layers, one cache: {cache.nbytes:,} bytes")

# %% [markdown]
# ## Queries of low rank
#
# MFA ([Hu et al. 2024](https://arxiv.org/abs/2412.19255); Step-3) has many wide query heads over one key-value head. It
# makes the queries of a small latent, so that their projection stays small: `q = W_b norm(W_a x)`. The cache is MQA's.

# %%
layer = attnpack.GroupedQueryAttention(width, heads, 1, causal=True, rope=rope(), q_lora_rank=8)
query = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x))).unflatten(-1, (heads, dim)).transpose(1, 2)
_, k, v = layer.project(x)
assert_close(layer(x), layer.o_proj(joined(reference.attention(layer.rope(query), k, v, causal=True))))
low = sum(projection.weight.numel() for projection in (layer.q_a_proj, layer.q_b_proj))
print(f"weights that make the queries: {low:,}, and {width * heads * dim:,} without a latent")

# %% [markdown]
# ## Differential attention
#
# The difference of two softmaxes cancels what both look at. [Version 1](https://arxiv.org/abs/2410.05258) pairs heads
# `h` and `h + H/2`, gives each pair the values of two heads, and norms the difference. Version 2 pairs `2h` and
# `2h + 1`, whose keys are the same, doubles the query heads, and has a factor for each token and no norm.

# %%
first = attnpack.DifferentialAttention(width, heads, groups, version=1, causal=True, rope=rope())
second = attnpack.DifferentialAttention(width, heads, groups, version=2, causal=True, rope=rope())
q, k, v = first.project(x)
value = torch.cat(first.v_proj(x).unflatten(-1, (groups, dim)).transpose(1, 2).chunk(groups, 1), 1)
factor = (first.lambda_q1 @ first.lambda_k1).exp() - (first.lambda_q2 @ first.lambda_k2).exp() + first.lambda_init
out = reference.differential_attention(q, k, value, factor, version=1, causal=True)
normed = out * (out.square().mean(-1, keepdim=True) + first.eps).rsqrt() * (1 - first.lambda_init)
assert_close(first(x), first.o_proj(joined(normed)))
factor = second.lambda_proj(x).sigmoid().transpose(1, 2).unsqueeze(-1)
out = reference.differential_attention(*second.project(x), factor, version=2, causal=True)
assert_close(second(x), second.o_proj(joined(out)))
print("numbers cached per token and layer:", {"version 1": 3 * groups * dim, "version 2": 2 * groups * dim})

# %% [markdown]
# ## Sparse attention
#
# A selector names the keys that a query reads. DeepSeek-V3.2's *lightning indexer* scores all keys by small heads,
# `I = sum_h w_h relu(q_h k)`, and a query reads the keys with the best scores. DeepSeek-V3.2 itself has it before
# latent attention: `SparseLatentAttention`. MoBA ([Lu et al. 2025](https://arxiv.org/abs/2502.13189)) scores blocks of
# keys: the product of the query and the mean of the block's keys. A query reads the best blocks and its own. MiniMax-M3
# scores a block by the greatest product of the query and one of its keys.
#
# The choice of keys has no gradient. The scores of blocks have no parameters. The indexer has some, and learns them
# by a loss of its own: the KL divergence between the attention's weights and the softmax of its scores.

# %%
indexed = attnpack.SparseAttention(width, heads, groups, top_k=4, index_heads=2, causal=True, rope=rope())
query = indexed.rope(indexed.index_q_proj(x).unflatten(-1, (2, dim)).transpose(1, 2))
key = indexed.rope(indexed.index_k_norm(indexed.index_k_proj(x)).unsqueeze(1))
scores = reference.index_scores(query, key, indexed.index_weights_proj(x))
seen = torch.ones(length, length, dtype=torch.bool).tril()
ordered = scores.masked_fill(~seen, -math.inf).sort(dim=-1, descending=True, stable=True)
best = ordered.indices[..., :4]  # relu makes many scores 0: of equal ones the lower numbers
mask = torch.zeros(2, length, length, dtype=torch.bool).scatter(-1, best, True) & seen
q, k, v = indexed.project(x)
assert_close(indexed(x), indexed.o_proj(joined(reference.attention(q, k, v, mask.unsqueeze(1)))))
probs = reference.attention_scores(q, k, causal=True)
wanted = reference.indexer_loss(scores / math.sqrt(2 * dim), probs, seen.expand_as(mask))
assert_close(indexed.indexer_loss(x), wanted)
blocks = attnpack.SparseAttention(width, heads, groups, selector="mean", top_k=2, key_block=3, causal=True, rope=rope())
_, weights = blocks(x, need_weights=True)
sizes = {"kv_lora_rank": 24, "q_lora_rank": 16, "qk_nope_head_dim": dim, "qk_rope_head_dim": 8, "v_head_dim": dim}
sizes |= {"causal": True, "rope": attnpack.RotaryEmbedding(8, interleaved=True)}
latent = attnpack.SparseLatentAttention(width, heads, top_k=4, index_heads=2, index_head_dim=dim, **sizes)
every = attnpack.MultiHeadLatentAttention(width, heads, **sizes)
every.load_state_dict({name: t for name, t in latent.state_dict().items() if not name.startswith("indexer.")})
out, read = latent(x, need_weights=True)
assert_close(out, every(x, mask=read > 0))
print(f"a query of the latent layer reads at most {(read > 0).sum(-1).max()} of {length} keys")
figure, panels = plt.subplots(1, 2, figsize=(6.4, 3), dpi=110, layout="constrained")
for panel, picture, title in zip(
    panels, (mask[0], weights[0, 0] > 0), ("indexer, 4 keys", "2 blocks of 3"), strict=True
):
    panel.imshow(picture, cmap="Blues")
    panel.set(title=title, xlabel="key", ylabel="query", xticks=range(0, length, 2), yticks=range(0, length, 2))
plt.show()

# %% [markdown]
# ## By reference code only: GTA, GLA, MTLA, TPA
#
# - **GTA** ([Zadouri et al. 2025](https://arxiv.org/abs/2505.21487)): one state is the value, and half of it half of
#   the key; the other half is one rotated key for all heads.
# - **GLA** (the same paper): latent attention with two latents, each for half of the heads, so that two devices can
#   hold one each.
# - **MTLA** ([Deng and Woodland 2025](https://arxiv.org/abs/2505.13544)): latents of `s` tokens are merged into one.
# - **TPA** ([Zhang et al. 2025](https://arxiv.org/abs/2501.06425)): queries, keys and values are sums of R products of
#   a vector over heads and a vector over dims; the vectors are cached.


# %%
class Reference(nn.Module):
    """Layers of these four from `attnpack.reference`, with rotation and an output projection."""

    embed_dim = width

    def __init__(self, kind):
        super().__init__()
        self.kind, self.rope = kind, attnpack.RotaryEmbedding(dim)
        self.half_rope = attnpack.RotaryEmbedding(dim // 2)
        latent = 2 * dim
        sizes = {
            "GTA": {"q": heads * dim, "tied": groups * dim, "shared": dim // 2},
            "GLA": {"q": heads * (dim + dim // 2), "latents": 2 * latent, "shared": dim // 2},
            "MTLA": {"q": heads * (dim + dim // 2), "latents": latent, "shared": dim // 2, "weight": 1},
            "TPA": {"a": 3 * 2 * heads, "b": 3 * 2 * dim},
        }
        self.maps = nn.ModuleDict({name: nn.Linear(width, size, bias=False) for name, size in sizes[kind].items()})
        self.o_proj = nn.Linear(heads * dim, width, bias=False)
        if kind in ("GLA", "MTLA"):
            self.up = nn.Parameter(torch.randn(2, heads, dim, latent) / math.sqrt(latent))

    def forward(self, x, **settings):  # a block passes its settings, such as causal
        made = {name: layer(x) for name, layer in self.maps.items()}
        if self.kind == "TPA":
            a, b = made["a"].unflatten(-1, (3, 2, heads)).unbind(2), made["b"].unflatten(-1, (3, 2, dim)).unbind(2)
            q, k, v = (reference.tensor_product(*both) for both in zip(a, b, strict=True))
            out = reference.attention(self.rope(q), self.rope(k), v, causal=True)
        else:
            query = made["q"].unflatten(-1, (heads, -1)).transpose(1, 2)
            if self.kind == "GTA":
                query = torch.cat([query[..., : dim // 2], self.half_rope(query[..., dim // 2 :])], -1)
                tied = made["tied"].unflatten(-1, (groups, dim)).transpose(1, 2)
                out = reference.tied_attention(query, tied, self.half_rope(made["shared"].unsqueeze(1)), causal=True)
            else:
                query = torch.cat([query[..., :dim], self.half_rope(query[..., dim:])], -1)
                shared = self.half_rope(made["shared"].unsqueeze(1))[:, 0]
                if self.kind == "GLA":
                    latents = made["latents"].unflatten(-1, (2, -1)).transpose(1, 2)
                    out = reference.grouped_latent_attention(query, latents, shared, *self.up, causal=True)
                else:
                    weight = made["weight"].squeeze(-1).sigmoid()
                    merged, mask = reference.merge_latents(made["latents"], weight, stride=2)
                    out = reference.latent_attention(query, merged, shared, *self.up, mask=mask)
        return self.o_proj(joined(out))


for kind in ("GTA", "GLA", "MTLA", "TPA"):
    layer, changed = Reference(kind), x.clone()
    changed[:, -1] += 1
    assert_close(layer(changed)[:, :-1], layer(x)[:, :-1])  # causal
    print(f"{kind}: {sum(p.numel() for p in layer.parameters()):,} parameters, causal")

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
    "MTLA, two tokens a latent": ((C + R) // 2, H * (2 * C + R) // 2),
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
print(f"work at 1,024k: the indexer takes {all_keys / named:.1f} times less than GQA")
assert work["sparse, means of blocks"][-1] < work["GQA, gated, or with sinks"][-1] / 50
assert work["sparse, indexer"][-1] > work["GQA, gated, or with sinks"][-1] / 5  # the indexer still reads every key

# %% [markdown]
# MHA's cache is 28 times as large as MTLA's. Over 1,024k keys the indexer takes 4.0 times less work than GQA here.
# Longer texts gain no more, because the indexer still scores every key, by smaller heads. Means of blocks need one
# product for 64 keys.
#
# ## Time here
#
# One new token over 4,096 and 16,384 cached keys, for those that have modules: 16 heads of 64, 4 key-value heads, fp32,
# one thread. The selectors name 512 keys. The caches hold random numbers.

# %%
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
took = {}
with torch.inference_mode():
    for n in (4096, 16384):
        calls = {name: filled(name, n) for name in layers}
        times = {name: [] for name in layers}
        for step in range(40):  # in turn, so that a busy machine slows all of them
            for name, layer in layers.items():
                start = time.perf_counter()
                layer(token, **calls[name])
                if step >= 4:
                    times[name].append(time.perf_counter() - start)
        took[n] = {name: 1e3 * statistics.median(each) for name, each in times.items()}
print(f"milliseconds for a token{'':8}{'4,096':>10}{'16,384':>10}")
for name in layers:
    print(f"{name:32}{took[4096][name]:>10.2f}{took[16384][name]:>10.2f}")
print(f"on {bench.conditions()}")

# %% [markdown]
# The sparse layers read 512 keys for the attention. To choose them, the indexer multiplies with each of its small keys,
# and MoBA with the sum of each block, which a `SparseCache` keeps. So they gain where the attention over all keys
# costs more than the choice: both do at 16,384 keys of this small layer. At 4,096 the indexer loses, and the means of
# blocks gain little. For the greatest products every key is read, so there is less to gain.
#
# ## A small model of each
#
# `attnpack compare` trains models that are equal in parameters, text and steps, for the variants that it knows by name
# ([how to use it, and a stored run](../docs/howto/compare.md)). Its parts serve for any layer. Here two blocks of width
# 64 learn to guess the next byte of Python's manual and sources, each with the same budget of steps, three times from
# other seeds. The feed-forwards take the parameters that attention saves. The model is tiny, the budget short, and the
# text easy: **this cannot say which variant is best**. It shows that each learns, and how large a difference must be
# before it means something.

# %%
steps, batch, context, parameters = 60, 16, 48, 100_000
text = read_text(None, context)


class Below(nn.Module):
    """Keys and values that a layer above reads: with gradients, as in training."""

    embed_dim = width

    def __init__(self):
        super().__init__()
        self.layer, self.kept = grouped(), None

    def forward(self, x, **settings):
        self.kept = self.layer.k_proj(x), self.layer.v_proj(x)
        return self.layer(x, **settings)


class Above(nn.Module):
    embed_dim = width

    def __init__(self, below):
        super().__init__()
        self.below = [below]  # in a list: its parameters are the other layer's
        self.q_proj, self.o_proj = (nn.Linear(width, heads * dim, bias=False) for _ in range(2))
        self.attend = attnpack.ProjectedAttention(heads, groups, dim, causal=True, rope=rope())

    def forward(self, x, **settings):
        return self.o_proj(self.attend(self.q_proj(x), *self.below[0].kept))


def two(make):
    return lambda: [make(), make()]


def shared():
    below = Below()
    return [below, Above(below)]


def selecting(**settings):
    return attnpack.SparseAttention(width, heads, groups, causal=True, rope=rope(), **settings)


def differences(version):
    return attnpack.DifferentialAttention(width, heads, groups, version=version, causal=True, rope=rope())


variants = {
    "GQA": two(grouped),
    "gate by head": two(lambda: grouped(gate="head")),
    "gate by element": two(lambda: grouped(gate="element")),
    "sinks": two(lambda: grouped(sinks=True)),
    "queries of low rank": two(lambda: grouped(q_lora_rank=16)),
    "keys as values": two(lambda: grouped(keys_as_values=True)),
    "shared keys": shared,
    "differential 1": two(lambda: differences(1)),
    "differential 2": two(lambda: differences(2)),
    "sparse, means of blocks": two(lambda: selecting(selector="mean", top_k=3, key_block=4)),
    "sparse, greatest products": two(lambda: selecting(selector="max", top_k=3, key_block=4)),
    **{f"{kind} (reference)": two(lambda kind=kind: Reference(kind)) for kind in ("GTA", "GLA", "MTLA", "TPA")},
}


def make_model(name):
    layers = variants[name]()
    return models.ByteModel(layers, models.equal_hidden_dim(layers, parameters))


def trained_loss(name, seed):
    torch.manual_seed(seed)
    model = make_model(name)
    work = training.ByteTraining(model, text.train, steps, length=context, batch=batch, rate=4e-3, seed=seed)
    while not work.done:
        work.train_step()
    return training.held_out_loss(model, text.held_out)


def of_seeds(names):
    return {name: [trained_loss(name, seed) for seed in range(3)] for name in names}


names = list(variants)
counts = [models.count_parameters(make_model(name)) for name in names]
print(f"all models have {min(counts):,} to {max(counts):,} parameters")
losses = of_seeds(names[:5])

# %%
losses |= of_seeds(names[5:10])

# %%
losses |= of_seeds(names[10:])
start = guessing_loss(text)
figure, axis = plt.subplots(figsize=(7, 3.6), dpi=110, layout="constrained")
for row, found in enumerate(losses.values()):
    axis.plot(found, [row] * 3, "o", color="#0072B2", alpha=0.6, label=None if row else "one seed")
    axis.plot(statistics.mean(found), row, "|", color="#D55E00", markersize=14, label=None if row else "mean")
axis.set(yticks=range(len(losses)), yticklabels=list(losses), xlabel="loss on other text (nats per byte)")
axis.set_title(f"{steps} steps of two small blocks, three seeds each")
axis.legend(fontsize=8)
axis.invert_yaxis()
plt.show()
print(f"{steps} steps of {batch * context} bytes; guessing by frequency alone: {start:.2f}")
print(f"{'':26}{'loss':>6}{'':24}against GQA, seed by seed")
apart = {name: [a - b for a, b in zip(found, losses["GQA"], strict=True)] for name, found in losses.items()}
for name, found in losses.items():
    against = f"{statistics.mean(apart[name]):+.3f} ± {statistics.stdev(apart[name]):.3f}"
    print(f"{name:26}{statistics.mean(found):6.3f}, seeds from {min(found):.3f} to {max(found):.3f}   {against}")
assert all(max(found) < start for found in losses.values())
far = [name for name, seen in apart.items() if abs(statistics.mean(seen)) > 2 * statistics.stdev(seen) > 0]
print("further from GQA than twice their spread:", ", ".join(far))
torch.set_num_threads(threads)

# %% [markdown]
# Read the last columns. Seeds read different text, so the losses of GQA alone reach from 2.469 to 2.526. Runs of one
# seed read the same text, so their difference says more. Gates, both differential layers and TPA end lower than GQA, by
# 0.07 to 0.08, and further away than twice the spread of that difference. All models have as many parameters, so size
# does not explain it. The others stay within twice the spread, both sparse layers among them: this run does not say
# whether reading less is better or worse. GLA ends highest, at 2.545.
#
# ## Summary
#
# - Gates and sinks let a head be silent. They cost no cache.
# - Caches shrink by sharing: of heads (GQA), of layers, of latents, of neighbours in time (MTLA).
# - Sparse attention bounds the keys that attention reads. What chooses them still grows with the length.
# - An indexer is trained by a loss of its own, because its choice has no gradient.
# - Small models on a short budget differ by some hundredths of a nat, and so do seeds. Before you believe a difference,
#   give the models as many parameters and compare runs that read the same text, as `attnpack compare` does.
#
# ## Exercises
#
# 1. From how many cached keys on does the layer with an indexer multiply less than GQA? (Use the table's formulas.)
# 2. With `top_k` as large as the length, is `SparseAttention` the same as `GroupedQueryAttention`? Bit for bit?
# 3. Train the indexer of an untrained layer alone, on random inputs. How much of the attention's weight do its 4 keys
#    hold before and after?

# %%
# Solutions. Try first.
cost = 16 * D  # of the indexer for a key
even = 2 * H * D * 2048 / (2 * H * D - cost)
print(f"1. from n = {even:,.0f} on: 2 H D n = {cost} n + 2 H D 2,048")
assert 2048 < even < 4096
every, layer = selecting(top_k=length), grouped()
layer.load_state_dict({name: t for name, t in every.state_dict().items() if not name.startswith("index_")})
print("2. the same bits:", torch.equal(every(x), layer(x)))
assert torch.equal(every(x), layer(x))
torch.manual_seed(0)
student, inputs = selecting(top_k=4, index_heads=2), torch.randn(8, 24, width)
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
print(f"3. {before:.0%} before, {held():.0%} after")
assert held() > before

# %% [markdown]
# Next: [linear_attention](linear_attention.ipynb).
