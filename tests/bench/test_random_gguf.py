"""Random GGUF models: blocks as they are stored, with numbers of the size that a layer needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench_scripts import load_script

from allotrope.checkpoint.checkpoint import open_checkpoint
from allotrope.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("cpu/random_gguf")


@pytest.mark.parametrize("types", ["Q4_K_M", "Q5_K", "Q4_0", "Q4_1", "Q8_0", "BF16"])
def test_matrices_have_unit_gain(types: str, script: Any, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    script.write_model(script.SHAPES["tiny"], types, path)
    checkpoint = open_checkpoint(str(path))
    matrices = [name for name, header in checkpoint.headers().items() if len(header.shape) == 2]
    assert len(matrices) == 1 + 2 * 7
    for name in matrices:
        values = checkpoint.read(name).float()
        assert 0.93 < float(values.std()) * values.shape[1] ** 0.5 < 1.07, name
        # Q4_0 has a code more below zero than above.
        assert abs(float(values.mean())) < 0.12 * float(values.std()), name
    kinds = {header.format.name for header in checkpoint.headers().values() if header.format is not None}
    want = {"Q4_K_M": {"q4_k", "q6_k"}, "BF16": set()}
    assert kinds == want.get(types, {types.lower()})


def test_the_tokenizer_reads_any_text(script: Any, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    script.write_model(script.SHAPES["tiny"], "Q4_0", path, seed=1)
    tokenizer = load_tokenizer(str(path))
    for text in ("the cat", "naïve 日本\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    again = tmp_path / "again.gguf"
    script.write_model(script.SHAPES["tiny"], "Q4_0", again, seed=1)
    assert path.read_bytes() == again.read_bytes()
