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
# # Linear attention: a memory of fixed size
#
# *You need* [kv_cache](kv_cache.ipynb). *You learn* what is left of attention without its softmax: a matrix that sums
# up the past; the delta rule, which corrects this matrix; how a GPU or CPU computes it in chunks; and what a memory of
# fixed size can recall, and what it cannot, by three small models that learn to. *Runs in* half a minute.
#
# Three layers of four in Qwen3.5 are such layers, and most layers of Kimi-Linear and OLMo hybrid.
# The glossary has the [symbols](../docs/notebooks.md#glossary-of-symbols) and the
# [words](../docs/notebooks.md#glossary-of-words).

# %%
import attnpack
import matplotlib.pyplot as plt
import torch
from attnpack import reference
from attnpack.tools import course
from attnpack.tools.plot import newest
from attnpack.tools.plot.colours import BLUE, GREEN, ORANGE
from torch.nn import functional
from torch.testing import assert_close

torch.manual_seed(0)
length, dim = 6, 4
q, k, v = (torch.randn(1, 1, length, dim) for _ in range(3))

# %% [markdown]
# ## Attention without the softmax
#
# Attention weighs the values by softmax(q k). Leave the softmax out
# ([Katharopoulos et al. 2020](https://arxiv.org/abs/2006.16236)). The products may then be done in another order:
#
# $$o_t = \sum_{s \le t} v_s (k_s \cdot q_t) = \Big(\sum_{s \le t} v_s k_s^T\Big) q_t = S_t^T q_t,
# \qquad S_t = S_{t-1} + k_t v_t^T$$
#
# The matrix S has D times Dv numbers, whatever the length. It is all that a step needs of the past.

# %%
scores = (q @ k.mT).tril()  # all pairs of tokens
by_pairs = scores @ v
state, rows = torch.zeros(dim, dim), []
for t in range(length):
    state = state + k[0, 0, t].outer(v[0, 0, t])
    rows.append(state.T @ q[0, 0, t])
assert_close(torch.stack(rows), by_pairs[0, 0])
out, last = attnpack.linear_attention(q, k, v, scale=1.0, return_state=True)
assert_close(out, by_pairs)
assert_close(last[0, 0], state)
print("pairs, state and operator agree; the state has", state.numel(), "numbers")

# %% [markdown]
# ## The memory that it saves
#
# A cache of keys and values grows by 2 D numbers per token and head. A state stays as it is.

# %%
heads, width = 8, 128
for tokens in (64, 1024, 32768):
    print(f"{tokens:6,} tokens: cache {2 * heads * width * tokens * 2 / 2**20:7.1f} MiB in bf16, "
          f"states {heads * width * width * 4 / 2**20:.1f} MiB in fp32")  # fmt: skip

# %% [markdown]
# ## The delta rule
#
# A sum cannot correct itself. If a key comes a second time with another value, the state answers with both values. The
# delta rule looks first what the state holds for the key, and writes only the difference
# ([Yang et al. 2024](https://arxiv.org/abs/2406.06484)):
#
# $$d_t = \beta_t (v_t - S_{t-1}^T k_t), \qquad S_t = S_{t-1} + k_t d_t^T$$
#
# With a key of length 1 and β = 1 the state answers to that key with the newest value.

# %%
newest.delta_rule()

# %%
key = functional.normalize(torch.randn(1, 1, 1, dim), dim=-1)
twice = key.expand(1, 1, 2, dim)
values = torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0]])[None, None]
ones = torch.ones(1, 1, 2)
summed = attnpack.linear_attention(twice, twice, values, scale=1.0)[0, 0, -1]
corrected = attnpack.linear_attention(twice, twice, values, beta=ones, scale=1.0)[0, 0, -1]
print("sum:       ", [round(x, 3) + 0.0 for x in summed.tolist()])
print("delta rule:", [round(x, 3) + 0.0 for x in corrected.tolist()])

# %% [markdown]
# ## Forgetting
#
# Before a token is written, the state may decay: by one number per head and token
# ([Gated DeltaNet](https://arxiv.org/abs/2412.06464)), or by one per channel of the keys
# ([Kimi Delta Attention](https://arxiv.org/abs/2510.26692)). Here a decay of 0, whose log is minus infinity, forgets
# all that was before token 3.

# %%
log_decay = torch.zeros(1, 1, length)
log_decay[..., 3] = -torch.inf
out = attnpack.linear_attention(q, k, v, log_decay=log_decay, scale=1.0)
later = attnpack.linear_attention(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], scale=1.0)
print("tokens 3 to 5, and the same without a past:", course.largest_difference(out[:, :, 3:], later))
assert_close(out[:, :, 3:], later)

