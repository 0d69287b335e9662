"""Which rows a program of experts owns: rows are sorted by expert, and tiles of an expert follow those of the last.

A program finds its tile by itself, from where each expert's rows end; where programs are many, in a table that is made
first, once for all products of the same rows.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2
from allotrope.ops.matmul.tile_tables import TileTables

# Tiles that a program lists.
_BLOCK = 16


@triton.jit
def tiles_of_experts(expert_offsets, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Of each expert [EXPERTS]: its first row, the row behind its last, the tiles behind its last, and its tiles."""
    each = tl.arange(0, EXPERTS)
    end = tl.load(expert_offsets + each, mask=each < experts, other=0)
    start = tl.load(expert_offsets + each - 1, mask=(each > 0) & (each < experts), other=0)
    tiles = tl.where(each < experts, (end - start + ROWS - 1) // ROWS, 0)
    return start, end, tl.cumsum(tiles, 0), tiles


@triton.jit
def rows_of_tile(tile, expert_offsets, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Of one tile of ROWS rows: its expert, its first row, and the row behind the expert's last; first is not before
    that where nobody needs the tile."""
    start_of, end_of, behind, tiles_of = tiles_of_experts(expert_offsets, experts, EXPERTS, ROWS)
    expert = tl.sum((behind <= tile).to(tl.int32), 0)
    mine = tl.arange(0, EXPERTS) == expert
    first = tl.sum(tl.where(mine, start_of + (tile - (behind - tiles_of)) * ROWS, 0), 0)
    return expert, first, tl.sum(tl.where(mine, end_of, 0), 0)


@pdl_jit(do_not_specialize=["tiles"])
def tiles_kernel(expert_offsets, table, experts, tiles, EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Expert and first row of every tile of ROWS rows, for many tiles; `experts` for those that nobody needs."""
    gdc_wait()
    gdc_launch_dependents()
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    each = tl.arange(0, EXPERTS)
    start_of, _, behind, tiles_of = tiles_of_experts(expert_offsets, experts, EXPERTS, ROWS)
    expert = tl.sum((behind[None, :] <= tile[:, None]).to(tl.int32), 1)
    mine = each[None, :] == expert[:, None]
    # Row of the first tile of the expert, as if tiles before it were its own.
    first = tl.sum(tl.where(mine, (start_of - (behind - tiles_of) * ROWS)[None, :], 0), 1) + tile * ROWS
    tl.store(table + 2 * tile, tl.minimum(expert, experts), mask=tile < tiles)
    tl.store(table + 2 * tile + 1, first, mask=tile < tiles)


def most_tiles(rows: int, expert_offsets: torch.Tensor, height: int) -> int:
    """Tiles of `height` rows that `rows` of the experts may take, however they are spread."""
    return rows // height + min(len(expert_offsets), rows)


def table_of_tiles(
    rows: int, expert_offsets: torch.Tensor, height: int, tile_tables: TileTables | None
) -> torch.Tensor:
    """What `tiles_kernel` writes, or has written for an earlier product."""
    if tile_tables is not None and height in tile_tables:
        return tile_tables[height]
    experts, tiles = len(expert_offsets), most_tiles(rows, expert_offsets, height)
    table = torch.empty((tiles, 2), dtype=torch.int32, device=expert_offsets.device)
    grid = (cdiv(tiles, _BLOCK),)
    tiles_kernel[grid](expert_offsets, table, experts, tiles, next_power_of_2(experts), height, _BLOCK)
    if tile_tables is not None:
        tile_tables[height] = table
    return table


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Of 512 experts."""
    signature = {"expert_offsets": "*i32:16", "table": "*i32:16", "experts": "i32", "tiles": "i32"}
    sizes = {"EXPERTS": 512, "ROWS": 64, "BLOCK": _BLOCK}
    return [Specialization("tiles of experts", tiles_kernel, signature, sizes, 4, 1)]
