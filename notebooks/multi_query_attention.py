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
# # Multi-query attention: three versions, in plain PyTorch and in C++
#
# *You need* [attention_from_scratch](attention_from_scratch.ipynb) and [kv_cache](kv_cache.ipynb). *You learn* one
# layer in three versions (plain, cached, cached and masked), two conventions for masks, and what one shared key-value
# head saves. *Runs in* half a minute.
#
# Sources: [Shazeer 2019](https://arxiv.org/abs/1911.02150).
# The glossary has the [symbols](../docs/notebooks.md#glossary-of-symbols) and the
# [words](../docs/notebooks.md#glossary-of-words).
#
# In multi-head attention every head owns a query, a key and a value projection. Multi-query attention (Shazeer 2019)
# keeps one query projection per head, but lets all heads read **one** key head and **one** value head. Heads can still
# look for different things, but a token offers the same key and value to all of them. That costs some expressive power.
# It saves memory traffic: a language model that writes token by token reads all cached keys and values at every step,
# and that reading, not the arithmetic, takes the time. With one shared head the cache has 1/`num_heads` of the size:
#
# $$\text{head}_h = \text{softmax}\left(\frac{(x W_q^{(h)}) (x W_k)^\top}{\sqrt{d_{kv}}}\right) x W_v, \qquad
# \text{out} = [\text{head}_1, \dots, \text{head}_H]\, W_o$$
#
# Three versions follow: V1 without cache and mask, V2 with a cache, V3 with a cache and a causal mask. Each is a whole
# class of plain PyTorch in a cell: change a line, and run it. Then the native `attnpack.MultiQueryAttention` runs with
# the same weights. Values are compared, not only shapes.

# %%
import contextlib
import io
import math
from pathlib import Path

import attnpack
import matplotlib.pyplot as plt
import torch
from attnpack import checkpoints, reference
from attnpack.tools import bench, course
from attnpack.tools.course import largest_difference, time_in_turn
from attnpack.tools.plot import attention as plot_attention
from attnpack.tools.plot import schematic
from attnpack.tools.plot.colours import BLUE, KINDS
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

torch.manual_seed(0)
batch, seq, d_model, num_heads = 2, 10, 64, 8
d_kv = d_model // num_heads
x = torch.randn(batch, seq, d_model)
schematic.beside([schematic.grouping(range(8), title="multi-head"), schematic.grouping([0] * 8, title="multi-query")])

# %% [markdown]
# ## V1: no cache, no mask
#
# `W_k` and `W_v` map to `d_kv = 8` numbers, not to 64: there is one head of them. It gets a place of its own among the
# dims (`unsqueeze`). The matrix product broadcasts that head over the eight query heads, and copies nothing.


# %%
class MultiQueryAttentionV1(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.d_kv = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model, bias=False)  # a query for each head
        self.W_k = nn.Linear(d_model, self.d_kv, bias=False)  # one key for all heads
        self.W_v = nn.Linear(d_model, self.d_kv, bias=False)  # one value for all heads
        self.W_o = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x):
        batch, seq, d_model = x.shape
        # Q: [batch, heads, seq, d_kv], K and V: [batch, 1, seq, d_kv]
        Q = self.W_q(x).view(batch, seq, self.num_heads, self.d_kv).transpose(1, 2)
        K = self.W_k(x).unsqueeze(1)
        V = self.W_v(x).unsqueeze(1)

        scores = Q @ K.transpose(-2, -1) / math.sqrt(self.d_kv)  # [batch, heads, seq, seq]
        probs = scores.softmax(dim=-1)
        print(f"should be 1 if correct: {probs.sum(dim=-1)}")

        heads = probs @ V  # [batch, heads, seq, d_kv]
        out = self.W_o(heads.transpose(1, 2).reshape(batch, seq, d_model))
        print(f"shape of out : {out.shape}")
        return out


v1 = MultiQueryAttentionV1(d_model, num_heads)
print(f"x.shape : {x.shape}")
out_v1 = v1(x)

