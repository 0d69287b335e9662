"""Latent attention over a paged cache: the definition of `naive.py` by tiles, with the signature of the kernels.

Every token has one cache entry [c | k_pe] for all heads. For query t of head h and s over the tokens up to t's own:

    l_s = scale * ((W_UK_h c_s) . q_nope_t,h + k_pe_s . q_pe_t,h)
    o_t,h = W_UV_h z,   z = sum_s exp(l_s) c_s / sum_s exp(l_s)

Absorbed, W_UK goes to the query: (W_UK_h c_s) . q = c_s . (q W_UK_h), and attention runs in the latent. Decompressed,
keys W_UK_h c_s and values W_UV_h c_s are computed for every head. Mathematics in fp32 whatever the inputs; the result
is rounded once. Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from allotrope.attention.family import CacheViews
from allotrope.attention.merge import Partial, merge
from allotrope.attention.mla import rows as formats
from allotrope.attention.mla.inputs import MlaInputs, normed_and_rotated
from allotrope.attention.mla.plan import KeySlice, MlaPlan, SubBatch, Writes
from allotrope.attention.mla.spec import MlaSpec


def logits(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, scale: float) -> torch.Tensor:
    """scale * q . k of one tile; the r query heads of a position see the same keys.

    `q`: [n, q, r, D]. `k`: [n, L, D]. `bias`: [1 or n, q, w], added to the last w keys. Returns [n, q, r, L] fp32.
    """
    scores = torch.matmul(q.float().flatten(1, 2) * scale, k.float().transpose(1, 2)).unflatten(1, q.shape[1:3])
    if bias is not None:
        scores[..., k.shape[1] - bias.shape[-1] :] += bias[:, :, None]
    return scores


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Softmax attention of one tile with all keys of its queries. `v`: [n, L, Dv]. Returns [n, q, r, Dv] fp32."""
    weights = torch.softmax(logits(q, k, bias, scale), dim=-1)
    return torch.matmul(weights.flatten(1, 2), v.float()).unflatten(1, q.shape[1:3])


def attend_partly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> Partial:
    """As `attend`, for a tile with some of the keys of its queries, or with none that a query sees.

    Returns out [n, q, r, Dv], lse [n, q, r].
    """
    weights = logits(q, k, bias, scale)
    # The maximum of a query that sees no key is -inf; bounded, its weights become exp(-inf), and not exp(-inf + inf).
    m_i = weights.amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
    weights.sub_(m_i).exp_()
    l_i = weights.sum(-1, keepdim=True)
    out = torch.matmul(weights.flatten(1, 2), v.float()).unflatten(1, q.shape[1:3])
    # The largest logit of a query adds 1, so the bound changes only queries that see no key.
    return Partial(out.div_(l_i.clamp(min=1.0)), (m_i + l_i.log()).squeeze(-1))


