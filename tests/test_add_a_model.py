"""The walk-through in docs/add_a_model.md quotes the code as it is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_quoted_code_is_the_code() -> None:
    page = (ROOT / "docs" / "add_a_model.md").read_text()
    folder = ROOT / "allotrope" / "architectures"
    source = "".join((folder / f"{name}.py").read_text() for name in ("minimax_m2", "registry", "deepseek_v3"))
    quotes = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    assert len(quotes) >= 6
    for quote in quotes:
        assert quote in source, f"docs/add_a_model.md quotes what is no longer there:\n{quote}"
