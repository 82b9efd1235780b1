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
# # Performance: how fast, and how fast could it be?
#
# *You need* [multi_query_attention](multi_query_attention.ipynb). *You learn* which limit applies to which call, and
# how to read a roofline. *Runs in* half a minute.
#
# Sources: [Williams et al. 2009](https://doi.org/10.1145/1498765.1498785) (the roofline).
# The glossary has the [symbols](../docs/notebooks.md#glossary-of-symbols) and the
# [words](../docs/notebooks.md#glossary-of-words).
#
# "Faster than X" says little if X is slow. So `attnpack bench` measures two things in the same run: the limits of the
# machine (multiply-adds per second in registers, bytes per second read in order), and the time of attention calls,
# compared with other libraries on the same tensors. All libraries of a case take turns, so that a busy machine slows
# all of them, and a ratio is the median over rounds.
#
# This notebook draws such a run, of two threads. The figures below were stored on the machine that they name. It is a
# virtual machine, whose neighbours change the speed of memory. So look at the ratios. To see your own, run
#
# ```bash
# attnpack bench --quick --json > benchmarks/results/quick.json
# ```
#
# (a few minutes; without `--quick` longer texts and more rounds) and this notebook again.

# %%
import statistics
from pathlib import Path

import attnpack
import matplotlib.pyplot as plt
import torch
from attnpack.tools import bench as live
from attnpack.tools import course
from attnpack.tools.plot import roofline as plot_roofline

bench = plot_roofline.read_bench(Path("..") / "benchmarks" / "results" / "quick.json")
flops, read = bench["limits"]["flops"], bench["limits"]["bytes_per_second"]
print(f"{bench['machine']}, {bench['threads']} threads, instruction set {bench['isa']}")
print(f"torch {bench['torch']}, attnpack {bench['attnpack']}, {bench['date']}, {len(bench['results'])} cases")
print(f"limits: {flops / 1e9:.0f} GFLOP/s in fp32, {read / 1e9:.1f} GB/s read")

# %% [markdown]
# ## The roofline
#
# A call needs some number of operations and must move some number of bytes; their ratio is its *intensity*. A machine
# that computes F operations and reads M bytes per second cannot do a call of intensity x faster than min(F, M x)
# operations per second. That is the roof: slanted where memory limits, flat where arithmetic limits. The two parts meet
# at F / M:

# %% tags=["hide-input"] jupyter={"source_hidden": true}
print(f"decoding in fp32, each head with its own keys: {2 * 2 / (2 * 4):g} operations per byte")
print(f"this machine's ridge: {flops / read:.1f} operations per byte")
figure, axes = plt.subplots(figsize=(8.5, 5), dpi=110, layout="constrained")
plot_roofline.draw_roofline(axes, bench)
plt.show()

# %% [markdown]
# There are two groups. **Decoding** (one new token over a long cache) is on the left: each key is read from memory and
# used for a few products. With every head reading its own keys, the intensity in fp32 is 0.5 operations per
# byte; sharing moves the point to the right along the roof, since a key that is read once serves a whole group of
# heads. This picture shows the whole effect of grouped- and multi-query attention on speed. **Prefill** (reading a
# prompt, all of its tokens in one call) and training are on the right: many queries share each key, and arithmetic is
# the limit. (A point above the roof, where there is one, is a call whose keys are in the processor's cache ("warm"),
# which is faster than memory, or one at a moment when memory was faster than while the roof was measured. The shares
# below use the speed of memory between the calls.)
#
# The same as a share of the limit that applies, over the cases of each kind. Warm calls have a row of their own: memory
# does not limit them, so their share may exceed 100%:

# %%
shares = {}
for each in bench["results"]:
    case = each["case"]
    section = case["section"] + (f", {'cold' if case['cold'] else 'warm'}" if case["section"] == "decode" else "")
    shares.setdefault((section, case["dtype"]), []).append((each["share"], case["name"]))
heading = f"{'least':>8}{'median':>8}{'most':>8}   share of the limit; the case of the least"
print(f"{'section':<14}{'dtype':<7}{'cases':>5}{heading}")
for (section, dtype), each in shares.items():
    (least, name), median, (most, _) = min(each), statistics.median([share for share, _ in each]), max(each)
    print(f"{section:<14}{dtype:<7}{len(each):>5}{least:>8.0%}{median:>8.0%}{most:>8.0%}   {name}")

# %% [markdown]
# The lowest shares of cold decoding (43% in fp32, 35% in bf16) are those of 32 query heads on one key-value head. There
# arithmetic is the limit, so the shares are of the multiply-adds per second. Why these calls stay so far below it is
# not known. In latent decoding (from 27%, with 16 heads in bf16) all heads read one latent, so arithmetic is the
# limit too, and the reason for the rest is not known either.
#
# A share counts the multiply-adds of the two products, and not the softmax between them. One bf16 instruction
# multiplies two pairs of numbers and adds both products ("pairs"), so products run twice as fast; the softmax stays in
# fp32. That fits the shares of prefill, which are lower in bf16 than in fp32. The lowest, 54%, is that of causal heads
# of 64. How much of it the softmax takes was not measured.
#
# Training in bf16 is measured against the limit of bf16 in pairs (`limit, bf16` in the picture), which both passes use.
# How much of the rest the softmax and the conversions between products take was not measured.
#
# The "small" calls are of one token and of 16. With one token nearly all of the time is overhead: checking arguments,
# making the output, and PyTorch's dispatcher, which looks up the kernel by the tensors' device and dtype. With 16 the
# work shows already, and the share is several times as high.
#
# ## The reasons for its speed
#
# - **Tiles.** Prefill takes the query rows of a key-value head in tiles, and the keys in blocks. The scores of a tile
#   and a block stay in the processor's L2 cache. No matrix of all scores is ever written to memory.
# - **Packing.** The keys and values of a block are copied once into the order in which the multiplications read them.
#   All rows that share the key-value head use this copy.
# - **A running softmax** (see [attention_from_scratch](attention_from_scratch.ipynb)) joins the blocks, so a tile goes
#   over its keys in one pass.
# - **Decoding** reads each key once for all query heads of its group, in the order of the addresses, and asks memory
#   for what comes next before it is needed.
#
# ## Decoding beside PyTorch
#
# `sdpa` is PyTorch's `scaled_dot_product_attention` with `enable_gqa=True`, what most models call. The names say query
# heads / key-value heads, width, and number of keys; "cold" keys come from memory, "warm" ones from the processor's
# cache.

# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(9, 5), dpi=110, layout="constrained")
plot_roofline.draw_times_faster(axes, bench, "decode", "sdpa")
plt.show()

# %% [markdown]
# These bars have two reasons. Where nothing is shared (32/32), the bar says how fast each side reads keys and
# multiplies; in bf16 SDPA is slow at that by itself. And the more heads share a key-value head, the larger the gap. A
# likely reason is that SDPA reads shared heads once for each query head. The bars are ratios of times: no bytes were
# counted here. For a *single* query the heads of a group can be packed by hand as rows of one head, which is read once.
# That is the fairer comparison, but few people write it:

# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(9, 4.2), dpi=110, layout="constrained")
plot_roofline.draw_times_faster(axes, bench, "decode", "packed")
plt.show()

# %% [markdown]
# ## Prefill and training beside PyTorch
#
# Here both sides do the same arithmetic, and the speed depends on how well they keep it busy.

# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(9, 3.2), dpi=110, layout="constrained")
plot_roofline.draw_times_faster(axes, bench, "prefill", "sdpa")
plt.show()

# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(9, 4.2), dpi=110, layout="constrained")
plot_roofline.draw_times_faster(axes, bench, "train", "sdpa")
plt.show()

# %% [markdown]
# Where a bar ends left of 1, PyTorch is faster. The next cell lists such cases of this one run. Another run of such a
# machine has one ([peers.txt](../benchmarks/results/peers.txt)): compiled FlexAttention is faster in cold decoding in
# fp32 where no heads are shared.

# %%
slower = [
    f"{each['case']['name']}, {each['case']['dtype']}: {ratio:.2f}x of {peer}"
    for each in bench["results"]
    for peer, ratio in each["ratios"].items()
    if ratio < 1
]
print("\n".join(slower) or "nowhere in this run")

# %% [markdown]
# ## And here, now
#
# A part of the same measurement, run live with this notebook on its machine: short calls, in which the overhead
# matters, on one thread, because two threads on a busy machine wait for each other.

# %% tags=["hide-input"] jupyter={"source_hidden": true}
threads = torch.get_num_threads()
torch.set_num_threads(1)
limits, results = live.run(["small"], ["fp32"], ["sdpa"], quick=True)
print(live.format_table(limits, results, ["sdpa"], live.Cpu()))
assert all(result.seconds > 0 and result.ratios["sdpa"] > 0 for result in results)
print("\nthis is", attnpack.__version__, "on", live.machine())
torch.set_num_threads(threads)

# %% [markdown]
# ## Summary
#
# - Intensity, the operations for each byte, says which limit applies: memory on the left, arithmetic on the right.
# - Sharing key-value heads moves decoding to the right along the roof.
# - Compare with the limit of the machine as well as with another library.
#
# ## Exercises
#
# 1. Compute the intensity of decoding in bf16 with 8 query heads on 1 key-value head.
# 2. From how many query heads per key-value head on does arithmetic limit fp32 decoding on the stored machine?
# 3. *Implement* the roofline of decoding: the least seconds of one new token over `keys` cached keys and values of
#    `size` bytes per number, on a machine of `flops` operations and `read` bytes per second. Leave out the bytes of the
#    query and of the output. The cell below checks it.


# %%
def least(num_heads, num_kv_heads, head_dim, keys, size, flops, read):
    """Yours: seconds."""


print(course.check_least_seconds(least))

# %% [markdown]
# The next cell has solutions. It is folded; try first.

# %% tags=["hide-cell"] jupyter={"source_hidden": true, "outputs_hidden": true}
# Solutions. Try first.
print(
    "1. 8 heads x 2 products x 2 operations for each pair of 2-byte numbers:",
    8 * 2 * 2 / (2 * 2),
    "operations per byte",
)
print(f"2. {flops / read * 4 / 2:.0f} heads: each key number of 4 bytes gives 2 operations per head")


def least(num_heads, num_kv_heads, head_dim, keys, size, flops, read):
    operations = 2 * 2 * num_heads * keys * head_dim  # q.k and the sum of values; multiply and add
    moved = 2 * num_kv_heads * keys * head_dim * size  # keys and values, once for all heads of a group
    return max(operations / flops, moved / read)


print("3.", course.check_least_seconds(least))
assert course.check_least_seconds(least) == "right"

# %% [markdown]
# Next: [conversion_and_uptraining](conversion_and_uptraining.ipynb).
