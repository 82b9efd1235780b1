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
# # Attention from scratch
#
# *You need* some PyTorch and matrix products. *You learn* how a sentence becomes vectors and what one head does with
# them, why scores are scaled, how a softmax can run over parts of the keys, what masks, heads and blocks are, and what
# the heads of a real model look at. *Runs in* half a minute.
#
# Sources: [Vaswani et al. 2017](https://arxiv.org/abs/1706.03762) (scaled dot-product attention, heads),
# [Milakov and Gimelshein 2018](https://arxiv.org/abs/1805.02867) (the running softmax),
# [Dao et al. 2022](https://arxiv.org/abs/2205.14135) (attention with it),
# [Xiao et al. 2023](https://arxiv.org/abs/2309.17453) (sinks),
# [Olsson et al. 2022](https://arxiv.org/abs/2209.11895) (induction heads).
# The glossary has the [symbols](../docs/notebooks.md#glossary-of-symbols) and the
# [words](../docs/notebooks.md#glossary-of-words).
#
# First one sentence is followed from text to the output of a layer, with the numbers of a real language model,
# SmolLM2-135M. Then each piece is explained: the scale, the softmax, the mask, the heads, the block.
#
# All drawings of layers keep these colours: **blue** for queries, **orange** for keys, **green** for values, yellow for
# tokens, violet for weights. Cells that only draw or measure are folded: a click opens them.

# %%
import math

import attnpack
import matplotlib.pyplot as plt
import torch
from attnpack import checkpoints
from attnpack.tools import course
from attnpack.tools.course import largest_difference
from attnpack.tools.plot import attention as plot_attention
from attnpack.tools.plot import schematic, walkthrough
from attnpack.tools.plot.colours import BLUE, ORANGE
from attnpack.tools.plot.page import attention_page
from torch.nn import functional

torch.manual_seed(0)
path = checkpoints.smollm2_path()
tokenizer, model = checkpoints.load_tokenizer(path), attnpack.CausalLM.from_gguf(path)

# %% [markdown]
# ## From text to vectors
#
# A model does not read letters. A **tokenizer** cuts the text into **tokens**, which are words or parts of words, and
# gives each its number in a fixed list (49,152 tokens here). The model has a table with one row of numbers for each
# token. It is called the **embedding**; its numbers are learned. So a sentence becomes a list of vectors:

# %%
ids = tokenizer.encode("The cat sat because it was tired")
words = [tokenizer.decode([token]) for token in ids]
table = model.model.embed_tokens.weight.detach()
print(f"{len(ids)} tokens; the table has {table.shape[0]:,} rows of {table.shape[1]} numbers")
walkthrough.embedding(words, ids, table[ids])

# %% [markdown]
# ## From vectors to queries, keys and values
#
# In this sentence "it" is the cat. Its row of the table cannot say so: that row is the same in every sentence. The
# vector of "it" must learn something from the vector of "cat". Attention is the one part of a model where tokens read
# each other; all other parts treat each vector by itself. For each token, attention makes three short vectors:
#
# - a **query**: what the token looks for. The query of "it" may ask: *what was named before that can be tired?*
# - a **key**: what the token offers to be found by. The key of "cat" may say: *an animal, the subject*.
# - a **value**: what the token gives when it is found: *what "it" should know about the cat*.
#
# Nobody writes these questions and answers. Three matrices make the vectors, $q = W_q x$, $k = W_k x$, $v = W_v x$, and
# training finds the matrices. Here are those of one **head** (number 8) in layer 13 of the model. The layers before it
# have changed x already. (A norm brings x to one size first, and queries and keys are also rotated by
# their place in the text: see [positions](positions.ipynb).)

# %%
layer, head, row = 13, 8, words.index(" it")
with torch.no_grad():
    hidden = model.model.embed_tokens(torch.tensor([ids]))  # x of the text above
    for block in model.layers[:layer]:
        hidden = block(hidden)
    block = model.layers[layer]
    q, k, v = block.self_attn.project(block.input_layernorm(hidden))
kv_head = head // 3  # three query heads of this model share a key-value head
shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
print(f"x {tuple(hidden.shape)}: [batch, tokens, numbers]\n{shapes}: [batch, heads, tokens, numbers]")
walkthrough.projections(words, hidden[0], q[0, head], k[0, kv_head], v[0, kv_head], row)

