"""One new token a request against paged rows: keys are cut into chunks, and the chunks' results are merged.

Owns: the two kernels of a decode. Must not know: how pages were filled.

A request's chunks depend on its own length alone (`kv_chunks`), whatever the batch, the grid or the bound that a
captured graph was sized by: its result has the same bits in all of them. How many programs share its chunks changes
none.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from allotrope.attention.mha.spec import MhaSpec
from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import higher_of, highest
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.softmax import LOG2E, LOWEST, logits_to_base_2
from allotrope.kernels.tiles import cdiv, next_power_of_2

EVERYTHING = 2**31 - 1
"""`window` of a layer that has none."""


@dataclass(frozen=True)
class Config:
    """`block_n`: keys of one step. `chunk`: keys whose result is merged as one, at least. `programs`: of the grid, at
    most, where one chunk a program would be more."""

    block_n: int
    chunk: int
    warps: int
    stages: int
    programs: int


def config(chip: Chip, spec: MhaSpec, dtype: torch.dtype) -> Config:
    """Launch parameters; `dtype`: type of the queries."""
    widest = max(next_power_of_2(spec.head_dim), next_power_of_2(spec.value_dim))
    repeat = spec.num_heads // spec.num_kv_heads
    # A chunk's result is `repeat` rows of fp32: few key/value heads need short chunks to fill a chip, many queries of
    # one head long ones.
    chunk = 1024 if spec.num_kv_heads >= 8 or repeat > 32 else 512
    if chip.vendor == "cpu":
        return Config(32, 32, 4, 1, 64)
    if dtype == torch.float32:
        return Config(32 if widest <= 128 else 16, chunk, 4, 1, 4096)
    if chip.vendor == "amd":
        return Config(32 if widest <= 256 else 16, chunk, 4, 2 if widest <= 128 else 1, 4096)
    # Pages are looked up one stage ahead, so that of five stages two hold rows.
    few = widest * spec.kv_dtype.itemsize <= 128
    block_n = 64 if widest <= 128 else 32 if widest <= 256 else 16
    while block_n > 16 and _shared_memory(spec, dtype, widest, block_n) > chip.shared_memory:
        block_n //= 2
    return Config(block_n, chunk, 2 if few else 4, 5, 4096)


def _shared_memory(spec: MhaSpec, dtype: torch.dtype, widest: int, block_n: int) -> int:
    """Bytes of shared memory of a program, about: its queries, two stages of keys and values, and page numbers."""
    queries = _block_h(spec.num_heads // spec.num_kv_heads) * widest * dtype.itemsize
    return queries + 2 * 2 * block_n * widest * spec.kv_dtype.itemsize + 4096


def _block_h(repeat: int) -> int:
    """Query heads of one key/value head that a program takes."""
    return min(64, max(16, next_power_of_2(repeat)))


def packed(spec: MhaSpec, dtype: torch.dtype) -> bool:
    """Whether rows are read as pairs of FP8 numbers; `dtype`: type of the queries."""
    even = spec.head_dim % 2 == 0 and spec.value_dim % 2 == 0
    return spec.kv_dtype == torch.float8_e4m3fn and dtype.itemsize == 2 and even


def mostkv_chunks(spec: MhaSpec) -> int:
    """Chunks of a request, at most: longer requests have larger chunks. Enough for one request to fill a chip."""
    return min(128, max(32, next_power_of_2(256 // spec.num_kv_heads)))


@triton.jit
def kv_chunks(n, window, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, MOST: tl.constexpr):
    """Of a request of n keys: first key seen, the block boundary at or below it, keys a chunk, chunks."""
    first = tl.maximum(n - window, 0)
    aligned = first // BLOCK_N * BLOCK_N
    size = tl.maximum(CHUNK, tl.cdiv(tl.cdiv(n - aligned, MOST), BLOCK_N) * BLOCK_N)
    return first, aligned, size, tl.cdiv(n - aligned, size)


@pdl_jit(do_not_specialize=["window", "splits", "capacity"])
def decode_kernel(
    q, k_pool, v_pool, table, seq_lens, sinks, partial, lse, out,
    scale, softcap, v_scale, window, splits, capacity,
    q_t, q_h, kp_p, kp_s, kp_g, vp_p, vp_s, vp_g, table_b, out_t, out_h,
    H: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr, MOST: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SHARED: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Chunks split, split + splits, ... of one request for up to BLOCK_H heads that share a key/value head.

    Writes each chunk's normalised result and base-2 log-sum-exp; with DIRECT (one chunk at most) the output.
    """
    gdc_wait()
    gdc_launch_dependents()
    split = tl.program_id(0)
    group = tl.program_id(1) // tl.cdiv(R, BLOCK_H)
    request = tl.program_id(2).to(tl.int64)
    inner = tl.program_id(1) % tl.cdiv(R, BLOCK_H) * BLOCK_H + tl.arange(0, BLOCK_H)
    head = group * R + inner
    real = inner < R
    n = tl.load(seq_lens + request)
    first, aligned, size, chunks = kv_chunks(n, window, BLOCK_N, CHUNK, MOST)
    dim, value_dim = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    in_dim, in_value = dim < D, value_dim < DV
    here = q + request * q_t + head[:, None] * q_h + dim[None, :]
    queries = tl.load(here, mask=real[:, None] & in_dim[None, :], other=0.0)
    table += request * table_b
    k_pool += group * kp_g
    v_pool += group * vp_g
    if DIRECT:
        nothing = tl.zeros([BLOCK_H, BLOCK_DV], out.dtype.element_ty)
        to = out + request * out_t + head[:, None] * out_h + value_dim[None, :]
        tl.store(to, nothing, mask=real[:, None] & in_value[None, :] & (chunks == 0))
    for chunk in range(split, chunks, splits):
        begin = aligned + chunk * size
        end = tl.minimum(begin + size, n)
        top = tl.full([BLOCK_H], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        mixed = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
        for start in range(begin, end, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            seen = (key >= first) & (key < end)
            if PAGE % BLOCK_N == 0:
                page = tl.load(table + start // PAGE).to(tl.int64)
                held = seen & (page >= 0)
                offset = start % PAGE + tl.arange(0, BLOCK_N)
            else:
                page = tl.load(table + key // PAGE, mask=seen, other=-1).to(tl.int64)
                held = page >= 0
                offset = key % PAGE
            row = page * kp_p + offset * kp_s
            if D == BLOCK_D:
                keys = tl.load(k_pool + row[:, None] + dim[None, :], mask=held[:, None], other=0.0)
            else:
                keys = tl.load(k_pool + row[:, None] + dim[None, :], mask=held[:, None] & in_dim[None, :], other=0.0)
            keys = keys.to(queries.dtype)
            logits = tl.dot(queries, tl.trans(keys), input_precision="ieee")
            logits = tl.where(seen[None, :], logits_to_base_2(logits, scale, softcap, SOFTCAP), float("-inf"))
            higher = higher_of(top, highest(logits, 1))
            weights = tl.exp2(logits - higher[:, None])
            fade = tl.exp2(top - higher)
            total = total * fade + tl.sum(weights, 1)
            top = higher
            if SHARED:
                values = keys
            else:
                row = page * vp_p + offset * vp_s
                if DV == BLOCK_DV:
                    values = tl.load(v_pool + row[:, None] + value_dim[None, :], mask=held[:, None], other=0.0)
                else:
                    mask = held[:, None] & in_value[None, :]
                    values = tl.load(v_pool + row[:, None] + value_dim[None, :], mask=mask, other=0.0)
                values = values.to(queries.dtype)
            mixed = tl.dot(weights.to(queries.dtype), values, mixed * fade[:, None], input_precision="ieee")
        mixed = mixed * (v_scale / total)[:, None]
        level = top + tl.log2(total)
        if DIRECT:
            if SINKS:
                sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2E
                higher = higher_of(level, sink)
                weight = tl.exp2(level - higher)
                mixed = mixed * weight[:, None] / (weight + tl.exp2(sink - higher))[:, None]
            to = out + request * out_t + head[:, None] * out_h + value_dim[None, :]
            tl.store(to, mixed.to(out.dtype.element_ty), mask=real[:, None] & in_value[None, :])
        else:
            place = (request * H + head) * capacity + chunk
            tl.store(lse + place, level, mask=real)
            to = partial + place[:, None] * DV + value_dim[None, :]
            tl.store(to, mixed, mask=real[:, None] & in_value[None, :])


@pdl_jit(do_not_specialize=["window", "capacity"])
def merge_kernel(
    partial, lse, seq_lens, sinks, out, window, capacity, out_t, out_h,
    H: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    MOST: tl.constexpr, STEP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """out = sum_c 2^lse_c o_c / (sum_c 2^lse_c + e^sink) of one request and head, chunk after chunk; 0 without keys."""
    gdc_wait()
    gdc_launch_dependents()
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, _, _, chunks = kv_chunks(tl.load(seq_lens + request), window, BLOCK_N, CHUNK, MOST)
    dim = tl.arange(0, BLOCK_DV)
    place = (request * H + head) * capacity
    every = tl.arange(0, MOST)
    top = highest(tl.load(lse + place + every, mask=every < chunks, other=LOWEST), 0)
    total = 0.0
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        top = higher_of(top, sink)
    mixed = tl.zeros([BLOCK_DV], tl.float32)
    for start in range(0, chunks, STEP):
        index = start + tl.arange(0, STEP)
        weight = tl.exp2(tl.load(lse + place + index, mask=index < chunks, other=float("-inf")) - top)
        mask = (index < chunks)[:, None] & (dim < DV)[None, :]
        part = tl.load(partial + (place + index)[:, None] * DV + dim[None, :], mask=mask, other=0.0)
        mixed += tl.sum(part * weight[:, None], 0)
        total += tl.sum(weight, 0)
    if SINKS:
        total += tl.exp2(sink - top)
    mixed = tl.where(chunks > 0, mixed / total, 0.0)
    tl.store(out + request * out_t + head * out_h + dim, mixed.to(out.dtype.element_ty), mask=dim < DV)


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
) -> None:
    """Attend for B requests of one token.

    `q`: [B, H, D]. `pools`: "k" [P, S, G, D], "v" [P, S, G, Dv]. `table`: [>= B, W]. `seq_lens`: [>= B]. `longest`: no
    request is longer. `out`: [B, H, Dv], overwritten; zeros where `seq_lens` is 0.
    """
    requests, heads, dim = q.shape
    groups, value_dim = spec.num_kv_heads, spec.value_dim
    repeat = heads // groups
    k_pool = pools["k"]
    v_pool = k_pool if spec.values_are_keys else pools["v"]
    most = mostkv_chunks(spec)
    window = EVERYTHING if spec.window is None else spec.window
    reach = min(longest, window + how.block_n - 1)
    capacity = min(most, cdiv(reach, how.chunk))
    direct = capacity == 1
    block_h = _block_h(repeat)
    tiles = groups * cdiv(repeat, block_h)
    splits = min(capacity, max(1, cdiv(how.programs, tiles * requests)))
    partial = out if direct else q.new_empty((requests, heads, capacity, value_dim), dtype=torch.float32)
    lse = seq_lens if direct else q.new_empty((requests, heads, capacity), dtype=torch.float32)
    shape = {"BLOCK_DV": max(16, next_power_of_2(value_dim)), "BLOCK_N": how.block_n, "CHUNK": how.chunk}
    kernel, more = decode_kernel, {}
    if packed(spec, q.dtype):
        from allotrope.attention.mha import triton_decode_fp8

        kernel, more = triton_decode_fp8.decode_kernel, {"NVIDIA": chip_of(q.device).vendor == "nvidia"}
        k_pool, v_pool = k_pool.view(torch.int16), v_pool.view(torch.int16)
    kernel[(splits, tiles, requests)](
        q, k_pool, v_pool, table, seq_lens, out if sinks is None else sinks, partial, lse, out,
        spec.scale * k_scale, spec.softcap or 1.0, k_scale if spec.values_are_keys else v_scale,
        window, splits, capacity,
        q.stride(0), q.stride(1), *k_pool.stride()[:3], *v_pool.stride()[:3], table.stride(0), *out.stride()[:2],
        H=heads, R=repeat, PAGE=k_pool.shape[1], D=dim, DV=value_dim, BLOCK_H=block_h,
        BLOCK_D=max(16, next_power_of_2(dim)), MOST=most, **shape, SOFTCAP=spec.softcap is not None,
        SINKS=sinks is not None, SHARED=spec.values_are_keys, DIRECT=direct, **more,
        num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
    if not direct:
        merge_kernel[(requests, heads)](
            partial, lse, seq_lens, out if sinks is None else sinks, out, window, capacity, *out.stride()[:2],
            H=heads, DV=value_dim, **shape, MOST=most, STEP=16, SINKS=sinks is not None, num_warps=4,
        )  # fmt: skip


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Released sizes: heads, key/value heads, head size, type of the cached rows, sinks."""
    from allotrope.attention.mha import triton_decode_fp8

    found = []
    for heads, groups, dim, kind, sinks in (
        (64, 8, 128, "bf16", False),
        (64, 8, 64, "bf16", True),
        (32, 4, 512, "bf16", False),
        (64, 8, 128, "i16", False),
    ):
        if kind == "i16" and not chip.triton_has_e4m3fn:
            continue
        spec = MhaSpec(num_heads=heads, num_kv_heads=groups, head_dim=dim, scale=1.0, kv_dtype=torch.bfloat16)
        how = config(chip, spec, torch.bfloat16)
        signature = {
            "q": "*bf16:16",
            "k_pool": f"*{kind}:16",
            "v_pool": f"*{kind}:16",
            "table": "*i64",
            "seq_lens": "*i32",
        }
        signature |= {"sinks": "*fp32", "partial": "*fp32:16", "lse": "*fp32", "out": "*bf16:16"}
        signature |= dict.fromkeys(("scale", "softcap", "v_scale"), "fp32")
        signature |= dict.fromkeys(("window", "splits", "capacity", "table_b"), "i32")
        signature |= dict.fromkeys(("q_t", "q_h", "kp_p", "kp_s", "kp_g"), "i32:16")
        signature |= dict.fromkeys(("vp_p", "vp_s", "vp_g", "out_t", "out_h"), "i32:16")
        constants = {"H": heads, "R": heads // groups, "PAGE": 64, "D": dim, "DV": dim, "BLOCK_H": 16}
        constants |= {"BLOCK_N": how.block_n, "BLOCK_D": dim, "BLOCK_DV": dim, "CHUNK": how.chunk}
        constants |= {"MOST": mostkv_chunks(spec), "SOFTCAP": False, "SINKS": sinks, "SHARED": False, "DIRECT": False}
        name = f"mha decode {heads}/{groups} x {dim} {kind}".replace("i16", "fp8")
        kernel = decode_kernel
        if kind == "i16":
            kernel, constants["NVIDIA"] = triton_decode_fp8.decode_kernel, chip.vendor != "amd"
        found.append(Specialization(name, kernel, signature, constants, how.warps, how.stages))
    names = ("partial", "lse", "seq_lens", "sinks", "out", "window", "capacity", "out_t", "out_h")
    kinds = ("*fp32:16", "*fp32", "*i32", "*fp32", "*bf16:16", "i32", "i32", "i32:16", "i32:16")
    constants = {
        "H": 64,
        "DV": 128,
        "BLOCK_DV": 128,
        "BLOCK_N": 64,
        "CHUNK": 512,
        "MOST": 32,
        "STEP": 16,
        "SINKS": True,
    }
    return [*found, Specialization("mha merge", merge_kernel, dict(zip(names, kinds, strict=True)), constants, 4, 1)]
