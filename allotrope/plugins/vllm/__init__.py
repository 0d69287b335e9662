"""Allotrope's models and attention inside vLLM, which keeps its scheduler, cache memory, sampler and server.

`register` is vLLM's general-plugin entry point. It runs in every vLLM process, so it touches no model, no kernel and no
device; and it never raises: whatever is wrong is one line, and vLLM goes on with its own models.
"""

from __future__ import annotations

import logging

SWITCH = "ALLOTROPE_VLLM"
# Architectures with recurrent states, of which vLLM wants to know before there is a config. A test holds this true.
STATEFUL = frozenset(
    """
    KimiLinearForCausalLM Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration
    Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration
    """.split()
)

# A name under vLLM's own, so that its handlers and levels hold.
log = logging.getLogger("vllm.allotrope")


def register() -> None:
    """Put Allotrope's architectures into vLLM's model registry; a second call changes nothing.

    `ALLOTROPE_VLLM=0` leaves vLLM as it is.
    """
    from allotrope.plugins.registration import register_unless
    from allotrope.plugins.vllm.contract import refusals

    register_unless("vLLM", SWITCH, log, refusals, _register_models)


def _register_models() -> None:
    from vllm.model_executor.models import ModelRegistry

    from allotrope.architectures.registry import ARCHITECTURES
    from allotrope.plugins.vllm.contract import DRAFT_HEADS, serves_draft_heads

    # Names only: vLLM imports the module when a checkpoint asks for one of them.
    for architecture in ARCHITECTURES:
        kind = "HostedHybridModel" if architecture in STATEFUL else "HostedModel"
        ModelRegistry.register_model(architecture, f"{__name__}.model:{kind}")
    # The target's class refuses a draft head elsewhere.
    for name in DRAFT_HEADS if serves_draft_heads() else ():
        ModelRegistry.register_model(name, f"{__name__}.draft:HostedDraft")
