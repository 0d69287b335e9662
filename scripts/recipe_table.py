"""Writes the table of `docs/recipes.md`: which GPUs released models need, as `allotrope plan` says.

    python scripts/recipe_table.py            writes the table
    python scripts/recipe_table.py --check    writes nothing; ends with 1 if the table is out of date

Plans read the configs of `bench/configs`, and no weight.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from page_tables import filled, write

from allotrope.commands.planned_layouts import figures_for
from allotrope.config import EngineConfig
from allotrope.engine.planning.plan_report import report_memory

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "recipes.md"
CONTEXT, SEQUENCES, CHIP = 32768, 64, "h200"
# Of full length, that GPUs have to hold at once.
LEAST = 16


@dataclass(frozen=True)
class Recipe:
    """`config`: a folder of `bench/configs`. `gpus`: tensor-parallel ranks. `drafts`: methods of speculative decoding
    beside `ngram`, `suffix` and `draft_model`."""

    title: str
    config: str
    gpus: int
    drafts: str = "–"


RECIPES = (
    Recipe("Qwen3-1.7B FP8", "qwen3_1_7b_fp8", 1, "`eagle3`"),
    Recipe("Qwen3.5-27B FP8", "qwen3_5_27b_fp8", 1, "`mtp`, `eagle3`"),
    Recipe("Gemma 4 31B", "gemma4_31b", 1, "`eagle3`"),
    Recipe("Qwen3-Next-80B-A3B FP8", "qwen3_next_80b_fp8", 1, "`mtp`, `eagle3`"),
    Recipe("gpt-oss-120b", "gpt_oss_120b", 1, "`eagle3`"),
    Recipe("Qwen3-235B-A22B FP8", "qwen3_235b_fp8", 4, "`eagle3`"),
    Recipe("DeepSeek-V4-Flash", "deepseek_v4_flash", 2, "`mtp`"),
    Recipe("DeepSeek-V3.2", "deepseek_v32", 8, "`mtp`, `eagle3`"),
    Recipe("Kimi-K2", "kimi_k2", 16, "`eagle3`"),
)


def row(recipe: Recipe) -> str:
    """The row of a model. Raises ValueError where the GPUs do not hold `LEAST` sequences."""
    config = EngineConfig(
        model=str(ROOT / "bench" / "configs" / recipe.config),
        tensor_parallel_size=recipe.gpus,
        max_model_len=CONTEXT,
        max_num_seqs=SEQUENCES,
    )
    report = report_memory(config, None, figures_for(CHIP, None))
    if report.tokens is None or report.tokens < LEAST * CONTEXT:
        raise ValueError(f"{recipe.title} on {recipe.gpus} GPUs: {report.refusal or f'{report.tokens} tokens'}")
    ranks = f" -tp {recipe.gpus}" if recipe.gpus > 1 else ""
    weights = f"{report.weight_bytes / 2**30:.1f} GiB"
    cells = [recipe.title, f"`allotrope serve MODEL{ranks} --max-model-len 32K`", str(recipe.gpus), weights]
    return f"| {' | '.join([*cells, f'{report.tokens:,}', recipe.drafts])} |\n"


def updated(page: str) -> str:
    """`page` with its table made anew."""
    head = "| model | command | H200s | weights of each | tokens of context | drafts |\n|---|---|---:|---:|---:|---|\n"
    return filled(page, lambda _: head + "".join(map(row, RECIPES)))


if __name__ == "__main__":
    sys.exit(write(PAGE, updated, __doc__))