# %% [markdown]
# A row of the attention matrix is a softmax, so it sums to 1: that is what the printed tensor shows, for each of the
# 2 sequences, 8 heads and 10 query rows.
#
# Now the native module with the same weights. `module.project` gives q, k and v as they enter the operator and
# `attention_scores` gives the matrix that the operator itself never writes to memory: `attnpack.attention` walks over
# the keys in tiles and keeps a running softmax. `attnpack.reference` has this class too, as an answer to compare with.


# %%
def load_weights(native, plain):
    """W_q, W_k, W_v, W_o of a plain class into q_proj, k_proj, v_proj, o_proj of a native module."""
    native.load_state_dict({f"{name[2]}_proj.weight": weight for name, weight in plain.state_dict().items()})
    return native


native = load_weights(attnpack.MultiQueryAttention(d_model, num_heads), v1)
q, k, v = native.project(x)
probs = attnpack.attention_scores(q, k)
out_native = native(x)
print(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
print("row sums, largest difference from 1: ", largest_difference(probs.sum(dim=-1), torch.ones(2, 8, 10)))
print("native against the class above:      ", largest_difference(out_native, out_v1))
ours = reference.MQAV1(d_model, num_heads)
ours.load_state_dict(v1.state_dict())
print("attnpack.reference against that class:", largest_difference(ours(x), out_v1))
torch.testing.assert_close(out_native, out_v1)
torch.testing.assert_close(ours(x), out_v1)

# %% [markdown]
# The heads read the same keys and still attend differently, because their queries differ. V1's weights are random, and
# a picture of them would be noise. So here is a trained model: in layer 13 of SmolLM2 three query heads share one key
# head. (Its future is hidden, as in V3 below.) All three read the same seven keys. One of them finds what "it" means.

# %%
path = checkpoints.smollm2_path()
tokenizer, model = checkpoints.load_tokenizer(path), attnpack.CausalLM.from_gguf(path)
ids = tokenizer.encode(course.SENTENCE)
words = [tokenizer.decode([token]) for token in ids]
weights = plot_attention.lm_attention(model, torch.tensor([ids]))[13][0]

# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure, panels = plt.subplots(1, 3, figsize=(9, 3.3), dpi=110, layout="constrained", sharey=True)
for panel, head in zip(panels, (6, 7, 8), strict=True):
    image = plot_attention.draw_weights(panel, weights[head], words, title=f"query head {head}")
figure.supxlabel("key (token that is read)", fontsize=9)
panels[0].set_ylabel("query (token that reads)")
figure.colorbar(image, ax=panels, label="weight")
plt.show()
print(f"head 8: 'it' reads 'cat' with a weight of {weights[8, 4, 1]:.2f}")

# %% [markdown]
# ## V2: with a cache
#
# When tokens come one at a time, the keys and values of the earlier ones do not change. They are kept, and a step
# projects the new token only. The cache is a pair of tensors. They are detached: gradients flow through this call's own
# keys and values, and never into the past.


# %%
class MultiQueryAttentionV2(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.d_kv = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model, bias=False)
        self.W_k = nn.Linear(d_model, self.d_kv, bias=False)
        self.W_v = nn.Linear(d_model, self.d_kv, bias=False)
        self.W_o = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, kv_cache=None):
        batch, seq, d_model = x.shape
        Q = self.W_q(x).view(batch, seq, self.num_heads, self.d_kv).transpose(1, 2)
        K = self.W_k(x).unsqueeze(1)
        V = self.W_v(x).unsqueeze(1)
        if kv_cache is not None:  # the past first, then what is new
            K = torch.cat([kv_cache[0], K], dim=2)
            V = torch.cat([kv_cache[1], V], dim=2)
        print(f"Q shape : {Q.shape}\nK.shape: {K.shape}\nV.shape: {V.shape}")

        scores = Q @ K.transpose(-2, -1) / math.sqrt(self.d_kv)  # [batch, heads, seq, past + seq]
        probs = scores.softmax(dim=-1)

        heads = probs @ V
        out = self.W_o(heads.transpose(1, 2).reshape(batch, seq, d_model))
        print(f"shape of out : {out.shape}")
        return out, (K.detach(), V.detach())


