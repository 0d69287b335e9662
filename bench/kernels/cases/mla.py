"""Latent attention over pages: decodes of few and many heads and requests, and whole prompts.

A decode is timed from absorbed queries to the result in the latent, as FlashMLA computes it; a prompt from stored rows
to the heads' values, up-projection of keys and values included, for ours and for the peers.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from allotrope.attention.batch import BatchLayout, PageIndex
from allotrope.attention.cache_layout import pool_bytes, views
from allotrope.attention.check import KINDS, Comparison, compare
from allotrope.attention.mla import MLA, MlaSpec, rows
from bench.kernels.cases.case import KernelCase, Timed, decode_batch, prefill_batch

PAGE = 64
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Inputs:
    """One step of a layer. `caches`: filled pools. `tokens`, `layer`: arguments of `run`. `q`: [H, B, C] absorbed."""

    spec: MlaSpec
    batch: BatchLayout
    paged: PageIndex
    caches: dict[str, dict[str, torch.Tensor]]
    tokens: dict[str, torch.Tensor]
    layer: dict[str, torch.Tensor]
    q: torch.Tensor


def spec(heads: int, row_format: str = "plain", kv_dtype: torch.dtype = BF16) -> MlaSpec:
    """The sizes of DeepSeek V3, of which a rank has some heads."""
    return MlaSpec(
        num_heads=heads, latent_dim=512, rope_dim=64, nope_dim=128, v_head_dim=128, scale=192**-0.5, kv_dtype=kv_dtype,
        row_format=row_format,
    )  # fmt: skip


def cases() -> list[KernelCase]:
    found = []
    for heads in (16, 64, 128):
        for requests, length in ((64, 8192), (4, 8192), (64, 1024)):
            found.append(decode(f"decode B{requests} {length} {heads} heads", spec(heads), requests, length))
    found.append(decode("decode B64 8192 128 heads pages of 16", spec(128), 64, 8192, page_size=16))
    found.append(decode("decode B64 8192 16 heads pages of 16", spec(16), 64, 8192, page_size=16))
    found.append(decode("decode B64 8192 128 heads 656-byte rows", spec(128, "scaled", FP8), 64, 8192))
    found.append(decode("decode B64 8192 16 heads FP8", spec(16, kv_dtype=FP8), 64, 8192))
    found.append(decode("decode B1 131072 128 heads", spec(128), 1, 131072))
    found.append(prefill("prefill 8192 128 heads", spec(128), (8192,), (8192,)))
    found.append(prefill("prefill 4 x 2000 128 heads", spec(128), (2000,) * 4, (2000,) * 4))
    found.append(prefill("prefill 2048 after 6144 128 heads", spec(128), (2048,), (8192,)))
    tiny = dataclasses.replace(spec(3), latent_dim=32, rope_dim=16, nope_dim=24, v_head_dim=32, kv_dtype=torch.float32)
    found.append(decode("decode B3 70 3 heads", tiny, 3, 70, page_size=16, tiny=True))
    return [*found, prefill("prefill 40 of 70 3 heads", tiny, (40,), (70,), tiny=True)]


def decode(
    name: str, layer: MlaSpec, requests: int, length: int, page_size: int = PAGE, tiny: bool = False
) -> KernelCase:
    width = 656 if layer.row_format == "scaled" else (layer.latent_dim + layer.rope_dim) * layer.kv_dtype.itemsize
    size = layer.latent_dim + layer.rope_dim
    moved = requests * length * width + requests * layer.num_heads * (size + layer.latent_dim) * 2
    fits = layer.kv_dtype == BF16 and page_size == PAGE
    return KernelCase(
        family="mla", name=name, make=functools.partial(make, layer, (1,) * requests, (length,) * requests, page_size),
        ours=attend, check=check_decode, bytes=moved,
        flops=2 * requests * layer.num_heads * length * (size + layer.latent_dim),
        peers={"flashmla": flashmla} if fits else {}, tiny=tiny,
    )  # fmt: skip


def prefill(
    name: str, layer: MlaSpec, new: tuple[int, ...], lengths: tuple[int, ...], tiny: bool = False
) -> KernelCase:
    p, r, v, c = layer.nope_dim, layer.rope_dim, layer.v_head_dim, layer.latent_dim
    pairs = sum(q * (n - q) + q * (q + 1) // 2 for q, n in zip(new, lengths, strict=True))
    heads, tokens, keys = layer.num_heads, sum(new), sum(lengths)
    flops = 2 * heads * (pairs * (p + r + v) + keys * c * (p + v))
    moved = (keys * (c + r) + tokens * heads * (p + r + v) + heads * c * (p + v)) * layer.kv_dtype.itemsize
    alone = len(new) == 1 and new == lengths and not tiny
    return KernelCase(
        family="mla", name=name, make=functools.partial(make, layer, new, lengths, PAGE), ours=run, check=check_run,
        bytes=moved, flops=flops, peers={"fa3": fa3, "sdpa": sdpa} if alone else {}, tiny=tiny,
    )  # fmt: skip


def make(
    layer: MlaSpec, new: tuple[int, ...], lengths: tuple[int, ...], page_size: int, device: torch.device
) -> Inputs:
    dtype = torch.float32 if layer.kv_dtype == torch.float32 else BF16
    if set(new) == {1}:
        batch, paged, pages = decode_batch(len(new), lengths[0], page_size, device)
    else:
        batch, paged, pages = prefill_batch(new, lengths, page_size, device)
    layout = layer.caches()["latent"]
    pools = views(
        layout, page_size, pages, torch.zeros(pool_bytes(layout, page_size, pages), dtype=torch.uint8, device=device)
    )

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    every = torch.arange(page_size, pages * page_size, device=device)
    made = rows.encode(
        layer.row_format, layer.kv_dtype, normal(len(every), layer.latent_dim), normal(len(every), layer.rope_dim), 1.0
    )
    for name, values in made.items():
        rows.put(pools[name], every, values)
    count, heads, gain = sum(new), layer.num_heads, layer.latent_dim**-0.5
    tokens = {
        "q_nope": 2 * normal(count, heads, layer.nope_dim), "q_pe": 2 * normal(count, heads, layer.rope_dim),
        "c": normal(count, layer.latent_dim), "k_pe": normal(count, layer.rope_dim),
    }  # fmt: skip
    weights = {
        "w_uk": gain * normal(heads, layer.nope_dim, layer.latent_dim),
        "w_uv": gain * normal(heads, layer.v_head_dim, layer.latent_dim),
    }
    q = torch.bmm(tokens["q_nope"].transpose(0, 1), weights["w_uk"]) if set(new) == {1} else tokens["q_nope"]
    return Inputs(layer, batch, paged, {"latent": pools}, tokens, weights, q)


def attend(x: Inputs) -> Timed:
    """A decode's kernels alone: nothing is stored or projected."""
    from allotrope.attention.mla import triton, triton_decode

    (part,) = triton.build_plan(x.spec, x.batch, {"latent": x.paged}).absorbed
    pools, q_pe = x.caches["latent"], x.tokens["q_pe"]
    return lambda: triton_decode.attend(x.spec, pools, x.paged, part.queries, x.q, q_pe, 1.0)


