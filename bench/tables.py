"""A table of docs/results.md that compares engines, made by one command on one host: weights, runs, results.

    python bench/tables.py hosts --work /tmp/hosts --peer-path vllm=SITE sglang=OTHER_SITE
    python bench/tables.py speculation --models gpt_oss qwen3_next --gpus 0 1 --work /tmp/speculation --peer-path SITE
    python bench/tables.py ranks --dry-run

A table is a file of bench/engine/tables: models, commands of bench/engine.py, and the engines' options. Models are
dealt to the GPUs; with `spread`, a GPU that is free takes the next command. On each GPU they load side by side as far
as they fit, and one at a time is measured while the others stand still; on several GPUs nothing loads meanwhile. Each
GPU's commands have cores of their own. An engine that was stopped while it loaded has no time to start in the table,
nor has one that found compiled kernels of another (`shared_caches`). Results of models that are not measured again
stay in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # The script's own folder would hide packages named as its folders are, such as `kernels`.
    sys.path[0] = str(ROOT)

from allotrope.checkpoint.directory import read_safetensors_headers  # noqa: E402
from allotrope.rank_layout import RankLayout  # noqa: E402
from bench.engine.options import host_of  # noqa: E402
from bench.engine.report import HOSTED, OURS  # noqa: E402
from bench.engine.turns import Share, Turn, Waiting, take_turns  # noqa: E402

TABLES, CONFIGS, RESULTS = (ROOT / "bench" / name for name in ("engine/tables", "configs", "results"))
# Each command's SGLang engines have ten ports of their own, also where tables are made on other GPUs of the host.
FIRST_PORT = 29700
PORTS_OF_GPU = 200
# Gigabytes of a GPU that are left to its driver.
SPARE = 4.0
DEFAULT_WORK = Path(tempfile.gettempdir()) / "allotrope-tables"
_print_lock = threading.Lock()


@dataclass(frozen=True)
class Model:
    """What is written by bench/random_weights.py, and how it differs from the others in the table."""

    name: str
    given: Mapping[str, Any]

    def weights(self, work: Path) -> Path:
        return work / "weights" / self.name

    def head(self, work: Path) -> Path | None:
        """Where the EAGLE3 head lies that drafts for it."""
        return work / "weights" / f"{self.name}_eagle3" if "eagle3" in self.given else None


@dataclass(frozen=True)
class Command:
    """A command of bench/engine.py for a model. `name`: of its files."""

    name: str
    model: Model
    engines: Sequence[str]
    arguments: Sequence[str]
    layout: RankLayout


class Table:
    """A file of bench/engine/tables. Raises ValueError for models that it lacks."""

    def __init__(self, name: str, models: Sequence[str] | None) -> None:
        self.given = tomllib.loads((TABLES / f"{name}.toml").read_text())
        known = self.given["models"]
        if unknown := sorted(set(models or ()) - set(known)):
            raise ValueError(f"{', '.join(unknown)}: the table has {', '.join(known)}")
        self.models = [Model(one, known[one]) for one in models or known]

    def commands(self) -> list[Command]:
        """Of every model."""
        return [
            Command(
                f"{model.name}_{number}",
                model,
                one["engines"],
                (*self.given["arguments"], *one.get("arguments", ())),
                RankLayout.named(one.get("layout", "TP1")),
            )
            for model in self.models
            for number, one in enumerate(model.given.get("commands", self.given["commands"]))
        ]

    def options(self, model: Model, engine: str) -> dict[str, Any]:
        """An engine's: those of its host, which our plugin takes as well, then those of the engine alone."""
        kinds = [("options", host_of(engine)), ("options" if engine in HOSTED else "own", engine)]
        found: dict[str, Any] = {}
        for kind, name in kinds:
            for given in (self.given, model.given):
                found |= given.get(kind, {}).get(name, {})
        return found

    def gigabytes(self, command: Command, experts: float, others: float) -> float:
        """Of each GPU, at most: all ranks share the experts, data-parallel ones nothing else for sure. `experts`,
        `others`: gigabytes of the checkpoint."""
        more = command.model.given.get("gigabytes", self.given["gigabytes"])
        weights = experts / command.layout.stage_size + others / command.layout.tensor
        return len(command.engines) * (weights + float(more))


