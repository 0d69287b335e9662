"""The architectures by their names in config.json. A new model needs one row here and one file in this folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from allotrope.checkpoint.read_config import ConfigReader
from allotrope.checkpoint.weights import Rule
from allotrope.errors import ModelError
from allotrope.layers.decoder import Decoder
from allotrope.layers.draft_spec import DraftSpec
from allotrope.layers.model_spec import ModelSpec


def no_draft(config: ConfigReader) -> None:
    """Of an architecture whose checkpoints have no draft head."""


def no_rules(spec: ModelSpec, draft: DraftSpec) -> Sequence[Rule]:
    """Of an architecture whose checkpoints have no draft head."""
    return ()


@dataclass(frozen=True)
class Architecture:
    """`read`: config to spec. `rules`: weight rules of the checkpoint's names. `tiny`: a small config for tests.

    Of models whose checkpoints have a draft head: `draft`: config to its spec, None for a config without one.
    `draft_rules`: weight rules of its tensors, from the spec of the model and its own. `tiny_draft`: as `tiny`, with a
    draft head.
    """

    read: Callable[[ConfigReader], ModelSpec]
    rules: Callable[[ModelSpec], Sequence[Rule]]
    tiny: Callable[[], dict[str, Any]]
    decoder: type[Decoder] = Decoder
    draft: Callable[[ConfigReader], DraftSpec | None] = no_draft
    draft_rules: Callable[[ModelSpec, DraftSpec], Sequence[Rule]] = no_rules
    tiny_draft: Callable[[], dict[str, Any]] | None = None


ARCHITECTURES: dict[str, str] = {
    "DeepseekV2ForCausalLM": "deepseek_v2:DEEPSEEK_V2",
    "DeepseekV32ForCausalLM": "deepseek_v32:DEEPSEEK_V32",
    "DeepseekV3ForCausalLM": "deepseek_v3:DEEPSEEK_V3",
    "DeepseekV4ForCausalLM": "deepseek_v4:DEEPSEEK_V4",
    "Gemma3ForCausalLM": "gemma3:GEMMA3",
    "Gemma3ForConditionalGeneration": "gemma3:GEMMA3_WRAPPER",
    "Gemma4ForCausalLM": "gemma4:GEMMA4",
    "Gemma4ForConditionalGeneration": "gemma4:GEMMA4_WRAPPER",
    "Glm4MoeForCausalLM": "glm4_moe:GLM4_MOE",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa:GLM_MOE_DSA",
    "GptOssForCausalLM": "gpt_oss:GPT_OSS",
    "KimiK25ForConditionalGeneration": "kimi_k25:KIMI_K25",
    "Kimi_K25ForConditionalGeneration": "kimi_k25:KIMI_K25",
    "KimiLinearForCausalLM": "kimi_linear:KIMI_LINEAR",
    "LlamaForCausalLM": "llama:LLAMA",
    "MiniMaxM2ForCausalLM": "minimax_m2:MINIMAX_M2",
    "MiMoV2FlashForCausalLM": "mimo_v2_flash:MIMO_V2_FLASH",
    "MistralForCausalLM": "llama:MISTRAL",
    "Qwen3ForCausalLM": "qwen3:QWEN3",
    "Qwen3NextForCausalLM": "qwen3_next:QWEN3_NEXT",
    "Qwen3_5ForCausalLM": "qwen3_5:QWEN3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5:QWEN3_5_WRAPPER",
    "Qwen3_5MoeForCausalLM": "qwen3_5:QWEN3_5_MOE",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5:QWEN3_5_MOE_WRAPPER",
    "Qwen3MoeForCausalLM": "qwen3_moe:QWEN3_MOE",
}


def find_architecture(config: dict[str, Any], source: str) -> Architecture:
    """The architecture of a config.json. Raises ModelError with the supported names if it is unknown."""
    names = config.get("architectures") or []
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and name in ARCHITECTURES:
            module, _, row = ARCHITECTURES[name].partition(":")
            architecture = getattr(import_module(f"allotrope.architectures.{module}"), row)
            assert isinstance(architecture, Architecture)
            return architecture
    known = ", ".join(sorted(ARCHITECTURES))
    raise ModelError(source, [f"config architectures={names!r} (supported: {known})"])


def read_spec(config: dict[str, Any], source: str) -> tuple[Architecture, ModelSpec]:
    """Read a config into a spec. Raises ModelError with every value that is missing, wrong or unknown."""
    architecture = find_architecture(config, source)
    reader = ConfigReader(config, source)
    try:
        spec = architecture.read(reader)
    except (ValueError, ZeroDivisionError) as error:
        # The spec refused a value that contradicts others. The reader's own reasons come first.
        reader.refuse(str(error))
        raise ModelError(source, reader.reasons) from error
    reader.finish()
    return architecture, spec


def read_draft(config: dict[str, Any], source: str) -> DraftSpec | None:
    """The draft head that a config names, None without one. Raises ModelError for one that cannot draft."""
    reader = ConfigReader(config, source)
    draft = find_architecture(config, source).draft(reader)
    if reader.reasons:
        raise ModelError(source, reader.reasons)
    return draft