# %% [markdown]
# ## In chunks
#
# Token by token, a processor reads and writes the whole state for each token. So the tokens of a chunk are computed
# together. Within a chunk the differences depend on each other: each d_t needs those before it. With the keys as
# rows of K, and β on the diagonal of B, they solve a triangular system:
#
# $$(I + B\,\mathrm{tril}(K K^T, -1))\, D = B (V - K S)$$
#
# Then the outputs are Q S + tril(Q K^T) D, and the new state is S + K^T D: matrix products, which processors do best.

# %%
beta = torch.rand(1, 1, length)
Q, K, V, B = q[0, 0], functional.normalize(k[0, 0], dim=-1), v[0, 0], beta[0, 0].diag()
S = torch.randn(dim, dim)
D = torch.linalg.solve_triangular(torch.eye(length) + B @ (K @ K.T).tril(-1), B @ (V - K @ S), upper=False)
out = Q @ S + (Q @ K.T).tril() @ D
exact, last = reference.linear_attention(q, K[None, None], v, beta=beta, initial_state=S[None, None], scale=1.0)
assert_close(out, exact[0, 0])
assert_close(S + K.T @ D, last[0, 0])
print("one triangular system and four products give", length, "steps")

# %% [markdown]
# ## The layer
#
# A `GatedDeltaNet` has more around the rule: a short convolution over q, k and v, which mixes each token with the three
# before it; q and k of length 1; a norm and a gate behind. Its `RecurrentCache` has the same bytes at any length.

# %%
layer = attnpack.GatedDeltaNet(64, 2, 2, head_k_dim=16, head_v_dim=16).eval()
x = torch.randn(1, 40, 64)
cache, sizes = attnpack.RecurrentCache(), set()
with torch.no_grad():
    steps = []
    for token in x.split(1, dim=1):
        steps.append(layer(token, cache=cache))
        sizes.add(cache.nbytes)
    assert_close(torch.cat(steps, 1), layer(x), rtol=1e-4, atol=1e-5)
print("bytes of the cache at all lengths:", sizes)

# %% [markdown]
# ## How much a state can recall
#
# *Associative recall* ([Arora et al. 2023](https://arxiv.org/abs/2312.04927)): a text tells pairs of a key and a word,
# one token each; then it names each key, and the model answers with the word. Three small models learn to do so, of one
# layer each, with 4 heads of width 16. In every other text, half of the keys come a second time with a new word, which
# is the right answer from then on.


# %%
class Recall(torch.nn.Module):
    """Answers with one of 64 words for one of 256 keys. `layer` is all that reads other tokens."""

    def __init__(self, layer, keys=256, words=64, width=64):
        super().__init__()
        self.layer, self.norm = layer, torch.nn.RMSNorm(width)
        self.key, self.word = torch.nn.Embedding(keys, width), torch.nn.Embedding(words + 1, width)
        self.answer = torch.nn.Linear(width, words)

    def forward(self, key, word):
        x = self.key(key) + self.word(word)
        return self.answer(x + self.layer(self.norm(x)))


def make_texts(pairs, corrected, texts=32, keys=256, words=64):
    """Keys and words of texts, [texts, tokens], and the right answers to their last tokens, [texts, pairs]."""
    key = torch.rand(texts, keys).argsort(-1)[:, :pairs]  # no key twice
    word, asked = torch.randint(words, (texts, pairs)), torch.rand(texts, pairs).argsort(-1)
    again = pairs // 2 if corrected else 0
    new = torch.cat([torch.randint(words, (texts, again)), word[:, again:]], dim=1)
    no_word = torch.full_like(word, words)
    told = torch.cat([key, key[:, :again], key.gather(1, asked)], dim=1)
    return told, torch.cat([word, new[:, :again], no_word], dim=1), new.gather(1, asked)


