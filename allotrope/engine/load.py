"""From a load plan to the model of one rank. Must not know caches or steps."""

from __future__ import annotations

import logging

from allotrope.engine.load_plan import LoadPlan
from allotrope.layers.decoder import Decoder
from allotrope.loading.decoder import load_decoder, make_decoder

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
