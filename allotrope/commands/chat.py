"""`allotrope chat`: a conversation in the terminal.

Owns the dialogue: its history, slash commands and output. A `ChatModel` gives the answers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Annotated, Protocol

import typer

from allotrope.commands.remote import Thought
from allotrope.commands.sampling import SamplingOptions
from allotrope.config import EngineConfig
from allotrope.errors import ConfigError, InvalidRequest

_HELP = "/clear forgets the conversation, /quit (or end of input) leaves; Ctrl-C stops an answer."


class ChatModel(Protocol):
    """A model in this process or on a server. `last_tokens`: number of tokens of the latest answer."""

    last_tokens: int

    def stream(self, messages: list[dict[str, str]], sampling: SamplingOptions) -> Iterator[str]: ...


def chat(
    engine: EngineConfig | None,
    sampling: SamplingOptions,
    url: Annotated[str | None, typer.Option(help="Talk to the server at this address instead of MODEL.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key that the server asks for.", envvar="ALLOTROPE_API_KEY")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message at the beginning.")] = None,
) -> None:
    """Talk to MODEL, or to a running server with --url."""
    if (engine is None) == (url is None):
        raise ConfigError("chat needs either MODEL or --url. Run: allotrope chat MODEL")
    model: ChatModel
    if url is not None:
        from allotrope.commands.remote import RemoteChat, served_card

        card = served_card(url, api_key)
        model = RemoteChat(url, str(card["id"]), api_key, card.get("sampling_defaults") or ())
    else:
        from allotrope.commands.local import LocalModel

        assert engine is not None
        model = LocalModel(engine)
        model.check_chats(f"To continue a text, run: allotrope generate {engine.model} -p TEXT")
    print(_HELP, file=sys.stderr)
    Conversation(model, sampling, system).run()


class Conversation:
    """A conversation whose user turns are read from stdin until its end."""

    def __init__(self, model: ChatModel, sampling: SamplingOptions, system: str | None) -> None:
        self.model = model
        self.sampling = sampling
        self.opening = [{"role": "system", "content": system}] if system else []
        self.history = list(self.opening)

    def run(self) -> None:
        """Answer line by line."""
        if sys.stdin.isatty():
            # Importing readline gives `input` line editing and history.
            import readline  # noqa: F401
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if line in ("/quit", "/exit"):
                return
            if line == "/clear":
                self.history = list(self.opening)
            elif line.startswith("/"):
                print(_HELP, file=sys.stderr)
            elif line:
                self.turn(line)

    def turn(self, text: str) -> None:
        """Send `text`, print the streamed answer, and add both to the history. A refused text is removed again, and so
        is one without an answer. Reasoning is printed beside the answer, and not kept."""
        self.history.append({"role": "user", "content": text})
        pieces: list[str] = []
        begin = time.perf_counter()
        first, thinks = begin, False
        try:
            for piece in self.model.stream(self.history, self.sampling):
                first = time.perf_counter() if first == begin else first
                if isinstance(piece, Thought):
                    thinks = True
                    print(piece, end="", flush=True, file=sys.stderr)
                    continue
                if thinks and not pieces:
                    print(file=sys.stderr, flush=True)
                pieces.append(piece)
                print(piece, end="", flush=True)
        except InvalidRequest as error:
            self.history.pop()
            print(f"allotrope: error: {error} /clear forgets the conversation.", file=sys.stderr)
            return
        except KeyboardInterrupt:
            pass
        print()
        if pieces:
            self.history.append({"role": "assistant", "content": "".join(pieces)})
        else:
            self.history.pop()
            if thinks:
                print("(it ended within its reasoning; --max-tokens lets it go on)", file=sys.stderr)
        print(self._speed(begin, first, time.perf_counter()), file=sys.stderr)

    def _speed(self, begin: float, first: float, end: float) -> str:
        tokens = self.model.last_tokens
        rate = (tokens - 1) / (end - first) if tokens > 1 and end > first else 0.0
        return f"[{tokens} tokens, {rate:.1f} tokens/s, first after {1000 * (first - begin):.0f} ms]"
