"""What the entry point does in hosts that are good, unknown, broken or absent; the host here is a stand-in of files."""

from __future__ import annotations

import ast
import functools
import subprocess
from pathlib import Path
from typing import Any

import pytest
from forks import Forks

from allotrope.architectures.registry import ARCHITECTURES
from allotrope.attention.registry import FAMILIES
from allotrope.plugins.contract import Contract
from allotrope.plugins.sglang import contract as sglang_contract
from allotrope.plugins.vllm import contract
from allotrope.plugins.vllm.contract import DRAFT_HEADS

PLUGIN = Path(contract.__file__).parent
HOSTS = {"vllm": contract, "sglang": sglang_contract}
CALL = """
import sys
from allotrope.plugins.vllm import register
register()
register()
from vllm.model_executor.models import ModelRegistry
print(len(ModelRegistry.found))
models = [name for name in sys.modules if name.startswith("allotrope.architectures.")]
files = {"registry", "decoder", "spec", "weights", "read_config", "checkpoint", "dequantize", "weight_formats"}
print([name for name in models if name.rpartition(".")[2] not in files], "triton" in sys.modules)
"""


def host(
    folder: Path,
    version: str = "0.32.0",
    without: str = "",
    earlier: bool = False,
    contract: Contract = contract.CONTRACT,
) -> Path:
    """A package that has what the contract lists, but for one symbol. `earlier`: with what an earlier version has."""
    name = contract.distributions[0]
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    modules: dict[str, list[str]] = {}
    symbols = [(symbol.instead if earlier else None) or symbol for symbol in contract.symbols]
    for path in dict.fromkeys(symbol.path for symbol in symbols):
        same_path = [symbol for symbol in symbols if symbol.path == path]
        module, _, name = path.partition(":")
        if name == without:
            modules.setdefault(module, [])
            continue
        accepts = "".join(f", {one}=None" for symbol in same_path for one in symbol.accepts)
        members = "".join(f"    {one} = None\n" for symbol in same_path for one in symbol.has)
        code = f"class {name}:\n    def __init__(self{accepts}): pass\n{members}"
        if name == "ModelRegistry":
            code = (
                "class ModelRegistry:\n    found = {}\n    @classmethod\n"
                "    def register_model(cls, name, path): cls.found[name] = path\n"
            )
        modules.setdefault(module, []).append(code)
    for module, parts in modules.items():
        place = folder.joinpath(*module.split("."))
        place.mkdir(parents=True, exist_ok=True)
        for parent in (place, *place.relative_to(folder).parents):
            (folder / parent / "__init__.py").touch()
        (place / "__init__.py").write_text("\n".join(parts))
    (folder / "__init__.py").unlink(missing_ok=True)
    return folder


def run(path: Path | None, code: str = CALL, **environment: str) -> subprocess.CompletedProcess[str]:
    """`code` in a process that has imported nothing but torch."""
    paths = [str(PLUGIN.parent.parent.parent), *([str(path)] if path else [])]
    ended = _forks().run(f"import sys; sys.path[:0] = {paths[::-1]!r}\n{code}", environment, 100)
    assert ended.returncode == 0, ended.stderr
    return ended


@functools.cache
def _forks() -> Forks:
    return Forks(["torch"], {})


def lines(ended: subprocess.CompletedProcess[str]) -> list[str]:
    return ended.stderr.strip().splitlines()


@pytest.mark.parametrize("earlier", [False, True])
def test_a_known_host_gets_every_architecture_by_name_only(tmp_path: Path, earlier: bool) -> None:
    ended = run(host(tmp_path, "0.25.1" if earlier else "0.32.0", earlier=earlier))
    names = len(ARCHITECTURES) + (0 if earlier else len(DRAFT_HEADS))
    assert ended.stdout.split("\n")[:2] == [str(names), "[] False"]
    assert not ended.stderr


def test_switched_off(tmp_path: Path) -> None:
    ended = run(host(tmp_path), ALLOTROPE_VLLM="0")
    assert ended.stdout.startswith("0\n") and not ended.stderr


@pytest.mark.parametrize(
    ("options", "environment", "text"),
    [
        ({"version": "99.1.0"}, {}, "vLLM 99.1.0 is not known (known: 0.25.x, 0.26.x, "),
        ({"without": "SlidingWindowSpec"}, {}, "has no attribute 'SlidingWindowSpec'"),
        ({"without": "MLAAttentionSpec", "earlier": True}, {}, "FullAttentionSpec has no parameter tokens_per_state"),
        ({}, {"ALLOTROPE_VLLM": "yes"}, "ALLOTROPE_VLLM='yes' is not understood; allowed: 0, 1"),
    ],
    ids=["unknown version", "removed symbol", "neither way", "unknown switch"],
)
def test_one_line_and_the_host_goes_on(
    tmp_path: Path, options: dict[str, Any], environment: dict[str, str], text: str
) -> None:
    ended = run(host(tmp_path, **options), CALL.replace("register()\nregister()", "register()"), **environment)
    (line,) = lines(ended)
    assert line.startswith("allotrope: plugin off, vLLM runs its own models: ") and text in line
    assert ended.stdout.startswith("0\n")


def test_a_missing_parameter_is_found(tmp_path: Path) -> None:
    path = host(tmp_path)
    file = path / "vllm/v1/attention/backend/__init__.py"
    file.write_text(file.read_text().replace(", block_table_tensor=None", ""))
    (line,) = lines(run(path, "from allotrope.plugins.vllm import register\nregister()"))
    assert "CommonAttentionMetadata has no parameter block_table_tensor" in line


