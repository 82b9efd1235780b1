"""`attnpack uptrain`: trains a converted checkpoint, so that it recovers what the conversion lost."""
