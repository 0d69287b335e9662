"""Formats help: options in groups, examples below them, colours on a terminal.

Owns the groups, the examples and the colours. It must not know how an option is read.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from allotrope.logs import log_info

# Heading -> fields whose flags are under it. The flag of another field is under the name of its config.
GROUPS: dict[str, tuple[str, ...]] = {
    "Model": (
        "tokenizer", "revision", "hf_overrides", "load_format", "dtype", "quantization", "quantized_weights",
        "quantized_activations", "device", "seed", "threads", "generation_config",
    ),
    "Ranks": (
        "tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size", "enable_expert_parallel",
        "expert_placement", "num_redundant_experts", "expert_load_file", "distributed_executor_backend",
        "distributed_address", "watchdog_seconds",
    ),
    "Memory and caches": (
        "max_model_len", "kv_cache_dtype", "state_dtype", "page_size", "kv_cache_memory_bytes", "memory_utilization",
        "enable_prefix_caching",
    ),
    "Steps": (
        "max_num_seqs", "max_num_batched_tokens", "max_num_waiting", "scheduler_reserve_full_isl", "attention_backend",
        "op_backend", "cuda_graphs", "async_scheduling", "step_log_seconds", "structured_outputs_backend",
        "speculative_config",
    ),
}  # fmt: skip
GENERAL = "General"
EXAMPLES: dict[str, tuple[str, ...]] = {
    "allotrope": ("allotrope chat MODEL", "allotrope serve MODEL --port 8000", "allotrope plan MODEL --memory 80GiB"),
    "serve": (
        "allotrope serve openai/gpt-oss-20b",
        "allotrope serve ./model --served-model-name mine --max-model-len 32k --api-key KEY",
        "allotrope serve ./model -tp 2 -v",
    ),
    "generate": (
        "allotrope generate ./model -p 'Once upon a time' --max-tokens 50",
        "allotrope generate model.gguf --chat -p 'What is a prime?' --temperature 0.7",
    ),
    "chat": ("allotrope chat model.gguf", "allotrope chat --url http://127.0.0.1:8000"),
    "batch": ("allotrope batch ./model requests.jsonl --output answers.jsonl",),
    "plan": ("allotrope plan ./model --memory 80GiB --tensor-parallel-size 2",),
    "verify": ("allotrope verify ./model", "allotrope verify ./model --sweep"),
    "eval": (
        "allotrope eval ./model --baseline transformers --dtype float32",
        "allotrope eval ./model --modes all --tasks text,recall --lengths 1024,16384",
    ),
    "latency": ("allotrope bench latency ./model --batch-size 8 --input-len 256 --output-len 64",),
    "throughput": ("allotrope bench throughput ./model --num-prompts 64",),
    "bench serve": ("allotrope bench serve --url http://127.0.0.1:8000 --request-rate 4 --plot run.png",),
}
_BOLD, _NAME, _PLAIN = "\x1b[1m", "\x1b[36m", "\x1b[0m"


def heading_of(field: str, config: str) -> str:
    """The heading of a field's flag. `config`: name of the field's class."""
    own = next((heading for heading, fields in GROUPS.items() if field in fields), None)
    return own or config.removesuffix("Config").removesuffix("Options")


def colours() -> bool:
    """Whether standard output is a terminal with colours (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(text: str) -> str:
    """`text` with bold headings, and coloured names of options and commands."""
    text = re.sub(r"^(\S[^\n]*:)$|^(Usage:)", lambda match: f"{_BOLD}{match[0]}{_PLAIN}", text, flags=re.MULTILINE)
    return re.sub(r"^(  )(-\S.*?|[a-z]+)(?=  |$)", rf"\1{_NAME}\2{_PLAIN}", text, flags=re.MULTILINE)


def _examples(ctx: Any, formatter: Any) -> None:
    words = ctx.command_path.split()
    examples = EXAMPLES.get(" ".join(words[-2:])) or EXAMPLES.get(words[-1], ())
    if examples:
        with formatter.section("Examples"):
            for line in examples:
                formatter.write(f"{' ' * formatter.current_indent}{line}\n")


class HelpGroup(TyperGroup):
    """A group of commands. Without a command it shows its help."""

    def get_help(self, ctx: Any) -> str:
        text = super().get_help(ctx)
        return painted(text) if colours() else text

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _examples(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args:
            typer.echo(self.get_help(ctx))
            raise typer.Exit(2)
        return super().parse_args(ctx, args)


class HelpCommand(TyperCommand):
    """A command that also accepts --verbose and shows its options in groups."""

    def get_help(self, ctx: Any) -> str:
        text = super().get_help(ctx)
        return painted(text) if colours() else text

    def format_options(self, ctx: Any, formatter: Any) -> None:
        arguments: list[Any] = []
        groups: dict[str, list[Any]] = {heading: [] for heading in ("Command", *GROUPS)}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                arguments.append(record)
            else:
                heading = getattr(parameter, "rich_help_panel", None) or "Command"
                groups.setdefault(GENERAL if parameter.name == "help" else heading, []).append(record)
        groups.setdefault(GENERAL, []).extend(_GENERAL_RECORDS)
        # The options of every command come last.
        groups[GENERAL] = groups.pop(GENERAL)
        for heading, records in (("Arguments", arguments), *groups.items()):
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _examples(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args` without --debug and --verbose, at any position. `allotrope.cli` reads --debug."""
        with_value = {name for p in self.params for name in p.opts if not getattr(p, "is_flag", True)}
        end = args.index("--") if "--" in args else len(args)
        kept = []
        for before, arg in zip(["", *args], args[:end], strict=False):
            if before in with_value or arg not in ("--debug", "-v", "--verbose"):
                kept.append(arg)
            elif arg != "--debug":
                log_info()
        return super().parse_args(ctx, [*kept, *args[end:]])


_GENERAL_RECORDS = [
    ("-v, --verbose", "Log what happens, such as the plan of the memory and the phases of the start."),
    ("--debug", "Show the traceback of an error."),
]
