"""Softmax attention over pages: decodes of few and many requests, and whole prompts."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch

from allotrope.attention.batch import BatchLayout, PageIndex
from allotrope.attention.cache_layout import pool_bytes, views
from allotrope.attention.check import KINDS, Comparison, compare
from allotrope.attention.mha import MHA, MhaSpec
from bench.kernels.cases.case import Check, KernelCase, Timed, prefill_batch, verify_batch

PAGE = 64
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
NAMES = {torch.float32: "fp32", BF16: "bf16", FP8: "fp8"}


@dataclass(frozen=True)
class Inputs:
    """One step of a layer. `caches`: filled pools. `sinks`: [H] or None."""

    spec: MhaSpec
    batch: BatchLayout
    paged: PageIndex
    caches: dict[str, dict[str, torch.Tensor]]
    q: torch.Tensor
    sinks: torch.Tensor | None


def cases() -> list[KernelCase]:
    wide = {"64/8 x 128": spec(64, 8, 128), "64/8 x 64 sinks": spec(64, 8, 64, sinks=True)}
    wide |= {"16/2 x 256": spec(16, 2, 256), "32/4 x 512": spec(32, 4, 512)}
    found = []
    for name, layer in wide.items():
        found += [_case(f"decode B{b} {n} {name}", layer, (1,) * b, n) for b, n in ((64, 8192), (4, 8192), (64, 1024))]
    quantized = dataclasses.replace(wide["64/8 x 128"], kv_dtype=FP8)
    window = dataclasses.replace(wide["64/8 x 64 sinks"], window=128)
    found += [_case("decode B64 8192 64/8 x 128", quantized, (1,) * 64, 8192)]
    found += [_case("decode B1 131072 64/8 x 128", wide["64/8 x 128"], (1,), 131072)]
    found += [_case("decode B64 8192 64/8 x 64 sinks window 128", window, (1,) * 64, 8192)]
    drafted = wide | {"24/4 x 256": spec(24, 4, 256), "64/8 x 64 sinks window 128": window}
    found += [_verify(f"verify B{b} x 4 1024 {n}", layer, b, 4, 1024) for n, layer in drafted.items() for b in (64, 16)]
    found += [_case(f"prefill 8192 {name}", layer, (8192,), 8192) for name, layer in wide.items()]
    found += [_case("prefill 8192 64/8 x 64", spec(64, 8, 64), (8192,), 8192)]
    found += [_case("prefill 8192 64/8 x 64 sinks window 128", window, (8192,), 8192)]
    found += [_case("prefill 16 x 512 64/8 x 128", wide["64/8 x 128"], (512,) * 16, 512)]
    found += [_case("prefill 512 after 7680 64/8 x 128", wide["64/8 x 128"], (512,), 8192)]
    tiny = dataclasses.replace(spec(4, 2, 64, sinks=True), kv_dtype=torch.float32)
    found += [_case("decode B3 70 4/2 x 64 sinks", tiny, (1,) * 3, 70, tiny=True)]
    found += [_verify("verify B3 x 3 70 4/2 x 64 sinks", tiny, 3, 3, 70, tiny=True)]
    return [*found, _case("prefill 2 x 40 of 70 4/2 x 64 sinks", tiny, (40,) * 2, 70, tiny=True)]


def spec(heads: int, groups: int, dim: int, sinks: bool = False) -> MhaSpec:
    return MhaSpec(num_heads=heads, num_kv_heads=groups, head_dim=dim, scale=dim**-0.5, kv_dtype=BF16, sinks=sinks)


def _case(name: str, layer: MhaSpec, new: tuple[int, ...], length: int, tiny: bool = False) -> KernelCase:
    dtype = BF16 if layer.kv_dtype == FP8 else layer.kv_dtype
    window = length if layer.window is None else min(layer.window, length)
    row = 2 * layer.num_kv_heads * layer.head_dim * layer.kv_dtype.itemsize
    read = min(length, window + new[0] - 1)
    seen = sum(min(length - new[0] + i + 1, window) for i in range(new[0]))
    absent = {} if layer.head_dim <= 256 and not layer.sinks else {"fa3": "no sinks; head dim at most 256"}
    peers = {} if absent else {"fa3": _fa3}
    if new[0] == length and not layer.sinks:
        peers["sdpa cudnn"] = _cudnn
    return KernelCase(
        family="mha",
        name=f"{name} {NAMES[layer.kv_dtype]}",
        make=functools.partial(_make, layer, new, (length,) * len(new), dtype),
        ours=_ours,
        check=_check(dtype),
        bytes=len(new) * (read * row + 2 * new[0] * layer.num_heads * layer.head_dim * dtype.itemsize),
        flops=4 * len(new) * seen * layer.num_heads * layer.head_dim,
        peers=peers,
        absent=absent,
        tiny=tiny,
    )


def _verify(name: str, layer: MhaSpec, sequences: int, rows: int, length: int, tiny: bool = False) -> KernelCase:
    """Sequences with drafts: each reads its keys once."""
    alone = _case(name, layer, (1,) * sequences, length + rows - 1, tiny)
    queries = 2 * (rows - 1) * layer.num_heads * layer.head_dim * layer.kv_dtype.itemsize
    return dataclasses.replace(
        alone,
        make=functools.partial(_make_verify, layer, sequences, rows, length),
        bytes=alone.bytes + sequences * queries,
        flops=alone.flops * rows,
        peers={},
        absent={},
    )


def _make(
    layer: MhaSpec, new: tuple[int, ...], lengths: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Inputs:
    return _filled(layer, *prefill_batch(new, lengths, PAGE, device), dtype)


def _make_verify(layer: MhaSpec, sequences: int, rows: int, length: int, device: torch.device) -> Inputs:
    return _filled(layer, *verify_batch(sequences, rows, length, PAGE, device), layer.kv_dtype)


def _filled(layer: MhaSpec, batch: BatchLayout, paged: PageIndex, pages: int, dtype: torch.dtype) -> Inputs:
    device, layout = batch.device, layer.caches()["kv"]
    pools = views(layout, PAGE, pages, torch.zeros(pool_bytes(layout, PAGE, pages), dtype=torch.uint8, device=device))
    for pool in pools.values():
        for part in pool[1:].split(1024):
            part.copy_(torch.randn(part.shape, device=device))
    q = torch.randn(batch.num_tokens, layer.num_heads, layer.head_dim, device=device).to(dtype)
    sinks = torch.randn(layer.num_heads, device=device) if layer.sinks else None
    return Inputs(layer, batch, paged, {"kv": pools}, q, sinks)


def _ours(x: Inputs) -> Timed:
    from allotrope.attention.mha import triton

    plan = triton.build_plan(x.spec, x.batch, {"kv": x.paged})
    return functools.partial(triton.store_and_attend, x.spec, plan, x.caches, x.q, None, None, x.sinks)


def _check(dtype: torch.dtype) -> Check:
    def check(x: Inputs, timed: Timed) -> list[Comparison]:
        """Every request's last tokens, and some in the middle of a prompt, against the reference in fp32."""
        got = timed()
        found = []
        for b in (0, x.batch.num_requests - 1):
            start, end = x.batch.query_start[b : b + 2]
            length, context = x.batch.seq_lens[b], x.batch.context_lens[b]
            for last in sorted({end, start + 1 + (end - start) // 3}):
                first = max(start, last - 33)
                seen = context + last - start
                part = BatchLayout((last - first,), (seen,), x.q.device)
                pages = PageIndex(PAGE, x.paged.table[b : b + 1], x.paged.slots[:0])
                plan = MHA.backends[-1].plan(x.spec, part, {"kv": pages})
                assert seen <= length
                given = MHA.ready_inputs(x.spec, x.q[first:last].float(), None, None, x.sinks)
                want = MHA.backends[-1].run(x.spec, plan, x.caches, given)
                found.append(compare(got[first:last], want, KINDS[dtype]))
        return found

    return check


def _fa3(x: Inputs) -> Timed:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    spec, batch = x.spec, x.batch
    if spec.kv_dtype == FP8:
        raise ImportError("its FP8 rows need FP8 queries")
    kv = x.caches["kv"]
    return functools.partial(
        flash_attn_varlen_func, x.q, kv["k"], kv["v"], max_seqlen_q=max(batch.query_lens),
        cu_seqlens_q=batch.tensors.query_start, max_seqlen_k=max(batch.seq_lens), seqused_k=batch.tensors.seq_lens,
        block_table=x.paged.table.int(), causal=True, softmax_scale=spec.scale, fa_version=3,
    )  # fmt: skip


def _cudnn(x: Inputs) -> Timed:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    spec, batch = x.spec, x.batch
    rows = (batch.num_requests, batch.seq_lens[0], -1, spec.head_dim)
    q = x.q.view(rows).transpose(1, 2)
    k, v = (torch.randn_like(q[:, : spec.num_kv_heads]) for _ in range(2))

    def attend() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=spec.scale, enable_gqa=True
            )

    return attend
