"""The pictures of the course's cards: one idea of each notebook, with words that can be read at the size of a card."""

import math
from collections.abc import Callable

from attnpack.tools.plot import schematic
from attnpack.tools.plot.colours import BLUE, GREEN, INK, KEY, LATENT, NEW, ORANGE, PLAIN, QUERY, WEIGHT
from attnpack.tools.plot.schematic import ARROW, Drawing
from attnpack.tools.plot.svg import box, circle, dot, line, path, text

WIDTH, HEIGHT = 320, 190  # pixels; cards are a little wider
GREY = "#666666"


def _card(*parts: str) -> Drawing:
    return Drawing(WIDTH, HEIGHT, (ARROW, *parts))


def attention_from_scratch() -> Drawing:
    words, widths = ("The", "cat", "sat", "because", "it"), (1.5, 12, 1.2, 0.8, 2)
    parts = [text(160, 180, 'which words does "it" read, and how much?', GREY)]
    for i, (word, width) in enumerate(zip(words, widths, strict=True)):
        x = 4 + 63 * i
        parts += [line(x + 30, 46, 160, 120, GREEN if width > 5 else BLUE, width=width)]
        parts += [box(x, 20, 60, 26, word, NEW)]
    return _card(*parts, box(130, 120, 60, 26, "it", QUERY))


def kv_cache() -> Drawing:
    parts = []
    for row in range(4):
        y, old = 12 + 34 * row, 0 if row == 0 else 2 + row
        parts.append(text(64, y + 18, "prompt" if row == 0 else f"token {3 + row}", right=True))
        parts += [box(72 + 39 * i, y, 36, 26, f"k v {i + 1}", KEY if i < old else NEW) for i in range(3 + row)]
    parts += [box(30, 158, 18, 18, "", KEY), text(54, 172, "read from the cache", left=True)]
    return _card(*parts, box(196, 158, 18, 18, "", NEW), text(220, 172, "computed", left=True))


def positions() -> Drawing:
    parts = [text(160, 180, "a position turns each pair by its own angle", GREY)]
    for row, (step, colour) in enumerate(((0.75, BLUE), (0.19, ORANGE))):
        for place in range(5):
            x, y, angle = 40 + 60 * place, 48 + 66 * row, step * place - math.pi / 2
            parts.append(f'<circle cx="{x}" cy="{y}" r="24" fill="{PLAIN}" stroke="{INK}"/>')
            end = x + 19 * math.cos(angle), y + 19 * math.sin(angle)
            parts += [line(x, y, *end, colour, width=2.4), dot(*end, colour)]
            parts += [text(x, 18, f"{place}")] if row == 0 else []
    return _card(*parts)


def multi_query_attention() -> Drawing:
    heads = [schematic.grouping(range(5), title="multi-head"), schematic.grouping([0] * 5, title="multi-query")]
    return schematic.beside(heads)


def grouped_query_attention() -> Drawing:
    return schematic.grouping([0, 0, 0, 0, 0, 1, 1, 2], title="three groups")


def latent_attention() -> Drawing:
    return schematic.latent(8, note="cached: 1 latent, 1 rotated key")


def encoder_decoder() -> Drawing:
    source, target, parts = "water", "retaw", []
    for i in range(5):
        x, read = 110 + 42 * i, 110 + 42 * (4 - i)
        parts.append(line(x + 16, 122, read + 16, 60, BLUE, width=3))
    for i in range(5):
        x = 110 + 42 * i
        parts += [box(x, 30, 32, 30, source[i], KEY), box(x, 122, 32, 30, target[i], QUERY)]
    parts += [text(98, 50, "encoder reads", right=True), text(98, 142, "decoder writes", right=True)]
    return _card(*parts, text(98, 96, "cross-attention", BLUE, right=True))


