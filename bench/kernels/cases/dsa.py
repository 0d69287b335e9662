"""Sparse latent attention: scores of the indexer, exact top-k, and attention over the selected entries."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch

from allotrope.attention.cache_layout import pool_bytes, views
from allotrope.attention.check import Comparison, compare
from allotrope.attention.dsa import DsaSpec, IndexerSpec, indexer
from allotrope.attention.mla import rows
from allotrope.attention.topk import top_indices
from bench.kernels.cases import mla
from bench.kernels.cases.case import KernelCase, Timed

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
TOPK = 2048
# New tokens of a prompt that has 6144 already.
PROMPT = 2048


def cases() -> list[KernelCase]:
    found = []
    for heads in (128, 64, 16):
        for kind, row_format, kv_dtype in (("656-byte rows", "scaled", FP8), ("bf16", "plain", BF16)):
            layer = mla.spec(heads, row_format, kv_dtype)
            found += [_sparse(f"picked {TOPK} of 8192 B{b} {heads} heads {kind}", layer, b) for b in (64, 4)]
    found.append(_sparse(f"picked {TOPK} of 8192 by {PROMPT} queries 128 heads bf16", mla.spec(128), PROMPT, True))
    sizes = ((64, 8192), (16, 8192), (4, 131072))
    for key_format in ("scaled", "plain"):
        found += [_scores(f"scores B{b} {n} {key_format} keys", key_format, b, n) for b, n in sizes]
        found.append(_prompt_scores(f"scores {PROMPT} after 6144 {key_format} keys", key_format))
    found += [_topk(f"top-{TOPK} B{b} of {n}", b, n) for b, n in ((64, 8192), (4, 8192), (16, 16384), (64, 131072))]
    return [*found, _topk("top-8 B3 of 70", 3, 70, 8, tiny=True)]


@dataclass(frozen=True)
class SparseInputs:
    """Queries of a decode, or of a prompt, and their sparse indices [t, K]."""

    step: mla.Inputs
    sparse_indices: torch.Tensor


def _sparse(name: str, layer: mla.MlaSpec, queries: int, prompt: bool = False) -> KernelCase:
    """`prompt`: the queries are one request's, which reads a row once for all of them at best."""
    width = 656 if layer.row_format == "scaled" else 1152

    def make(device: torch.device) -> SparseInputs:
        new = (queries,) if prompt else (1,) * queries
        step = mla.make(layer, new, (8192,) * len(new), mla.PAGE, device)
        if prompt:
            absorbed = torch.bmm(step.tokens["q_nope"].transpose(0, 1), step.layer["w_uk"])
            step = dataclasses.replace(step, q=absorbed)
        order = torch.rand(queries, 8192 - queries * prompt, device=device).argsort(-1)[:, :TOPK]
        return SparseInputs(step, order.sort().values)

    moved = (8192 if prompt else queries * TOPK) * width + queries * (TOPK * 8 + layer.num_heads * 1088 * 2)
    return KernelCase(
        family="dsa", name=name, make=make, ours=_attend, check=_check_sparse, bytes=moved,
        flops=2 * queries * layer.num_heads * TOPK * 1088,
        peers={"flashmla": _flashmla} if layer.row_format == "scaled" and not prompt else {},
        absent={} if layer.row_format == "scaled" or layer.num_heads < 64 else {"flashmla": "decodes FP8 rows only"},
    )  # fmt: skip


def _attend(x: SparseInputs) -> Timed:
    from allotrope.attention.mla import triton, triton_decode

    step = x.step
    part = triton.group(step.batch, triton.visible(step.batch), slice(0, len(x.sparse_indices)), 8192)
    given = (step.spec, step.caches["latent"], step.paged, part.queries, step.q, step.tokens["q_pe"], 1.0)
    return lambda: triton_decode.attend(*given, x.sparse_indices, TOPK)


