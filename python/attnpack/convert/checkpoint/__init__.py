"""Whole checkpoints with fewer key-value heads, layer by layer: `attnpack convert`."""