def newest_variants() -> Drawing:
    """Four of them: a gate, differences, sparse keys, keys as values."""
    parts = [line(160, 12, 160, 178, "#cccccc"), line(8, 95, 312, 95, "#cccccc")]
    parts += [box(18, 26, 72, 26, "attention", WEIGHT), circle(122, 39, "×"), line(90, 39, 110, 39)]
    parts += [line(122, 66, 122, 51, arrow=True), text(80, 84, "a gate")]
    for x, heights, colour in ((178, (8, 34, 12, 6), WEIGHT), (252, (7, 6, 11, 5), "#dddddd")):
        parts += [box(x + 13 * i, 60 - height, 10, height, "", colour) for i, height in enumerate(heights)]
    parts += [text(240, 48, "−", size=20), text(240, 84, "difference of softmaxes", size=11)]
    parts += [box(14 + 17 * i, 118, 14, 24, "", KEY if i in (1, 4, 6) else "white") for i in range(8)]
    parts += [text(80, 170, "few keys of many")]
    parts += [box(214, 104, 52, 24, "W x", KEY), line(232, 128, 210, 140), line(248, 128, 270, 140)]
    parts += [text(204, 153, "rotated: k", size=11), text(274, 153, "as it is: v", size=11)]
    return _card(*parts, text(240, 176, "one projection"))


def linear_attention() -> Drawing:
    parts = [text(80, 20, "softmax", bold=True), text(240, 20, "linear", bold=True), line(160, 8, 160, 182, "#cccccc")]
    for row in range(4):
        y = 34 + 30 * row
        parts += [box(14 + 19 * i, y, 16, 22, "", KEY if i < 3 + row else NEW) for i in range(4 + row)]
        parts += [box(196, y, 16, 22, "", NEW), line(216, y + 11, 232, y + 11, arrow=True)]
        parts.append(box(236, y, 44, 22, "state", LATENT))
        parts += [line(258, y + 22, 258, y + 30)] if row < 3 else []
    return _card(*parts, text(80, 176, "the cache grows"), text(240, 176, "the state does not"))


def performance() -> Drawing:
    parts = [line(40, 160, 306, 160, arrow=True), line(40, 160, 40, 14, arrow=True)]
    parts.append(path("M 44 150 L 168 44 L 300 44", width=2.4))
    parts += [dot(84, 122, ORANGE), text(94, 130, "decoding", ORANGE, left=True)]
    parts += [dot(248, 56, BLUE), text(248, 76, "prefill", BLUE)]
    parts += [text(92, 88, "memory", GREY), text(234, 34, "arithmetic", GREY)]
    return _card(*parts, text(173, 178, "operations per byte"), text(46, 18, "speed", left=True))


def conversion_and_uptraining() -> Drawing:
    parts = [line(23 + 28 * i, 44, 65, 84, ORANGE) for i in range(4)]
    parts += [box(12 + 28 * i, 20, 23, 24, f"{i}", KEY) for i in range(4)]
    parts += [box(42, 84, 46, 26, "merged", KEY), text(65, 136, "4 key-value heads"), text(65, 152, "become one")]
    parts += [line(158, 160, 312, 160, arrow=True), line(158, 160, 158, 14, arrow=True)]
    parts += [path("M 160 130 H 196", GREEN, width=2.4), path("M 196 130 V 36", ORANGE, width=2.4)]
    parts += [path("M 196 36 C 206 104 234 122 304 124", BLUE, width=2.4), text(164, 18, "loss", left=True)]
    parts.append(text(235, 178, "training"))
    return _card(
        *parts, text(204, 40, "converted", ORANGE, left=True), text(232, 106, "trained again", BLUE, left=True)
    )


def errata() -> Drawing:
    parts = [text(160, 26, "runs, and is wrong", ORANGE, bold=True), text(160, 112, "right", GREEN, bold=True)]
    code = '<text x="160" y="{}" font-family="monospace" font-size="13" text-anchor="middle" fill="{}">{}</text>'
    parts += [f'<rect x="14" y="36" width="292" height="34" rx="4" fill="#fbeae0" stroke="{ORANGE}"/>']
    parts += [f'<rect x="14" y="122" width="292" height="34" rx="4" fill="#e2f3ed" stroke="{GREEN}"/>']
    parts += [code.format(58, INK, "q.view(B, H, L, D)"), line(76, 54, 244, 54, ORANGE)]
    return _card(*parts, code.format(144, INK, "q.view(B, L, H, D).transpose(1, 2)"))


CARDS: dict[str, Callable[[], Drawing]] = {
    each.__name__: each
    for each in (
        attention_from_scratch, kv_cache, positions, multi_query_attention, grouped_query_attention, latent_attention,
        encoder_decoder, newest_variants, linear_attention, performance, conversion_and_uptraining, errata,
    )
}  # fmt: skip
