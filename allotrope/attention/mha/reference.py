"""Softmax attention over a paged cache: the definition of `naive.py` by sub-batches, with the kernels' signature.

For query t of head h, with g = h // (H / G) its KV head and s over the keys that t sees:

    l_s = softcap(scale * q_t,h . k_s,g)
    o_t,h = sum_s exp(l_s) v_s,g / (sum_s exp(l_s) + exp(sink_h))

Mathematics in fp32 whatever the inputs; the result is rounded once. Sources: Vaswani et al. 2017, section 3.2;
Ainslie et al. 2023 (grouped queries); Xiao et al. 2023, section 3 (sinks).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from allotrope.attention.family import CacheViews
from allotrope.attention.mha.inputs import MhaInputs, normed_and_rotated
from allotrope.attention.mha.plan import MhaPlan, SubBatch
from allotrope.attention.mha.spec import MhaSpec

Attend = Callable[[MhaSpec, torch.Tensor, torch.Tensor, torch.Tensor, SubBatch, torch.Tensor | None], torch.Tensor]


def attend(
    spec: MhaSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sub_batch: SubBatch,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The equation above for one sub-batch.

    `q`: [b, q, H, D]. `k`, `v`: [b, L, G, D]. `sub_batch`: which keys each query sees. `sinks`: [H].
    Returns [b, q, H, D] in `q`'s type; 0 where a query sees nothing.
    """
    requests, queries, heads, _ = q.shape
    groups, keys = k.shape[2], k.shape[1]
    grouped = q.float().unflatten(2, (groups, heads // groups))
    logits = torch.einsum("bqgrd,bkgd->bgrqk", grouped, k.float()) * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    visible = sub_batch.visible
    if visible is None:
        visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)[None]
    logits = logits.masked_fill(~visible[:, None, None], -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(1, groups, heads // groups, 1, 1).expand(requests, -1, -1, queries, 1)
        logits = torch.cat((logits, sink), dim=-1)
    # Where a query sees no key the softmax is NaN, and its weights become 0. NaN of a query or key itself stays.
    weights = torch.softmax(logits, dim=-1)[..., :keys].masked_fill(~visible[:, None, None], 0.0)
    return torch.einsum("bgrqk,bkgd->bqgrd", weights, v.float()).flatten(2, 3).to(q.dtype)


def quantize(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """x / scale in an FP8 type; values beyond its range saturate."""
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


def store(
    spec: MhaSpec,
    plan: MhaPlan,
    caches: CacheViews,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write the step's keys and values. `k`, `v`: [T, G, D]; tokens without a slot are not written."""
    new = {"k": (k, k_scale)} if spec.values_are_keys else {"k": (k, k_scale), "v": (v, v_scale)}
    for name, (entries, scale) in new.items():
        pool = caches["kv"][name].flatten(0, 1)
        entries = entries if plan.writes is None else entries[plan.writes]
        if pool.dtype.itemsize == 1:
            pool.view(torch.uint8).index_copy_(0, plan.slots, quantize(entries, pool.dtype, scale).view(torch.uint8))
        else:
            pool.index_copy_(0, plan.slots, entries.to(pool.dtype))


def gather(pool: torch.Tensor, sub_batch: SubBatch, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """The cache entries that a sub-batch reads. `pool`: [P, S, G, D]. Returns [b, L, G, D] in `dtype`; FP8 entries are
    multiplied by `scale` and returned in fp32."""
    if pool.dtype.is_floating_point and pool.dtype.itemsize == 1:
        return gather(pool.view(torch.uint8), sub_batch, torch.uint8).view(pool.dtype).float() * scale
    pool = pool.flatten(0, 1)
    if sub_batch.contiguous is not None:
        return pool[sub_batch.contiguous][None].to(dtype)
    entries = pool.index_select(0, sub_batch.flat_rows)
    return entries.view(*sub_batch.rows.shape, *entries.shape[1:]).to(dtype)


def run(spec: MhaSpec, plan: MhaPlan, caches: CacheViews, inputs: MhaInputs, core: Attend = attend) -> torch.Tensor:
    """Norm and rotate the step's heads, store its keys and values, then attend.

    `core`: the attention of one sub-batch. Returns [T, H, Dv] in the projection's type.
    """
    heads = normed_and_rotated(inputs)
    return store_and_attend(
        spec, plan, caches, *heads, inputs.sinks, core, k_scale=inputs.k_scale, v_scale=inputs.v_scale
    )


def store_only(spec: MhaSpec, plan: MhaPlan, caches: CacheViews, inputs: MhaInputs) -> None:
    """The part of `run` that writes the step's keys and values, of a layer with a cache of its own."""
    _, k, v = normed_and_rotated(inputs)
    assert k is not None and v is not None, "the layer has no cache"
    store(spec, plan, caches, k, v, inputs.k_scale, inputs.v_scale)


def store_and_attend(
    spec: MhaSpec,
    plan: MhaPlan,
    caches: CacheViews,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    sinks: torch.Tensor | None,
    core: Attend = attend,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Store the step's keys and values, then attend.

    `q`: [T, H, D]. `k`, `v`: [T, G, D], or None for a layer that reads another layer's cache. `sinks`: [H] where the
    spec has them. `core`: the attention of one sub-batch. `k_scale`, `v_scale`: FP8 entries hold k / k_scale and
    v / v_scale; where values are keys, `k_scale` is both. Returns [T, H, Dv] in `q`'s type.
    """
    if k is not None and v is not None:
        store(spec, plan, caches, k, v, k_scale, v_scale)
    if not plan.sub_batches:
        return q.new_empty(q.shape[0], spec.num_heads, spec.value_dim)
    return attend_sub_batches(spec, plan.sub_batches, caches, q, sinks, core, k_scale=k_scale, v_scale=v_scale)


def attend_sub_batches(
    spec: MhaSpec,
    sub_batches: Sequence[SubBatch],
    caches: CacheViews,
    q: torch.Tensor,
    sinks: torch.Tensor | None,
    core: Attend,
    out: torch.Tensor | None = None,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Attend for the tokens of some sub-batches, whose keys and values are stored. Arguments as in `store_and_attend`.

    `sub_batches`: at least one. `out`: [T, H, Dv] with the results of all other tokens; None if `sub_batches` have all
    tokens. Returns [T, H, Dv].
    """
    pools = caches["kv"]
    for sub_batch in sub_batches:
        keys = gather(pools["k"], sub_batch, q.dtype, k_scale)
        values = keys if spec.values_are_keys else gather(pools["v"], sub_batch, q.dtype, v_scale)
        block = q[sub_batch.tokens]
        mixed = core(spec, block.view(-1, sub_batch.queries, *block.shape[1:]), keys, values, sub_batch, sinks).flatten(
            0, 1
        )
        if len(mixed) == len(q):
            return mixed
        if out is None:
            out = q.new_empty(q.shape[0], spec.num_heads, spec.value_dim)
        out[sub_batch.tokens] = mixed
    assert out is not None
    return out
