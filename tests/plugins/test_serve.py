"""Servers of other engines with the plugin, through the official OpenAI client: chat, stream, log-probabilities."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from plugins import hosting_sglang
from plugins.conftest import ENVIRONMENT
from plugins.hosting import ATOL, CACHE_BYTES
from server.tiny_model import write_tiny_model
from tiny_checkpoints import TinyCheckpoint, write_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# The answer has no token without a text, which SGLang shows as another one.
ASKED = [{"role": "user", "content": "one two three"}]
COUNT = 12


@dataclass(frozen=True)
class Server:
    """`command`: after Python. `line`: what the plugin says in it, once it has caches."""

    command: tuple[str, ...]
    environment: dict[str, str]
    line: str


SERVERS = {
    # What `vllm serve` runs; that command itself asks for a package named vllm, which the CPU build does not have.
    "vllm": Server(
        (
            *("-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--max-model-len", "256"),
            *("--kv-cache-memory-bytes", str(CACHE_BYTES), "--model"),
        ),
        ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO", "TORCHDYNAMO_DISABLE": "0"},
        "allotrope: pages of ",
    ),
    "sglang": Server(
        ("-m", "sglang.launch_server", "--context-length", "256", "--max-total-tokens", "2048", "--model-path"),
        hosting_sglang.ENVIRONMENT,
        "allotrope: caches in SGLang's pools",
    ),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    directory = write_tiny_model(tmp_path_factory.mktemp("served"))
    return write_tiny(json.loads((directory / "config.json").read_text()), directory)


@pytest.fixture(scope="module", params=SERVERS)
def client(
    request: pytest.FixtureRequest, tiny: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    request.getfixturevalue(f"in_{request.param}")
    server = SERVERS[request.param]
    openai = pytest.importorskip("openai")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = Path(tmp_path_factory.mktemp("log")) / "log"
    command = [sys.executable, *server.command, str(tiny.directory), "--port", str(port)]
    command += ["--dtype", "float32", "--served-model-name", "tiny"]
    with (
        log.open("w") as out,
        subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | server.environment) as running,
    ):
        found = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
        try:
            for _ in range(270):
                assert running.poll() is None, log.read_text()[-4000:]
                try:
                    found.models.list()
                    break
                except (openai.APIConnectionError, openai.InternalServerError):
                    time.sleep(1)
            # What the caches of our layers take is told once, by the engine's process.
            assert server.line in log.read_text()
            yield found
        finally:
            running.terminate()
            running.wait(60)


@pytest.fixture(scope="module")
def wanted(tiny: TinyCheckpoint) -> tuple[str, torch.Tensor]:
    """Text and log-probabilities of the greedy answer, by Transformers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.directory)
    text = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    answer = tiny.greedy(ids, COUNT)
    scores = torch.log_softmax(tiny.logits([*ids, *answer[:-1]])[len(ids) - 1 :], -1)
    # Servers hold back the bytes of a character that is not complete.
    return tokenizer.decode(answer).rstrip("\ufffd"), scores.gather(1, torch.tensor(answer)[:, None]).squeeze(1)


def options() -> dict[str, Any]:
    extra = {"ignore_eos": True, "skip_special_tokens": False}
    return {"model": "tiny", "messages": ASKED, "temperature": 0, "max_tokens": COUNT, "extra_body": extra}


def test_chat_with_logprobs(client: Any, wanted: tuple[str, torch.Tensor]) -> None:
    choice = client.chat.completions.create(**options(), logprobs=True).choices[0]
    assert choice.message.content.rstrip("\ufffd") == wanted[0]
    found = torch.tensor([entry.logprob for entry in choice.logprobs.content])
    torch.testing.assert_close(found, wanted[1], atol=ATOL, rtol=0.0)


def test_stream(client: Any, wanted: tuple[str, torch.Tensor]) -> None:
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**options(), stream=True)]
    assert "".join(parts).rstrip("\ufffd") == wanted[0] and len(parts) > 2
