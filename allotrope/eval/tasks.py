"""Tasks with exact answers, drawn from a seed.

Every task is text in lines `question answer "\\n"`. A prompt holds solved lines and ends with a question. So solved
lines teach in training, and are examples to a model that never saw the task. Formats are short, for models that read
bytes:

    recall      river stone \\n#qz=47\\nhill \\n?qz=      -> 47
    copy        C:kwjd>                                  -> kwjd
    sort        S:kwjd>                                  -> djkw
    arithmetic  153+48=                                  -> 201
    json        J:age 42,name fox>                       -> {"age":42,"name":"fox"}
    tool_call   T:wind(town:str,day:int) day 3,town oak> -> {"name":"wind","arguments":{"town":"oak","day":3}}

Owns formats, drawing and marking. It must not know models, tokenizers or engines: training imports it too.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

WORDS = (
    "oak ash elm fir ivy fox owl elk bee ant hen ram cat dog sea bay ice fog dew sun sky day rain wind hill lake wood "
    "rock sand salt iron gold milk corn rice bread apple grape stone river field storm cloud light house table chair "
    "paper water ship boat road gate wall roof lamp bell coat"
).split()
FIELDS = tuple("age town name size year code unit rank cost pace kind open".split())
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Bytes between two items of recall; a prompt has one of them.
_GAPS = (8, 32, 96)
# There are 26 x 26 keys of two letters.
_MAX_PAIRS = 512

Split = Literal["train", "eval"]


@dataclass(frozen=True)
class Example:
    """A prompt and the only right answer, which a newline ends.

    `facts`: "length", bytes of the prompt; "lines", questions in it; recall also has "distance", bytes from the value
    to the answer. `spans`: (start, end) of every answer with its newline in `text`, the last one being the question's.
    """

    task: str
    prompt: bytes
    answer: bytes
    facts: Mapping[str, int]
    spans: tuple[tuple[int, int], ...] = field(repr=False)

    @property
    def text(self) -> bytes:
        """Prompt, answer and newline: what training reads."""
        return self.prompt + self.answer + b"\n"


@dataclass(frozen=True)
class Mark:
    """`exact`: the answer is right. `valid`: it has the format that was asked for, right or not."""

    exact: bool
    valid: bool


def task_rng(split: Split, task: str, index: int, seed: int = 0) -> random.Random:
    """Random numbers of one example. Those of "train" and "eval" have no seed in common."""
    return random.Random(f"{split}/{seed}/{task}/{index}")


def make(task: str, rng: random.Random, length: int, distance: int | None = None) -> Example:
    """Draw an example whose prompt has exactly `length` bytes. `distance`: near which recall is to look back; by
    default any distance, near ones as often as far ones by their logarithm.

    Raises ValueError if there is no such task, or if the question alone is longer.
    """
    if task not in TASKS:
        raise ValueError(f"there is no task {task!r}; there are: {', '.join(TASKS)}")
    if task == "recall":
        return _recall(rng, length, distance)
    return _lines(task, rng, length)


def mark(example: Example, output: str) -> Mark:
    """Judge what a model wrote after the prompt: the first line counts."""
    line, answer = output.lstrip(" ").partition("\n")[0].strip(), example.answer.decode()
    if example.task not in ("json", "tool_call"):
        return Mark(line == answer, line.isdigit() if answer.isdigit() else line.isalpha() and line.islower())
    right = json.loads(answer)
    try:
        found = json.loads(line, parse_constant=_refuse)
    except ValueError:
        return Mark(False, False)
    return Mark(_same(found, right), _outline(found) == _outline(right))


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _same(found: Any, right: Any) -> bool:
    # In Python, True == 1.
    return bool(found == right and _outline(found) == _outline(right))


def _outline(value: Any) -> Any:
    """Keys and types of a JSON value; the name of a called function counts as well."""
    if isinstance(value, dict):
        return {key: value[key] if key == "name" and "arguments" in value else _outline(value[key]) for key in value}
    return [_outline(one) for one in value] if isinstance(value, list) else type(value).__name__


def _recall(rng: random.Random, length: int, distance: int | None) -> Example:
    """Pairs `#key=value` and queries `?key=value` in filler; each key has one pair and at most one query."""
    question = len("?ab=")
    room = length - question
    if room < len("#ab=00\n"):
        raise ValueError(f"recall has prompts of at least 11 bytes, not of {length}")
    keys = iter(rng.sample([a + b for a in _LETTERS for b in _LETTERS], _MAX_PAIRS))
    # Keys must last to the end of the prompt.
    gap = max(rng.choice(_GAPS), length // _MAX_PAIRS)
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    # Pairs that no query asked for yet: where the value begins, key, value.
    open_pairs: list[tuple[int, str, str]] = []
    size = 0
    # Half as many queries as pairs, so that pairs at all distances stay open.
    while size + len("#ab=00\n") <= room:
        if len(open_pairs) > 1 and rng.random() < 1 / 3:
            _, key, value = open_pairs.pop(_choose(rng, open_pairs, size + question, None))
            spans.append((size + question, size + question + 3))
            item = f"?{key}={value}\n"
        elif (new := next(keys, None)) is not None:
            open_pairs.append((size + question, new, f"{rng.randrange(100):02}"))
            item = f"#{new}={open_pairs[-1][2]}\n"
        else:
            item = ""
        parts.append(item)
        size += len(item)
        parts.append(_filler(rng, min(rng.randrange(2 * gap), room - size)))
        size += len(parts[-1])
    parts.append(_filler(rng, room - size))
    at, key, value = open_pairs[_choose(rng, open_pairs, length, distance)]
    facts = {"length": length, "lines": len(spans), "distance": length - at}
    return _example("recall", "".join(parts) + f"?{key}=", value, facts, spans)


def _choose(rng: random.Random, pairs: list[tuple[int, str, str]], end: int, distance: int | None) -> int:
    """The index of the pair nearest to a distance from `end`."""
    near, far = end - pairs[-1][0], end - pairs[0][0]
    wanted = distance if distance is not None else near * (far / near) ** rng.random()
    index = min(bisect_left(pairs, (end - wanted,)), len(pairs) - 1)
    before = max(0, index - 1)
    return min(index, before, key=lambda i: abs(end - pairs[i][0] - wanted))


def _filler(rng: random.Random, size: int) -> str:
    """Exactly `size` bytes: words, and a newline at their end."""
    words: list[str] = []
    count = 0
    while count < size:
        words.append(rng.choice(WORDS))
        count += len(words[-1]) + 1
    return f"{' '.join(words)[: size - 1]:{size - 1}}\n" if size else ""


def _lines(task: str, rng: random.Random, length: int) -> Example:
    """Filler, as many solved lines as fit, and a question that none of them asks."""
    draw = _DRAW[task]
    question, answer = draw(rng)
    room = length - len(question)
    if room < 0:
        raise ValueError(f"a question of {task} may have {len(question)} bytes, more than a prompt of {length}")
    lines: list[tuple[str, str]] = []
    while True:
        line = draw(rng)
        if (needed := len(line[0]) + len(line[1]) + 1) > room:
            break
        if line[0] != question:
            lines.append(line)
            room -= needed
    text = _filler(rng, room)
    spans = []
    for asked, solved in lines:
        text += asked
        spans.append((len(text), len(text) + len(solved) + 1))
        text += f"{solved}\n"
    return _example(task, text + question, answer, {"length": length, "lines": len(spans)}, spans)


def _example(task: str, prompt: str, answer: str, facts: dict[str, int], spans: list[tuple[int, int]]) -> Example:
    last = (len(prompt), len(prompt) + len(answer) + 1)
    return Example(task, prompt.encode(), answer.encode(), facts, (*spans, last))


def _copy(rng: random.Random) -> tuple[str, str]:
    text = "".join(rng.choices(_LETTERS, k=rng.randint(4, 24)))
    return f"C:{text}>", text


def _sort(rng: random.Random) -> tuple[str, str]:
    text = "".join(rng.choices(_LETTERS, k=rng.randint(3, 8)))
    return f"S:{text}>", "".join(sorted(text))


def _arithmetic(rng: random.Random) -> tuple[str, str]:
    a, b = (rng.randrange(10 ** rng.randint(1, 3)) for _ in range(2))
    if rng.random() < 0.5:
        return f"{a}+{b}=", str(a + b)
    return f"{max(a, b)}-{min(a, b)}=", str(abs(a - b))


def _fields(rng: random.Random, count: int) -> dict[str, Any]:
    """`count` fields: words, numbers and truth values."""
    return {name: _value(rng) for name in rng.sample(FIELDS, count)}


def _value(rng: random.Random) -> Any:
    kind = rng.randrange(5)
    return rng.random() < 0.5 if kind == 0 else rng.randrange(1000) if kind < 3 else rng.choice(WORDS)


def _said(name: str, value: Any) -> str:
    return f"{name} {value if isinstance(value, str) else json.dumps(value)}"


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _json(rng: random.Random) -> tuple[str, str]:
    fields = _fields(rng, rng.randint(1, 4))
    return f"J:{','.join(_said(*entry) for entry in fields.items())}>", _dump(fields)


def _tool_call(rng: random.Random) -> tuple[str, str]:
    """A function described by its parameters; the arguments are said in another order."""
    name, arguments = rng.choice(WORDS), _fields(rng, rng.randint(1, 3))
    parameters = ",".join(f"{key}:{type(value).__name__}" for key, value in arguments.items())
    said = rng.sample(list(arguments.items()), len(arguments))
    question = f"T:{name}({parameters}) {','.join(_said(*entry) for entry in said)}>"
    return question, _dump({"name": name, "arguments": arguments})


_DRAW: Mapping[str, Callable[[random.Random], tuple[str, str]]] = {
    "copy": _copy,
    "sort": _sort,
    "arithmetic": _arithmetic,
    "json": _json,
    "tool_call": _tool_call,
}
TASKS = ("recall", *_DRAW)
"""Names of all tasks."""
