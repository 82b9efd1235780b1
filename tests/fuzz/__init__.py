"""Random input, run by scripts/fuzz.py: each module has `main(seed, seconds)`, which returns the number of failures."""
