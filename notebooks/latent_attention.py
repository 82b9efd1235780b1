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
# # Latent attention: cache less, and never unpack it
#
# *You need* [grouped_query_attention](grouped_query_attention.ipynb). *You learn* how all keys and values come from one
# cached latent, three places for the matrix that makes keys, and when each is cheapest. *Runs in* half a minute.
#
# Sources: [DeepSeek-AI 2024](https://arxiv.org/abs/2405.04434) (DeepSeek-V2, equations 9 to 19),
# [DeepSeek-AI 2024](https://arxiv.org/abs/2412.19437) (V3).
# The glossary has the [symbols](../docs/notebooks.md#glossary-of-symbols) and the
# [words](../docs/notebooks.md#glossary-of-words).
#
# Grouped-query attention makes the cache smaller by letting heads share keys and values. Multi-head latent attention
# (MLA, DeepSeek-V2, 2024) goes another way: all heads keep keys and values of their own, but those are *computed* from
# one short vector per token, the **latent**, and only the latent is cached:
#
# $$c_j = W_{DKV}\, x_j, \qquad k_j^{(h)} = W_{UK}^{(h)} c_j, \qquad v_j^{(h)} = W_{UV}^{(h)} c_j$$
#
# D stands for down, U for up. The names fit all heads together: $W_{UK}$ makes H · d numbers from the C of a latent,
# and H · d is the larger. For a single head they may not fit. $W_{UK}^{(h)}$ makes d numbers from C, and C is often
# larger than d: in DeepSeek-V3 128 from 512, so each head's matrix leads *down*.
#
# Two questions follow. How small is it? And must all those keys and values be computed again at every step?

# %%
import math
from functools import partial

import attnpack
import matplotlib.pyplot as plt
import torch
from attnpack.tools import bench, course
from attnpack.tools.course import largest_difference, time_in_turn
from attnpack.tools.plot import memory as plot_memory
from attnpack.tools.plot import schematic
from attnpack.tools.plot.colours import KINDS

torch.manual_seed(0)
embed_dim, num_heads, head_dim = 512, 8, 64
rank, rope_dim = 256, 32  # C and R: four heads' width and half a head, DeepSeek's proportions


def latent_layer(**changes):
    """8 heads of 64, rotated dims of their own, causal."""
    sizes = {
        "kv_lora_rank": rank,
        "qk_nope_head_dim": head_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": head_dim,
        "rope": attnpack.RotaryEmbedding(rope_dim, interleaved=True),
        "causal": True,
    }
    return attnpack.MultiHeadLatentAttention(embed_dim, num_heads, **{**sizes, **changes})


layer = latent_layer()
print(layer)
schematic.latent(num_heads, note="cached: 1 latent, 1 rotated key")

# %% [markdown]
# ## Where positions go
#
# One thing must be settled first. Rotary embedding rotates a key by an angle that depends on its position. A rotated
# key is no longer $W_{UK} c$ with one fixed matrix, and the method below would not work. So DeepSeek splits a head's
# query and key in two: N dims that come from the latent and are not rotated, and R dims for positions, with one key for
# **all** heads (a small multi-query attention). A score is the sum of both parts. Per token the cache holds the latent
# and that one rotated key: C + R numbers.
#
# In the checkpoints' names, `kv_a_proj_with_mqa` makes the latent and the shared key ($W_{DKV}$ and one more
# projection), `kv_a_layernorm` keeps the latent's size in check, and `kv_b_proj` holds $W_{UK}$ and $W_{UV}$ of all
# heads. V is the width of a value, `v_head_dim`.
#
# The whole layer by hand, from its own weights, to show that nothing else happens. Some words on the lines:
#
# - `einsum("blc,hdc->bhld", c, w)` multiplies each latent (its C numbers, letter c) with each head's matrix: for every
#   sequence b, token l and head h it gives d numbers.
# - `.contiguous()` copies the rotated part of the queries to a place of its own, because the slice is not in one piece.
# - `softmax_scale` is $1 / \sqrt{N + R}$, because a score is a sum of N + R products.

