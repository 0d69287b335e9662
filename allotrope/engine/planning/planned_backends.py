"""What each attention and operation of a planned model would run by."""

from __future__ import annotations

import dataclasses

from allotrope.engine.load_plan import LoadPlan
from allotrope.kernels.backend import Chooser
from allotrope.layers.backend_report import ChoiceReport, choice_reports, unused_lines
from allotrope.loading.decoder import make_meta_decoder


def planned_backends(load_plan: LoadPlan) -> tuple[list[ChoiceReport], list[str]]:
    """Every distinct choice of one rank, and a sentence for each backend that was asked for in vain. Reads no weight.

    Raises BackendError.
    """
    # A chooser that has seen no other model.
    chooser = Chooser(load_plan.build.chooser.chip, load_plan.build.chooser.wanted)
    load_plan = dataclasses.replace(load_plan, build=dataclasses.replace(load_plan.build, chooser=chooser))
    model = make_meta_decoder(load_plan.architecture, load_plan.spec, load_plan.build)
    load_plan.sampler()
    return choice_reports(model, load_plan.build), unused_lines(load_plan.build)
