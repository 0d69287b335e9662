"""Answers the lines of a batch file, in the form that OpenAI's batch API has, by the handlers of the server.

Each answer is written as it is complete, so that a run which was interrupted goes on where it stopped. Must not know
how a route answers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from starlette.types import ASGIApp

from allotrope.config import BatchOptions, EngineConfig, ServerConfig
from allotrope.engine.client import EngineClient
from allotrope.errors import AllotropeError, ConfigError, refuse_options
from allotrope.output_files import file_reasons
from allotrope.server.api import build_app
from allotrope.server.app import load_model
from allotrope.server.in_process import Answered, post
from allotrope.server.message_formats import check_parser_names
from allotrope.server.state import ServerState
from allotrope.server.values import describe_value
from allotrope.text.formats.parameter_types import is_encodable

log = logging.getLogger("allotrope.server")

Json = dict[str, Any]

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_OK, _QUEUE_FULL = 200, 429
_RETRY_SECONDS = 0.2
_BODY_BYTES = 1 << 40
_LOG_SECONDS = 10.0


@dataclass
class Counts:
    """Lines of a batch. `kept`: answered by an earlier run. `answered`, `failed`: by this one. `first_fault`: of the
    first one that failed."""

    kept: int = 0
    answered: int = 0
    failed: int = 0
    first_fault: str | None = None

    def __str__(self) -> str:
        kept = f", {self.kept} answered before" if self.kept else ""
        return f"{self.answered} lines answered, {self.failed} failed{kept}"


@dataclass(frozen=True)
class _Line:
    """A line of the input. `fault`: why it cannot be sent, as code and message."""

    custom_id: str | None
    url: str = ""
    body: bytes = b""
    fault: tuple[str, str] | None = None


async def run_lines(
    app: ASGIApp, source: Path, target: Path, in_flight: int, why_dead: Callable[[], str | None]
) -> Counts:
    """Answer the lines of `source` that `target` has no good answer to, and append the answers to `target`.

    `in_flight`: most lines that are being answered at once. `why_dead`: the reason why the engine has ended, or None.
    Raises `AllotropeError` if it ends; the answers so far are in `target`.
    """
    counts = Counts()
    done = _resume(target)
    lines = _lines(source)
    with target.open("a", encoding="utf-8") as out:
        reports = asyncio.create_task(_report(counts))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(in_flight):
                    group.create_task(_work(app, lines, done, out, counts, why_dead))
        except* AllotropeError as errors:
            raise errors.exceptions[0] from None
        finally:
            reports.cancel()
    return counts


async def _work(
    app: ASGIApp,
    lines: Iterator[_Line],
    done: set[str],
    out: TextIO,
    counts: Counts,
    why_dead: Callable[[], str | None],
) -> None:
    """Answer one line after another. All workers share `lines`, so each line has one."""
    for line in lines:
        # A line that is wrong has no answer, whatever a line before it has that names the same id.
        if line.custom_id in done and line.fault is None:
            counts.kept += 1
            continue
        answer = None if line.fault is not None else await _ask(app, line)
        if (reason := why_dead()) is not None:
            raise AllotropeError(f"the engine has ended: {reason}. Run the command again to go on")
        written = _written(line, answer)
        out.write(json.dumps(written, ensure_ascii=False) + "\n")
        out.flush()
        if answer is not None and answer.status == _OK:
            counts.answered += 1
        else:
            counts.failed += 1
            counts.first_fault = counts.first_fault or _reason(written)


async def _ask(app: ASGIApp, line: _Line) -> Answered:
    while (answer := await post(app, line.url, line.body)).status == _QUEUE_FULL:
        await asyncio.sleep(_RETRY_SECONDS)
    return answer


async def _report(counts: Counts) -> None:
    while True:
        await asyncio.sleep(_LOG_SECONDS)
        log.info("batch: %s", counts)


def _written(line: _Line, answer: Answered | None) -> Json:
    """The line of the output."""
    response = None
    if answer is not None:
        response = {
            "status_code": answer.status,
            "request_id": answer.request_id,
            "body": json.loads(answer.body or b"null"),
        }
    error = None if line.fault is None else {"code": line.fault[0], "message": line.fault[1]}
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }


def _reason(written: Json) -> str:
    """Why a line of the output failed."""
    if (error := written["error"]) is None:
        answer = written["response"]
        error = (answer["body"] or {}).get("error", {"message": f"HTTP {answer['status_code']}"})
    return f"{written['custom_id'] or 'a line without custom_id'}: {error['message']}"


def _lines(source: Path) -> Iterator[_Line]:
    """The lines of the input, read as they are wanted. Empty ones are passed over."""
    seen: set[str] = set()
    with source.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if text.strip():
                yield _read_line(number, text, seen)


def _read_line(number: int, text: bytes, seen: set[str]) -> _Line:
    where = f"line {number}"
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _Line(None, fault=("invalid_json_line", f"{where} is not valid JSON: {error}."))
    if not isinstance(entry, dict):
        return _Line(None, fault=("invalid_line", f"{where} is {describe_value(entry)}; an object is needed."))
    custom_id = entry.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id or not is_encodable(custom_id):
        return _Line(
            None, fault=("invalid_line", f"{where} has custom_id={describe_value(custom_id)}; a text is needed.")
        )
    if custom_id in seen:
        message = f"{where} has custom_id={describe_value(custom_id)}, as a line before it has."
        return _Line(custom_id, fault=("duplicate_custom_id", message))
    seen.add(custom_id)
    fault = _fault(entry)
    if fault is not None:
        return _Line(custom_id, fault=("invalid_line", f"{where}: {fault}"))
    return _Line(custom_id, entry["url"], json.dumps(entry["body"]).encode())


def _fault(entry: Json) -> str | None:
    """Why a line with a good id cannot be sent, or None."""
    body = entry.get("body")
    if entry.get("method", "POST") != "POST":
        return f"method={describe_value(entry['method'])}; only POST is possible."
    if entry.get("url") not in URLS:
        return f"url={describe_value(entry.get('url'))}; allowed: {', '.join(URLS)}."
    if not isinstance(body, dict):
        return f"body={describe_value(body)}; an object is needed."
    if body.get("stream"):
        return "stream=true is not possible: an answer is one line of the output."
    return None


def _resume(target: Path) -> set[str]:
    """The ids of the lines that `target` answers. Failed and broken lines are taken out of it, to be tried again."""
    if not target.exists():
        return set()
    kept, done = [], set()
    for text in target.read_bytes().splitlines():
        custom_id = _answered_id(text)
        if custom_id is not None and custom_id not in done:
            kept.append(text)
            done.add(custom_id)
    scratch = target.with_name(f"{target.name}.{os.getpid()}.part")
    scratch.write_bytes(b"".join(text + b"\n" for text in kept))
    scratch.replace(target)
    return done


def _answered_id(text: bytes) -> str | None:
    """The id of a line of output with a good answer; None for any other."""
    try:
        entry = json.loads(text)
        found = entry["custom_id"] if entry["response"]["status_code"] == _OK else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def check_files(source: Path, target: Path) -> None:
    """Raise `ConfigError` if the input cannot be read, or if the output cannot be written or is none of a batch."""
    if not source.is_file():
        raise ConfigError(f"{source} is not a file.")
    refuse_options(file_reasons("output", target))
    if target.exists() and target.resolve() == source.resolve():
        raise ConfigError(f"{target} is the input; name another file with --output.")
    if target.exists() and target.stat().st_size:
        with target.open("rb") as file:
            first = file.readline()
        if b'"custom_id"' not in first or b'"response"' not in first:
            raise ConfigError(f"{target} exists and is no output of a batch; name another file with --output.")


def run_batch(engine: EngineConfig, options: BatchOptions, source: Path, target: Path) -> int:
    """Load the model, answer the lines of `source` into `target`, and say how many. Returns 1 if some failed.

    Raises `ConfigError` for files that cannot be used, and another `AllotropeError` if the model cannot be loaded.
    """
    check_files(source, target)
    server = ServerConfig(
        served_model_name=options.served_model_name,
        chat_template=options.chat_template,
        strict=options.strict,
        default_max_tokens=options.default_max_tokens,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        max_body_bytes=_BODY_BYTES,
    )
    check_parser_names(server)
    return asyncio.run(_run(EngineClient(engine), engine, server, options.max_in_flight, source, target))


async def _run(
    client: EngineClient,
    engine: EngineConfig,
    server: ServerConfig,
    in_flight: int | None,
    source: Path,
    target: Path,
) -> int:
    state = ServerState(server, server.served_model_name or (engine.model,))
    try:
        await load_model(state, client, engine)
        count = in_flight or client.limits.max_num_seqs
        counts = await run_lines(build_app(state), source, target, count, lambda: client.dead)
    finally:
        await client.stop()
    print(f"{counts}; answers are in {target}", file=sys.stderr)
    if counts.first_fault is not None:
        print(f"the first that failed: {counts.first_fault}", file=sys.stderr)
    return 1 if counts.failed else 0
