"""Inside vLLM the first step of a kind is rehearsed before it is run: nothing is launched, and nothing is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plugins.hosting import hosted
from tiny_checkpoints import prompts

pytest.importorskip("triton", reason="triton is not installed")

import triton
from triton.runtime import interpreter

from allotrope.architectures.registry import find_architecture
from allotrope.kernels.warmup import warming_up
from allotrope.verify.random_checkpoint import write_random

pytestmark = [pytest.mark.usefixtures("in_vllm", "own_choices"), pytest.mark.timeout(900)]

ASKED = prompts((3, 9), vocab_size=300)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels run on this CPU, in Triton's interpreter; filled with the names of those that are launched."""
    if torch.cuda.is_available():
        pytest.skip("with a GPU kernels are not interpreted")
    if tuple(map(int, triton.__version__.split(".")[:2])) > (3, 6):
        pytest.skip(f"the interpreter of Triton {triton.__version__} refuses masks that are made of two")
    launched: list[str] = []
    plain = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        assert not warming_up()
        launched.append(self.fn.__name__)
        plain(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    return launched


def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "kernels.triton_version",
        "kernels.warmup",
        "attention.mha.family",
    ):
        monkeypatch.setattr(f"allotrope.{name}.triton_reasons", lambda device: [])


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "GptOssForCausalLM"])
def test_steps_of_a_kind_are_warmed_up_once(
    architecture: str, kernels: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = find_architecture({"architectures": [architecture]}, architecture).tiny()
    write_random(config | {"architectures": [architecture]}, tmp_path, None, 0)
    options: dict[str, Any] = {"block_size": 16, "max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 16}
    with hosted(tmp_path, **options) as running:
        want = running.answers(ASKED, 3)
    assert not kernels
    warmed_up: list[Any] = []
    from allotrope.plugins.vllm import model

    plain = model.warm_up_steps

    def warm_up(steps: Any, *rest: Any) -> None:
        before = len(kernels)
        plain(steps, *rest)
        assert len(kernels) == before
        warmed_up.append(steps)

    monkeypatch.setattr(model, "warm_up_steps", warm_up)
    with monkeypatch.context() as patched:
        interpreted(patched)
        with hosted(tmp_path, **options) as running:
            found = running.answers(ASKED, 3)
            kinds = running.runner.model._warmed_up
            running.assert_ours()
            again = running.answers(ASKED, 3)
            # Prompts, and decodes.
            assert len(warmed_up) == len(kinds) and {decodes for _, decodes, *_ in kinds} == {False, True}
    assert {"norm_kernel", "decode_kernel"} <= set(kernels)
    assert [one.ids for one in found] == [one.ids for one in again] == [one.ids for one in want]
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=5e-4, rtol=0.0)
