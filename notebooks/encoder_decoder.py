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
# # Encoder and decoder: reading one sequence, writing another
#
# *You need* [attention_from_scratch](attention_from_scratch.ipynb) and [kv_cache](kv_cache.ipynb). *You learn* how
# cross-attention joins an encoder and a decoder, what it looks at in a trained model, how such a model writes with two
# caches, and where shared key-value heads pay. *Runs in* about a minute.
#
# Sources: [Vaswani et al. 2017](https://arxiv.org/abs/1706.03762) (the architecture),
# [Ainslie et al. 2023](https://arxiv.org/abs/2305.13245) (grouped heads only in the decoder).
# The glossary has the [symbols](../docs/notebooks.md#glossary-of-symbols) and the
# [words](../docs/notebooks.md#glossary-of-words).
# `examples/cpp/encoder_decoder` does the same in C++.
#
# An **encoder** reads the whole source at once: no mask, every token sees every other. A **decoder** writes the target
# from left to right: its self-attention is causal. Between them stands **cross-attention**: queries from the target,
# keys and values from the encoder's output. This is a decoder block with it:

# %%
from functools import partial

import attnpack
import matplotlib.pyplot as plt
import torch
from attnpack.tools import bench, course
from attnpack.tools.course import time_in_turn
from attnpack.tools.plot import attention as plot_attention
from attnpack.tools.plot import schematic
from attnpack.tools.plot.colours import BLUE, ORANGE
from torch import nn
from torch.nn import functional

torch.manual_seed(0)
schematic.block(cross=True)

# %% [markdown]
# ## A task with a known answer
#
# The source is a word of eight random letters. The target is the same word written backwards. The letters written so
# far say nothing about the next one: the decoder must fetch each letter from the source. So if one head does this work,
# we know in advance where it has to look.

# %%
letters, begin, length, width, heads, layers = 10, 10, 8, 64, 4, 2


