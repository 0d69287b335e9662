"""The time of a step on a chip: the least one that its ceilings allow, and the one that measured steps let expect.

Both come from the same `StepWork`. Owns the formulas; their constants lie beside the chips' figures. Must not know
models, layouts, collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from allotrope.attention.cost import StepCost
from allotrope.attention.registry import FAMILIES
from allotrope.engine.planning.step_cost import EXPERTS, StepWork
from allotrope.kernels.chip_figures import FITTED, ChipFigures, Fitted

ATTENTION, PRODUCTS, PASSED, LAUNCHES = "attention", "other products", "between kernels", "starts of kernels"
PARTS = (ATTENTION, EXPERTS, PRODUCTS, PASSED, LAUNCHES)
# What the host takes for a step of piecewise graphs, of what it takes to launch each kernel: 4.0 ms of 18.6 where
# kernels take hardly any time, `python bench/prefill_graphs.py`, 8 layers of Qwen3-Next, 30 tokens.
_REPLAYED = 0.2


class StepTime:
    """Seconds of steps of one rank on a chip.

        least = sum over classes of max(bytes / bandwidth, flops / rate)
        kernels = sum over classes of max(b bytes / bandwidth, f flops / (share rate))
            + l launches + p passed / bandwidth

    b, f, l, p: of `Fitted`. share: of a family of attention, what its kernels reach by themselves, else 1.
    """

    def __init__(self, figures: ChipFigures, fitted: Fitted = FITTED) -> None:
        self.figures, self.fitted = figures, fitted
        rates = {kind: rate.value for kind, rate in figures.rates.items()}
        self._plain = rates["bf16"]
        # What has no product of its own is multiplied in bf16.
        self._fp8 = rates.get("fp8", self._plain)

    def least(self, classes: Mapping[str, StepCost]) -> float:
        """The least time of what `classes` move and compute."""
        return sum(max(self._moving(cost), self._computing(cost)) for cost in classes.values())

    def kernels(self, work: StepWork) -> float:
        """The time of a step's kernels, one after another."""
        return sum(self.parts(work).values())

    def parts(self, work: StepWork) -> dict[str, float]:
        """The same by what takes it, in the order of `PARTS`."""
        constants = self.fitted
        found = dict.fromkeys(PARTS, 0.0)
        products = StepCost()
        for kind, cost in work.classes.items():
            if kind in FAMILIES:
                found[ATTENTION] += self._larger(cost, FAMILIES[kind].matmul_share)
            elif kind == EXPERTS:
                # Bytes are what they are; tiles compute rows of padding.
                found[EXPERTS] += self._larger(cost + work.padding)
            else:
                products += cost
        found[PRODUCTS] = self._larger(products)
        found[PASSED] = constants.passed * work.passed / self.figures.bandwidth.value
        found[LAUNCHES] = constants.launch * work.launches
        return found

    def _larger(self, cost: StepCost, share: float = 1.0) -> float:
        """The time of what moves or of what is computed at a share of the rate, whichever is longer."""
        moving, computing = self.fitted.bytes * self._moving(cost), self.fitted.flops * self._computing(cost)
        return max(moving, computing / share)

    def decode(self, work: StepWork) -> float:
        """A decode step in a CUDA graph."""
        return self.fitted.step + self.kernels(work)

    def prompts(self, steps: Sequence[StepWork], graphs: Sequence[bool] = ()) -> float:
        """Steps that read a batch of prompts, one after another. `graphs`: of each step, as `prompt_step` takes it;
        default: all of them are eager."""
        replayed = graphs or (False,) * len(steps)
        return self.fitted.prompts + sum(map(self.prompt_step, steps, replayed))

    def prompt_step(self, work: StepWork, graphs: bool = False) -> float:
        """One of these steps, as long as the slower of host and device. `graphs`: it is replayed as piecewise CUDA
        graphs, where it would wait for the host."""
        host = self.launching(work.launches)
        return max(self.kernels(work), host * _REPLAYED if graphs else host)

    def launching(self, launches: int) -> float:
        """What the host takes to launch as many kernels of an eager step with prompts."""
        return self.fitted.host_launch * launches

    def _moving(self, cost: StepCost) -> float:
        return cost.bytes / self.figures.bandwidth.value

    def _computing(self, cost: StepCost) -> float:
        return (cost.flops - cost.fp8) / self._plain + cost.fp8 / self._fp8
