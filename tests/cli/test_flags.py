"""Flags are made from config fields: every field has one, in each spelling, and its value arrives."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from allotrope.commands.benchmarks import LatencyOptions, LoadOptions, ReportOptions, ThroughputOptions
from allotrope.commands.flags import FlagCommand, expand_configs, flag_names, parse_size
from allotrope.commands.foreign_flags import ALIASES, OPPOSITES, VALUES
from allotrope.commands.refusals import REFUSED, refusal
from allotrope.commands.sampling import SamplingOptions
from allotrope.config import EngineConfig, ServerConfig
from allotrope.errors import ConfigError
from allotrope.verify.options import VerifyOptions

OPTION_CLASSES = (
    EngineConfig,
    ServerConfig,
    SamplingOptions,
    LatencyOptions,
    ThroughputOptions,
    LoadOptions,
    ReportOptions,
)
# Values of texts that a config accepts in one form only.
TEXTS = {
    "root_path": "/text",
    "device": "cuda:1",
    "speculative_config": '{"method": "suffix"}',
    "allowed_origins": "https://example.org",
    "allowed_methods": "GET",
}
# Options without which another one would have no effect, and is refused.
OF_PAGES = ("allowed_methods", "allowed_headers", "allow_credentials")
NEEDED: dict[str, dict[str, Any]] = {name: {"allowed_origins": ("https://example.org",)} for name in OF_PAGES}
NEEDED["distributed_address"] = {"tensor_parallel_size": 2}
SERVE_FIELDS = [
    (config, field)
    for config in (EngineConfig, ServerConfig)
    for field in dataclasses.fields(config)
    if field.name != "model"
]
IDS = [field.name for _, field in SERVE_FIELDS]


def run(*args: str) -> tuple[int, str, list[tuple[EngineConfig, ServerConfig]]]:
    """Exit status, output and the configs that a command made from `args` received."""
    received: list[tuple[EngineConfig, ServerConfig]] = []

    def probe(engine: EngineConfig, server: ServerConfig) -> None:
        received.append((engine, server))

    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(cls=FlagCommand)(expand_configs(probe))
    result = CliRunner().invoke(app, list(args))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output, received


def other_value(config: type, field: dataclasses.Field[Any]) -> tuple[str, Any]:
    """A value that is not the field's default and that the config accepts: as text and as it should arrive."""
    hint = get_type_hints(config)[field.name]
    kinds = [hint, *get_args(hint)]
    if get_origin(hint) is Literal:
        choice = next(choice for choice in get_args(hint) if choice != field.default)
        return choice, choice
    if any(get_origin(kind) is Literal for kind in kinds):
        choice = next(get_args(kind)[0] for kind in kinds if get_origin(kind) is Literal)
        return choice, choice
    if int in kinds:
        return "128", 128
    if float in kinds:
        return "0.25", 0.25
    text = TEXTS.get(field.name, "text")
    if hint == tuple[str, ...]:
        return text, (text,)
    assert str in kinds, f"{field.name}: {hint} has no flag test"
    return text, text


def test_refusals_name_options_that_exist() -> None:
    """What a refused flag's reason tells to use is a flag of ours; and no reason is only to leave the flag out."""
    ours = {flag for _, field in SERVE_FIELDS for flag in flag_names(field)}
    ours |= {f"--{field.name.replace('_', '-')}" for _, field in SERVE_FIELDS}
    ours |= {f"--no-{field.name.replace('_', '-')}" for _, field in SERVE_FIELDS if field.type == "bool"}
    ours |= {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(VerifyOptions)}
    for flag, reason in REFUSED.items():
        assert set(re.findall(r"--[a-z][\w-]*", reason)) <= ours, (flag, reason)
        assert reason.removesuffix("leave it out").strip(" ;"), flag


@pytest.mark.parametrize(
    ("flag", "names"),
    [
        ("--quantization-config", "--quantized-weights"),
        ("--overlap", "--async-scheduling"),
        ("--regimes", "--modes"),
        ("--no-async-scheduling", "--async-scheduling off"),
        ("--mamba-cache-dtype", "--state-dtype"),
        ("--cpu-offload-gb", "--tensor-parallel-size"),
    ],
)
def test_a_refusal_names_the_equivalent_option(flag: str, names: str) -> None:
    """What is there under another name is not called unsupported."""
    status, output, _ = run("some-model", flag, "1")
    assert status != 0
    said = " ".join(output.split())
    assert names in said and "not supported" not in said


