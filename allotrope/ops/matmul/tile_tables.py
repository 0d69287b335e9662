"""Tile tables: which rows of which expert each program of a grouped product owns (`triton_tile_table` fills them)."""

from __future__ import annotations

import torch

TileTables = dict[int, torch.Tensor]
"""BLOCK_M -> the tiles of rows sorted by expert, which all products of these rows share."""
