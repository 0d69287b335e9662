"""Sampling parameters are refused where their values can be of no use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from allotrope.errors import InvalidRequest
from allotrope.request import Grammar, SamplingParams

VOCABULARY = 100


@pytest.mark.parametrize(
    ("name", "value", "needs"),
    [
        ("n", 1.5, "a whole number"),
        ("n", True, "a whole number"),
        ("temperature", "a", "a number"),
        ("temperature", None, "a number"),
        ("temperature", True, "a number"),
        ("top_k", 1.5, "a whole number"),
        ("top_k", "5", "a whole number"),
        ("frequency_penalty", "x", "a number"),
        ("seed", 1.5, "a whole number or None"),
        ("seed", "a", "a whole number or None"),
        ("max_tokens", 1.5, "a whole number or None"),
        ("max_tokens", "4", "a whole number or None"),
        ("min_tokens", None, "a whole number"),
        ("logprobs", True, "a whole number or None"),
        ("prompt_logprobs", 1.0, "a whole number or None"),
        ("stop", "text", "a tuple or list of texts"),
        ("stop", "", "a tuple or list of texts"),
        ("stop", None, "a tuple or list of texts"),
        ("stop", [1], "a tuple or list of texts"),
        ("stop_token_ids", 5, "a tuple or list of whole numbers"),
        ("stop_token_ids", [5.5], "a tuple or list of whole numbers"),
        ("stop_token_ids", (True,), "a tuple or list of whole numbers"),
        ("allowed_token_ids", "5", "a tuple or list of whole numbers or None"),
        ("logit_bias", [1], "a dict from whole numbers to numbers"),
        ("logit_bias", None, "a dict from whole numbers to numbers"),
        ("logit_bias", {"5": 1.0}, "a dict from whole numbers to numbers"),
        ("logit_bias", {5: "1"}, "a dict from whole numbers to numbers"),
        ("ignore_eos", "x", "True or False"),
        ("skip_special_tokens", None, "True or False"),
        ("grammar", "a+", "a Grammar or None"),
    ],
)
def test_values_of_another_type_are_refused(name: str, value: Any, needs: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(**{name: value}).check(VOCABULARY)
    assert raised.value.param == name
    assert str(raised.value) == f"{name}={value!r}; {needs} is needed."


def test_numbers_of_numpy_are_taken() -> None:
    ids = np.array([5, 6])
    params = SamplingParams(temperature=np.float32(0.5), max_tokens=ids[0], stop_token_ids=list(ids), top_k=ids[1])
    params.check(VOCABULARY)
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        replace(params, ignore_eos=np.bool_(True)).check(VOCABULARY)


def test_lists_and_whole_numbers_are_taken() -> None:
    params = SamplingParams(
        temperature=0, top_p=1, seed=-3, stop=["a"], stop_token_ids=[5], logit_bias={5: 1}, allowed_token_ids=[5, 6]
    )  # type: ignore[arg-type]
    params.check(VOCABULARY)
    replace(params, max_tokens=None, logprobs=0, grammar=Grammar("json_object")).check(VOCABULARY)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("regex", 5), "grammar.source=5; a text is needed."),  # type: ignore[arg-type]
        (Grammar("json_schema", {"type": "object"}), "grammar.source={'type': 'object'}; a text is needed."),  # type: ignore[arg-type]
        (Grammar("regex", "a", after=5), "grammar.after=5; a text is needed."),  # type: ignore[arg-type]
    ],
)
def test_grammars_are_texts(grammar: Grammar, reason: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(grammar=grammar).check(VOCABULARY)
    assert str(raised.value) == reason
