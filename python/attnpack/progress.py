"""Progress bars for work that takes longer than two seconds, if stderr is a terminal and tqdm is installed. Times and
counts in words."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator


def progress(items: Iterable, title: str) -> Iterable:
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=title, delay=2, leave=False, disable=None)  # None: no bar if stderr is no terminal


@contextlib.contextmanager
def seconds_bar(total: float, done: float, title: str) -> Iterator[Callable[[float, str], None]]:
    """A bar over time. It yields a function that takes the seconds that have passed and a few words."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda seconds, words: None
        return
    shape = "{desc} {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} s {postfix}"
    with tqdm(total=total, initial=done, desc=title, leave=False, disable=None, bar_format=shape) as bar:

        def show(seconds: float, words: str) -> None:
            bar.set_postfix_str(words, refresh=False)
            bar.update(min(seconds, total) - bar.n)

        yield show


def counted(count: int, noun: str) -> str:
    """1 thread, 2 threads."""
    return f"{count:,} {noun}{'s'[: count != 1]}"


def duration(seconds: float) -> str:
    """The seconds in the unit that fits."""
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else counted(round(seconds), "second")


def finish(seconds: float) -> str:
    """The time of the clock in so many seconds, with the day if that is another one."""
    now = time.time()
    there = time.localtime(now + seconds)
    same_day = there.tm_yday == time.localtime(now).tm_yday
    return time.strftime("%H:%M" if same_day else "%a %H:%M", there)
