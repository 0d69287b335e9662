"""From a load plan to the model of one rank. Must not know caches or steps."""

from __future__ import annotations

import functools
import logging
from typing import Any

from allotrope.architectures.registry import find_architecture
from allotrope.engine.load_plan import LoadPlan
from allotrope.layers.decoder import Decoder
from allotrope.layers.decoder_draft import DecoderDraft, DecoderDraftSpec
from allotrope.layers.draft import DraftModel
from allotrope.layers.eagle3 import Eagle3Spec
from allotrope.loading.decoder import load_decoder, make_decoder
from allotrope.loading.draft import load_draft
from allotrope.loading.eagle3 import load_eagle3

log = logging.getLogger("allotrope.engine")


def load_model(load_plan: LoadPlan, seed: int, quantized_weights: str = "auto") -> Decoder:
    """Make the model and fill it: from the checkpoint, or with random weights where it brings none.

    `quantized_weights`: the option, which the log names where weights are dequantized. Raises ModelError for weights
    that do not fit the architecture.
    """
    # Chosen here, so that it is logged with the layers' backends.
    load_plan.sampler()
    checkpoint = load_plan.checkpoint
    return load_decoder(
        make_decoder(load_plan.architecture, load_plan.spec, load_plan.build),
        load_plan.architecture,
        load_plan.build,
        checkpoint if checkpoint.has_weights else None,
        seed=seed,
        quantized_weights=quantized_weights,
        log=log.info,
    )


def load_draft_model(
    load_plan: LoadPlan, target: Decoder, seed: int, quantized_weights: str = "auto"
) -> DraftModel | None:
    """Make the draft model of `target` and fill it; None where the plan has none. Arguments and errors: as above."""
    draft, checkpoint, build = load_plan.draft, load_plan.draft_checkpoint, load_plan.draft_build
    if draft is None:
        return None
    assert checkpoint is not None and build is not None
    weights = checkpoint if checkpoint.has_weights else None
    options: dict[str, Any] = {"seed": seed, "quantized_weights": quantized_weights, "log": log.info}
    if isinstance(draft, DecoderDraftSpec):
        architecture = find_architecture(checkpoint.config, checkpoint.source)
        options["log"] = functools.partial(log.info, "draft model: %s")
        made = make_decoder(architecture, draft.model, build)
        return DecoderDraft(load_decoder(made, architecture, build, weights, **options)).eval()
    if isinstance(draft, Eagle3Spec):
        return load_eagle3(draft, target, build, weights, **options)
    return load_draft(draft, target, load_plan.architecture, build, weights, **options)
