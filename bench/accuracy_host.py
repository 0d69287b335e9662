"""The items of `allotrope eval`, asked of vLLM or SGLang with the plugin; figures and report are the same.

    PYTHONPATH=. path/to/host/bin/python bench/accuracy_host.py vllm MODEL --dtype float32 --modes all --json vllm.json
    ... bench/accuracy_host.py sglang MODEL --dtype bfloat16 --kv-cache-dtype fp8 --baseline float32.json

Runs in the host's Python environment, with the plugin in it. Each mode has a process of its own, which is killed after
--limit seconds: one that ends badly is a finding, and the others still run. A mode that the host or the plugin refuses
is named with its reason.

--baseline is a report that `allotrope eval --json` or this command wrote; options of items mean what they mean there,
and equal options ask equal items. Exit status: 0 if all figures lie in the intervals of what they are held to, 1 if one
does not or the host fails in a mode, 2 if nothing could be measured.

Every mode but `warm` runs without prefix caching. `preempted` holds vLLM's blocks but those of the longest request, and
has SGLang retract a request every few steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # The script's own folder would hide packages named as its folders are, such as `kernels`.
    sys.path[0] = str(ROOT)

from allotrope.architectures.registry import read_spec  # noqa: E402
from allotrope.checkpoint.checkpoint import locate, open_checkpoint  # noqa: E402
from allotrope.config import EngineConfig  # noqa: E402
from allotrope.engine.load_plan import resolve_load_plan  # noqa: E402
from allotrope.engine.ranks.distributed_executor import refuse_devices  # noqa: E402
from allotrope.errors import AllotropeError, ConfigError, EngineDead, ModelError  # noqa: E402
from allotrope.eval.figures import Measured, measure  # noqa: E402
from allotrope.eval.items import Items, make_items  # noqa: E402
from allotrope.eval.options import EvalOptions, ModeName  # noqa: E402
from allotrope.eval.report import Report, Skipped, write_json  # noqa: E402
from allotrope.eval.run import describe_items, read_baseline  # noqa: E402
from allotrope.layers.parallel import Parallel  # noqa: E402
from allotrope.text.tokenizer import load_tokenizer  # noqa: E402
from bench.accuracy.apart import Ended, Job, environment_of, run_apart  # noqa: E402
from bench.accuracy.ask import Host  # noqa: E402

# Options of an evaluation that are asked for in the same way.
ITEM_OPTIONS = {
    "tasks": str,
    "items": int,
    "lengths": str,
    "modes": str,
    "text": Path,
    "text_length": int,
    "json": Path,
}
# Sequences that run together. vLLM's own number captures graphs of sizes that no item reaches.
MAX_NUM_SEQS = 64
# What SGLang calls the types of cache entries that have another name in vLLM.
SGLANG_KV_DTYPES = {"fp8": "fp8_e4m3", "bfloat16": "bf16"}


def vllm_options(options: argparse.Namespace, tokenizer: str, mode: ModeName, device: str) -> list[dict[str, Any]]:
    """Options of `vllm.LLM` in a mode; each is tried until one exercises it. Those of --options come last."""
    from bench.accuracy.in_vllm import FORCED_TOKENS, SETTINGS

    plain: dict[str, Any] = {
        "dtype": options.dtype,
        "tokenizer": tokenizer,
        "kv_cache_dtype": options.kv_cache_dtype,
        "mamba_ssm_cache_dtype": options.state_dtype,
        "seed": options.seed,
        "max_num_seqs": MAX_NUM_SEQS,
        "disable_log_stats": False,
        "logits_processors": [FORCED_TOKENS],
        # vLLM captures nothing on a CPU, and our models are not compiled.
        "enforce_eager": device == "cpu",
    }
    if device == "cuda":
        # Several vLLM share a GPU: none shall ask for most of it.
        plain |= {"kv_cache_memory_bytes": options.kv_cache_memory_bytes, "gpu_memory_utilization": 0.01}
    if ours := our_options(options):
        plain["additional_config"] = {"allotrope": ours}
    return [plain | settings | options.options for settings in SETTINGS[mode]]


def sglang_options(options: argparse.Namespace, mode: ModeName, device: str, longest: int) -> list[dict[str, Any]]:
    """As `vllm_options`, of SGLang's engine. Text of answers is ours to make."""
    from bench.accuracy.in_sglang import settings

    plain: dict[str, Any] = {
        "dtype": options.dtype,
        "skip_tokenizer_init": True,
        "kv_cache_dtype": SGLANG_KV_DTYPES.get(options.kv_cache_dtype, options.kv_cache_dtype),
        "random_seed": options.seed,
        "max_running_requests": MAX_NUM_SEQS,
        # Room for all of them; on a CPU, SGLang takes a share of all memory otherwise.
        "max_total_tokens": -(-MAX_NUM_SEQS * longest // 1024) * 1024,
        "max_mamba_cache_size": 4 * MAX_NUM_SEQS,
        # Plans of steps with prompts are made on the host.
        "disable_prefill_cuda_graph": True,
    }
    if options.state_dtype != "auto":
        plain["mamba_ssm_dtype"] = options.state_dtype
    if ours := our_options(options):
        plain["json_model_override_args"] = json.dumps({"allotrope": ours})
    return [plain | one | options.options for one in settings(str(locate(options.model)), mode)]


def our_options(options: argparse.Namespace) -> dict[str, str]:
    """Those of the plugin itself."""
    ours = {name: getattr(options, name) for name in ("attention_backend", "quantized_weights")}
    return {name: value for name, value in ours.items() if value is not None}


def evaluate(options: argparse.Namespace, wanted: EvalOptions) -> Report:
    """Ask the host in every mode. Raises ConfigError or ModelError if nothing can be measured, EngineDead if it failed
    in a mode and was measured in none."""
    started = time.monotonic()
    checkpoint = open_checkpoint(options.model)
    _, spec = read_spec(checkpoint.config, checkpoint.source)
    path = checkpoint.tokenizer_path if options.tokenizer is None else locate(options.tokenizer, with_weights=False)
    if path is None:
        raise ModelError(checkpoint.source, ["it brings no tokenizer; give one with --tokenizer"])
    items = make_items(wanted, load_tokenizer(str(path)), options.seed, spec.context)
    baseline = read_baseline(wanted, items)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs: list[Measured] = []
    skipped: list[Skipped] = []
    host: Host | None = None
    for mode in wanted.named_modes():
        ended = run_mode(options, str(path), items, mode, device)
        print(f"{mode}: {ended.outcome}{ended.reason and f': {ended.reason}'}", file=sys.stderr, flush=True)
        if ended.answers is not None:
            host = host or ended.host
            runs.append(measure(items, ended.answers))
        else:
            reason = f"refused: {ended.reason}" if ended.outcome == "refused" else ended.reason
            skipped.append(Skipped(mode, reason, broken=ended.outcome == "failed"))
    if host is None:
        why = "nothing was measured: " + "; ".join(f"{one.name}: {one.reason}" for one in skipped) + "."
        raise EngineDead(why) if any(one.broken for one in skipped) else ConfigError(why)
    return Report(
        model=options.model,
        architecture=str(next(iter(checkpoint.config.get("architectures") or ["?"]))),
        engine=f"{host.version} with allotrope: {host.model}",
        items=describe_items(wanted, items),
        items_sha256=items.sha256,
        baseline=baseline,
        modes=tuple(runs),
        skipped=tuple(skipped),
        backends=host.backends,
        seconds=time.monotonic() - started,
    )


def run_mode(options: argparse.Namespace, tokenizer: str, items: Items, mode: ModeName, device: str) -> Ended:
    """The first settings that exercise a mode, or what the last ones came to."""
    if mode == "two-ranks":
        config = EngineConfig(model=options.model, device=device, tensor_parallel_size=2)
        try:
            refuse_devices(config)
            # Whether layers can be shared by two. A refusal by the host's ranks would not say why.
            resolve_load_plan(dataclasses.replace(config, device="cpu", dtype="float32"), Parallel(0, 2))
        except (ConfigError, ModelError) as error:
            return Ended("refused", str(error))
    if mode == "speculated":
        return Ended("refused", "no drafts are asked of a host here")
    model = str(locate(options.model))
    ended = Ended("not exercised", "no settings")
    tried = (
        vllm_options(options, tokenizer, mode, device)
        if options.host == "vllm"
        else sglang_options(options, mode, device, items.longest)
    )
    for settings in tried:
        environment = environment_of(options.host, device, mode, settings.get("tp_size", 1))
        job = Job(options.host, model, tokenizer, settings, items, mode, environment)
        ended = run_apart(job, options.limit)
        if ended.outcome != "not exercised":
            break
    return ended


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("host", choices=("vllm", "sglang"), help="whose Python environment this is")
    parser.add_argument("model", help="directory of safetensors files")
    parser.add_argument("--tokenizer", help="tokenizer directory or file, where it is not the model's own")
    parser.add_argument("--dtype", default="auto", help="type of weights and activations (auto)")
    parser.add_argument("--kv-cache-dtype", default="auto", help="type of the cached rows, as vLLM names it (auto)")
    parser.add_argument("--state-dtype", default="auto", help="type of recurrent states (auto)")
    parser.add_argument(
        "--kv-cache-memory-bytes", type=int, default=1 << 30, help="of the caches; on a CPU always 1 GiB (1 GiB)"
    )
    parser.add_argument("--attention-backend", help="as of `allotrope serve`, such as mha=reference")
    parser.add_argument("--quantized-weights", help="auto, keep or dequantize")
    parser.add_argument("--seed", type=int, default=0, help="of the items (0)")
    parser.add_argument(
        "--options", type=json.loads, default={}, help="JSON object of further options of vllm.LLM or SGLang's Engine"
    )
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds of a mode (1800)")
    parser.add_argument("--baseline", help="report to hold the figures to (the first mode)")
    for field in dataclasses.fields(EvalOptions):
        if field.name in ITEM_OPTIONS:
            flag, kind = f"--{field.name.replace('_', '-')}", ITEM_OPTIONS[field.name]
            parser.add_argument(flag, type=kind, default=field.default, help=field.metadata["help"])
    options = parser.parse_args(arguments)
    if options.baseline == "transformers":
        parser.error("--baseline transformers: give a report of `allotrope eval --baseline transformers --json`")
    if not isinstance(options.options, dict):
        parser.error(f"--options {options.options!r}: give a JSON object")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        asked = {name: getattr(options, name) for name in ITEM_OPTIONS}
        report = evaluate(options, EvalOptions(baseline=options.baseline, **asked))
    except AllotropeError as error:
        print(f"accuracy_host: error: {error}", file=sys.stderr)
        return 1 if isinstance(error, EngineDead) else 2
    print("\n".join([*report.heading(), *figure_lines(report), *report.notes()]))
    if options.json is not None:
        write_json(options.json, report)
        print(f"wrote {options.json}")
    print("\n".join(report.verdict()))
    return int(not report.passed)


def figure_lines(report: Report) -> list[str]:
    """One line a figure, with its interval, by mode."""
    lines = []
    for run in report.runs():
        for figure in run.figures:
            one = figure.estimate
            lines.append(f"{run.name}: {figure.name}: {one.value:.4f} [{one.low:.4f}, {one.high:.4f}] {figure.unit}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
