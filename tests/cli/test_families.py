"""`allotrope families MODEL`: what would run a model on a chip, from its config alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_run import Run

from allotrope.architectures.registry import find_architecture
from allotrope.attention.registry import FAMILIES
from allotrope.errors import BackendError, ConfigError
from allotrope.kernels.chip import CHIPS


@pytest.fixture(params=["DeepseekV3ForCausalLM", "Qwen3NextForCausalLM"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory that holds a config and no weights."""
    config = find_architecture({"architectures": [request.param]}, "").tiny() | {"architectures": [request.param]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_chip_has_its_name_too(run: Run, model: Path) -> None:
    for name, arch in (("b200", "sm_100"), ("mi300x", "gfx942")):
        by_name, by_arch = (run("families", "--model", str(model), "--chip", one, "--json") for one in (name, arch))
        assert by_name.stdout == by_arch.stdout and json.loads(by_name.stdout)["chip"] == arch


@pytest.mark.parametrize("chip", sorted(CHIPS))
def test_every_chip_has_backends_for_everything(run: Run, model: Path, chip: str) -> None:
    found = json.loads(run("families", "--model", str(model), "--chip", chip, "--json").stdout)
    assert found["chip"] == chip and not found["remarks"]
    ops = {one["op"] for one in found["backends"]}
    assert {"rms_norm", "moe_route", "moe_group", "moe_combine", "sampling", "logprobs"} <= ops
    layers = [one["layers"] for one in found["backends"] if one["op"] in ("mla", "mha", "gdn")]
    assert layers and all(layers)


def test_this_device_says_why_not_the_others(run: Run, model: Path) -> None:
    found = json.loads(run("families", str(model), "--device", "cpu", "--json").stdout)
    (route,) = (one for one in found["backends"] if one["op"] == "moe_route")
    assert route["backend"] != "triton" and "chip=cpu (needs a GPU)" in route["passed_over"]["triton"]
    assert "topk=" in " ".join(route["numbers"])


@pytest.mark.parametrize("width", ["40", "80", "200"])
def test_the_table_names_what_was_asked_for(run: Run, model: Path, width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However narrow the terminal."""
    monkeypatch.setenv("COLUMNS", width)
    asked = "moe_group=reference,hash_route=reference"
    shown = run("families", "--model", str(model), "--chip", "sm_90", "--op-backend", asked).stdout
    assert "backend hash_route=reference is not used" in " ".join(shown.split())
    assert "…" not in shown
    words = shown.split()
    assert {"rms_norm", "moe_group"} <= set(words) or {"rms_norm/triton", "moe_group/reference"} <= set(words)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--chip", "bogus"], "chip='bogus';"),
        (["--op-backend", "q", "--attention-backend", "mha=zzz"], "attention_backend='mha=zzz', op_backend='q';"),
        (
            ["--dtype", "float16", "-tp", "2", "-ep"],
            "dtype='float16', tensor_parallel_size=2, enable_expert_parallel=True;",
        ),
    ],
)
def test_options_of_a_model_need_one(run: Run, options: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named} without a model nothing reads that. Name one with --model"):
        run("families", *options)
    assert json.loads(run("families", "--json").stdout)["families"]


def test_backends_of_families_that_a_model_lacks_are_refused(run: Run, model: Path) -> None:
    own = json.loads(run("families", str(model), "--json").stdout)["backends"]
    families = sorted({one["op"] for one in own} & set(FAMILIES))
    asked = f"{families[0]}=reference,dsa=reference,csa=reference"
    message = f"has no layer of dsa, csa; its families are {', '.join(families)}. Name one of these, or leave it out."
    with pytest.raises(ConfigError, match=re.escape(message)):
        run("families", str(model), "--attention-backend", asked)


def test_backends_that_cannot_run_there_are_refused(run: Run, model: Path) -> None:
    with pytest.raises(BackendError, match=r"moe_route/cpu cannot run: chip=gfx942 \(needs cpu\)"):
        run("families", str(model), "--chip", "gfx942", "--op-backend", "moe_route=cpu")
    with pytest.raises(ConfigError, match="chip='sm_30' is not known"):
        run("families", str(model), "--chip", "sm_30")
