"""An input that is not a number makes the output not a number, in every backend and row format, and no neighbour's.

A row that is clamped, quantized or masked must not become a plausible number on its way: then nobody would notice that
a layer before it is broken. A neighbour shares the step, the pages and the programs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from device_under_test import DEVICE
from on_cpu import skip_unless_it_runs

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.check import cases
from allotrope.attention.registry import FAMILIES
from allotrope.attention.replay import Replay, Step

FP8 = torch.float8_e4m3fn
LENGTHS, SICK = (3, 10), 8
# The sick token, the sixth of the second sequence, is a decode; what follows it is a prompt that reads its row.
STEPS: list[Step] = [[(0, 2), (1, 5)], [(0, 1), (1, 1)], [(1, 4)]]
SPECS: list[tuple[str, str, dict[str, Any]]] = [
    ("mha", "multi_head", {}),
    ("mha", "window_and_sinks", {}),
    ("mha", "multi_head", {"kv_dtype": FP8}),
    ("mla", "small", {}),
    ("mla", "released", {"kv_dtype": FP8, "row_format": "scaled"}),
    ("mla", "small", {"kv_dtype": FP8}),
    ("dsa", "picking_all", {}),
    ("gdn", "one_to_one", {}),
    ("csa", "all_overlapping", {"ratio": 2}),
    ("csa", "all_overlapping", {"ratio": 2, "kv_dtype": FP8}),
    ("csa", "all_overlapping", {"ratio": 2, "kv_dtype": FP8, "row_format": "scaled", "head_dim": 80}),
]
# A choice among rows is no number; a damaged one is only another choice.
CHOOSING = "index_"


def backends() -> list[Any]:
    return [
        pytest.param(*case, backend, id="-".join([*case[:2], *map(str, case[2].values()), backend.name]))
        for case in SPECS
        for backend in FAMILIES[case[0]].backends
    ]


@pytest.mark.parametrize(("family", "name", "changes", "backend"), backends())
def test_it_reaches_the_output(family: str, name: str, changes: dict[str, Any], backend: AttentionBackend) -> None:
    case = cases(family, torch.bfloat16)[name]
    case = dataclasses.replace(case, lengths=LENGTHS, spec=dataclasses.replace(case.spec, **changes))
    if backend.name == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    else:
        skip_unless_it_runs(backend, case)
    for given in case.inputs().tokens:
        if given.startswith(CHOOSING):
            continue
        replay = Replay(case, backend, DEVICE if backend.name == "triton" else "cpu")
        replay.inputs.tokens[given] = replay.inputs.tokens[given].index_fill(0, torch.tensor([SICK]), torch.nan)
        lost = replay.play(STEPS).cpu().flatten(1).isnan().any(1)
        assert not lost[: LENGTHS[0]].any(), given
        # A query is its own token's; an entry is seen once it is closed; all else is seen by every later token.
        assert lost[SICK] or given == "kv_score", given
        assert lost[-1] or given.startswith("q"), given


@pytest.mark.parametrize(
    ("family", "name", "splits"),
    [
        ("csa", "window_only", "allotrope.attention.csa.triton.split_count"),
        ("mla", "small", "allotrope.attention.mla.triton_decode.split_count"),
    ],
)
def test_a_split_of_keys_does_not_lose_it(family: str, name: str, splits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The split with the sick row is merged with a sound one, whichever comes first."""
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(splits, lambda *sizes: 2)
    case = cases(family, torch.bfloat16)[name]
    case = dataclasses.replace(case, lengths=(40,))
    if family == "csa":
        case = dataclasses.replace(case, spec=dataclasses.replace(case.spec, window=40))
    rows = "kv" if family == "csa" else "c"
    for sick in (2, 36):
        replay = Replay(case, FAMILIES[family].backends[0], DEVICE)
        replay.inputs.tokens[rows] = replay.inputs.tokens[rows].index_fill(0, torch.tensor([sick]), torch.nan)
        assert replay.play([[(0, 39)], [(0, 1)]])[39].isnan().any(), sick