def run_steps(module, x):
    """One token at a time; returns the outputs, and keys and values at the end."""
    print(f"x.shape : {x.shape}")
    kv_cache, outs = None, []
    for i in range(x.shape[1]):
        print(f"\n{'-' * 20}")
        out, kv_cache = module(x[:, i : i + 1], kv_cache)
        outs.append(out)
    return torch.cat(outs, dim=1), kv_cache


def printed_by(function, *inputs):
    """The text that a call prints, and its result."""
    page = io.StringIO()
    with contextlib.redirect_stdout(page), torch.no_grad():
        result = function(*inputs)
    return page.getvalue(), result


v2 = MultiQueryAttentionV2(d_model, num_heads)
v2.load_state_dict(v1.state_dict())
ten_steps, (steps_plain, plain_cache) = printed_by(run_steps, v2, x)
print(ten_steps)

# %% [markdown]
# Only K and V grow. In attnpack the cache is a `DynamicCache`, handed to `forward`, which appends first and then
# attends. Its steps print the same lines, and give the same numbers:


# %%
def run_native_steps(module, x, new_cache=attnpack.DynamicCache):
    """As `run_steps`. The shapes come from the tensors that the native code hands out."""
    cache, outs = new_cache(), []
    print(f"x.shape : {x.shape}")
    for token in x.split(1, dim=1):
        q, _, _ = module.project(token)
        outs.append(module(token, cache=cache))
        print(f"\n{'-' * 20}\nQ shape : {q.shape}\nK.shape: {cache.k.shape}\nV.shape: {cache.v.shape}")
        print(f"shape of out : {outs[-1].shape}")
    return torch.cat(outs, dim=1), (cache.k, cache.v)


printed, (steps_native, native_cache) = printed_by(run_native_steps, native, x)
print("V2, native: the same ten steps:", printed == ten_steps)
print("outputs:", largest_difference(steps_native, steps_plain))
print("keys:   ", largest_difference(native_cache[0], plain_cache[0]))
print("values: ", largest_difference(native_cache[1], plain_cache[1]))
ours = reference.MQAV2(d_model, num_heads)
ours.load_state_dict(v1.state_dict())
printed, (ours_steps, ours_cache) = printed_by(run_steps, ours, x)
print("attnpack.reference against that class:", largest_difference(ours_steps, steps_plain))
torch.testing.assert_close(ours_steps, steps_plain)
torch.testing.assert_close(ours_cache, plain_cache)
torch.testing.assert_close(steps_native, steps_plain)
torch.testing.assert_close(native_cache, plain_cache)

# %% [markdown]
# Gradients never flow into the past. A loss on the second step shows it: it has a gradient for the second token and
# none for the first, although the second token reads the first one's key and value:

# %%
first, second = (x[:, i : i + 1].clone().requires_grad_() for i in range(2))
graded = attnpack.DynamicCache()
native(first, cache=graded)
native(second, cache=graded).sum().backward()
print("gradient of token 1:", first.grad)
print(f"gradient of token 2: {second.grad.norm():.2f} (norm)")
assert first.grad is None and second.grad.norm() > 0

# %% [markdown]
# ### V2 has no mask, and is causal all the same
#
# At step t the cache simply holds nothing later than t. V1 sees all ten tokens from every row. So V2 by steps and V1
# are different functions; they agree in the last row only, which may see everything in both.

# %% tags=["hide-input"] jupyter={"source_hidden": true}
per_row = (steps_native - out_native).detach().abs().amax(dim=(0, 2))
figure, axes = plt.subplots(figsize=(5, 2.2), dpi=110, layout="constrained")
axes.bar(range(1, seq + 1), per_row, color=BLUE)
axes.set_xticks(range(1, seq + 1))
axes.set_xlabel("query row")
axes.set_ylabel("largest difference")
axes.set_title("V2 by steps against V1: equal in the last row only")
plt.show()
print("last row:", largest_difference(steps_native[:, -1], out_native[:, -1]))
torch.testing.assert_close(steps_native[:, -1], out_native[:, -1])
assert per_row[:-1].min() > 1e-3

# %% [markdown]
# And feeding V2 a chunk of several tokens breaks it: the first token of a chunk sees the others. That is what V3
# repairs.

# %%
with torch.no_grad():
    chunk_cache = attnpack.DynamicCache()
    chunks = torch.cat([native(part, cache=chunk_cache) for part in x.split([4, 6], dim=1)], dim=1)
