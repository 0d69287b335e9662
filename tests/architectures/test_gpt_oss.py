"""gpt-oss, with plain experts and with 4-bit ones, against Transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from architectures.execution_modes import assert_matches
from safetensors.torch import load_file, save_file
from tiny_checkpoints import TinyCheckpoint, write_tiny

from allotrope.architectures.gpt_oss import tiny_gpt_oss
from allotrope.checkpoint.dequantize import unpack_mxfp4

LENGTHS = (1, 5, 31, 32, 33, 90)


def test_plain_experts(tmp_path: Path) -> None:
    assert_matches(write_tiny(tiny_gpt_oss(), tmp_path), LENGTHS)


def test_4_bit_experts(tmp_path: Path) -> None:
    """The plain twin, which Transformers reads, has the values that the packed one stands for."""
    plain, packed = write_tiny(tiny_gpt_oss(), tmp_path / "plain"), tmp_path / "packed"
    state = load_file(plain.directory / "model.safetensors")
    packed_state = dict(state)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inputs, outputs = state[name].shape
        blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, (count, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        del packed_state[name]
        packed_state |= {name + "_blocks": blocks, name + "_scales": scales}
        state[name] = unpack_mxfp4(blocks, scales).float().transpose(1, 2).contiguous()
    save_file(state, plain.directory / "model.safetensors")
    packed.mkdir()
    save_file(packed_state, packed / "model.safetensors")
    (packed / "config.json").write_text(json.dumps(tiny_gpt_oss() | {"quantization_config": {"quant_method": "mxfp4"}}))
    assert_matches(_Twin(packed, plain), (1, 33, 60))


class _Twin(TinyCheckpoint):
    """`directory` is what is served; another directory is what Transformers reads."""

    def __init__(self, directory: Path, read: TinyCheckpoint) -> None:
        super().__init__(directory)
        self.model = read.model
