"""Tiny checkpoints with random, non-neutral weights, made and read back by Transformers.

Weights are drawn per tensor name: no norm weight is 1, no bias is 0, and the logits are spread enough for greedy
tokens to be clear.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


@dataclass
class TinyCheckpoint:
    """`directory`: config.json and model.safetensors, fp32."""

    directory: Path

    @cached_property
    def model(self) -> Any:
        """Transformers' own model of the directory, in fp32, with the plain implementations."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(
            self.directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[L, vocabulary] fp32 logits after each token of `ids`."""
        return self.model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """The `count` greedy tokens after `ids`, by full forward passes."""
        found = list(ids)
        for _ in range(count):
            found.append(int(self.logits(found)[-1].argmax()))
        return found[len(ids) :]


def write_tiny(
    config: dict[str, Any], directory: Path, seed: int = 0, rename: Callable[[str], str] | None = None
) -> TinyCheckpoint:
    """Write a checkpoint of `config` (as a hub repository has it) with random weights.

    `rename`: Transformers' name of a tensor to the released one, where saving does not do that by itself.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            # A table of experts per token: different ones in each row.
            experts = config.get("n_routed_experts") if not tensor.is_floating_point() else None
            tensor.copy_(
                draw_weight(name, tensor.shape, seed) if experts is None else _draw_table(tensor.shape, experts)
            )
    if rename is None:
        model.save_pretrained(directory)
    else:
        state = {rename(name): tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(state, directory / "model.safetensors")
    # Transformers rewrites the config in its own words; the released spelling is what is to be read.
    (directory / "config.json").write_text(json.dumps(config))
    return TinyCheckpoint(directory)


def draw_weight(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Random values of the tensor `name`: around 1 for vectors that are no bias."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    values = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return 0.25 * values
    if len(shape) == 1:
        return 1.0 + 0.25 * values
    gain = 4.0 if "lm_head" in name or "embed_tokens" in name else 1.4
    return values * gain / math.sqrt(shape[-1])


def _draw_table(shape: torch.Size, experts: int) -> torch.Tensor:
    drawn = torch.rand((shape[0], experts), generator=torch.Generator().manual_seed(0))
    return drawn.argsort(-1)[:, : shape[1]]


def prompts(lengths: Sequence[int], vocab_size: int = 320, seed: int = 0) -> list[list[int]]:
    """Random prompts of the given lengths that share no beginning."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(8, vocab_size, (n,), generator=generator).tolist() for n in lengths]
