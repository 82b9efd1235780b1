"""Reads JUnit reports, and prints skips with their reasons, failures, and a last line with the counts.

    python scripts/summary.py REPORT.xml ...

The exit code is 1 for a failed test, for a report that is missing or has no test, and for a skip (or xfail) that
tests/allowed_skips.txt does not list.
"""

import fnmatch
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ALLOWED = Path(__file__).parents[1] / "tests" / "allowed_skips.txt"


def main(reports: list[str]) -> int:
    allowed = allowed_patterns(ALLOWED.read_text())
    passed, failed, skipped, problems = 0, [], [], []
    for report in reports:
        cases = list(ElementTree.parse(report).iter("testcase")) if Path(report).exists() else []
        if not cases:
            problems.append(f"{report}: no test was run")
        for case in cases:
            name = f"{case.get('classname')}::{case.get('name')}"
            skip = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(name)
            elif skip is not None:
                skipped.append(name)
                print(f"skipped: {name}: {skip.get('message')}")
                if not any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed):
                    problems.append(f"{name}: skipped, but tests/allowed_skips.txt does not list it")
            else:
                passed += 1
    for line in [f"failed: {name}" for name in failed] + problems:
        print(line)
    print(f"{passed} passed, {len(failed) + len(problems)} failed, {len(skipped)} skipped")
    return 1 if failed or problems else 0


def allowed_patterns(text: str) -> list[str]:
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