def run(x: Inputs) -> Timed:
    from allotrope.attention.mla import triton

    plan = triton.build_plan(x.spec, x.batch, {"latent": x.paged})
    return lambda: triton.store_and_attend(x.spec, plan, x.caches, **x.tokens, **x.layer)


def check_decode(x: Inputs, timed: Timed) -> list[Comparison]:
    """The first and the last request, in fp32 over the rows as they are stored."""
    got, found = timed(), []
    for b in sorted({0, x.batch.num_requests - 1}):
        key = torch.arange(x.batch.seq_lens[b], device=got.device)
        rows_of = x.paged.table[b][key // x.paged.page_size] * x.paged.page_size + key % x.paged.page_size
        spec = x.spec
        c, k_pe = rows.decode(spec.row_format, spec.latent_dim, x.caches["latent"], rows_of[None], 1.0)
        logits = x.q[:, b].float() @ c[0].T + x.tokens["q_pe"][b].float() @ k_pe[0].T
        found.append(compare(got[:, b], (logits * spec.scale).softmax(-1) @ c[0], KINDS[got.dtype]))
    return found


def check_run(x: Inputs, timed: Timed) -> list[Comparison]:
    """The reference for the last tokens of the last request, as queries of their own: all rows are stored by then."""
    got = timed()
    last, count = x.batch.num_requests - 1, min(x.batch.query_lens[-1], 64)
    batch = BatchLayout((count,), (x.batch.seq_lens[last],), got.device)
    paged = PageIndex(x.paged.page_size, x.paged.table[last:], torch.full((count,), -1, device=got.device))
    tail = {name: t[-count:].float() for name, t in x.tokens.items()}
    reference = MLA.backends[-1]
    plan = reference.plan(x.spec, batch, {"latent": paged})
    inputs = MLA.ready_inputs(x.spec, **tail, **{name: t.float() for name, t in x.layer.items()})
    want = reference.run(x.spec, plan, x.caches, inputs)
    return [compare(got[-count:], want, KINDS[got.dtype])]


def flashmla(x: Inputs) -> Timed:
    from vllm.third_party.flashmla.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata

    pools = x.caches["latent"]
    cache = torch.cat((pools["c"], pools["k_pe"]), dim=-1).unsqueeze(2)
    q = torch.cat((x.q.transpose(0, 1), x.tokens["q_pe"]), dim=-1).unsqueeze(1)
    table, lens = x.paged.table.int(), x.batch.tensors.seq_lens
    metadata, _ = get_mla_metadata()
    return lambda: flash_mla_with_kvcache(
        q, cache, table, lens, 512, metadata, softmax_scale=x.spec.scale, causal=True
    )[0]


def _decompressed(x: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of all heads, as a peer needs them: two products, and the parts side by side."""
    heads = x.spec.num_heads
    k = torch.mm(x.tokens["c"], x.layer["w_uk"].flatten(0, 1).t()).unflatten(1, (heads, -1))
    v = torch.mm(x.tokens["c"], x.layer["w_uv"].flatten(0, 1).t()).unflatten(1, (heads, -1))
    k = torch.cat((k, x.tokens["k_pe"][:, None].expand(-1, heads, -1)), dim=-1)
    return torch.cat((x.tokens["q_nope"], x.tokens["q_pe"]), dim=-1), k, v


def fa3(x: Inputs) -> Timed:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    starts, longest = x.batch.tensors.query_start, max(x.batch.query_lens)

    def timed() -> Any:
        q, k, v = _decompressed(x)
        return flash_attn_varlen_func(
            q, k, v, max_seqlen_q=longest, cu_seqlens_q=starts, max_seqlen_k=longest, cu_seqlens_k=starts,
            softmax_scale=x.spec.scale, causal=True, fa_version=3,
        )  # fmt: skip

    return timed


def sdpa(x: Inputs) -> Timed:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def timed() -> Any:
        whole = (part.transpose(0, 1)[None] for part in _decompressed(x))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*whole, is_causal=True, scale=x.spec.scale)

    return timed