@pytest.mark.parametrize(("config", "field"), SERVE_FIELDS, ids=IDS)
def test_every_field_has_a_flag_in_every_spelling(config: type, field: dataclasses.Field[Any]) -> None:
    kebab = f"--{field.name.replace('_', '-')}"
    spellings = {kebab, f"--{field.name}", *flag_names(field)}
    for spelling in sorted(spellings):
        if get_type_hints(config)[field.name] is bool:
            expected = not field.default
            args = [spelling if expected else f"--no{'_' if '_' in spelling else '-'}{spelling[2:]}"]
        else:
            text, expected = other_value(config, field)
            args = [spelling, text]
        needed = NEEDED.get(field.name, {})
        for name, value in needed.items():
            args += [f"--{name.replace('_', '-')}", *(value if isinstance(value, tuple) else [str(value)])]
        status, output, received = run("some-model", *args)
        assert status == 0, output
        configs = {type(made): made for made in received[0]}
        assert getattr(configs[config], field.name) == expected
        assert configs[EngineConfig].model == "some-model"
        plain = {EngineConfig: EngineConfig(model="some-model"), ServerConfig: ServerConfig()}
        plain[config] = dataclasses.replace(plain[config], **{field.name: expected}, **needed)
        assert configs == plain


def test_no_flags_give_the_defaults() -> None:
    _, _, received = run("some-model")
    assert received == [(EngineConfig(model="some-model"), ServerConfig())]


def test_every_option_has_help() -> None:
    bare = [f"{c.__name__}.{f.name}" for c in OPTION_CLASSES for f in dataclasses.fields(c) if not f.metadata["help"]]
    assert bare == []


def test_equals_form_and_both_booleans() -> None:
    _, _, received = run("m", "--max_model_len=64", "--no-enable-prefix-caching", "--strict", "-tp", "2")
    engine, server = received[0]
    assert (engine.max_model_len, engine.enable_prefix_caching, engine.tensor_parallel_size) == (64, False, 2)
    assert server.strict


def test_aliases_name_fields_and_no_flag_twice() -> None:
    fields = {f.name for c in OPTION_CLASSES for f in dataclasses.fields(c)}
    assert set(ALIASES) <= fields
    for config in OPTION_CLASSES:
        spelled = [name for f in dataclasses.fields(config) for name in flag_names(f)]
        assert len(spelled) == len(set(spelled))
    assert not {name for _, field in SERVE_FIELDS for name in flag_names(field)} & set(REFUSED)
    assert all(reason and not reason.endswith(".") for reason in REFUSED.values())


@pytest.mark.parametrize("args", [["--quantization-config", "{}"], ["--quantization-config={}"], ["-q", "awq"]])
def test_unsupported_flag_is_refused_in_one_line(args: list[str]) -> None:
    status, output, received = run("m", *args)
    assert (status, received) == (2, [])
    assert output.count("\n") == 1
    assert output.startswith(f"allotrope: error: {args[0].partition('=')[0]} is not an option of allotrope: ")
    assert REFUSED["-q"] in output


def test_unsupported_flag_in_snake_case() -> None:
    status, output, _ = run("m", "--trust_remote_code")
    assert status == 2
    assert "--trust-remote-code is not an option" in output


@pytest.mark.parametrize(
    ("flag", "like"),
    [
        ("-O3", "-O"),
        ("-O", "-O"),
        ("-O.mode=3", "-O"),
        ("--task", "--runner"),
        ("--no-enable-lora", "--enable-lora"),
        ("--compilation-config.level", "--compilation-config"),
        ("--lora_dtype", "--enable-lora"),
        ("--mem-fraction-static", "--mem-fraction-static"),
    ],
)
def test_every_form_of_an_unsupported_flag_is_refused(flag: str, like: str) -> None:
    status, output, _ = run("m", flag, "3")
    assert status == 2
    assert output == f"allotrope: error: {flag.partition('=')[0].replace('_', '-')} is not an option of allotrope: " + (
        f"{REFUSED[like]}.\n"
    )


def test_part_of_a_json_value_is_refused() -> None:
    status, output, _ = run("m", "--hf_overrides.rope_theta", "3")
    assert status == 2
    assert "--hf_overrides.rope_theta is not an option of allotrope: write the whole value after --hf-over" in output