print("V2, chunks of 4 and 6 against steps of 1:", largest_difference(chunks, steps_native))
assert (chunks - steps_native).abs().max() > 1e-3

# %% [markdown]
# ## Masking
#
# A causal mask hides key j from row i where j > i. Hidden scores become -inf, and exp(-inf) = 0.

# %%
q5, k5 = torch.randn(2, 1, 1, 5, d_kv).unbind(0)
scores = attnpack.attention_scores(q5, k5, stage="scaled")[0, 0]
print(scores)
hidden = torch.triu(torch.ones(5, 5, dtype=torch.bool), diagonal=1)
print(f"\n{hidden}")
masked = scores.masked_fill(hidden, float("-inf"))
print(f"\n{masked}")
assert torch.equal(masked, attnpack.attention_scores(q5, k5, stage="masked", causal=True)[0, 0])

# %% [markdown]
# ### True = hidden, or True = may attend?
#
# Above, True means **hidden**: that is what `masked_fill` wants, and what `torch.nn.MultiheadAttention` calls
# `attn_mask`. In attnpack, as in PyTorch's `scaled_dot_product_attention`, True means **may attend**. Both conventions
# are in wide use, and nothing raises when they are mixed up: the shapes fit. So pass `~hidden`. The picture on the
# right shows the result without the `~`: every row but the last attends to the future, and the last row, which may
# then attend nothing, is zero.

# %% tags=["hide-input"] jupyter={"source_hidden": true}
right = attnpack.attention_scores(q5, k5, ~hidden)[0, 0]
wrong = attnpack.attention_scores(q5, k5, hidden)[0, 0]
figure, panels = plt.subplots(1, 2, figsize=(6.4, 3), dpi=110, layout="constrained")
for panel, picture, title in zip(panels, (right, wrong), ("mask=~hidden: right", "mask=hidden: wrong"), strict=True):
    image = plot_attention.draw_weights(panel, picture, title=title)
    panel.set(xlabel="key (position)", ylabel="query (position)")
figure.colorbar(image, ax=panels, label="weight")
plt.show()
assert torch.equal(right, attnpack.attention_scores(q5, k5, causal=True)[0, 0])
assert not right.triu(1).any() and not wrong.tril().any()

# %% [markdown]
# ## V3: cache and causal mask
#
# With `past_len` tokens in the cache, row i of a chunk is at position i + past_len, and may attend the keys up to that
# position: the mask's diagonal moves right by `past_len`. For a chunk of one token nothing is hidden, so the mask may
# be applied always; no special case for single tokens is needed.


# %%
class MultiQueryAttentionV3(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.d_kv = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model, bias=False)
        self.W_k = nn.Linear(d_model, self.d_kv, bias=False)
        self.W_v = nn.Linear(d_model, self.d_kv, bias=False)
        self.W_o = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, kv_cache=None):
        batch, seq, d_model = x.shape
        Q = self.W_q(x).view(batch, seq, self.num_heads, self.d_kv).transpose(1, 2)
        K = self.W_k(x).unsqueeze(1)
        V = self.W_v(x).unsqueeze(1)
        past_len = 0
        if kv_cache is not None:
            past_len = kv_cache[0].shape[2]
            K = torch.cat([kv_cache[0], K], dim=2)
            V = torch.cat([kv_cache[1], V], dim=2)
        print(f"Q shape : {Q.shape}\nK.shape: {K.shape}\nV.shape: {V.shape}")

        scores = Q @ K.transpose(-2, -1) / math.sqrt(self.d_kv)
        # New in V3: row i is at position past_len + i, and what comes later is hidden.
        hidden = torch.ones(seq, past_len + seq, dtype=torch.bool).triu(diagonal=past_len + 1)
        probs = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)

        heads = probs @ V
        out = self.W_o(heads.transpose(1, 2).reshape(batch, seq, d_model))
        print(f"shape of out : {out.shape}")
        return out, (K.detach(), V.detach())


