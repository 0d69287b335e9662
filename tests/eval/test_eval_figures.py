"""Figures of answers that are made here: which items each figure counts, and what is outside."""

from __future__ import annotations

import json
from pathlib import Path

from allotrope.architectures.registry import find_architecture
from allotrope.config import EngineConfig
from allotrope.engine.report import SpeculationStats
from allotrope.eval.answers import MODES, Answer, Answers
from allotrope.eval.figures import Measured, measure
from allotrope.eval.items import Item, Items
from allotrope.eval.tasks import make, task_rng


def _items(task: str, count: int = 128, length: int = 700) -> Items:
    examples = [make(task, task_rng("eval", task, i), length + i % 64) for i in range(count)]
    return Items({task: tuple(Item(one, tuple(one.prompt), 8) for one in examples)}, None)


def _answers(items: Items, right: list[bool], wrong: str = "?") -> Measured:
    tasks = {
        task: tuple(
            Answer(item.example.answer.decode() if good else wrong, ()) for item, good in zip(asked, right, strict=True)
        )
        for task, asked in items.tasks.items()
    }
    return measure(items, Answers("made", tasks, ()))


def _value(measured: Measured, name: str) -> tuple[float, int]:
    (found,) = [one.estimate for one in measured.figures if one.name == name]
    return found.value, found.count


def test_recall_that_fails_far_away_shows_in_its_buckets_alone() -> None:
    items = _items("recall")
    distances = [item.example.facts["distance"] for item in items.tasks["recall"]]
    found = _answers(items, [distance < 256 for distance in distances])
    assert _value(found, "recall, distance 0-63") == (1.0, sum(one < 64 for one in distances))
    assert _value(found, "recall, distance 64-255") == (1.0, sum(64 <= one < 256 for one in distances))
    assert _value(found, "recall, distance 256-1023") == (0.0, sum(one >= 256 for one in distances))
    outside = [one.figure.name for one in found.differences(_answers(items, [True] * 128)) if not one.inside]
    assert "recall" in outside and "recall, distance 256-1023" in outside
    assert "recall, distance 0-63" not in outside and "recall, distance 64-255" not in outside


def test_recall_that_fails_at_one_length_in_four_shows_in_its_residues() -> None:
    items = _items("recall")
    lengths = [len(item.ids) for item in items.tasks["recall"]]
    found = _answers(items, [length % 4 != 3 for length in lengths])
    assert [_value(found, f"recall, tokens = {i} mod 4") for i in range(4)] == [(1.0, 32)] * 3 + [(0.0, 32)]
    assert len(found.residues) == 64 and all(total == 2 for _, total in found.residues)
    assert {residue % 4 for residue, right, _ in found.worst_residues(16) if not right} == {3}
    assert not found.even and _answers(items, [True] * 128).even
    wanted = _answers(items, [True] * 128)
    outside = {one.figure.name for one in found.differences(wanted) if not one.inside}
    assert {"recall", "recall, tokens = 3 mod 4"} <= outside and "recall, tokens = 0 mod 4" not in outside


def test_formats_are_counted_apart_from_answers() -> None:
    items = _items("json", 20, 200)
    answers = Answers("made", {"json": tuple(Answer("{}", ()) for _ in range(20))}, ())
    found = measure(items, answers)
    assert _value(found, "json") == _value(found, "json, valid") == (0.0, 20)
    right = _answers(items, [i < 15 for i in range(20)], wrong="{")
    assert _value(right, "json") == _value(right, "json, valid") == (0.75, 20)


def test_ends_of_shares_are_whole_answers() -> None:
    items = _items("copy", 64, 200)
    one_wrong, none = _answers(items, [i > 0 for i in range(64)]), _answers(items, [True] * 64)
    # Wilson's interval of 63 of 64 ends at 99.7 %.
    assert one_wrong.figures[0].estimate.high < 1
    assert [one.inside for one in none.differences(one_wrong)] == [True]
    some = [_answers(items, [i >= wrong for i in range(64)]) for wrong in (4, 5)]
    assert [one.inside for found in some for one in found.differences(none)] == [True, False]


def test_few_wrong_answers_are_inside_and_counted() -> None:
    items = _items("copy", 100, 200)
    wanted = _answers(items, [i >= 10 for i in range(100)])
    found = _answers(items, [i >= 12 for i in range(100)])
    assert [one.inside for one in found.differences(wanted)] == [True]
    assert found.unequal(wanted) == {"copy": (2, 100)}
    assert [one.inside for one in _answers(items, [i >= 30 for i in range(100)]).differences(wanted)] == [False]


def test_each_draft_has_the_share_of_those_whose_former_one_was_accepted() -> None:
    items = _items("copy", 2)
    counts = {"accepted_per_position": (8, 4, 1), "reached_per_position": (10, 8, 3)}
    stats = SpeculationStats(drafts=10, draft_tokens=29, accepted_tokens=13, **counts)
    found = measure(items, Answers("made", {}, (), drafts=stats))
    assert [_value(found, f"accepted, draft {i}") for i in (1, 2, 3)] == [(0.8, 10), (0.5, 8), (1 / 3, 3)]
    assert _value(found, "acceptance length") == (2.3, 10)
    counts = {"accepted_per_position": (0, 0, 0), "reached_per_position": (10, 0, 0)}
    none = SpeculationStats(drafts=10, draft_tokens=30, **counts)
    figures = measure(items, Answers("made", {}, (), drafts=none)).figures
    # Of no accepted draft there is no share.
    assert [figure.name for figure in figures] == ["acceptance length", "accepted, draft 1"]


def test_the_speculated_mode_takes_the_models_own_head_where_there_is_one(tmp_path: Path) -> None:
    mode = MODES["speculated"].settings[0]
    for name, method in (("DeepseekV3ForCausalLM", "mtp"), ("MistralForCausalLM", "ngram")):
        folder = tmp_path / name
        folder.mkdir()
        architecture = find_architecture({"architectures": [name]}, name)
        tiny = architecture.tiny if architecture.tiny_draft is None else architecture.tiny_draft
        (folder / "config.json").write_text(json.dumps(tiny()))
        config = EngineConfig(model=str(folder), load_format="dummy")
        assert json.loads(mode(config, 64)["speculative_config"])["method"] == method
        # What the options ask for is not replaced.
        asked = EngineConfig(model=str(folder), load_format="dummy", speculative_config='{"method": "suffix"}')
        assert "speculative_config" not in mode(asked, 64)
