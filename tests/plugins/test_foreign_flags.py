"""Every flag of the vLLM that is installed is one of ours, or is refused by name."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import typer

from allotrope.commands.app import build_app
from allotrope.commands.refusals import REFUSED, refusal
from allotrope.config import EngineConfig

# vLLM's own module of its flags, by version.
_MODULES = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
_PARSERS = ("vllm.utils.argparse_utils", "vllm.utils")


def _first(modules: tuple[str, ...], name: str) -> Any:
    """`name` of the first module that has it."""
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    pytest.fail(f"none of {', '.join(modules)} has {name}")


@pytest.fixture(scope="module")
def actions(in_vllm: None) -> list[Any]:
    """Every option of `vllm serve`, as argparse has it."""
    make, parser = _first(_MODULES, "make_arg_parser"), _first(_PARSERS, "FlexibleArgumentParser")
    return [action for action in make(parser())._actions if action.option_strings]


def _ours() -> dict[str, Any]:
    serve = typer.main.get_command(build_app()).commands["serve"]  # type: ignore[attr-defined]
    return {name: param for param in serve.params for name in (*param.opts, *param.secondary_opts)}


def test_each_flag_is_ours_or_refused(actions: list[Any]) -> None:
    ours = {*_ours(), "-h", "--help"}
    flags = [flag for action in actions for flag in action.option_strings]
    assert len(flags) > 200
    assert [flag for flag in flags if flag not in ours and refusal(flag) is None] == []
    assert not set(ours) & set(REFUSED)


def test_values_of_shared_flags_are_taken_or_refused(actions: list[Any]) -> None:
    from allotrope.commands.foreign_flags import plain_value

    choices = {flag: action.choices for action in actions for flag in action.option_strings}
    for value in choices["--dtype"]:
        assert EngineConfig(model="m", dtype=plain_value("dtype", value)).dtype != "half"
    for value in ("auto", "vllm"):
        assert EngineConfig(model="m", generation_config=plain_value("generation_config", value))