v3 = MultiQueryAttentionV3(d_model, num_heads)
v3.load_state_dict(v1.state_dict())
printed, (steps_v3, _) = printed_by(run_steps, v3, x)
print("V3: the same ten steps:", printed == ten_steps)
print("the mask of one token after four:", torch.ones(1, 5, dtype=torch.bool).triu(diagonal=5).tolist())

# %% [markdown]
# In attnpack the module is made with `causal=True`; with a cache the queries come after the cached positions. (Without
# a module, `attention(..., causal=True, q_offset=past_len)` does the same. The offset is never guessed from the
# shapes.)

# %%
causal = load_weights(attnpack.MultiQueryAttention(d_model, num_heads, causal=True), v1)
printed, (native_v3, _) = printed_by(run_native_steps, causal, x)
print("V3, native: the same ten steps:", printed == ten_steps)
print("outputs:", largest_difference(native_v3, steps_v3))
torch.testing.assert_close(native_v3, steps_v3)

# %% [markdown]
# Steps of one token never need the mask. Chunks need it, so they are the test: ten tokens at once, in two parts, in
# three parts.


# %%
def in_chunks(module, x, parts):
    """Outputs of V2 or V3 for chunks of these lengths."""
    kv_cache, outs = None, []
    for part in x.split(parts, dim=1):
        out, kv_cache = module(part, kv_cache)
        outs.append(out)
    return torch.cat(outs, dim=1)


def in_native_chunks(module, x, parts):
    cache = attnpack.DynamicCache()
    return torch.cat([module(part, cache=cache) for part in x.split(parts, dim=1)], dim=1)


with torch.no_grad():
    full = causal(x)
    for parts in ([10], [4, 6], [1, 3, 6]):
        plain = printed_by(in_chunks, v3, x, parts)[1]
        chunks = in_native_chunks(causal, x, parts)
        against_full, against_plain = largest_difference(chunks, full), largest_difference(chunks, plain)
        name = f"chunks of {'+'.join(map(str, parts))}"
        print(f"{name:<16} against in full: {against_full}, native against plain: {against_plain}")
        torch.testing.assert_close(chunks, full)
        torch.testing.assert_close(chunks, plain)
print("in full against steps of 1:", largest_difference(full, steps_v3))
torch.testing.assert_close(steps_v3, full)
ours = reference.MQAV3(d_model, num_heads)
ours.load_state_dict(v1.state_dict())
with torch.no_grad():
    print("attnpack.reference against that class:", largest_difference(ours(x)[0], full))
    torch.testing.assert_close(ours(x)[0], full)

# %% [markdown]
# ## Once more, in C++
#
# `attnpack.cpp.MultiQueryAttention` is the C++ `torch::nn::Module` itself, bound to Python. The Python class and it run
# the same native code after the projections, so with the same weights they give the same bits. The plain class's
# W_* weights go in by parameter name. V1, then the steps of V2 and V3 with the C++ cache:

# %%
bound = load_weights(attnpack.cpp.MultiQueryAttention(d_model, num_heads), v1)
bound_causal = load_weights(attnpack.cpp.MultiQueryAttention(d_model, num_heads, causal=True), v1)
with torch.no_grad():
    q, k, v = bound.project(x)
    sums = attnpack.attention_scores(q, k).sum(dim=-1)
    bound_v1, bound_full = bound(x), bound_causal(x)
print("V1, C++: row sums, largest difference from 1:", largest_difference(sums, torch.ones(2, 8, 10)))
printed_v2, (bound_v2, _) = printed_by(run_native_steps, bound, x, attnpack.cpp.DynamicCache)
printed_v3, (bound_v3, _) = printed_by(run_native_steps, bound_causal, x, attnpack.cpp.DynamicCache)
print("V2, C++: the same ten steps:", printed_v2 == ten_steps)
print("V3, C++: the same ten steps:", printed_v3 == ten_steps)
print("V1, C++ against Python:", largest_difference(bound_v1, out_native))
print("V2 by steps:           ", largest_difference(bound_v2, steps_native))
print("V3 by steps:           ", largest_difference(bound_v3, native_v3))
print("V3 in full:            ", largest_difference(bound_full, full))
assert torch.equal(bound_v1, out_native) and torch.equal(bound_v2, steps_native)
assert torch.equal(bound_full, full) and torch.equal(bound_v3, native_v3)

