"""The roofline cost of the gated delta rule."""

from __future__ import annotations

import torch

from allotrope.attention.cost import Lengths, StepCost
from allotrope.attention.gdn.spec import KERNEL_CHUNK, GdnSpec

MATMUL_SHARE = 0.12
"""Of the rate of a large matrix product, what prompts reach on an H200: 0.11 to 0.15
(`python bench/kernels.py --family gdn --case prefill`)."""


def cost(spec: GdnSpec, lengths: Lengths) -> StepCost:
    """The cost of one step. States are read, unless a sequence begins, and written. Decodes run the recurrence, and
    prompts the chunked form."""
    new, dk, dv = lengths.new, spec.k_head_dim, spec.v_head_dim
    # The kept inputs of drafts are not counted: a step may have none.
    state_bytes = sum(field.bytes for field in spec.caches()["state"].fields if not field.name.startswith("draft"))
    states = len(new) + int((new < lengths.kv).sum())
    width = spec.conv_dim + spec.num_v_heads + spec.decay_dim + spec.value_dim
    chunk = new.clamp(max=KERNEL_CHUNK)
    token_flops = torch.where(new == 1, 7 * dk * dv, 6 * dk * dv + 2 * chunk * (3 * dk + 2 * dv) + chunk**2)
    return StepCost(
        states * state_bytes + lengths.tokens * width * lengths.itemsize,
        spec.num_v_heads * int((new * token_flops).sum()),
    )