def store(writes: Writes, pools: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> None:
    """Write new entries. `pools`: [P, S, n] by field. `new`: [T, n] by field; tokens without a slot are skipped."""
    for name, entries in new.items():
        formats.put(pools[name], writes.slots, entries if writes.tokens is None else entries[writes.tokens])


def absorb(q_nope: torch.Tensor, q_pe: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    """[q_nope W_UK | q_pe]. `q_nope`: [t, H, Dn]. `q_pe`: [t, H, R]. `w_uk`: [H, Dn, C]. Returns [t, H, C + R] fp32."""
    latent = torch.matmul(q_nope.transpose(0, 1).float(), w_uk.float()).transpose(0, 1)
    return torch.cat((latent, q_pe.float()), dim=-1)


def project_up(z: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    """W_UV z, head by head. `z`: [t, H, C]. `w_uv`: [H, Dv, C]. Returns [t, H, Dv]."""
    return torch.matmul(z.transpose(0, 1), w_uv.float().transpose(1, 2)).transpose(0, 1)


def run(spec: MlaSpec, plan: MlaPlan, caches: CacheViews, inputs: MlaInputs) -> torch.Tensor:
    """Norm and rotate the step's queries and latents, store the latents, then attend.

    Returns [T, H, V] in the queries' type.
    """
    heads = normed_and_rotated(spec, inputs)
    return store_and_attend(spec, plan, caches, *heads, inputs.w_uk, inputs.w_uv, inputs.kv_scale)


def store_only(spec: MlaSpec, plan: MlaPlan, caches: CacheViews, inputs: MlaInputs) -> None:
    """The part of `run` that writes the step's latents. The queries may have no heads."""
    assert plan.writes is not None
    heads = normed_and_rotated(spec, inputs)
    new = formats.encode(spec.row_format, spec.kv_dtype, heads.c, heads.k_pe, inputs.kv_scale)
    store(plan.writes, caches["latent"], new)


def store_and_attend(
    spec: MlaSpec,
    plan: MlaPlan,
    caches: CacheViews,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    c: torch.Tensor,
    k_pe: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    kv_scale: float = 1.0,
) -> torch.Tensor:
    """Store the step's latents, then attend.

    `q_nope`: [T, H, Dn]. `q_pe`: [T, H, R] rotated. `c`: [T, C] normed. `k_pe`: [T, R] rotated. `w_uk`: [H, Dn, C].
    `w_uv`: [H, Dv, C]. `kv_scale`: scale of plain FP8 entries. Returns [T, H, Dv] in `q_nope`'s type.
    """
    pools = caches["latent"]
    assert plan.writes is not None
    store(plan.writes, pools, formats.encode(spec.row_format, spec.kv_dtype, c, k_pe, kv_scale))
    out = q_nope.new_empty(q_nope.shape[0], spec.num_heads, spec.v_head_dim)
    attend_planned(spec, plan, pools, q_nope, q_pe, w_uk, w_uv, out, kv_scale)
    return out


def attend_planned(
    spec: MlaSpec,
    plan: MlaPlan,
    pools: Mapping[str, torch.Tensor],
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    out: torch.Tensor,
    kv_scale: float = 1.0,
) -> None:
    """Attend for the plan's queries, whose latents are stored, and write [T, H, Dv] `out` at their tokens."""
    if plan.absorbed_tokens is not None:
        q = absorb(q_nope[plan.absorbed_tokens], q_pe[plan.absorbed_tokens], w_uk)
        z = q.new_empty(*q.shape[:2], spec.latent_dim)
        for sub_batch in plan.absorbed:
            block = q[sub_batch.tokens].unflatten(0, (-1, sub_batch.queries))
            z[sub_batch.tokens] = _over_tiles(
                spec, sub_batch, block, _absorbed(spec, sub_batch, pools, kv_scale)
            ).flatten(0, 1)
        out[plan.absorbed_tokens] = project_up(z, w_uv).to(out.dtype)
    for sub_batch in plan.decompressed:
        q = torch.cat((q_nope[sub_batch.tokens], q_pe[sub_batch.tokens]), dim=-1).unflatten(0, (-1, sub_batch.queries))
        by_head = q.transpose(1, 2).flatten(0, 1).unsqueeze(2)
        attended = _over_tiles(spec, sub_batch, by_head, _decompressed(spec, sub_batch, pools, w_uk, w_uv, kv_scale))
        out[sub_batch.tokens] = attended.squeeze(2).unflatten(0, (-1, spec.num_heads)).transpose(1, 2).flatten(0, 1)


Rows = Iterator[tuple[KeySlice, torch.Tensor, torch.Tensor]]
"""A slice, its keys [n, L, D] and its values [n, L, Dv]."""


def _absorbed(spec: MlaSpec, sub_batch: SubBatch, pools: Mapping[str, torch.Tensor], kv_scale: float) -> Rows:
    """Keys and values in the latent, which all heads of a query share; n is the number of requests."""
    for keys in sub_batch.slices:
        latent, k_pe = formats.decode(spec.row_format, spec.latent_dim, pools, keys.rows, kv_scale)
        yield keys, torch.cat((latent, k_pe), dim=-1), latent


def _decompressed(
    spec: MlaSpec,
    sub_batch: SubBatch,
    pools: Mapping[str, torch.Tensor],
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    kv_scale: float,
) -> Rows:
    """Keys and values of every head, decompressed once for all tiles of a slice; n counts requests times heads."""
    heads = spec.num_heads
    for keys in sub_batch.slices:
        latent, k_pe = formats.decode(spec.row_format, spec.latent_dim, pools, keys.rows, kv_scale)
        nope, v = (
            F.linear(latent, w.float().flatten(0, 1)).unflatten(-1, (heads, -1)).transpose(1, 2) for w in (w_uk, w_uv)
        )
        k = torch.cat((nope, k_pe[:, None].expand(-1, heads, -1, -1)), dim=-1)
        yield keys, k.flatten(0, 1), v.flatten(0, 1)


def _over_tiles(spec: MlaSpec, sub_batch: SubBatch, q: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Attend tile by tile, merge the partial results of a block of queries, and concatenate the blocks.

    `q`: [n, q, r, D]. Returns [n, q, r, Dv] fp32.
    """
    merged: dict[int, Partial] = {}
    blocks: dict[int, torch.Tensor] = {}
    for keys, k, v in rows:
        for tile in keys.tiles:
            first, visible = tile.queries.start, slice(0, tile.keys)
            args = (q[:, tile.queries], k[:, visible], v[:, visible], tile.bias, spec.scale)
            if len(sub_batch.slices) == 1:
                blocks[first] = attend(*args)
                continue
            partial = attend_partly(*args)
            merged[first] = merge(merged[first], partial) if first in merged else partial
            blocks[first] = merged[first].out
    outputs = [blocks[first] for first in sorted(blocks)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
