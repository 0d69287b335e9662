"""The inputs of compressed sparse attention: a layer's projections, before norms and rotation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from allotrope.attention.csa.compressor import Compression
from allotrope.attention.csa.spec import CsaSpec
from allotrope.attention.dsa.sharing import Gather
from allotrope.attention.head_norm import HeadNorm


@dataclass(frozen=True)
class IndexInputs:
    """The indexer's inputs. `q`: [T, heads, d]. `weights`: [T, heads] of its heads' scores. `compressor`: of keys.
    `gather`: joins the rows of the ranks that share the indexer's work."""

    q: torch.Tensor
    weights: torch.Tensor
    compressor: Compression
    gather: Gather | None = None

    def map_tokens(self, change: Callable[[torch.Tensor], torch.Tensor]) -> IndexInputs:
        """As in `TokenInputs`."""
        return IndexInputs(change(self.q), change(self.weights), self.compressor.map_tokens(change), self.gather)


@dataclass(frozen=True)
class CsaInputs:
    """`q`: [T, H, D]. `kv`: [T, D]. `sinks`: [H]. `q_norm`, `kv_norm`: None for none. `compressor`: where the spec has
    a ratio. `index`: where it has an indexer. `kv_scale`: the divisor of plain FP8 entries. The plan has the rotation.
    """

    q: torch.Tensor
    kv: torch.Tensor
    sinks: torch.Tensor
    q_norm: HeadNorm | None = None
    kv_norm: HeadNorm | None = None
    compressor: Compression | None = None
    index: IndexInputs | None = None
    kv_scale: float = 1.0

    def normed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, H, D] and window entries [T, D]."""
        q = self.q if self.q_norm is None else self.q_norm(self.q)
        return q, self.kv if self.kv_norm is None else self.kv_norm(self.kv)

    def map_tokens(self, change: Callable[[torch.Tensor], torch.Tensor]) -> CsaInputs:
        """As in `TokenInputs`."""
        compressor = None if self.compressor is None else self.compressor.map_tokens(change)
        index = None if self.index is None else self.index.map_tokens(change)
        return replace(self, q=change(self.q), kv=change(self.kv), compressor=compressor, index=index)


def ready_inputs(
    spec: CsaSpec,
    q: torch.Tensor,
    kv: torch.Tensor,
    sinks: torch.Tensor,
    kv_score: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    entry_norm: torch.Tensor | None = None,
    index_q: torch.Tensor | None = None,
    index_weights: torch.Tensor | None = None,
    index_kv_score: torch.Tensor | None = None,
    index_position_bias: torch.Tensor | None = None,
    index_entry_norm: torch.Tensor | None = None,
    kv_scale: float = 1.0,
) -> CsaInputs:
    """Inputs that need no norm. Arguments as in `CsaInputs`, those of the indexer's own compressor with `index_`."""
    compressor = index = None
    if kv_score is not None and position_bias is not None and entry_norm is not None:
        compressor = Compression(kv_score, position_bias, entry_norm)
    if index_kv_score is not None and index_position_bias is not None and index_entry_norm is not None:
        assert index_q is not None and index_weights is not None
        keys = Compression(index_kv_score, index_position_bias, index_entry_norm)
        index = IndexInputs(index_q, index_weights, keys)
    return CsaInputs(q, kv, sinks, compressor=compressor, index=index, kv_scale=kv_scale)
