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
# # The KV cache: why it is right, what it saves, what it costs
#
# *You need* [attention_from_scratch](attention_from_scratch.ipynb). *You learn* why a cache changes no number, what it
# saves in time, what it costs in memory for each kind of attention, and which kinds of caches there are. *Runs in* a
# minute.
#
# Sources: [Pope et al. 2022](https://arxiv.org/abs/2211.05102) (prefill and decoding),
# [Kwon et al. 2023](https://arxiv.org/abs/2309.06180) (pages), [Xiao et al. 2023](https://arxiv.org/abs/2309.17453)
# (windows with sinks).
# The glossary has the [symbols](../docs/notebooks.md#glossary-of-symbols) and the
# [words](../docs/notebooks.md#glossary-of-words).
#
# A language model writes one token, appends it to the text, and asks itself for the next. Done naively, each
# token costs a full pass over all tokens before it. A **KV cache** keeps the keys and
# values of all earlier tokens, so that each step computes the new token only. Nearly every program that lets a
# transformer write keeps one; its price is memory.

# %%
import statistics
import time
from functools import partial
from itertools import pairwise

import attnpack
import matplotlib.pyplot as plt
import torch
from attnpack import checkpoints
from attnpack.tools import bench, course, memory
from attnpack.tools.course import largest_difference, time_in_turn
from attnpack.tools.plot import memory as plot_memory
from attnpack.tools.plot import schematic
from attnpack.tools.plot.colours import BLUE, GREEN, ORANGE

torch.manual_seed(0)


path = checkpoints.smollm2_path()
tokenizer, model = checkpoints.load_tokenizer(path), attnpack.CausalLM.from_gguf(path)
words = [tokenizer.decode([token]) for token in tokenizer.encode(course.SENTENCE)]
schematic.cache_growth(4, 3, words)

# %% [markdown]
# Two phases have names of their own. **Prefill** reads the prompt in one call. It has many rows, so arithmetic
# limits its speed. **Decoding** writes one token per call. It has one row, so reading the weights and the cache limits
# its speed.
#
# ## Why it is right: the past does not change
#
# In a causal model token i reads positions 0 to i. So appending tokens changes nothing for those before: not their
# outputs, and not their keys and values in any layer. Checked on SmolLM2-135M, a real model of 30 layers: the logits of
# a prefix, by itself and with four more tokens after it.

# %%
ids = torch.tensor([tokenizer.encode("A cache is right if the past does not change when the future arrives")])
with torch.no_grad():
    whole = model(ids)
    prefix = model(ids[:, :-4])
print(f"{ids.shape[1]} tokens; the first {prefix.shape[1]}, by itself and followed by four more:")
print("largest difference of their logits:", largest_difference(whole[:, : prefix.shape[1]], prefix))
print("size of the logits:                ", f"{prefix.abs().max():.0f}")
torch.testing.assert_close(whole[:, : prefix.shape[1]], prefix, atol=1e-3, rtol=1e-4)

# %% [markdown]
# (If such a difference is not zero, it is rounding: matrix products of other shapes may add up in another order.) The
# same for the attention operator by itself, and for an encoder, in which the past does change:

# %%
q, k, v = torch.randn(3, 1, 4, 40, 64).unbind(0)
long = attnpack.attention(q, k, v, causal=True)
short = attnpack.attention(q[:, :, :30], k[:, :, :30], v[:, :, :30], causal=True)
print("30 rows by themselves, and as the first of 40:", largest_difference(long[:, :, :30], short))
encoder = attnpack.attention(q, k, v)[:, :, :30] - attnpack.attention(q[:, :, :30], k[:, :, :30], v[:, :, :30])
print(f"the same without causality (an encoder): {encoder.abs().max():.1e}, so a cache would be wrong")
torch.testing.assert_close(long[:, :, :30], short)

# %% [markdown]
# So steps with a cache must give the same as one pass over everything, however the text is cut:

# %%
with torch.no_grad():
    for parts in ([1] * ids.shape[1], [5, 1, ids.shape[1] - 6], [ids.shape[1]]):
        cache = attnpack.ModelCache(len(model.layers))
        stepped = torch.cat([model(part, cache) for part in ids.split(parts, dim=1)], dim=1)
        print(f"{len(parts):>2} chunk(s): {largest_difference(stepped, whole)} from one pass without a cache")
        torch.testing.assert_close(stepped, whole, atol=1e-3, rtol=1e-4)