# %% [markdown]
# And without Python at all: `examples/cpp/mqa_notebook` is a program of its own. Its heart is the loop of V2 and V3:

# %%
example = Path("..") / "examples" / "cpp" / "mqa_notebook"
program = (example / "main.cpp").read_text()
print(program[program.index("// One token at a time") : program.index("}  // namespace")])

# %% [markdown]
# It prints the lines of V1, V2, V3 and of the mask. `output.txt` keeps them, and a test builds the program and
# compares. The numbers of its mask differ from those above, because the program draws its own. Its first and last
# lines, and its steps beside those of this notebook:

# %%
lines = (example / "output.txt").read_text().splitlines()
print("\n".join([lines[0], lines[1][:60] + " ...", "...", *lines[-5:]]))


def shapes(lines):
    """The four lines of each step."""
    return ["\n".join(lines[i : i + 4]) for i, line in enumerate(lines) if line.startswith("Q shape")]


print("\nC++ program, V2 and V3: the same ten steps:", shapes(lines) == 2 * shapes(ten_steps.splitlines()))
assert shapes(lines) == 2 * shapes(ten_steps.splitlines())

# %% [markdown]
# ## Memory saved
#
# Keys and values of one layer, one sequence, in fp32: `2 * seq * kv heads * d_kv * 4` bytes. Measured on the caches
# themselves, for multi-head attention with eight kv heads, for four and two groups, and for multi-query attention.

# %%
sizes = {}
for kv_heads in (8, 4, 2, 1):
    layer = attnpack.GroupedQueryAttention(d_model, num_heads, kv_heads, causal=True)
    cache = attnpack.DynamicCache()
    with torch.no_grad():
        layer(x[:1], cache=cache)
    sizes[str(kv_heads)] = cache.nbytes
    assert cache.nbytes == 2 * seq * kv_heads * d_kv * 4

# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(5, 1.8), dpi=110, layout="constrained")
bars = axes.barh(list(sizes), list(sizes.values()), color=BLUE)
axes.bar_label(bars, padding=3)
axes.set_xlim(0, 6000)
axes.invert_yaxis()
axes.set(xlabel="bytes for 10 tokens", ylabel="kv heads")
axes.set_title("8 query heads: MHA, two groupings, MQA")
plt.show()

# %% [markdown]
# ## Time saved
#
# Shapes of ten tokens show nothing of this. So: one new token after a long text, 32 query heads of 128, one key-value
# head, fp32. The peer is PyTorch's `scaled_dot_product_attention` with `enable_gqa=True`, its own way to let heads
# share. The picture also has the multi-head form of the same layer, which must read 32 times as much. All take turns;
# the times are the shortest of 15, by one thread of the machine printed below.

# %% tags=["hide-input"] jupyter={"source_hidden": true}
threads = torch.get_num_threads()
torch.set_num_threads(1)  # two threads on a busy machine wait for each other
lengths, heads, width = [256, 1024, 4096, 16384], 32, 128
curves = {"MQA, attnpack": [], "MQA, PyTorch's SDPA": [], "MHA, attnpack": [], "MHA, PyTorch's SDPA": []}
with torch.no_grad():
    for keys in lengths:
        q = torch.randn(1, heads, 1, width)
        k, v = torch.randn(2, 1, heads, keys, width).unbind(0)
        k1, v1_ = k[:, :1].contiguous(), v[:, :1].contiguous()
        calls = {
            "MQA, attnpack": lambda q=q, k=k1, v=v1_: attnpack.attention(q, k, v),
            "MQA, PyTorch's SDPA": lambda q=q, k=k1, v=v1_: scaled_dot_product_attention(q, k, v, enable_gqa=True),
            "MHA, attnpack": lambda q=q, k=k, v=v: attnpack.attention(q, k, v),
            "MHA, PyTorch's SDPA": lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v),
        }
        torch.testing.assert_close(calls["MQA, attnpack"](), calls["MQA, PyTorch's SDPA"](), atol=1e-5, rtol=1e-4)
        for name, ms in time_in_turn(calls, 15).items():
            curves[name].append(ms)