def train(model, steps=400, learning_rate=0.01):
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1, step / 20) * (1 - step / steps)
        pairs = int(torch.randint(2, 33, ()))
        key, word, right = make_texts(pairs, corrected=step % 2 == 0)
        loss = functional.cross_entropy(model(key, word)[:, -pairs:].flatten(0, 1), right.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def recalled(model, pairs, corrected):
    """The share of right answers."""
    key, word, right = make_texts(pairs, corrected, texts=64)
    return (model(key, word)[:, -pairs:].argmax(-1) == right).float().mean().item()


layers = {
    "GQA": (attnpack.GroupedQueryAttention, (64, 4, 1), {"causal": True}),
    "sum": (attnpack.LinearAttention, (64, 4), {}),
    # A convolution over one token: nothing to read but by the state.
    "delta rule": (attnpack.GatedDeltaNet, (64, 4, 4), {"head_k_dim": 16, "head_v_dim": 16, "conv_kernel_size": 1}),
}
counts = (2, 4, 8, 16, 24, 32, 48, 64)
torch.set_num_threads(1)  # a second thread gains nothing for models this small
models, found = {}, {}
print(f"{'right answers of pairs:':34}", *(f"{pairs:5}" for pairs in counts))
for name, (kind, sizes, options) in layers.items():
    torch.manual_seed(0)
    models[name] = train(Recall(kind(*sizes, **options)))
    for corrected in (False, True):
        shares = found[name, corrected] = [recalled(models[name], pairs, corrected) for pairs in counts]
        label = f"{name}, " + ("half of them corrected" if corrected else "told once")
        print(f"{label:34}", *(f"{share:5.0%}" for share in shares))

# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), dpi=110, layout="constrained", sharey=True)
for corrected, panel in enumerate(axes):
    for name, line, colour in zip(layers, ("o-", "s--", "^-."), (BLUE, ORANGE, GREEN), strict=True):
        panel.plot(counts, found[name, bool(corrected)], line, color=colour, label=name)
    panel.set(title=("told once", "half of them corrected")[corrected], xlabel="pairs in the text", ylim=(0, 1.05))
    panel.grid(alpha=0.3)
axes[0].set_ylabel("right answers")
axes[0].legend(loc="lower left")
plt.show()

# %% [markdown]
# The price of each memory, as the caches of the three layers hold it:

# %%
print(f"{'bytes after tokens:':20}", *(f"{tokens:>9,}" for tokens in (16, 64, 1024)), "   per token at 1,024")
for name, model in models.items():
    held = []
    for tokens in (16, 64, 1024):
        cache = model.layer.new_cache()
        with torch.no_grad():
            model.layer(torch.randn(1, tokens, 64), cache=cache)
        held.append(cache.nbytes)
    print(f"{name:20}", *(f"{size:9,}" for size in held), f"{held[-1] / 1024:21,.0f}")

# %% [markdown]
# GQA looks at each key by itself. It recalls all pairs, and pays for each. But this layer has no positions: of two
# words for one key it cannot know the newer one (`alibi=True` would give it some). The states have 4 heads of 16 x 16
# numbers for any text. They lay all pairs over each other, and the more pairs, the more they confuse. The sum also
# confuses the words that were corrected with those that replaced them, even if there are few. The delta rule takes out
# the old word as it writes the new one. Where nothing is corrected that buys nothing here: the sum does better.
#
# So models mix both kinds: in Qwen3.5 every fourth layer is attention.

# %% [markdown]
# ## Summary
#
# (Words in quotes are those of the output that shows a comparison.)
#
# - Without the softmax, attention is a matrix that sums up keys and values: a step reads and writes it, at any length.
# - The delta rule writes only the difference from what the state holds for a key. Decays let it forget.
# - A chunk is one triangular system and four matrix products, equal to its steps ("one
#   triangular system and four products give").
# - A state of fixed size recalls fewer of the pairs, the more there are ("sum, told once", "delta rule, told once"). A
#   cache of keys recalls all ("GQA, told once"), and grows.
# - The delta rule keeps corrected words apart from old ones, better than a sum does, until both are full ("half of them
#   corrected").
#
# ## Exercises
#
# 1. From how many tokens on is a state of 128 x 128 in fp32 smaller than a cache of 128-wide keys and values in bf16?
# 2. What does the state hold after the same key was written with β = 1/2 and a value of 1, three times?
# 3. *Implement* the delta rule token by token, for one head: q and k are `[L, D]`, v is `[L, Dv]`, and beta is `[L]`.
#    The cell below checks it.


# %%
def run(q, k, v, beta):
    """Yours: the outputs [L, Dv]. The state begins with zeros; a token is written before it is read."""


print(course.check_delta_rule(run))

# %% [markdown]
# The next cell has solutions. It is folded; try first.

# %% tags=["hide-cell"] jupyter={"source_hidden": true, "outputs_hidden": true}
# Solutions. Try first.
state_bytes, per_token = 128 * 128 * 4, 2 * 128 * 2
print(f"1. {state_bytes} / {per_token} = {state_bytes // per_token} tokens")
one = torch.ones(1, 1, 3, 1)
_, held = attnpack.linear_attention(one, one, one, beta=torch.full((1, 1, 3), 0.5), return_state=True)
print(f"2. {held.item()}: each time half of what is missing is written")
assert held.item() == 1 - 0.5**3


def run(q, k, v, beta):
    state, outs = torch.zeros(q.shape[1], v.shape[1]), []
    for t in range(len(q)):
        state = state + torch.outer(k[t], beta[t] * (v[t] - state.T @ k[t]))
        outs.append(state.T @ q[t])
    return torch.stack(outs)


print("3.", course.check_delta_rule(run))
assert course.check_delta_rule(run) == "right"

# %% [markdown]
# Next: [performance](performance.ipynb).
