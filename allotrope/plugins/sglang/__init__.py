"""Allotrope's models and attention inside SGLang, which keeps its scheduler, prefix cache, sampler and server.

`register` is SGLang's general-plugin entry point. It runs in every SGLang process, so it touches no model, no kernel
and no device; and it never raises: whatever is wrong is one line, and SGLang goes on with its own models.
"""

from __future__ import annotations

import logging
import os

SWITCH = "ALLOTROPE_SGLANG"
# Names of ours in SGLang: of its registries, and of models without and with recurrent states.
NAME = "allotrope"
PLAIN, STATEFUL = "AllotropeForCausalLM", "AllotropeHybridForCausalLM"
# SGLang imports the models of this package when it looks for one, and its own only where they are needed.
PACKAGE = "SGLANG_EXTERNAL_MODEL_PACKAGE"

log = logging.getLogger("sglang.allotrope")


def register() -> None:
    """Put Allotrope's config reader, models and attention backends into SGLang's registries; a second call changes
    nothing.

    `ALLOTROPE_SGLANG=0` leaves SGLang as it is.
    """
    from allotrope.plugins.registration import register_unless
    from allotrope.plugins.sglang.contract import refusals

    register_unless("SGLang", SWITCH, log, refusals, _register)


def _register() -> None:
    from sglang.srt.arg_groups.overrides import register_model_override
    from sglang.srt.configs.linear_attn_model_registry import (
        LinearAttnModelSpec,
        get_linear_attn_spec_by_arch,
        register_linear_attn_model,
    )
    from sglang.srt.configs.model_config_parser_registry import register_model_config_parser
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    from allotrope.plugins.sglang.config import ConfigParser, HostedHybridConfig, declare_arguments

    if get_linear_attn_spec_by_arch(STATEFUL) is not None:
        return
    _offer_models()
    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_attention_backend)
    for architecture in (PLAIN, STATEFUL):
        register_model_override(architecture)(declare_arguments)
    states = LinearAttnModelSpec(
        config_class=HostedHybridConfig,
        backend_class_name=f"{__name__}.backend.StateBackend",
        arch_names=[STATEFUL],
        uses_mamba_radix_cache=True,
        support_mamba_cache=True,
    )
    register_linear_attn_model(states)
    # The reader of plain checkpoints, which this one is for architectures that are not ours.
    register_model_config_parser("hf")(ConfigParser)


def _offer_models() -> None:
    """Have SGLang find our models; by its registry where the user names another package of models."""
    if os.environ.setdefault(PACKAGE, __name__) != __name__:
        from sglang.srt.models.registry import ModelRegistry

        ModelRegistry.register(__name__, overwrite=True)


def _attention_backend(runner: object) -> object:
    from allotrope.plugins.sglang.backend import HostedBackend

    return HostedBackend(runner)
