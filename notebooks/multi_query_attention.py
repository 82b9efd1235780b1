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
# Sources: [Shazeer 2019](https://arxiv.org/abs/1911.02150). Symbols: [glossary](../docs/notebooks.md).
#
# In multi-head attention every head owns a query, a key and a value projection. Multi-query attention (Shazeer 2019)
# keeps one query projection per head, but lets all heads read **one** key head and **one** value head. Heads can still
# look for different things, but a token offers the same key and value to all of them. That costs some expressive power.
# It saves memory traffic: a language model that writes token by token reads all cached keys and values at every step,
# and that reading, not the arithmetic, takes the time. With one shared head the cache is `num_heads` times smaller:
#
# $$\text{head}_h = \text{softmax}\left(\frac{(x W_q^{(h)}) (x W_k)^\top}{\sqrt{d_{kv}}}\right) x W_v, \qquad
# \text{out} = [\text{head}_1, \dots, \text{head}_H]\, W_o$$
#
# Three versions follow: V1 without cache and mask, V2 with a cache, V3 with a cache and a causal mask. Each runs
# twice, as a plain class of `attnpack.reference` whose every line can be read, and as the native
# `attnpack.MultiQueryAttention` with the same weights. Values are compared, not only shapes.
#
# Long outputs are folded in JupyterLab and on the site: a click opens them.

# %%
import inspect
import statistics
import time
from pathlib import Path

import attnpack
import matplotlib.pyplot as plt
import torch
from attnpack import reference
from attnpack.tools import bench
from attnpack.tools.plot import attention as plot_attention
from attnpack.tools.plot import schematic
from torch.nn.functional import scaled_dot_product_attention

torch.manual_seed(0)
batch, seq, d_model, num_heads = 2, 10, 64, 8
d_kv = d_model // num_heads
x = torch.randn(batch, seq, d_model)


def load_weights(native, plain):
    """W_q, W_k, W_v, W_o of a plain class into q_proj, k_proj, v_proj, o_proj of a native module."""
    native.load_state_dict({f"{name[2]}_proj.weight": weight for name, weight in plain.state_dict().items()})
    return native


def largest_difference(a, b):
    gap = (a - b).abs().max().item()
    return f"{gap:.1e}" if gap else "0"


schematic.beside([schematic.grouping(range(8), title="multi-head"), schematic.grouping([0] * 8, title="multi-query")])

# %% [markdown]
# ## V1: no cache, no mask
#
# The whole forward pass fits on a page. `W_k` and `W_v` map to `d_kv = 8` numbers, not to 64: there is one head of
# them. The matrix product broadcasts that head over the eight query heads, and copies nothing.

# %%
print(inspect.getsource(reference.MQAV1))

# %% tags=["hide-output"] jupyter={"outputs_hidden": true}
v1 = reference.MQAV1(d_model, num_heads, say=print)
print(f"x.shape : {x.shape}")
out_v1 = v1(x)

# %% [markdown]
# A row of the attention matrix is a softmax, so it sums to 1: that is what the printed tensor shows, for each of the
# 2 sequences, 8 heads and 10 query rows.
#
# Now the native module with the same weights. `module.project` gives q, k and v as they enter the operator and
# `attention_scores` gives the matrix that the operator itself never writes to memory: `attnpack.attention` walks over
# the keys in tiles and keeps a running softmax.

