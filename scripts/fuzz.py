"""Tests with random input until the time is up: `python scripts/fuzz.py ops --seconds 60`. A failure names its seed. To
repeat it, give the seed: `python scripts/fuzz.py ops --seed 123 --seconds 0`."""

import argparse
import importlib
import random
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"


def main() -> int:
    kinds = sorted(path.stem for path in (TESTS / "fuzz").glob("*.py") if "\ndef main(" in path.read_text())
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=kinds)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, help="default: a random one, which is printed")
    args = parser.parse_args()
    seed = random.randrange(2**31) if args.seed is None else args.seed
    print(f"{args.what}: seed {seed}", flush=True)
    sys.path[:0] = [str(TESTS), str(TESTS / "support")]
    failures = importlib.import_module(f"fuzz.{args.what}").main(seed, args.seconds)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