# %%
x = torch.randn(1, 12, embed_dim)
with torch.no_grad():
    both = layer.kv_a_proj_with_mqa(x)
    c = layer.kv_a_layernorm(both[..., :rank])  # [1, 12, C]
    k_rope = layer.rope(both[..., None, rank:].transpose(1, 2))  # [1, 1, 12, R]: one head for all
    queries = layer.q_proj(x).unflatten(-1, (num_heads, -1)).transpose(1, 2)  # [1, 8, 12, N + R]
    q_nope, q_rope = queries[..., :head_dim], layer.rope(queries[..., head_dim:].contiguous())
    w_uk, w_uv = layer.kv_b_proj.weight.unflatten(0, (num_heads, -1)).split(head_dim, dim=1)  # each [8, 64, C]

    keys, values = (torch.einsum("blc,hdc->bhld", c, w) for w in (w_uk, w_uv))
    scores = q_nope @ keys.transpose(-2, -1) + q_rope @ k_rope.transpose(-2, -1)
    later = torch.ones(12, 12, dtype=torch.bool).triu(1)
    weights = (scores * layer.softmax_scale).masked_fill(later, float("-inf")).softmax(-1)
    by_hand = layer.o_proj((weights @ values).transpose(1, 2).flatten(2))
    print("by hand against the module:", largest_difference(by_hand, layer(x)))
    torch.testing.assert_close(by_hand, layer(x), atol=1e-5, rtol=1e-4)

# %% [markdown]
# ## How small
#
# Bytes per token and layer, from caches that layers with 8 heads of 64 have filled. Next to them is the latent of
# DeepSeek-V3 (128 heads; C = 512, R = 64), and what layers of its size would keep with other attention
# (such models do not exist; the scale on the right is logarithmic):

# %%
kept = {}
with torch.no_grad():
    for name, module, cache in (
        ("MHA", attnpack.MultiHeadAttention(embed_dim, num_heads), attnpack.DynamicCache()),
        ("GQA, 2 kv heads", attnpack.GroupedQueryAttention(embed_dim, num_heads, 2), attnpack.DynamicCache()),
        ("MLA, 256 + 32", layer, attnpack.LatentCache()),
        ("MQA", attnpack.MultiQueryAttention(embed_dim, num_heads), attnpack.DynamicCache()),
    ):
        module(x, cache=cache)
        kept[name] = cache.nbytes // len(cache)
assert kept["MLA, 256 + 32"] == (rank + rope_dim) * 4

# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure, panels = plt.subplots(1, 2, figsize=(9.5, 2.5), dpi=110, layout="constrained")
bars = panels[0].barh(list(kept), list(kept.values()), color=[KINDS[name[:3]] for name in kept])
panels[0].bar_label(bars, padding=3)
panels[0].set(xlabel="bytes per token and layer, fp32", title="8 heads of 64")
large = {
    "MHA": plot_memory.kv_bytes(128, 1, num_layers=1, head_dim=192, v_head_dim=128, dtype=torch.bfloat16),
    "GQA, 8 kv heads": plot_memory.kv_bytes(8, 1, num_layers=1, head_dim=128, dtype=torch.bfloat16),
    "MLA, 512 + 64": plot_memory.kv_bytes(1, 1, num_layers=1, head_dim=512, v_head_dim=64, dtype=torch.bfloat16),
    "MQA": plot_memory.kv_bytes(1, 1, num_layers=1, head_dim=128, dtype=torch.bfloat16),
}
assert large["MHA"] > large["GQA, 8 kv heads"] > large["MLA, 512 + 64"] > large["MQA"]
for name, size in large.items():  # points, because bars on a logarithmic scale would have no beginning
    panels[1].plot(size, name, "o", color=KINDS[name[:3]], markersize=10)
    panels[1].annotate(f"{size}", (size, name), xytext=(9, -4), textcoords="offset points")
panels[1].set(xlabel="bytes per token and layer, bf16", title="DeepSeek-V3: 128 heads", xscale="log", xlim=(100, 4e5))
panels[0].set_ylabel("attention layer")
panels[1].margins(y=0.15)
for panel in panels:
    panel.margins(x=0.2)
    panel.invert_yaxis()
plt.show()
print(f"8 heads: the latent takes 1/{kept['MHA'] / kept['MLA, 256 + 32']:.1f} of MHA's bytes")
print(f"DeepSeek-V3: the latent takes 1/{large['MHA'] / large['MLA, 512 + 64']:.0f} of MHA's bytes")

