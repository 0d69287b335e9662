"""The server bench without a GPU: a server starts, closed-loop clients are served, figures and tables are left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from allotrope.architectures.llama import tiny_llama

SERVER = Path(__file__).parents[2] / "bench" / "engine" / "server.py"


def test_a_run_leaves_figures_of_every_cell(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(tiny_llama()))
    cells = ["--cells", "2:6:20/5,20:24:9/3", "--our-options", "--load-format dummy --device cpu --threads 1"]
    done = subprocess.run(
        [sys.executable, str(SERVER), str(model), *cells, "--out", str(tmp_path / "found"), "--logs", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    (engine,) = found["engines"]
    assert engine["error"] is None and engine["start_s"] > 0
    counted = [(cell["clients"], cell["completed"], cell["failed"], cell["output_tokens"]) for cell in engine["cells"]]
    assert counted == [(2, 6, 0, 30), (20, 24, 0, 72)]
    for cell in engine["cells"]:
        assert 0 < cell["latency"]["TTFT"]["p50_ms"] <= cell["latency"]["TTFT"]["p99_ms"]
    table = (tmp_path / "found.md").read_text()
    assert "2 clients, 20/5, 6 requests |" in table and str(tmp_path) not in table
    assert (tmp_path / "allotrope.log").read_text()


def test_a_server_that_does_not_start_is_told_with_its_last_lines(tmp_path: Path) -> None:
    model = tmp_path / "empty"
    model.mkdir()
    options = ["--our-options", "--load-format dummy --device cpu"]
    (model / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"], "vocab_size": 8}))
    done = subprocess.run(
        [sys.executable, str(SERVER), str(model), *options, "--out", str(tmp_path / "found")],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 1
    (engine,) = json.loads((tmp_path / "found.json").read_text())["engines"]
    assert "NoSuchModel" in engine["error"] and not engine["cells"]
