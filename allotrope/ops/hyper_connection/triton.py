"""Hyper-connections in three launches a sublayer: `hyper_connection` has the equations, and about a hundred launches.

`mixes_kernel`: a program multiplies some tokens' streams, over a run of their numbers, with the mixing weights.
`collapse_kernel`: a program adds up a token's runs, makes gates and the doubly stochastic matrix in registers, and
weighs the streams over a block of columns. `expand_kernel`: a program writes a block of columns of all of a token's
streams. Bytes moved: the streams twice to collapse them (the second time perhaps from the L2), and read and written
once to expand them.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import highest
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2

if TYPE_CHECKING:
    from allotrope.layers.hyper_connection import HyperConnectionSpec

COLUMNS = 1024


@dataclass(frozen=True)
class Tile:
    """What a program of `mixes_kernel` takes: `tokens`, and of each a `run` of numbers, `step` at a time."""

    tokens: int
    run: int
    step: int


# Of few tokens, short runs: as many programs as a chip has room for, and none waits long for memory.
FEW, MANY = Tile(16, 128, 128), Tile(64, 1024, 32)
# From so many tokens on, what programs write for each other, and weights that each reads again, take longer.
MANY_TOKENS = 1024


@pdl_jit
def mixes_kernel(
    streams, fn, sums, squares, tokens, width, row_stride, runs,
    MIXES: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, RUN: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`sums` [T, runs, BLOCK]: streams fn^T over each run; `squares` [T, runs]: the streams' squares."""
    gdc_wait()
    gdc_launch_dependents()
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    run = tl.program_id(1)
    mix = tl.arange(0, BLOCK)
    start = streams + token.to(tl.int64)[:, None] * row_stride
    found = tl.zeros([TOKENS, BLOCK], tl.float32)
    square = tl.zeros([TOKENS, STEP], tl.float32)
    for offset in range(0, RUN, STEP):
        column = run * RUN + offset + tl.arange(0, STEP)
        there = column < width
        x = tl.load(start + column[None, :], mask=(token < tokens)[:, None] & there[None, :], other=0.0)
        x = x.to(tl.float32)
        inside = (mix < MIXES)[None, :] & there[:, None]
        weight = tl.load(fn + mix[None, :] * width + column[:, None], mask=inside, other=0.0)
        found = tl.dot(x, weight, found, input_precision=PRECISION)
        square += x * x
    place = token.to(tl.int64) * runs + run
    tl.store(sums + place[:, None] * BLOCK + mix[None, :], found, mask=(token < tokens)[:, None])
    tl.store(squares + place, tl.sum(square, axis=1), mask=token < tokens)


@triton.jit
def _mixed(sums, token, first, each, runs, root, base, scale, BLOCK: tl.constexpr, RUNS: tl.constexpr):
    """base + scale * m for the mixes `first + each`, a vector."""
    run = tl.arange(0, RUNS)
    place = (token * runs + run)[:, None] * BLOCK + first + each[None, :]
    m = tl.sum(tl.load(sums + place, mask=(run < runs)[:, None], other=0.0), axis=0) * root
    return tl.load(base + first + each) + m * scale