def attention(causal):
    return attnpack.MultiHeadAttention(width, heads, causal=causal, rope=attnpack.RotaryEmbedding(width // heads))


def feed_forward():
    return attnpack.FeedForward(width, 2 * width)


class Reverser(nn.Module):
    """Two encoder blocks, two decoder blocks, and a layer that turns states into letters."""

    def __init__(self):
        super().__init__()
        readers = [attnpack.EncoderBlock(attention(False), feed_forward()) for _ in range(layers)]
        writers = [
            attnpack.DecoderBlock(
                attention(True), feed_forward(), cross_attention=attnpack.MultiHeadAttention(width, heads)
            )
            for _ in range(layers)
        ]
        self.stacks = attnpack.EncoderDecoder(
            attnpack.Encoder(readers, embed_tokens=nn.Embedding(letters + 1, width)),
            attnpack.Decoder(writers, embed_tokens=nn.Embedding(letters + 1, width)),
        )
        self.head = nn.Linear(width, letters + 1)

    def forward(self, source, target, **inputs):
        return self.head(self.stacks(source, target, **inputs))


def draw(batch):
    """Sources [batch, 8], targets, and what the decoder is given: the target, one place later."""
    source = torch.randint(letters, (batch, length))
    target = source.flip(1)
    return source, target, torch.cat([torch.full((batch, 1), begin), target[:, :-1]], 1)


threads = torch.get_num_threads()
torch.set_num_threads(1)  # a model this small loses more to a second thread's start than it gains
model, steps = Reverser(), 500
optimiser = torch.optim.Adam(model.parameters(), lr=4e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.001, steps)
for step in range(steps + 1):
    source, target, given = draw(64)
    loss = functional.cross_entropy(model(source, given).flatten(0, 1), target.flatten())
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    schedule.step()
_ = model.eval()

# %% [markdown]
# ## Writing with two caches
#
# The decoder writes one letter at a time. Its own keys and values grow in a `DynamicCache`, as in a language model. The
# keys and values of the source do not grow: the first call fills a `CrossCache`, and later calls read it. From then on
# the encoder does not run.


# %%
@torch.no_grad()
def write(source):
    """The likeliest target of each source, letter by letter, [batch, 8], and the two caches."""
    cache = attnpack.ModelCache(layers)
    cross = attnpack.ModelCache([attnpack.CrossCache() for _ in range(layers)])
    token, written = torch.full((len(source), 1), begin), []
    for step in range(length):
        held = source if step == 0 else None  # from the second letter on, nobody needs the source itself
        token = model(held, token, cache=cache, cross_cache=cross).argmax(-1)
        written.append(token)
    return torch.cat(written, 1), cache, cross


source, target, given = draw(1000)
written, cache, cross = write(source)
right = (written == target).float().mean().item()
print("source: ", source[0].tolist())
print("written:", written[0].tolist())
print(f"letters that are right, of 1000 new words: {right:.2%}")
print(f"positions held: {len(cache)} of the target, {len(cross)} of the source")
with torch.no_grad():
    at_once = model(source, given).argmax(-1)
print("the same letters as in one pass over the given target:", f"{(at_once == written).float().mean():.2%}")
assert right > 0.99

# %% [markdown]
# ## The letters that cross-attention reads
#
# To write letter i of the target, the decoder needs letter 7 - i of the source: the anti-diagonal.

# %%
seen = []


def want_weights(module, args, kwargs):
    return args, {**kwargs, "need_weights": True}


def keep_weights(module, args, result):
    seen.append(result[1])
    return result[0]


hooks = []
for block in model.stacks.decoder.layers:
    hooks.append(block.cross_attn.register_forward_pre_hook(want_weights, with_kwargs=True))
    hooks.append(block.cross_attn.register_forward_hook(keep_weights))
with torch.no_grad():
    model(source, given)
for hook in hooks:
    hook.remove()
weights = torch.stack(seen).mean(1)  # [layers, heads, 8, 8], mean over the words
share = weights.flip(-1).diagonal(dim1=-2, dim2=-1).mean(-1)  # [layers, heads]

# %% tags=["hide-input"] jupyter={"source_hidden": true}
figure, panels = plt.subplots(
    layers, heads, figsize=(8.5, 4.8), dpi=110, layout="constrained", sharex=True, sharey=True
)
for layer, row in enumerate(panels):
    for head, panel in enumerate(row):
        title = f"layer {layer}, head {head}: {share[layer, head]:.0%}"
        image = plot_attention.draw_weights(panel, weights[layer, head], title=title)
figure.suptitle("Cross-attention, mean over 1000 words; share of weight on the anti-diagonal")
figure.supxlabel("source letter (key)", fontsize=9)
figure.supylabel("target letter (query)", fontsize=9)
figure.colorbar(image, ax=panels, label="weight")
plt.show()
best = divmod(int(share.argmax()), heads)
print(f"clearest: layer {best[0]}, head {best[1]}, {share.max():.0%} of its weight (chance would be {1 / length:.0%})")
assert share.max() > 0.5

# %% [markdown]
# Nobody told the model where to look; the loss did. Now take the source away: with a context of zeros the decoder
# guesses one letter in ten.

# %%
with torch.no_grad():
    context = model.stacks.encoder(source)
    blind = model.head(model.stacks.decoder(given, torch.zeros_like(context))).argmax(-1)
print(f"right with an empty context: {(blind == target).float().mean():.0%}")
assert (blind == target).float().mean() < 0.3

# %% [markdown]
# ## Sources of several lengths
#
# `source_lens` says how many letters of each source are real. Letters after that have no influence, whatever they are:

# %%
with torch.no_grad():
    lens = torch.tensor([8, 5])
    noise = source[:2].clone()
    noise[1, 5:] = torch.randint(letters, (3,))
    a, b = (model(each, given[:2], source_lens=lens) for each in (source[:2], noise))
    print("other padding, same logits:", torch.equal(a, b))
    torch.testing.assert_close(a[1:], model(source[1:2, :5], given[1:2]), atol=1e-4, rtol=1e-4)
    assert torch.equal(a, b)
torch.set_num_threads(threads)

# %% [markdown]
# ## Where shared key-value heads pay, and where not
#
# Grouped-query attention keeps fewer key-value heads, so that less must be *read*. A decoder that writes one token
# reads the whole cache for it: reading limits its speed. An encoder computes all rows at once: each key that it reads
# serves every row, and arithmetic limits its speed. So sharing should help the first and not the second. That is why
# Ainslie et al. leave encoders as they are. Measured on 8 query heads of 64:

# %% tags=["hide-input"] jupyter={"source_hidden": true}
torch.set_num_threads(1)
inputs = {}
for groups in (8, 2, 1):
    inputs["encode 512 tokens", groups] = torch.randn(1, 8, 512, 64), torch.randn(2, 1, groups, 512, 64)
    inputs["decode over 16,384 keys", groups] = torch.randn(1, 8, 1, 64), torch.randn(2, 1, groups, 16384, 64)
calls = {name: partial(attnpack.attention, q, k, v) for name, (q, (k, v)) in inputs.items()}
with torch.no_grad():
    took = time_in_turn(calls, 60)
conditions = bench.conditions()
torch.set_num_threads(threads)
figure, panels = plt.subplots(1, 2, figsize=(9, 2.6), dpi=110, layout="constrained")
for panel, work, colour in zip(panels, dict.fromkeys(work for work, _ in took), (ORANGE, BLUE), strict=True):
    times = {str(groups): took[work, groups] for groups in (8, 2, 1)}
    bars = panel.barh(list(times), list(times.values()), color=colour)
    panel.bar_label(bars, fmt="%.2f", padding=3)
    panel.set(xlabel="time of attention (ms)", title=work, ylabel="key-value heads")
    panel.margins(x=0.15)
    panel.invert_yaxis()
plt.show()
gain = {work: took[work, 8] / took[work, 1] for work, _ in took}
for work, ratio in gain.items():
    print(f"{work}: one key-value head instead of 8 is {ratio:.1f} times as fast")
print(f"on {conditions}")
assert gain["decode over 16,384 keys"] > 1.5 * gain["encode 512 tokens"]

# %% [markdown]
# ## Summary
#
# (Words in quotes are those of the output that shows a comparison.)
#
# - Cross-attention is attention with keys and values of another sequence. It needs no causal mask.
# - A model that must copy learns to look where the copy is: the weights show an anti-diagonal.
# - While it writes, the target's cache grows and the source's stays.
# - Sharing key-value heads pays where reading limits: while writing, not while encoding ("one key-value head instead
#   of 8 is").
#
# ## Exercises
#
# 1. Shuffle the letters of a source, and shuffle the encoder's output in the same way instead. Does the decoder see the
#    same? (Think of positions.)
# 2. Give the decoder one wrong letter. Which of its later answers change?
# 3. *Implement* cross-attention over padded sources: q is `[B, H, L, D]`, k and v are `[B, H, K, D]`, and only the
#    first `lens[b]` keys of sequence b are real. The cell below checks it.


# %%
def attend(query, key, value, lens):
    """Yours: [B, H, L, D]; lens is an int64 tensor [B]."""


print(course.check_padded_source(attend))

# %% [markdown]
# The next cell has solutions. It is folded; try first.

# %% tags=["hide-cell"] jupyter={"source_hidden": true, "outputs_hidden": true}
# Solutions. Try first.
with torch.no_grad():
    order = torch.tensor([3, 1, 0, 2, 7, 6, 5, 4])
    context = model.stacks.encoder(source[:1])
    moved = model.stacks.decoder(given[:1], context[:, order]) - model.stacks.decoder(given[:1], context)
    other = model.stacks.decoder(given[:1], model.stacks.encoder(source[:1, order])) - model.stacks.decoder(
        given[:1], context
    )
    print(f"1. shuffled output: {moved.abs().max():.0e}, shuffled letters: {other.abs().max():.0e}: cross-attention is")
    print("   blind to order, the encoder is not: RoPE told it where each letter stands")
    wrong = given[:1].clone()
    wrong[0, 3] = (wrong[0, 3] + 1) % letters
    differ = (model(source[:1], wrong) - model(source[:1], given[:1])).abs().amax(-1)[0] > 0
    print("2. logits that change:", differ.nonzero().flatten().tolist(), "- those from the wrong letter on")
    assert differ.tolist() == [i >= 3 for i in range(length)]
    assert moved.abs().max() < 1e-4 < other.abs().max()


def attend(query, key, value, lens):
    real = torch.arange(key.shape[2]) < lens.view(-1, 1, 1, 1)  # [B, 1, 1, K]
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    return scores.masked_fill(~real, float("-inf")).softmax(dim=-1) @ value


print("3.", course.check_padded_source(attend))
assert course.check_padded_source(attend) == "right"

# %% [markdown]
# Next: [newest_variants](newest_variants.ipynb).