# %% [markdown]
# ## Time saved
#
# Greedy writing by SmolLM2 with `cache="none"` (everything computed anew for each token) and `cache="dynamic"`. The
# text is the same; the time per token is not.

# %% tags=["hide-input"] jupyter={"source_hidden": true}
prompt = torch.tensor([tokenizer.chat("Why is the sky blue?")])
threads = torch.get_num_threads()
torch.set_num_threads(1)  # two threads on a busy machine wait for each other
new_tokens, runs, written, peaks = 48, {"none": [], "dynamic": []}, {}, {}
for kind in ("none", "dynamic", "none", "dynamic"):
    ticks = [time.perf_counter()]

    def note(token, ticks=ticks):
        ticks.append(time.perf_counter())

    def write(kind=kind, note=note):
        written[kind] = model.generate(prompt, max_new_tokens=new_tokens, cache=kind, callback=note)

    peaks[kind] = memory.peak_bytes(write)
    runs[kind].append([1e3 * (end - begin) for begin, end in pairwise(ticks)])
taken = {kind: [min(times) for times in zip(*both, strict=True)] for kind, both in runs.items()}  # the quieter moment
assert torch.equal(written["none"], written["dynamic"])
print(tokenizer.decode(written["dynamic"][0, prompt.shape[1] :].tolist()))
figure, axes = plt.subplots(figsize=(8, 3), dpi=110, layout="constrained")
axes.plot(range(2, new_tokens + 1), taken["none"][1:], "s-", color=ORANGE, markersize=3, label="without a cache")
axes.plot(range(2, new_tokens + 1), taken["dynamic"][1:], "o-", color=BLUE, markersize=3, label="with a cache")
axes.set(xlabel="token", ylabel="time per token (ms)", title=f"SmolLM2-135M after a prompt of {prompt.shape[1]} tokens")
axes.set_ylim(bottom=0)
axes.grid(alpha=0.3)
axes.legend()
plt.show()
for kind, each in taken.items():
    first, last = statistics.median(each[1:17]), statistics.median(each[-16:])
    print(f"cache={kind!r:<10} ms per token: {first:.0f} at the start, {last:.0f} at the end (medians of 16)")
seconds = {kind: sum(each) / 1e3 for kind, each in taken.items()}
print(f"{new_tokens} tokens: {seconds['none']:.2f} s without, {seconds['dynamic']:.2f} s with a cache")
print(f"on {bench.conditions()}")
torch.set_num_threads(threads)

# %% [markdown]
# Without a cache every token pays for all text before it, the prompt included: n tokens need about $n^2 / 2$ rows
# instead of n. (The time grows by less, since each step also reads all weights once, however many rows it has. The
# bytes of the weights, divided by the speed of reading that is printed above, are the least time of a step.) These
# times are of C++ `generate` on the machine that is printed. Other pages have other times of the same `generate`.
# README has one of a Zen 5, in bf16 and with two threads. [Start](../docs/start.md) has one of an AMD EPYC with AVX2,
# in fp32 and with two threads: the mean of all tokens, and not the quieter of two moments. In exchange the cache holds
# keys and values of all layers; that is little for so short a text, and the run without a cache needs room as well, for
# the activations of all its rows:

# %%
held = (prompt.shape[1] + new_tokens - 1) * plot_memory.model_kv_bytes(
    plot_memory.MODELS["smollm2-135m"], 1, dtype=torch.float32
)
for kind, peak in peaks.items():
    kept = held if kind == "dynamic" else 0
    print(f"cache={kind!r:<10} peak above the weights {peak / 2**20:.1f} MiB, cached {kept / 2**20:.1f} MiB")

# %% [markdown]
# One layer by itself shows how a single step grows over longer texts:

# %% tags=["hide-input"] jupyter={"source_hidden": true}
torch.set_num_threads(1)
layer = attnpack.MultiHeadAttention(512, 8, causal=True)
lengths = [64, 128, 256, 512, 1024]
naive, cached = [], []
with torch.no_grad():
    for length in lengths:
        x = torch.randn(1, length, 512)
        kept = attnpack.DynamicCache()
        layer(x[:, :-1], cache=kept)

        def step(kept=kept, x=x, length=length):
            out = layer(x[:, -1:], cache=kept)
            kept.crop(length - 1)
            return out

        torch.testing.assert_close(step(), layer(x)[:, -1:], atol=1e-5, rtol=1e-4)
        times = time_in_turn({"naive": partial(layer, x), "cached": step}, 9)
        naive.append(times["naive"])
        cached.append(times["cached"])
figure, axes = plt.subplots(figsize=(6, 3), dpi=110, layout="constrained")
axes.plot(lengths, naive, "s-", color=ORANGE, label="all rows anew")
axes.plot(lengths, cached, "o-", color=BLUE, label="one row, cached")
axes.set_xscale("log", base=2)
axes.set_yscale("log", base=2)
axes.yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
axes.set_xticks(lengths, lengths)
axes.set(xlabel="length of the text (tokens)", ylabel="time of a step (ms)", title="One layer: 8 heads of 64")
axes.grid(alpha=0.3)
axes.legend()
plt.show()
print(f"at 1024 tokens: {naive[-1]:.2f} ms anew; {cached[-1]:.3f} ms cached, 1/{naive[-1] / cached[-1]:.0f} of that")
print(f"on {bench.conditions()}")
torch.set_num_threads(threads)

# %% [markdown]
# ## Memory used
#
# A cache keeps a key and a value for each token, layer and head, $2 \cdot n \cdot \text{layers} \cdot \text{heads}
# \cdot d_\text{head}$ numbers for a sequence of n tokens. These are **key-value heads**. Most models have fewer of them
# than query heads, because several query heads may read the same keys and values: SmolLM2 has 9 query heads and 3
# key-value heads. The next notebooks explain who shares what. For looking things up, the numbers that each keeps:
#
# | kind of attention | numbers per token and layer |
# |---|---|
# | multi-head (MHA): every query head has its own | $2 \cdot \text{heads} \cdot d_\text{head}$ |
# | [grouped-query](grouped_query_attention.ipynb) (GQA): G, each for a group | $2 \cdot G \cdot d_\text{head}$ |
# | [multi-query](multi_query_attention.ipynb) (MQA): one for all | $2 \cdot d_\text{head}$ |
# | [latent](latent_attention.ipynb) (MLA): a vector of C for all of them, and a key for positions of R | $C + R$ |
#
# The formula against a cache that a model has really filled:

# %%
cache = attnpack.ModelCache(len(model.layers))
with torch.no_grad():
    model(ids, cache)
sizes = plot_memory.MODELS["smollm2-135m"]
by_formula = 2 * ids.shape[1] * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * 4
print(f"SmolLM2, {ids.shape[1]} tokens in fp32: {cache.nbytes:,} bytes held, {by_formula:,} by the formula")
assert cache.nbytes == by_formula == plot_memory.model_kv_bytes(sizes, ids.shape[1], dtype=torch.float32)

# %% [markdown]
# Four known models at 128k tokens, and what they would need if they kept keys and values for every query head.
# ([latent_attention](latent_attention.ipynb) follows their memory up to a million tokens.) DeepSeek-V3 is by far the
# largest of them, with 671 billion parameters and 128 heads in each of 61 layers. It keeps one short vector per token,
# and its cache is smaller than that of Llama-3 8B:

# %%
heads = {
    "llama-3-70b": (64, 128, 128),
    "llama-3-8b": (32, 128, 128),
    "deepseek-v3": (128, 192, 128),
    "smollm2-135m": (9, 64, 64),
}  # query heads, widths of a key and of a value
names, shares = [], []
for name, (num_heads, key_width, value_width) in heads.items():
    sizes = plot_memory.MODELS[name]
    every_head = plot_memory.kv_bytes(
        num_heads, 2**17, num_layers=sizes.num_layers, head_dim=key_width, v_head_dim=value_width, dtype=torch.bfloat16
    )
    kept = plot_memory.model_kv_bytes(sizes, 2**17)
    names.append(sizes.label.split(",")[0])
    shares.append((every_head / 2**30, kept / 2**30))

# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(8, 3), dpi=110, layout="constrained")
for offset, colour, label in ((0, ORANGE, "keys and values of every head"), (1, BLUE, "as built")):
    bars = axes.barh(
        [i + 0.4 * offset for i in range(len(names))],
        [share[offset] for share in shares],
        height=0.4,
        color=colour,
        label=label,
    )
    axes.bar_label(bars, fmt="%.3g", padding=3)
axes.set_yticks([i + 0.2 for i in range(len(names))], names)
axes.margins(x=0.1)
axes.invert_yaxis()
axes.set(xlabel="KV cache at 128k tokens in bfloat16 (GiB)", ylabel="model", title="Memory saved by sharing")
axes.legend(loc="lower right")
plt.show()

# %% [markdown]
# Without a cache there is a cost of another kind. A naive implementation writes out the matrix of scores, n x n for
# each head; at 32k tokens that is 4 GiB per head in fp32. The operator keeps a running softmax over tiles of keys and
# never holds that matrix, so this term is gone with or without a cache:

# %%
n = 2048
q, k, v = torch.randn(3, 1, 8, n, 64).unbind(0)
tiled = memory.peak_bytes(lambda: attnpack.attention(q, k, v))
written_out = memory.peak_bytes(lambda: (q @ k.transpose(-2, -1) / 8).softmax(-1) @ v)
print(f"scores of one head, 32k tokens: {(2**15) ** 2 * 4 / 2**30:.0f} GiB in fp32")
print(f"scores of 8 heads, {n} tokens: {8 * n * n * 4 / 2**20:.0f} MiB; the output: {q.nbytes / 2**20:.0f} MiB")
print(f"most memory above the inputs: operator {tiled / 2**20:.0f} MiB, written out {written_out / 2**20:.0f} MiB")
assert tiled < 20 * 2**20 < written_out

# %% [markdown]
# ## The two common kinds at work
#
# A **DynamicCache** grows as tokens come, so its final length need not be known. Growing moves the stored numbers to a
# larger place, so the cache doubles its capacity each time, and moves seldom. A **StaticCache** allocates `max_len`
# positions at once: nothing moves, the shapes never change (which is what compiled code needs), and an append past the
# end raises.

# %%
layer = attnpack.GroupedQueryAttention(64, 8, 2, causal=True)
dynamic, static = attnpack.DynamicCache(), attnpack.StaticCache(1, 2, 100, 8)
held, allocated, places = [], [], set()
with torch.no_grad():
    for token in torch.randn(100, 1, 1, 64):
        a, b = layer(token, cache=dynamic), layer(token, cache=static)
        torch.testing.assert_close(a, b)
        held.append(dynamic.nbytes)
        allocated.append(dynamic.k.untyped_storage().nbytes() + dynamic.v.untyped_storage().nbytes())
        places.add(dynamic.k.data_ptr())

# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(7, 2.8), dpi=110, layout="constrained")
axes.step(range(1, 101), allocated, "--", color=ORANGE, where="post", label="DynamicCache, allocated")
axes.plot(range(1, 101), held, "-", color=BLUE, label="DynamicCache, held")
axes.axhline(static.nbytes, color=GREEN, linestyle=":", linewidth=2, label="StaticCache of 100")
axes.set(xlabel="tokens appended", ylabel="memory (bytes)", title="One layer, 2 kv heads of 8, fp32")
axes.grid(alpha=0.3)
axes.legend()
plt.show()
print(f"100 appends: the dynamic cache was moved {len(places) - 1} times; same outputs from both caches")

# %% [markdown]
# A cache has more methods than appending. `crop` takes tokens back (a rejected guess, an edited message), `reorder`
# picks sequences (beam search), `clone` branches, and a failed append leaves the cache as it was:

# %%
with torch.no_grad():
    branch = dynamic.clone()
    branch.crop(60)
    print("cropped clone:", len(branch), "positions; original:", len(dynamic))
    try:
        layer(torch.randn(1, 1, 64), cache=static)
    except ValueError as error:
        print("static cache:", str(error).split("\n")[0])
    print("and it still holds", len(static))
    pair = attnpack.DynamicCache()
    layer(torch.randn(2, 5, 64), cache=pair)
    first = pair.k[0].clone()
    pair.reorder([0, 0, 1])
    assert torch.equal(pair.k[1], first)
    print("reordered to sequences 0, 0, 1:", tuple(pair.k.shape))