@pdl_jit
def collapse_kernel(
    streams, sums, squares, base, scale, x, post, comb, hidden, row_stride, runs, eps, norm_eps, iterations,
    N: tl.constexpr, BLOCK: tl.constexpr, RUNS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`x` [T, hidden]: the streams weighed; `post` [T, N] and `comb` [T, N, N]: how they are put together again."""
    gdc_wait()
    gdc_launch_dependents()
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    run, each = tl.arange(0, RUNS), tl.arange(0, N)
    square = tl.sum(tl.load(squares + token * runs + run, mask=run < runs, other=0.0), axis=0)
    root = tl.rsqrt(square / (N * hidden) + norm_eps)
    pre = tl.sigmoid(_mixed(sums, token, 0, each, runs, root, base, tl.load(scale), BLOCK, RUNS)) + eps
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    start = streams + token * row_stride
    value = tl.load(start + each[:, None] * hidden + column[None, :], mask=inside[None, :], other=0.0)
    weighed = tl.sum(pre[:, None] * value.to(tl.float32), axis=0)
    tl.store(x + token * hidden + column, weighed.to(x.dtype.element_ty), mask=inside)
    if block == 0:
        gate = tl.sigmoid(_mixed(sums, token, N, each, runs, root, base, tl.load(scale + 1), BLOCK, RUNS))
        tl.store(post + token * N + each, (2.0 * gate).to(post.dtype.element_ty))
        cell = tl.arange(0, N * N)
        c = _mixed(sums, token, 2 * N, cell, runs, root, base, tl.load(scale + 2), BLOCK, RUNS)
        c = tl.reshape(c, [N, N])
        c = tl.exp(c - highest(c, 1)[:, None])
        c = c / tl.sum(c, axis=1)[:, None] + eps
        c = c / (tl.sum(c, axis=0)[None, :] + eps)
        for _ in range(iterations - 1):
            c = c / (tl.sum(c, axis=1)[:, None] + eps)
            c = c / (tl.sum(c, axis=0)[None, :] + eps)
        place = token * N * N + each[:, None] * N + each[None, :]
        tl.store(comb + place, c.to(comb.dtype.element_ty))


@pdl_jit
def expand_kernel(
    y, streams, post, comb, out, hidden, y_stride, row_stride, N: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """X'_j = post_j y + sum_i C_ij X_i, [T, N, hidden]."""
    gdc_wait()
    gdc_launch_dependents()
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    each = tl.arange(0, N)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    start = streams + token * row_stride
    value = tl.load(start + each[:, None] * hidden + column[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
    new = tl.load(y + token * y_stride + column, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(N):
        weight = tl.load(comb + token * N * N + each * N + j).to(tl.float32)
        own = tl.load(post + token * N + j).to(tl.float32) * new + tl.sum(weight[:, None] * value, axis=0)
        tl.store(out + (token * N + j) * hidden + column, own.to(out.dtype.element_ty), mask=inside)


def takes(streams: int) -> bool:
    """Whether the kernels have that number of streams."""
    return streams & (streams - 1) == 0


def collapse(
    spec: HyperConnectionSpec, streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `HyperConnection.collapse`. `streams`: [T, N, hidden], a token's side by side. `scale`: [3] fp32."""
    tokens, n, hidden = streams.shape
    assert streams.stride(2) == 1 and streams.stride(1) == hidden
    width, mixes = n * hidden, (2 + n) * n
    tile = MANY if tokens >= MANY_TOKENS else FEW
    block, runs = max(16, next_power_of_2(mixes)), cdiv(width, tile.run)
    x, post, comb = streams.new_empty(tokens, hidden), streams.new_empty(tokens, n), streams.new_empty(tokens, n, n)
    if not tokens:
        return x, post, comb
    sums = torch.empty((tokens, runs, block), dtype=torch.float32, device=streams.device)
    squares = torch.empty((tokens, runs), dtype=torch.float32, device=streams.device)
    # Half-precision streams fit the tensor cores' inputs exactly; the mixing weights are split in parts that do.
    exact = streams.dtype == torch.float32 or not chip_of(streams.device).has_tf32
    precision = "ieee" if exact else "tf32x3"
    mixes_kernel[(cdiv(tokens, tile.tokens), runs)](
        streams, fn, sums, squares, tokens, width, streams.stride(0), runs,
        MIXES=mixes, BLOCK=block, TOKENS=tile.tokens, RUN=tile.run, STEP=tile.step, PRECISION=precision, num_warps=4,
        num_stages=2,
    )  # fmt: skip
    collapse_kernel[(tokens, cdiv(hidden, COLUMNS))](
        streams, sums, squares, base, scale, x, post, comb, hidden, streams.stride(0), runs,
        spec.eps, spec.norm_eps, spec.iterations,
        N=n, BLOCK=block, RUNS=next_power_of_2(runs), COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return x, post, comb


def expand(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """As `hyper_connection.expand`."""
    tokens, n, hidden = streams.shape
    assert streams.stride(2) == 1 and streams.stride(1) == hidden and y.stride(1) == 1
    out = streams.new_empty(tokens, n, hidden)
    if tokens:
        expand_kernel[(tokens, cdiv(hidden, COLUMNS))](
            y, streams, post, comb, out, hidden, y.stride(0), streams.stride(0), N=n, COLUMNS=COLUMNS, num_warps=4
        )
    return out


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Four streams of 7168."""
    kinds = dict.fromkeys(("streams", "x", "post", "comb", "y", "out"), "*bf16")
    kinds |= dict.fromkeys(("fn", "sums", "squares", "base", "scale"), "*fp32")
    kinds |= dict.fromkeys(("eps", "norm_eps"), "fp32")
    sizes: dict[str, int | str] = {"MIXES": 24, "BLOCK": 32, "N": 4, "COLUMNS": COLUMNS}
    # AMD's compiler has no split of fp32 for its tensor cores.
    sizes["PRECISION"] = "tf32x3" if chip.has_tf32 else "ieee"
    made = []
    for name, tile in (("few", FEW), ("many", MANY)):
        sizes |= {"TOKENS": tile.tokens, "RUN": tile.run, "STEP": tile.step}
        sizes["RUNS"] = next_power_of_2(cdiv(4 * 7168, tile.run))
        for kernel in (mixes_kernel, collapse_kernel, *((expand_kernel,) if tile == MANY else ())):
            constants = {name: sizes[name] for name in kernel.arg_names if name in sizes}
            signature = {name: kinds.get(name, "i32") for name in kernel.arg_names if name not in sizes}
            title = f"streams {kernel.__name__.removesuffix('_kernel')} {name}"
            made.append(Specialization(title, kernel, signature, constants, 4, 2))
    return made