def test_registering_may_fail(tmp_path: Path) -> None:
    path = host(tmp_path)
    file = path / "vllm/model_executor/models/__init__.py"
    file.write_text(file.read_text().replace("cls.found[name] = path", "raise OSError('registry\\n is full')"))
    (line,) = lines(run(path, "from allotrope.plugins.vllm import register\nregister()"))
    assert "registry is full" in line


def test_without_a_host_nothing_is_imported() -> None:
    code = "from allotrope.plugins.vllm import register\nregister()\nprint([n for n in sys.modules if 'vllm' in n])"
    ended = run(None, code.replace("register()", "pass", 1) if contract.installed() else code)
    assert "vllm.model_executor" not in ended.stdout


@pytest.mark.parametrize(
    ("options", "environment", "text"),
    [
        ({"version": "0.5.24"}, {}, "SGLang 0.5.24 is not known (known: 0.5."),
        ({"without": "ForwardBatch"}, {}, "has no attribute 'ForwardBatch'"),
        ({}, {"ALLOTROPE_SGLANG": "yes"}, "ALLOTROPE_SGLANG='yes' is not understood; allowed: 0, 1"),
    ],
    ids=["unknown version", "removed symbol", "unknown switch"],
)
def test_one_line_in_sglang(tmp_path: Path, options: dict[str, Any], environment: dict[str, str], text: str) -> None:
    path = host(tmp_path, **({"version": "0.5.23", "contract": sglang_contract.CONTRACT} | options))
    (line,) = lines(run(path, "from allotrope.plugins.sglang import register\nregister()", **environment))
    assert line.startswith("allotrope: plugin off, SGLang runs its own models: ") and text in line


def test_sglang_switched_off(tmp_path: Path) -> None:
    path = host(tmp_path, "0.5.23", contract=sglang_contract.CONTRACT)
    code = "import sys\nfrom allotrope.plugins.sglang import register\nregister()\nprint('sglang' in sys.modules)"
    ended = run(path, code, ALLOTROPE_SGLANG="0")
    assert ended.stdout == "False\n" and not ended.stderr


@pytest.mark.parametrize("name", HOSTS)
def test_the_contract_lists_every_host_symbol(name: str) -> None:
    """What a plugin's files import of its host is what the contract lists, no more and no less."""
    used = set()
    for path in PLUGIN.parent.joinpath(name).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == name:
                used |= {f"{node.module}:{alias.name}" for alias in node.names}
            if isinstance(node, ast.Import):
                assert not any(alias.name.split(".")[0] == name for alias in node.names), path
    symbols = (*HOSTS[name].SYMBOLS, *HOSTS[name].CONTRACT.optional, *getattr(HOSTS[name], "UNPROBED", ()))
    listed = {one.path for symbol in symbols for one in (symbol, symbol.instead or symbol)}
    # Read, never named: what `get_forward_context` returns, what builders are given, a config of `VllmConfig`.
    read = {"vllm.forward_context:ForwardContext", "vllm.config:SpeculativeConfig"}
    assert listed == used | (read if name == "vllm" else {symbol.path for symbol in sglang_contract.READ})


@pytest.mark.parametrize(
    ("name", "version", "without"), [("vllm", "0.32.0", "MultipleOf"), ("sglang", "0.5.23", "AttentionBackend")]
)
def test_compat_reports_the_host(name: str, version: str, without: str, tmp_path: Path) -> None:
    code = "from allotrope.commands.compat import report\nimport json\nprint(json.dumps(report({!r})))".format(
        f"allotrope.plugins.{name}"
    )
    import json

    of_host = {"version": version, "contract": HOSTS[name].CONTRACT}
    good = json.loads(run(host(tmp_path / "good", **of_host), code).stdout)
    assert good["version"] == version and not good["refusals"]
    assert {one["architecture"] for one in good["models"] if one["taken"]} == set(ARCHITECTURES)
    bad = json.loads(run(host(tmp_path / "bad", without=without, **of_host), code).stdout)
    assert len(bad["refusals"]) == 1 and not any(one["taken"] for one in bad["models"])
    assert {one["family"] for one in good["families"] if one["runs"]} == set(FAMILIES)
    assert not any(one["runs"] for one in bad["families"])
    # A symbol of one command alone is named, and refuses nothing.
    assert all("No module named" in one["reason"] for one in good["optional"])
    switch = f"ALLOTROPE_{name.upper()}"
    off = json.loads(run(host(tmp_path / "off", **of_host), code, **{switch: "0"}).stdout)
    assert off["switched_off"] == f"{switch}=0" and not off["refusals"]
    assert not any(one["taken"] for one in off["models"]) and not any(one["runs"] for one in off["families"])
    unclear = json.loads(run(host(tmp_path / "unclear", **of_host), code, **{switch: "yes"}).stdout)
    assert unclear["refusals"] == [f"{switch}='yes' is not understood; allowed: 0, 1"]


@pytest.mark.parametrize("name", HOSTS)
def test_limits_are_of_kinds_of_caches_that_there_are(name: str) -> None:
    """And a model of several families has those of each, and those of its kinds of caches together."""
    contract = HOSTS[name].CONTRACT
    kinds = frozenset[str]().union(*(family.cache_kinds for family in FAMILIES.values()))
    assert all(limit.kinds <= kinds for limit in contract.limits)
    assert contract.limits_of(()) == []
    both = contract.limits_of({"latent", "state"})
    assert {*contract.limits_of({"latent"}), *contract.limits_of({"state"})} <= set(both)
    every = [*contract.limits_of_all(), *contract.limits_of(kinds)]
    assert set(every) == {limit.what for limit in contract.limits}
