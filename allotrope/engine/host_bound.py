"""Which prefill steps are replayed as piecewise graphs: those whose kernels run faster than a host can launch them."""

from __future__ import annotations

from allotrope.engine.load_plan import LoadPlan
from allotrope.engine.planning.step_cost import ModelCost
from allotrope.engine.planning.step_time import StepTime
from allotrope.graphs.piecewise_graphs import prefill_sizes
from allotrope.kernels.chip_figures import figures_of
from allotrope.rank_layout import RankLayout

# Where nothing is known of the chip.
_USUAL_TOKENS = 1024
# What a sum over ranks takes of the host, of what a kernel takes. Without graphs a step of two H200s took 24 ms with 8
# layers of Qwen3-235B and 182 with 48 of Qwen3-Next, whose kernels are launched in 13 and 100.
_SUM_LAUNCHES = 6


def host_bound_tokens(load_plan: LoadPlan) -> int:
    """The most tokens of a prefill step that waits for the host, so that CUDA graphs of it gain more than padding
    loses."""
    figures = figures_of(load_plan.build.chooser.chip.arch)
    if figures is None:
        return min(_USUAL_TOKENS, load_plan.step_tokens)
    cost, time = ModelCost(load_plan), StepTime(figures)
    # Each layer sums the ranks' parts behind its attention and behind its feed-forward block.
    sums = 2 * load_plan.num_layers if load_plan.build.parallel.layout.tensor > 1 else 0
    found = 0
    for size in prefill_sizes(load_plan.step_tokens):
        work = cost.work((size,), (size,))
        if time.kernels(work) > time.launching(work.launches + _SUM_LAUNCHES * sums):
            break
        found = size
    return found


def runs_in_pieces(layout: RankLayout) -> bool:
    """Whether prefill steps may run in pieces. Where ranks exchange rows each has its own number of them, and pipeline
    stages wait for each other."""
    return layout.data == layout.pipeline == 1
