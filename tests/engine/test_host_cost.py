"""What a decode step costs the host for each of its sequences: at 64 and more of them a GPU waits for Python."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from tiny_checkpoints import prompts, write_tiny

from allotrope import LLM, SamplingParams
from allotrope.architectures.qwen3_next import tiny_qwen3_next

FEW, MANY = 4, 12
# Steps of two runs of which only the number of tokens differs.
SHORT, LONG = 6, 38
# Of the functions in `allotrope.engine` alone. There were 69 when 64 sequences made a step wait for the host.
MOST_CALLS = 36


def test_a_sequence_costs_few_calls_a_step(tmp_path: Path) -> None:
    """Python functions that one more sequence calls in a decode step, on the way from its token to the next plan."""
    llm = LLM(str(write_tiny(tiny_qwen3_next(), tmp_path).directory), async_scheduling="on", max_num_seqs=MANY)
    of_step = {}
    for count in (FEW, MANY):
        calls = [calls_of_engine(llm, count, tokens) for tokens in (SHORT, LONG)]
        of_step[count] = (calls[1] - calls[0]) / (LONG - SHORT)
    assert (of_step[MANY] - of_step[FEW]) / (MANY - FEW) <= MOST_CALLS


def calls_of_engine(llm: LLM, count: int, tokens: int) -> int:
    calls = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and "/allotrope/engine/" in frame.f_code.co_filename

    asked = prompts([9] * count)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    sys.setprofile(note)
    try:
        llm.generate(asked, params)
    finally:
        sys.setprofile(None)
    return calls