# %% [markdown]
# With few heads the gain over MHA is modest, and two shared heads (GQA) take less room than the latent. With 128 heads,
# which is where MLA is used, the gain is large: the latent is smaller than the keys and values of 8 shared heads, and
# only one head for all (MQA) takes less. But with MQA all heads read the same keys and values, and with a latent each
# head makes its own.
#
# The memory of known models, up to a million tokens (`attnpack plot kv-memory` writes this picture to a file; sizes
# beyond what a model was trained for are what it *would* need):

# %% tags=["hide-input"] jupyter={"source_hidden": true}
contexts = [2**n for n in range(10, 21, 2)]
points = {each.label: [plot_memory.model_kv_bytes(each, n) for n in contexts] for each in plot_memory.MODELS.values()}
figure, axes = plt.subplots(figsize=(8.5, 4.6), dpi=110, layout="constrained")
plot_memory.draw_kv_memory(axes, contexts, points, title="KV cache of one sequence in bfloat16")
plt.show()
for name, sizes in points.items():
    print(f"{name:<52}{sizes[0] / 1024**2:>8.1f} MiB at 1k {sizes[-1] / 2**30:>8.1f} GiB at 1M tokens")

# %% [markdown]
# ## Expanded and absorbed
#
# **Expanded**: make keys and values of all latents, then attend as usual. That is what the lines above did. At each
# step of writing it would unpack the whole past anew.
#
# **Absorbed**: look at a score.
#
# $$q^\top k_j = q^\top (W_{UK}\, c_j) = (W_{UK}^\top q)^\top c_j$$
#
# The bracket moved. Instead of making a key from every latent, map the *query* into latent space once, and compare it
# with the latents in the cache. The same at the other end: $\sum_j w_j W_{UV} c_j = W_{UV} \sum_j w_j c_j$, so average
# latents first and apply $W_{UV}$ once. No key and no value is ever made. The rest is multi-query attention with one kv
# head of C + R dims, whose first C dims are the values too:

