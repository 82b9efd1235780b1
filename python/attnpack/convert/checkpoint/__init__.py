"""`attnpack convert`: converts whole checkpoints to fewer key-value heads, layer by layer."""
