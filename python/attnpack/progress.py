"""A progress bar for what takes longer than two seconds, where somebody watches and tqdm is there."""

from collections.abc import Iterable


def progress(items: Iterable, title: str) -> Iterable:
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=title, delay=2, leave=False, disable=None)  # None: silent where stderr is no terminal