# %%
for path in ("expanded", "absorbed"):
    layer.path = path
    with torch.no_grad():
        q, k, v = layer.project(x)
        out = layer(x)
    print(f"{path}: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    print(f"          against the lines by hand: {largest_difference(out, by_hand)}")
    torch.testing.assert_close(out, by_hand, atol=1e-5, rtol=1e-4)

# %% [markdown]
# Equal numbers, up to rounding. With a cache, one token at a time, by either path and by turns:

# %%
with torch.no_grad():
    for paths in (["expanded"], ["absorbed"], ["expanded", "absorbed"]):
        cache, outs = attnpack.LatentCache(), []
        for step, token in enumerate(x.split(1, dim=1)):
            layer.path = paths[step % len(paths)]
            outs.append(layer(token, cache=cache))
        stepped = torch.cat(outs, dim=1)
        print(f"{' and '.join(paths):<23} by steps against all at once: {largest_difference(stepped, by_hand)}")
        torch.testing.assert_close(stepped, by_hand, atol=1e-5, rtol=1e-4)
print("the cache: latents", tuple(cache.c.shape), "rotated keys", tuple(cache.k_rope.shape))

# %% [markdown]
# ## Where one overtakes the other
#
# Neither path is always better. For L new tokens over K tokens in all, in multiply-adds per head:
#
# | | make keys and values, or map queries and outputs | attend |
# |---|---|---|
# | expanded | $K \cdot C (N + V)$ | $L K (N + R + V)$ |
# | absorbed | $L \cdot C (N + V)$ | $L K (2 C + R)$ |
#
# Writing (L = 1) saves nearly all of the first column and pays in the second, where 2C is more than N + V. Reading a
# prompt (L = K) saves nothing and pays the same. In between they cross, at
#
# $$L^* = \frac{K\, C (N + V)}{K (2 C - N - V) + C (N + V)}$$
#
# which for a long past tends to $C (N + V) / (2 C - N - V)$ whatever K is. Measured, with 1024 tokens in the cache:

# %% tags=["hide-input"] jupyter={"source_hidden": true}
threads = torch.get_num_threads()
torch.set_num_threads(1)  # two threads on a busy machine wait for each other
past, news = 1024, [1, 4, 16, 64, 80, 96, 128, 256, 512]
n, v = head_dim, head_dim


def crossing(k, c=rank, n=n, v=v):
    return k * c * (n + v) / (k * (2 * c - n - v) + c * (n + v))


prompt = torch.randn(1, past, embed_dim)
took = {"expanded": [], "absorbed": []}
cache = attnpack.LatentCache()
with torch.no_grad():
    layer.path = "auto"
    layer(prompt, cache=cache)
    for new in news:
        tokens = torch.randn(1, new, embed_dim)

        def call(path, tokens=tokens):
            layer.path = path
            layer(tokens, cache=cache)
            cache.crop(past)

        for path, ms in time_in_turn({path: partial(call, path) for path in took}, 9).items():
            took[path].append(ms)
solved = [new for new in range(1, 4096) if new >= crossing(past + new)][0]
figure, axes = plt.subplots(figsize=(7.5, 3.4), dpi=110, layout="constrained")
axes.plot(news, took["expanded"], "s--", color=KINDS["MLA"], label="expanded")
axes.plot(news, took["absorbed"], "o-", color=KINDS["MLA"], label="absorbed")
axes.axvline(solved, color="black", linewidth=1, linestyle=":")
axes.annotate(
    f"L* by the count: {solved}",
    (solved, 0.05),
    xytext=(4, 0),
    textcoords="offset points",
    xycoords=("data", "axes fraction"),
)
axes.set_xscale("log", base=2)
axes.set_yscale("log", base=2)
axes.yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
axes.set_xticks([1, 4, 16, 64, 128, 256, 512], [1, 4, 16, 64, 128, 256, 512])
axes.set(xlabel="new tokens in one call (L)", ylabel="time of the call (ms)", title="1024 tokens in the cache, 8 heads")
axes.grid(alpha=0.3)
axes.legend()
plt.show()
for path, times in took.items():
    print(f"{path}: " + ", ".join(f"{new}: {each:.2f} ms" for new, each in zip(news, times, strict=True)))
ahead = [new for new, a, b in zip(news, took["absorbed"], took["expanded"], strict=True) if a < b]
print(f"crossing by the count: {solved} new tokens; in this run absorbed is ahead up to {max(ahead)}")
print(f"one new token: absorbed is {took['expanded'][0] / took['absorbed'][0]:.1f} times as fast as expanded")
print(f"on {bench.conditions()}")
torch.set_num_threads(threads)
print(f"DeepSeek-V3 (C 512, N = V = 128) with a long past: L* = {crossing(10**9, 512, 128, 128):.0f}")

# %% [markdown]
# The count says which path is ahead at the two ends: absorbed for few new tokens, expanded for many. Counted, the lines
# cross at 80 new tokens. In this run the absorbed path is ahead up to 80 of them, and behind from 96 on. The count does
# not know how well a machine runs each kind of product, so the lines may cross elsewhere on yours. `path="auto"`, the
# default, goes by the count: absorbed for writing, expanded for prompts and training.
#
# ## A step of writing, by length
#
# One new token, the way a language model writes. The multi-head layer reads K keys and K values of 8 heads; the
# absorbed path reads K latents, which all heads share; the expanded path computes keys and values of the whole past.

# %% tags=["hide-input"] jupyter={"source_hidden": true}
torch.set_num_threads(1)
lengths = [256, 1024, 4096, 16384]
curves = {"MLA, absorbed": [], "MLA, expanded": [], "MHA": []}
whole = attnpack.MultiHeadAttention(embed_dim, num_heads, causal=True)
token = torch.randn(1, 1, embed_dim)
with torch.no_grad():
    for length in lengths:
        made = torch.randn(1, 1, length, rank + rope_dim).split([rank, rope_dim], dim=-1)
        latents = attnpack.LatentCache.from_latents(*made)
        keys = attnpack.StaticCache(1, num_heads, length + 1, head_dim)
        keys.lengths.fill_(length)

        def step(module, cache, path, length=length):
            module.path = path
            module(token, cache=cache)
            cache.crop(length)

        calls = {
            "MLA, absorbed": partial(step, layer, latents, "absorbed"),
            "MLA, expanded": partial(step, layer, latents, "expanded"),
            "MHA": partial(step, whole, keys, None),
        }
        for name, ms in time_in_turn(calls, 9).items():
            curves[name].append(ms)
figure, axes = plt.subplots(figsize=(7.5, 3.4), dpi=110, layout="constrained")
looks = (KINDS["MLA"], "o-"), (KINDS["MLA"], "s--"), (KINDS["MHA"], "^-.")
for (name, times), (colour, line) in zip(curves.items(), looks, strict=True):
    axes.plot(lengths, times, line, color=colour, label=name)
axes.set_xscale("log", base=2)
axes.set_yscale("log", base=2)
axes.yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
axes.set_xticks(lengths, lengths)
axes.set(xlabel="tokens in the cache (K)", ylabel="time of one step (ms)", title="One new token, 8 heads of 64, fp32")
axes.grid(alpha=0.3)
axes.legend()
plt.show()
for name, times in curves.items():
    print(f"{name:<14}" + "".join(f"{each:>9.3f}" for each in times) + " ms")
print(f"on {bench.conditions()}")
torch.set_num_threads(threads)
print(f"numbers read per token: MHA {2 * num_heads * head_dim / (rank + rope_dim):.1f} times those of the latent")
print(f"multiply-adds per token: absorbed {(2 * rank + rope_dim) / (2 * head_dim):.2f} times those of MHA")

# %% [markdown]
# Unpacking the past at each step takes too long. The absorbed path multiplies 4.25 times as much per token of the past
# as plain multi-head attention, and MHA reads 3.6 times as much. In this run MHA is ahead over the two short pasts, and
# the absorbed path over the two long ones. On another machine the lines may cross elsewhere. In short: MLA saves memory
# first, most of all with many heads. It also saves time where texts are long.
#
# ## Folding for good
#
# The matrices themselves can be multiplied too, $W_{UK}$ into the query projection and $W_{UV}$ into the output
# projection: `fold()`. The layer then has no `kv_b_proj` at all. But a folded query projection has C numbers where
# there were N, so it usually *grows*, and engines fold into the activations instead, as the absorbed path does:

# %%
layer.path = "auto"
folded = layer.fold()
with torch.no_grad():
    print("folded against unfolded:", largest_difference(folded(x), by_hand))
    torch.testing.assert_close(folded(x), by_hand, atol=1e-5, rtol=1e-4)
for name, module in (("unfolded", layer), ("folded", folded)):
    print(f"{name}: {sum(p.numel() for p in module.parameters()):,} parameters")

# %% [markdown]
# ## The query latent
#
# DeepSeek's larger models make queries from a latent, too: $c^Q = W_{DQ}\, x$ and $q^{(h)} = W_{UQ}^{(h)} c^Q$. It is
# not cached, so it saves no memory while the model writes. It saves parameters, and activations in training. With N + R
# numbers per head, `q_proj` has E H (N + R) weights; the two matrices of a latent of width Q have Q (E + H (N + R)):

# %%
narrow = latent_layer(q_lora_rank=192)
with torch.no_grad():
    c_q = narrow.q_a_layernorm(narrow.q_a_proj(x))  # [1, 12, 192]
    queries = narrow.q_b_proj(c_q).unflatten(-1, (num_heads, -1)).transpose(1, 2)
    narrow.path = "expanded"
    q, _, _ = narrow.project(x)
    print("not rotated part, by hand against project:", f"{(queries - q)[..., :head_dim].abs().max():.1e}")
    torch.testing.assert_close(queries[..., :head_dim], q[..., :head_dim])
direct = layer.q_proj.weight.numel()
through = sum(m.weight.numel() for m in (narrow.q_a_proj, narrow.q_b_proj))
print(f"queries directly: {direct:,} weights; through a latent of 192: {through:,}")
assert through == 192 * (embed_dim + num_heads * (head_dim + rope_dim)) < direct

# %% [markdown]
# ## Three places for one matrix
#
# A score is $c^{Q\top} W_{UQ}^\top W_{UK}\, c$, a chain of four. Where the chain is cut decides what is computed:
#
# | place of $W_{UK}$ | what is made | when |
# |---|---|---|
# | with the latents | keys $W_{UK} c$ of all tokens (expanded) | prompts, training |
# | with the query | $W_{UK}^\top q$ of the new token (absorbed) | decoding |
# | in one matrix $W_{UQK} = W_{UQ}^\top W_{UK}$ | nothing beside it (folded) | where it is small |
#
# All three by hand, for one head:

# %%
with torch.no_grad():
    w_uq = narrow.q_b_proj.weight.unflatten(0, (num_heads, -1))[0, :head_dim]  # [N, Q]
    w_uk0 = narrow.kv_b_proj.weight.unflatten(0, (num_heads, -1))[0, :head_dim]  # [N, C]
    c = narrow.kv_a_layernorm(narrow.kv_a_proj_with_mqa(x)[..., :rank])[0]  # [12, C]
    q_head = c_q[0] @ w_uq.T
    ways = {
        "with the latents": q_head @ (c @ w_uk0.T).T,
        "with the query": (q_head @ w_uk0) @ c.T,
        "in one matrix": c_q[0] @ (w_uq.T @ w_uk0) @ c.T,
    }
    for name, scores in ways.items():
        print(f"{name:<17} differs by {(scores - ways['with the latents']).abs().max():.1e}")
        torch.testing.assert_close(scores, ways["with the latents"], atol=1e-4, rtol=1e-4)
apart, joined = w_uq.numel() + w_uk0.numel(), (w_uq.T @ w_uk0).numel()
print(f"weights per head: two matrices {apart:,}, one matrix {joined:,}")
assert joined > apart

# %% [markdown]
# The joined matrix is Q x C for each head: larger than the two that it replaces, unless N is more than Q C / (Q + C).
# So engines keep the two, and go by the second row.
#
# ## Summary
#
# (Words in quotes are those of the output that shows a comparison.)
#
# - One latent per token is cached; keys and values of all heads are made from it.
# - Positions need a small rotated key of their own, shared by all heads.
# - Expanded and absorbed give equal numbers, up to rounding ("against the lines by hand"). For one new token absorbed
#   is faster ("one new token: absorbed is"); a count of multiply-adds says where they should cross.
# - A latent for queries saves weights, not cache. Folding for good saves nothing at these sizes.
#
# ## Exercises
#
# 1. To how many key-value heads (GQA) is DeepSeek-V3's latent equal in bytes, with heads of 128?
# 2. Why can the rotated key not be absorbed too? Compare a rotation before and after a matrix.
# 3. *Implement* the absorbed path for one new token. You get the two parts of its queries, `[B, H, 1, N]` and
#    `[B, H, 1, R]`, the cached latents `[B, K, C]` and rotated keys `[B, K, R]`, and $W_{UK}$ `[H, N, C]` and $W_{UV}$
#    `[H, V, C]`. Make no keys. The cell below checks it.


# %%
def attend(q_nope, q_rope, latents, k_rope, w_uk, w_uv):
    """Yours: [B, H, 1, V], with the scale 1 / sqrt(N + R)."""


print(course.check_absorbed(attend))

# %% [markdown]
# The next cell has solutions. It is folded; try first.

# %% tags=["hide-cell"] jupyter={"source_hidden": true, "outputs_hidden": true}
# Solutions. Try first.
print(f"1. (512 + 64) / (128 + 128) = {(512 + 64) / (128 + 128)}")
turn = attnpack.RotaryEmbedding(8)
w, vector = torch.randn(8, 8), torch.randn(1, 1, 5, 8)
gap = (turn(vector @ w.T) - turn(vector) @ w.T).abs().max().item()
print(f"2. rotating before or after a matrix differs by {gap:.1f}: the rotation is between the two matrices")
assert gap > 0.1


def attend(q_nope, q_rope, latents, k_rope, w_uk, w_uv):
    latents, k_rope = latents.unsqueeze(1), k_rope.unsqueeze(1)  # for all heads
    scores = (q_nope @ w_uk) @ latents.transpose(-2, -1) + q_rope @ k_rope.transpose(-2, -1)
    weights = (scores / math.sqrt(q_nope.shape[-1] + q_rope.shape[-1])).softmax(dim=-1)
    return (weights @ latents) @ w_uv.transpose(-2, -1)


print("3.", course.check_absorbed(attend))
assert course.check_absorbed(attend) == "right"

# %% [markdown]
# Next: [encoder_decoder](encoder_decoder.ipynb).
