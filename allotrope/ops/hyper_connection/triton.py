"""Hyper-connections in three launches a sublayer; the package has the equations.

`mixes_kernel`: a program multiplies some tokens' streams, over a split of their numbers, with `fn`.
`pre_kernel`: a program adds up a token's splits, makes gates and the doubly stochastic matrix in registers, and
sums up the weighted streams over a block of columns. `post_kernel`: a program writes a block of columns of all of a
token's streams. Bytes moved: `hc_pre` reads the streams twice, the second time perhaps from the L2; `hc_post` reads and
writes them once.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import highest
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2
from allotrope.ops.hyper_connection.spec import HyperConnectionSpec

BLOCK_H = 1024


@dataclass(frozen=True)
class Tile:
    """What a program of `mixes_kernel` takes: `block_t` tokens, and `split` numbers of each, `block_k` at a time."""

    block_t: int
    split: int
    block_k: int


# Of few tokens, short splits: as many programs as a chip has room for, and none waits long for memory.
DECODE_TILE, PREFILL_TILE = Tile(16, 128, 128), Tile(64, 1024, 32)
# From so many tokens on, partial sums, and weights that every program reads again, take longer.
MIN_PREFILL_TOKENS = 1024


@pdl_jit
def mixes_kernel(
    streams, fn, sums, squares, tokens, width, row_stride, splits,
    MIXES: tl.constexpr, BLOCK_MIXES: tl.constexpr, BLOCK_T: tl.constexpr, SPLIT_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`sums` [T, splits, BLOCK_MIXES]: streams fn^T over each split; `squares` [T, splits]: sums of squares."""
    gdc_wait()
    gdc_launch_dependents()
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    split = tl.program_id(1)
    mix = tl.arange(0, BLOCK_MIXES)
    start = streams + token.to(tl.int64)[:, None] * row_stride
    acc = tl.zeros([BLOCK_T, BLOCK_MIXES], tl.float32)
    sum_sq = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for k in range(0, SPLIT_SIZE, BLOCK_K):
        column = split * SPLIT_SIZE + k + tl.arange(0, BLOCK_K)
        mask_k = column < width
        x = tl.load(start + column[None, :], mask=(token < tokens)[:, None] & mask_k[None, :], other=0.0)
        x = x.to(tl.float32)
        mask_w = (mix < MIXES)[None, :] & mask_k[:, None]
        weight = tl.load(fn + mix[None, :] * width + column[:, None], mask=mask_w, other=0.0)
        acc = tl.dot(x, weight, acc, input_precision=PRECISION)
        sum_sq += x * x
    offset = token.to(tl.int64) * splits + split
    tl.store(sums + offset[:, None] * BLOCK_MIXES + mix[None, :], acc, mask=(token < tokens)[:, None])
    tl.store(squares + offset, tl.sum(sum_sq, axis=1), mask=token < tokens)


@triton.jit
def _scaled_mixes(
    sums, token, first, index, splits, rstd, base, scale, BLOCK_MIXES: tl.constexpr, BLOCK_SPLITS: tl.constexpr
):  # fmt: skip
    """base + scale * m for the mixes `first + index`, a vector."""
    split = tl.arange(0, BLOCK_SPLITS)
    offset = (token * splits + split)[:, None] * BLOCK_MIXES + first + index[None, :]
    m = tl.sum(tl.load(sums + offset, mask=(split < splits)[:, None], other=0.0), axis=0) * rstd
    return tl.load(base + first + index) + m * scale


