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
# # Positions: how attention learns of order, and how far it reads
#
# *You need* [attention_from_scratch](attention_from_scratch.ipynb) and [kv_cache](kv_cache.ipynb). *You learn* why
# attention by itself is blind to order, what learned and rotary positions do, and what linear, NTK, dynamic and YaRN
# scaling change when a text is longer than those of the training. *Runs in* about a minute.
#
# Sources: [Vaswani et al. 2017](https://arxiv.org/abs/1706.03762) (positions that are added),
# [Su et al. 2021](https://arxiv.org/abs/2104.09864) (RoPE), [Chen et al. 2023](https://arxiv.org/abs/2306.15595)
# (linear scaling), [Peng et al. 2023](https://arxiv.org/abs/2309.00071) (NTK, dynamic and YaRN).
# The glossary has the [symbols](../docs/notebooks.md#glossary-of-symbols) and the
# [words](../docs/notebooks.md#glossary-of-words).

# %%
import math
from pydoc_data import topics

import attnpack
import matplotlib.pyplot as plt
import torch
from attnpack.tools import course
from attnpack.tools.course import largest_difference
from attnpack.tools.plot import memory as plot_memory
from torch.nn import functional

_ = torch.manual_seed(0)


# %% [markdown]
# ## Attention is blind to order
#
# Nothing in the formula says where a key stands. Shuffle the tokens, and the outputs are shuffled in the same way: "dog
# bites man" and "man bites dog" give each word the same vector.

# %%
order = torch.tensor([2, 1, 0])  # dog bites man -> man bites dog
x = torch.randn(1, 3, 64)
layer = attnpack.MultiHeadAttention(64, 4)
with torch.no_grad():
    print(
        "shuffled outputs against outputs of the shuffled:", largest_difference(layer(x)[:, order], layer(x[:, order]))
    )
    torch.testing.assert_close(layer(x)[:, order], layer(x[:, order]))
    causal = attnpack.MultiHeadAttention(64, 4, causal=True)
    gap = largest_difference(causal(x)[:, order], causal(x[:, order]))
    print("the same with a causal mask:                     ", gap)
    assert float(gap) > 1e-2

# %% [markdown]
# A causal mask breaks the symmetry: a token sees those before it, as a set. But the set still has no order. The last
# token of a causal layer sees all others, and cannot tell them apart by place:

# %%
x = torch.randn(1, 6, 64)
shuffled = x[:, [3, 0, 4, 1, 2, 5]]  # the last token stays the last
with torch.no_grad():
    print("last row, the five before it shuffled:", largest_difference(causal(x)[:, -1], causal(shuffled)[:, -1]))
    torch.testing.assert_close(causal(x)[:, -1], causal(shuffled)[:, -1])

# %% [markdown]
# ## Learned positions: a vector per place
#
# The first remedy: a table with one row per position, added to the embeddings. GPT-2 does this. Here are three small
# models that are alike but for their positions: none, a table, and the rotation of the next section. Each reads 64
# characters at a time (of Python's own help texts, which every Python brings along), and learns to guess each next
# character.

