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
# # Grouped-query attention, and positions past the trained length
#
# A language model that writes token by token reads all cached keys and values at every step, and this reading takes
# most of the time. Multi-head attention (MHA) keeps keys and values for each of its H heads; multi-query attention
# (MQA) shares one set among all heads, and loses some quality. Grouped-query attention (Ainslie et al. 2023) is
# everything in between: **G** sets, each read by a group of query heads. G = H *is* MHA, G = 1 *is* MQA.
#
# The second half is about rotary positions, which change queries and keys before the scores. It shows how a model
# behaves past the length of its training, and how stretching the positions helps: "NTK-aware" (named for the neural
# tangent kernel, whose theory suggested it) and "dynamic".

# %%
import math
import statistics
import time
from pydoc_data import topics

import attnpack
import matplotlib.pyplot as plt
import torch
from attnpack.tools import bench
from attnpack.tools.plot import memory as plot_memory
from torch.nn import functional

torch.manual_seed(0)
BLUE, ORANGE = "#0072B2", "#D55E00"


def largest_difference(a, b):
    gap = (a - b).abs().max().item()
    return f"{gap:.1e}" if gap else "0"


# %% [markdown]
# ## From H to 1
#
# The same layer with 8 query heads, at every G that divides 8. The query projection stays; those of keys and values
# shrink with G, and so does the cache.

# %%
embed_dim, num_heads, head_dim = 512, 8, 64
x = torch.randn(1, 16, embed_dim)
rows = []
print(" G   parameters   k_proj          cache, bytes a token")
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
# heads over 16k keys); only the number of bytes that must be read changes. Times are medians of many calls on one
# thread, because two threads on a busy machine wait for each other. The dotted line is the time of the work alone: G =
# 1 over few keys, which stay in the processor's cache, repeated until they make 16k keys.

# %%
length, few = 16384, 1024
threads = torch.get_num_threads()
torch.set_num_threads(1)
with torch.no_grad():
    inputs = {
        groups: (torch.randn(1, num_heads, 1, head_dim), *torch.randn(2, 1, groups, length, head_dim).unbind(0))
        for groups in (8, 4, 2, 1)
    }
    inputs["work"] = (torch.randn(1, num_heads, 1, head_dim), *torch.randn(2, 1, 1, few, head_dim).unbind(0))
    measured = {name: [] for name in inputs}
    for _ in range(200):  # in turn, so that a busy machine slows all of them
        for name, (q, k, v) in inputs.items():
            repeats = length // few if name == "work" else 1
            start = time.perf_counter()
            for _ in range(repeats):
                attnpack.attention(q, k, v)
            measured[name].append(time.perf_counter() - start)
times = {name: 1e3 * statistics.median(each) for name, each in measured.items()}
work = times.pop("work")
torch.set_num_threads(threads)
names = [str(groups) for groups in times]
figure, panels = plt.subplots(1, 2, figsize=(9, 2.4), dpi=70, layout="constrained", sharey=True)
bars = panels[0].barh(names, [2 * length * groups * head_dim * 4 / 2**20 for groups in times], color=BLUE)
panels[0].bar_label(bars, fmt="%.0f", padding=3)
panels[0].set(xlabel="keys and values (MiB)", title="What one decode step reads: 16384 keys, fp32")
bars = panels[1].barh(names, list(times.values()), color=ORANGE)
panels[1].bar_label(bars, fmt="%.2f", padding=3)
panels[1].axvline(work, color="black", linestyle=":", label="the work alone")
panels[1].legend(loc="lower right", fontsize=8)
panels[0].set_ylabel("key-value heads (G)")
panels[1].set(xlabel="time (ms)", title="What it takes")
for panel in panels:
    panel.margins(x=0.15)
panels[0].invert_yaxis()
plt.show()
print(f"from G = 8 to 2: {times[8] / times[2]:.1f} times faster; from 2 to 1: {times[2] / times[1]:.1f} times")
print(f"on {bench.machine()}, one thread")

