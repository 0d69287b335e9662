"""Answers are computed again here from the prompts' text alone, by other means than the generators'."""

from __future__ import annotations

import json
import random
import re

import pytest

from allotrope.eval.tasks import TASKS, Example, make, mark, task_rng

LENGTHS = (96, 131, 500, 2048)


def _examples(task: str, count: int = 25) -> list[Example]:
    return [make(task, task_rng("eval", task, i), LENGTHS[i % len(LENGTHS)]) for i in range(count)]


def _value(text: str) -> object:
    return True if text == "true" else False if text == "false" else int(text) if text.isdigit() else text


def _said(text: str) -> dict[str, object]:
    return {name: _value(value) for name, value in (part.split(" ") for part in text.split(","))}


def _solve(task: str, question: str, before: str) -> object:
    """`question`: the last line of a prompt. `before`: all that stands before it."""
    if task == "recall":
        pairs = re.findall(rf"#{question[-3:-1]}=(\d\d)\n", before)
        assert len(pairs) == 1, "each key has one value"
        return pairs[0]
    if task == "copy":
        return question.removeprefix("C:").removesuffix(">")
    if task == "sort":
        letters = question.removeprefix("S:").removesuffix(">")
        return "".join(letter * letters.count(letter) for letter in "abcdefghijklmnopqrstuvwxyz")
    if task == "arithmetic":
        # The whole question, and nothing that Python would run besides.
        assert re.fullmatch(r"\d+[+-]\d+=", question)
        return str(eval(question[:-1]))
    if task == "json":
        return _said(question.removeprefix("J:").removesuffix(">"))
    found = re.fullmatch(r"T:(\w+)\((.*)\) (.*)>", question)
    assert found is not None
    order = [part.split(":")[0] for part in found[2].split(",")]
    said = _said(found[3])
    types = {part.split(":")[0]: part.split(":")[1] for part in found[2].split(",")}
    assert {name: type(value).__name__ for name, value in said.items()} == types
    return {"name": found[1], "arguments": {name: said[name] for name in order}}


@pytest.mark.parametrize("task", TASKS)
def test_every_answer_of_a_text_is_right(task: str) -> None:
    """The question's, and those of the solved lines that training learns from."""
    solved = 0
    for example in _examples(task):
        text = example.text.decode()
        assert example.spans[-1] == (len(example.prompt), len(text))
        for start, end in example.spans:
            question = text[:start].rpartition("\n")[2]
            answer = text[start:end]
            assert answer.endswith("\n") and "\n" not in answer[:-1]
            right = _solve(task, question, text[: start - len(question)])
            assert right == (json.loads(answer) if isinstance(right, dict) else answer[:-1])
            if isinstance(right, dict):
                assert " " not in answer and list(json.loads(answer)) == list(right)
            solved += 1
    assert solved > 50


@pytest.mark.parametrize("task", TASKS)
def test_prompts_have_exactly_the_length_asked_for(task: str) -> None:
    for length in range(96, 96 + 64):
        example = make(task, task_rng("eval", task, length), length)
        assert len(example.prompt) == length == example.facts["length"]
        assert example.facts["lines"] == len(example.spans) - 1


def test_recall_looks_back_as_far_as_it_says() -> None:
    distances = []
    for i in range(60):
        example = make("recall", task_rng("eval", "recall", i), 4096)
        question = example.prompt.rpartition(b"\n")[2]
        assert question[:1] == b"?" and example.prompt.count(question) == 1
        at = example.prompt.index(b"#" + question[1:]) + len(question)
        assert example.facts["distance"] == len(example.prompt) - at
        distances.append(len(example.prompt) - at)
    assert min(distances) < 64 and max(distances) > 3000 and sum(256 < one < 2048 for one in distances) > 10


@pytest.mark.parametrize("wanted", [100, 1000, 10_000, 16_000])
def test_recall_looks_back_about_as_far_as_it_is_asked_to(wanted: int) -> None:
    for i in range(5):
        example = make("recall", task_rng("eval", "recall", i), 16_384, distance=wanted)
        assert abs(example.facts["distance"] - wanted) < 700


@pytest.mark.parametrize("task", TASKS)
def test_examples_follow_from_split_seed_and_index(task: str) -> None:
    once, again = _examples(task), _examples(task)
    assert once == again
    other = [
        make(task, task_rng(split, task, i, seed), 500)
        for split, seed in (("eval", 0), ("train", 0), ("train", 1))
        for i in range(40)
    ]
    assert len({example.text for example in other}) == 120


def test_equal_tasks_of_the_two_splits_share_hardly_a_question() -> None:
    """Copied texts are drawn from so many that a shared one would mean shared random numbers."""
    texts = {
        split: {
            line for i in range(200) for line in make("copy", task_rng(split, "copy", i), 300).prompt.split(b"\n")[1:]
        }
        for split in ("train", "eval")
    }
    long = {split: {line for line in lines if len(line) > 14} for split, lines in texts.items()}
    assert len(long["train"]) > 200 and not long["train"] & long["eval"]


def test_what_cannot_be_drawn_is_refused_with_its_length() -> None:
    rng = random.Random(0)
    with pytest.raises(ValueError, match="no task 'sums'; there are: recall, copy"):
        make("sums", rng, 100)
    with pytest.raises(ValueError, match="at least 11 bytes, not of 10"):
        make("recall", rng, 10)
    with pytest.raises(ValueError, match="more than a prompt of 3"):
        make("copy", rng, 3)


def _example(task: str, answer: str) -> Example:
    return Example(task, b"?", answer.encode(), {}, ((1, 2),))


@pytest.mark.parametrize(
    ("task", "answer", "output", "exact", "valid"),
    [
        ("recall", "07", "07\n#ab=12", True, True),
        ("recall", "07", " 07", True, True),
        ("recall", "07", "7", False, True),
        ("recall", "07", "070", False, True),
        ("recall", "07", "", False, False),
        ("recall", "07", "\n07", False, False),
        ("sort", "abc", "acb", False, True),
        ("sort", "abc", "ABC", False, False),
        ("arithmetic", "12", "-12", False, False),
        ("json", '{"age":1}', '{"age": 1}', True, True),
        ("json", '{"age":1}', '{"age":2}\n', False, True),
        ("json", '{"age":1}', '{"age":true}', False, False),
        ("json", '{"age":1}', '{"age":NaN}', False, False),
        ("json", '{"age":1}', '{"age":1} and', False, False),
        ("json", '{"age":1}', "1", False, False),
        ("json", '{"age":1,"day":2}', '{"day":2,"age":1}', True, True),
        ("tool_call", '{"name":"fox","arguments":{"a":1}}', '{"name":"fox","arguments":{"a":2}}', False, True),
        ("tool_call", '{"name":"fox","arguments":{"a":1}}', '{"name":"owl","arguments":{"a":1}}', False, False),
        ("tool_call", '{"name":"fox","arguments":{"a":1}}', '{"name":"fox","arguments":{"a":1,"b":1}}', False, False),
        ("tool_call", '{"name":"fox","arguments":{"a":1}}', '{"name":["fox"],"arguments":{"a":1}}', False, False),
    ],
)
def test_marks(task: str, answer: str, output: str, exact: bool, valid: bool) -> None:
    found = mark(_example(task, answer), output)
    assert (found.exact, found.valid) == (exact, valid)
