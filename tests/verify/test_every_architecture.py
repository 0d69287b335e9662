"""Every architecture, with random weights, in every mode against Transformers; one of each family on several ranks."""

from __future__ import annotations

import pytest
from device_under_test import device_of_ranks

from allotrope.architectures.registry import ARCHITECTURES
from allotrope.config import EngineConfig
from allotrope.verify.options import VerifyOptions
from allotrope.verify.run import verify


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_weights_pass(name: str) -> None:
    report = verify(EngineConfig(model=name), VerifyOptions(random=True))
    assert report.passed, report.verdict()
    assert {result.verdict for result in report.modes} == {"pass"}
    assert report.layers is not None
    assert all(layer.selections in ("", "same", "same, some unseen", "unseen") for layer in report.layers.layers)


@pytest.mark.usefixtures("kept_workers")
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        # Two KV heads on four ranks: each is there twice.
        ("Qwen3ForCausalLM", 4),
        ("DeepseekV3ForCausalLM", 2),
        ("DeepseekV32ForCausalLM", 2),
        ("DeepseekV4ForCausalLM", 2),
        ("Qwen3NextForCausalLM", 2),
    ],
)
def test_random_weights_pass_on_several_ranks(name: str, ranks: int) -> None:
    """The hosts of the other ranks see nothing of what is compared, so that only rank 0's attention is looked at."""
    config = EngineConfig(model=name, tensor_parallel_size=ranks, threads=1, device=device_of_ranks(ranks))
    options = VerifyOptions(random=True, modes="chunked-64,cached,batched,preempted", lengths="1,17,65,150")
    report = verify(config, options)
    assert report.passed, report.verdict()
    # Little of what DeepSeek V4 keeps grows: none of its short prompts has to be preempted.
    assert [result.verdict for result in report.modes].count("pass") >= 3
