"""Which headers cmake/Install.cmake leaves out."""

import re

from processes import ROOT

_FOLDERS = re.search(r'REGEX "/(\(.*\))\$" EXCLUDE', (ROOT / "cmake/Install.cmake").read_text())
assert _FOLDERS, "cmake/Install.cmake names no private folders"
_PRIVATE = re.compile(f"(.*/)?{_FOLDERS[1]}/")


def is_private(header: str) -> bool:
    """Whether a header, by its path from csrc/attnpack, lies in a private folder."""
    return _PRIVATE.match(header) is not None