# %% [markdown]
# (Each strip shows the first 8 of 576 or 64 numbers; darker is larger in size. Faint parts are not used in the next
# step: the queries of other tokens, which ask for themselves, and the tokens after "it".)
#
# ## From one query to its output
#
# "it" compares its query with each key that it may read, by the product $q \cdot k$: large if both point the same way.
# Divided by the square root of their length d they are the **scores**. The softmax makes **weights** of them: e to the
# score, divided by the sum of all. Weights are positive and sum to 1. The **output** is the sum of the values, each
# times its weight:
#
# $$\text{out}_i = \sum_j w_{ij} v_j, \qquad w_i = \text{softmax}_j\left(\frac{q_i \cdot k_j}{\sqrt{d}}\right)$$

# %%
query, keys, values = q[0, head, row], k[0, kv_head, : row + 1], v[0, kv_head, : row + 1]
scores = keys @ query / math.sqrt(64)
exponentials = scores.exp()
weights = exponentials / exponentials.sum()
out = weights @ values
print("words: ", words[: row + 1])
print("scores:", [round(score, 2) for score in scores.tolist()])
print("weights:", [round(weight, 2) for weight in weights.tolist()])
whole = attnpack.attention(q, k, v, causal=True)[0, head, row]
print("the output against the operator's:", largest_difference(out, whole))
torch.testing.assert_close(out, whole, atol=1e-5, rtol=1e-4)
walkthrough.one_query(words[: row + 1], query, keys, values, scores, weights)

# %% [markdown]
# In this head "it" takes nearly all of its output from "cat": the weight is 0.94. That is attention. The other tokens
# do the same at the same time, each with its own query.
#
# ## From heads to the layer's output
#
# One head gives one weighted sum. A layer has several heads, so that a token can look for several things. Each head has
# its own query matrix. In this model three heads share the matrices of keys and values
# ([grouped_query_attention](grouped_query_attention.ipynb) says why). Here are the nine heads of this layer for the
# token "it"; thicker lines are larger weights. Head 8 reads "cat", and others read "The" or "because". The nine outputs
# stand side by side, and one more matrix, the **output projection**, makes a single vector of them. It is added to x:

# %%
weights = attnpack.attention_scores(q, k, causal=True)[0, :, row, : row + 1]  # [9 heads, 5 tokens]
outputs = attnpack.attention(q, k, v, causal=True)[0, :, row]  # [9 heads, 64 numbers]
with torch.no_grad():
    added = block.self_attn.o_proj(outputs.flatten())
    by_layer = block.self_attn(block.input_layernorm(hidden))[0, row]
print("side by side, then o_proj, against the layer:", largest_difference(added, by_layer))
torch.testing.assert_close(added, by_layer, atol=1e-4, rtol=1e-4)
walkthrough.heads(words[: row + 1], weights, outputs)

# %% [markdown]
# That is the whole layer. The rest of this notebook explains its pieces.
#
# ## By hand, on paper
#
# An example with three tokens and vectors of 2 numbers, small enough for paper:
#
# - The query is (1, 1), and the keys are (1, 1), (1, -1) and (0, 0).
# - The products are 2, 0 and 0. Divided by $\sqrt 2$ they are the scores 1.41, 0 and 0.
# - Their exponentials are 4.11, 1 and 1, with the sum 6.11. So the weights are 0.673, 0.164 and 0.164.
# - The values are (3, 0), (0, 3) and (0, 0). Their weighted mean is (3 * 0.673, 3 * 0.164) = (2.02, 0.49).

# %%
query = torch.tensor([[1.0, 1.0]])
keys, values = torch.tensor([[1.0, 1.0], [1.0, -1.0], [0.0, 0.0]]), torch.tensor([[3.0, 0.0], [0.0, 3.0], [0.0, 0.0]])
small = [each[None, None] for each in (query, keys, values)]  # one sequence, one head
scores = (query @ keys.T / math.sqrt(2))[0]
print("scores: ", [round(score, 2) for score in scores.tolist()])
print("their exponentials:", [round(e, 2) for e in scores.exp().tolist()], "sum", round(scores.exp().sum().item(), 2))
print("weights:", [round(weight, 3) for weight in attnpack.attention_scores(*small[:2]).flatten().tolist()])
print("out:    ", [round(number, 2) for number in attnpack.attention(*small).flatten().tolist()])
torch.testing.assert_close(attnpack.attention(*small).flatten(), torch.tensor([2.02, 0.49]), atol=0.01, rtol=0)

