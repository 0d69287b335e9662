"""`bench/tables.py`: what it runs, and that commands on a GPU are measured one at a time."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_scripts import BENCH, load_script
from random_models import tiny
from safetensors.torch import save_file

from bench.engine import turns
from bench.engine.options import parse
from bench.engine.turns import Share, Turn, Waiting, family, take_turns

NAMES = sorted(file.stem for file in (BENCH / "engine" / "tables").glob("*.toml"))
SHARE = Share(gpus=(0,), gigabytes=10, cores=(0,))
# Loads for LOAD seconds, measures for half of one, and says when it ran.
COMMAND = """
import pathlib, sys, time
awaited, load, times = pathlib.Path(sys.argv[1]), float(sys.argv[2]), []
start = time.time()
while time.time() < start + load:
    times.append(time.time())
    time.sleep(0.01)
for number in range(int(sys.argv[3])):
    awaited.with_name(f"{awaited.name}.{number}").touch()
while not awaited.exists():
    times.append(time.time())
    time.sleep(0.01)
begin = time.time()
time.sleep(0.5)
print(times, begin, time.time(), sep=";")
sys.exit(int(sys.argv[4]))
"""


@pytest.fixture
def tables() -> Any:
    return load_script("tables")


def turn(folder: Path, name: str, *, load: float, gigabytes: float = 1, engines: int = 1, code: int = 0) -> Turn:
    signals = folder / "signals"
    signals.mkdir(exist_ok=True)
    given = (signals / name, load, engines, code)
    return Turn(
        name=name,
        command=[sys.executable, "-c", COMMAND, *map(str, given)],
        environment={},
        log=folder / f"{name}.log",
        awaited=signals / name,
        engines=engines,
        gigabytes=gigabytes,
    )


def said(folder: Path, name: str) -> tuple[list[float], float, float]:
    """When a command ran before it was measured, and from when to when it was measured."""
    times, begin, end = (folder / f"{name}.log").read_text().split(";")
    return json.loads(times), float(begin), float(end)


def test_commands_are_measured_one_at_a_time_in_the_order_they_are_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "_SETTLE_S", 0.2)
    asked = [turn(tmp_path, "slow", load=1.5), turn(tmp_path, "quick", load=0.3, engines=3)]
    stopped = take_turns(Waiting(asked), SHARE, lambda text: None)
    assert list(stopped) == ["quick", "slow"] and stopped == {"quick": False, "slow": True}
    _, begin, end = said(tmp_path, "quick")
    times, later, _ = said(tmp_path, "slow")
    assert later > end
    assert min(times) < begin and not [one for one in times if begin <= one <= end]


def test_what_does_not_fit_waits_and_what_fails_holds_nobody_up(tmp_path: Path) -> None:
    asked = [
        turn(tmp_path, "first", load=0.2, gigabytes=8, code=3),
        turn(tmp_path, "second", load=0.2, gigabytes=8),
        # More than there is: it runs alone, and says itself what it lacks.
        turn(tmp_path, "third", load=0.2, gigabytes=80),
    ]
    lines: list[str] = []
    assert take_turns(Waiting(asked), SHARE, lines.append) == dict.fromkeys(("first", "second", "third"), False)
    assert [line for line in lines if "ended" in line] == [
        f"{name}: ended with code {code}" for name, code in (("first", 3), ("second", 0), ("third", 0))
    ]
    ends = [said(tmp_path, name)[2] for name in ("first", "second")]
    assert ends < [min(said(tmp_path, name)[0]) for name in ("second", "third")]


def test_a_share_that_is_free_takes_the_next_turn(tmp_path: Path) -> None:
    waiting = Waiting(turn(tmp_path, name, load=load, gigabytes=8) for name, load in (("long", 3), ("a", 0), ("b", 0)))
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda gpu: [*take_turns(waiting, replace(SHARE, gpus=(gpu,)), lambda text: None)], (0, 1))]
    assert sorted(found) == [["a", "b"], ["long"]]


def test_ranks_are_not_stopped_before_they_are_ready(tmp_path: Path) -> None:
    # Two at a time.
    loads = {"slow": 1.0, "quick": 0.2, "last": 0.0}
    asked = [turn(tmp_path, name, load=load, gigabytes=5) for name, load in loads.items()]
    stopped = take_turns(Waiting(asked), replace(SHARE, gpus=(0, 1)), lambda text: None)
    assert stopped == dict.fromkeys(loads, False)
    loaded = min(said(tmp_path, "slow")[0]) + 1.0
    begins, ends = ([said(tmp_path, name)[part] for name in ("slow", "quick")] for part in (1, 2))
    assert loaded <= min(begins) and max(ends) <= min(said(tmp_path, "last")[1:])


def test_nothing_is_left_running_when_it_is_interrupted(tmp_path: Path) -> None:
    def interrupt(text: str) -> None:
        if text == "second: loads":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take_turns(Waiting(turn(tmp_path, name, load=60) for name in ("first", "second")), SHARE, interrupt)
    time.sleep(0.2)
    own = Path("/proc/self").resolve().name
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family(int(own)) if str(pid) != own]
    assert not [one for one in commands if str(tmp_path).encode() in one]


@pytest.mark.parametrize("name", NAMES)
def test_every_command_of_every_table_is_understood(
    name: str, tables: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tables.Table(name, None)
    options = tables.parse([name, "--work", str(tmp_path), "--peer-path", "vllm=/one", "sglang=/other"])
    assert table.given["results"] == f"engine_h200_{name}"
    for model in table.models:
        assert (BENCH / "configs" / model.given["config"] / "config.json").exists()
        assert model.head(tmp_path) is None or (BENCH / "configs" / model.given["eagle3"] / "config.json").exists()
    for command in table.commands():
        line = tables.command_line(table, command, options, 100)
        read = parse(line[2:], "")
        assert list(read.engines) == list(command.engines) and read.layouts == [command.layout]
        assert read.our_options.items() <= table.options(command.model, "allotrope").items()
        # Ports of engines that run at once differ.
        ports = [own["nccl_port"] for own in read.peer_options.values() if "nccl_port" in own]
        assert len(set(ports)) == len(ports) == sum("sglang" in engine for engine in command.engines)


def test_data_parallel_ranks_have_room_for_what_they_do_not_share(tables: Any, tmp_path: Path) -> None:
    table = tables.Table("layouts", ["gpt_oss"])
    more = float(table.given["gigabytes"])
    room = {one.layout.name: table.gigabytes(one, experts=16.0, others=4.0) - more for one in table.commands()}
    assert room == {"TP2": 10, "TP2 EP": 10, "DP2 EP": 12}
    for file, name, size in (("a", "model.layers.0.mlp.experts.3.up_proj.weight", 3000), ("b", "lm_head.weight", 500)):
        save_file({name: torch.zeros(size, 1000)}, tmp_path / f"{file}.safetensors")
    assert tables.weights_of(tmp_path) == (0.012, 0.002)


def test_what_loads_for_minutes_loads_first(tables: Any) -> None:
    commands = tables.Table("speculation", ["gpt_oss", "qwen3_next"]).commands()
    found = [(one.model.name, *one.engines) for one in tables.in_order_of_loading(commands, gpus=1)]
    models, ours = ("gpt_oss", "qwen3_next"), [("allotrope",)] * 4
    assert found == [(model, "vllm") for model in models] + [(model, *engine) for model in models for engine in ours]
    assert tables.in_order_of_loading(commands, gpus=2) == commands


def test_a_host_gives_its_options_to_the_plugin_but_for_its_own(tables: Any) -> None:
    table = tables.Table("hosts", ["qwen3_next"])
    model = table.models[0]
    own, hosted = (table.options(model, engine) for engine in ("sglang", "sglang+allotrope"))
    assert own["attention_backend"] == "fa3" and "attention_backend" not in hosted
    assert own["max_total_tokens"] == hosted["max_total_tokens"] and hosted["mamba_ssm_dtype"] == "bfloat16"


def test_a_table_is_measured_and_joined_with_what_was_there(
    tables: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, layers in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        config = tiny("LlamaForCausalLM") | {"num_hidden_layers": layers}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "small.toml").write_text(
        'results = "none"\ngpus = 1\nspread = true\nruns = 1\ncases = ["8/3/1"]\ngigabytes = 1\n'
        'arguments = ["--forced", "9"]\n[[commands]]\nengines = ["allotrope"]\n[options.allotrope]\nmax_num_seqs = 4\n'
        'max_model_len = 128\ndevice = "cpu"\n[models.one]\nconfig = "one"\n[models.two]\nconfig = "two"\n'
    )
    monkeypatch.setattr(tables, "TABLES", tmp_path)
    monkeypatch.setattr(tables, "CONFIGS", tmp_path)
    out = tmp_path / "found"
    command = ["small", "--work", str(tmp_path / "work"), "--gpu-gigabytes", "9", "--out", str(out)]
    assert tables.main(command) == 0
    report = json.loads(out.with_suffix(".json").read_text())
    assert set(report["models"]) == {"one", "two"} and len(report["commands"]) == 2
    for model in report["models"].values():
        assert model["engines"]["allotrope"]["error"] is None
        assert len(model["engines"]["allotrope"]["cases"]["8/3/1"]["tpot_ms"]) == 1
    # Measured again, a model takes its place; the others stay.
    report["models"]["one"]["described"] = "as it was"
    out.with_suffix(".json").write_text(json.dumps(report))
    assert tables.main([*command, "--models", "two"]) == 0
    again = json.loads(out.with_suffix(".json").read_text())
    assert again["models"]["one"] == report["models"]["one"] and len(again["commands"]) == 2
    assert again["models"]["two"] != report["models"]["two"]


def test_figures_of_a_run_before_are_not_taken_for_those_of_one_that_failed(tables: Any, tmp_path: Path) -> None:
    table = tables.Table("hosts", ["gpt_oss"])
    options = tables.parse(["hosts", "--work", str(tmp_path), "--out", str(tmp_path / "out")])
    for name in ("signals/gpt_oss_0", "signals/gpt_oss_0.gpt_oss_vllm", "found/gpt_oss_0.json", "found/other.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    for command in table.commands():
        tables.turn(table, command, [], options)
    assert [file.name for file in tmp_path.glob("*/*")] == ["other.json"]
    assert tables.write(table, {}, options) == 1


@pytest.mark.parametrize(("name", "shared"), [("layouts", True), ("hosts", False)])
def test_commands_of_a_model_find_compiled_kernels_where_the_table_says_so(
    tables: Any, tmp_path: Path, name: str, shared: bool
) -> None:
    table, options = tables.Table(name, ["gpt_oss"]), tables.parse([name, "--work", str(tmp_path)])
    roots = {tables.turn(table, one, [], options).environment["VLLM_CACHE_ROOT"] for one in table.commands()}
    assert len(roots) == (1 if shared else len(table.commands()))
    # Starts are left out where kernels may have been there already.
    for command in table.commands():
        file = tmp_path / "found" / f"{command.name}.json"
        file.parent.mkdir(exist_ok=True)
        column = {"error": None, "start_s": [3.0]}
        file.write_text(json.dumps({"models": {"gpt_oss": {"engines": {command.engines[0]: column}}}}))
    options.out = tmp_path / "out"
    tables.write(table, dict.fromkeys((one.name for one in table.commands()), False), options)
    reports = [json.loads((tmp_path / "found" / f"{one.name}.json").read_text()) for one in table.commands()]
    starts = [column["start_s"] for one in reports for column in one["models"]["gpt_oss"]["engines"].values()]
    assert starts == [[] if shared else [3.0]] * len(table.commands())


def test_unknown_models_and_too_few_gpus_are_refused(tables: Any) -> None:
    with pytest.raises(SystemExit, match="--models: nobody: the table has "):
        tables.main(["hosts", "--models", "nobody", "--dry-run"])
    with pytest.raises(SystemExit, match="--gpus: the table ranks needs 2"):
        tables.main(["ranks", "--gpus", "0", "--dry-run"])


def test_threads_of_a_core_stay_together(tables: Any, tmp_path: Path) -> None:
    for cpu, siblings in ((0, "0,4"), (1, "1,5"), (4, "0,4"), (5, "1,5"), (2, "2-3"), (3, "2-3")):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings + "\n")
    assert tables.by_core([5, 4, 3, 2, 1, 0, 9], tmp_path) == [0, 4, 1, 5, 2, 3, 9]
