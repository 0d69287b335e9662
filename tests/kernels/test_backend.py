"""Choosing a backend: every refusal is heard."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest
import torch

from allotrope.attention.check import cases
from allotrope.attention.mha import MHA
from allotrope.errors import BackendError
from allotrope.kernels.backend import choose, parse_wanted
from allotrope.kernels.chip import CHIPS
from allotrope.kernels.chip import CPU as CPU_CHIP
from allotrope.kernels.chip import NONE as NO_CHIP
from allotrope.kernels.triton_version import TRITON_VERSIONS, triton_reasons, version_reasons

CPU = torch.device("cpu")
SPEC = cases("mha")["grouped_4"].spec


def test_the_first_that_can_is_chosen() -> None:
    assert choose(MHA, SPEC, CPU_CHIP).backend.name == "compiled"
    odd = dataclasses.replace(SPEC, head_dim=24)
    assert choose(MHA, odd, CPU_CHIP).backend.name == "cpu"
    capped = dataclasses.replace(SPEC, softcap=5.0)
    assert choose(MHA, capped, CPU_CHIP).backend.name == "reference"
    assert choose(MHA, SPEC, CPU_CHIP, "reference").backend.name == "reference"


def test_a_refusal_gives_every_reason_and_what_would_work() -> None:
    odd = dataclasses.replace(SPEC, softcap=5.0, v_head_dim=64)
    with pytest.raises(BackendError) as found:
        choose(MHA, odd, NO_CHIP, "cpu")
    for fact in ("chip=none (needs cpu)", "softcap=5.0", "v_head_dim=64", "--attention-backend mha=reference"):
        assert fact in str(found.value)
    with pytest.raises(BackendError, match=r"no backend 'flash'; it has: .*cpu, reference"):
        choose(MHA, SPEC, CPU_CHIP, "flash")


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1+gitabc", "3.8.0", "3.9.0rc1"])
def test_tested_versions_of_triton_are_silent(version: str, caplog: pytest.LogCaptureFixture) -> None:
    version_reasons.cache_clear()
    assert version_reasons(version) == () and not caplog.messages


@pytest.mark.parametrize("version", ["2.3.1", "3.5.1", "3.0.0+rocm"])
def test_a_version_of_triton_that_is_too_old_is_a_reason(version: str) -> None:
    (reason,) = version_reasons(version)
    assert f"triton={version} (needs 3.6 or newer" in reason


@pytest.mark.parametrize("version", ["3.10.0", "4.0.0", "main"])
def test_an_unknown_version_of_triton_is_said_once(version: str, caplog: pytest.LogCaptureFixture) -> None:
    version_reasons.cache_clear()
    for _ in range(3):
        assert version_reasons(version) == ()
    (said,) = caplog.messages
    assert version in said and "3.6 to 3.9" in said


def test_the_version_is_looked_at_where_a_kernel_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton", reason="triton is not installed")
    version_reasons.cache_clear()
    assert triton_reasons(CHIPS["sm_90"]) == []
    monkeypatch.setattr("allotrope.kernels.triton_version.TRITON_VERSIONS", ((99, 0), (99, 9)))
    version_reasons.cache_clear()
    (reason,) = triton_reasons(CHIPS["sm_90"])
    version_reasons.cache_clear()
    assert reason.startswith(f"triton={triton.__version__.split('+')[0]}") and "needs 99.0 or newer" in reason
    assert triton_reasons(CPU_CHIP) == ["chip=cpu (needs a GPU)"]


def test_versions_that_tests_install_are_not_warned_of() -> None:
    """CI has the oldest ones; newer ones come with newer builds of torch and are tried by hand."""
    stated = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (pinned,) = [one for one in stated["optional-dependencies"]["dev"] if one.startswith("triton")]
    (low, high) = re.findall(r"[>=<]+(\d+\.\d+)", pinned)
    oldest, newest = (tuple(map(int, text.split("."))) for text in (low, high))
    assert oldest == TRITON_VERSIONS[0] and newest <= (TRITON_VERSIONS[1][0], TRITON_VERSIONS[1][1] + 1)


def test_wanted_backends_are_parsed_strictly() -> None:
    assert parse_wanted("attention_backend", None, ["mha"]) == {}
    assert parse_wanted("attention_backend", "mha=cpu,gdn=reference", ["mha", "gdn"]) == {
        "mha": "cpu",
        "gdn": "reference",
    }
    for text in ("cpu", "nope=cpu"):
        with pytest.raises(BackendError, match="NAME=BACKEND"):
            parse_wanted("attention_backend", text, ["mha"])
