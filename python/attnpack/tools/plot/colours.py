"""The colours of pictures: one for each part of attention in drawings of layers, and one for each kind of it."""

INK = "#222222"

# Okabe and Ito's colours, for lines and bars, which the colour-blind can tell apart.
BLUE, ORANGE, GREEN, PINK, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9"
BLACK, AMBER, BROWN = "#000000", "#E69F00", "#8c564b"  # brown for their yellow, which is too light for lines
GROUPS = (BLUE, ORANGE, GREEN, PINK, SKY, BLACK, AMBER, BROWN)

# The same, lighter, for boxes with text on them: blue asks, orange offers, green gives.
QUERY, KEY, VALUE, LATENT, NEW, WEIGHT, PLAIN = (
    "#9fd0ee",
    "#f4b183",
    "#8fd3bd",
    "#e8b4d2",
    "#f3e27a",
    "#c9c2e6",
    "#eeeeee",
)

KINDS = {"MHA": ORANGE, "GQA": GREEN, "MQA": BLUE, "MLA": PINK}
"""Kinds of attention by the keys and values that they keep: one per head, per group, for all, or a latent."""
