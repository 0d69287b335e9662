"""The pages of results: their tables are those of the stored figures, and every stored figure has one."""

from __future__ import annotations

import json
from pathlib import Path

from bench import results


def test_the_pages_are_up_to_date() -> None:
    pages = [page.read_text() for page in results.PAGES]
    assert results.missing(pages) == []
    assert [results.updated(page) == page for page in pages] == [True] * len(pages), "run python bench/results.py"


def test_a_changed_figure_changes_the_page(tmp_path: Path) -> None:
    stored = results.RESULTS / "products_h200.json"
    report = json.loads(stored.read_text())
    measured = {"us": 8.2, "tb_per_s": 0.26, "tflop_per_s": 2, "tile": [16, 64], "splits": 4, "by": "swap-AB"}
    report["rows"] = [{"product": "fp8 1024x2048", "rows": 4, **measured}]
    (tmp_path / stored.name).write_text(json.dumps(report))
    page = f"Before.\n<!-- table of {stored.name} -->\nold\n<!-- end of table -->\nAfter.\n"
    first = results.updated(page, tmp_path)
    assert first.startswith("Before.\n") and first.endswith("After.\n") and "old" not in first
    assert "| fp8 1024x2048 | 4 | 8.2 | 0.26 | 2 | 16 x 64 | 4 | swap-AB |" in first
    assert results.updated(first, tmp_path) == first
    report["rows"][0]["us"] = 9.5
    (tmp_path / stored.name).write_text(json.dumps(report))
    assert "| 9.5 |" in results.updated(first, tmp_path)
    (tmp_path / "roofline_other.json").write_text("{}")
    assert results.missing([first], tmp_path) == ["roofline_other.json"]
