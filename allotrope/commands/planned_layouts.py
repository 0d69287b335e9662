"""The comparison of layouts that `allotrope plan --gpus` shows."""

from __future__ import annotations

import dataclasses

from allotrope.config import EngineConfig
from allotrope.engine.planning.layout_plan import REQUESTS, LayoutPlanner, check_machines, layouts
from allotrope.engine.planning.layout_report import LayoutComparison
from allotrope.engine.planning.plan_report import has_weights
from allotrope.errors import ConfigError
from allotrope.kernels.chip import CPU, current_chip
from allotrope.kernels.chip_figures import FIGURES, ChipFigures, Figure, figures_of, known_chips
from allotrope.rank_layout import RankLayout


def figures_for(chip: str | None, memory: int | None) -> ChipFigures | None:
    """What is known of the chip of that name, with so much memory; None for no name. Raises ConfigError for a name
    that is not known."""
    if chip is None:
        return None
    figures = figures_of(chip)
    if figures is None:
        own = "; cpu is this machine's, for which it is left out" if chip == CPU.arch else ""
        raise ConfigError(f"chip={chip!r} is not known; allowed: {', '.join(known_chips())}{own}.")
    return figures if memory is None else dataclasses.replace(figures, memory=Figure(memory, "as given", measured=True))


def compare_layouts(
    config: EngineConfig, figures: ChipFigures | None, gpus: int | None, hosts: int | None, context: int | None
) -> LayoutComparison:
    """Every layout of `gpus` GPUs, or of as many as the sizes in `config` need; of those that `config` asks for in
    part, the ones that have these sizes. `figures`: default: of the GPU at hand.

    Raises ConfigError for machines that cannot be, ModelError for a model that cannot be served at all.
    """
    figures = figures or _at_hand()
    machines = check_machines(figures, config.layout.size if gpus is None else gpus, hosts)
    if context is not None and context < 1:
        raise ConfigError(f"context={context}; at least 1 is needed.")
    if config.speculation is not None:
        raise ConfigError("speculative_config: layouts are compared without drafts. Leave it out.")
    if not has_weights(config):
        # Those of a hub id need not be downloaded for this.
        config = dataclasses.replace(config, load_format="dummy")
    asked = [one for one in layouts(machines.gpus) if _has(one, config.layout)] if gpus else [config.layout]
    if not asked:
        raise ConfigError(f"gpus={machines.gpus} have no layout with {config.layout}.")
    most = config.max_num_seqs or REQUESTS[-1]
    requests = tuple(count for count in REQUESTS if count <= most) or (most,)
    planner = LayoutPlanner(config, machines, context, requests)
    if context is not None and context > planner.max_model_len:
        raise ConfigError(f"context={context}; sequences have at most {planner.max_model_len} tokens.")
    return LayoutComparison(
        model=config.model,
        heading=planner.heading(),
        machines=machines,
        usable=planner.usable,
        context=planner.context,
        requests=requests,
        reports=tuple(planner.plan(one) for one in asked),
    )


def _has(layout: RankLayout, asked: RankLayout) -> bool:
    """Whether a layout has the sizes that are asked for; one that is not given is 1."""
    pairs = ((layout.tensor, asked.tensor), (layout.data, asked.data), (layout.pipeline, asked.pipeline))
    sizes = all(size in (1, own) for own, size in pairs)
    return sizes and (layout.expert_parallel or not asked.expert_parallel)


def _at_hand() -> ChipFigures:
    """Of the GPU of this machine. Raises ConfigError if there is none, or nothing is known of it."""
    product = current_chip().product.replace("_", "")
    for figures in FIGURES.values():
        if product and figures.name.replace("_", "") in product:
            return figures
    raise ConfigError(
        f"layouts are planned for a chip, and this machine has none that is known: give --chip, one of "
        f"{', '.join(known_chips())}."
    )