def _check_sparse(x: SparseInputs, timed: Timed) -> list[Comparison]:
    got, step, found = timed(), x.step, []
    for b in (0, len(x.sparse_indices) - 1):
        size, table = step.paged.page_size, step.paged.table[step.batch.tensors.request_of_token[b]]
        rows_of = table[x.sparse_indices[b] // size] * size + x.sparse_indices[b] % size
        c, k_pe = rows.decode(step.spec.row_format, 512, step.caches["latent"], rows_of[None], 1.0)
        logits = step.q[:, b].float() @ c[0].T + step.tokens["q_pe"][b].float() @ k_pe[0].T
        found.append(compare(got[:, b], (logits * step.spec.scale).softmax(-1) @ c[0], "bf16"))
    return found


def _flashmla(x: SparseInputs) -> Timed:
    from vllm.third_party.flashmla.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata

    step = x.step
    q = torch.cat((step.q.transpose(0, 1), step.tokens["q_pe"]), dim=-1).unsqueeze(1)
    size = step.paged.page_size
    rows_of = step.paged.table.gather(1, x.sparse_indices // size) * size + x.sparse_indices % size
    cache = step.caches["latent"]["row"].unsqueeze(2).view(FP8)
    metadata, _ = get_mla_metadata()
    return lambda: flash_mla_with_kvcache(
        q, cache, None, None, 512, metadata, softmax_scale=step.spec.scale, is_fp8_kvcache=True,
        indices=rows_of.int()[:, None],
    )[0]  # fmt: skip


@dataclass(frozen=True)
class Scored:
    """Index queries, and what they are scored against."""

    spec: IndexerSpec
    step: mla.Inputs
    pools: dict[str, torch.Tensor]
    q: torch.Tensor
    weights: torch.Tensor


def _indexed(key_format: str, new: tuple[int, ...], lengths: tuple[int, ...], device: torch.device) -> Scored:
    layer = IndexerSpec(num_heads=64, head_dim=128, key_format=key_format)
    step = mla.make(mla.spec(16), new, lengths, mla.PAGE, device)
    layout = DsaSpec(mla=mla.spec(16), topk=TOPK, indexer=layer).caches()["index"]
    pages = len(step.caches["latent"]["c"])
    buffer = torch.zeros(pool_bytes(layout, mla.PAGE, pages), dtype=torch.uint8, device=device)
    pools = views(layout, mla.PAGE, pages, buffer)
    keys = torch.randn(pages * mla.PAGE, 128, device=device, dtype=BF16)
    for field, values in indexer.encode_keys(layer, BF16, keys).items():
        rows.put(pools[field], torch.arange(len(keys), device=device), values)
    q = torch.randn(sum(new), 64, 128, device=device, dtype=BF16)
    return Scored(layer, step, pools, q, torch.randn(sum(new), 64, device=device))


def _scores(name: str, key_format: str, requests: int, length: int) -> KernelCase:
    def make(device: torch.device) -> Scored:
        return _indexed(key_format, (1,) * requests, (length,) * requests, device)

    width = 132 if key_format == "scaled" else 256
    return KernelCase(
        family="dsa", name=name, make=make, ours=_score, check=_check_scores, bytes=requests * length * (width + 4),
        flops=2 * requests * length * 64 * 128, rate="fp8" if key_format == "scaled" else "bf16",
    )  # fmt: skip


def _prompt_scores(name: str, key_format: str) -> KernelCase:
    context = 8192 - PROMPT
    pairs = PROMPT * context + PROMPT * (PROMPT + 1) // 2
    width = 132 if key_format == "scaled" else 256
    return KernelCase(
        family="dsa", name=name, make=functools.partial(_indexed, key_format, (PROMPT,), (8192,)), ours=_score_prompt,
        check=_check_scores, bytes=8192 * width + 4 * pairs, flops=2 * pairs * 64 * 128,
    )  # fmt: skip


def _score_prompt(x: Scored) -> Timed:
    from allotrope.attention.dsa import triton, triton_index

    layer = DsaSpec(mla=x.step.spec, topk=TOPK, indexer=x.spec)
    plan = triton.build_plan(layer, x.step.batch, {"latent": x.step.paged, "index": x.step.paged})
    (contest,) = plan.contests
    given = (x.spec, x.pools, x.step.paged, contest.tiles, PROMPT, contest.part.queries.bound, x.q, x.weights)
    return lambda: triton_index.score_tiles(*given)


def _score(x: Scored) -> Timed:
    from allotrope.attention.dsa import triton_index
    from allotrope.attention.mla import triton

    (part,) = triton.build_plan(x.step.spec, x.step.batch, {"latent": x.step.paged}).absorbed
    given = (x.spec, x.pools, x.step.paged, part.queries, TOPK, x.q, x.weights)
    return lambda: triton_index.score_decodes(*given)


def _check_scores(x: Scored, timed: Timed) -> list[Comparison]:
    """The last request. Scores cancel, and FP8 products are summed with few digits: held to the bf16 row."""
    got, b, request = timed(), len(x.q) - 1, x.step.batch.num_requests - 1
    key = torch.arange(x.step.batch.seq_lens[request], device=got.device)
    rows_of = x.step.paged.table[request][key // mla.PAGE] * mla.PAGE + key % mla.PAGE
    k, q = rows.take(x.pools["k"], rows_of[None])[0].float(), x.q[b].float()
    if "factor" in x.pools:
        k = k * rows.take(x.pools["factor"], rows_of[None])[0]
        codes, factor = indexer.scaled(q)
        q = codes.float() * factor
    want = ((q @ k.T * 128**-0.5).relu() * x.weights[b][:, None]).sum(0)
    return [compare(got[b, : len(key)].to(BF16), want, "bf16")]


def _topk(name: str, requests: int, length: int, k: int = TOPK, tiny: bool = False) -> KernelCase:
    return KernelCase(
        family="dsa", name=name, make=lambda device: torch.randn(requests, length, device=device),
        ours=functools.partial(_pick, k), check=functools.partial(_check_topk, k),
        bytes=requests * (4 * length + 8 * k), peers={"torch.topk": functools.partial(_torch_topk, k)}, tiny=tiny,
        note="torch.topk neither sorts nor settles equal scores",
    )  # fmt: skip


def _pick(k: int, scores: torch.Tensor) -> Timed:
    from allotrope.attention.dsa import triton_topk
    from allotrope.attention.mla.triton_decode import arch_of

    seen = torch.full((len(scores),), scores.shape[1], dtype=torch.int32, device=scores.device)
    sparse_indices = torch.empty(len(scores), k, dtype=torch.int64, device=scores.device)

    def timed() -> torch.Tensor:
        triton_topk.top_rows(scores, seen, k, arch_of(scores.device), sparse_indices, None)
        return sparse_indices

    return timed


def _check_topk(k: int, scores: torch.Tensor, timed: Timed) -> list[Comparison]:
    got, want = timed(), top_indices(scores, k)
    return [compare((got - want).abs().float() + 1.0, torch.ones_like(want, dtype=torch.float32), "fp32")]


def _torch_topk(k: int, scores: torch.Tensor) -> Timed:
    return lambda: scores.topk(k, dim=-1, sorted=False).indices
