"""Tables of a page that a script writes: each lies between a comment with its name and one with its end."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

BLOCK = re.compile(r"(<!-- table of (\w+) -->\n).*?(<!-- end of table -->\n)", re.DOTALL)


def filled(page: str, table: Callable[[str], str]) -> str:
    """`page` with every table made anew. `table`: of a name."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{table(found[2])}\n{found[3]}", page)


def write(page: Path, updated: Callable[[str], str], about: str | None) -> int:
    """Write the tables of `page`, or with --check say whether they are out of date. `about`: of the script, whose exit
    status this is."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 if a table is out of date")
    options = parser.parse_args()
    before = page.read_text()
    after = updated(before)
    if before != after and options.check:
        print(f"{page.name} is out of date: run python scripts/{Path(sys.argv[0]).name}")
        return 1
    if before != after:
        page.write_text(after)
    return 0
