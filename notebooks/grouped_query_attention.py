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
# # Grouped-query attention: between all heads and one
#
# *You need* [positions](positions.ipynb) and [multi_query_attention](multi_query_attention.ipynb). *You learn* the
# formulas of MHA, MQA and GQA, what groups of heads share, what that saves in bytes and in time, and how groups may be
# uneven. *Runs in* half a minute.
#
# Sources: [Ainslie et al. 2023](https://arxiv.org/abs/2305.13245) (the method),
# [Shazeer 2019](https://arxiv.org/abs/1911.02150) (one group).
# The glossary has the [symbols](../docs/notebooks.md#glossary-of-symbols) and the
# [words](../docs/notebooks.md#glossary-of-words).
#
# A language model that writes token by token reads all cached keys and values at every step, and this reading takes
# most of the time. Multi-head attention (MHA) keeps keys and values for each of its H heads; multi-query attention
# (MQA) shares one set among all heads, and loses some quality. Grouped-query attention is everything in between: **G**
# sets, each read by a group of query heads. G = H *is* MHA, G = 1 *is* MQA.

# %%
import functools
import math

import attnpack
import matplotlib.pyplot as plt
import torch
from attnpack.tools import bench, course
from attnpack.tools.course import largest_difference, time_in_turn
from attnpack.tools.plot import schematic
from attnpack.tools.plot.colours import BLUE, ORANGE

torch.manual_seed(0)


schematic.beside(
    [
        schematic.grouping(range(8), title="MHA, G = 8"),
        schematic.grouping([0, 0, 0, 0, 1, 1, 1, 1], title="GQA, G = 2"),
        schematic.grouping([0] * 8, title="MQA, G = 1"),
    ]
)

# %% [markdown]
# ## The formulas
#
# For a text X of $\ell$ tokens as rows, `[l, d_model]`, with H heads of $d = d_\text{model} / H$ numbers and G groups:
#
# $$Q = X W_q \in \mathbb{R}^{\ell \times H d}, \qquad K = X W_k \in \mathbb{R}^{\ell \times G d}, \qquad
# V = X W_v \in \mathbb{R}^{\ell \times G d}$$
#
# Each is cut into heads: Q to `[H, l, d]`, K and V to `[G, l, d]`. Query head h belongs to group
# $g(h) = \lfloor h\, G / H \rfloor$, so each group has H / G heads, one after the other. Then
#
# $$\text{head}_h = \text{softmax}\left(\frac{Q_h K_{g(h)}^\top}{\sqrt{d}}\right) V_{g(h)}, \qquad
# \text{out} = [\text{head}_1, \dots, \text{head}_H]\, W_o$$
#
# With G = H this is multi-head attention, with G = 1 multi-query attention. A model that writes has one query per
# head, that of the newest token t, and reads the keys and values of all tokens up to it:
#
# $$q_t = x_t W_q \in \mathbb{R}^{1 \times H d}, \qquad
# \text{head}_{h,t} = \text{softmax}\left(\frac{q_{t,h} K_{g(h)}^\top}{\sqrt{d}}\right) V_{g(h)}$$
#
# In code, between the projections and $W_o$. `repeat_interleave` gives each group's head to all its queries:


