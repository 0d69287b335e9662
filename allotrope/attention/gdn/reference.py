"""The gated delta rule over state slots, token by token: `naive.py` with the signature of the kernels.

For token t of value head j, with q and k from key head j // (Hv / Hk) and S the head's [Dk, Dv] state (0 before
position 0):

    [q | k | v] = silu(causal convolution of the step's [q | k | v])
    q = q / |q| / sqrt(Dk);  k = k / |k|
    beta = sigmoid(b);  g = -exp(A_log) softplus(a + dt_bias)
    S <- e^g S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q

With `channel_decay`, a, dt_bias and g are vectors of Dk per head, and e^g S scales the rows of S. Mathematics in fp32
whatever the inputs; the result is rounded once. Sources: Yang et al. 2024 (gated delta networks), equation 10 and
section 3; Kimi Team 2025 (Kimi Linear), section 3, for the decay per channel.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from allotrope.attention.conv import causal_conv
from allotrope.attention.family import CacheViews
from allotrope.attention.gdn.inputs import GdnInputs
from allotrope.attention.gdn.plan import GdnPlan, Slots, SubBatch
from allotrope.attention.gdn.spec import GdnSpec
from allotrope.attention.gdn.verify import Pools, run_verify

# Added to the squared length of a query or key, so that a zero vector stays zero.
NORM_EPS = 1e-6

Advance = Callable[..., torch.Tensor]
"""A function with the arguments of `advance`."""
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Feed = Callable[[GdnSpec, torch.Tensor, torch.Tensor, torch.Tensor | None], Heads | None]
"""Queries, keys and values [b, L, heads, dim] of inputs [b, conv_width - 1 + L, conv_dim], weight and bias, or None."""


def advance(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """The last line of the equation for one sub-batch, all tensors fp32.

    `q`, `k`: [b, L, Hk, Dk], normalised. `v`: [b, L, Hv, Dv]. `g`: [b, L, Hv, 1 or Dk]. `beta`: [b, L, Hv]. `state`:
    [b, Hv, Dk, Dv], overwritten with the state after the last token. Returns [b, L, Hv, Dv].
    """
    repeat = v.shape[2] // k.shape[2]
    q, k = q.repeat_interleave(repeat, dim=2), k.repeat_interleave(repeat, dim=2)
    out = torch.empty_like(v)
    for t in range(v.shape[1]):
        state *= g[:, t, ..., None].exp()
        delta = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state += torch.einsum("bhk,bhv->bhkv", k[:, t], delta)
        out[:, t] = torch.einsum("bhkv,bhk->bhv", state, q[:, t])
    return out


def run(
    spec: GdnSpec,
    plan: GdnPlan,
    caches: CacheViews,
    inputs: GdnInputs,
    core: Advance = advance,
    out: torch.Tensor | None = None,
    feed: Feed | None = None,
) -> torch.Tensor:
    """Advance every request's state over its new tokens.

    `core`: the computation of a sub-batch. `out`: the result, in which tokens outside of the plan stay unchanged; None
    allocates one. `feed`: a fused convolution and norm, which returns None for shapes that it does not support; None
    computes both by PyTorch. Returns [T, Hv, Dv] in `qkv`'s type, 0 for tokens of requests without a slot. Afterwards
    each slot holds the state after its request's last token.
    """
    pools, qkv, b, a = caches["state"], inputs.qkv, inputs.b, inputs.a
    conv_bias, A_log, dt_bias = inputs.conv_bias, inputs.A_log, inputs.dt_bias
    if plan.fresh is not None:
        for pool in pools.values():
            pool.index_fill_(0, plan.fresh, 0)
    beta = b.float().sigmoid()
    step = functional.softplus(a.float() + dt_bias.float()).unflatten(1, (spec.num_v_heads, -1))
    g = step.mul_(-A_log.float().exp()[:, None])
    if out is None:
        shape = (qkv.shape[0], spec.num_v_heads, spec.v_head_dim)
        out = qkv.new_empty(shape) if plan.complete else qkv.new_zeros(shape)
    if plan.verify is not None:
        run_verify(plan.verify, pools, inputs, functools.partial(_decode, spec, core), out)
    # The convolution reads the weight tap by tap, all channels of a tap together; all sub-batches share this copy.
    weight = inputs.conv_weight.float().t().contiguous().t()
    for sub_batch in plan.sub_batches:
        new = _take(qkv, sub_batch.tokens).unflatten(0, (-1, sub_batch.length))
        convolved = torch.cat((_take(pools["conv"], sub_batch.slots), new), dim=1)
        pools["conv"][sub_batch.slots] = convolved[:, sub_batch.length :]
        heads = None if feed is None else feed(spec, convolved, weight, conv_bias)
        tensors = [*(heads or _heads(spec, causal_conv(convolved, weight, conv_bias)))]
        tensors += [_take(t, sub_batch.tokens).unflatten(0, (-1, sub_batch.length)) for t in (g, beta)]
        done = [_advance(core, pools["ssm"], slots, [t[rows] for t in tensors]) for rows, slots in sub_batch.states]
        # An assignment through an index needs equal types on both sides, unlike one through a slice.
        out[sub_batch.tokens] = (done[0] if len(done) == 1 else torch.cat(done)).flatten(0, 1).to(out.dtype)
    return out


def _decode(spec: GdnSpec, core: Advance, pools: Pools, slots: torch.Tensor, inputs: GdnInputs) -> torch.Tensor:
    """One token for each of `slots`, one by one: in a batch, the last bits would depend on the other requests."""
    rows, outputs = slice(0, 1), []
    for i, slot in enumerate(slots.tolist()):
        at = slice(slot, slot + 1)
        alone = GdnPlan(None, True, (SubBatch(rows, 1, at, ((rows, at),)),))
        token = slice(i, i + 1)
        one = dataclasses.replace(inputs, qkv=inputs.qkv[token], b=inputs.b[token], a=inputs.a[token])
        outputs.append(run(spec, alone, {"state": pools}, one, core))
    return torch.cat(outputs)


def _take(x: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """`x[rows]`: a view for a slice."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _advance(core: Advance, pool: torch.Tensor, slots: Slots, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    stored = _take(pool, slots)
    state = stored.float().contiguous()
    out = core(*tensors, state)
    # A contiguous slice of an fp32 pool is the pool's own memory: `core` has advanced it in place.
    if state is not stored or not isinstance(slots, slice):
        pool[slots] = state.to(pool.dtype)
    return out


def _heads(spec: GdnSpec, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split [b, L, conv_dim] into heads; queries and keys are normalised, and queries are scaled by 1 / sqrt(Dk)."""
    qk = qkv[..., : 2 * spec.key_dim].unflatten(-1, (2, spec.num_k_heads, spec.k_head_dim))
    qk = qk * torch.rsqrt(qk.square().sum(-1, keepdim=True) + NORM_EPS)
    q, k = qk.unbind(2)
    return q * spec.k_head_dim**-0.5, k, qkv[..., 2 * spec.key_dim :].unflatten(-1, (spec.num_v_heads, -1))
