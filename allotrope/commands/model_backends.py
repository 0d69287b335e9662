"""The backends that a model would run by on a chip, from its config alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from allotrope.config import EngineConfig
from allotrope.engine.load_plan import resolve_load_plan
from allotrope.engine.plan_report import has_weights
from allotrope.engine.planned_backends import planned_backends
from allotrope.errors import ConfigError
from allotrope.kernels.chip import CHIPS, CPU, Chip
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


def chip_named(name: str) -> Chip:
    """The chip of an architecture. Raises ConfigError if there is none."""
    chips = {**CHIPS, CPU.arch: CPU}
    if name not in chips:
        raise ConfigError(f"chip={name!r} is not known; allowed: {', '.join(chips)}.")
    return chips[name]


def model_backends(config: EngineConfig, chip: str | None = None) -> ModelBackends:
    """What runs each distinct attention and operation of `config.model` on one rank. Reads no weight.

    `chip`: an architecture; default: of the device that `config` names. Raises ConfigError, ModelError or BackendError.
    """
    named = None if chip is None else chip_named(chip)
    if named is not None:
        # A chip that is not here has no memory to ask for.
        config = dataclasses.replace(config, device="cpu")
    if not has_weights(config):
        # Those of a hub id need not be downloaded for this.
        config = dataclasses.replace(config, load_format="dummy")
    load_plan = resolve_load_plan(config, Parallel.of(config.layout), chip=named)
    backends, unused = planned_backends(load_plan)
    return ModelBackends(
        model=config.model,
        architecture=next(iter(load_plan.checkpoint.config.get("architectures") or ["?"])),
        chip=load_plan.build.chooser.chip.arch,
        dtype=str(load_plan.build.dtype).removeprefix("torch."),
        backends=backends,
        remarks=unused,
    )
