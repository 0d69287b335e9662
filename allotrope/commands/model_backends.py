"""The backends that a model would run by on a chip, from its config alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from allotrope.config import EngineConfig
from allotrope.engine.load_plan import resolve_load_plan
from allotrope.engine.planning.plan_report import has_weights
from allotrope.engine.planning.planned_backends import planned_backends
from allotrope.errors import ConfigError
from allotrope.kernels.chip import CPU, Chip
from allotrope.kernels.chip_figures import figures_of, known_chips
from allotrope.layers.backend_report import ChoiceReport
from allotrope.layers.parallel import Parallel


@dataclass(frozen=True)
class ModelBackends:
    """`chip`: its architecture. `remarks`: on backends that were asked for in vain, and on weights."""

    model: str
    architecture: str
    chip: str
    dtype: str
    backends: list[ChoiceReport]
    remarks: list[str]


def chip_named(name: str) -> tuple[Chip, int | None]:
    """The chip of a name or architecture, and the bytes of its memory, None for a CPU. Raises ConfigError if there is
    none."""
    if name == CPU.arch:
        return CPU, None
    figures = figures_of(name)
    if figures is None:
        raise ConfigError(f"chip={name!r} is not known; allowed: {', '.join((*known_chips(), CPU.arch))}.")
    return figures.chip, int(figures.memory.value)


def model_backends(config: EngineConfig, chip: str | None = None) -> ModelBackends:
    """What runs each distinct attention and operation of `config.model` on one rank. Reads no weight.

    `chip`: a name or an architecture; default: of the device that `config` names. Raises ConfigError, ModelError or
    BackendError.
    """
    named, memory = (None, None) if chip is None else chip_named(chip)
    if named is CPU:
        config = dataclasses.replace(config, device="cpu")
    if not has_weights(config):
        # Those of a hub id need not be downloaded for this.
        config = dataclasses.replace(config, load_format="dummy")
    load_plan = resolve_load_plan(config, Parallel.of(config.layout), chip=named, available=memory)
    backends, unused = planned_backends(load_plan)
    return ModelBackends(
        model=config.model,
        architecture=next(iter(load_plan.checkpoint.config.get("architectures") or ["?"])),
        chip=load_plan.build.chooser.chip.arch,
        dtype=str(load_plan.build.dtype).removeprefix("torch."),
        backends=backends,
        remarks=unused,
    )
