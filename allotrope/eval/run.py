"""Carries out an evaluation: every mode asks the same items, and each is held to the baseline's interval."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import torch

from allotrope.checkpoint.checkpoint import Checkpoint, locate, tokenizer_path
from allotrope.config import EngineConfig
from allotrope.engine.load_plan import LoadPlan, resolve_load_plan
from allotrope.engine.planning.planned_backends import planned_backends
from allotrope.engine.ranks.distributed_executor import refuse_devices
from allotrope.errors import ConfigError, EngineDead, InvalidRequest, ModelError, refuse_options
from allotrope.eval.answers import Answers, ask_engine
from allotrope.eval.figures import Measured, measure
from allotrope.eval.items import Items, make_items
from allotrope.eval.options import EvalOptions
from allotrope.eval.report import Report, Skipped, read_report
from allotrope.layers.parallel import Parallel
from allotrope.text.tokenizer import Tokenizer, load_tokenizer
from allotrope.verify.execution_modes import NotExercised

Log = Callable[[str], None]


def evaluate(config: EngineConfig, options: EvalOptions, log: Log = lambda text: None) -> Report:
    """Evaluate `config.model`. `log`: is told what is being done.

    Raises ConfigError or ModelError if something cannot be measured, before the first item runs where that is known,
    and EngineDead if the engine fails in a mode and is measured in none.
    """
    started = time.monotonic()
    load_plan = resolve_load_plan(config)
    tokenizer = load_tokenizer(tokenizer_path(config, load_plan.checkpoint))
    _check(config, options)
    log("drawing items")
    items = make_items(options, tokenizer, config.seed, load_plan.max_model_len)
    stored = read_baseline(options, items)
    runs: list[Measured] = []
    skipped: list[Skipped] = []
    first: Answers | None = None
    lost: str | None = None
    for name in options.named_modes():
        if reason := lost or _no_devices(config, name):
            skipped.append(Skipped(name, reason))
            continue
        try:
            answers = ask_engine(config, items, name, log)
        except NotExercised as reason:
            skipped.append(Skipped(name, str(reason)))
            continue
        except (ConfigError, ModelError, InvalidRequest):
            raise
        except Exception as error:
            # The border of one mode: that the engine fails in it is a finding, and the others are still to be run.
            skipped.append(Skipped(name, f"{type(error).__name__}: {error}", broken=True))
            if isinstance(error, torch.AcceleratorError):
                lost = f"the GPU cannot be used any more after {name} failed"
            continue
        first = first or answers
        runs.append(measure(items, answers))
    if first is None:
        why = "nothing was measured: " + "; ".join(f"{one.name}: {one.reason}" for one in skipped) + "."
        raise EngineDead(why) if any(one.broken for one in skipped) else ConfigError(why)
    baseline = stored
    if options.baseline == "transformers":
        baseline = _transformers(config, options, load_plan, tokenizer, items, first, log)
    return Report(
        model=config.model,
        architecture=_architecture(load_plan.checkpoint),
        engine=_engine(config, load_plan),
        items=describe_items(options, items),
        items_sha256=items.sha256,
        baseline=baseline,
        modes=tuple(runs),
        skipped=tuple(skipped),
        backends=tuple(str(one) for one in planned_backends(load_plan)[0]),
        seconds=time.monotonic() - started,
    )


def _check(config: EngineConfig, options: EvalOptions) -> None:
    """Refuse what cannot come to a figure before weights are read."""
    wrong = []
    if options.baseline == "transformers" and config.load_format == "dummy":
        wrong.append("load_format='dummy' has no weights that Transformers could read")
    if options.baseline == "transformers" and options.reference is not None:
        locate(options.reference)
    if "two-ranks" in options.named_modes() and config.layout.size > 1:
        wrong.append(f"the mode two-ranks sets tensor_parallel_size itself; {config.layout} was given")
    refuse_options(wrong)
    if "two-ranks" in options.named_modes():
        # Whether layers can be shared by two is known before they are loaded.
        resolve_load_plan(dataclasses.replace(config, tensor_parallel_size=2), Parallel(0, 2))


def _no_devices(config: EngineConfig, mode: str) -> str | None:
    """Why this machine cannot run a mode that sets the number of ranks itself."""
    if mode == "two-ranks":
        try:
            refuse_devices(dataclasses.replace(config, tensor_parallel_size=2))
        except ConfigError as error:
            return str(error)
    return None


def read_baseline(options: EvalOptions, items: Items) -> Measured | None:
    """The first mode of the report that is the baseline. Raises ConfigError if it measured other items."""
    if options.baseline in (None, "transformers"):
        return None
    path = Path(str(options.baseline))
    measured, sha256 = read_report(path)
    if sha256 != items.sha256:
        raise ConfigError(
            f"bad options: baseline={options.baseline!r} measured other items (sha256 {sha256[:12]}, here "
            f"{items.sha256[:12]}); give the same --tasks, --items, --lengths, --text, --seed and tokenizer."
        )
    return measured


def _transformers(
    config: EngineConfig,
    options: EvalOptions,
    load_plan: LoadPlan,
    tokenizer: Tokenizer,
    items: Items,
    drafts: Answers,
    log: Log,
) -> Measured:
    from allotrope.eval.transformers_answers import ask_transformers

    return measure(items, ask_transformers(config, options.reference, load_plan, tokenizer, items, drafts, log))


def _architecture(checkpoint: Checkpoint) -> str:
    return str(next(iter(checkpoint.config.get("architectures") or ["?"])))


def _engine(config: EngineConfig, load_plan: LoadPlan) -> str:
    build = load_plan.build
    kinds = [str(kind).removeprefix("torch.") for kind in (build.dtype, build.kv_dtype, build.state_dtype)]
    ranks = f", {config.layout.size} ranks" if config.layout.size > 1 else ""
    asked = "".join(f", {option}" for option in (config.attention_backend, config.op_backend) if option)
    return f"{kinds[0]} with {kinds[1]} caches and {kinds[2]} states on {build.device}{ranks}{asked}"


def describe_items(options: EvalOptions, items: Items) -> str:
    """What was asked, in words."""
    parts = [f"{len(asked)} of {task}" for task, asked in items.tasks.items()]
    if items.text is not None:
        text = items.text
        parts.append(
            f"{len(text.chunks)} chunks of {options.text_length} tokens of {text.source} (sha256 {text.sha256[:12]})"
        )
    return f"{', '.join(parts)}; prompts of {options.lengths} bytes and more"
