"""What README, CONTRIBUTING and docs name exists: commands, flags, make targets, files, modules, extras."""

from __future__ import annotations

import ast
import importlib
import json
import re
import runpy
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from allotrope.architectures.registry import ARCHITECTURES, find_architecture, read_draft, read_spec
from allotrope.attention.registry import FAMILIES
from allotrope.commands.app import build_app
from allotrope.commands.refusals import REFUSED

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Flags of other programs that a page may name.
OTHER_FLAGS = {"--index-url", "--no-deps", "--additional-config", "--no-enable-prefix-caching"}
OTHER_FLAGS |= {"--model-type", "--disable-prefill-cuda-graph", "--max-mamba-cache-size"}
LM_EVAL_FLAGS = {"--model-args", "--include-path", "--log-samples", "--output-path", "--apply-chat-template"}
LM_EVAL_FLAGS |= {"--gen-kwargs", "--limit"}
RAY_FLAGS = {"--head", "--node-ip-address", "--address"}
# Made on the user's machine, or named as a pattern.
NOT_IN_THE_TREE = (".venv", ".cache", "path/to/")


def code(text: str) -> Iterator[str]:
    """Every line of a code block, and every inline code span."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for block in blocks:
        yield from block.replace("\\\n", " ").splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def commands() -> dict[str, set[str]]:
    """Command name, such as `bench serve`, to its flags."""
    found: dict[str, set[str]] = {}

    def walk(command: Any, name: str) -> None:
        found[name] = {flag for p in command.params for flag in (*p.opts, *p.secondary_opts) if flag.startswith("-")}
        for child, below in getattr(command, "commands", {}).items():
            walk(below, f"{name} {child}".strip())

    walk(typer.main.get_command(build_app()), "")
    return found


def unknown(kind: str, pattern: str, text: str, is_known: Callable[[str], bool]) -> list[str]:
    """`kind name` for everything in `text` that matches `pattern` and is not known."""
    return [f"{kind} {name}" for name in re.findall(pattern, text) if not is_known(name)]


def faults(page: Path) -> list[str]:
    """Everything that the page names and that does not exist."""
    known = commands()
    scripts = re.findall(
        r'add_argument\(\s*"(--[\w-]+)"',
        "".join(f.read_text() for f in [*ROOT.glob("bench/**/*.py"), *ROOT.glob("examples/**/*.py")]),
    )
    flags = set().union(*known.values(), REFUSED, OTHER_FLAGS, LM_EVAL_FLAGS, RAY_FLAGS, scripts, {"--help", "--debug"})
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = page.read_text()
    wrong = unknown("link", r"\]\(([^)#:]+?)(?:#[^)]*)?\)", text, lambda link: (page.parent / link).exists())
    for line in code(text):
        wrong += unknown("flag", r"(?<![\w-])--[a-z][\w-]*", line, lambda flag: flag.replace("_", "-") in flags)
        wrong += unknown("make", r"^make (?:\w+=\S+ )*([\w-]+)", line, targets.__contains__)
        wrong += unknown("extra", r"(?:allotrope|'\.)\[(\w+)\]", line, extras.__contains__)
        wrong += unknown(
            "file", r"(?<![\w./-])((?:[\w.-]+/)+[\w-]+\.(?:py|md|toml))\b", line, lambda f: exists(f, page)
        )
        wrong += unknown("module", r"(?<![\w./-])allotrope(?:\.\w+)+", line, importable)
        if found := re.match(r"(?:\.venv/bin/|python -m )?allotrope\b(?![/.\[])(.*)", line):
            wrong += command_faults(shlex.split(found[1], comments=True), known)
    return wrong


def exists(path: str, page: Path) -> bool:
    """Whether a named file is in the tree: from its root, from the package, or from beside the page."""
    return path.startswith(NOT_IN_THE_TREE) or any(
        (start / path).exists() for start in (ROOT, ROOT / "allotrope", page.parent)
    )


def importable(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


# What `allotrope` takes before a command or with any.
EVERYWHERE = {"--help", "-h", "--debug", "--verbose", "-v", "--version", "-V"}


def command_faults(words: list[str], known: dict[str, set[str]]) -> list[str]:
    """A command line of ours whose command or flags do not exist. `words`: what follows `allotrope`."""
    name = ""
    rest = list(words)
    while rest and f"{name} {rest[0]}".strip() in known:
        name = f"{name} {rest.pop(0)}".strip()
    if words and not name and not words[0].startswith("-"):
        return [f"command {words[0]}"]
    return [
        f"{flag} of {name!r}"
        for word in rest
        if word.startswith("-") and (flag := word.partition("=")[0].replace("_", "-")) not in known[name] | EVERYWHERE
    ]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_what_a_page_names_exists(page: Path) -> None:
    assert faults(page) == []


def test_faults_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "See [this](gone.md), `--gone`, `make gone`, `engine/gone.py`, `allotrope.engine.gone`.\n"
        "Run `pip install '.[gone]'`.\n"
        "```\nallotrope gone MODEL\nallotrope chat MODEL --page-size 8 --api-key=x --strict\n```\n"
    )
    assert sorted(faults(page)) == sorted(
        [
            "link gone.md",
            "flag --gone",
            "make gone",
            "file engine/gone.py",
            "module allotrope.engine.gone",
            "extra gone",
            "command gone",
            "--strict of 'chat'",
        ]
    )


def test_every_command_is_in_the_command_line_page() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    missing = [name for name in commands() if name not in ("", "bench") and f"`allotrope {name}" not in text]
    assert missing == []


def test_every_variable_of_the_environment_is_in_the_command_line_page() -> None:
    """A text of the package that is such a name is one, but for what our backends are called in vLLM."""
    ours, backends = re.compile(r"ALLOTROPE_[A-Z_]+"), {"ALLOTROPE_LONG_PAGES", "ALLOTROPE_STATE"}
    read = {
        node.value
        for path in (ROOT / "allotrope").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ours.fullmatch(node.value)
    }
    rows = re.findall(r"^\| (`ALLOTROPE_[^|]*)\|", (ROOT / "docs" / "cli.md").read_text(), re.MULTILINE)
    assert {name for row in rows for name in ours.findall(row)} == read - backends


def run_script(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a script defines. Its folder is where Python looks first, as when it is run."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return runpy.run_path(str(ROOT / "scripts" / name))


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: compiled backends take no layer")
def test_the_tables_of_backends_are_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    script = run_script("backend_tables.py", monkeypatch)
    page = (ROOT / "docs" / "backends.md").read_text()
    assert set(re.findall(r"<!-- table of (\w+) -->", page)) == set(FAMILIES)
    assert script["updated"](page) == page, "run python scripts/backend_tables.py"


def test_the_table_of_recipes_is_what_plans_say(monkeypatch: pytest.MonkeyPatch) -> None:
    script = run_script("recipe_table.py", monkeypatch)
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert script["updated"](page) == page, "run python scripts/recipe_table.py"
    for recipe in script["RECIPES"]:
        config = json.loads((ROOT / "bench" / "configs" / recipe.config / "config.json").read_text())
        architecture, _ = read_spec(config, recipe.title)
        methods = {"mtp": read_draft(config, recipe.title) is not None, "eagle3": architecture.decoder.one_stream}
        assert {name: f"`{name}`" in recipe.drafts for name in methods} == methods, recipe.title


def test_the_table_of_draft_methods_is_that_of_the_registry() -> None:
    page = (ROOT / "docs" / "speculation.md").read_text()
    found: dict[str, tuple[str, bool, bool]] = {}
    for row in re.findall(r"^\| .*ForC.*\|$", page, re.MULTILINE):
        _, names, lookup, mtp, eagle3 = (cell.strip() for cell in row.strip("|").split("|"))
        for name in re.findall(r"`(\w+)`", names):
            assert name not in found, f"{name} stands in two rows"
            found[name] = lookup, mtp != "–", eagle3 == "yes"
    rows = {name: find_architecture({"architectures": [name]}, name) for name in ARCHITECTURES}
    assert found == {name: ("yes", row.tiny_draft is not None, row.decoder.one_stream) for name, row in rows.items()}
