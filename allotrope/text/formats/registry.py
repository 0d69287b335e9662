"""All formats by name, the names that vLLM gives its parsers, and the choice for a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allotrope.errors import ConfigError
from allotrope.text.formats import (
    deepseek_v3,
    dsml,
    gemma4,
    glm45,
    harmony,
    hermes,
    kimi_k2,
    llama3,
    mimo,
    minimax_m2,
    mistral,
    qwen3_coder,
    think,
)
from allotrope.text.formats.format import MessageFormat
from allotrope.text.formats.parser import MessageParser, make_parser

FORMATS: dict[str, MessageFormat] = {
    one.name: one
    for one in (
        hermes.FORMAT,
        qwen3_coder.FORMAT,
        glm45.FORMAT,
        deepseek_v3.FORMAT,
        deepseek_v3.FORMAT_31,
        dsml.FORMAT,
        kimi_k2.FORMAT,
        harmony.FORMAT,
        minimax_m2.FORMAT,
        gemma4.FORMAT,
        mistral.FORMAT,
        llama3.JSON,
        llama3.PYTHONIC,
        mimo.FORMAT,
        think.FORMAT,
    )
}
# vLLM's names of parsers of tool calls.
TOOL_PARSERS = {
    "hermes": "hermes",
    "qwen3_json": "hermes",
    "qwen3_coder": "qwen3_coder",
    "qwen3_xml": "qwen3_coder",
    "glm45": "glm45",
    "glm47": "glm45",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v31",
    "deepseek_v32": "dsml",
    "deepseek_v4": "dsml",
    "kimi_k2": "kimi_k2",
    "openai": "harmony",
    "minimax_m2": "minimax_m2",
    "gemma4": "gemma4",
    "mistral": "mistral",
    "llama3_json": "llama3_json",
    "llama4_json": "llama3_json",
    "pythonic": "pythonic",
    "llama4_pythonic": "pythonic",
    "mimo": "mimo",
}
# vLLM's names of parsers of reasoning.
REASONING_PARSERS = {
    "deepseek_r1": "think",
    "deepseek_v3": "think",
    "deepseek_v4": "think",
    "qwen3": "think",
    "glm45": "think",
    "glm47": "think",
    "kimi_k2": "think",
    "minimax_m2": "think",
    "mimo": "think",
    "openai_gptoss": "harmony",
    "gemma4": "gemma4",
    "mistral": "mistral",
}


@dataclass(frozen=True)
class Choice:
    """The formats of a checkpoint's tool calls and of its reasoning; None: unknown, or it has none. `reason`: why."""

    tool: MessageFormat | None
    reasoning: MessageFormat | None
    reason: str

    @property
    def reasoning_end(self) -> str | None:
        """The text that ends reasoning."""
        return None if self.reasoning is None else self.reasoning.reasoning_end

    def reasoning_is_open(self, prompt_text: str) -> bool:
        """Whether a rendered prompt ends inside reasoning."""
        return self.reasoning is not None and self.reasoning.reasoning_is_open(prompt_text)

    def parser(
        self,
        *,
        tools: bool | Sequence[Mapping[str, Any]],
        reasoning: bool,
        prompt_opens_reasoning: bool = False,
        special_tokens: Iterable[str] = (),
    ) -> MessageParser:
        """The parser of one message, with the calls of one format and the reasoning of the other.

        The arguments are those of `MessageFormat.parser`. What has no format stays text.
        """
        return make_parser(
            self.reasoning if reasoning else None,
            self.tool if tools else None,
            tools=() if isinstance(tools, bool) else tools,
            prompt_opens_reasoning=prompt_opens_reasoning,
            special_tokens=special_tokens,
        )


def by_name(name: str) -> MessageFormat:
    """The format that has this name here. Raises `ConfigError` if none has."""
    return _find(name, {one: one for one in FORMATS}, "format")


def by_tool_parser(name: str) -> MessageFormat:
    """The format of `--tool-call-parser name`: a name of ours, or vLLM's. Raises `ConfigError` if none has it."""
    ours = {one.name: one.name for one in FORMATS.values() if one.tools or one.channels}
    return _find(name, ours | TOOL_PARSERS, "--tool-call-parser")


