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
# # Conversion and uptraining: a trained model with fewer key-value heads
#
# *You need* [grouped_query_attention](grouped_query_attention.ipynb). *You learn* how a trained model gets fewer
# key-value heads or latent attention, what is lost at once, and what training brings back. *Runs in* a minute.
#
# Sources: [Ainslie et al. 2023](https://arxiv.org/abs/2305.13245) (mean, first, random; uptraining),
# [Jin et al. 2024](https://arxiv.org/abs/2412.20677) (alignment before merging),
# [Meng et al. 2025](https://arxiv.org/abs/2502.07864) (to latent attention).
# The glossary has the [symbols](../docs/notebooks.md#glossary-of-symbols) and the
# [words](../docs/notebooks.md#glossary-of-words).
#
# Multi-query and grouped-query attention keep fewer keys and values, which makes long contexts cheap. Most models of
# today are trained that way from the start. In 2023 few were. Ainslie et al. (2023) converted a model with as many
# key-value heads as query heads: the heads of each group become one, their *mean*, and then training continues for a
# small part of the original steps ("uptraining"). Three questions follow, and numbers answer them: how much is lost at
# once? How much comes back? And does it matter how the heads of a group become one?
#
# ## How heads become one
#
# A key projection is a matrix of `num_heads` blocks of rows, one block per head. Its mean over groups:

# %%
import copy
import json
from pathlib import Path
from pydoc_data.topics import topics

import attnpack
import matplotlib.pyplot as plt
import torch
from attnpack import checkpoints, convert
from attnpack.tools import course
from attnpack.tools.compare import picture, report
from attnpack.tools.plot.colours import BLUE, GREEN, KINDS, ORANGE

torch.manual_seed(0)
weight = torch.randn(4 * 2, 3)  # 4 heads of 2 rows, embed_dim 3
pooled = convert.pool_kv_heads(weight, 4, 2)
print("two heads from four:", list(weight.shape), "->", list(pooled.shape))
print("by hand the same:   ", torch.equal(pooled, weight.view(2, 2, 2, 3).mean(1).reshape(4, 3)))

# %% [markdown]
# A public text averages *regions* of the matrix first: each square of w x w numbers becomes its mean. The paper does
# not have this step. Here is what it does to a small matrix, and what other groups than consecutive ones do:

# %%
square = torch.arange(16.0).view(4, 4)  # 4 heads of 1 row
print(square)
print("regions of 2 x 2:\n", convert.pool_kv_heads(square, 4, 4, window=2), sep="")
print("heads 0 and 3, 1 and 2:\n", convert.pool_kv_heads(square, 4, 2, groups=[[0, 3], [1, 2]]), sep="")
regions = square.view(2, 2, 2, 2).mean((1, 3)).repeat_interleave(2, 0).repeat_interleave(2, 1)
assert torch.equal(convert.pool_kv_heads(square, 4, 4, window=2), regions)

# %% [markdown]
# If all heads of a group were equal, nothing would change at all. That is a good first test of any conversion. Scripts
# that group the wrong heads fail it:

# %%
layer = attnpack.MultiHeadAttention(64, 8, causal=True)
with torch.no_grad():
    for projection in (layer.k_proj, layer.v_proj):
        projection.weight.copy_(projection.weight.view(2, 4, 8, 64)[:, :1].expand(2, 4, 8, 64).reshape(64, 64))
x = torch.randn(1, 20, 64)
for heads in (2, 1):
    difference = (convert.to_gqa(layer, heads)(x) - layer(x)).abs().max().item()
    print(f"heads 0 to 3 equal, 4 to 7 equal; converted to {heads} kv heads: largest change {difference:.1e}")

# %% [markdown]
# Two heads from these eight: nothing but rounding. One: a large change, because the two groups differ from each other.
#
# In a trained model heads differ, and the mean of two good keys need not be a good key. To see how much is lost, we
# train a small model here. It reads bytes of Python's help topics.

# %%
data = torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)
train_text, held_out = data[: -(1 << 15)].long(), data[-(1 << 15) :].long().view(-1, 64)
offsets = torch.arange(64)


