"""The laws of docs/architecture.md, held by reading the code's imports and by looking at what importing does."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "allotrope"

# Parts of the package, the lowest first: each imports only from its own line and those above it.
ORDER = [
    {"errors", "env", "field_types"},
    {"request", "config", "rank_layout", "speculative_config", "logs", "output_files", "progress", "gguf_file"},
    {"kernels"},
    {"ops"},
    {"attention", "text"},
    {"grammars"},
    {"cache", "layers"},
    {"checkpoint", "graphs"},
    {"architectures"},
    {"loading"},
    {"engine", "plugins"},
    {"llm", "server", "verify", "bench"},
    {"eval"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
# Parts on one line are independent of each other, but for these (importer, imported).
SIDEWAYS = {("bench", "llm"), ("verify", "llm")}
SIDEWAYS |= {("config", "speculative_config"), ("config", "rank_layout"), ("config", "request")}
SERVER_PACKAGES = {"fastapi", "uvicorn", "starlette", "pydantic", "prometheus_client"}
PRODUCTS = ("llama", "mistral", "qwen", "deepseek", "gemma", "gpt_oss", "gptoss", "minimax", "kimi", "glm4", "mimo")


def _modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts), path


def _imports(path: Path, *, top_level: bool = False) -> Iterator[str]:
    """Names that a file imports; `top_level`: only those that happen when it is itself imported."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module