@pytest.mark.parametrize(
    ("args", "field", "value"),
    [
        (["--tp", "2"], "tensor_parallel_size", 2),
        (["--tp-size=2"], "tensor_parallel_size", 2),
        (["--gpu-memory-utilization", "0.5"], "memory_utilization", 0.5),
        (["--dtype", "half"], "dtype", "float16"),
        (["--dtype=float"], "dtype", "float32"),
        (["--kv-cache-dtype", "fp8_e4m3"], "kv_cache_dtype", "fp8"),
        (["--generation-config", "vllm"], "generation_config", "none"),
        (["--enforce-eager"], "cuda_graphs", False),
        (["--enforce_eager"], "cuda_graphs", False),
        (["--disable-cuda-graph"], "cuda_graphs", False),
        (["--disable-radix-cache"], "enable_prefix_caching", False),
        (["--context-length", "32K"], "max_model_len", 32768),
        (["--max-running-requests", "8"], "max_num_seqs", 8),
        (["--random-seed", "8"], "seed", 8),
        (["--seed", "9", "--tokenizer", "half"], "tokenizer", "half"),
    ],
)
def test_spellings_of_other_engines(args: list[str], field: str, value: object) -> None:
    status, output, received = run("m", *args)
    assert status == 0, output
    assert getattr(received[0][0], field) == value


def test_aliases_of_values_are_choices() -> None:
    hints = get_type_hints(EngineConfig)
    for field, spellings in VALUES.items():
        assert set(spellings.values()) <= set(get_args(hints[field]))
        assert not set(spellings) & set(get_args(hints[field]))
    taken = {name for _, field in SERVE_FIELDS for name in flag_names(field)}
    assert not {name for names in OPPOSITES.values() for name in names} & (taken | set(REFUSED))
    assert refusal("--zork") is None and refusal("--no-zork") is None


def test_a_value_that_looks_like_a_flag_is_a_value() -> None:
    _, _, received = run("m", "--served-model-name", "--quantization", "--tokenizer", "--a_b")
    engine, server = received[0]
    assert (server.served_model_name, engine.tokenizer) == (("--quantization",), "--a_b")


def test_unknown_flag_and_bad_values_are_usage_errors() -> None:
    for args in (["--zork"], ["--dtype", "int3"], ["--max-num-seqs", "many"], ["--kv-cache-memory-bytes", "3q"]):
        status, output, received = run("m", *args)
        assert (status, received) == (2, []), args
        assert args[0] in output


def test_model_may_be_left_out_where_the_config_may_be() -> None:
    seen: list[EngineConfig | None] = []

    def probe(engine: EngineConfig | None) -> None:
        seen.append(engine)

    app = typer.Typer()
    app.command(cls=FlagCommand)(expand_configs(probe))
    assert CliRunner().invoke(app, []).exit_code == 0
    assert CliRunner().invoke(app, ["m", "--seed", "3"]).exit_code == 0
    assert seen == [None, EngineConfig(model="m", seed=3)]


def test_api_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLOTROPE_API_KEY", "secret")
    assert run("m")[2][0][1].api_key == ("secret",)
    assert run("m", "--api-key", "other")[2][0][1].api_key == ("other",)
    monkeypatch.setenv("ALLOTROPE_API_KEY", "one two")
    monkeypatch.setenv("ALLOTROPE_METRICS_API_KEY", "three")
    server = run("m")[2][0][1]
    assert (server.api_key, server.metrics_api_key) == (("one", "two"), ("three",))


@pytest.mark.parametrize(
    ("text", "number"),
    [("4096", 4096), ("32k", 32_000), ("32K", 32_768), ("1.5GiB", 3 << 29), ("80 GB", 80 * 10**9), ("2T", 2 << 40)],
)
def test_sizes(text: str, number: int) -> None:
    assert parse_size(text) == number


@pytest.mark.parametrize("text", ["", "3q", "-1", "1.0001k", "0x10", "1e3", "9" * 400])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="number"):
        parse_size(text)


def test_several_texts_for_one_flag() -> None:
    for given in (
        ["m", "--served-model-name", "a", "b", "--port", "1"],
        ["m", "--served-model-name", "a", "--served-model-name=b"],
        ["--served-model-name=a", "m", "--served-model-name", "b"],
        ["m", "--served-model-name", '["a", "b"]'],
    ):
        engine, server = run(*given)[2][0]
        assert (engine.model, server.served_model_name) == ("m", ("a", "b"))
    # Before MODEL is known, the second word is MODEL.
    engine, server = run("--served-model-name", "a", "m")[2][0]
    assert (engine.model, server.served_model_name) == ("m", ("a",))
    assert run("m", "--allowed-origins", '["a')[0] == 2


def test_batches_before_those_that_are_timed_may_be_none_and_not_fewer() -> None:
    assert LatencyOptions(warmup=0).warmup == 0
    with pytest.raises(ConfigError, match="warmup=-1; at least 0 is needed"):
        LatencyOptions(warmup=-1)