# %% [markdown]
# Sequences of different lengths share a cache too: `kv_lens` says how many of the new tokens are real, and each
# sequence goes on at its own position. Rows of padding are never read, whatever they hold:

# %%
with torch.no_grad():
    ragged = attnpack.DynamicCache()
    prompts = torch.randn(2, 6, 64)
    prompts[1, 4:] = float("nan")  # the second prompt has 4 tokens; what follows them must not matter
    layer(prompts, cache=ragged, kv_lens=torch.tensor([6, 4]))
    step = torch.randn(2, 1, 64)
    out = layer(step, cache=ragged)
    alone = attnpack.DynamicCache()
    layer(prompts[1:, :4], cache=alone)
    print("lengths:", ragged.lengths.tolist())
    print("the short one, in the batch and by itself:", largest_difference(out[1:], layer(step[1:], cache=alone)))
    assert torch.equal(ragged.lengths, torch.tensor([7, 5])) and not out.isnan().any()

# %% [markdown]
# ## Other kinds: shared, coarser, or bounded
#
# A cache need not hold every number of every token. A **PagedCache** deals out pages of 16 positions from a pool, so
# several sequences may share what they have in common. A **QuantizedCache** keeps keys and values as 8- or 4-bit
# numbers, in blocks of 32 with one scale each. The next cell gives SmolLM2 the same text with each of them: 160 tokens
# at once, then 96 one by one. It prints the bytes held, the time per token, and how far the predictions are from those
# with a DynamicCache: the mean KL divergence, and the share of tokens whose likeliest successor is the same.

# %% tags=["hide-input"] jupyter={"source_hidden": true}
text = " ".join((attnpack.attention.__doc__ or "").split())
tokens = torch.tensor([tokenizer.encode(text)[:256]])
sizes = model.layers[0].self_attn
heads = (1, sizes.num_kv_heads, sizes.head_dim)
kinds = {
    "DynamicCache": lambda: attnpack.DynamicCache(),
    "StaticCache": lambda: attnpack.StaticCache(1, heads[1], 256, heads[2]),
    "PagedCache": lambda: attnpack.PagedCache(*heads, num_pages=16),
    "QuantizedCache(8)": lambda: attnpack.QuantizedCache(8),
    "QuantizedCache(4)": lambda: attnpack.QuantizedCache(4),
}


def read(make):
    """The predictions [96, vocabulary] of the last 96 tokens, the seconds per token, and the cache's bytes."""
    cache = attnpack.ModelCache([make() for _ in model.layers])
    rows, ticks = [], []
    with torch.no_grad():
        model(tokens[:, :160], cache)
        for token in tokens[:, 160:].split(1, dim=1):
            begin = time.perf_counter()
            rows.append(model(token, cache)[0, 0])
            ticks.append(time.perf_counter() - begin)
    return torch.stack(rows).log_softmax(-1), statistics.median(ticks), cache.nbytes


torch.set_num_threads(1)
exact, _, most = read(kinds["DynamicCache"])
print(f"{'':<18}{'bytes':>12}{'of all':>8}{'ms/token':>10}{'KL':>10}{'same':>7}")
for name, make in kinds.items():
    rows, seconds, held = read(make)
    divergence = (exact.exp() * (exact - rows)).sum(-1).mean().item()
    same = (exact.argmax(-1) == rows.argmax(-1)).float().mean().item()
    print(f"{name:<18}{held:>12,}{held / most:>8.0%}{1e3 * seconds:>10.1f}{abs(divergence):>10.1e}{same:>7.0%}")
    assert divergence < 0.2 and (held < most / 2 or not name.startswith("QuantizedCache"))
print(f"on {bench.conditions()}")
torch.set_num_threads(threads)

