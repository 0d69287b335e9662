"""Split-KV decode (Flash-Decoding) over a paged KV cache: a request's keys are cut into chunks, which are merged.

Owns: the two kernels of a decode. Must not know: how pages were filled.

A request's chunks follow from its own KV length (`kv_chunks`), and not from the batch, the grid or the bound that a
captured graph was sized by. So its result has the same bits in all of them. The number of programs that share the
chunks changes no bit either.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from allotrope.attention.batch import VerifyTensors
from allotrope.attention.mha.spec import MhaSpec
from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import higher_of, highest
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.softmax import LOG2E, LOWEST, logits_to_base_2
from allotrope.kernels.tiles import cdiv, next_power_of_2

NO_WINDOW = 2**31 - 1
"""The window of a layer without a sliding window."""
SHORT_CHUNKS = tl.constexpr(8)
"""Chunks of a request that is short: a few such requests leave a chip idle, unless they are cut small."""


@dataclass(frozen=True)
class Config:
    """`block_n`: keys of one loop iteration. `chunk`, `long_chunk`: fewest keys of a chunk, of a request of up to
    SHORT_CHUNKS of them and of a longer one. `programs`: most programs of the grid; a program takes several chunks
    where there are more."""

    block_n: int
    chunk: int
    long_chunk: int
    warps: int
    stages: int
    programs: int

    def most_chunks(self, keys: int) -> int:
        """Of a request that sees up to so many keys."""
        return max(cdiv(min(keys, SHORT_CHUNKS.value * self.chunk), self.chunk), cdiv(keys, self.long_chunk))


def config(chip: Chip, spec: MhaSpec, dtype: torch.dtype) -> Config:
    """Launch parameters; `dtype`: type of the queries."""
    widest = max(next_power_of_2(spec.head_dim), next_power_of_2(spec.value_dim))
    repeat = spec.num_heads // spec.num_kv_heads
    # A chunk's result is `repeat` rows of fp32: few key/value heads need short chunks to fill a chip, many queries of
    # one head long ones.
    chunk = 1024 if spec.num_kv_heads >= 8 or repeat > 32 else 512
    if chip.vendor == "cpu":
        return Config(32, 32, 64, 4, 1, 64)
    if dtype == torch.float32:
        return Config(32 if widest <= 128 else 16, chunk, chunk, 4, 1, 4096)
    if chip.vendor == "amd":
        return Config(32 if widest <= 256 else 16, chunk, chunk, 4, 2 if widest <= 128 else 1, 4096)
    # Pages are looked up one stage ahead, so that of five stages two hold rows.
    few = widest * spec.kv_dtype.itemsize <= 128
    block_n = 64 if widest <= 128 else 32 if widest <= 256 else 16
    while block_n > 16 and _shared_memory(spec, dtype, widest, block_n) > chip.shared_memory:
        block_n //= 2
    # Wide heads: 1 request of 1088 keys took 13 us in place of 21 on an H200, 16 took 20 to 27 in place of 26 to 31.
    short = 256 if widest == 256 else chunk
    return Config(block_n, min(short, chunk), chunk, 2 if few else 4, 5, 4096)


def _shared_memory(spec: MhaSpec, dtype: torch.dtype, widest: int, block_n: int) -> int:
    """Bytes of shared memory of a program, about: its queries, two stages of keys and values, and page numbers."""
    queries = _block_h(spec.num_heads // spec.num_kv_heads) * widest * dtype.itemsize
    return queries + 2 * 2 * block_n * widest * spec.kv_dtype.itemsize + 4096


def _block_h(repeat: int) -> int:
    """Query heads of one key/value head that a program takes."""
    return min(64, max(16, next_power_of_2(repeat)))


def reads_fp8_pairs(spec: MhaSpec, dtype: torch.dtype) -> bool:
    """Whether `triton_decode_fp8` reads the FP8 KV cache, two values in a word; `dtype`: type of the queries."""
    even = spec.head_dim % 2 == 0 and spec.value_dim % 2 == 0
    return spec.kv_dtype == torch.float8_e4m3fn and dtype.itemsize == 2 and even


def max_chunks_of(spec: MhaSpec) -> int:
    """Most chunks of a request; a longer request has larger chunks. One request alone can fill a chip with them."""
    return min(128, max(32, next_power_of_2(256 // spec.num_kv_heads)))


@triton.jit
def kv_chunks(
    kv_len, window, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, LONG_CHUNK: tl.constexpr, MAX_CHUNKS: tl.constexpr
):  # fmt: skip
    """First key in the window, that key rounded down to a block, keys per chunk, and number of chunks of a request."""
    first_key = tl.maximum(kv_len - window, 0)
    aligned_key = first_key // BLOCK_N * BLOCK_N
    keys = kv_len - aligned_key
    fewest = tl.where(keys <= SHORT_CHUNKS * CHUNK, CHUNK, LONG_CHUNK)
    chunk_size = tl.maximum(fewest, tl.cdiv(tl.cdiv(keys, MAX_CHUNKS), BLOCK_N) * BLOCK_N)
    return first_key, aligned_key, chunk_size, tl.cdiv(kv_len - aligned_key, chunk_size)


@triton.jit
def pages_of_block(table, start, mask_n, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages of the BLOCK_N keys from `start` (one page, where a block lies in one), the keys' offsets in them, and
    which of the keys of `mask_n` have a page."""
    if PAGE % BLOCK_N == 0:
        page = tl.load(table + start // PAGE).to(tl.int64)
        mask_kv = mask_n & (page >= 0)
        page_offset = start % PAGE + tl.arange(0, BLOCK_N)
    else:
        offs_n = start + tl.arange(0, BLOCK_N)
        page = tl.load(table + offs_n // PAGE, mask=mask_n, other=-1).to(tl.int64)
        mask_kv = page >= 0
        page_offset = offs_n % PAGE
    return page, page_offset, mask_kv


@triton.jit
def load_block(pool, kv_offset, mask_kv, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Keys or values [BLOCK_N, BLOCK_D] at `kv_offset`; zeros outside of `mask_kv` and behind D."""
    offs_d = tl.arange(0, BLOCK_D)
    if D == BLOCK_D:
        block = tl.load(pool + kv_offset[:, None] + offs_d[None, :], mask=mask_kv[:, None], other=0.0)
    else:
        mask = mask_kv[:, None] & (offs_d < D)[None, :]
        block = tl.load(pool + kv_offset[:, None] + offs_d[None, :], mask=mask, other=0.0)
    return block


@triton.jit
def softmax_block(queries, keys, mask, m_i, l_i, scale, softcap, SOFTCAP: tl.constexpr):
    """Unnormalized probabilities of a block of keys, the rescale of what came before, and the new row max and sum.

    `mask`: keys that a query sees. A block without any leaves the row as it is: the rescale is 1, and m_i is finite.
    """
    logits = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    logits = tl.where(mask, logits_to_base_2(logits, scale, softcap, SOFTCAP), float("-inf"))
    m_new = higher_of(m_i, highest(logits, 1))
    p = tl.exp2(logits - m_new[:, None])
    alpha = tl.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(p, 1)
    return p, alpha, m_new, l_i


@triton.jit
def store_chunk(
    acc, m_i, l_i, v_scale, sinks, partial, lse, out_rows, out_h, request, chunk, capacity, head, mask_h,
    H: tl.constexpr, DV: tl.constexpr, SINKS: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Write a chunk's normalized output and base-2 log-sum-exp; with DIRECT the output itself, to `out_rows`.

    `request`: one for all rows of `acc`, or one each.
    """
    offs_dv = tl.arange(0, acc.shape[1])
    mask = mask_h[:, None] & (offs_dv < DV)[None, :]
    acc = acc * (v_scale / l_i)[:, None]
    chunk_lse = m_i + tl.log2(l_i)
    if DIRECT:
        if SINKS:
            sink = tl.load(sinks + head, mask=mask_h, other=0.0).to(tl.float32) * LOG2E
            m_new = higher_of(chunk_lse, sink)
            alpha = tl.exp2(chunk_lse - m_new)
            acc = acc * alpha[:, None] / (alpha + tl.exp2(sink - m_new))[:, None]
        ptrs = out_rows + head[:, None] * out_h + offs_dv[None, :]
        tl.store(ptrs, acc.to(out_rows.dtype.element_ty), mask=mask)
    else:
        lse_offset = (request * H + head) * capacity + chunk
        tl.store(lse + lse_offset, chunk_lse, mask=mask_h)
        ptrs = partial + lse_offset[:, None] * DV + offs_dv[None, :]
        tl.store(ptrs, acc, mask=mask)


@pdl_jit(do_not_specialize=["window", "num_splits", "capacity"])
def decode_kernel(
    q, k_pool, v_pool, table, seq_lens, sinks, partial, lse, out,
    scale, softcap, v_scale, window, num_splits, capacity,
    q_t, q_h, kp_p, kp_s, kp_g, vp_p, vp_s, vp_g, table_b, out_t, out_h,
    H: tl.constexpr, Q_PER_KV: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr, LONG_CHUNK: tl.constexpr, MAX_CHUNKS: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, VALUES_ARE_KEYS: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Chunks split, split + num_splits, ... of one request for up to BLOCK_H query heads of one KV head.

    Writes each chunk's normalized output and base-2 log-sum-exp; with DIRECT (one chunk at most) the output itself.
    """
    gdc_wait()
    gdc_launch_dependents()
    split = tl.program_id(0)
    kv_head = tl.program_id(1) // tl.cdiv(Q_PER_KV, BLOCK_H)
    request = tl.program_id(2).to(tl.int64)
    offs_h = tl.program_id(1) % tl.cdiv(Q_PER_KV, BLOCK_H) * BLOCK_H + tl.arange(0, BLOCK_H)
    head = kv_head * Q_PER_KV + offs_h
    mask_h = offs_h < Q_PER_KV
    kv_len = tl.load(seq_lens + request)
    first_key, aligned_key, chunk_size, num_chunks = kv_chunks(kv_len, window, BLOCK_N, CHUNK, LONG_CHUNK, MAX_CHUNKS)
    offs_d, offs_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    mask_d, mask_dv = offs_d < D, offs_dv < DV
    q_ptrs = q + request * q_t + head[:, None] * q_h + offs_d[None, :]
    queries = tl.load(q_ptrs, mask=mask_h[:, None] & mask_d[None, :], other=0.0)
    table += request * table_b
    k_pool += kv_head * kp_g
    v_pool += kv_head * vp_g
    if DIRECT:
        zeros = tl.zeros([BLOCK_H, BLOCK_DV], out.dtype.element_ty)
        ptrs = out + request * out_t + head[:, None] * out_h + offs_dv[None, :]
        tl.store(ptrs, zeros, mask=mask_h[:, None] & mask_dv[None, :] & (num_chunks == 0))
    for chunk in range(split, num_chunks, num_splits):
        begin = aligned_key + chunk * chunk_size
        end = tl.minimum(begin + chunk_size, kv_len)
        m_i = tl.full([BLOCK_H], LOWEST, tl.float32)
        l_i = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
        for start in range(begin, end, BLOCK_N):
            offs_n = start + tl.arange(0, BLOCK_N)
            mask_n = (offs_n >= first_key) & (offs_n < end)
            page, page_offset, mask_kv = pages_of_block(table, start, mask_n, PAGE, BLOCK_N)
            keys = load_block(k_pool, page * kp_p + page_offset * kp_s, mask_kv, D, BLOCK_D).to(queries.dtype)
            p, alpha, m_i, l_i = softmax_block(queries, keys, mask_n[None, :], m_i, l_i, scale, softcap, SOFTCAP)
            if VALUES_ARE_KEYS:
                values = keys
            else:
                values = load_block(v_pool, page * vp_p + page_offset * vp_s, mask_kv, DV, BLOCK_DV).to(queries.dtype)
            acc = tl.dot(p.to(queries.dtype), values, acc * alpha[:, None], input_precision="ieee")
        store_chunk(
            acc, m_i, l_i, v_scale, sinks, partial, lse, out + request * out_t, out_h, request, chunk, capacity, head,
            mask_h, H, DV, SINKS, DIRECT,
        )  # fmt: skip


@pdl_jit(do_not_specialize=["window", "capacity"])
def merge_kernel(
    partial, lse, seq_lens, sinks, out, window, capacity, out_t, out_h,
    H: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    LONG_CHUNK: tl.constexpr, MAX_CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """out = sum_c 2^lse_c o_c / (sum_c 2^lse_c + e^sink) of one request and head, chunk after chunk; 0 without keys."""
    gdc_wait()
    gdc_launch_dependents()
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, _, _, num_chunks = kv_chunks(tl.load(seq_lens + request), window, BLOCK_N, CHUNK, LONG_CHUNK, MAX_CHUNKS)
    offs_d = tl.arange(0, BLOCK_DV)
    lse_offset = (request * H + head) * capacity
    offs_all = tl.arange(0, MAX_CHUNKS)
    m_i = highest(tl.load(lse + lse_offset + offs_all, mask=offs_all < num_chunks, other=LOWEST), 0)
    l_i = 0.0
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        m_i = higher_of(m_i, sink)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for start in range(0, num_chunks, BLOCK_C):
        offs_c = start + tl.arange(0, BLOCK_C)
        alpha = tl.exp2(tl.load(lse + lse_offset + offs_c, mask=offs_c < num_chunks, other=float("-inf")) - m_i)
        mask = (offs_c < num_chunks)[:, None] & (offs_d < DV)[None, :]
        chunk_out = tl.load(partial + (lse_offset + offs_c)[:, None] * DV + offs_d[None, :], mask=mask, other=0.0)
        acc += tl.sum(chunk_out * alpha[:, None], 0)
        l_i += tl.sum(alpha, 0)
    if SINKS:
        l_i += tl.exp2(sink - m_i)
    acc = tl.where(num_chunks > 0, acc / l_i, 0.0)
    tl.store(out + request * out_t + head * out_h + offs_d, acc.to(out.dtype.element_ty), mask=offs_d < DV)


def decode(
    spec: MhaSpec,
    how: Config,
    q: torch.Tensor,
    pools: dict[str, torch.Tensor],
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    longest: int,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    k_scale: float,
    v_scale: float,
    verify: VerifyTensors | None = None,
) -> None:
    """Attend for B requests of one query token each.

    `q`: [B, H, D]. `pools`: "k" [P, S, G, D], "v" [P, S, G, Dv]. `table`: [>= B, W] page table. `seq_lens`: [>= B] KV
    lengths. `longest`: an upper bound of them. `out`: [B, H, Dv], overwritten; zeros where `seq_lens` is 0.
    `verify`: in a step that verifies drafts, which requests are one sequence. They read its keys together, but not from
    an FP8 KV cache, nor with more than 16 query heads of one KV head. It changes no bit of `out`.
    """
    requests, heads, dim = q.shape
    num_kv_heads, value_dim = spec.num_kv_heads, spec.value_dim
    q_per_kv = heads // num_kv_heads
    k_pool = pools["k"]
    v_pool = k_pool if spec.values_are_keys else pools["v"]
    max_chunks = max_chunks_of(spec)
    window = NO_WINDOW if spec.window is None else spec.window
    reach = min(longest, window + how.block_n - 1)
    capacity = min(max_chunks, how.most_chunks(reach))
    direct = capacity == 1
    block_h = _block_h(q_per_kv)
    tiles = num_kv_heads * cdiv(q_per_kv, block_h)
    num_splits = min(capacity, max(1, cdiv(how.programs, tiles * requests)))
    partial = out if direct else q.new_empty((requests, heads, capacity, value_dim), dtype=torch.float32)
    lse = seq_lens if direct else q.new_empty((requests, heads, capacity), dtype=torch.float32)
    shape = {"BLOCK_DV": max(16, next_power_of_2(value_dim)), "BLOCK_N": how.block_n, "CHUNK": how.chunk}
    shape["LONG_CHUNK"] = how.long_chunk
    kernel: Any = decode_kernel
    constants: dict[str, Any] = {}
    if reads_fp8_pairs(spec, q.dtype):
        from allotrope.attention.mha import triton_decode_fp8

        kernel, constants = triton_decode_fp8.decode_kernel, {"NVIDIA": chip_of(q.device).vendor == "nvidia"}
        k_pool, v_pool = k_pool.view(torch.int16), v_pool.view(torch.int16)
    elif verify is not None and block_h == 16:
        from allotrope.attention.mha import triton_verify

        kernel, constants = triton_verify.verify_kernel, {"TILES": triton_verify.num_tiles(dim, value_dim)}
        constants |= {"first_row": verify.first_row, "num_rows": verify.num_rows}
    kernel[(num_splits, tiles, requests)](
        q, k_pool, v_pool, table, seq_lens, out if sinks is None else sinks, partial, lse, out,
        spec.scale * k_scale, spec.softcap or 1.0, k_scale if spec.values_are_keys else v_scale,
        window, num_splits, capacity,
        q.stride(0), q.stride(1), *k_pool.stride()[:3], *v_pool.stride()[:3], table.stride(0), *out.stride()[:2],
        H=heads, Q_PER_KV=q_per_kv, PAGE=k_pool.shape[1], D=dim, DV=value_dim, BLOCK_H=block_h,
        BLOCK_D=max(16, next_power_of_2(dim)), MAX_CHUNKS=max_chunks, **shape, SOFTCAP=spec.softcap is not None,
        SINKS=sinks is not None, VALUES_ARE_KEYS=spec.values_are_keys, DIRECT=direct, **constants,
        num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
    if not direct:
        merge_kernel[(requests, heads)](
            partial, lse, seq_lens, out if sinks is None else sinks, out, window, capacity, *out.stride()[:2],
            H=heads, DV=value_dim, **shape, MAX_CHUNKS=max_chunks, BLOCK_C=16, SINKS=sinks is not None, num_warps=4,
        )  # fmt: skip


def specialization(
    chip: Chip, heads: int, groups: int, dim: int, kind: str, sinks: bool, direct: bool = False
) -> Specialization:
    """The decode kernel in bf16 of a size: query heads, KV heads, head dim, Triton's type of the KV cache."""
    spec = MhaSpec(num_heads=heads, num_kv_heads=groups, head_dim=dim, scale=1.0, kv_dtype=torch.bfloat16)
    how = config(chip, spec, torch.bfloat16)
    signature = {"q": "*bf16:16", "k_pool": f"*{kind}:16", "v_pool": f"*{kind}:16", "table": "*i64"}
    signature |= {"seq_lens": "*i32", "sinks": "*fp32", "partial": "*fp32:16", "lse": "*fp32", "out": "*bf16:16"}
    signature |= dict.fromkeys(("scale", "softcap", "v_scale"), "fp32")
    signature |= dict.fromkeys(("window", "num_splits", "capacity", "table_b"), "i32")
    signature |= dict.fromkeys(("q_t", "q_h", "kp_p", "kp_s", "kp_g"), "i32:16")
    signature |= dict.fromkeys(("vp_p", "vp_s", "vp_g", "out_t", "out_h"), "i32:16")
    constants = {"H": heads, "Q_PER_KV": heads // groups, "PAGE": 64, "D": dim, "DV": dim, "BLOCK_H": 16}
    constants |= {"BLOCK_N": how.block_n, "BLOCK_D": dim, "BLOCK_DV": dim, "CHUNK": how.chunk}
    constants["LONG_CHUNK"] = how.long_chunk
    constants |= {"MAX_CHUNKS": max_chunks_of(spec), "SOFTCAP": False, "SINKS": sinks}
    constants |= {"VALUES_ARE_KEYS": False, "DIRECT": direct}
    name = f"mha decode {heads}/{groups} x {dim} {kind}"
    return Specialization(name, decode_kernel, signature, constants, how.warps, how.stages)


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Released sizes: query heads, KV heads, head dim, sinks."""
    from allotrope.attention.mha import triton_decode_fp8

    found = [
        specialization(chip, heads, groups, dim, "bf16", sinks)
        for heads, groups, dim, sinks in ((64, 8, 128, False), (64, 8, 64, True), (32, 4, 512, False))
    ]
    if chip.triton_has_e4m3fn:
        one = specialization(chip, 64, 8, 128, "i16", False)
        constants = {**one.constants, "NVIDIA": chip.vendor != "amd"}
        name = one.name.replace("i16", "fp8")
        found.append(replace(one, name=name, kernel=triton_decode_fp8.decode_kernel, constants=constants))
    names = ("partial", "lse", "seq_lens", "sinks", "out", "window", "capacity", "out_t", "out_h")
    kinds = ("*fp32:16", "*fp32", "*i32", "*fp32", "*bf16:16", "i32", "i32", "i32:16", "i32:16")
    constants = {
        "H": 64,
        "DV": 128,
        "BLOCK_DV": 128,
        "BLOCK_N": 64,
        "CHUNK": 512,
        "LONG_CHUNK": 512,
        "MAX_CHUNKS": 32,
        "BLOCK_C": 16,
        "SINKS": True,
    }
    return [*found, Specialization("mha merge", merge_kernel, dict(zip(names, kinds, strict=True)), constants, 4, 1)]