# %%
text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text])
held_out = data[len(data) * 9 // 10 :]
data = data[: len(data) * 9 // 10]
trained_len, steps, threads = 64, 200, torch.get_num_threads()


def small_model(scaling=None, position_embedding="rope"):
    """Two layers of 4 heads."""
    sizes = {"hidden_dim": 288, "max_positions": trained_len, "rope_scaling": scaling}
    return attnpack.CausalLM(len(letters), 96, 2, 4, **sizes, position_embedding=position_embedding)


def losses(model, ids):
    """Cross-entropy of each next letter, [batch, length], in nats."""
    return functional.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")


def train(model):
    """200 steps on 32 pieces of 64 characters; returns the loss of the last ten steps."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a model this small loses more to a second thread's start than it gains
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps)
    last = []
    for _ in range(steps):
        starts = torch.randint(len(data) - trained_len, (32,))
        loss = losses(model, torch.stack([data[at : at + trained_len + 1] for at in starts])).mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        last.append(loss.item())
    torch.set_num_threads(threads)
    return sum(last[-10:]) / 10


models, trained = {}, {}
for kind in ("none", "learned", "rope"):
    torch.manual_seed(0)
    models[kind] = small_model(position_embedding=kind)
    trained[kind] = train(models[kind])
    print(
        f"positions {kind!r:<10} loss {trained[kind]:.2f} after {steps} steps (guessing: {math.log(len(letters)):.2f})"
    )
model = models["rope"]
assert trained["rope"] < trained["learned"] < trained["none"] < math.log(len(letters))

# %% [markdown]
# Without positions the model still learns something. One causal layer sees the letters before a place as a set. A
# second layer sees a little more, because each earlier letter has read another part of the text. In this one run of 200
# steps from one seed the table helps a little, and the rotation (below) helps much more. A likely reason, not tested
# here: a table must learn each place by itself, and a rotation tells the *distance* of two tokens from the first step
# on.
#
# The learned table: how alike the vectors of two places are (their cosine). It is brighter near the diagonal than far
# from it: near places have near vectors. The table began as noise, and training made it so. The late places look alike
# as a block: the model hardly tells them apart. Place 63, the last one, is unlike them. This may be because no later
# place reads it in training, so that its vector learns from one prediction only; the picture does not prove it. On the
# right is what rotary positions (next section) have from the start, without a table.

# %%
table = models["learned"].model.embed_positions.weight.detach()
learned = functional.cosine_similarity(table[:, None], table[None], dim=-1)
rope = attnpack.RotaryEmbedding(24, max_positions=trained_len)
ones = torch.ones(1, 1, trained_len, 24)
rotated = rope(ones)[0, 0]
rotary = rotated @ rotated.T / 24

# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure, panels = plt.subplots(1, 2, figsize=(8, 3.6), dpi=110, layout="constrained")
for panel, picture, title in zip(panels, (learned, rotary), ("learned table", "rotary, by construction"), strict=True):
    image = panel.imshow(picture, cmap="cividis", vmin=-1, vmax=1)
    panel.set(xlabel="position", ylabel="position", title=title)
figure.colorbar(image, ax=panels, label="cosine")
plt.show()
near = learned.diagonal(1).mean().item()
far = learned.triu(16)[learned.triu(16) != 0].mean().item()
print(f"learned: neighbours {near:.2f}, 16 places apart and more {far:.2f}")
assert near > far + 0.1

# %% [markdown]
# A table ends where it ends. There is no row for position 64, and no rule that could make one:

# %%
try:
    models["learned"](held_out[None, :65])
except ValueError as error:
    print(str(error).split("\n")[0])

# %% [markdown]
# ## Rotary positions: an angle per place
#
# Rotary embedding (RoPE) adds nothing. It takes the numbers of a query or a key in pairs, and rotates each pair in its
# plane by an angle that grows with the position p: $p \cdot \theta_i$ with $\theta_i = \text{base}^{-2i/d}$. The first
# pairs rotate fast and distinguish neighbours. The last pairs hardly rotate over a whole text.

# %% tags=["hide-input"] jupyter={"source_hidden": true}
head_dim = 24
theta = torch.tensor(rope.inv_freq)
figure, panels = plt.subplots(1, 4, figsize=(11.5, 2.7), dpi=110, layout="constrained")
for panel, pair in zip(panels, (0, 3, 7), strict=False):
    angles = theta[pair] * torch.arange(8)
    panel.add_patch(plt.Circle((0, 0), 1, fill=False, color="#cccccc"))
    for position, angle in enumerate(angles.tolist()):
        panel.plot([0, math.cos(angle)], [0, math.sin(angle)], color=plt.cm.cividis(position / 8), linewidth=2)
        if pair == 0 or position == 0 or (position == 7 and angle > 0.3):
            panel.text(1.15 * math.cos(angle), 1.15 * math.sin(angle), str(position), ha="center", va="center")
    panel.set(xlim=(-1.4, 1.4), ylim=(-1.4, 1.4), aspect="equal", title=f"pair {pair}: {theta[pair]:.3f} rad per token")
    panel.set_axis_off()
distances = torch.arange(trained_len)
for pair, (colour, line) in zip((0, 3, 7), plot_memory.STYLES, strict=False):
    panels[3].plot(distances, (distances * theta[pair]).cos(), line, color=colour, label=f"pair {pair}")
panels[3].set(xlabel="distance (tokens)", ylabel="cos(distance x angle)", title="a pair's part of a score")
panels[3].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()
assert theta[0] == 1 and theta[0] > 5 * theta[3] > 5 * theta[7]

# %% [markdown]
# A score then depends only on the *distance* of query and key, because a rotation of both by the same angle cancels:

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
# The rotation by hand, pair by pair. The operator's pairs are (i, i + d/2), as in Hugging Face's checkpoints;
# `interleaved=True` takes (2i, 2i + 1), as the paper does:

# %%
q5 = torch.randn(1, 1, 5, head_dim)
angles = torch.arange(5)[:, None] * theta  # [5, 12]
first, second = q5[..., : head_dim // 2], q5[..., head_dim // 2 :]
by_hand = torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)
print("by hand against the module:", largest_difference(by_hand.float(), rope(q5)))
torch.testing.assert_close(by_hand.float(), rope(q5))

# %% [markdown]
# ## Past the trained length
#
# Only distances matter, so a model can read past the length of its training: no table ends. But longer distances give
# angles that never occurred in training, and the model has not learned what to do with them. Four ways to stretch
# positions, all without training:
#
# - **linear**: position / factor. No angle is new, but neighbours are closer together than they ever were.
# - **NTK-aware**: a larger base, $\text{base} \cdot \text{factor}^{d/(d-2)}$. The slow pairs are stretched by the
#   factor, the fast ones, which tell neighbours apart, hardly at all.
# - **dynamic**: the NTK rule with a factor that follows the length of the sequence, so that a text within the trained
#   length is read with exactly the angles of training.
# - **YaRN**: pairs that rotate many times within the trained length stay, pairs that rotate less than once are
#   stretched by the factor, and those between are blended. Scores get a factor of their own, which sharpens the
#   softmax. (The paper's bounds are 32 rotations and 1. A trained length of 64 has at most 10 rotations, so the upper
#   bound here is 4.)

# %%
length, factor = 512, 8.0
settings = {
    "as trained": None,
    "linear": {"rope_type": "linear", "factor": factor},
    "NTK-aware": {"rope_type": "ntk", "factor": factor},
    "dynamic NTK": {"rope_type": "dynamic", "factor": factor},
    "YaRN": {"rope_type": "yarn", "factor": factor, "beta_fast": 4},
}

# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(8, 3.2), dpi=110, layout="constrained")
for (name, scaling), (colour, line) in zip(settings.items(), plot_memory.STYLES, strict=False):
    if name != "dynamic NTK":  # at each length another one
        stretched = torch.tensor(
            attnpack.RotaryEmbedding(head_dim, max_positions=trained_len, scaling=scaling).inv_freq
        )
        thick = 5 if name == "linear" else 1.5  # YaRN's line lies on it
        axes.plot(
            range(12), theta / stretched, line, color=colour, marker="o", markersize=4, linewidth=thick, label=name
        )
print(f"rotations of pair 0 in {trained_len} tokens: {trained_len / (2 * math.pi):.1f}")
axes.set(xlabel="pair (0 rotates fastest)", ylabel="stretched by", title="How far each scaling stretches each pair")
axes.set_xticks(range(12))
axes.grid(alpha=0.3)
axes.legend()
plt.show()

# %% [markdown]
# The next cell shows a model that was trained on 64 characters and reads 512:

# %%
starts = range(0, len(held_out) - length - 1, (len(held_out) - length) // 64)
long_texts = torch.stack([held_out[at : at + length + 1] for at in starts])
by_position, short = {}, {}
for name, scaling in settings.items():
    stretched = small_model(scaling)
    stretched.load_state_dict(model.state_dict())  # the same weights: RoPE has none
    with torch.no_grad():
        by_position[name] = losses(stretched, long_texts).mean(0)
        short[name] = losses(stretched, long_texts[:, : trained_len + 1]).mean().item()

# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(8, 3.8), dpi=110, layout="constrained")
window = 16
for (name, loss), (colour, line) in zip(by_position.items(), plot_memory.STYLES, strict=False):
    axes.plot(
        range(window // 2, length, window), loss.view(-1, window).mean(1), line, color=colour, linewidth=2, label=name
    )
axes.axvline(trained_len, color="black", linewidth=1)
axes.annotate(
    "trained length", (trained_len, 0.05), xytext=(4, 0), textcoords="offset points", xycoords=("data", "axes fraction")
)
axes.set(xlabel="position (characters)", ylabel="loss (nats per character)", title="Reading past the trained length")
axes.set_ylim(1.3, 3.6)
axes.grid(alpha=0.3)
axes.legend(ncols=3, loc="upper center")
plt.show()
grown = {n: factor * n / trained_len - (factor - 1) for n in (trained_len, length)}
print("the factor of the dynamic rule:", ", ".join(f"{each:g} for {n} characters" for n, each in grown.items()))
print(f"{'':<12}{'texts of 64':>12}{'of 512: first 64':>18}{'last 64':>9}")
for name, loss in by_position.items():
    print(f"{name:<12}{short[name]:>12.2f}{loss[:64].mean():>18.2f}{loss[-64:].mean():>9.2f}")
assert by_position["dynamic NTK"][-64:].mean() < by_position["as trained"][-64:].mean() - 0.2
assert abs(short["dynamic NTK"] - short["as trained"]) < 1e-4
assert by_position["YaRN"][-64:].mean() < by_position["dynamic NTK"][-64:].mean()
assert short["linear"] > short["YaRN"] > short["NTK-aware"] > short["as trained"] - 1e-4

# %% [markdown]
# As trained, little happens at the line itself: for the next characters nearly all keys that a query sees are at
# distances that occurred in training, and only the first few are farther away. Then the loss climbs, far above where it
# was. Linear scaling without further training is bad from the first character on (2.86), and far away only a little
# worse (2.91). A likely reason, not tested here: neighbours are closer together than in training, by the factor 8.
#
# NTK-aware scaling keeps neighbours readable, holds on longer, and then climbs too. Its factor is 8 for the slowest
# pair only, so pairs in the middle still reach new angles. The dynamic form goes further. Its factor follows the length
# of the text, by the rule factor · length / trained length - (factor - 1): 1 up to 64 characters, 57 for these 512.
# Hence two things in the table. A short text is read exactly as in training (first column). And in a long one even the
# *first* 64 characters are read with the long text's angles, which costs a little there (second column).
#
# YaRN costs some loss on short texts. In exchange no pair that it stretches ever reaches a new angle within 512
# characters, the fast pairs still tell neighbours apart, and the loss at the end is the lowest of all.
#
# ## Dynamic scaling and a cache
#
# When the frequencies change with the length, keys that were rotated earlier have the angles of a shorter text.
# attnpack then keeps keys unrotated and rotates all of them at each call (`raw_keys`, the default for such a scaling),
# so that a layer with a cache gives for its last token what a full recompute gives:

# %%
x = torch.randn(1, 200, 96)
for raw_keys in (True, False):
    rope = attnpack.RotaryEmbedding(24, max_positions=64, scaling=settings["dynamic NTK"], raw_keys=raw_keys)
    torch.manual_seed(0)
    layer = attnpack.MultiHeadAttention(96, 4, causal=True, rope=rope)
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
# quite the model that reads the finished text at once. Fixed scalings have no such problem.)
#
# ## ALiBi: a penalty per token of distance
#
# A third remedy changes only the scores: each head subtracts its own slope times the distance
# ([Press et al. 2022](https://arxiv.org/abs/2108.12409)). Nothing is learned, and no length is the last one.

# %%
slopes = 2.0 ** (-8 * torch.arange(1, 5) / 4)  # of 4 heads, by the paper's rule
q, k = torch.randn(2, 1, 4, 8, 16).unbind(0)
plain = attnpack.attention_scores(q, k, stage="masked", causal=True)
tilted = attnpack.attention_scores(q, k, stage="masked", causal=True, alibi_slopes=slopes)
distance = torch.arange(8)[:, None] - torch.arange(8)
seen = distance >= 0
print("slopes of 4 heads:", [round(slope, 4) for slope in slopes.tolist()])
by_hand = plain[0] - slopes[:, None, None] * distance
print("against the subtraction by hand:", largest_difference(tilted[0][:, seen], by_hand[:, seen]))
torch.testing.assert_close(tilted[0][:, seen], by_hand[:, seen])

# %% [markdown]
# ## Summary
#
# - Attention is blind to order; in one layer a causal mask tells before from after, and nothing else.
# - A learned table adds a vector per place, and ends where it ends.
# - RoPE rotates queries and keys, so that a score depends on the distance. It has no last position, but it meets new
#   angles past the trained length.
# - In the table above, linear scaling costs short texts most and NTK little. Dynamic NTK leaves them alone, and YaRN
#   decides pair by pair.
#
# ## Exercises
#
# 1. How many tokens does pair i of this RoPE need for one whole turn? Which pairs make one within 64 tokens?
# 2. Rotate queries and keys by *negative* positions. Which scores change?
# 3. *Implement* the rotation without the library. The cell below checks it.


# %%
def rotate(x, positions):
    """Yours: x [B, H, L, D] with its pairs (i, i + D/2) rotated by position * 10000 ** (-2 i / D)."""


print(course.check_rotation(rotate))

# %% [markdown]
# The next cell has solutions. It is folded; try first.

# %% tags=["hide-cell"] jupyter={"source_hidden": true, "outputs_hidden": true}
# Solutions. Try first.
turns = 2 * math.pi / theta
print("1. whole turns within 64 tokens: pairs", [i for i in range(12) if turns[i] <= 64])
k5, places = torch.randn(1, 1, 5, head_dim), torch.arange(5)
forward, backward = (
    attnpack.attention_scores(rope(q5, sign * places), rope(k5, sign * places), stage="scaled")[0, 0]
    for sign in (1, -1)
)
torch.testing.assert_close(forward.diagonal(), backward.diagonal())
changed = (forward - backward).abs() > 1e-4
print("2. all but those of a token with itself:", torch.equal(changed, ~torch.eye(5, dtype=torch.bool)))


def rotate(x, positions):
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** (-torch.arange(half) / half)  # [L, D/2]
    first, second = x.split(half, -1)
    turned = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
    return torch.cat(turned, -1)


print("3.", course.check_rotation(rotate))
assert course.check_rotation(rotate) == "right"

# %% [markdown]
# Next: [multi_query_attention](multi_query_attention.ipynb).