# %% [markdown]
# The next cell computes the formula by hand and by `attnpack.attention`, the library's operator. The operator never
# stores the matrix of weights: it walks over the keys and keeps a running softmax. `attention_scores` gives the matrix,
# for those who want to look at it.

# %%
q, k, v = torch.randn(3, 1, 1, 6, 16).unbind(0)  # [batch, heads, length, d]
weights = (q @ k.transpose(-2, -1) / math.sqrt(16)).softmax(dim=-1)
print("weights against attention_scores:", largest_difference(weights, attnpack.attention_scores(q, k)))
print("out against attention:           ", largest_difference(weights @ v, attnpack.attention(q, k, v)))
print("each row of weights sums to", weights.sum(-1).flatten().tolist())
torch.testing.assert_close(weights @ v, attnpack.attention(q, k, v))

# %% [markdown]
# ## A softmax that runs over the keys
#
# How can a weighted mean be computed before all weights are known? Suppose that the keys come in parts. For each part
# keep three things: the largest score m so far, the sum t of $e^{s - m}$, and the sum o of $e^{s - m} v$. When a part
# brings a larger score, the old sums are too large by $e^{m_{old} - m_{new}}$: multiply them by it, and go on. At the
# end the answer is o / t. By hand, two keys at a time:

# %%
scores, values = (q @ k.transpose(-2, -1) / math.sqrt(16))[0, 0], v[0, 0]  # [6, 6], [6, 16]
m, t, o = torch.full((6, 1), -math.inf), torch.zeros(6, 1), torch.zeros(6, 16)
for part in range(0, 6, 2):
    s = scores[:, part : part + 2]
    largest = torch.maximum(m, s.amax(-1, keepdim=True))
    shrink, e = (m - largest).exp(), (s - largest).exp()
    m, t, o = largest, t * shrink + e.sum(-1, keepdim=True), o * shrink + e @ values[part : part + 2]
print("three parts by hand against all keys at once:", largest_difference(o / t, weights[0, 0] @ values))
torch.testing.assert_close(o / t, weights[0, 0] @ values)

# %% [markdown]
# The sums of two parts can also be joined afterwards, in any order. All that a part must hand over is its output and
# the logarithm of its sum, `lse` = m + log t. `merge_states` joins two such parts. This is how one long cache is shared
# by threads, or by machines:

# %%
left, right = (attnpack.attention(q, k[:, :, part], v[:, :, part], return_lse=True) for part in (slice(4), slice(4, 6)))
joined, lse = attnpack.merge_states(*left, *right)
print("4 keys and 2 keys, merged:", largest_difference(joined, weights @ v))
print("lse against m + log t:    ", largest_difference(lse[0, 0], (m + t.log())[:, 0]))
torch.testing.assert_close(joined, weights @ v)
torch.testing.assert_close(lse[0, 0], (m + t.log())[:, 0])

# %% [markdown]
# ## Why divide by the square root of d?
#
# Suppose that queries and keys have independent entries of mean 0 and variance 1, as they roughly do when training
# starts. A score is a sum of d products. Each product has mean 0 and variance 1 (the variance of a product of
# independent variables of mean 0 is the product of their variances), and variances of independent terms add up: the
# score has variance **d**. Its typical size is $\sqrt d$, so dividing by $\sqrt d$ brings it back to 1, whatever d.

# %%
dims = [4, 16, 64, 256, 1024]
raw, scaled = [], []
print("    d   variance of q.k   of q.k / sqrt(d)")
for d in dims:
    q, k = torch.randn(2, 1, 1, 512, d).unbind(0)
    raw.append(attnpack.attention_scores(q, k, stage="scaled", scale=1.0).var().item())
    scaled.append(attnpack.attention_scores(q, k, stage="scaled").var().item())
    print(f"{d:>5} {raw[-1]:>17.2f} {scaled[-1]:>18.3f}")
    assert abs(raw[-1] / d - 1) < 0.1 and abs(scaled[-1] - 1) < 0.1