# %% [markdown]
# From G = 8 to 2 the time falls with the reading. From 2 to 1 the reading halves once more and little time is won,
# because more and more of what is left is the work itself, which G does not change. So the last step down to one head
# saves room in the cache rather than time *here*; on a machine that computes faster, or reads slower, it is another
# matter.
#
# ## Uneven groups
#
# Nothing in the idea needs groups of equal size, or that G divides H. `head_map` names the key-value head that each
# query head reads. Here are three groups of 5, 2 and 1 heads: the five may be heads that were alike, the last one a
# head that was unlike all others.

# %%
head_map = [0, 0, 0, 0, 0, 1, 1, 2]
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
# ## When somebody else projects
#
# `ProjectedAttention` is the part without parameters, for q, k and v that already exist: `[batch, length, heads *
# head_dim]`, heads side by side. MQA takes k and v of width `head_dim`, GQA of `groups * head_dim`. With a
# `RotaryEmbedding` it rotates queries and keys first.

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
# ## Positions by rotation
#
# Attention itself is blind to order. Rotary embedding (RoPE, Su et al. 2021) rotates each pair of dimensions of queries
# and keys by an angle that grows with the position. A score then depends only on the *distance* of query and key,
# because a rotation of both by the same angle cancels. Pair i rotates by $\theta_i = \text{base}^{-2i/d}$ per token:
# the first pairs rotate fast and distinguish neighbours, the last pairs hardly rotate over a whole text.

# %%
q1, k1 = torch.randn(2, 1, 1, 1, head_dim).unbind(0)


def score(query_position, key_position):
    turned_q = rope(q1, torch.tensor([query_position]))
    turned_k = rope(k1, torch.tensor([key_position]))
    return attnpack.attention_scores(turned_q, turned_k, stage="scaled").item()


for at in (0, 100, 1000):
    print(f"query at {at + 7:>4}, key at {at:>4}: score {score(at + 7, at):.5f}")
assert abs(score(7, 0) - score(1007, 1000)) < 1e-3

# %% [markdown]
# ## Past the trained length
#
# So only distances matter, and a model can read past the length of its training. But longer distances give angles that
# never occurred in training, and nothing says that the weights do anything sensible with them. To see it without
# waiting for thousands of tokens, a small model is trained here on 64 characters at a time (of Python's own help texts,
# which every Python brings along) and then read to 512.

# %%
text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text])
held_out = data[len(data) * 9 // 10 :]
data = data[: len(data) * 9 // 10]
trained_len, steps = 64, 200


def small_model(scaling=None):
    """Two layers, 4 query heads on 2 key-value heads."""
    sizes = {"hidden_dim": 288, "max_positions": trained_len, "rope_scaling": scaling}
    return attnpack.CausalLM(len(letters), 96, 2, 4, 2, **sizes)


def losses(model, ids):
    """Cross-entropy of each next letter, [batch, length], in nats."""
    return functional.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")


torch.manual_seed(0)
model = small_model()
optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps)
for step in range(steps):
    starts = torch.randint(len(data) - trained_len, (32,))
    loss = losses(model, torch.stack([data[at : at + trained_len + 1] for at in starts])).mean()
    optimiser.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    schedule.step()
    if step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.2f} (guessing: {math.log(len(letters)):.2f})")

# %% [markdown]
# Three ways to stretch positions, all without training:
#
# - **linear**: position / factor. No angle is new, but neighbours are closer together than they ever were.
# - **NTK-aware**: a larger base, $\text{base} \cdot \text{factor}^{d/(d-2)}$. The slow pairs are stretched by the
#   factor, the fast ones, which tell neighbours apart, hardly at all.
# - **dynamic**: the NTK rule with a factor that follows the length of the sequence, so that a text within the trained
#   length is read with exactly the angles of training.

