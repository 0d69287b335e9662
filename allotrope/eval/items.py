"""What a model is asked: items of tasks, and chunks of a text, as token ids.

All of it follows from the options, the tokenizer and a seed. Must not know engines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from allotrope.errors import ConfigError, refuse_options
from allotrope.eval.options import EvalOptions
from allotrope.eval.tasks import Example, make, task_rng
from allotrope.text.tokenizer import Tokenizer
from allotrope.verify.sample import ForcedTokens

# Tokens that may follow an answer's bytes: its newline, and the spaces that some models put into JSON.
_SPARE = {"json": 24, "tool_call": 24}
# The last tokens of a chunk of text are fed one by one, as generated ones are.
DECODED = 16


@dataclass(frozen=True)
class Item:
    """`ids`: the prompt. `max_tokens`: enough for its answer, if each token has one byte."""

    example: Example
    ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class TextChunks:
    """`chunks`: tokens of a text, the last of which are forced. `sizes`: bytes of each scored token, by chunk; 1 for
    each token where `unit` is "token", because the tokenizer does not say its bytes.
    """

    source: str
    sha256: str
    chunks: tuple[ForcedTokens, ...]
    sizes: tuple[tuple[int, ...], ...]
    unit: str

    @property
    def first(self) -> int:
        """The first position that is scored: tokens of the second half have much context, whatever the chunk."""
        return len(self.chunks[0].prompt + self.chunks[0].forced) // 2


@dataclass(frozen=True)
class Items:
    """`tasks`: name to its items. `text`: None where it is not measured."""

    tasks: dict[str, tuple[Item, ...]]
    text: TextChunks | None

    @property
    def longest(self) -> int:
        """The context, in tokens, that every item fits into."""
        asked = [len(item.ids) + item.max_tokens for items in self.tasks.values() for item in items]
        chunks = () if self.text is None else self.text.chunks
        return max(asked + [len(chunk.prompt) + len(chunk.forced) for chunk in chunks])

    @property
    def sha256(self) -> str:
        """The same for equal items in equal order."""
        digest = hashlib.sha256()
        for items in self.tasks.values():
            for item in items:
                digest.update(item.example.text)
        for chunk in () if self.text is None else self.text.chunks:
            digest.update(repr((chunk.prompt, chunk.forced)).encode())
        return digest.hexdigest()


def make_items(options: EvalOptions, tokenizer: Tokenizer, seed: int, context: int) -> Items:
    """Draw every item. `context`: most tokens that a prompt and its answer may have.

    Raises ConfigError if a length is too short for a task or too long for the context, or the text for two chunks.
    """
    if "text" in options.named_tasks() and options.text_length > context:
        raise ConfigError(f"bad options: text_length={options.text_length}; the model has a context of {context}.")
    names = [name for name in options.named_tasks() if name != "text"]
    lengths = options.named_lengths()
    tasks: dict[str, tuple[Item, ...]] = {}
    wrong: list[str] = []
    for name in names:
        chosen = lengths if name == "recall" else lengths[:1]
        try:
            tasks[name] = tuple(
                _item(name, options.items * j + i, length + i % 64, tokenizer, seed, context)
                for j, length in enumerate(chosen)
                for i in range(options.items)
            )
        except ValueError as error:
            wrong.append(f"lengths={options.lengths!r}: {error}")
    refuse_options(wrong)
    return Items(tasks, _text_chunks(options, tokenizer) if "text" in options.named_tasks() else None)


def _item(task: str, index: int, length: int, tokenizer: Tokenizer, seed: int, context: int) -> Item:
    example = make(task, task_rng("eval", task, index, seed), length)
    ids = tuple(tokenizer.encode(example.prompt.decode()))
    item = Item(example, ids, len(example.answer) + _SPARE.get(task, 2))
    if len(ids) + item.max_tokens > context:
        raise ValueError(
            f"a prompt of {length} bytes and its answer have up to {len(ids) + item.max_tokens} tokens, "
            f"and the model a context of {context}"
        )
    return item


def read_text(path: Path | None) -> tuple[str, str]:
    """A text and its name: a file, or what Python's `help()` says of the language, which every machine has."""
    if path is not None:
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except UnicodeDecodeError as error:
            raise ConfigError(f"bad options: text={str(path)!r} is no UTF-8 text: {error}.") from error
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)), "help topics of Python's pydoc"


def _text_chunks(options: EvalOptions, tokenizer: Tokenizer) -> TextChunks:
    text, source = read_text(options.text)
    lead = _lead(tokenizer)
    size = options.text_length - len(lead)
    ids = tokenizer.encode(text, add_special_tokens=False)
    count = min(options.items, len(ids) // size)
    if count < 2:
        raise ConfigError(
            f"bad options: {source} has {len(ids)} tokens, text_length={options.text_length} needs {2 * size} for two "
            f"chunks; give a longer --text or a smaller --text-length."
        )
    # Spread over the whole text, which may be about different things.
    step = (len(ids) - size) // (count - 1)
    cuts = [ids[i * step : i * step + size] for i in range(count)]
    chunks = [ForcedTokens(f"chunk{i}", (*lead, *cut[:-DECODED]), tuple(cut[-DECODED:])) for i, cut in enumerate(cuts)]
    known = _knows_bytes(tokenizer, text, ids)
    first = options.text_length // 2 - len(lead)
    sizes = [tuple(len(tokenizer.token_bytes(token)) if known else 1 for token in cut[first:]) for cut in cuts]
    digest = hashlib.sha256(text.encode()).hexdigest()
    return TextChunks(source, digest, tuple(chunks), tuple(sizes), "byte" if known else "token")


def _lead(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts before a text, such as BOS."""
    bare, full = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    return full[: full.index(bare[0])] if bare and bare[0] in full else []


def _knows_bytes(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> bool:
    """Whether the bytes of the tokens are those of the text; some tokenizers put a space before a text."""
    joined = b"".join(tokenizer.token_bytes(token) for token in ids)
    return joined.removeprefix(b" ") == text.encode().removeprefix(b" ")