# %% [markdown]
# Eight bits change few predictions, and four bits change many (the last column). `exact_first` and `exact_last` keep
# the first and the latest tokens in full, which helps four bits most: `python benchmarks/cache_error.py` measures the
# error on a longer text. The times here are of the Python modules, called one by one, on the machine that is printed.
# C++ `generate`, timed at the start of this notebook, takes less time per token. The longer text is a small part of the
# reason: a cache of 256 tokens is small beside the weights. For the same reason the bytes that the quantised caches
# save hardly show in the time, and the work of unpacking does. Over long texts reading decides: `python
# benchmarks/cache_decode.py` times single calls over long caches.
#
# A layer with a window never looks back further than the window, so a **SlidingWindowCache** has room for the window
# and some hundred tokens more, however long the text gets: a ring, whose outputs equal those of a cache that keeps
# everything. `nbytes` counts what it holds, and `nbytes_allocated` its room:

# %%
windowed = attnpack.GroupedQueryAttention(64, 8, 2, causal=True, window=(63, 0))
ring, whole = attnpack.SlidingWindowCache(63), attnpack.DynamicCache()
with torch.no_grad():
    for count, token in enumerate(torch.randn(1000, 1, 1, 64), 1):
        a, b = windowed(token, cache=ring), windowed(token, cache=whole)
        assert torch.equal(a, b)
        if count in (10, 100, 1000):
            print(f"{count:>4} tokens: the ring holds {ring.nbytes:>7,} bytes, the whole cache {whole.nbytes:>7,}")
print(f"the ring has room for {ring.nbytes_allocated:,} bytes")

# %% [markdown]
# Sequences share pages until one of them writes. Here one prompt gets four answers, which hold the prompt once:

# %%
with torch.no_grad():
    pages = attnpack.PagedCache(1, 2, 8, num_pages=64)
    layer(torch.randn(1, 320, 64), cache=pages)
    answers = pages.fork([0, 0, 0, 0])
    print(f"the prompt {pages.nbytes:,} bytes, the four answers at first {answers.nbytes:,}")
    for _ in range(8):
        layer(torch.randn(4, 1, 64), cache=answers)
    print(f"after 8 tokens each: {answers.nbytes:,} bytes; four caches of their own: {4 * 328 * 2 * 2 * 8 * 4:,}")
    assert answers.nbytes < 2 * pages.nbytes

# %% [markdown]
# Three kinds are left. A **LatentCache** keeps for each token one latent and one small key for positions (see
# [latent_attention](latent_attention.ipynb)). A **SparseCache** keeps keys and values, and small keys by which each
# query chooses what it reads (see [newest_variants](newest_variants.ipynb)). A **CrossCache** keeps the keys and values
# of a context, projected once; it does not grow (see [encoder_decoder](encoder_decoder.ipynb)):

# %%
latent = attnpack.MultiHeadLatentAttention(
    64, 8, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, causal=True
)
cross = attnpack.MultiHeadAttention(64, 8)
context, kept, held = torch.randn(1, 20, 64), attnpack.LatentCache(), attnpack.CrossCache()
with torch.no_grad():
    for token in torch.randn(10, 1, 1, 64):
        latent(token, cache=kept)
        out = cross(token, context, cache=held)
    assert torch.equal(out, cross(token, context))
choosing = attnpack.SparseAttention(64, 8, 2, top_k=4, index_heads=2, causal=True)
chosen = choosing.new_cache()
with torch.no_grad():
    choosing(torch.randn(1, 10, 64), cache=chosen)
print(f"LatentCache, 10 tokens: {kept.nbytes // len(kept)} bytes per token (16 + 4 numbers)")
print(f"SparseCache, 10 tokens: {chosen.nbytes // len(chosen)} bytes per token (2 x 2 x 8 + 8 numbers)")
print(f"CrossCache after 10 calls: {len(held)} positions, those of the context")
assert kept.nbytes == 10 * (16 + 4) * 4 and chosen.nbytes == 10 * (2 * 2 * 8 + 8) * 4 and len(held) == 20

# %% [markdown]
# ## Other changes of a score: windows, sinks, soft caps, ALiBi
#
# Four settings act between the scores and the softmax. Two go by the distance of a key: a **window** hides keys that
# are far away, and **ALiBi** lowers scores with the distance. Two do not: a **sink** is one more logit per head, with
# no value, and takes the weight that a head does not want to give; a **soft cap** c bounds scores by c · tanh(s / c).
# The same queries and keys under each, with hidden keys in grey:

