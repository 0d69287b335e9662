"""Writes the tables of `docs/backends.md`: what each backend of attention takes, asked of the backends themselves.

    python scripts/backend_tables.py            writes the tables
    python scripts/backend_tables.py --check    writes nothing; ends with 1 if a table is out of date

A layer of a released model is the basis. Each row changes one thing of it, and asks every backend on all chips that it
runs on.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from page_tables import filled, write

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.csa import CsaSpec
from allotrope.attention.csa import IndexerSpec as EntryIndexerSpec
from allotrope.attention.dsa import DsaSpec, IndexerSpec
from allotrope.attention.gdn import GdnSpec
from allotrope.attention.mha import MhaSpec
from allotrope.attention.mla import MlaSpec
from allotrope.attention.registry import FAMILIES
from allotrope.kernels.chip import CHIPS, CPU, Chip
from allotrope.ops.rope import RopeSpec

PAGE = Path(__file__).resolve().parents[1] / "docs" / "backends.md"
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": BF16}
Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Layer:
    """`title`: of the layer in words. `variants`: what a row changes of `spec`; "of.field" is a field of a spec within.
    `sizes`: field -> sizes of it that are tried."""

    title: str
    spec: Any
    variants: Mapping[str, Changes]
    sizes: Mapping[str, Sequence[int]]


def _cache_types(prefix: str = "", **formats: Changes) -> dict[str, Changes]:
    """Rows for each type of cache entries. `formats`: further ones."""
    types = {f"{name} entries": {f"{prefix}kv_dtype": dtype} for name, dtype in TYPES.items()}
    return {**types, "FP8 entries": {f"{prefix}kv_dtype": FP8}, **formats}


def _scaled(prefix: str = "") -> dict[str, Changes]:
    return {"block-scaled FP8 entries": {f"{prefix}kv_dtype": FP8, f"{prefix}row_format": "scaled"}}


_LATENT = MlaSpec(
    num_heads=128, latent_dim=512, rope_dim=64, nope_dim=128, v_head_dim=128, scale=192**-0.5, kv_dtype=BF16
)
LAYERS = {
    "mha": Layer(
        "32 heads of 128, 8 KV heads, bfloat16",
        MhaSpec(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5, kv_dtype=BF16),
        {
            **_cache_types(),
            "sliding window": {"window": 128},
            "sinks": {"sinks": True},
            "soft-cap of logits": {"softcap": 30.0},
            "values of another size": {"v_head_dim": 64},
            "values that are keys": {"values_are_keys": True},
        },
        {"head_dim": (16, 40, 64, 80, 96, 128, 192, 256, 512)},
    ),
    "mla": Layer(
        "128 heads, latents of 512 and 64, bfloat16",
        _LATENT,
        _cache_types() | _scaled(),
        {"latent_dim": (128, 192, 256, 384, 512, 576, 1024), "num_heads": (1, 8, 16, 32, 64, 128)},
    ),
    "dsa": Layer(
        "the same with an indexer of 64 heads of 128 and top-k 2048",
        DsaSpec(mla=_LATENT, topk=2048, indexer=IndexerSpec(num_heads=64, head_dim=128)),
        {
            **_cache_types("mla."),
            **_scaled("mla."),
            "FP8 index keys": {"indexer.key_format": "scaled"},
            "indices of the layer before": {"indexer": None},
        },
        {"topk": (64, 512, 2048, 4096, 8192), "indexer.num_heads": (1, 32, 64, 128, 256)},
    ),
    "gdn": Layer(
        "16 key heads and 32 value heads of 128, bfloat16, float32 states",
        GdnSpec(num_k_heads=16, num_v_heads=32, k_head_dim=128, v_head_dim=128, conv_width=4, conv_dtype=BF16),
        {
            **{f"{name} activations": {"conv_dtype": dtype} for name, dtype in TYPES.items()},
            **{f"{name} states": {"state_dtype": dtype} for name, dtype in TYPES.items()},
            "a decay for each channel": {"channel_decay": True},
            "drafts": {"max_drafts": 3},
        },
        {"k_head_dim": (16, 64, 96, 128, 256, 512), "v_head_dim": (16, 40, 64, 128, 256)},
    ),
    "csa": Layer(
        "64 heads of 512, a window of 128, top-k 512 of entries of 4 tokens, bfloat16",
        CsaSpec(
            num_heads=64,
            head_dim=512,
            scale=512**-0.5,
            window=128,
            rope=RopeSpec(dim=64, theta=10000.0, interleaved=True),
            kv_dtype=BF16,
            ratio=4,
            overlap=True,
            indexer=EntryIndexerSpec(num_heads=64, head_dim=128, topk=512),
        ),
        {
            **_cache_types(),
            **_scaled(),
            "a window alone": {"ratio": 0, "overlap": False, "indexer": None},
            "all entries of 128 tokens": {"ratio": 128, "overlap": False, "indexer": None},
            "rotation by halves": {"rope.interleaved": False},
        },
        {"head_dim": (64, 128, 256, 512), "num_heads": (1, 8, 16, 32, 64, 128)},
    ),
}


def changed(spec: Any, changes: Changes) -> Any:
    """The spec with its fields, and those of specs within it, replaced together."""
    own = {name: value for name, value in changes.items() if "." not in name}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        if "." in name:
            outer, _, rest = name.partition(".")
            inner.setdefault(outer, {})[rest] = value
    return dataclasses.replace(
        spec, **own, **{name: changed(getattr(spec, name), rest) for name, rest in inner.items()}
    )


def _chips(backend: AttentionBackend, spec: Any) -> list[Chip]:
    return [chip for chip in (*CHIPS.values(), CPU) if not backend.rejects(spec, chip)]


def _named(chips: Sequence[Chip]) -> str:
    gpus = [chip for chip in chips if chip.is_gpu]
    names = ["GPUs"] if len(gpus) == len(CHIPS) else [chip.arch for chip in gpus]
    return ", ".join([*names, *(["CPU"] if CPU in chips else [])])


def _taken(backend: AttentionBackend, chips: Sequence[Chip], spec: Any) -> str:
    lacking = [chip.arch for chip in chips if backend.rejects(spec, chip)]
    if not lacking:
        return "yes"
    return "–" if len(lacking) == len(chips) else f"not {', '.join(lacking)}"


def table(name: str) -> str:
    """The table of a family: a column for each backend, best first."""
    layer, backends = LAYERS[name], FAMILIES[name].backends
    chips = {backend.name: _chips(backend, layer.spec) for backend in backends}
    rows = [[layer.title, *(f"`{backend.name}`" for backend in backends)], ["---"] * (1 + len(backends))]
    rows.append(["runs on", *(_named(chips[backend.name]) for backend in backends)])
    rows.append(["CUDA graphs of decode steps", *("yes" if backend.in_graphs else "–" for backend in backends)])
    for title, changes in layer.variants.items():
        spec = changed(layer.spec, changes)
        rows.append([title, *(_taken(backend, chips[backend.name], spec) for backend in backends)])
    for field, sizes in layer.sizes.items():
        cells = []
        for backend in backends:
            found = {size: _taken(backend, chips[backend.name], changed(layer.spec, {field: size})) for size in sizes}
            taken = [f"{size}" if said == "yes" else f"{size} ({said})" for size, said in found.items() if said != "–"]
            cells.append(", ".join(taken))
        rows.append([f"`{field}` of {', '.join(map(str, sizes))}", *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def updated(page: str) -> str:
    """`page` with every table made anew."""
    return filled(page, table)


if __name__ == "__main__":
    sys.exit(write(PAGE, updated, __doc__))