def by_reasoning_parser(name: str) -> MessageFormat:
    """The format of `--reasoning-parser name`: a name of ours, or vLLM's. Raises `ConfigError` if none has it."""
    ours = {one.name: one.name for one in FORMATS.values() if one.reasoning or one.channels}
    return _find(name, ours | REASONING_PARSERS, "--reasoning-parser")


def _find(name: str, names: Mapping[str, str], what: str) -> MessageFormat:
    if name not in names:
        raise ConfigError(f"{what} {name!r} is unknown; use one of {', '.join(sorted(names))}.")
    return FORMATS[names[name]]


def _has(*texts: str) -> Callable[[str], bool]:
    return lambda template: all(text in template for text in texts)


# What a template with a format's calls has in it, the most particular first.
_TOOL_TEMPLATES: list[tuple[str, Callable[[str], bool]]] = [
    ("harmony", _has("<|channel|>", "<|message|>")),
    ("dsml", _has("｜DSML｜")),
    ("deepseek_v3", _has("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", _has("<｜tool▁calls▁begin｜>")),
    ("kimi_k2", _has("<|tool_calls_section_begin|>")),
    ("minimax_m2", _has("<minimax:tool_call>")),
    ("gemma4", _has("<|tool_call>")),
    ("glm45", _has("<tool_call>", "<arg_key>")),
    ("qwen3_coder", _has("<tool_call>", "<function=", "<parameter=")),
    ("mistral", _has("[TOOL_CALLS]")),
    ("hermes", _has("<tool_call>", "arguments")),
    ("pythonic", _has("<|python_start|>")),
    ("pythonic", _has("[func_name1(")),
    ("llama3_json", _has("<|python_tag|>")),
    ("llama3_json", _has("tools", '"parameters": dictionary')),
]
_REASONING_TEMPLATES: list[tuple[str, Callable[[str], bool]]] = [
    ("harmony", _has("<|channel|>", "<|message|>")),
    ("gemma4", _has("<|channel>")),
    ("mistral", _has("[THINK]")),
    ("think", _has("</think>")),
    ("think", _has("<think>")),
]
# What architectures write where the checkpoint has no template, or the template does not say: (name's beginning, format
# of calls, format of reasoning).
_ARCHITECTURES = [
    ("DeepseekV32", "dsml", "think"),
    ("DeepseekV4", "dsml", "think"),
    ("GptOss", "harmony", "harmony"),
    ("Kimi", "kimi_k2", "think"),
    ("Glm4Moe", "glm45", "think"),
    ("GlmMoeDsa", "glm45", "think"),
    ("MiniMaxM2", "minimax_m2", "think"),
    ("Gemma4", "gemma4", "gemma4"),
    ("MiMo", "mimo", "think"),
    ("Qwen3_5", "qwen3_coder", "think"),
]


def for_checkpoint(chat_template: str | None, architectures: Sequence[str] = ()) -> Choice:
    """The formats of a checkpoint: by what its chat template writes, else by its architecture.

    `architectures`: the config's list. `Choice.reason` is for the log.
    """
    template = chat_template or ""
    names = " ".join(architectures) or "unknown"
    tool = next((name for name, matches in _TOOL_TEMPLATES if matches(template)), None)
    reasoning = next((name for name, matches in _REASONING_TEMPLATES if matches(template)), None)
    tool_reason = reasoning_reason = "by the chat template"
    if tool == "qwen3_coder" and any(one.startswith("MiMo") for one in architectures):
        tool, tool_reason = "mimo", f"by the chat template and architecture {names}"
    known = [row for row in _ARCHITECTURES if any(one.startswith(row[0]) for one in architectures)]
    if known and tool is None:
        tool, tool_reason = known[0][1], f"by architecture {names}"
    # A template without reasoning is that of a model without.
    if known and reasoning is None and not template:
        reasoning, reasoning_reason = known[0][2], f"by architecture {names}"
    unknown = "unknown (neither the chat template nor the architecture says)"
    reason = "; ".join(
        (
            f"tool calls: {tool}, {tool_reason}" if tool else f"tool calls: {unknown}",
            f"reasoning: {reasoning}, {reasoning_reason}" if reasoning else "reasoning: none in the chat template",
        )
    )
    return Choice(FORMATS[tool] if tool else None, FORMATS[reasoning] if reasoning else None, reason)