def _part(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def _rank(part: str) -> int:
    return next((i for i, line in enumerate(ORDER) if part in line), -1)


@pytest.mark.parametrize(
    ("module", "path"), list(_modules()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_imports_point_one_way(module: str, path: Path) -> None:
    part = _part(module)
    if part in ("", "__init__"):
        return
    assert _rank(part) >= 0, f"{part} is in no line of ORDER"
    for name in _imports(path):
        if not name.startswith("allotrope."):
            continue
        other = _part(name)
        allowed = other == part or _rank(other) < _rank(part) or (part, other) in SIDEWAYS
        assert allowed, f"{module} imports {name}, which is not below it"


@pytest.mark.parametrize(
    ("module", "path"), list(_modules()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_server_packages_stay_in_the_server(module: str, path: Path) -> None:
    found = {name.split(".")[0] for name in _imports(path)} & SERVER_PACKAGES
    assert not found or _part(module) == "server", f"{module} imports {found}"


def test_only_architectures_name_a_product() -> None:
    """Identifiers and file names; documentation may say which checkpoints a mechanism serves."""
    for module, path in _modules():
        if _part(module) in ("architectures", "plugins") or module.startswith(
            ("allotrope.text.gguf", "allotrope.text.formats", "allotrope.checkpoint.gguf")
        ):
            continue
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        names |= {
            node.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        named = {name for name in (*names, path.stem) if any(product in name.lower() for product in PRODUCTS)}
        assert not named, f"{module} names {named}"


# What PyTorch says of a device: attributes of torch.cuda, and of torch.version.
OF_DEVICES = {
    "cuda": {"get_device_capability", "get_device_properties", "get_device_name", "mem_get_info", "get_arch_list"},
    "version": {"hip", "cuda"},
}
CHIP_NAMES = ("a100", "l40s", "h100", "h200", "b200", "mi300", "mi355", "rtx")
# Launches that were measured are kept by the name of the chip.
NAMES_CHIPS = (
    "allotrope.kernels.chip",
    "allotrope.kernels.chip_figures",
    "allotrope.ops.matmul.launch",
    "allotrope.ops.matmul.triton",
)


def _device_questions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            if node.attr in OF_DEVICES.get(node.value.attr, ()):
                yield f"{node.value.attr}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module in ("torch.cuda", "torch.version"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_only_chip_asks_a_device_what_it_is() -> None:
    """Everything else reads a `Chip`, so that what is compiled for a chip ahead of time is what runs on it."""
    for module, path in _modules():
        asked = set(_device_questions(ast.parse(path.read_text())))
        assert not asked or module == "allotrope.kernels.chip", f"{module} asks for {asked}"
    assert set(_device_questions(ast.parse("torch.cuda.mem_get_info(0), torch.version.hip, gl.version.other"))) == {
        "cuda.mem_get_info",
        "version.hip",
    }


def test_only_chip_names_a_chip() -> None:
    """Identifiers and strings; documentation may say what was measured where."""
    for module, path in _modules():
        tree = ast.parse(path.read_text())
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
        words = {node.value for node in strings if id(node) not in prose}
        words |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        named = {word for word in words if any(chip in word.lower() for chip in CHIP_NAMES)}
        assert not named or module in NAMES_CHIPS, f"{module} names {named}"


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_is_light() -> None:
    """`import allotrope` loads neither torch nor a server package."""
    heavy = sorted(SERVER_PACKAGES | {"torch", "transformers", "triton", "numpy"})
    loaded = _run(f"import sys, allotrope; print([name for name in {heavy} if name in sys.modules])")
    assert loaded.strip() == "[]"


def test_offline_use_needs_no_server_package() -> None:
    blocked = sorted(SERVER_PACKAGES | {"msgspec", "typer", "rich"})
    code = f"""
import sys
for name in {blocked}:
    sys.modules[name] = None
from allotrope import LLM, SamplingParams
print(LLM.__name__, SamplingParams().n)
"""
    assert _run(code).split() == ["LLM", "1"]


def test_families_enumerate() -> None:
    """Every family folder is registered under its name, has the files that readers expect, and a reference last."""
    from allotrope.attention.registry import FAMILIES

    folders = {path.parent.name for path in (PACKAGE / "attention").glob("*/spec.py")}
    assert folders == set(FAMILIES)
    for name, family in FAMILIES.items():
        assert family.name == name
        assert family.backends[-1].name == "reference"
        for file in ("spec.py", "plan.py", "reference.py", "cost.py", "README.md"):
            assert (PACKAGE / "attention" / name / file).exists(), f"{name} has no {file}"


def test_a_family_is_known_to_its_folder_and_its_mixer_alone() -> None:
    """Others ask `FAMILIES`. A kernel bench or a test may name the family that it is about."""
    folders = {path.parent.name for path in (PACKAGE / "attention").glob("*/spec.py")}
    for module, path in _modules():
        # Operations lie below attention: another test holds that.
        if module.startswith(("allotrope.attention.", "allotrope.layers.mixers.", "allotrope.ops.")):
            continue
        named = [name for name in _imports(path) if name.split(".")[1:2] == ["attention"]]
        assert not [name for name in named if set(name.split(".")[2:]) & folders], f"{module} imports {named}"


def test_families_say_what_their_caches_are() -> None:
    """`cache_kinds`, `scale_names` and `output_shapes` against the caches and outputs of the family's own cases."""
    import torch

    from allotrope.attention.cache_layout import PagedRows, StateSlots
    from allotrope.attention.check import cases
    from allotrope.attention.family import CacheFormat
    from allotrope.attention.registry import FAMILIES

    for name, family in FAMILIES.items():
        specs = [case.spec for case in cases(name).values()]
        layouts = [layout for spec in specs for layout in spec.caches().values()]
        assert ("state" in family.cache_kinds) == any(isinstance(one, StateSlots) for one in layouts), name
        strides = [one.stride for one in layouts if isinstance(one, PagedRows)]
        assert ("compressed" in family.cache_kinds) == any(stride > 1 for stride in strides), name
        assert ("latent" in family.cache_kinds) == any("latent" in spec.caches() for spec in specs), name
        # States have no scales, entries have.
        assert bool(family.scale_names) == (not all(isinstance(one, StateSlots) for one in layouts)), name
        for spec in specs:
            assert not family.block_scaled(spec)
            assert family.with_cache(spec, CacheFormat()) == spec
            (shape, dtype), *_ = family.output_shapes(spec)
            assert len(shape) == 2 and dtype is None
            half = family.with_cache(spec, CacheFormat(state_dtype=torch.float16)).caches().values()
            kinds = {field.dtype for layout in half for field in layout.fields}
            assert (torch.float16 in kinds) == ("state" in family.cache_kinds), name


def test_every_architecture_reads_its_tiny_config() -> None:
    from allotrope.architectures.registry import ARCHITECTURES, find_architecture, read_spec

    for name in ARCHITECTURES:
        architecture = find_architecture({"architectures": [name]}, "the registry")
        _, spec = read_spec(architecture.tiny(), f"tiny config of {name}")
        assert spec.layers, name


def test_configs_are_frozen_and_explained() -> None:
    import dataclasses

    from allotrope.config import EngineConfig, ServerConfig

    for kind in (EngineConfig, ServerConfig):
        assert kind.__dataclass_params__.frozen
        for option in dataclasses.fields(kind):
            assert option.metadata.get("help"), f"{kind.__name__}.{option.name} has no help"


def test_cache_bytes_have_one_source() -> None:
    """What the plan says is what the arena allocates, for every architecture's tiny config."""
    import torch

    from allotrope.architectures.registry import ARCHITECTURES, find_architecture, read_spec
    from allotrope.cache.arena import Arena
    from allotrope.cache.groups import group_caches
    from allotrope.cache.memory import Demand, make_plan
    from allotrope.layers.parallel import Parallel

    for name in ARCHITECTURES:
        _, spec = read_spec(find_architecture({"architectures": [name]}, "").tiny(), name)
        shares = {i: layer.mixer.shares_cache_of for i, layer in enumerate(spec.layers)}
        owners = {i: owner for i, owner in shares.items() if owner is not None}
        specs = [layer.mixer.attention(Parallel(), torch.float32, torch.float32) for layer in spec.layers]
        groups = group_caches([{} if i in owners else one.caches() for i, one in enumerate(specs)], 16)
        plan = make_plan(groups, Demand(context=256, sequences=2, step_tokens=64, reuse=True), 512)
        arena = Arena(plan, len(specs), owners, torch.device("cpu"))
        assert arena.bytes == plan.bytes, name


def test_files_that_are_no_code_are_packaged() -> None:
    """What an installation would lack is missed by no test of a checkout."""
    stated = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    others = [path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix in (".c", ".h", ".json", ".typed")]
    packaged = {path for pattern in stated["allotrope"] for path in PACKAGE.glob(pattern)}
    assert others and set(others) <= packaged


def _importers(source: str, name: str) -> set[str]:
    """The modules that import `name` from `source`."""
    return {
        module
        for module, path in _modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == source and name in {alias.name for alias in node.names}
    }


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("checkpoint.weights", "Loader"),
        ("checkpoint.weights", "fill_random"),
        ("checkpoint.weights", "finish"),
        ("loading.kv_scales", "set_kv_scales"),
        ("loading.quantized_formats", "formats_kept_quantized"),
        ("layers.backend_report", "backend_choices"),
    ],
)
def test_loading_is_told_once(source: str, name: str) -> None:
    """One rank, several ranks and the plugins load through `load_decoder`: each part of it is used there alone."""
    assert _importers(f"allotrope.{source}", name) == {"allotrope.loading.decoder"}


def test_every_host_loads_through_one_function() -> None:
    importers = _importers("allotrope.loading.decoder", "load_decoder")
    plugins = {"allotrope.plugins.vllm.model", "allotrope.plugins.sglang.model"}
    assert importers == {"allotrope.engine.load", *plugins}
    assert _importers("allotrope.engine.load", "load_model") == {"allotrope.engine.worker"}


@pytest.mark.parametrize(
    ("source", "name", "importers"),
    [
        ("engine.worker", "Worker", {"engine.ranks.distributed_executor", "engine.ranks.worker_loop"}),
        ("engine.worker", "prepare_rank", {"engine.ranks.distributed_executor", "engine.ranks.worker_loop"}),
        ("engine.ranks.distributed_executor", "DistributedExecutor", {"engine.engine"}),
    ],
)
def test_start_up_is_told_once(source: str, name: str, importers: set[str]) -> None:
    """By rank 0 and by the loop of the others: one rank is the case without them, not a start of its own."""
    assert _importers(f"allotrope.{source}", name) == {f"allotrope.{importer}" for importer in importers}


def test_the_engine_uses_only_declared_members_of_its_executor() -> None:
    from allotrope.engine.executor import Executor

    declared = {*Executor.__annotations__, *vars(Executor)}
    for file in ("engine", "step_loop", "pipeline_loop", "step_log"):
        for node in ast.walk(ast.parse((PACKAGE / "engine" / f"{file}.py").read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self._executor":
                assert node.attr in declared, f"engine/{file}.py uses Executor.{node.attr}"


@pytest.mark.parametrize(
    "path", [*sorted((PACKAGE / "engine").glob("*.py")), PACKAGE / "errors.py"], ids=lambda path: path.name
)
def test_the_engine_knows_neither_http_nor_tokenizers(path: Path) -> None:
    assert not [name for name in _imports(path) if name.startswith(("allotrope.text", "http", "tokenizers"))]
    tree = ast.parse(path.read_text())
    numbers = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is int}
    assert not numbers & {400, 401, 404, 405, 408, 413, 422, 429, 500, 503}, "HTTP statuses are the server's"
    names = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(tree)}
    assert not {name for name in names if "tokenizer" in name.lower()}