def loss_of(model, rows):
    logits = model(rows[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def train(model, steps, rate, seed):
    """Adam on random pieces of 64 bytes; the rate falls to a tenth."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.1, max(1, steps))
    for _ in range(steps):
        begin = torch.randint(len(train_text) - 64, (16, 1), generator=generator)
        loss = loss_of(model, train_text[begin + offsets])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()


def held_out_loss(model):
    with torch.no_grad():
        return loss_of(model, held_out).item()


threads = torch.get_num_threads()
torch.set_num_threads(1)  # a model this small loses more to a second thread's start than it gains
original = attnpack.CausalLM(256, 48, 2, 8, hidden_dim=128, tie_embeddings=True)
with torch.no_grad():
    original.model.embed_tokens.weight.normal_(std=48**-0.5)
STEPS = 240
print(f"before training: {held_out_loss(original):.2f} nats per byte (ln 256 = 5.55 would be guessing)")
train(original, STEPS, 4e-3, seed=0)
print(f"after {STEPS} steps: {held_out_loss(original):.2f}")

# %% [markdown]
# Now one key-value head from eight, in three ways, and then a tenth of the steps again:

# %%
live = {}
for method in ("mean", "first", "random"):
    draw = {"seed": 0} if method == "random" else {}
    model = convert.to_gqa(original, 1, method, **draw)
    at_once = held_out_loss(model)
    train(model, STEPS // 10, 4e-4, seed=1)
    live[method] = (at_once, held_out_loss(model))
    print(f"8 -> 1 kv head by {method:<7} at once {at_once:.3f}, after {STEPS // 10} steps more {live[method][1]:.3f}")
torch.set_num_threads(threads)
for moment, when in enumerate(("at once", "after training")):
    print(f"{when}: {' < '.join(sorted(live, key=lambda method: live[method][moment]))}")
assert max(live, key=lambda method: live[method][1]) == "random"

# %% [markdown]
# One model, one seed, a short run: a sketch, not a result. At once the order says little, and even a new random head
# need not be the worst: queries that were trained with another key head cannot read the *first* one either. Training
# tells more: a random head has nothing to build on and comes last. Mean and first lie close to each other, and it says
# little which of them is better after a few steps.
#
# ## The experiment, larger
#
# `python benchmarks/uptraining.py` does the same with three seeds, more training, 4, 2 and 1 kv heads, and the variant
# of averaging over regions of each matrix first. Its figures are stored with date and machine:

# %%
record = json.loads((Path("..") / "benchmarks" / "results" / "uptraining.json").read_text())
about, cells = record["about"], record["cells"]
print(f"{about['date']}, {about['machine']}; {about['steps']} steps, {about['seeds']} seeds, sizes {about['sizes']}")


def over_seeds(prefix, figure):
    """[seeds] of one figure."""
    return torch.tensor([cells[f"{prefix}/{seed}"][figure] for seed in range(about["seeds"])])


# Okabe and Ito's colours, and another line for each.
METHODS = {"mean": (BLUE, "-o"), "first": (ORANGE, "--s"), "random": (GREEN, "-.^")}

# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure, panels = plt.subplots(1, 3, figsize=(10, 3.6), dpi=110, sharey=True, layout="constrained")
for axes, heads in zip(panels, (4, 2, 1), strict=True):
    for method, (colour, line) in METHODS.items():
        losses = torch.stack([over_seeds(f"uptrain/{heads}/{method}", f"loss_{percent}") for percent in (0, 5, 10)])
        mean, low, high = losses.mean(1), losses.min(1).values, losses.max(1).values
        axes.plot((0, 5, 10), mean, line, color=colour, label=method)
        axes.fill_between((0, 5, 10), low, high, color=colour, alpha=0.2)
    control = [over_seeds("uptrain/MHA/original", f"loss_{percent}").mean() for percent in (0, 5, 10)]
    before = control[0]
    axes.plot((0, 5, 10), control, ":", color="black", linewidth=1, label="original, trained on as long")
    axes.set_title(f"8 -> {heads} kv head{'s' if heads > 1 else ''}")
    axes.set_xlabel("uptraining (% of the original steps)")
    axes.set_xticks((0, 5, 10))
    axes.grid(True, alpha=0.3)
figure.suptitle(f"A small MHA model with fewer kv heads, uptrained ({about['date']})", fontsize=11)
panels[0].set_ylabel("held-out loss (nats per byte)")
panels[0].legend(fontsize=8)
plt.show()

# %% [markdown]
# Bands reach from the best seed to the worst. The dotted line is a control: the original with its 8 kv heads, trained
# on for as many steps. In numbers, with a check of the paper's order (mean before first before random):

# %%
print(f"{'':10}{'uptrained':>10}" + "".join(f"{method:>16}" for method in METHODS) + "   best to worst")
for heads in (4, 2, 1):
    for percent in (0, 5, 10):
        values = {method: over_seeds(f"uptrain/{heads}/{method}", f"loss_{percent}") for method in METHODS}
        row = "".join(f"{x.mean():9.3f} ±{(x - x.mean()).abs().max():.3f}" for x in values.values())
        order = sorted(METHODS, key=lambda method: values[method].mean().item())
        print(f"{f'{heads} kv heads':10}{percent:>9}%{row}   {' < '.join(order)}")
        assert order[-1] == "random"
for heads in (4, 2, 1):
    at_once, trained = (over_seeds(f"uptrain/{heads}/mean", figure).mean() for figure in ("loss_0", "loss_10"))
    print(f"mean, {heads} kv heads: {(at_once - trained) / (at_once - before):.0%} of the rise came back after 10%")
for percent in (0, 5, 10):
    for method in ("mean", "first"):
        losses = [over_seeds(f"uptrain/{heads}/{method}", f"loss_{percent}").mean() for heads in (4, 2, 1)]
        assert losses == sorted(losses), "the more heads remain, the less is lost"
for mean, first, random in zip(*(over_seeds(f"uptrain/1/{method}", "loss_5") for method in METHODS), strict=True):
    assert mean < first < random, "the paper's cell, in every seed"

# %% [markdown]
# Random is last in every row. The paper compares the three methods in one cell only: all heads merged into one, after
# 5% of the steps. In that cell this small model agrees with it, in every seed. The other cells are not in the paper.
# With two kv heads the seeds' spreads overlap. With four, where only pairs merge, the *first* head of each pair is
# ahead of their mean at once; after 10% the two are equal within the spread.
#
# With `mean` and `first`, the more heads remain, the less is lost, before and after training. With `mean`, more heads
# also recover more. With random heads it matters little after training how many remain: the losses after 5% are 2.81 to
# 2.83. Before training, one random head loses less than two or four.
#
# And the two windows (each region of w x w numbers replaced by its mean, before heads are pooled):

# %%
for heads in (4, 2, 1):
    row = [
        f"{name} {over_seeds(f'uptrain/{heads}/{name}', 'loss_10').mean():.3f}"
        for name in ("mean", "mean w2", "mean w4")
    ]
    print(f"{heads} kv heads, after 10%: {', '.join(row)}")

# %% [markdown]
# Averaging regions of the matrix mixes numbers that have nothing to do with each other, and only loses.
#
# ## From scratch, all variants on one budget
#
# Would it be better to train the small variant from the start? The same small model, trained so:

# %%
scratch, converted = over_seeds("scratch/MQA", "loss").mean(), over_seeds("uptrain/1/mean", "loss_10").mean()
print(f"MQA from scratch {scratch:.3f}, MHA from scratch {over_seeds('scratch/MHA', 'loss').mean():.3f}")
print(f"MHA converted to one kv head by the mean, after 10% of the steps more: {converted:.3f}")
assert scratch < converted

# %% [markdown]
# For this model the answer is yes. Conversion is for a model whose training is paid already, and too long to be done
# again. Which variant to train from scratch is a question of what it gives for its cache. `attnpack compare` trains all
# of them, each with as many parameters (what attention saves goes into the feed-forwards), on the same text in the same
# order. This is its stored run; [compare](../docs/howto/compare.md) says how to read it, and how to run it on a text of
# yours:

# %% tags=["hide-input"] jupyter={"source_hidden": true}
compared = json.loads((Path("..") / "benchmarks" / "results" / "compare" / "compare.json").read_text())
entries = {name: report.Entry(**figures) for name, figures in compared["variants"].items()}
print(report.format_table(entries))
where = compared["about"]
print(f"{where['date']}, {where['machine']}; loss in nats per byte, ± one standard deviation over the seeds")
picture.draw(entries, compared["title"], 4096)

# %% [markdown]
# Fewer key-value heads cost nothing here: gqa-2 ends 0.04 below mha, more than twice the spread of that difference, and
# gqa-4 and mqa differ from mha by about that spread or less. Their feed-forwards are wider, by the parameters that
# attention saves; whether that is the reason was not tested. Differential and sparse attention with the heads of gqa-2
# end 0.10 and 0.08 below mha, and linear attention with the delta rule, gdn, 0.20 below it, with a state that does not
# grow. Latent attention ends 0.18 above it. Its layers are tiny here: heads of 16 numbers, a latent of 64, a rotated
# key of 8. The sources say that GQA loses less and "trains more stably" than MQA, and that MLA keeps the quality. A
# model of 200,000 parameters, a few hundred steps and texts of 128 bytes cannot show or refute that for models of 7
# billion.
#
# ## A real model: SmolLM2-135M
#
# It has 3 kv heads for 9 query heads. One head by each method, and latent attention of several ranks in place of its
# layers: perplexity on the first 2,048 tokens of the help topics, 512 at a time (as `attnpack convert` measures it
# too), at once, and for the single heads after 65 steps of distillation from the original, of 512 tokens each.
# (*aligned* rotates the heads to match each other before it takes their mean; the text below the table says how.) The
# time is of a step of the Python modules after 1,024 tokens, on the Xeon that is printed at the top of the figures.
# README and the start of [kv_cache](kv_cache.ipynb) have times of C++ `generate` instead, on other machines. At this
# size the time is spent on calls and projections, not on the cache, and a busy machine moves it: do not read an order
# of the ranks out of it.

# %%
print(f"{'SmolLM2-135M':24}{'perplexity':>14}{'uptrained':>12}{'steps':>8}{'KV bytes/token':>18}{'ms/token':>12}")
for name, cell in cells.items():
    if name.startswith("smollm2/"):
        kind = name.removeprefix("smollm2/")
        shape = {"original": "3 kv heads"}.get(kind, "1 kv heads" if kind.startswith("1 ") else kind)
        took = cells[f"decode/SmolLM2, {shape}"]["ms_per_token"]
        after = f"{cell['uptrained']:,.1f}" if cell["uptrained"] else "-"
        line = f"{kind:24}{cell['perplexity']:14,.1f}{after:>12}{cell.get('steps', '-'):>8}"
        print(f"{line}{cell['kv_bytes_per_token']:18,}{took:12.1f}")
print("trained on", *{cell["machine"] for cell in cells.values() if "machine" in cell}, "- all else as at the top")

# %% [markdown]
# Before training, perplexities of ten thousand and more say that a model is broken, not which one is better: *first* is
# worse than *random* there. After the same number of steps for each, *first* is a little ahead of *mean*, and *random*
# is far behind. The table cannot settle the order of the first two: it is one run, and the steps are few. *aligned* is
# far ahead even before training, and still above the original after it. All of this is only a beginning: the paper
# trains for 5% of the original's steps.
#
# Two things stand out before any training. One is latent attention: in the bytes of one kv head (rank 64 and the shared
# rotating key of 64) it keeps more than any merged head, and rank 128, half the original's bytes, comes closer still.
# More rank helps less and less. Even a latent larger than the original's cache does not reach it: keys of all heads
# share one rotated head, and no rank of the latent mends that. A wider rotated key does, as the next
# section shows.
#
# The other is *aligned*, which makes the difference among merged heads. Scores do not change if a key head and the
# queries that read it are rotated together. Outputs do not change if a value head is rotated and `o_proj` is rotated
# back. So before heads are averaged, each is rotated to match the first as closely as possible, measured on a text.
# (Keys may only turn within RoPE's planes.) The mean of heads that point in the same directions loses far less:

# %%
path = checkpoints.smollm2_path()
tokenizer, model = checkpoints.load_tokenizer(path), attnpack.CausalLM.from_gguf(path)
ids = torch.tensor([tokenizer.encode("\n".join(topics[name] for name in sorted(topics))[:12000])[:1536]])
seen = []
hook = model.layers[10].self_attn.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
with torch.no_grad():
    model(ids)
hook.remove()
measured, calibration = seen[0][:, :512], seen[0][:, 512:]
for method in ("mean", "first", "aligned"):
    extra = {"calibration": calibration} if method == "aligned" else {}
    attention = model.layers[10].self_attn
    error = convert.layer_error(attention, convert.to_gqa(attention, 1, method, **extra), measured)
    print(f"layer 10, 3 -> 1 kv head by {method:<8} relative error of the layer's output {error:.2f}")

# %% [markdown]
# ## A whole model with latent attention
#
# The latents in the table above were made layer by layer, and their rotated key is as wide as one head's: 64 numbers.
# The command `attnpack convert IN OUT --kv-lora-rank R` converts a whole checkpoint, and its rotated key may be as wide
# as the keys of all kv heads together. Then all pairs of RoPE still rotate, and nothing is lost from
# R = 2 · kv heads · head_dim on. `--rope-dim N` keeps only the N numbers whose rotation matters most to the scores, and
# a smaller R keeps only the leading directions of the values and of what is left of the keys. (How it works:
# [latent attention for a trained model](../docs/howto/latent.md); how such attention computes:
# [latent_attention](latent_attention.ipynb).)
#
# In Python it is `convert.to_mla` of a model. Here is the small model from above, with its 8 kv heads of 6 numbers. The
# tokens of a text decide what is kept:

# %%
torch.set_num_threads(1)
text = train_text[: 64 * 64].view(64, 64)
full = 2 * 8 * 6
longer = copy.deepcopy(original)  # a control, trained on as long as the others
train(longer, STEPS // 10, 4e-4, seed=1)
at_once = held_out_loss(original)
print(f"the original: {full} numbers per token and layer, loss {at_once:.3f}, {held_out_loss(longer):.3f} trained on")
small = {}
for rank, rotated in ((full, 48), (49, 48), (32, 24), (24, 16), (16, 8)):
    model = convert.to_mla(original, rank, rope_dim=rotated, ids=text)
    at_once = held_out_loss(model)
    train(model, STEPS // 10, 4e-4, seed=1)
    small[rank] = at_once, held_out_loss(model)
    print(
        f"latent {rank:>2} + rotated key {rotated:>2}: {rank + rotated:>3} numbers, loss {at_once:.3f} at once, "
        f"{small[rank][1]:.3f} after {STEPS // 10} steps"
    )
torch.set_num_threads(threads)
assert abs(small[full][0] - held_out_loss(original)) < 1e-3 and abs(small[49][0] - small[full][0]) < 1e-3

# %% [markdown]
# The first latents give the original's loss: nothing is cut. The second ones give it too, in one number more than the
# original's cache: where all pairs rotate, the keys need no room in the latent, and its 49 numbers are the 48 of the
# values and a constant. Below that, the shorter the latent, the more is lost.
#
# The same for SmolLM2-135M, by the command ([stored run](../benchmarks/results/latent_ranks.txt)): its perplexity on
# the text of the table above, without any training, and for one row after 30 minutes of
# distillation on two cores.

# %% tags=["hide-input"] jupyter={"source_hidden": true}
lines = (Path("..") / "benchmarks" / "results" / "latent_ranks.txt").read_text().replace(",", "").splitlines()
rows = [line.split() for line in lines if line.strip()[:1].isdigit()]
ranks = {(int(row[0]), int(row[1])): (int(row[2]), float(row[3])) for row in rows}
trained = {(int(row[0]), int(row[1])): float(row[4]) for row in rows if len(row) == 6}
before, size = (float(text) for text in next(line for line in lines if line.startswith("original")).split()[:0:-1])
print(f"{'latent + rotated key':24}{'bytes per token':>16}{'perplexity':>12}{'after 30 minutes':>18}")
print(f"{'original':24}{size:>16,.0f}{before:>12}")
for (rank, rotated), (held, perplexity) in ranks.items():
    after = trained.get((rank, rotated), "")
    print(f"{f'{rank} + {rotated}':24}{held:>16,}{perplexity:>12}{after:>18}")
figure, axes = plt.subplots(figsize=(7, 3.8), dpi=110, layout="constrained")
held, perplexities = zip(*sorted(ranks.values()), strict=True)
axes.plot(held, perplexities, "o-", color=KINDS["MLA"], label="latent attention, at once")
for (rank, rotated), place in ranks.items():
    axes.annotate(f"{rank} + {rotated}", place, xytext=(4, 7), textcoords="offset points", fontsize=9)
for pair, after in trained.items():
    label = "the same after 30 minutes of distillation"
    axes.plot(ranks[pair][0], after, "o", color=KINDS["MLA"], markerfacecolor="white", label=label)
look = {"markersize": 11, "markerfacecolor": "none", "markeredgewidth": 2}  # a point lies in it
axes.plot(size, before, "s", color=KINDS["GQA"], label="original, 3 kv heads", **look)
merged = cells["smollm2/1 kv head, aligned"]
axes.plot(
    merged["kv_bytes_per_token"], merged["perplexity"], "^", color=KINDS["MQA"], label="1 kv head, aligned, at once"
)
axes.set(xlabel="cache bytes per token, fp32", ylabel="perplexity", title="SmolLM2-135M with latent attention")
axes.set_yscale("log")
axes.set_yticks([15, 20, 30, 50, 100], ["15", "20", "30", "50", "100"])
axes.minorticks_off()
axes.set_xlim(0, 80_000)
axes.xaxis.set_major_formatter(lambda held, _: f"{held:,.0f}")
axes.grid(alpha=0.3)
axes.legend()
plt.show()
print(f"in the bytes of one kv head: latent {ranks[96, 32][1]}, merged head {merged['perplexity']:.1f}")

# %% [markdown]
# With all of its pairs, 193 + 192 numbers have the original's perplexity. They take 46,200 bytes per token, and the
# original 46,080. At three quarters of the bytes the perplexity rises from 15.24 to 16.28. At half of them it is 24.07,
# and 15.23 after 30 minutes of distillation: the original's, on a text of the kind that it was distilled on. In the
# bytes of one kv head a latent keeps more than a merged head does.
#
# For a model of your own, from the shell (the results open in transformers as they are):
#
# ```bash
# attnpack convert path/to/model converted --kv-heads 1 --method aligned
# attnpack uptrain converted --text corpus.txt --minutes 30
#
# attnpack convert path/to/model latent --kv-lora-rank 128 --rope-dim 64
# attnpack uptrain latent --teacher path/to/model --text corpus.txt --minutes 30
# ```

# %% [markdown]
# ## Summary
#
# (Words in quotes are those of the output that shows a comparison.)
#
# - Heads of a group become one: their mean, the first, a new one, or the mean after alignment.
# - Equal heads lose nothing ("heads 0 to 3 equal, 4 to 7 equal; converted to 2 kv heads"); different heads lose much
#   at once.
# - A short training brings a part of it back, and more where more heads remain ("of the rise came back").
# - Aligning heads before the mean costs no training, and loses far less ("1 kv head by aligned").
# - A whole model can get latent attention. Where nothing is cut, its loss is the same ("latent 96 + rotated key 48").
#   In the bytes of one kv head it loses less than a merged head ("in the bytes of one kv head").
#
# ## Exercises
#
# 1. Convert eight heads of which 0 and 4, 1 and 5, 2 and 6, 3 and 7 are equal to four, without loss.
# 2. Why does a rotation of a key head and of its queries change nothing?
# 3. *Implement* the conversion by the mean: a `GroupedQueryAttention` of `groups` key-value heads from a
#    `MultiHeadAttention` (both causal, without biases). The cell below checks it.


# %%
def make(layer, groups):
    """Yours: the groups' heads are the means of consecutive heads of k_proj and v_proj."""


print(course.check_to_groups(make))

# %% [markdown]
# The next cell has solutions. It is folded; try first.

# %% tags=["hide-cell"] jupyter={"source_hidden": true, "outputs_hidden": true}
# Solutions. Try first.
layer = attnpack.MultiHeadAttention(64, 8, causal=True)
with torch.no_grad():
    for projection in (layer.k_proj, layer.v_proj):
        projection.weight.view(2, 4, 8, 64)[1] = projection.weight.view(2, 4, 8, 64)[0]
    converted = convert.to_gqa(layer, 4, groups=[[0, 4], [1, 5], [2, 6], [3, 7]])
    x = torch.randn(1, 9, 64)
    print(f"1. largest change {(converted(x) - layer(x)).abs().max():.1e}")
    torch.testing.assert_close(converted(x), layer(x), atol=1e-5, rtol=1e-4)
q, k = torch.randn(2, 1, 1, 6, 8).unbind(0)
turn = torch.linalg.qr(torch.randn(8, 8)).Q
print(f"2. scores differ by {(q @ k.mT - (q @ turn) @ (k @ turn).mT).abs().max():.1e}: (q R)(k R)^T = q R R^T k^T")


def make(layer, groups):
    made = attnpack.GroupedQueryAttention(layer.embed_dim, layer.num_heads, groups, causal=True)
    weights = layer.state_dict()
    for name in ("k_proj.weight", "v_proj.weight"):
        heads = weights[name].unflatten(0, (groups, -1, layer.head_dim))  # [G, H / G, D, E]
        weights[name] = heads.mean(1).flatten(0, 1)
    made.load_state_dict(weights)
    return made


print("3.", course.check_to_groups(make))
assert course.check_to_groups(make) == "right"

# %% [markdown]
# Next: [errata](errata.ipynb).
