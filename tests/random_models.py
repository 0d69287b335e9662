"""Tiny models as the bench draws them, with the quantization of releases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from allotrope import LLM, SamplingParams
from allotrope.architectures.registry import find_architecture

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
KEPT = {"modules_to_not_convert": ["lm_head", "model.layers.*.mlp.gate"]}


def tiny(architecture: str, quantization: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    config = find_architecture({"architectures": [architecture]}, "test").tiny() | more
    return config if quantization is None else config | {"quantization_config": quantization}


def tokens(directory: Path, **more: Any) -> list[list[int]]:
    llm = LLM(str(directory), device="cpu", dtype="float32", max_model_len=64, max_num_seqs=2, threads=1, **more)
    try:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        return [output.outputs[0].token_ids for output in llm.generate([[5, 6, 7, 8], [9, 10, 11]], params)]
    finally:
        llm.close()
