"""Names use the words of the field: home-made ones are in no identifier and in no file name.

`docs/glossary.md` says what the field's words mean. Ordinary words, such as `rows`, are a matter of reading and not of
this list.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("allotrope", "tests", "bench", "train", "examples")

# A home-made word, or several in a row -> the field's word.
WORDS = {
    "alike": "group of equal shapes",
    "await_turn": "gdc_wait",
    "beside": "side stream, overlapped shared expert",
    "blueprint": "LoadPlan",
    "cheapest_splits": "num_splits heuristic",
    "cut_off": "truncate",
    "dead_pages": "out-of-window pages",
    "draw_up": "resolve",
    "early_jit": "pdl_jit",
    "flight": "in-flight step",
    "heat": "temperature",
    "hole": "placeholder",
    "holes": "placeholders",
    "hollow": "meta_model",
    "in_turn": "gdc_wait, programmatic dependent launch",
    "judge": "tolerance",
    "judged": "within tolerance",
    "judges": "tolerance",
    "keeper": "KVCacheManager",
    "kept_formats": "kept quantized",
    "lasting_bytes": "packed bytes",
    "leave_place": "placeholder token",
    "opened": "gated RMSNorm",
    "orderly": "specializations",
    "picked": "top-k indices, sparse indices",
    "picks": "top-k indices, sparse indices",
    "rectangle": "work tile, sub-batch",
    "rectangles": "work tiles, sub-batches",
    "regime": "execution mode",
    "regimes": "execution modes",
    "rehearsal": "warm-up",
    "rehearse": "warm up",
    "rehearsed": "warmed up",
    "rehearses": "warms up",
    "rehearsing": "warming up",
    "scored_at_once": "prompt-logprobs chunk",
    "send_off": "launch",
    "sendoff": "launch",
    "stranger": "background request",
    "strangers": "background requests",
    "taps": "hooks",
    "truth": "expected outputs",
    "turned": "transposed, swap-AB",
    "unpacked": "dequantized",
}
# Of file names alone.
FILE_WORDS = {"ahead": "AOT compile: aot"}
# Words of the field elsewhere: only in the folders of this name. A convolution has taps.
ONLY_IN = {"taps": "verify"}
# Compounds that the field writes, although they hold a word of the list.
FIELD_WORDS = ("in_flight", "inflight")


def words(name: str) -> list[str]:
    """The lower-case words of a snake_case or CamelCase name."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def home_made(name: str, listed: dict[str, str]) -> list[str]:
    """The listed words that a name has."""
    text = f"_{'_'.join(words(name))}_"
    for allowed in FIELD_WORDS:
        text = text.replace(f"_{allowed}_", "__")
    return [word for word in listed if f"_{word}_" in text]


def names(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every name in Python source."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def offences(root: Path) -> dict[str, list[str]]:
    """Listed word -> where it is used, each name of a file once. Folders count as file names."""
    found: dict[str, list[str]] = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if "__pycache__" in path.parts or not (path.is_dir() or path.suffix):
                continue
            where = path.relative_to(root)
            for word in home_made(path.stem, WORDS | FILE_WORDS):
                found.setdefault(word, []).append(f"{where} (file name)")
            if path.suffix != ".py":
                continue
            listed = {word: field for word, field in WORDS.items() if ONLY_IN.get(word, folder) in where.parts}
            first: dict[str, int] = {}
            for line, name in names(path.read_text()):
                first.setdefault(name, line)
            for name, line in first.items():
                for word in home_made(name, listed):
                    found.setdefault(word, []).append(f"{where}:{line} {name}")
    return found


def message(found: dict[str, list[str]]) -> str:
    listed = WORDS | FILE_WORDS
    lines = [f"{sum(map(len, found.values()))} names use home-made words; docs/glossary.md has the field's:"]
    for word, places in sorted(found.items()):
        lines += [f"{word} -> {listed[word]}", *(f"    {place}" for place in places)]
    return "\n".join(lines)


def test_names_use_the_words_of_the_field() -> None:
    found = offences(ROOT)
    assert not found, message(found)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("send_off", ["send_off"]),
        ("_SendOff", ["send_off"]),
        ("SCORED_AT_ONCE", ["scored_at_once"]),
        ("MemoryKeeper", ["keeper"]),
        ("fill_hole", ["hole"]),
        ("whole", []),
        ("in_flight", []),
        ("flight", ["flight"]),
        ("heatmap", []),
        ("HTTPTruth", ["truth"]),
    ],
)
def test_words_of_a_name(name: str, expected: list[str]) -> None:
    assert home_made(name, WORDS) == expected


def test_every_offence_is_in_one_message(tmp_path: Path) -> None:
    (tmp_path / "allotrope").mkdir()
    (tmp_path / "allotrope" / "ahead.py").write_text("import ahead\n\n\ndef turned(picks, taps):\n    return 'heat'\n")
    (tmp_path / "allotrope" / "verify").mkdir()
    (tmp_path / "allotrope" / "verify" / "layers.py").write_text("taps = []\n")
    text = message(offences(tmp_path))
    assert "ahead -> AOT compile: aot\n    allotrope/ahead.py (file name)" in text
    assert "turned -> transposed, swap-AB\n    allotrope/ahead.py:4 turned" in text
    assert "taps -> hooks\n    allotrope/verify/layers.py:1 taps" in text
    assert "picks -> " in text and "heat" not in text and text.startswith("4 names")
