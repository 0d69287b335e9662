"""The inputs of softmax attention: a layer's projection, before norms and rotation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from allotrope.attention.head_norm import HeadNorm
from allotrope.attention.mha.spec import MhaSpec
from allotrope.ops.qk_norm_rope import HeadSpec
from allotrope.ops.rope import Rotation

ApplyRope = Callable[[torch.Tensor, Rotation], torch.Tensor]

Heads = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""q [T, H, D], k [T, G, D] and v [T, G, Dv]; k and v None for a layer that reads another's cache entries."""


@dataclass(frozen=True)
class MhaInputs:
    """`projected`: [T, heads.width], [q | k | v] head by head. `heads`: their sizes, norms and scales. `rotation`: of
    the step's positions, None for none. `apply_rope`: the implementation that the layer chose.
    `q_norm`, `k_norm`, `v_norm`: None for none. `sinks`: [H] where the spec has them. `k_scale`, `v_scale`: FP8 entries
    hold k / k_scale and v / v_scale; where values are keys, `k_scale` is both.
    """

    projected: torch.Tensor
    heads: HeadSpec
    rotation: Rotation | None = None
    apply_rope: ApplyRope | None = None
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    v_norm: HeadNorm | None = None
    sinks: torch.Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def normed_by_head(self) -> bool:
        """Whether one kernel can norm, rotate and store: no norm spans more than one head."""
        return all(norm is None or norm.weight is not None for norm in (self.q_norm, self.k_norm))

    def map_tokens(self, change: Callable[[torch.Tensor], torch.Tensor]) -> MhaInputs:
        """As in `TokenInputs`."""
        rotation = None if self.rotation is None else self.rotation.map_tokens(change)
        return replace(self, projected=change(self.projected), rotation=rotation)


def normed_and_rotated(inputs: MhaInputs) -> Heads:
    """The heads, by one operation after another."""
    spec, projected = inputs.heads, inputs.projected
    count = spec.heads + spec.kv_heads
    qk = projected[:, : count * spec.dim].view(-1, count, spec.dim)
    v = None
    if spec.kv_heads:
        # Values from keys are the keys before their norm and rotation.
        values = projected[:, count * spec.dim : spec.width]
        v = qk[:, spec.heads :] if spec.values_from_keys else values.view(-1, spec.kv_heads, spec.v_dim)
        v = v if inputs.v_norm is None else inputs.v_norm(v)
        v = v if spec.value_scale == 1.0 else v * spec.value_scale
    parts = [qk]
    if inputs.q_norm is not None and inputs.k_norm is not None:
        parts = [inputs.q_norm(qk[:, : spec.heads]), inputs.k_norm(qk[:, spec.heads :])]
    elif inputs.q_norm is not None:
        parts = [inputs.q_norm(qk)]
    if inputs.rotation is not None and inputs.apply_rope is not None:
        parts = [inputs.apply_rope(part, inputs.rotation) for part in parts]
    if len(parts) == 1:
        parts = [parts[0][:, : spec.heads], parts[0][:, spec.heads :]]
    return parts[0], parts[1] if spec.kv_heads else None, v


def ready_inputs(
    spec: MhaSpec,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> MhaInputs:
    """Inputs whose heads need neither norm nor rotation. `q`: [T, H, D]. `k`, `v`: [T, G, D], [T, G, Dv] or None."""
    heads = HeadSpec(
        heads=spec.num_heads,
        kv_heads=0 if k is None else spec.num_kv_heads,
        dim=spec.head_dim,
        v_dim=spec.value_dim,
    )
    projected = torch.cat([x.flatten(1) for x in (q, k, v) if x is not None], dim=1)
    return MhaInputs(projected, heads, sinks=sinks, k_scale=k_scale, v_scale=v_scale)
