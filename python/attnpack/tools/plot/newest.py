"""Schematics of newer kinds of attention, from left to right: what is made of a token's vector x, and what is cached
(yellow frames)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .colours import AMBER, KEY, LATENT, PLAIN, QUERY, VALUE, WEIGHT
from .schematic import ARROW, Drawing
from .svg import box, line, text

Node = tuple[float, float, str, str]
"""The left edge and the middle of a box, its label and its colour."""
_HEIGHT = 26
_FRAME = 6  # pixels from a box to the outside of its frame
_APART = 8  # pixels between arrows that arrive at one box


def flow(nodes: Mapping[str, Node], arrows: Sequence[tuple[str, str]], *, cached: Sequence[str] = ()) -> Drawing:
    """Boxes, and arrows from the right side of one to the left side of another. `cached` ones have a frame."""
    widths = {name: 16 + 6.4 * len(label) for name, (_, _, label, _) in nodes.items()}
    frames = {name: _FRAME if name in cached else 0 for name in nodes}
    parts = [
        line(
            nodes[a][0] + widths[a] + frames[a],
            nodes[a][1],
            nodes[b][0] - 1 - frames[b],
            _arrival(nodes, arrows, a, b),
            "#777777",
            arrow=True,
        )
        for a, b in arrows
    ]
    for name, (x, y, label, colour) in nodes.items():
        if name in cached:
            parts.append(
                f'<rect x="{x - 4}" y="{y - _HEIGHT / 2 - 4}" width="{widths[name] + 8}" height="{_HEIGHT + 8}" rx="5" '
                f'fill="none" stroke="{AMBER}" stroke-width="3"/>'
            )
        parts.append(box(x, y - _HEIGHT / 2, widths[name], _HEIGHT, label, colour))
    right = max(nodes[name][0] + widths[name] for name in nodes)
    bottom = max(y for _, y, _, _ in nodes.values()) + _HEIGHT / 2
    if cached:
        parts += [
            f'<rect x="10" y="{bottom + 12}" width="16" height="12" rx="3" fill="none" stroke="{AMBER}" '
            'stroke-width="3"/>',
            text(32, bottom + 22, "cached", left=True),
        ]
    return Drawing(int(right) + 12, int(bottom) + (34 if cached else 12), (ARROW, *parts))


def _arrival(nodes: Mapping[str, Node], arrows: Sequence[tuple[str, str]], a: str, b: str) -> float:
    """The height at which the arrow from a arrives at b: those to one box stand apart, in the order of their
    beginnings."""
    beginnings = sorted((nodes[name] for name, end in arrows if end == b), key=lambda node: node[1])
    return nodes[b][1] + _APART * (beginnings.index(nodes[a]) - (len(beginnings) - 1) / 2)


def gate() -> Drawing:
    """A gate between attention and the output projection."""
    nodes = {
        "x": (10, 70, "x", PLAIN),
        "q": (90, 24, "q", QUERY),
        "k": (90, 70, "k", KEY),
        "v": (90, 116, "v", VALUE),
        "attention": (170, 70, "attention", WEIGHT),
        "gate": (90, 162, "gate: sigmoid(W_g x)", PLAIN),
        "times": (350, 70, "times", PLAIN),
        "out": (430, 70, "o_proj", PLAIN),
    }
    arrows = [("x", "q"), ("x", "k"), ("x", "v"), ("q", "attention"), ("k", "attention"), ("v", "attention")]
    arrows += [("attention", "times"), ("x", "gate"), ("gate", "times"), ("times", "out")]
    return flow(nodes, arrows, cached=["k", "v"])


def keys_as_values() -> Drawing:
    """One projection gives a key and a value: the value is the key before its rotation."""
    nodes = {
        "x": (10, 70, "x", PLAIN),
        "q": (90, 24, "W_q x", QUERY),
        "kv": (90, 92, "W_k x", KEY),
        "turned q": (190, 24, "rotated: q", QUERY),
        "k": (190, 70, "rotated: k", KEY),
        "v": (190, 116, "as it is: v", VALUE),
        "attention": (330, 70, "attention", WEIGHT),
        "out": (440, 70, "o_proj", PLAIN),
    }
    arrows = [("x", "q"), ("x", "kv"), ("q", "turned q"), ("kv", "k"), ("kv", "v"), ("turned q", "attention")]
    arrows += [("k", "attention"), ("v", "attention"), ("attention", "out")]
    return flow(nodes, arrows, cached=["k", "v"])


def shared_keys() -> Drawing:
    """A layer that reads the keys and values of the layer below."""
    nodes = {
        "x1": (10, 116, "x of layer 1", PLAIN),
        "q1": (150, 162, "q", QUERY),
        "k": (150, 70, "k", KEY),
        "v": (150, 116, "v", VALUE),
        "attention 1": (260, 130, "attention of layer 1", WEIGHT),
        "x2": (10, 24, "x of layer 2", PLAIN),
        "q2": (150, 24, "q", QUERY),
        "attention 2": (260, 44, "attention of layer 2", WEIGHT),
    }
    arrows = [("x1", "q1"), ("x1", "k"), ("x1", "v"), ("q1", "attention 1"), ("k", "attention 1")]
    arrows += [("v", "attention 1"), ("x2", "q2"), ("q2", "attention 2"), ("k", "attention 2"), ("v", "attention 2")]
    return flow(nodes, arrows, cached=["k", "v"])


def low_rank_queries() -> Drawing:
    """Queries from a short latent, and one key-value head."""
    nodes = {
        "x": (10, 70, "x", PLAIN),
        "latent": (80, 24, "W_a x: short", LATENT),
        "norm": (210, 24, "norm", PLAIN),
        "q": (290, 24, "W_b: q of all heads", QUERY),
        "k": (330, 70, "k of one head", KEY),
        "v": (330, 116, "v of one head", VALUE),
        "attention": (480, 70, "attention", WEIGHT),
        "out": (590, 70, "o_proj", PLAIN),
    }
    arrows = [("x", "latent"), ("latent", "norm"), ("norm", "q"), ("x", "k"), ("x", "v"), ("q", "attention")]
    arrows += [("k", "attention"), ("v", "attention"), ("attention", "out")]
    return flow(nodes, arrows, cached=["k", "v"])


def differential() -> Drawing:
    """Two softmaxes over the same values, one subtracted from the other."""
    nodes = {
        "x": (10, 93, "x", PLAIN),
        "q1": (80, 24, "q1", QUERY),
        "q2": (80, 116, "q2", QUERY),
        "k": (80, 70, "k", KEY),
        "v": (80, 162, "v", VALUE),
        "w1": (170, 40, "softmax(q1 k)", WEIGHT),
        "w2": (170, 100, "softmax(q2 k)", WEIGHT),
        "minus": (310, 70, "first - factor * second", WEIGHT),
        "values": (500, 93, "times v", VALUE),
        "out": (600, 93, "o_proj", PLAIN),
    }
    arrows = [("x", "q1"), ("x", "q2"), ("x", "k"), ("x", "v"), ("q1", "w1"), ("k", "w1"), ("q2", "w2"), ("k", "w2")]
    arrows += [("w1", "minus"), ("w2", "minus"), ("minus", "values"), ("v", "values"), ("values", "out")]
    return flow(nodes, arrows, cached=["k", "v"])


def indexer() -> Drawing:
    """A selector with small heads names the keys that attention reads."""
    nodes = {
        "x": (10, 93, "x", PLAIN),
        "index q": (80, 24, "small q", QUERY),
        "index k": (80, 70, "small k", KEY),
        "scores": (180, 47, "scores of all keys", WEIGHT),
        "best": (340, 47, "the best 4 keys", WEIGHT),
        "q": (80, 116, "q", QUERY),
        "k": (80, 162, "k", KEY),
        "v": (80, 208, "v", VALUE),
        "attention": (520, 139, "attention over these", WEIGHT),
        "out": (700, 139, "o_proj", PLAIN),
    }
    arrows = [("x", name) for name in ("index q", "index k", "q", "k", "v")]
    arrows += [("index q", "scores"), ("index k", "scores"), ("scores", "best"), ("best", "attention")]
    arrows += [("q", "attention"), ("k", "attention"), ("v", "attention"), ("attention", "out")]
    return flow(nodes, arrows, cached=["index k", "k", "v"])


def tied() -> Drawing:
    """GTA: the value is a state, whose first half is half of the key."""
    nodes = {
        "x": (10, 70, "x", PLAIN),
        "q": (80, 24, "q", QUERY),
        "rotated": (80, 70, "rotated, one for all", KEY),
        "state": (80, 116, "state s", LATENT),
        "key": (270, 82, "key: half of s, and this", KEY),
        "value": (270, 134, "value: s", VALUE),
        "attention": (520, 82, "attention", WEIGHT),
    }
    arrows = [("x", "state"), ("x", "rotated"), ("rotated", "key"), ("state", "key"), ("state", "value"), ("x", "q")]
    arrows += [("q", "attention"), ("key", "attention"), ("value", "attention")]
    return flow(nodes, arrows, cached=["state", "rotated"])


def latents_in_groups() -> Drawing:
    """GLA: two latents, each for half of the heads."""
    nodes = {
        "x": (10, 93, "x", PLAIN),
        "c0": (80, 43, "latent 0", LATENT),
        "rotated": (80, 93, "rotated key", KEY),
        "c1": (80, 143, "latent 1", LATENT),
        "k0": (250, 24, "keys of heads 0 and 1", KEY),
        "v0": (250, 62, "values of heads 0 and 1", VALUE),
        "k1": (250, 124, "keys of heads 2 and 3", KEY),
        "v1": (250, 162, "values of heads 2 and 3", VALUE),
        "device 0": (470, 43, "attention, on device 0", WEIGHT),
        "device 1": (470, 143, "attention, on device 1", WEIGHT),
    }
    arrows = [("x", "c0"), ("x", "rotated"), ("x", "c1"), ("rotated", "k0"), ("rotated", "k1")]
    arrows += [(f"c{n}", f"{part}{n}") for n in (0, 1) for part in "kv"]
    arrows += [(f"{part}{n}", f"device {n}") for n in (0, 1) for part in "kv"]
    return flow(nodes, arrows, cached=["c0", "rotated", "c1"])


def merged_latents(tokens: int = 6, stride: int = 2) -> Drawing:
    """MTLA: the latents of neighbours in time are summed; each token reads the finished sums and its own."""
    nodes: dict[str, Node] = {}
    arrows = []
    for t in range(tokens):
        nodes[f"x{t}"] = (10, 24 + 34 * t, f"x{t}", PLAIN)
        nodes[f"c{t}"] = (80, 24 + 34 * t, f"latent {t}", LATENT)
        arrows.append((f"x{t}", f"c{t}"))
    for part in range(tokens // stride):
        inside = range(part * stride, (part + 1) * stride)
        label = " + ".join(f"w{t} c{t}" for t in inside)
        nodes[f"m{part}"] = (230, 24 + 34 * sum(inside) / stride, label, LATENT)
        arrows += [(f"c{t}", f"m{part}") for t in inside]
    return flow(nodes, arrows, cached=[f"m{part}" for part in range(tokens // stride)])


def tensor_products() -> Drawing:
    """TPA: a key is a sum of products of a vector over heads and a vector over dims; so are queries and values."""
    nodes: dict[str, Node] = {
        "x": (10, 70, "x", PLAIN),
        "a": (80, 40, "a1, a2: one number per head", KEY),
        "b": (80, 100, "b1, b2: one number per dim", KEY),
        "k": (300, 70, "k of head h = (a1[h] b1 + a2[h] b2) / 2", KEY),
        "attention": (590, 70, "attention", WEIGHT),
    }
    arrows = [("x", "a"), ("x", "b"), ("a", "k"), ("b", "k"), ("k", "attention")]
    return flow(nodes, arrows, cached=["a", "b"])


def delta_rule() -> Drawing:
    """The delta rule: what the state holds for a key is taken from the value, and the rest is written."""
    nodes: dict[str, Node] = {
        "x": (10, 70, "x", PLAIN),
        "q": (80, 24, "q", QUERY),
        "k": (80, 70, "k", KEY),
        "v": (80, 116, "v", VALUE),
        "old": (80, 162, "old state S", LATENT),
        "held": (220, 162, "held: S^T k", VALUE),
        "missing": (340, 116, "d = beta (v - held)", VALUE),
        "state": (520, 93, "new state S + k d^T", LATENT),
        "out": (690, 58, "output: S^T q", VALUE),
    }
    arrows = [("x", "q"), ("x", "k"), ("x", "v"), ("old", "held"), ("k", "held"), ("k", "state"), ("v", "missing")]
    arrows += [("held", "missing"), ("missing", "state"), ("q", "out"), ("state", "out")]
    return flow(nodes, arrows, cached=["state"])
