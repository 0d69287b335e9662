"""Writes the tables of `docs/results.md`, `accuracy.md` and `distributed.md` from the JSON files in `bench/results`.

    python bench/results.py            writes the tables
    python bench/results.py --check    writes nothing; ends with 1 if a table is not that of its file

A page marks the place of each table by a comment with the file's name. Text between tables is written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # The script's own folder would hide packages named as its folders are, such as `kernels`.
    sys.path[0] = str(ROOT)

from bench import agent_trace, all_reduce  # noqa: E402
from bench.accuracy import report as accuracy_report  # noqa: E402
from bench.cpu.report import architectures_page, gguf_page, peers_page  # noqa: E402
from bench.engine import cost_model, layouts, roofline_report  # noqa: E402
from bench.engine import report as engine_report  # noqa: E402
from bench.engine.server import report as server_page  # noqa: E402
from bench.kernels import report as kernel_report  # noqa: E402

PAGES = tuple(ROOT / "docs" / name for name in ("results.md", "accuracy.md", "distributed.md"))
RESULTS = ROOT / "bench" / "results"
# By the beginning of a file's name.
RENDERERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "accuracy": accuracy_report.page,
    "agent_trace": agent_trace.page,
    "all_gather": all_reduce.page,
    "all_reduce": all_reduce.page,
    "cost_model": cost_model.page,
    "cpu_architectures": architectures_page,
    "cpu_gguf": gguf_page,
    "cpu_peers": peers_page,
    "engine": engine_report.page,
    "kernels": kernel_report.page,
    "layouts": layouts.page,
    "products": kernel_report.products_page,
    "reduce_scatter": all_reduce.page,
    "roofline": roofline_report.roofline_page,
    "server": server_page,
}
# Sections that most readers skip.
FOLDED = ("Commands", "Errors by case", "Every product", "Kernels of each case")
BLOCK = re.compile(r"(<!-- table of (\w+\.json) -->\n).*?(<!-- end of table -->\n)", re.DOTALL)


def render(file: Path) -> str:
    """The tables of a result, with headings of the third level and below, and a link to its plot."""
    (make,) = (make for prefix, make in RENDERERS.items() if file.name.startswith(prefix))
    # The page of a run stands alone; here its title is in the text before it.
    text = re.sub(r"\A# [^\n]*\n+", "", make(json.loads(file.read_text())))
    first, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    parts = [first.strip()]
    for section in sections:
        title, _, body = section.partition("\n")
        heading = f"#### {title}\n\n{body.strip()}"
        folded = f"<details>\n<summary>{title}</summary>\n\n{body.strip()}\n\n</details>"
        parts.append(folded if title in FOLDED else heading)
    if file.with_suffix(".png").exists():
        parts.append(f"[Plot](../bench/results/{file.stem}.png)")
    return "\n\n".join(part for part in parts if part) + "\n"


def updated(page: str, results: Path = RESULTS) -> str:
    """`page` with every table made anew. Raises FileNotFoundError for a table whose file is gone."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{render(results / found[2])}\n{found[3]}", page)


def missing(pages: Sequence[str], results: Path = RESULTS) -> list[str]:
    """Results that have no table in any of `pages`."""
    shown = {found[2] for page in pages for found in BLOCK.finditer(page)}
    return sorted(file.name for file in results.glob("*.json") if file.name not in shown)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 if a page is out of date")
    options = parser.parse_args(arguments)
    before = {page: page.read_text() for page in PAGES}
    absent = missing(list(before.values()))
    for name in absent:
        print(f"no page has a table of {name}: add '<!-- table of {name} -->' and '<!-- end of table -->'")
    outdated = {page: after for page, text in before.items() if (after := updated(text)) != text}
    for page, after in outdated.items():
        if options.check:
            print(f"{page.name} is out of date: run python bench/results.py")
        else:
            page.write_text(after)
    return int(bool(absent) or (options.check and bool(outdated)))


if __name__ == "__main__":
    sys.exit(main())
