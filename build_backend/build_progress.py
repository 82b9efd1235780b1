"""How far a build is, from what ninja prints."""

import re
import sys
import time


class Progress:
    """Shows how far ninja is: files done of all, the seconds so far, and about how many are left.

    On a terminal one line that changes, elsewhere a line every 15 seconds. Whatever else the build prints goes through.
    """

    STEP = re.compile(r"\[(\d+)/(\d+)\] (.*)")
    # Times a small kernel: units of many sources and the tests' precompiled header, and the largest kernel.
    DEAR = {re.compile(r"Unity/unity_\d|\.gch"): 16, re.compile("decode"): 4}
    EVERY = 15

    def __init__(self, planned: list[str]):
        """planned: the steps of the build, as `ninja -n` prints them."""
        self.work = sum(self.cost(step[3]) for line in planned if (step := self.STEP.match(line)))
        self.done, self.start, self.shown = 0, time.monotonic(), 0.0
        self.on_terminal, self.line_is_open = sys.stdout.isatty(), False

    def cost(self, what: str) -> int:
        return next((times for kind, times in self.DEAR.items() if kind.search(what)), 1)

    def take(self, line: str):
        step = self.STEP.match(line)
        if step is None:
            self.end_line()
            print(line, end="", flush=True)
            return
        if step[3].startswith("Re-"):  # ninja looks for new files first
            return
        self.done += self.cost(step[3])
        seconds, last = time.monotonic() - self.start, step[1] == step[2]
        if not (self.on_terminal or last or seconds - self.shown >= self.EVERY):
            return
        self.shown = seconds
        text = f"attnpack: {step[1]} of {step[2]} files, {seconds:.0f} s"
        if not last and self.work > self.done:
            text += f", about {seconds * (self.work - self.done) / self.done:.0f} s left"
        print(f"\r{text:<70}" if self.on_terminal else text, end="" if self.on_terminal else "\n", flush=True)
        self.line_is_open = self.on_terminal

    def end_line(self):
        if self.line_is_open:
            print(flush=True)
        self.line_is_open = False