# %% tags=["hide-output"] jupyter={"outputs_hidden": true}
native = load_weights(attnpack.MultiQueryAttention(d_model, num_heads), v1)
q, k, v = native.project(x)
probs = attnpack.attention_scores(q, k)
out_native = native(x)
print(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
print(f"x.shape : {x.shape}")
print(f"should be 1 if correct: {probs.sum(dim=-1)}")
print(f"shape of out : {out_native.shape}")
print("\nlargest difference, native against plain:", largest_difference(out_native, out_v1))
torch.testing.assert_close(out_native, out_v1)

# %% [markdown]
# The eight heads read the same keys and still attend differently, because their queries differ. Each panel is one
# head of the first sequence; a row is a query, a column a key.

# %%
figure, panels = plt.subplots(
    2, num_heads // 2, figsize=(8, 4), dpi=110, layout="constrained", sharex=True, sharey=True
)
for head, panel in enumerate(panels.flat):
    image = plot_attention.draw_weights(panel, probs[0, head], title=f"head {head}", vmax=probs[0].max().item())
figure.suptitle("V1: what each head attends to")
figure.supxlabel("key (position)", fontsize=9)
figure.supylabel("query (position)", fontsize=9)
figure.colorbar(image, ax=panels, label="weight")
plt.show()

# %% [markdown]
# ## V2: with a cache
#
# When tokens come one at a time, the keys and values of the earlier ones do not change. They are kept, and a step
# projects the new token only. In the plain class the cache is a pair of `[batch, 1, seq, d_kv]` tensors:

# %%
print(inspect.getsource(reference.MQAV2))

# %% [markdown]
# In attnpack the cache is a `DynamicCache`, handed to `forward`, which appends first and then attends. Both caches hold
# detached tensors (`k.detach()` above): gradients flow through this call's own keys and values and never into the past.

# %% tags=["hide-output"] jupyter={"outputs_hidden": true}
v2 = reference.MQAV2(d_model, num_heads)
v2.load_state_dict(v1.state_dict())


def run_steps(module, x, new_cache=attnpack.DynamicCache):
    """One token at a time through a native module; prints the shapes it hands out."""
    cache, outs = new_cache(), []
    print(f"x.shape : {x.shape}")
    for token in x.split(1, dim=1):
        q, _, _ = module.project(token)
        outs.append(module(token, cache=cache))
        print(f"\n{'-' * 20}\nQ shape : {q.shape}\nK.shape: {cache.k.shape}\nV.shape: {cache.v.shape}")
        print(f"shape of out : {outs[-1].shape}")
    return torch.cat(outs, dim=1), cache


with torch.no_grad():
    steps_native, cache = run_steps(native, x)

# %% [markdown]
# Only K and V grow. The same steps through the plain class give the same outputs, and the two caches hold the same
# numbers:

# %%
with torch.no_grad():
    plain_cache, outs = None, []
    for token in x.split(1, dim=1):
        out, plain_cache = v2(token, plain_cache)
        outs.append(out)
    steps_plain = torch.cat(outs, dim=1)
print("outputs:", largest_difference(steps_native, steps_plain))
print("keys:   ", largest_difference(cache.k, plain_cache[0]))
print("values: ", largest_difference(cache.v, plain_cache[1]))
torch.testing.assert_close(steps_native, steps_plain)
torch.testing.assert_close((cache.k, cache.v), plain_cache)

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
# are different functions; they agree in the last row alone, which may see everything in both.

# %%
per_row = (steps_native - out_native).detach().abs().amax(dim=(0, 2))
figure, axes = plt.subplots(figsize=(5, 2.2), dpi=110, layout="constrained")
axes.bar(range(1, seq + 1), per_row, color="#0072B2")
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

# %%
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
print(inspect.getsource(reference.MQAV3))
print(torch.ones(1, 4, dtype=torch.bool).triu(diagonal=4))

# %% [markdown]
# In attnpack the module is made with `causal=True`; with a cache the queries come after the cached positions. (Without
# a module, `attention(..., causal=True, q_offset=past_len)` does the same. The offset is never guessed from the
# shapes.)

# %% tags=["hide-output"] jupyter={"outputs_hidden": true}
causal = load_weights(attnpack.MultiQueryAttention(d_model, num_heads, causal=True), v1)
v3 = reference.MQAV3(d_model, num_heads)
v3.load_state_dict(v1.state_dict())
with torch.no_grad():
    steps_v3, _ = run_steps(causal, x)

# %% [markdown]
# Steps of one token never need the mask. Chunks need it, so they are the test: ten tokens at once, in two parts, in
# three parts.

# %%
with torch.no_grad():
    full = causal(x)
    plain_full, _ = v3(x)
    print("in full, native against plain:", largest_difference(full, plain_full))
    print("in full against steps of 1:   ", largest_difference(full, steps_v3))
    for parts in ([10], [4, 6], [1, 3, 6]):
        cache, plain_cache, outs, plain_outs = attnpack.DynamicCache(), None, [], []
        for part in x.split(parts, dim=1):
            outs.append(causal(part, cache=cache))
            out, plain_cache = v3(part, plain_cache)
            plain_outs.append(out)
        outs, plain_outs = torch.cat(outs, dim=1), torch.cat(plain_outs, dim=1)
        against_full, against_plain = largest_difference(outs, full), largest_difference(outs, plain_outs)
        print(
            f"chunks of {'+'.join(map(str, parts)):<6} against in full: {against_full}, against plain: {against_plain}"
        )
        torch.testing.assert_close(outs, full)
        torch.testing.assert_close(outs, plain_outs)
torch.testing.assert_close(steps_v3, full)
torch.testing.assert_close(steps_v3, steps_native)

# %% [markdown]
# ## Once more, in C++
#
# `attnpack.cpp.MultiQueryAttention` is the C++ `torch::nn::Module` itself, bound to Python.
# The Python class and it run the same native code after the
# projections, so with the same weights they give the same bits. The plain class's W_* weights go in by parameter name.
# V1:

# %% tags=["hide-output"] jupyter={"outputs_hidden": true}
bound = load_weights(attnpack.cpp.MultiQueryAttention(d_model, num_heads), v1)
with torch.no_grad():
    print(f"x.shape : {x.shape}")
    q, k, v = bound.project(x)
    print(f"should be 1 if correct: {attnpack.attention_scores(q, k).sum(dim=-1)}")
    bound_v1 = bound(x)
    print(f"shape of out : {bound_v1.shape}")
assert torch.equal(bound_v1, out_native)

# %% [markdown]
# V2 and V3, with the C++ cache:

# %% tags=["hide-output"] jupyter={"outputs_hidden": true}
bound_causal = load_weights(attnpack.cpp.MultiQueryAttention(d_model, num_heads, causal=True), v1)
with torch.no_grad():
    bound_v2 = run_steps(bound, x, attnpack.cpp.DynamicCache)

# %% tags=["hide-output"] jupyter={"outputs_hidden": true}
with torch.no_grad():
    bound_v3 = run_steps(bound_causal, x, attnpack.cpp.DynamicCache)

# %%
with torch.no_grad():
    bound_full = bound_causal(x)
print("\nV1, C++ against Python:      ", largest_difference(bound_v1, out_native))
print("V2 by steps:                 ", largest_difference(bound_v2[0], steps_native))
print("V3 by steps:                 ", largest_difference(bound_v3[0], steps_v3))
print("V3 in full:                  ", largest_difference(bound_full, full))
print("V3 in full, against plain PyTorch:", largest_difference(bound_full, plain_full))
assert torch.equal(bound_full, full) and torch.equal(bound_v3[0], steps_v3) and torch.equal(bound_v2[0], steps_native)
torch.testing.assert_close(bound_full, plain_full)

# %% [markdown]
# And without Python at all: `examples/cpp/mqa_notebook` is a program of its own. Its heart is the loop of V2 and V3:

# %%
example = Path("..") / "examples" / "cpp" / "mqa_notebook"
program = (example / "main.cpp").read_text()
print(program[program.index("// One token at a time") : program.index("}  // namespace")])

# %% [markdown]
# It prints the lines of V1, V2, V3 and of the mask. `output.txt` keeps them, and a test builds the program and
# compares. The numbers of its mask differ from those above, because the program draws its own. The first and the last
# lines, and how many shapes of this notebook's steps are among them:

# %%
lines = (example / "output.txt").read_text().splitlines()
print("\n".join([*lines[:4], "...", *lines[46:52], "...", *lines[-5:]]))
steps = ["\n".join(lines[i : i + 4]) for i, line in enumerate(lines) if line.startswith("Q shape")]
wanted = [
    f"Q shape : torch.Size([2, 8, 1, 8])\nK.shape: torch.Size([2, 1, {t}, 8])\n"
    f"V.shape: torch.Size([2, 1, {t}, 8])\nshape of out : torch.Size([2, 1, 64])"
    for t in range(1, 11)
]
print("\nsteps of V2 and V3 as above:", sum(a == b for a, b in zip(steps, wanted * 2, strict=True)), "of", len(steps))
assert steps == wanted * 2

# %% [markdown]
# All that the program prints:

# %% tags=["hide-output"] jupyter={"outputs_hidden": true}
print("\n".join(lines))

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
figure, axes = plt.subplots(figsize=(5, 1.8), dpi=110, layout="constrained")
bars = axes.barh(list(sizes), list(sizes.values()), color="#0072B2")
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
# the times are medians on the machine printed below.

# %%
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
        taken = {name: [] for name in calls}
        for _ in range(15):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                taken[name].append(time.perf_counter() - start)
        for name, each in taken.items():
            curves[name].append(1e3 * statistics.median(each))

figure, axes = plt.subplots(figsize=(7, 3.4), dpi=110, layout="constrained")
looks = {"MQA": "#0072B2", "MHA": "#D55E00"}
for name, times in curves.items():
    line = "o-" if "attnpack" in name else "s--"
    axes.plot(lengths, times, line, color=looks[name[:3]], label=name)
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
gain = curves["MHA, attnpack"][-1] / curves["MQA, attnpack"][-1]
print(f"MQA reads {heads} times less than MHA, and is {gain:.1f} times as fast at {lengths[-1]} keys")
assert 1 < gain < heads

# %% [markdown]
# Sharing saves time if the kernel uses it: each key that is read from memory serves all 32 query heads at once. MQA
# reads 32 times less, but it is not 32 times as fast (last line): the multiplications of 32 heads remain (see
# [grouped_query_attention](grouped_query_attention.ipynb)).
#
# The notebook [kv_cache](kv_cache.ipynb) follows the memory up to a million tokens. [performance](performance.ipynb)
# has more shapes and dtypes, measured over more keys and in another minute: its ratios differ from these.

# %% [markdown]
# ## Summary
#
# - All heads read one key head and one value head; only the queries differ.
# - A cache makes stepping causal without a mask (V2). Chunks need the mask, moved by the cached length (V3).
# - True means *hidden* in one convention and *may attend* in the other: know which.
# - The cache is H times smaller, and a step reads H times less.
#
# ## Exercises
#
# 1. Why does `q.view(batch, heads, seq, d_kv)` (a view without a transpose) do no harm in V1 when the same view undoes
#    it? (See [errata](errata.ipynb).)
# 2. Feed V3 the ten tokens in five chunks of two. Which outputs differ from those of single steps?
# 3. How many parameters does MQA save against MHA of the same width?

# %%
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
    cache = attnpack.DynamicCache()
    pairs = torch.cat([causal(part, cache=cache) for part in x.split(2, dim=1)], dim=1)
    print("2. none:", largest_difference(pairs, steps_v3))
    torch.testing.assert_close(pairs, steps_v3)
whole = attnpack.MultiHeadAttention(d_model, num_heads)
saved = sum(p.numel() for p in whole.parameters()) - sum(p.numel() for p in native.parameters())
print(f"3. {saved:,} of {sum(p.numel() for p in whole.parameters()):,}")
assert saved == 2 * d_model * (d_model - d_kv)

# %% [markdown]
# Next: [grouped_query_attention](grouped_query_attention.ipynb).
