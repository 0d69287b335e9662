"""The inputs of sparse latent attention: a layer's projections, before norms and rotation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from allotrope.attention.dsa.sharing import Gather
from allotrope.attention.dsa.spec import DsaSpec
from allotrope.attention.mla import inputs as mla
from allotrope.attention.mla.inputs import MlaInputs, MlaRope
from allotrope.ops.mla_rope import LayerNorm
from allotrope.ops.mla_rope.reference import mla_rope
from allotrope.ops.rope import Rotation


@dataclass(frozen=True)
class IndexInputs:
    """The indexer's inputs. `q`: [T, heads, d]. `k`: [T, d]. `weights`: [T, heads] of the heads' scores. `k_norm`: of
    the keys, None for none. `rotation`: of the first dims of queries and keys, None for none. `gather`: joins the rows
    of the ranks that share the indexer's work."""

    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor
    k_norm: LayerNorm | None = None
    rotation: Rotation | None = None
    apply_rope: MlaRope = mla_rope
    gather: Gather | None = None

    def normed_and_rotated(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Index queries [T, heads, d] and keys [T, d]. One launch computes both where there are kernels."""
        both = self.apply_rope(self.q, self.k, self.rotation, self.k_norm)
        return both[:, :-1], both[:, -1]

    def map_tokens(self, change: Callable[[torch.Tensor], torch.Tensor]) -> IndexInputs:
        """As in `TokenInputs`."""
        rotation = None if self.rotation is None else self.rotation.map_tokens(change)
        parts = change(self.q), change(self.k), change(self.weights)
        return IndexInputs(*parts, self.k_norm, rotation, self.apply_rope, self.gather)


@dataclass(frozen=True)
class DsaInputs:
    """`latent`: as in latent attention. `index`: of a layer with an indexer. `topk_indices`: without it, [T, K] int64
    positions that an indexer returned, -1 for none: the last layer with one in this step, or, for a draft, the layer's
    own in the first pass."""

    latent: MlaInputs
    index: IndexInputs | None = None
    topk_indices: torch.Tensor | None = None

    def map_tokens(self, change: Callable[[torch.Tensor], torch.Tensor]) -> DsaInputs:
        """As in `TokenInputs`."""
        index = None if self.index is None else self.index.map_tokens(change)
        topk_indices = None if self.topk_indices is None else change(self.topk_indices)
        return replace(self, latent=self.latent.map_tokens(change), index=index, topk_indices=topk_indices)


def missing_inputs(spec: DsaSpec) -> str:
    """What is wrong where there is neither `index` nor `topk_indices`."""
    if spec.indexer is not None:
        return "dsa: a layer with an indexer needs index_q, index_k and index_weights"
    return "dsa: a layer without an indexer needs the top-k indices of an earlier layer"


def ready_inputs(
    spec: DsaSpec,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    c: torch.Tensor,
    k_pe: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    index_q: torch.Tensor | None = None,
    index_k: torch.Tensor | None = None,
    index_weights: torch.Tensor | None = None,
    topk_indices: torch.Tensor | None = None,
    kv_scale: float = 1.0,
) -> DsaInputs:
    """Inputs that need neither norm nor rotation. Arguments as in `DsaInputs`."""
    latent = mla.ready_inputs(spec.mla, q_nope, q_pe, c, k_pe, w_uk, w_uv, kv_scale)
    index = None
    if index_q is not None and index_k is not None and index_weights is not None:
        index = IndexInputs(index_q, index_k, index_weights)
    return DsaInputs(latent, index, topk_indices)
