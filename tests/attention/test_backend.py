"""Choosing a backend: every refusal is heard."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from allotrope.attention.backend import choose, parse_wanted
from allotrope.attention.check import cases
from allotrope.attention.mha import MHA
from allotrope.errors import BackendError

CPU = torch.device("cpu")
SPEC = cases("mha")["grouped_4"].spec


def test_the_first_that_can_is_chosen() -> None:
    assert choose("mha", MHA.backends, SPEC, CPU).name == "compiled"
    odd = dataclasses.replace(SPEC, head_dim=24)
    assert choose("mha", MHA.backends, odd, CPU).name == "cpu"
    capped = dataclasses.replace(SPEC, softcap=5.0)
    assert choose("mha", MHA.backends, capped, CPU).name == "reference"
    assert choose("mha", MHA.backends, SPEC, CPU, "reference").name == "reference"


def test_a_refusal_gives_every_reason_and_what_would_work() -> None:
    odd = dataclasses.replace(SPEC, softcap=5.0, v_head_dim=64)
    with pytest.raises(BackendError) as found:
        choose("mha", MHA.backends, odd, torch.device("meta"), "cpu")
    for fact in ("device=meta (needs cpu)", "softcap=5.0", "v_head_dim=64", "--attention-backend mha=reference"):
        assert fact in str(found.value)
    with pytest.raises(BackendError, match=r"no backend 'flash'; it has: .*cpu, reference"):
        choose("mha", MHA.backends, SPEC, CPU, "flash")


def test_wanted_backends_are_parsed_strictly() -> None:
    assert parse_wanted(None, ["mha"]) == {}
    assert parse_wanted("mha=cpu,gdn=reference", ["mha", "gdn"]) == {"mha": "cpu", "gdn": "reference"}
    for text in ("cpu", "nope=cpu"):
        with pytest.raises(BackendError, match="FAMILY=BACKEND"):
            parse_wanted(text, ["mha"])
