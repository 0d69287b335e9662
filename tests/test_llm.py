"""What `LLM.generate` takes as prompts and as their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import write_tiny

from allotrope import LLM, SamplingParams
from allotrope.architectures.llama import tiny_llama
from allotrope.errors import InvalidRequest

GREEDY = SamplingParams(temperature=0, max_tokens=2)
IDS = [5, 6, 7]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    loaded = LLM(write_tiny(tiny_llama(), tmp_path_factory.mktemp("llama")).directory, device="cpu")
    yield loaded
    loaded.close()


def prompt_ids(llm: LLM, prompts: Any) -> list[list[int]]:
    return [output.prompt_token_ids for output in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize(
    "prompt",
    [
        IDS,
        tuple(IDS),
        range(5, 8),
        np.array(IDS),
        np.array(IDS, dtype=np.uint16),
        torch.tensor(IDS),
        list(np.array(IDS)),
        list(torch.tensor(IDS)),
        {"prompt_token_ids": IDS},
        {"prompt_token_ids": np.array(IDS)},
    ],
    ids=repr,
)
def test_one_prompt_and_a_list_of_it(llm: LLM, prompt: Any) -> None:
    assert prompt_ids(llm, prompt) == [IDS]
    assert prompt_ids(llm, [prompt]) == [IDS]
    assert prompt_ids(llm, ([8], prompt)) == [[8], IDS]


def test_rows_of_an_array_are_prompts(llm: LLM) -> None:
    rows = [[5, 6], [7, 8]]
    assert prompt_ids(llm, np.array(rows)) == prompt_ids(llm, torch.tensor(rows)) == rows
    assert prompt_ids(llm, []) == []


@pytest.mark.parametrize(
    "prompt",
    [
        [5.5, 6.2],
        [True, False],
        [5, None],
        [5, "a"],
        np.array([5.0, 6.0]),
        torch.tensor([5.0]),
        {"prompt_token_ids": "text"},
        {"prompt": IDS},
        {"text": "a"},
        {"prompt_token_ids": IDS, "multi_modal_data": None},
        {},
    ],
    ids=repr,
)
def test_prompts_of_another_type_are_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt=.*; a text or a list of token ids"):
        llm.generate(prompt, GREEDY)
    with pytest.raises(InvalidRequest, match=r"^prompts\[1\]=.*; a text or a list of token ids"):
        llm.generate([IDS, prompt], GREEDY)


@pytest.mark.parametrize(
    "prompts",
    [None, 5, b"abc", bytearray(b"abc"), iter([IDS]), {5, 6}, np.array(5)],
    ids=lambda prompts: type(prompts).__name__,
)
def test_what_is_no_prompt(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompts=.*; a prompt or a list of prompts is needed"):
        llm.generate(prompts, GREEDY)
    with pytest.raises(InvalidRequest, match=r"^prompts\[1\]=.*; a text or a list of token ids"):
        llm.generate([IDS, prompts], GREEDY)
    assert llm.engine.num_waiting == 0


@pytest.mark.parametrize("params", [{"temperature": 0}, [GREEDY, None], "no", 5], ids=repr)
def test_parameters_of_another_type_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^params has .*; SamplingParams for all prompts"):
        llm.generate([IDS, IDS], params)
    assert llm.engine.num_waiting == 0
    assert prompt_ids(llm, IDS) == [IDS]
