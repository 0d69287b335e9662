"""Tokenizers of Hugging Face directories, against Transformers' reading of the same files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allotrope.errors import InvalidRequest, ModelError
from allotrope.text.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "The capital of France is Paris.",
    "def f(x):\n\treturn [i**2 for i in range(10)]\n\n\n# end",
    "emoji 😀👩‍👩‍👧🇩🇪 done",
    "12345 3.14 1,000",
    "  two   spaces \n\n\t x ",
    "naïve — “日本語” العربية",
    "a<|im_end|>b<think>c",
    "\x00\u2028",
    "",
]


@pytest.fixture
def copy(byte_level_directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(byte_level_directory, tmp_path / "copy"))


def update(file: Path, **entries: Any) -> None:
    old = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    file.write_text(json.dumps({**old, **entries}), encoding="utf-8")


def test_equals_transformers(byte_level_directory: Path, byte_level: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(byte_level_directory))
    for text in TEXTS:
        ids = byte_level.encode(text)
        assert ids == theirs.encode(text, truncation=False), text
        for skip in (False, True):
            assert byte_level.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert (byte_level.bos_id, byte_level.vocab_size) == (theirs.bos_token_id, len(theirs))
    assert byte_level.eos_ids == (theirs.eos_token_id, theirs.convert_tokens_to_ids("<|im_end|>"))


def test_tokens_are_bytes(byte_level: Tokenizer) -> None:
    text = "naïve 😀<|im_end|>"
    ids = byte_level.encode(text)
    assert b"".join(byte_level.token_bytes(i) for i in ids) == text.encode()
    half = byte_level.token_id("ð")
    assert half is not None
    assert (byte_level.token_bytes(half), byte_level.token_text(half)) == (b"\xf0", "\ufffd")
    # Ids that a model scores but no token has.
    assert byte_level.token_bytes(byte_level.vocab_size) == byte_level.token_bytes(-1) == b""
    assert byte_level.decode([byte_level.vocab_size, *ids[:1]]) == byte_level.decode(ids[:1])


def test_half_a_surrogate_pair_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate pair at character 2") as caught:
        byte_level.encode("ab\ud83d")
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequest) as caught:
        byte_level.apply_chat_template([{"role": "user", "content": "\ud83d"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("generation", "config", "eos_ids"),
    [
        ({"eos_token_id": [1, 0]}, {}, (1, 0, 2)),
        ({"eos_token_id": 5}, {"eos_token_id": 7}, (5, 0, 2)),
        ({}, {"eos_token_id": 7}, (7, 0, 2)),
        ({}, {"text_config": {"eos_token_id": [7, 8]}}, (7, 8, 0, 2)),
        ({}, {}, (0, 2)),
    ],
)
def test_ids_that_end_a_reply(copy: Path, generation: Any, config: Any, eos_ids: tuple[int, ...]) -> None:
    (copy / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert load_tokenizer(str(copy)).eos_ids == eos_ids


def test_turn_ends_count_only_if_the_template_has_them(copy: Path) -> None:
    update(copy / "tokenizer_config.json", chat_template="{{ messages[0].content }}")
    assert load_tokenizer(str(copy)).eos_ids == (0,)


def test_tokens_of_the_config_are_added(copy: Path) -> None:
    size = load_tokenizer(str(copy)).vocab_size
    added = {"content": "<tool>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    update(
        copy / "tokenizer_config.json",
        added_tokens_decoder={str(size): {**added, "special": True}},
        add_bos_token=True,
        pad_token="<think>",
    )
    tokenizer = load_tokenizer(str(copy))
    think = tokenizer.token_id("<think>")
    assert tokenizer.encode("<tool>a<think>")[::2] == [0, tokenizer.token_id("a")]
    assert tokenizer.encode("<tool>", add_special_tokens=False) == [size]
    assert {size, think} <= tokenizer.special_ids
    update(copy / "tokenizer_config.json", added_tokens_decoder={"5000": {**added, "special": True}})
    with pytest.raises(ModelError, match=rf"'<tool>' has id 5000 in tokenizer_config.json, {size} in tokenizer.json"):
        load_tokenizer(str(copy))


def test_where_chat_templates_are_found(copy: Path) -> None:
    hello = [{"role": "user", "content": "x"}]
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    update(copy / "tokenizer_config.json", chat_template=named)
    tokenizer = load_tokenizer(str(copy))
    assert (tokenizer.render_chat(hello), tokenizer.render_chat(hello, tools=[{}])) == ("plain", "tools")
    (copy / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert load_tokenizer(str(copy)).chat_template == "file"
    (copy / "chat_template.jinja").unlink()
    update(copy / "tokenizer_config.json", chat_template=None)
    assert load_tokenizer(str(copy)).chat_template is None
    update(copy / "chat_template.json", chat_template="json")
    assert load_tokenizer(str(copy)).chat_template == "json"


def test_tokenizers_that_are_python_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import ByT5Tokenizer

    from allotrope.request import SamplingParams
    from allotrope.text.stream import TextStream

    theirs = ByT5Tokenizer()
    theirs.save_pretrained(str(tmp_path))
    assert not (tmp_path / "tokenizer.json").exists()
    tokenizer = load_tokenizer(str(tmp_path))
    text = "naïve 😀 stop"
    ids = tokenizer.encode(text)
    assert ids == theirs.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_ids == (theirs.eos_token_id,)
    stream = TextStream(tokenizer, SamplingParams(stop=("st",)))
    assert "".join(stream.push([i]) for i in ids) == "naïve 😀 "


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "there is no tokenizer.json"),
        ({"tokenizer.json": "{"}, "tokenizer.json"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "[]"}, "tokenizer_config.json holds no JSON object"),
    ],
)
def test_broken_directories(tmp_path: Path, files: dict[str, str], words: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=words):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("config.json", '{"eos_token_id": {}}', "not of the form that tokenizers have"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"a": 1}}', "not of the form that tokenizers have"),
        ("tokenizer_config.json", '{"chat_template": 1}', "not of the form that tokenizers have"),
        ("tokenizer_config.json", "[" * 200_000, "tokenizer_config.json: "),
        ("chat_template.jinja", b"\xff", "not of the form that tokenizers have"),
    ],
)
def test_files_of_another_form(copy: Path, file: str, text: str | bytes, words: str) -> None:
    (copy / "generation_config.json").unlink(missing_ok=True)
    (copy / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelError, match=words):
        load_tokenizer(str(copy))


def test_null_stands_for_nothing(copy: Path) -> None:
    (copy / "config.json").write_text('{"text_config": null}')
    update(copy / "tokenizer_config.json", added_tokens_decoder=None)
    assert load_tokenizer(str(copy)).eos_ids


def test_unsupported_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file or directory"):
        load_tokenizer(str(tmp_path / "missing"))
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"a directory or a \.gguf file is needed"):
        load_tokenizer(str(tmp_path / "x.bin"))


def test_loading_imports_neither_torch_nor_transformers(byte_level_directory: Path, sentencepiece_file: str) -> None:
    program = (
        "import sys; from allotrope.text.stream import TextStream; from allotrope.text.tokenizer import load_tokenizer;"
        "[load_tokenizer(path).encode('a') for path in sys.argv[1:]];"
        "print([name for name in ('torch', 'transformers', 'gguf') if name in sys.modules])"
    )
    command = [sys.executable, "-c", program, str(byte_level_directory), sentencepiece_file]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"
