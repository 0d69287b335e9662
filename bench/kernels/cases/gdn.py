"""The gated delta rule: decode of many and few requests, with drafts as well, and long prefills, with the convolution
and the gates."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from allotrope.attention.batch import BatchLayout, SlotIndex
from allotrope.attention.check import Comparison, compare
from allotrope.attention.gdn import GDN, GdnSpec
from bench.kernels.cases.case import KernelCase, Timed, verify_batch

DTYPE = torch.bfloat16
CHUNK = 64


@dataclass(frozen=True)
class Inputs:
    """A step of one layer. `pools`: of every slot; each sequence has one of its own."""

    spec: GdnSpec
    batch: BatchLayout
    slots: torch.Tensor
    pools: dict[str, torch.Tensor]
    tokens: dict[str, torch.Tensor]
    layer: dict[str, torch.Tensor]


def cases() -> list[KernelCase]:
    released = {"num_k_heads": 16, "num_v_heads": 32, "k_head_dim": 128, "v_head_dim": 128}
    equal = released | {"num_k_heads": 32}
    found = [_case(f"decode B{b} 16/32x128", released, (1,) * b, 8) for b in (64, 4)]
    found.append(_case("decode B64 16/32x128 bf16 states", released | {"state_dtype": DTYPE}, (1,) * 64, 8))
    found.append(_case("decode B64 by channel 32x128", equal | {"channel_decay": True}, (1,) * 64, 8))
    wider = released | {"num_v_heads": 48, "state_dtype": DTYPE}
    found += [_verify(f"verify B{b} x 4 16/32x128", released, b, 4, 2) for b in (64, 16, 1)]
    found += [_verify(f"verify B{b} x 4 16/48x128 bf16 states", wider, b, 4, 2) for b in (64, 16, 1)]
    for name, heads in (("32/32x128", equal), ("16/32x128", released)):
        found.append(_case(f"prefill 8192 {name}", heads, (8192,), 8192))
    found.append(_case("prefill 16x2048 16/32x128", released, (2048,) * 16, 2048))
    found.append(_case("prefill 8192 by channel 32x128", equal | {"channel_decay": True}, (8192,), 8192))
    small = {"num_k_heads": 1, "num_v_heads": 2, "k_head_dim": 16, "v_head_dim": 16}
    found.append(_verify("verify tiny", small, 3, 3, 1, tiny=True))
    return [*found, _case("mixed tiny", small, (1, 1, 70), 70, tiny=True)]


def _case(name: str, numbers: dict[str, Any], query_lens: tuple[int, ...], seen: int, tiny: bool = False) -> KernelCase:
    spec = GdnSpec(conv_width=4, conv_dtype=DTYPE, **numbers)
    tokens = sum(query_lens)
    decode = tokens == len(query_lens)
    state, kept = spec.state_bytes, 3 * spec.conv_dim * DTYPE.itemsize
    rows = tokens * (spec.conv_dim + spec.num_v_heads + spec.decay_dim + spec.value_dim) * DTYPE.itemsize
    dk, dv = spec.k_head_dim, spec.v_head_dim
    plain_states = spec.state_dtype == torch.float32 and not spec.channel_decay
    flops = 7 * dk * dv if decode else 6 * dk * dv + 2 * CHUNK * (3 * dk + 2 * dv) + CHUNK**2
    return KernelCase(
        family="gdn",
        name=name,
        make=functools.partial(_make, spec, query_lens, tuple(max(seen, q) for q in query_lens)),
        ours=_ours,
        check=_check,
        bytes=len(query_lens) * 2 * (state + kept) + rows,
        flops=tokens * spec.num_v_heads * flops,
        peers={"fla": _fla_decode if decode else _fla_prefill} if plain_states and not tiny else {},
        tiny=tiny,
        note="ours includes convolution, norms and gates; FLA's is the rule alone",
    )


def _verify(
    name: str, numbers: dict[str, Any], sequences: int, rows: int, replay: int, tiny: bool = False
) -> KernelCase:
    """Sequences with drafts, of whose last drafts `replay` were accepted: each reads and writes its state once."""
    alone = _case(name, numbers, (1,) * sequences, 8, tiny)
    spec = GdnSpec(conv_width=4, conv_dtype=DTYPE, max_drafts=rows - 1, **numbers)
    inputs = (spec.conv_dim + spec.num_v_heads + spec.decay_dim) * DTYPE.itemsize
    # Of drafts: read, kept, and those before read again; their outputs.
    more = sequences * ((2 * (rows - 1) + replay) * inputs + (rows - 1) * spec.value_dim * DTYPE.itemsize)
    return replace(
        alone,
        make=functools.partial(_make_verify, spec, sequences, rows, replay),
        bytes=alone.bytes + more,
        flops=alone.flops * (rows + replay),
        peers={},
        note="",
    )


def _make(spec: GdnSpec, query_lens: tuple[int, ...], seq_lens: tuple[int, ...], device: torch.device) -> Inputs:
    batch = BatchLayout(query_lens, seq_lens, device)
    return _filled(spec, batch, torch.randperm(len(query_lens), device=device) + 1)


def _make_verify(spec: GdnSpec, sequences: int, rows: int, replay: int, device: torch.device) -> Inputs:
    batch, _, _ = verify_batch(sequences, rows, 8, 64, device, replay)
    return _filled(spec, batch, (torch.randperm(sequences, device=device) + 1).repeat_interleave(rows))


def _filled(spec: GdnSpec, batch: BatchLayout, slots: torch.Tensor) -> Inputs:
    """`slots`: of each request."""
    device, tokens, held = batch.device, batch.num_tokens, len(slots) + 1

    def normal(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    b, a = normal(tokens, spec.num_v_heads + spec.decay_dim).split((spec.num_v_heads, spec.decay_dim), dim=1)
    layer = {
        "conv_weight": normal(4, spec.conv_dim, dtype=torch.float32).mul_(0.5).t(),
        "A_log": torch.linspace(0.01, 16.0, spec.num_v_heads, device=device).log(),
        "dt_bias": normal(spec.decay_dim, dtype=torch.float32),
    }
    pools = {
        "conv": normal(held, 3, spec.conv_dim),
        "ssm": normal(held, spec.num_v_heads, spec.k_head_dim, spec.v_head_dim, dtype=spec.state_dtype) * 0.1,
    }
    if spec.max_drafts:
        widths = {"draft_qkv": spec.conv_dim, "draft_b": spec.num_v_heads, "draft_a": spec.decay_dim}
        pools |= {name: normal(held, spec.max_drafts, width) for name, width in widths.items()}
    fed = {"qkv": normal(tokens, spec.conv_dim), "b": b, "a": a}
    return Inputs(spec, batch, slots, pools, fed, layer)


def _timed(x: Inputs, name: str, pools: dict[str, torch.Tensor]) -> Timed:
    (backend,) = (one for one in GDN.backends if one.name == name)
    plan = backend.plan(x.spec, x.batch, {"state": SlotIndex(x.slots)})
    inputs = GDN.ready_inputs(x.spec, **x.tokens, conv_bias=None, **x.layer)
    return lambda: backend.run(x.spec, plan, {"state": pools}, inputs)


def _ours(x: Inputs) -> Timed:
    return _timed(x, "triton", x.pools)


def _check(x: Inputs, timed: Timed) -> Sequence[Comparison]:
    """Outputs and states, each from copies of the same states; `timed` changes its own. What is wanted is not rounded:
    in rows that nearly cancel, a rounding of its own would count as ours.
    """
    exact = replace(x, tokens={name: given.float() for name, given in x.tokens.items()})
    wanted = {name: pool.to(torch.float32, copy=True) for name, pool in x.pools.items()}
    found = {name: pool.clone() for name, pool in x.pools.items()}
    want, got = _timed(exact, "chunked", wanted)(), _timed(x, "triton", found)()
    real = x.slots.unique()
    return [compare(got, want, "bf16"), compare(found["ssm"][real].to(DTYPE), wanted["ssm"][real], "bf16")]


def _fla_inputs(x: Inputs, dims: tuple[int, ...]) -> dict[str, Any]:
    spec, device = x.spec, x.slots.device
    heads, size = spec.num_v_heads, spec.k_head_dim
    q, k, v = (torch.randn(*dims, heads, size, device=device).to(DTYPE) for _ in range(3))
    k = torch.nn.functional.normalize(k.float(), dim=-1).to(DTYPE)
    g = -torch.rand(*dims, heads, device=device)
    beta = torch.rand(*dims, heads, device=device).to(DTYPE)
    state = torch.randn(dims[0], heads, size, spec.v_head_dim, device=device)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": state, "output_final_state": True} | {
        "use_qk_l2norm_in_kernel": True
    }


def _fla_decode(x: Inputs) -> Timed:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    return functools.partial(fused_recurrent_gated_delta_rule, **_fla_inputs(x, (x.batch.num_requests, 1)))


def _fla_prefill(x: Inputs) -> Timed:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    requests = x.batch.num_requests
    return functools.partial(chunk_gated_delta_rule, **_fla_inputs(x, (requests, x.batch.num_tokens // requests)))
