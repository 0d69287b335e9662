"""The whole path once: start a server, ask it one question with the official client, print the streamed answer.

    python examples/demo.py MODEL [--question TEXT]

Exit status 1, with the reason, if anything fails.
"""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO

from openai import OpenAI, OpenAIError

START_LIMIT_S = 180.0
NAME = "smollm2"


class DemoError(Exception):
    """Why the demo could not be shown; its text is for the user."""


def free_port() -> int:
    """A TCP port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def show(progress: str) -> None:
    """Write `progress` over the line before it, where there is a terminal."""
    print("\r" * sys.stdout.isatty() + progress, end="", flush=True)


def wait_until_healthy(url: str, server: subprocess.Popen[bytes], log: IO[bytes]) -> float:
    """Seconds until /health answers 200; raises `DemoError` if the server ends or takes too long."""
    begin = time.monotonic()
    while (waited := time.monotonic() - begin) < START_LIMIT_S:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    show(f"server ready after {waited:.1f} s        \n")
                    return waited
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        if server.poll() is not None:
            log.seek(0)
            tail = log.read()[-2000:].decode(errors="replace")
            raise DemoError(f"the server ended with status {server.returncode}:\n{tail}")
        if sys.stdout.isatty():
            show(f"loading the model ... {waited:.1f} s")
        time.sleep(0.1)
    raise DemoError(f"the server was not ready after {START_LIMIT_S:.0f} s.")


def ask(url: str, question: str) -> None:
    """Stream the answer to `question` to the terminal, then its figures; raises `DemoError` if there is none."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    print(f"\n> {question}")
    begin = time.perf_counter()
    first = 0.0
    tokens = 0
    stream = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=128,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            if choice.delta.content:
                first = first or time.perf_counter()
                print(choice.delta.content, end="", flush=True)
    end = time.perf_counter()
    print("\n")
    if not first or not tokens:
        raise DemoError("the answer was empty.")
    rate = (tokens - 1) / (end - first) if tokens > 1 else 0.0
    print(f"{tokens} tokens, first after {1000 * (first - begin):.0f} ms, then {rate:.1f} tokens/s")


def how_to_go_on(model: Path) -> None:
    """Print the commands that come next."""
    program = Path(sys.executable).with_name("allotrope")
    command = program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program
    body = f'{{"model": "{NAME}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    print(f"""
Go on:
  {command} chat {model}
  {command} serve {model} --served-model-name {NAME}
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'""")


def main() -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(description="Start a server and ask it one question.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--question", default="What is a prime number?")
    options = parser.parse_args()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    arguments = ["serve", str(options.model), "--served-model-name", NAME, "--port", str(port)]
    command = [sys.executable, "-m", "allotrope", *arguments]
    print("allotrope", *arguments)
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            wait_until_healthy(url, server, log)
            ask(url, options.question)
        except (DemoError, OpenAIError) as error:
            print(f"\ndemo: error: {error}", file=sys.stderr)
            return 1
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(timeout=30)
            except subprocess.TimeoutExpired:
                server.kill()
    if server.returncode != 0:
        print(f"demo: error: the server ended with status {server.returncode} when told to stop.", file=sys.stderr)
        return 1
    how_to_go_on(options.model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
