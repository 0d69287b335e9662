"""The bench of the all-reduce: what it says without GPUs, and the page of a stored run."""

from __future__ import annotations

import pytest
import torch


def test_too_few_gpus_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    from bench.all_reduce import main

    ranks = torch.cuda.device_count() + 2
    assert main(["--ranks", str(ranks)]) == 2
    assert f"{ranks} ranks need {ranks} GPUs; PyTorch sees {ranks - 2}" in capsys.readouterr().err


def test_the_page_has_a_column_for_each_way_and_marks_what_is_wrong() -> None:
    from bench.all_reduce import line, page

    row = {"rows": 1, "bytes": 8192, "us": {"ours": 6.04, "NCCL": 12.0}, "absent": {"other": "no room"}, "chosen": "ll"}
    rows = [{**row, "wrong": {}}, {**row, "us": {"NCCL": 13.0}, "wrong": {"ours": ["peak"]}}]
    env = {"device": "a GPU", "torch": "2.11", "date": "today"}
    text = page({"command": "command", "environment": env, "ranks": 2, "hidden": 4096, "rows": rows})
    assert "| message | chosen | ours | NCCL |" in text
    assert "| 8 KiB (1) | ll | 6.0 | 12.0 |" in text
    assert "| 8 KiB (1) | ll | wrong | 13.0 |" in text
    assert "WRONG ours: peak" in line(rows[1]) and "[other: no room]" in line(rows[0])