@pdl_jit
def pre_kernel(
    streams, sums, squares, base, scale, x, post, comb, hidden, row_stride, splits, eps, norm_eps, iterations,
    N: tl.constexpr, BLOCK_MIXES: tl.constexpr, BLOCK_SPLITS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """`x` [T, hidden]: the weighted sum of the streams; `post` [T, N] and `comb` [T, N, N]: as in the reference."""
    gdc_wait()
    gdc_launch_dependents()
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, stream = tl.arange(0, BLOCK_SPLITS), tl.arange(0, N)
    sum_sq = tl.sum(tl.load(squares + token * splits + split, mask=split < splits, other=0.0), axis=0)
    rstd = tl.rsqrt(sum_sq / (N * hidden) + norm_eps)
    m = _scaled_mixes(sums, token, 0, stream, splits, rstd, base, tl.load(scale), BLOCK_MIXES, BLOCK_SPLITS)
    pre = tl.sigmoid(m) + eps
    column = block * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = column < hidden
    start = streams + token * row_stride
    x_block = tl.load(start + stream[:, None] * hidden + column[None, :], mask=mask[None, :], other=0.0)
    acc = tl.sum(pre[:, None] * x_block.to(tl.float32), axis=0)
    tl.store(x + token * hidden + column, acc.to(x.dtype.element_ty), mask=mask)
    if block == 0:
        m_post = _scaled_mixes(
            sums, token, N, stream, splits, rstd, base, tl.load(scale + 1), BLOCK_MIXES, BLOCK_SPLITS
        )
        gate = tl.sigmoid(m_post)
        tl.store(post + token * N + stream, (2.0 * gate).to(post.dtype.element_ty))
        cell = tl.arange(0, N * N)
        c = _scaled_mixes(sums, token, 2 * N, cell, splits, rstd, base, tl.load(scale + 2), BLOCK_MIXES, BLOCK_SPLITS)
        c = tl.reshape(c, [N, N])
        c = tl.exp(c - highest(c, 1)[:, None])
        c = c / tl.sum(c, axis=1)[:, None] + eps
        c = c / (tl.sum(c, axis=0)[None, :] + eps)
        for _ in range(iterations - 1):
            c = c / (tl.sum(c, axis=1)[:, None] + eps)
            c = c / (tl.sum(c, axis=0)[None, :] + eps)
        offset = token * N * N + stream[:, None] * N + stream[None, :]
        tl.store(comb + offset, c.to(comb.dtype.element_ty))


@pdl_jit
def post_kernel(
    y, streams, post, comb, out, hidden, y_stride, row_stride, N: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    """X'_j = post_j y + sum_i C_ij X_i, [T, N, hidden]."""
    gdc_wait()
    gdc_launch_dependents()
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    stream = tl.arange(0, N)
    column = block * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = column < hidden
    start = streams + token * row_stride
    x_block = tl.load(start + stream[:, None] * hidden + column[None, :], mask=mask[None, :], other=0.0).to(tl.float32)
    new = tl.load(y + token * y_stride + column, mask=mask, other=0.0).to(tl.float32)
    for j in tl.static_range(N):
        weight = tl.load(comb + token * N * N + stream * N + j).to(tl.float32)
        acc = tl.load(post + token * N + j).to(tl.float32) * new + tl.sum(weight[:, None] * x_block, axis=0)
        tl.store(out + (token * N + j) * hidden + column, acc.to(out.dtype.element_ty), mask=mask)


def hc_pre(
    spec: HyperConnectionSpec, streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `reference.hc_pre`; a token's streams lie side by side."""
    tokens, n, hidden = streams.shape
    assert streams.stride(2) == 1 and streams.stride(1) == hidden
    width, mixes = n * hidden, (2 + n) * n
    tile = PREFILL_TILE if tokens >= MIN_PREFILL_TOKENS else DECODE_TILE
    block, splits = max(16, next_power_of_2(mixes)), cdiv(width, tile.split)
    x, post, comb = streams.new_empty(tokens, hidden), streams.new_empty(tokens, n), streams.new_empty(tokens, n, n)
    if not tokens:
        return x, post, comb
    sums = torch.empty((tokens, splits, block), dtype=torch.float32, device=streams.device)
    squares = torch.empty((tokens, splits), dtype=torch.float32, device=streams.device)
    # Half-precision streams fit the tensor cores' inputs exactly; the mixing weights are split in parts that do.
    precision = "ieee" if streams.dtype == torch.float32 else "tf32x3"
    mixes_kernel[(cdiv(tokens, tile.block_t), splits)](
        streams, fn, sums, squares, tokens, width, streams.stride(0), splits,
        MIXES=mixes, BLOCK_MIXES=block, BLOCK_T=tile.block_t, SPLIT_SIZE=tile.split, BLOCK_K=tile.block_k,
        PRECISION=precision, num_warps=4, num_stages=2,
    )  # fmt: skip
    pre_kernel[(tokens, cdiv(hidden, BLOCK_H))](
        streams, sums, squares, base, scale, x, post, comb, hidden, streams.stride(0), splits,
        spec.eps, spec.norm_eps, spec.iterations,
        N=n, BLOCK_MIXES=block, BLOCK_SPLITS=next_power_of_2(splits), BLOCK_H=BLOCK_H, num_warps=4,
    )  # fmt: skip
    return x, post, comb


def hc_post(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """As `reference.hc_post`; a token's streams lie side by side."""
    tokens, n, hidden = streams.shape
    assert streams.stride(2) == 1 and streams.stride(1) == hidden and y.stride(1) == 1
    out = streams.new_empty(tokens, n, hidden)
    if tokens:
        post_kernel[(tokens, cdiv(hidden, BLOCK_H))](
            y, streams, post, comb, out, hidden, y.stride(0), streams.stride(0), N=n, BLOCK_H=BLOCK_H, num_warps=4
        )
    return out


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Four streams of 7168."""
    kinds = dict.fromkeys(("streams", "x", "post", "comb", "y", "out"), "*bf16")
    kinds |= dict.fromkeys(("fn", "sums", "squares", "base", "scale"), "*fp32")
    kinds |= dict.fromkeys(("eps", "norm_eps"), "fp32")
    sizes: dict[str, int | str] = {"MIXES": 24, "BLOCK_MIXES": 32, "N": 4, "BLOCK_H": BLOCK_H}
    # AMD's compiler has no split of fp32 for its tensor cores.
    sizes["PRECISION"] = "tf32x3" if chip.vendor == "nvidia" else "ieee"
    listed = []
    for name, tile in (("few", DECODE_TILE), ("many", PREFILL_TILE)):
        sizes |= {"BLOCK_T": tile.block_t, "SPLIT_SIZE": tile.split, "BLOCK_K": tile.block_k}
        sizes["BLOCK_SPLITS"] = next_power_of_2(cdiv(4 * 7168, tile.split))
        kernels = {"mixes": mixes_kernel, "collapse": pre_kernel}
        if tile == PREFILL_TILE:
            kernels["expand"] = post_kernel
        for part, kernel in kernels.items():
            constants = {name: sizes[name] for name in kernel.arg_names if name in sizes}
            signature = {name: kinds.get(name, "i32") for name in kernel.arg_names if name not in sizes}
            listed.append(Specialization(f"streams {part} {name}", kernel, signature, constants, 4, 2))
    return listed