# %%
def grouped_attention(q, k, v, num_heads, groups):
    batch, length, d_model = q.shape
    head_dim = d_model // num_heads
    q = q.view(batch, length, num_heads, head_dim).transpose(1, 2)
    k = k.view(batch, -1, groups, head_dim).transpose(1, 2).repeat_interleave(num_heads // groups, dim=1)
    v = v.view(batch, -1, groups, head_dim).transpose(1, 2).repeat_interleave(num_heads // groups, dim=1)
    weights = (q @ k.transpose(-2, -1) / math.sqrt(head_dim)).softmax(dim=-1)
    return (weights @ v).transpose(1, 2).reshape(batch, length, d_model)


q, one = torch.randn(2, 10, 64), torch.randn(2, 1, 64)
for name, groups in (("MHA", 8), ("GQA", 2), ("MQA", 1)):
    k, v = torch.randn(2, 2, 10, groups * 8).unbind(0)
    native = attnpack.ProjectedAttention(8, groups, 8)
    whole = largest_difference(grouped_attention(q, k, v, 8, groups), native(q, k, v))
    last = largest_difference(grouped_attention(one, k, v, 8, groups), native(one, k, v))
    print(f"{name}, G = {groups}: plain against native {whole}; one query {last}")
    torch.testing.assert_close(grouped_attention(q, k, v, 8, groups), native(q, k, v))

# %% [markdown]
# ## From H to 1
#
# The same layer with 8 query heads, at every G that divides 8. The query projection stays; those of keys and values
# shrink with G, and so does the cache.

# %%
embed_dim, num_heads, head_dim = 512, 8, 64
x = torch.randn(1, 16, embed_dim)
rows = []
print(" G   parameters   k_proj          cache, bytes per token")
for groups in (8, 4, 2, 1):
    layer = attnpack.GroupedQueryAttention(embed_dim, num_heads, groups, causal=True)
    cache = attnpack.DynamicCache()
    with torch.no_grad():
        layer(x, cache=cache)
    parameters = sum(p.numel() for p in layer.parameters())
    rows.append((groups, parameters, cache.nbytes // len(cache)))
    print(f"{groups:>2} {parameters:>12,}   {tuple(layer.k_proj.weight.shape)!s:<14} {rows[-1][2]:>8}")
    assert cache.nbytes == 2 * len(cache) * groups * head_dim * 4

# %% [markdown]
# The two ends are the two other classes, number by number. And a group is nothing but sharing: repeat each key-value
# head for the query heads of its group, and plain multi-head attention gives the same. The operator never makes that
# copy; avoiding it is the whole point.

# %%
with torch.no_grad():
    for groups, other in (
        (8, attnpack.MultiHeadAttention(embed_dim, num_heads)),
        (1, attnpack.MultiQueryAttention(embed_dim, num_heads)),
    ):
        grouped = attnpack.GroupedQueryAttention(embed_dim, num_heads, groups)
        grouped.load_state_dict(other.state_dict())
        print(f"G = {groups} against {type(other).__name__}:", largest_difference(grouped(x), other(x)))
        assert torch.equal(grouped(x), other(x))
    q, k, v = attnpack.GroupedQueryAttention(embed_dim, num_heads, 2).project(x)
    repeated = attnpack.attention(q, k.repeat_interleave(4, dim=1), v.repeat_interleave(4, dim=1))
    print("G = 2 against repeated heads:     ", largest_difference(attnpack.attention(q, k, v), repeated))
    torch.testing.assert_close(attnpack.attention(q, k, v), repeated)

# %% [markdown]
# The gain: one query per head over a long cache, as when a model writes. The work is the same for every G (8 query
# heads over 16k keys); only the number of bytes that must be read changes. Times are the shortest of many calls on one
# thread, because two threads on a busy machine wait for each other. The dotted line is the arithmetic without memory:
# 1,024 keys that fit the processor's cache, sixteen times.

# %% tags=["hide-input"] jupyter={"source_hidden": true}
length, few = 16384, 1024
threads = torch.get_num_threads()
torch.set_num_threads(1)
with torch.no_grad():
    inputs = {
        groups: (torch.randn(1, num_heads, 1, head_dim), *torch.randn(2, 1, groups, length, head_dim).unbind(0))
        for groups in (8, 4, 2, 1)
    }
    inputs["work"] = (torch.randn(1, num_heads, 1, head_dim), *torch.randn(2, 1, 1, few, head_dim).unbind(0))

    def step(name, q, k, v):
        for _ in range(length // few if name == "work" else 1):
            attnpack.attention(q, k, v)

    calls = {name: functools.partial(step, name, *tensors) for name, tensors in inputs.items()}
    times = time_in_turn(calls, 200)
work, conditions = times.pop("work"), bench.conditions()
torch.set_num_threads(threads)
names = [str(groups) for groups in times]
figure, panels = plt.subplots(1, 2, figsize=(9, 2.4), dpi=110, layout="constrained", sharey=True)
bars = panels[0].barh(names, [2 * length * groups * head_dim * 4 / 2**20 for groups in times], color=BLUE)
panels[0].bar_label(bars, fmt="%.0f", padding=3)
panels[0].set(xlabel="keys and values (MiB)", title="Bytes read by one decode step: 16,384 keys, fp32")
bars = panels[1].barh(names, list(times.values()), color=ORANGE)
panels[1].bar_label(bars, fmt="%.2f", padding=3)
panels[1].axvline(work, color="black", linestyle=":", label="arithmetic without memory")
panels[1].legend(loc="lower right", fontsize=8)
panels[0].set_ylabel("key-value heads (G)")
panels[1].set(xlabel="time (ms)", title="Time of the step")
for panel in panels:
    panel.margins(x=0.15)
panels[0].invert_yaxis()
plt.show()
for fewer, more in ((2, 8), (1, 2)):
    print(f"G = {fewer} is {times[more] / times[fewer]:.1f} times as fast as G = {more}")
print(f"on {conditions}")

# %% [markdown]
# The time falls with the reading, but by less: more and more of what is left is the work itself, which G does not
# change. So the last step down to one head saves more room in the cache than time *here*, in one run on one thread of
# this machine. Other machines and more threads were not tried. Where computing is faster, or reading slower, the last
# step should save more time. An encoder gains next to nothing, because it does not wait for reading:
# [encoder_decoder](encoder_decoder.ipynb) measures it.
#
# ## Uneven groups
#
# Nothing in the idea needs groups of equal size, or that G divides H. `head_map` names the key-value head that each
# query head reads. Here are three groups of 5, 2 and 1 heads: the five may be heads that were alike, the last one a
# head that was unlike all others.

# %%
head_map = [0, 0, 0, 0, 0, 1, 1, 2]
schematic.grouping(head_map, title="three uneven groups")

# %%
uneven = attnpack.GroupedQueryAttention(embed_dim, num_heads, 3, head_map=head_map, causal=True)
with torch.no_grad():
    q, k, v = uneven.project(x)
    wanted = attnpack.attention(q, k[:, head_map], v[:, head_map], causal=True)
    wanted = uneven.o_proj(wanted.transpose(1, 2).flatten(2))
    print(f"q {tuple(q.shape)}, k {tuple(k.shape)}")
    print("against heads picked one by one:", largest_difference(uneven(x), wanted))
    torch.testing.assert_close(uneven(x), wanted)
try:
    attnpack.GroupedQueryAttention(embed_dim, num_heads, 3)
except ValueError as error:
    print("without head_map:", str(error).split("\n")[0])

# %% [markdown]
# ## Attention without projections
#
# `ProjectedAttention`, which was used above, is the part without parameters, for q, k and v that already exist:
# `[batch, length, heads * head_dim]`, heads side by side. MQA takes k and v of width `head_dim`, GQA of
# `groups * head_dim`. With a `RotaryEmbedding` it rotates queries and keys first.

# %%
groups = 2
rope = attnpack.RotaryEmbedding(head_dim, max_positions=64)
attend = attnpack.ProjectedAttention(num_heads, groups, head_dim, causal=True, rope=rope)
q = torch.randn(2, 16, num_heads * head_dim)
k, v = torch.randn(2, 2, 16, groups * head_dim).unbind(0)
out = attend(q, k, v)
print(f"q {tuple(q.shape)}, k {tuple(k.shape)} -> {tuple(out.shape)}, parameters: {len(list(attend.parameters()))}")

# The same by hand: split the heads (view, then transpose), rotate, attend, join.
by_hand = [each.unflatten(-1, (-1, head_dim)).transpose(1, 2) for each in (q, k, v)]
by_hand = attnpack.attention(rope(by_hand[0]), rope(by_hand[1]), by_hand[2], causal=True)
print("against the steps by hand:", largest_difference(out, by_hand.transpose(1, 2).flatten(2)))
torch.testing.assert_close(out, by_hand.transpose(1, 2).flatten(2))
try:
    attend(q, k[..., :100], v)
except ValueError as error:
    print("a wrong width:", str(error).split("\n")[0])

# %% [markdown]
# ### With NTK-aware and dynamic scaling
#
# The notebook [positions](positions.ipynb) explains the scalings of RoPE for texts that are longer than those of the
# training. Public code often has two flags for them, `ntk_rope_scaling` and `dyn_scaling`. Here they are settings of
# the `RotaryEmbedding`, and attention does not know of them:


# %%
def projected(num_heads, groups, d_model, context_length, ntk_rope_scaling=False, dyn_scaling=False, factor=4.0):
    """MQA or GQA on projected q, k, v, by the names and flags of such code."""
    kind = "dynamic" if dyn_scaling else "ntk" if ntk_rope_scaling else None
    scaling = {"rope_type": kind, "factor": factor} if kind else None
    rope = attnpack.RotaryEmbedding(d_model // num_heads, max_positions=context_length, scaling=scaling)
    return attnpack.ProjectedAttention(num_heads, groups, d_model // num_heads, causal=True, rope=rope)


def rotated_by_hand(x, heads, base):
    """The heads of x [B, L, heads * D], rotated with this base."""
    x = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    first, second = x.chunk(2, dim=-1)
    half = first.shape[-1]
    angles = torch.arange(x.shape[2])[:, None] * base ** (-torch.arange(half) / half)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


context, d = 64, 16
flags = {"no scaling": {}, "ntk": {"ntk_rope_scaling": True}, "dynamic": {"dyn_scaling": True}}
for groups in (1, 2):
    for name, chosen in flags.items():
        for length in (64, 256):
            q, k, v = torch.randn(1, length, 8 * d), *torch.randn(2, 1, length, groups * d).unbind(0)
            out = projected(8, groups, 8 * d, context, **chosen)(q, k, v)
            stretch = {"ntk": 4.0, "dynamic": max(1, 4.0 * length / context - 3.0)}.get(name, 1.0)
            base = 10000.0 * stretch ** (d / (d - 2))
            heads = rotated_by_hand(q, 8, base), rotated_by_hand(k, groups, base)
            value = v.unflatten(-1, (groups, -1)).transpose(1, 2)
            hand = attnpack.attention(*heads, value, causal=True).transpose(1, 2).flatten(2)
            gap = largest_difference(out, hand)
            print(
                f"G = {groups}, {name:<10} {length:>3} tokens: base {base:>9,.0f}, against the rotation by hand {gap}"
            )
            torch.testing.assert_close(out, hand, atol=1e-4, rtol=1e-3)

# %% [markdown]
# NTK-aware scaling has a larger base at every length. The dynamic one has the base of the training up to the trained
# length, 64 tokens here, and a larger one beyond it.
#
# ## Summary
#
# (Words in quotes are those of the output that shows a comparison.)
#
# - G key-value heads, each read by a group of query heads; `k_proj`, `v_proj` and the cache shrink with G.
# - Sharing copies nothing: each key that is read serves its whole group.
# - The time of a step falls with the reading, until the arithmetic is what is left.
# - Groups may be uneven (`head_map`).
#
# ## Exercises
#
# 1. A model has 64 query heads of 128, 80 layers, and 8 key-value heads in bf16. How many bytes per token?
# 2. Turn an MHA layer into a GQA layer that gives the *same* outputs. When is that possible?
# 3. *Implement* grouped-query attention over q `[B, H, L, D]` and k, v `[B, G, L, D]`, without `repeat_interleave` and
#    without a loop. (A hint: give q one dim more.) The cell below checks it.


# %%
def attend(query, key, value):
    """Yours: [B, H, L, D]."""


print(course.check_groups(attend))

# %% [markdown]
# The next cell has solutions. It is folded; try first.

# %% tags=["hide-cell"] jupyter={"source_hidden": true, "outputs_hidden": true}
# Solutions. Try first.
bytes_per_token = attnpack.StaticCache(1, 8, 1, 128, dtype=torch.bfloat16, device="meta").nbytes * 80
print("1.", f"{bytes_per_token:,}")
assert bytes_per_token == 2 * 8 * 128 * 80 * 2
wide = attnpack.MultiHeadAttention(64, 8)
with torch.no_grad():
    for projection in (wide.k_proj, wide.v_proj):  # each pair of heads gets equal rows
        projection.weight.copy_(projection.weight.view(4, 2, 8, 64)[:, :1].expand(4, 2, 8, 64).reshape(64, 64))
    narrow = attnpack.convert.to_gqa(wide, 4)
    x = torch.randn(1, 5, 64)
    print("2. if the heads of a group are equal:", largest_difference(narrow(x), wide(x)))
    torch.testing.assert_close(narrow(x), wide(x))


def attend(query, key, value):
    groups = key.shape[1]
    query = query.unflatten(1, (groups, -1))  # [B, G, H / G, L, D]
    scores = query @ key.unsqueeze(2).transpose(-2, -1) / math.sqrt(query.shape[-1])
    return (scores.softmax(-1) @ value.unsqueeze(2)).flatten(1, 2)


print("3.", course.check_groups(attend))
assert course.check_groups(attend) == "right"

# %% [markdown]
# Next: [latent_attention](latent_attention.ipynb).
