"""On a GPU: once an engine is ready, no mixture of prompts and decoding sequences needs a kernel that is not there."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.watching import assert_idle, engine, request, run

from allotrope.architectures.deepseek_v3 import tiny_deepseek_v3
from allotrope.architectures.deepseek_v4 import tiny_deepseek_v4
from allotrope.architectures.deepseek_v32 import tiny_deepseek_v32
from allotrope.architectures.gemma4 import tiny_gemma4
from allotrope.architectures.gpt_oss import tiny_gpt_oss
from allotrope.architectures.llama import tiny_llama
from allotrope.architectures.qwen3_next import tiny_qwen3_next
from allotrope.request import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: no kernel is compiled")

CONFIGS: dict[str, Callable[[], dict[str, Any]]] = {
    "llama": tiny_llama,
    "gemma": tiny_gemma4,
    "gpt-oss": tiny_gpt_oss,
    "hybrid": tiny_qwen3_next,
    "latent": tiny_deepseek_v3,
    "sparse": tiny_deepseek_v32,
    "compressed": tiny_deepseek_v4,
}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_nothing_is_compiled_while_requests_are_served(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]()))
    options = {"load_format": "dummy", "dtype": "bfloat16", "device": "cuda", "max_num_seqs": 48}
    running = engine(tmp_path, max_num_batched_tokens=512, **options)
    running.capture_all()
    late: list[str] = []

    def listener(*, src: Any, cache_hit: bool, **_: Any) -> None:
        late.append(f"{src.name}: {src.signature} {src.constants} {src.attrs}")

    monkeypatch.setattr(knobs.compilation, "listener", listener)
    rng = random.Random(name)
    longest = running.limits.max_model_len
    for number, count in enumerate((1, 3, 8, 40)):
        asked = []
        for i in range(count):
            ids = [rng.randrange(5, running.limits.vocab_size) for _ in range(rng.randrange(1, longest - 24))]
            drawn = SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=rng.randrange(1, 24))
            plain = SamplingParams(temperature=0.0, max_tokens=rng.randrange(1, 24), ignore_eos=True)
            asked.append(request(f"{number}.{i}", ids, drawn if i % 3 == 2 else plain))
        run(running, asked)
    assert_idle(running)
    assert not late, "\n".join(late)
