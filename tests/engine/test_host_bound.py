"""Up to how many tokens prefill steps run in pieces: while their kernels run faster than a host launches them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allotrope.architectures.llama import tiny_llama
from allotrope.config import EngineConfig
from allotrope.engine import host_bound
from allotrope.engine.host_bound import host_bound_tokens
from allotrope.engine.load_plan import LoadPlan, resolve_load_plan
from allotrope.kernels.chip_figures import FIGURES
from allotrope.layers.parallel import Parallel

LARGER = {"hidden_size": 8192, "intermediate_size": 32768, "num_attention_heads": 64, "num_key_value_heads": 8}


def planned(folder: Path, config: dict[str, Any], **options: Any) -> LoadPlan:
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16384}))
    given = EngineConfig(model=str(folder), load_format="dummy", dtype="bfloat16", **options)
    return resolve_load_plan(given, Parallel.of(given.layout), chip=FIGURES["h200"].chip, available=10**12)


def test_small_layers_wait_for_the_host_in_every_step(tmp_path: Path) -> None:
    assert host_bound_tokens(planned(tmp_path, tiny_llama())) == 4096
    assert host_bound_tokens(planned(tmp_path, tiny_llama(), max_num_batched_tokens=100)) == 112


def test_large_layers_wait_in_short_steps_alone(tmp_path: Path) -> None:
    config = tiny_llama() | LARGER | {"head_dim": 128}
    assert 16 <= host_bound_tokens(planned(tmp_path, config)) < 1024


def test_sums_over_ranks_are_launched_as_well(tmp_path: Path) -> None:
    """Half the work, and more for the host: more than twice the tokens."""
    config = tiny_llama() | LARGER | {"head_dim": 128}
    alone, two = (host_bound_tokens(planned(tmp_path, config, tensor_parallel_size=size)) for size in (1, 2))
    assert 2 * alone < two <= 4096


def test_an_unknown_chip_has_what_is_usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_bound, "figures_of", lambda name: None)
    assert host_bound_tokens(planned(tmp_path, tiny_llama())) == 1024
