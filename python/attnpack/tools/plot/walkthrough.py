"""One sentence on its way through attention, drawn as SVG with a model's own numbers.

The four drawings follow each other: words to vectors, vectors to queries, keys and values, one query to its output, and
the heads of a layer to the layer's output. `row` is the token that reads. A vector is drawn by its first numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .colours import GROUPS, INK, KEY, NEW, PLAIN, QUERY, VALUE, WEIGHT
from .schematic import ARROW, Drawing
from .svg import box, line, strip, text

MARGIN, COLUMN = 168, 92  # for the names of the rows; for one token
SHOWN = 8  # numbers of a vector
FAINT = 0.03  # a weight below has no line


def embedding(words: Sequence[str], ids: Sequence[int], vectors: Tensor, *, shown: int = 4) -> Drawing:
    """Words, the numbers of their tokens, and the first numbers of each token's vector; `vectors` is [L, E]."""
    parts = [
        text(MARGIN - 12, 31, "tokens", right=True),
        text(MARGIN - 12, 75, "their numbers", right=True),
        text(MARGIN - 12, 118, "their vectors:", right=True),
        text(MARGIN - 12, 136, f"{vectors.shape[1]} numbers each", right=True),
    ]
    for i, (word, token, vector) in enumerate(zip(words, ids, vectors.tolist(), strict=True)):
        x = MARGIN + i * COLUMN
        middle = x + COLUMN / 2
        parts += [box(x + 6, 12, COLUMN - 12, 28, _shown(word), NEW), line(middle, 40, middle, 58, arrow=True)]
        parts += [text(middle, 74, str(token)), line(middle, 80, middle, 98, arrow=True)]
        parts += [box(x + 16, 100 + 22 * j, COLUMN - 32, 22, f"{vector[j] + 0.0:+.2f}", PLAIN) for j in range(shown)]
        parts.append(text(middle, 100 + 22 * shown + 12, "..."))
    return Drawing(MARGIN + len(words) * COLUMN + 6, 122 + 22 * shown, (ARROW, *parts))


def projections(words: Sequence[str], x: Tensor, q: Tensor, k: Tensor, v: Tensor, row: int) -> Drawing:
    """The vectors x [L, E], and each token's query, key and value [L, D] in one head. The query of `row` reads the keys
    and values up to it; what it does not read is faint."""
    rows = (("vector x", x, PLAIN, 40), ("query W_q x: looks for", q, QUERY, 92), ("key W_k x: offers", k, KEY, 124))
    rows += (("value W_v x: gives", v, VALUE, 156),)
    parts = [text(MARGIN - 12, y + 12, name, right=True) for name, _, _, y in rows]
    for i, word in enumerate(words):
        left = MARGIN + i * COLUMN
        middle = left + COLUMN / 2
        trunk, colour = middle - 41, "#dddddd" if i > row else INK  # from x to each of its three products
        parts += [text(middle, 24, _shown(word), bold=i == row), line(trunk, 48, middle - 36, 48, colour)]
        parts += [line(trunk, 48, trunk, 164, colour)]
        parts += [line(trunk, y, middle - 36, y, colour) for y in (100, 132, 164)]
        for name, vectors, colour, y in rows:
            faint = i > row or (name.startswith("query") and i != row)
            parts.append(strip(middle - 36, y, vectors[i, :SHOWN].tolist(), colour, faint=faint))
    left = MARGIN + row * COLUMN
    parts.append(f'<rect x="{left}" y="6" width="{COLUMN - 4}" height="174" fill="none" stroke="{GROUPS[0]}" rx="6"/>')
    return Drawing(MARGIN + len(words) * COLUMN + 6, 190, (ARROW, *parts))


def one_query(
    words: Sequence[str], query: Tensor, keys: Tensor, values: Tensor, scores: Tensor, weights: Tensor
) -> Drawing:
    """One query [D] over the keys and values [K, D] that it may read, with its scores and weights [K]."""
    count = len(keys)
    names = (("keys", 92), ("score: q . k / sqrt(d)", 128), ("e to the score", 154), ("weight", 202), ("values", 246))
    parts = [text(MARGIN - 12, y, name, right=True) for name, y in names]
    middle_of_all, end = MARGIN + count * COLUMN / 2, 318
    parts += [
        text(MARGIN - 12, 28, f"query of {_shown(words[count - 1])}", right=True, bold=True),
        strip(middle_of_all - 36, 16, query[:SHOWN].tolist(), QUERY),
        text(MARGIN - 12, end + 14, "output: their weighted sum", right=True),
        strip(middle_of_all - 36, end, (weights @ values)[:SHOWN].tolist(), VALUE),
    ]
    for i in range(count):
        middle, weight = MARGIN + (i + 0.5) * COLUMN, weights[i].item()
        parts += [
            line(middle_of_all, 32, middle, 60, QUERY),
            text(middle, 74, _shown(words[i]), bold=True),
            strip(middle - 36, 80, keys[i, :SHOWN].tolist(), KEY),
            text(middle, 128, f"{scores[i].item():.2f}"),
            text(middle, 154, f"{scores[i].exp().item():.2f}"),
            box(middle - 15, 206 - 40 * weight, 30, 40 * weight + 1, "", WEIGHT),
            text(middle + 20, 204, f"{weight:.2f}", left=True),
            strip(middle - 36, 234, values[i, :SHOWN].tolist(), VALUE),
        ]
        if weight >= FAINT:
            parts.append(line(middle, 252, middle_of_all, end - 2, GROUPS[2], width=8 * weight))
    return Drawing(MARGIN + count * COLUMN + 40, end + 28, tuple(parts))


def heads(words: Sequence[str], weights: Tensor, outputs: Tensor) -> Drawing:
    """The heads of one token: their weights [H, K] over the words, and each head's output [H, D]. The outputs
    stand side by side, and the output projection makes one vector of them."""
    num_heads, count = weights.shape
    step = 78
    width = max(MARGIN + num_heads * step, MARGIN + count * COLUMN) + 6
    start = MARGIN + (width - MARGIN - count * COLUMN) / 2
    parts = [
        text(MARGIN - 12, 30, "tokens that are read", right=True),
        text(MARGIN - 12, 166, f"heads of {_shown(words[count - 1])}", right=True),
        text(MARGIN - 12, 206, "their outputs", right=True),
        text(MARGIN - 12, 258, "joined, and projected", right=True),
    ]
    parts += [
        box(start + i * COLUMN + 8, 12, COLUMN - 16, 28, _shown(word), NEW) for i, word in enumerate(words[:count])
    ]
    for h in range(num_heads):
        middle, colour = MARGIN + (h + 0.5) * step, GROUPS[h % len(GROUPS)]
        for i in range(count):
            if (weight := weights[h, i].item()) >= FAINT:
                parts.append(line(middle, 148, start + (i + 0.5) * COLUMN, 42, colour, width=7 * weight))
        parts += [
            box(middle - 30, 148, 60, 26, f"head {h}", WEIGHT),
            strip(middle - 32, 192, outputs[h, :SHOWN].tolist(), VALUE, cell=8),
            line(middle, 208, MARGIN + num_heads * step / 2, 240, "#999999", width=1),
        ]
    middle = MARGIN + num_heads * step / 2
    parts.append(box(middle - 70, 240, 140, 28, "o_proj: one new vector", PLAIN))
    return Drawing(int(width), 282, tuple(parts))


def _shown(word: str) -> str:
    return word.strip() or repr(word)