# %%
length, factor = 512, 8.0
starts = range(0, len(held_out) - length - 1, (len(held_out) - length) // 64)
long_texts = torch.stack([held_out[at : at + length + 1] for at in starts])
settings = {
    "as trained": None,
    "linear": {"rope_type": "linear", "factor": factor},
    "NTK-aware": {"rope_type": "ntk", "factor": factor},
    "dynamic NTK": {"rope_type": "dynamic", "factor": factor},
}
by_position, short = {}, {}
for name, scaling in settings.items():
    stretched = small_model(scaling)
    stretched.load_state_dict(model.state_dict())  # the same weights: RoPE has none
    with torch.no_grad():
        by_position[name] = losses(stretched, long_texts).mean(0)
        short[name] = losses(stretched, long_texts[:, : trained_len + 1]).mean().item()

figure, axes = plt.subplots(figsize=(8, 3.6), dpi=70, layout="constrained")
window = 16
for (name, loss), (colour, line) in zip(by_position.items(), plot_memory.STYLES, strict=False):
    axes.plot(range(window // 2, length, window), loss.view(-1, window).mean(1), line, color=colour, label=name)
axes.axvline(trained_len, color="black", linewidth=1)
axes.annotate(
    "trained length", (trained_len, 0.05), xytext=(4, 0), textcoords="offset points", xycoords=("data", "axes fraction")
)
axes.set(xlabel="position (characters)", ylabel="loss (nats a character)", title="Reading past the trained length")
axes.set_ylim(1.3, 3.4)
axes.grid(alpha=0.3)
axes.legend(ncols=4, loc="upper center")
plt.show()
print(f"{'':<12}{'texts of 64':>12}{'of 512: first 64':>18}{'last 64':>9}")
for name, loss in by_position.items():
    print(f"{name:<12}{short[name]:>12.2f}{loss[:64].mean():>18.2f}{loss[-64:].mean():>9.2f}")
assert by_position["dynamic NTK"][-64:].mean() < by_position["as trained"][-64:].mean() - 0.2
assert abs(short["dynamic NTK"] - short["as trained"]) < 1e-4

# %% [markdown]
# As trained, nothing happens at the line itself: for another 50 characters nearly all keys that a query sees stand at
# distances that occurred in training, and only the first few are farther away. At about twice the trained length the
# loss begins to climb, and it ends far above where it was. Linear scaling without further training is the other way
# round: bad from the first character on, because neighbours are eight times closer together than they ever were, and
# then no worse for being far away; at the end it and no scaling at all are about equally bad.
#
# NTK-aware scaling keeps neighbours readable, holds on for about twice as long and then climbs slowly. The dynamic form
# goes furthest. Its factor follows the length of the text, by the rule factor · length / trained length - (factor - 1):
# 1 up to 64 characters, 57 for these 512. Hence two things in the table. A short text is read exactly as in training
# (first column). And in a long one even the *first* 64 characters are read with the long text's angles, which costs a
# little there (second column): this is the price, at near positions, of the gain at the far end.
#
# Dynamic scaling has a price in a cache: when the frequencies change with the length, keys that were rotated earlier
# lie at angles of a shorter text. attnpack then keeps keys unrotated and rotates all of them at each call (`raw_keys`,
# the default for such a scaling), so that a layer with a cache gives for its last token what a full recompute gives:

# %%
x = torch.randn(1, 200, 96)
for raw_keys in (True, False):
    rope = attnpack.RotaryEmbedding(24, max_positions=64, scaling=settings["dynamic NTK"], raw_keys=raw_keys)
    torch.manual_seed(0)
    layer = attnpack.GroupedQueryAttention(96, 4, 2, causal=True, rope=rope)
    cache = attnpack.DynamicCache()
    with torch.no_grad():
        last = [layer(part, cache=cache) for part in x.split(25, dim=1)][-1][:, -1]
        full = layer(x)[:, -1]
    print(
        f"raw_keys={raw_keys!s:<6} last token, cache filled by 25 against all at once:", largest_difference(last, full)
    )
    if raw_keys:
        torch.testing.assert_close(last, full)

# %% [markdown]
# (In a stack of layers this is not enough: earlier tokens gave the next layer inputs that were computed with the
# frequencies of a shorter text. A model with dynamic scaling that writes with a cache is, beyond the first layer, not
# quite the model that reads the finished text at once. Fixed NTK scaling has no such problem.)
