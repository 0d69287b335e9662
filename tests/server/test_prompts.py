"""Prompts that are made of messages."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from allotrope.errors import InvalidRequest
from allotrope.server.conversation import Conversation
from allotrope.server.prompts import PromptReader
from allotrope.text.tokenizer import load_tokenizer

HELLO = Conversation(messages=[{"role": "user", "content": "hello"}])


def test_messages_without_a_chat_template_are_refused_with_the_servers_option(tmp_path: Path) -> None:
    described = json.loads((write_tiny_model(tmp_path) / "tokenizer_config.json").read_text())
    del described["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(InvalidRequest, match="--chat-template FILE, or use /v1/completions") as found:
        asyncio.run(PromptReader(tokenizer, 512, 16, None).read_conversation(HELLO, {}))
    assert found.value.param == "messages"
    read = asyncio.run(PromptReader(tokenizer, 512, 16, "{{ messages[0].content }}").read_conversation(HELLO, {}))
    assert read.text == "hello"