def main(arguments: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        table = Table(options.table, options.models)
    except ValueError as error:
        sys.exit(f"--models: {error}")
    size = table.given["gpus"]
    groups = [options.gpus[first : first + size] for first in range(0, len(options.gpus) - size + 1, size)]
    if not groups:
        sys.exit(f"--gpus: the table {options.table} needs {size}")
    port = FIRST_PORT + PORTS_OF_GPU * options.gpus[0]
    lines = {
        one.name: command_line(table, one, options, port + 10 * place) for place, one in enumerate(table.commands())
    }
    if options.dry_run:
        for line in lines.values():
            print(" ".join(line))
        return 0
    for folder in ("weights", "signals", "found"):
        (options.work / folder).mkdir(parents=True, exist_ok=True)
    make_all_weights(table, groups, options)
    stopped = run(table, lines, groups, options)
    return write(table, stopped, options)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("table", choices=sorted(file.stem for file in TABLES.glob("*.toml")))
    parser.add_argument("--models", nargs="+", help="of the table; default: all")
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="folder for weights, logs and results")
    parser.add_argument("--gpus", type=int, nargs="+", default=[0], help="their numbers")
    parser.add_argument("--gpu-gigabytes", type=float, help="of each GPU; default: what the first one has")
    parser.add_argument("--start-limit", type=float, default=900, help="seconds until an engine's first token")
    parser.add_argument("--limit", type=float, default=3600, help="seconds that an engine may take")
    for name in ("python", "path"):
        parser.add_argument(f"--peer-{name}", nargs="+", default=[], help="as bench/engine.py has it")
    parser.add_argument("--out", type=Path, help="path without its suffix; default: where the table says")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, and do nothing")
    options = parser.parse_args(arguments)
    options.work = options.work.resolve()
    return options


def command_line(table: Table, command: Command, options: argparse.Namespace, port: int) -> list[str]:
    model, work = command.model, options.work
    line = [sys.executable, str(ROOT / "bench" / "engine.py"), str(model.weights(work))]
    line += ["--engines", *command.engines, "--cases", ",".join(table.given["cases"])]
    line += ["--runs", str(table.given["runs"]), "--layouts", command.layout.name.replace(" ", "+"), *command.arguments]
    if "--speculate" in command.arguments and (head := model.head(work)) is not None:
        line += ["--draft-model", str(head)]
    peers = []
    for number, engine in enumerate(command.engines):
        own = table.options(model, engine)
        if engine == OURS:
            line += ["--our-options", json.dumps(own)]
            continue
        if host_of(engine) == "sglang":
            own |= {"nccl_port": port + number}
        peers.append(f"{engine}={json.dumps(own)}")
    line += ["--peer-options", *peers] if peers else []
    for name, values in (("python", options.peer_python), ("path", options.peer_path)):
        line += [f"--peer-{name}", *values] if values and peers else []
    line += ["--start-limit", f"{options.start_limit:g}", "--limit", f"{options.limit:g}", "--verbose"]
    return [*line, "--signal", str(work / "signals" / command.name), "--out", str(work / "found" / command.name)]


def make_all_weights(table: Table, groups: Sequence[Sequence[int]], options: argparse.Namespace) -> None:
    """Write the weights that are not there yet, one model at a time on each GPU."""

    def make(number: int) -> None:
        for model in table.models[number :: len(groups)]:
            make_weights(model, groups[number][0], options.work)

    with ThreadPoolExecutor(len(groups)) as pool:
        list(pool.map(make, range(len(groups))))


def make_weights(model: Model, gpu: int, work: Path) -> None:
    given, weights = model.given, model.weights(work)
    more = ["--layers", str(given["layers"])] if "layers" in given else []
    more += ["--mtp"] if given.get("mtp") else []
    _write_once([ROOT / "bench" / "random_weights.py", CONFIGS / given["config"]], weights, more, gpu)
    if (head := model.head(work)) is not None:
        target = ["--target", str(weights)]
        _write_once([ROOT / "bench" / "random_eagle3.py", CONFIGS / given["eagle3"]], head, target, gpu)


def _write_once(command: Sequence[Path], out: Path, more: Sequence[str], gpu: int) -> None:
    if out.exists():
        return
    unfinished = out.with_name(f"{out.name}.unfinished-{os.getpid()}")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
    subprocess.run([sys.executable, *map(str, command), str(unfinished), *more], env=environment, check=True)
    unfinished.rename(out)


