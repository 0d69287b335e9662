"""`--config FILE`: its values stand where the command line says nothing, and what it cannot mean is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli.test_flags import SERVE_FIELDS, other_value, run

from allotrope.commands.flags import flag_names
from allotrope.config import EngineConfig, ServerConfig


def write(directory: Path, text: str, name: str = "options.yaml") -> str:
    path = directory / name
    path.write_text(text)
    return str(path)


def test_yaml_and_json_equal_flags(tmp_path: Path) -> None:
    text = (
        "model: some-model  # as vLLM writes it\nmax-model-len: 32k\nmax_num_seqs: 8\nenable-prefix-caching: false\n"
        "gpu-memory-utilization: 0.5\ndtype: half\nport: 8001\nrevision:\nhf-overrides: {rope_theta: 5}\n"
        "served-model-name: '7'\n"
    )
    _, _, expected = run(
        "some-model", "--max-model-len", "32k", "--max-num-seqs", "8", "--no-enable-prefix-caching",
        "--memory-utilization", "0.5", "--dtype", "float16", "--port", "8001", "--hf-overrides", '{"rope_theta": 5}',
        "--served-model-name", "7",
    )  # fmt: skip
    status, output, received = run("--config", write(tmp_path, text))
    assert status == 0, output
    assert received == expected
    same = {"model": "some-model", "max_model_len": "32k", "max-num-seqs": 8, "no-enable-prefix-caching": True}
    same |= {"memory-utilization": 0.5, "dtype": "float16", "port": 8001, "hf_overrides": {"rope_theta": 5}}
    same |= {"served_model_name": "7", "tokenizer": None}
    assert run(f"--config={write(tmp_path, json.dumps(same), 'options.json')}")[2] == expected


def test_every_option_may_be_in_the_file(tmp_path: Path) -> None:
    values: dict[str, Any] = {"model": "some-model"}
    for config, field in SERVE_FIELDS:
        values[field.name] = not field.default if isinstance(field.default, bool) else other_value(config, field)[1]
    # Values that do not go together.
    values |= {"max_num_batched_tokens": 256, "data_parallel_size": 2, "pipeline_parallel_size": 3}
    status, output, received = run("--config", write(tmp_path, json.dumps(values), "all.json"))
    assert status == 0, output
    engine, server = received[0]
    for config, field in SERVE_FIELDS:
        made = engine if config is EngineConfig else server
        assert getattr(made, field.name) == values[field.name], field.name


def test_precedence_of_command_line_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "model: file\nport: 1\ncuda-graphs: true\nenable_prefix_caching: false\napi-key: file\n")
    flags = ["line", "--port", "2", "--enforce-eager", "--enable-prefix-caching"]
    for args in ([*flags, "--config", path], ["--config", path, *flags]):
        engine, server = run(*args)[2][0]
        assert (engine.model, server.port, engine.cuda_graphs, engine.enable_prefix_caching) == ("line", 2, False, True)
    keys = {key: run("m", "--api-key", key)[2][0][1].api_key for key in ("file", "environment", "line")}
    assert server.api_key == keys["file"]
    monkeypatch.setenv("ALLOTROPE_API_KEY", "environment")
    assert run("--config", path)[2][0][1].api_key == keys["environment"]
    assert run("--config", path, "--api-key", "line")[2][0][1].api_key == keys["line"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prot: 8001", "prot: there is no such option, but there is port."),
        ("max_model_length: 8", "but there is max-model-len."),
        ("zzzzzz: 8", "zzzzzz: there is no such option."),
        ("enable-auto-tool-choice: true", "enable-auto-tool-choice: tools are on wherever their format is known"),
        ("config: other.yaml", "config: there is no such option"),
        ("port: many", "port='many': "),
        ("dtype: int3", "dtype='int3': 'int3' is not one of"),
        ("async_scheduling: on", "async_scheduling=True: a text is needed; put it in quotes"),
        ("overlap: auto", "overlap: write --async-scheduling"),
        ("kv_cache_dtype: fp8_scaled", "write fp8_ds_mla"),
        ("revision: 1.10", "revision=1.1: a text is needed; put it in quotes"),
        ("port: true", "port=True: a number is needed"),
        ("strict: 3", "strict=3: true or false is needed"),
        ("port: [1, 2]", "port=[1, 2]: one value is needed"),
        ("tokenizer: {a: b}", "one value is needed"),
        ("port: 1\nport: 2", "port is there twice"),
        ("page-size: 16\nblock_size: 32", "block_size: the option is there under two names"),
        ("- port: 1", "holds a list; lines such as `port: 8001` are needed"),
        ("port: {", "cannot be read"),
        ("port: many\nprot: 3", "prot: there is no such option"),
    ],
)
def test_invalid_keys_and_values_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = write(tmp_path, text)
    status, output, received = run("m", "--config", path)
    assert (status, received) == (2, [])
    plain = " ".join(output.split())
    assert path in plain
    assert reason in plain


def test_repeated_keys_of_json_and_a_missing_file(tmp_path: Path) -> None:
    assert "port is there twice" in run("m", "--config", write(tmp_path, '{"port": 1, "port": 2}', "twice.json"))[1]
    assert "cannot be read" in run("m", "--config", str(tmp_path / "nothing.yaml"))[1]
    assert run("m", "--config", write(tmp_path, ""))[2] == [(EngineConfig(model="m"), ServerConfig())]


def test_commands_without_a_file_load_no_yaml() -> None:
    script = (
        "import sys; sys.argv = ['allotrope', 'version']\n"
        "from allotrope.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "sys.exit('yaml' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], env=os.environ, stdout=subprocess.DEVNULL).returncode == 0


def test_no_flag_of_ours_is_shadowed() -> None:
    assert not [field.name for _, field in SERVE_FIELDS if "--config" in flag_names(field)]
