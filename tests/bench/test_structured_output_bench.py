"""The benchmark of structured output, on a part of its sample: every finished answer validates, and nothing is refused
that the library takes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from allotrope.llm import LLM
from bench import structured_output as bench


@pytest.fixture(scope="module")
def schemas() -> list[tuple[str, object]]:
    return bench.read_schemas(bench.SAMPLE)


def test_answers_to_real_schemas_validate(schemas: list[tuple[str, object]], tmp_path: Path) -> None:
    part = schemas[::8]
    llm = LLM(str(bench.write_model(tmp_path, "tiny", 512, part)), load_format="dummy", dtype="float32")
    figures = bench.check_schemas(llm, part)
    llm.close()
    assert figures.schemas == 50
    assert not figures.invalid and not figures.failed and not figures.lost
    assert figures.finished >= 35
    assert all('"' in reason or "not supported" in reason for reason in figures.refused.values())


def test_the_cost_is_measured(schemas: list[tuple[str, object]], tmp_path: Path) -> None:
    llm = LLM(str(bench.write_model(tmp_path, "tiny", 512, schemas)), load_format="dummy", dtype="float32")
    figures = bench.measure_cost(llm, schemas, requests=4, steps=3, rounds=1)
    llm.close()
    assert figures["steps"] == {"free": 3, "held": 3}
    assert figures["tpot_held_ms"] > 0