# %% [markdown]
# ## The softmax without the scale
#
# A softmax looks at differences. Scores that differ by 1 give weights in the ratio 2.7; scores that differ by 30 give a
# ratio of 1e13: one key takes everything, and the weighted mean becomes a lookup. Worse, such a softmax no longer
# learns. Its derivative is $\partial w_j / \partial s_k = w_j (\delta_{jk} - w_k)$, and if one weight is 1 and the
# others are 0, every entry of it is 0. The gradient vanishes, the queries and keys get no signal, and the layer keeps
# looking at the keys that it happened to look at first.
#
# Both effects, measured: the largest weight of a row over 128 keys, and the size of the softmax's derivative.

# %%
largest, slope = {"scaled": [], "not scaled": []}, {"scaled": [], "not scaled": []}
for d in dims:
    q, k = torch.randn(2, 1, 1, 128, d).unbind(0)
    for name, scale in (("scaled", None), ("not scaled", 1.0)):
        w = attnpack.attention_scores(q, k, scale=scale)[0, 0]
        jacobian = torch.diag_embed(w) - w.unsqueeze(-1) * w.unsqueeze(-2)  # [row, j, k]
        largest[name].append(w.amax(-1).mean().item())
        slope[name].append(jacobian.flatten(1).norm(dim=1).median().item())

# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure, panels = plt.subplots(1, 2, figsize=(9, 3.3), dpi=110, layout="constrained")
for panel, measured in zip(panels, (largest, slope), strict=True):
    panel.plot(dims, measured["scaled"], "o-", color=BLUE, label="q.k / sqrt(d)")
    panel.plot(dims, measured["not scaled"], "s--", color=ORANGE, label="q.k")
    panel.set_xscale("log", base=2)
    panel.set_xticks(dims, dims)
    panel.set_xlabel("d (length of a query)")
    panel.grid(alpha=0.3)
panels[0].set(ylabel="largest weight, mean over rows", title="Saturation: one key takes everything", ylim=(0, 1))
panels[1].set(ylabel="norm of dw/ds, median over rows", title="Vanishing gradients", yscale="log")
panels[0].legend()
plt.show()
print(f"weights of scores that differ by 1: ratio {math.exp(1):.1f}; by 30: {math.exp(30):.0e}")
print(f"d = 1024, not scaled: largest weight {largest['not scaled'][-1]:.3f}, derivative {slope['not scaled'][-1]:.1e}")
print(f"d = 1024, scaled:     largest weight {largest['scaled'][-1]:.3f}, derivative {slope['scaled'][-1]:.1e}")

# %% [markdown]
# Up to d = 64 the sharper softmax passes on *more*: a little contrast helps. Then it reverses: at d = 256 less arrives
# than with the scale, and at d = 1024 almost nothing. The scaled softmax passes on nearly the same at every d: in the
# next output 0.058 at d = 4, and 0.068 to 0.070 from d = 16 on. Today's heads are 64 to 256 wide, the widths at which
# the unscaled softmax reverses.
#
# The same from the other end: the gradient that reaches the queries through the operator's own backward pass, for a
# random gradient at the output. (It is divided by d and by the scale, which enter the chain rule as plain factors, so
# that the softmax's part is left.) A row counts as dead if less than a thousandth of the typical scaled gradient
# arrives.

# %%
for d in dims:
    q, k, v, grad = torch.randn(4, 1, 1, 512, d).unbind(0)
    reached = []
    for scale in (1 / math.sqrt(d), 1.0):
        leaf = q.clone().requires_grad_()
        attnpack.attention(leaf, k, v, scale=scale).backward(grad)
        reached.append(leaf.grad.norm(dim=-1).flatten() / (scale * d))
    typical, unscaled = (each.median() for each in reached)
    assert (unscaled > typical) == (d <= 64)
    dead = [(each < typical / 1000).float().mean().item() for each in reached]
    print(
        f"d = {d:<5} typical gradient: scaled {typical:.3f}, not scaled {unscaled:.3f};"
        f"   dead rows: scaled {dead[0]:.0%}, not scaled {dead[1]:.0%}"
    )
assert dead[0] == 0 and dead[1] > 0.25

# %% [markdown]
# ## One head, and causality
#
# A module adds the three projections. `SelfAttention` is the smallest: one head of 16 over vectors of 32, and
# queries, keys and values all come from the same sequence, hence *self*-attention.
#
# A language model is trained to guess each next token, at all positions at once. If row i could read token i + 1, the
# answer would be in the question. So a **causal** layer sets the score of every later key to $-\infty$; since
# $e^{-\infty} = 0$, its weight is exactly 0 and the other weights share the 1.