# %%
q, k = torch.randn(2, 1, 2, 24, 16).unbind(0)
kinds = {
    "causal": {},
    "window of 6": {"window": (5, 0)},
    "sink of 2": {"sinks": torch.full((2,), 2.0)},
    "soft cap 0.5": {"softcap": 0.5},
    "ALiBi, slope 1/4": {"alibi_slopes": torch.full((2,), 0.25)},
}

# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure, panels = plt.subplots(1, 5, figsize=(12, 2.9), dpi=110, layout="constrained", sharey=True)
drawn = {}
for panel, (name, setting) in zip(panels, kinds.items(), strict=True):
    drawn[name] = attnpack.attention_scores(q, k, causal=True, **setting)[0, 0]
    seen = drawn[name].where(drawn[name] > 0, torch.nan)  # a key that is hidden stays grey
    image = panel.imshow(seen, cmap="cividis", vmin=0, vmax=1)
    panel.set(title=name, xlabel="key (position)", facecolor="lightgrey")
    print(f"{name:<17} sum of the last row {drawn[name][-1].sum():.2f}, largest weight {drawn[name][-1].max():.2f}")
panels[0].set_ylabel("query (position)")
figure.colorbar(image, ax=panels, label="weight")
plt.show()
assert not drawn["window of 6"][-1, :-6].any() and drawn["sink of 2"][-1].sum() < 0.99
assert drawn["soft cap 0.5"][-1].max() < drawn["causal"][-1].max()

# %% [markdown]
# With a sink the weights of a row sum to less than 1: the rest went to the sink. The window is what lets a ring cache
# forget; the other three need no change of a cache.
#
# ## Summary
#
# (Words in quotes are those of the output that shows a comparison.)
#
# - In a causal model the past never changes, so its keys and values can be kept.
# - With a cache a token costs one row; without it, all rows before it again.
# - The cache grows with the text. Query heads that share key-value heads make it smaller ("keys and values of every
#   head").
# - Kinds of caches differ in where numbers lie and how exactly they are kept. They give the same attention ("same
#   outputs from both caches"), except the quantised ones. Here 8 bits changed few of the likeliest tokens, and 4 bits
#   about a fifth.
#
# ## Exercises
#
# 1. Llama-3 8B has 32 layers and 8 kv heads of 128. At how many tokens in bf16 is its cache as large as its weights (16
#    GB)?
# 2. Reject the last three tokens of a text, and write on. Check against a cache that never saw them.
# 3. *Implement* decoding with a cache of your own, one token at a time. `layer.project(token)` gives q, k and v,
#    `[B, H, 1, D]`; `layer.o_proj` joins the heads. Use neither `attnpack.attention` nor a cache of the library. The
#    cell below checks it.


# %%
def step(layer, token, past):
    """Yours: the output [B, 1, E] for token [B, 1, E], and the pair (k, v) with its key and value appended. `past` is
    such a pair, or None at first."""


print(course.check_decode(step))

# %% [markdown]
# The next cell has solutions. It is folded; try first.

# %% tags=["hide-cell"] jupyter={"source_hidden": true, "outputs_hidden": true}
# Solutions. Try first.
per_token = plot_memory.model_kv_bytes(plot_memory.MODELS["llama-3-8b"], 1)
print(f"1. {16e9 / per_token:,.0f} tokens of {per_token:,} bytes make 16 GB")
with torch.no_grad():
    text, rest = torch.randn(1, 12, 64), torch.randn(1, 1, 64)
    one, other = attnpack.DynamicCache(), attnpack.DynamicCache()
    layer(text, cache=one)
    one.crop(9)
    layer(text[:, :9], cache=other)
    print("2.", largest_difference(layer(rest, cache=one), layer(rest, cache=other)))
    torch.testing.assert_close(one.k, other.k)


def step(layer, token, past):
    q, k, v = layer.project(token)
    if past is not None:
        k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
    weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(dim=-1)
    return layer.o_proj((weights @ v).transpose(1, 2).flatten(2)), (k, v)


print("3.", course.check_decode(step))
assert course.check_decode(step) == "right"

# %% [markdown]
# Next: [positions](positions.ipynb).
