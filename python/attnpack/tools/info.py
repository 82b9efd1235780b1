"""`attnpack info`: the table of the installation, or the path for CMake."""

import argparse
import json

from .._load import PREFIX
from ..installation import collect_info, print_info


def main(args: argparse.Namespace) -> None:
    """Prints only the CMake prefix (`--cmake-prefix`), or everything, as JSON (`--json`) or as text."""
    if args.cmake_prefix:
        print(json.dumps({"cmake_prefix": str(PREFIX)}) if args.json else PREFIX)
    else:
        print_info(collect_info(), args.json)