# %%
tokens, width, head_size = 8, 32, 16
x = torch.randn(1, tokens, width)
head = attnpack.SelfAttention(width, head_size, causal=True)

with torch.no_grad():
    q, k, v = head.q_proj(x), head.k_proj(x), head.v_proj(x)
    scores = q @ k.transpose(-2, -1) / math.sqrt(head_size)
    later = torch.triu(torch.ones(tokens, tokens, dtype=torch.bool), diagonal=1)
    by_hand = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
    out, causal = head(x, need_weights=True)
    _, full = head(x, causal=False, need_weights=True)
print("module against the lines above:", largest_difference(out, by_hand))
torch.testing.assert_close(out, by_hand)
assert not causal[0, 0][later].any()

# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure, panels = plt.subplots(1, 2, figsize=(6, 2.8), dpi=110, layout="constrained")
plot_attention.draw_weights(panels[0], full[0, 0], title="no mask (encoder)")
image = plot_attention.draw_weights(panels[1], causal[0, 0], title="causal (decoder)")
for panel in panels:
    panel.set(xlabel="key (position)", ylabel="query (position)")
figure.colorbar(image, ax=panels, label="weight")
plt.show()

# %% [markdown]
# Row 0 can read only itself, so its weight is 1 whatever the scores are. Nothing here says where a token stands; see
# [positions](positions.ipynb).
#
# ## Many heads
#
# One softmax gives one weighted mean: a token that wants the verb *and* the previous word has to compromise. With H
# heads each token has H queries, H sets of weights and H means. The results are joined side by side, and an output
# projection `o_proj` mixes them:
#
# $$\text{head}_h = \text{softmax}\left(\frac{Q_h K_h^\top}{\sqrt{d_h}}\right) V_h, \qquad
# \text{out} = [\text{head}_1, \dots, \text{head}_H]\, W_O$$
#
# Splitting into heads by hand takes two steps, and the order matters: cut the width of each token into heads (`view`),
# *then* let heads and positions change places (`transpose`). A `view` straight to `[batch, heads, length, width]` has
# the right shape and the wrong numbers: it cuts the sequence, not the width.

# %%
num_heads, head_dim = 4, 8
layer = attnpack.MultiHeadAttention(width, num_heads, bias=True, causal=True)
with torch.no_grad():
    q, k, v = layer.project(x)  # each [1, 4, 8, 8]
    flat = layer.q_proj(x)  # [1, 8, 32]: for each token, the queries of all heads side by side
    by_hand = flat.view(1, tokens, num_heads, head_dim).transpose(1, 2)
    print("view, then transpose, against project:", largest_difference(by_hand, q))
    print("only view, the same shape:            ", largest_difference(flat.view(1, num_heads, tokens, head_dim), q))
    torch.testing.assert_close(by_hand, q)
    assert not torch.allclose(flat.view(1, num_heads, tokens, head_dim), q)
    heads = attnpack.attention(q, k, v, causal=True)
    concatenated = layer.o_proj(heads.transpose(1, 2).flatten(2))  # [1, 8, 4 * 8] -> [1, 8, 32]
    print("side by side, then o_proj, against the module:", largest_difference(concatenated, layer(x)))
    torch.testing.assert_close(concatenated, layer(x))

# %% [markdown]
# There is a second way to read the same numbers. The columns of `o_proj.weight` that multiply head h form a matrix
# $W_O^{(h)}$. Multiplying each head by its own block and **adding up** is the same product, done in another order. So
# heads are independent writers into one sum: no head sees the result of another, and each could be removed by itself.
# If each head had its own bias, only the sum of these biases would have an effect: one bias is enough.

# %%
with torch.no_grad():
    blocks = layer.o_proj.weight.split(head_dim, dim=1)  # W_O of each head, [32, 8]
    biases = torch.randn(num_heads, width)
    biases[-1] = layer.o_proj.bias - biases[:-1].sum(0)  # any four vectors whose sum is the layer's bias
    written = [heads[:, h] @ blocks[h].T + biases[h] for h in range(num_heads)]
    print("sum over heads against the module:", largest_difference(sum(written), layer(x)))
    torch.testing.assert_close(sum(written), layer(x), atol=1e-5, rtol=1e-5)

