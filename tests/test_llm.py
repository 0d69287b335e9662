"""What `LLM.generate` takes as prompts and as their parameters."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import write_tiny

from allotrope import LLM, SamplingParams
from allotrope.architectures.llama import tiny_llama
from allotrope.architectures.qwen3_next import tiny_qwen3_next
from allotrope.engine.kv_cache_manager import KVCacheManager
from allotrope.errors import AllotropeError, InvalidRequest, RequestsFailed

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


@pytest.mark.parametrize("n", [1, 2])
def test_a_prompt_that_fails_takes_no_other_with_it(tmp_path: Path, n: int) -> None:
    """A token's embedding is broken."""
    llm = LLM(write_tiny(tiny_llama(), tmp_path).directory, device="cpu", max_num_seqs=3)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, n=n)
    want = [output.outputs for output in llm.generate([IDS, IDS[:2]], params)]
    llm.engine.model.embedding.weight.data[12] = torch.nan
    with pytest.raises(RequestsFailed, match=r"^2 of 4 requests failed, the first of them as: .*not numbers") as error:
        llm.generate([IDS, [12, 5], IDS[:2], [7, 12]], params)
    outputs = error.value.outputs
    assert [output and output.outputs for output in outputs] == [want[0], None, want[1], None]
    assert not llm.engine.requests and not any(llm.engine.stats().pages_used.values())
    # Alone it is its own error.
    with pytest.raises(AllotropeError, match=r"^request .* failed: .*not numbers"):
        llm.generate([12, 5], params)
    llm.close()


@pytest.mark.parametrize("n", [1, 2])
def test_a_seed_of_numpy_is_that_seed(llm: LLM, n: int) -> None:
    def tokens(seed: Any) -> list[list[int]]:
        (output,) = llm.generate(IDS, SamplingParams(max_tokens=4, n=n, seed=seed))
        return [one.token_ids for one in output.outputs]

    assert tokens(np.int64(5)) == tokens(5)
    assert llm.engine.num_waiting == 0


def test_more_sequences_than_may_wait_are_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(write_tiny(tiny_llama(), tmp_path).directory, device="cpu", max_num_waiting=4)
    monkeypatch.setattr(llm.engine, "step", lambda: pytest.fail("a step has run"))
    with pytest.raises(InvalidRequest, match=r"^n=5 sequences are more than may wait"):
        llm.generate([[5], [6]], [GREEDY, SamplingParams(n=5)])
    llm.close()


@pytest.mark.parametrize("interrupted", [1, 2, 3])
def test_a_step_that_failed_leaves_no_state_that_was_not_copied(tmp_path: Path, interrupted: int) -> None:
    """The state after a prompt's last full page is copied with the step behind it."""
    llm = LLM(write_tiny(tiny_qwen3_next(), tmp_path).directory, device="cpu", dtype="float32", page_size=4)
    prompt, params = list(range(8, 41)), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    want = llm.generate(prompt, params)[0].outputs[0].token_ids
    # Another prompt's state lies where that one lay.
    llm.engine.reset_prefix_cache()
    llm.generate(prompt[::-1], params)
    llm.engine.reset_prefix_cache()
    executor, calls = llm.engine._executor, itertools.count(1)
    run = executor.run

    def fail(*arguments: Any) -> Any:
        if next(calls) == interrupted:
            raise KeyboardInterrupt
        return run(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "run", fail)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompt, params)
    assert llm.generate(prompt, params)[0].outputs[0].token_ids == want
    assert not any(llm.engine.stats().pages_used.values())
    llm.close()


def test_an_interrupt_waits_for_the_end_of_the_step(llm: LLM) -> None:
    reserve, seen = KVCacheManager.reserve, []

    def interrupted(*arguments: Any, **more: Any) -> bool:
        if not seen:
            seen.append(True)
            signal.raise_signal(signal.SIGINT)
        return reserve(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCacheManager, "reserve", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([IDS, [8]], GREEDY)
    assert not llm.engine.requests
    assert not any(llm.engine.stats().pages_used.values())
    assert len(llm.generate(IDS, GREEDY)[0].outputs[0].token_ids) == 2
