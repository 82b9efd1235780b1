"""Optional packages: how they are installed, and with which releases the tests ran."""

import importlib.metadata
import re

TESTED = {"torch": ("2.11.0", "2.13.0", "2.14.1", "2.15.0"), "transformers": ("5.17.0", "5.23.0", "5.24.0")}
"""The releases under which the tests ran. `scripts/matrix.sh` goes through them."""


def install_command(extra: str) -> str:
    """The pip command for the packages of an extra of attnpack, one by one: attnpack itself is on no package index."""
    try:
        listed = importlib.metadata.requires("attnpack") or []
    except importlib.metadata.PackageNotFoundError:  # a tree that was never installed
        listed = []
    found = [f"'{name}'" if re.search("[<>=~!]", name) else name for name in _packages(extra, listed)]
    return "pip install " + " ".join(found or [extra])


def _packages(extra: str, listed: list[str]) -> list[str]:
    """`listed` are lines of metadata such as `gguf; extra == "gguf"`. An extra may name others: attnpack[gguf,hf]."""
    found = []
    for line in listed:
        package, _, condition = (part.strip() for part in line.partition(";"))
        if not re.search(rf"""extra == ["']{extra}["']""", condition):
            continue
        inner = re.fullmatch(r"attnpack\[(.*)\]", package)
        found += [name for other in inner[1].split(",") for name in _packages(other, listed)] if inner else [package]
    return found