# %% [markdown]
# ## Dropout, and the call in production
#
# In training some weights may be set to 0 at random, and the others are multiplied by 1 / (1 - p), so that their mean
# stays. Dropout is only for training: `eval()` turns it off. PyTorch has one call for all of it,
# `scaled_dot_product_attention` (SDPA). It cannot know whether a model trains, so its callers pass `p` or 0. The module
# below decides by itself; without dropout both give the same numbers.

# %%
noisy = attnpack.MultiHeadAttention(width, num_heads, causal=True, dropout=0.5)
with torch.no_grad():
    q, k, v = noisy.project(x)
    noisy.train()
    print("training, two calls: ", largest_difference(noisy(x), noisy(x)))
    assert not torch.equal(noisy(x), noisy(x))
    noisy.eval()
    print("evaluation, two calls:", largest_difference(noisy(x), noisy(x)))
    assert torch.equal(noisy(x), noisy(x))
    p = 0.5 if noisy.training else 0.0
    sdpa = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
    print(
        "SDPA and o_proj, against the module:",
        largest_difference(noisy.o_proj(sdpa.transpose(1, 2).flatten(2)), noisy(x)),
    )
    torch.testing.assert_close(noisy.o_proj(sdpa.transpose(1, 2).flatten(2)), noisy(x))

# %% [markdown]
# ## Self and cross
#
# Nothing says that keys and values must come from the sequence that asks. In **cross-attention** the queries come
# from one sequence and the keys and values from another: a decoder that writes a translation reads the encoded source
# sentence this way. The two may differ in length, and no mask is needed: the whole source is known.

# %%
source = torch.randn(1, 5, width)
cross = attnpack.MultiHeadAttention(width, num_heads)
with torch.no_grad():
    out, weights = cross(x, source, need_weights=True)
print(f"8 queries, 5 keys: out {tuple(out.shape)}, weights {tuple(weights.shape)}")
shorter = source[:, :4]
with torch.no_grad():
    moved = (cross(x, shorter) - out).abs().amax(dim=-1)[0]
print("without the last source token each row changes by:", " ".join(f"{change:.2f}" for change in moved))
assert moved.min() > 1e-3

# %% [markdown]
# ## The block
#
# A transformer is a stack of equal **blocks**, and a block has two parts:
#
# 1. **Attention**: tokens exchange information. This is the communication.
# 2. **Feed-forward**: each token by itself computes with what it has heard. Two matrices widen the vector (576 to
#    1,536 numbers in SmolLM2). One result goes through a function that is not linear, and multiplies the other. A third
#    matrix brings the product back to 576 numbers. This is the computation, and it has most of a block's weights.
#
# Each part has a **norm** before it, which brings its input to one size, and a **residual connection** around it: the
# part does not replace x, it adds to it, $x + f(\text{norm}(x))$. So a token's vector is a sum that starts with its
# embedding and to which every part adds something.

# %%
schematic.block()

# %% [markdown]
# The next cell computes the block of SmolLM2 from above by hand:

# %%
with torch.no_grad():
    heard = hidden + block.self_attn(block.input_layernorm(hidden))
    computed = heard + block.mlp(block.post_attention_layernorm(heard))
    print("two parts by hand against the block:", largest_difference(computed, block(hidden)))
    torch.testing.assert_close(computed, block(hidden), atol=1e-4, rtol=1e-4)
wide, narrow = block.mlp.gate_proj.weight.shape
print(f"the feed-forward takes {narrow} numbers to {wide:,} and back")
for name, part in (("attention", block.self_attn), ("feed-forward", block.mlp)):
    print(f"{name:<13}{sum(p.numel() for p in part.parameters()):>10,} weights")

# %% [markdown]
# ## Encoder or decoder: who hears of a change?
#
# This form is called pre-norm; the first transformers had $\text{norm}(x + f(x))$, post-norm. In pre-norm, one part of
# the gradient goes past all blocks and reaches the first unchanged, as is shown below.
#
# An encoder block has no mask, a decoder block is causal. To see what that means for whole stacks of blocks, change one
# token of twelve and look which outputs move.

# %%
changed_at, length = 6, 12
x = torch.randn(1, length, width)
other = x.clone()
other[:, changed_at] += 1.0


def small_block(kind):
    return kind(attnpack.MultiHeadAttention(width, num_heads), attnpack.FeedForward(width, 64))


# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(7, 2.6), dpi=110, layout="constrained")
for offset, (name, stack, kind, colour) in enumerate(
    (
        ("encoder, 3 blocks", attnpack.Encoder, attnpack.EncoderBlock, ORANGE),
        ("decoder, 3 blocks", attnpack.Decoder, attnpack.DecoderBlock, BLUE),
    )
):
    stacked = stack([small_block(kind) for _ in range(3)])
    with torch.no_grad():
        moved = (stacked(other) - stacked(x)).norm(dim=-1)[0]
    axes.bar([i + 0.4 * offset for i in range(length)], moved, width=0.4, color=colour, label=name)
    print(f"{name}: moved by a change at {changed_at}:", [i for i in range(length) if moved[i] > 0])
axes.set_xticks([i + 0.2 for i in range(length)], range(length))
axes.set(xlabel="position", ylabel="change of the output (norm)", title=f"Token {changed_at} is changed: who hears?")
axes.legend()
plt.show()
assert not moved[:changed_at].any(), "a decoder's prefix must not move by a single bit"

# %% [markdown]
# The gradient that goes past the blocks: hooks cut it off in attention and feed-forward, so that only the residual
# connections pass it on. A gradient is sent into the end of the three blocks, and compared with what arrives at their
# beginning:

# %%
start, sent = x.clone().requires_grad_(), other.flip(1)
for each in stacked.layers:
    for part in (each.self_attn, each.mlp):
        part.register_forward_hook(lambda module, given, out: out.detach())
for name, pre_norm in (("pre-norm", True), ("post-norm", False)):
    end = start
    for each in stacked.layers:
        each.pre_norm = pre_norm
        end = each(end)
    (arrived,) = torch.autograd.grad(end, start, sent)
    print(f"{name:<9} sent against arrived: {largest_difference(sent, arrived)}")
    assert torch.equal(sent, arrived) == pre_norm

# %% [markdown]
# In post-norm the norm comes after the sum, so each norm changes that gradient.
#
# In the decoder, positions before the change were the same to the last bit. That is more than tidiness: it is why
# keys and values of earlier tokens can be kept while a model writes (see [kv_cache](kv_cache.ipynb)).
#
# ## The weights of a real model
#
# SmolLM2-135M has 30 layers with 9 query heads each, and 3 key-value heads (see
# [grouped_query_attention](grouped_query_attention.ipynb)). Here is what its heads look at, in a longer sentence.

# %%
ids = tokenizer.encode("The cat sat on the mat because the cat was tired.")
words = [tokenizer.decode([token]) for token in ids]
weights = torch.stack([layer[0] for layer in plot_attention.lm_attention(model, torch.tensor([ids]))])
print(words)
print("layers, heads, queries, keys:", tuple(weights.shape))
torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))

# %% [markdown]
# 270 heads are too many to look at one by one. Three numbers for each head help to find the interesting ones: how
# much weight goes to the **first** token, to the token **before**, and to the token **itself** (mean over the rows
# from the third on, which have a choice).

# %%
rows = torch.arange(2, len(ids))
habits = {
    "first token": weights[:, :, rows, 0],
    "token before": weights[:, :, rows, rows - 1],
    "itself": weights[:, :, rows, rows],
}
habits = {name: each.mean(-1) for name, each in habits.items()}  # [layers, heads]

# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure, panels = plt.subplots(1, 3, figsize=(9, 4.6), dpi=110, layout="constrained", sharey=True)
for panel, (name, share) in zip(panels, habits.items(), strict=True):
    image = panel.imshow(share, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    panel.set(title=f"weight on the {name}" if name != "itself" else "weight on itself", xlabel="head")
    panel.set_xticks(range(9))
panels[0].set_ylabel("layer")
figure.suptitle("SmolLM2-135M: three habits of its 270 heads")
figure.colorbar(image, ax=panels, label="share of weight, mean over rows")
plt.show()
print(f"mean over all heads: {', '.join(f'{name} {share.mean():.0%}' for name, share in habits.items())}")

# %% [markdown]
# Most weight goes to the first token. A head whose pattern does not occur must still spend a weight of 1 somewhere,
# because a softmax cannot say "nothing". Models learn to put it on a token that is always visible, an **attention
# sink** (Xiao et al. 2023). Other heads have clear jobs. The next picture
# shows the clearest head of each kind:

# %% tags=["hide-input"] jupyter={"source_hidden": true}
picked = {name: divmod(int(share.argmax()), share.shape[1]) for name, share in habits.items()}
figure, panels = plt.subplots(1, 3, figsize=(9.5, 3.9), dpi=110, layout="constrained", sharey=True)
for panel, (name, (layer, head)) in zip(panels, picked.items(), strict=True):
    image = plot_attention.draw_weights(panel, weights[layer, head], words, title=f"{name}: layer {layer}, head {head}")
    print(f"{name:<13} layer {layer:>2}, head {head}: {habits[name][layer, head]:.0%} of the weight")
figure.supxlabel("key (token that is read)", fontsize=9)
panels[0].set_ylabel("query (token that reads)")
figure.colorbar(image, ax=panels, label="weight", shrink=0.8)
plt.show()

# %% [markdown]
# A fourth habit shows only in a text that repeats itself, as this one does: "the" and "cat" come twice. An **induction
# head** (Olsson et al. 2022) reads what followed the same token the last time: "mat" from the second "the", "sat" from
# the second "cat". So a model can go on with a phrase that it has read once. The clearest such head:

# %%
repeats = [(i, ids.index(token) + 1) for i, token in enumerate(ids) if token in ids[:i]]  # (query, key)
followed = torch.stack([weights[:, :, i, j] for i, j in repeats]).mean(0)  # [layers, heads]
layer, head = divmod(int(followed.argmax()), followed.shape[1])
for i, j in repeats:
    pair = f"the second '{words[i].strip()}' gives '{words[j].strip()}'"
    print(f"layer {layer}, head {head}: {pair} {weights[layer, head, i, j]:.0%}")
print(f"mean over all heads: {followed.mean():.0%}")

# %% [markdown]
# And one whole layer, all nine heads, as `attnpack plot attention "..." --layer 11` writes it to a file. Nobody told
# these heads what to do. They differ, and that is the reason for several heads.

# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure = plt.figure(figsize=(9, 9), dpi=110, layout="constrained")
plot_attention.draw_heads(figure, weights[11], words, title="SmolLM2-135M, layer 11")
plt.show()

# %% [markdown]
# The next cell shows three layers to play with. GitHub shows no frames, so run the notebook or read it on the site.
# Point at a token of the sentence, or at a cell of the large picture. `attnpack plot attention "..." --html page.html`
# writes such a page of all layers.

# %%
attention_page(model, ids, words, layers=[11, 16, 18], name="SmolLM2-135M")

# %% [markdown]
# ## Summary
#
# (Words in quotes are those of the output that shows a comparison.)
#
# - Text becomes tokens, numbers and vectors. A token compares its query with all keys that it may read; a softmax makes
#   weights of the scores; the output is a weighted sum of values.
# - The scale keeps scores at size 1, so that the softmax neither saturates nor stops learning.
# - A running softmax needs no matrix of scores, and gives the same numbers ("three parts by hand against all keys at
#   once"). Parts of the keys can be merged by their lse.
# - A causal mask makes the past independent of the future; heads write independently into one sum.
# - A block is attention and a feed-forward, each with a norm and a residual connection.
#
# ## Exercises
#
# 1. Give all keys the same vector. What is the output of each row?
# 2. What does a row give that may attend to no key at all?
# 3. *Implement* causal attention without the library, for `[B, H, L, D]`. The cell below checks it.


# %%
def attend(query, key, value):
    """Yours: softmax(q k^T / sqrt(D)) v, where row i reads the keys 0 to i."""


print(course.check_attention(attend))

# %% [markdown]
# The next cell has solutions. It is folded; try first.

# %% tags=["hide-cell"] jupyter={"source_hidden": true, "outputs_hidden": true}
# Solutions. Try first.
q, k, v = torch.randn(3, 1, 1, 6, 16).unbind(0)
same = attnpack.attention(q, k[:, :, :1].expand_as(k), v)
print("1. the mean of the values:", largest_difference(same, v.mean(2, keepdim=True).expand_as(same)))
torch.testing.assert_close(same, v.mean(2, keepdim=True).expand_as(same))
nothing = attnpack.attention(q, k, v, torch.zeros(6, 6, dtype=torch.bool))
print("2. zeros:", nothing.abs().max().item())
assert not nothing.any()


def attend(query, key, value):
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -math.inf).softmax(-1) @ value


print("3.", course.check_attention(attend))
assert course.check_attention(attend) == "right"

# %% [markdown]
# Next: [kv_cache](kv_cache.ipynb).