figure, axes = plt.subplots(figsize=(7, 3.4), dpi=110, layout="constrained")
for name, times in curves.items():
    line = "o-" if "attnpack" in name else "s--"
    axes.plot(lengths, times, line, color=KINDS[name[:3]], label=name)
axes.set_xscale("log", base=2)
axes.set_yscale("log", base=2)
axes.yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
axes.set_xticks(lengths, lengths)
axes.set(
    xlabel="keys (tokens of text so far)", ylabel="time of one step (ms)", title="One new token, 32 query heads of 128"
)
axes.grid(alpha=0.3)
axes.legend(fontsize=8)
plt.show()
for name, times in curves.items():
    print(f"{name:<21}" + "".join(f"{each:>9.3f}" for each in times) + " ms")
read = 2 * lengths[-1] * heads * width * 4 / (1e6 * curves["MHA, attnpack"][-1])
print(f"on {bench.conditions()}; MHA read {read:.1f} GB/s at {lengths[-1]} keys")
torch.set_num_threads(threads)
gain = curves["MHA, attnpack"][-1] / curves["MQA, attnpack"][-1]
print(f"MQA reads 1/{heads} of what MHA reads, and is {gain:.1f} times as fast at {lengths[-1]} keys")
assert 1 < gain < heads

# %% [markdown]
# Sharing saves time if the kernel uses it: each key that is read from memory serves all 32 query heads at once. MQA
# reads 1/32 of what MHA reads, but it is not 32 times as fast (last line): the multiplications of 32 heads remain (see
# [grouped_query_attention](grouped_query_attention.ipynb)).
#
# The notebook [latent_attention](latent_attention.ipynb) follows the memory up to a million tokens.
# [performance](performance.ipynb) has more shapes and dtypes, measured over more keys and in another minute: its ratios
# differ from these.

# %% [markdown]
# ## Summary
#
# (Words in quotes are those of the output that shows a comparison.)
#
# - All heads read one key head and one value head; only the queries differ.
# - A cache makes stepping causal without a mask (V2). Chunks need the mask, moved by the cached length (V3).
# - True means *hidden* in one convention and *may attend* in the other: know which.
# - The cache is 1/H as large ("bytes for 10 tokens"). A step reads 1/H as much, but is not H times as fast ("MQA reads
#   1/32 of what MHA reads").
#
# ## Exercises
#
# 1. Why does `q.view(batch, heads, seq, d_kv)` (a view without a transpose) do no harm in V1 when the same view undoes
#    it? (See [errata](errata.ipynb).)
# 2. How many parameters does MQA save against MHA of the same width?
# 3. *Implement* the mask of a chunk of `new` tokens after `past` cached ones, where True means *may attend*. The cell
#    below checks it.


# %%
def chunk_mask(new, past):
    """Yours: bool [new, past + new], True where row i of the chunk may attend key j."""


print(course.check_chunk_mask(chunk_mask))

# %% [markdown]
# The next cell has solutions. It is folded; try first.

# %% tags=["hide-cell"] jupyter={"source_hidden": true, "outputs_hidden": true}
# Solutions. Try first.
with torch.no_grad():
    flat = native.q_proj(x)
    k, v = native.k_proj(x)[:, None], native.v_proj(x)[:, None]
    wrong = attnpack.attention(flat.view(batch, num_heads, seq, d_kv), k, v).reshape(batch, seq, d_model)
    print(
        "1. all rows read the same keys, so names of rows do not matter:",
        largest_difference(native.o_proj(wrong), out_v1),
    )
    torch.testing.assert_close(native.o_proj(wrong), out_v1)
whole = attnpack.MultiHeadAttention(d_model, num_heads)
saved = sum(p.numel() for p in whole.parameters()) - sum(p.numel() for p in native.parameters())
print(f"2. {saved:,} of {sum(p.numel() for p in whole.parameters()):,}")
assert saved == 2 * d_model * (d_model - d_kv)


def chunk_mask(new, past):
    return torch.arange(past + new) <= past + torch.arange(new)[:, None]


print("3.", course.check_chunk_mask(chunk_mask))
assert course.check_chunk_mask(chunk_mask) == "right"

# %% [markdown]
# Next: [grouped_query_attention](grouped_query_attention.ipynb).