def run(
    table: Table, lines: Mapping[str, Sequence[str]], groups: Sequence[Sequence[int]], options: argparse.Namespace
) -> dict[str, bool]:
    """Measure. Returns by command whether its engines were stopped while they loaded."""

    def turns_of(models: Sequence[Model]) -> Waiting:
        commands = in_order_of_loading([one for one in table.commands() if one.model in models], table.given["gpus"])
        return Waiting(turn(table, one, lines[one.name], options) for one in commands)

    if table.given["spread"]:
        waiting = [turns_of(table.models)] * len(groups)
    else:
        waiting = [turns_of(table.models[number :: len(groups)]) for number in range(len(groups))]
    cores = by_core(os.sched_getaffinity(0))
    gigabytes = options.gpu_gigabytes or memory_of(options.gpus[0])
    found: dict[str, bool] = {}

    def measure(number: int) -> None:
        cpus = cores[number * len(cores) // len(groups) : (number + 1) * len(cores) // len(groups)]
        found.update(take_turns(waiting[number], Share(groups[number], gigabytes, cpus or cores), say))

    with ThreadPoolExecutor(len(groups)) as pool:
        list(pool.map(measure, range(len(groups))))
    return found


def in_order_of_loading(commands: Sequence[Command], gpus: int) -> list[Command]:
    """Those of other engines first, which compile kernels for minutes while ours are measured. On several GPUs nothing
    loads meanwhile, and an engine that loads later finds the kernels of those before it."""
    return list(commands) if gpus > 1 else sorted(commands, key=lambda one: OURS in one.engines)


def by_core(cpus: Iterable[int], folder: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """The CPUs with threads of one core beside each other: else engines that load would take time from those that are
    measured. CPUs of which the system says nothing are cores of their own."""

    def core(cpu: int) -> int:
        siblings = folder / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        return int(re.split("[,-]", siblings.read_text())[0]) if siblings.exists() else cpu

    return sorted(cpus, key=lambda cpu: (core(cpu), cpu))


def turn(table: Table, command: Command, line: Sequence[str], options: argparse.Namespace) -> Turn:
    shared = table.given.get("shared_caches", False)
    caches = options.work / "caches" / (command.model.name if shared else command.name)
    environment = {
        # Threads of engines that wait for their turn would wait for each other on all CPUs.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        **command.model.given.get("environment", {}),
    }
    experts, others = weights_of(command.model.weights(options.work))
    awaited, found = options.work / "signals" / command.name, options.work / "found" / f"{command.name}.json"
    # Of a run before: neither its word nor its figures are this one's.
    for left in (awaited, *awaited.parent.glob(f"{awaited.name}.*"), found):
        left.unlink(missing_ok=True)
    return Turn(
        name=command.name,
        command=line,
        environment=environment,
        log=found.with_suffix(".log"),
        awaited=awaited,
        engines=len(command.engines) if "--interleave" in command.arguments else 1,
        gigabytes=table.gigabytes(command, experts, others),
    )


def weights_of(folder: Path) -> tuple[float, float]:
    """Gigabytes of a checkpoint: those of routed experts, and the others."""
    bytes_of = {True: 0, False: 0}
    for file in folder.glob("*.safetensors"):
        for name, header in read_safetensors_headers(file).items():
            bytes_of[".experts." in name] += header.stored_bytes
    return bytes_of[True] / 1e9, bytes_of[False] / 1e9


def memory_of(gpu: int) -> float:
    """Gigabytes that engines can have."""
    import torch

    return float(torch.cuda.get_device_properties(gpu).total_memory) / 1e9 - SPARE


def say(text: str) -> None:
    with _print_lock:
        print(text, flush=True)


def write(table: Table, stopped: Mapping[str, bool], options: argparse.Namespace) -> int:
    """Join what was found with what the file has of other models. Returns the exit status: 1 if anything failed."""
    out, found = options.out or RESULTS / table.given["results"], options.work / "found"
    files, failed = [], False
    for command in table.commands():
        file = found / f"{command.name}.json"
        if not file.exists():
            failed = True
            say(f"{command.name}: no results; see {file.with_suffix('.log')}")
            continue
        report = json.loads(file.read_text())
        for model in report["models"].values():
            for column in model["engines"].values():
                failed |= bool(column["error"])
                if stopped[command.name] or table.given.get("shared_caches", False):
                    column["start_s"] = []
        file.write_text(json.dumps(report))
        files.append(file)
    before = out.with_suffix(".json")
    if before.exists() and (kept := others(json.loads(before.read_text()), [model.name for model in table.models])):
        files.insert(0, found / "kept.json")
        files[0].write_text(json.dumps(kept))
    if files:
        line = [sys.executable, str(ROOT / "bench" / "engine.py"), "--merge", *map(str, files), "--out", str(out)]
        failed |= bool(subprocess.run(line, check=False).returncode)
    return int(failed)


def others(report: dict[str, Any], models: Sequence[str]) -> dict[str, Any] | None:
    """`report` without `models` and the commands that measured them; None if nothing is left."""
    kept = {name: model for name, model in report["models"].items() if name not in models}
    commands = [line for line in report["commands"] if not set(line.split()[:3]) & set(models)]
    return report | {"models": kept, "commands": commands} if kept else None


if __name__ == "__main__":
    sys.exit(main())
