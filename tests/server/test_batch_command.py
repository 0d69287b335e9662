"""`allotrope batch`: each line of a file is answered as the server would, and a run that was interrupted goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted_model import AFTER, JSON, PLAIN, write_scripted_model

from allotrope.errors import ConfigError
from allotrope.server.batch import check_files

Json = dict[str, Any]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("scripted"))


def line(custom_id: str, url: str = CHAT, **body: Any) -> Json:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def run(model: Path, source: Path, target: Path) -> tuple[int, str]:
    """Exit status and messages of the command."""
    command = [sys.executable, "-m", "allotrope", "batch", str(model), str(source), "--output", str(target)]
    command += ["--served-model-name", "tiny", "--threads", "1", "--kv-cache-memory-bytes", "32000000"]
    command += ["--max-in-flight", "3", "--generation-config", "none"]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    return done.returncode, done.stderr


def answers(target: Path) -> dict[str, Json]:
    read = [json.loads(text) for text in target.read_text().splitlines()]
    assert all(set(entry) == {"id", "custom_id", "response", "error"} for entry in read)
    return {entry["custom_id"]: entry for entry in read}


def test_lines_are_answered_and_a_run_goes_on(model: Path, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "hi"}]
    tool = [{"role": "assistant", "content": "", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"}]  # fmt: skip
    lines: list[Any] = [
        line("chat", model="tiny", messages=said),
        line("tool", messages=said + tool),
        line("text", "/v1/completions", prompt="<|plain|>", max_tokens=3),
        line("item", "/v1/responses", input="json"),
        line("message", "/v1/messages", messages=said, max_tokens=9),
        *(line(f"many{i}", messages=said, temperature=0, max_tokens=2) for i in range(20)),
        line("other model", model="other", messages=said),
        line("wrong value", messages=said, temperature=1000),
        line("stream", messages=said, stream=True),
        line("url", "/metrics"),
        {"custom_id": "no body", "url": CHAT},
        line("chat", messages=said),
        {"url": CHAT, "body": {}},
        line("\ud800", messages=said),
        "text",
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)) + "\n\n{broken\n")
    status, messages = run(model, source, target)
    assert status == 1
    assert "25 lines answered, 10 failed" in messages

    entries = [json.loads(text) for text in target.read_text().splitlines()]
    good = {
        one["custom_id"]: one["response"]["body"]
        for one in entries
        if (one["response"] or {}).get("status_code") == 200
    }
    assert good["chat"]["choices"][0]["message"]["content"] == "".join(PLAIN)
    assert good["tool"]["choices"][0]["message"]["content"] == "".join(AFTER)
    assert good["text"]["choices"][0]["text"] == "".join(PLAIN[:3])
    assert good["item"]["output"][0]["content"][0]["text"] == "".join(JSON)
    assert good["message"]["content"][0]["text"] == "".join(PLAIN)
    assert sum(name.startswith("many") for name in good) == 20
    bad = {
        one["custom_id"]: one for one in entries if one["error"] is not None or one["response"]["status_code"] != 200
    }
    assert bad["other model"]["response"]["status_code"] == 404
    assert bad["wrong value"]["response"]["body"]["error"]["param"] == "temperature"
    codes = [one["error"]["code"] for one in entries if one["error"] is not None]
    assert sorted(codes) == ["duplicate_custom_id", *["invalid_json_line"], *["invalid_line"] * 6]
    assert all(one["error"]["message"].startswith("line ") for one in entries if one["error"] is not None)

    # As after an interruption: one line is half written, others are missing, and a fault has been mended.
    kept = [text for text in target.read_text().splitlines() if '"many' in text][:10]
    target.write_text("\n".join(kept) + '\n{"id": "batch_req_x", "custom_id": "chat", "resp')
    source.write_text(
        "\n".join(map(json.dumps, [*lines[:25], line("wrong value", messages=said, temperature=1)])) + "\n"
    )
    status, messages = run(model, source, target)
    assert status == 0
    assert "16 lines answered, 0 failed, 10 answered before" in messages
    again = answers(target)
    assert len(again) == 26 and {one["response"]["status_code"] for one in again.values()} == {200}
    assert target.read_text().splitlines()[:10] == kept

    # An id that stands twice is wrong in every run, also where its first line is answered.
    source.write_text(json.dumps(lines[0]) + "\n" + json.dumps(lines[0]) + "\n")
    status, messages = run(model, source, target)
    assert status == 1 and "1 failed, 1 answered before" in messages
    assert "the first that failed: chat: line 2 has custom_id" in messages


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with pytest.raises(ConfigError, match="is not a file"):
        check_files(source, target)
    source.write_text("{}\n")
    check_files(source, target)
    with pytest.raises(ConfigError, match="is the input"):
        check_files(source, source)
    target.write_text("my notes\n")
    with pytest.raises(ConfigError, match="no output of a batch"):
        check_files(source, target)
    assert target.read_text() == "my notes\n"
    for unwritable, reason in (
        (tmp_path / "none" / "out.jsonl", "there is no directory"),
        (tmp_path, "is a directory"),
    ):
        with pytest.raises(ConfigError, match=reason):
            check_files(source, unwritable)
