"""The tokenizer of a model: text to ids, ids to text, chats to ids, and the ids that end a reply.

Owns the interface that all tokenizers share. `directory_tokenizer` and `gguf_tokenizer` read one from a directory or a
GGUF file. This module does not import torch, and only tokenizers that exist as Python code import `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allotrope.errors import InvalidRequest, ModelError
from allotrope.text.chat import render_chat
from allotrope.text.codec import Codec
from allotrope.text.detokenizer import Detokenizer

# Tokens that end a turn in chat templates. A model that sees one of them in its prompts ends its own turns with it,
# even if the checkpoint names only the token that ends a document.
# A GGUF file has no key for those that end a tool call, so that llama.cpp knows them by their text, too.
_TURN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>"),
    *("<|return|>", "<|call|>"),  # gpt-oss
    *("<turn|>", "<|tool_response>"),  # Gemma 4
)


class Tokenizer:
    """A model's tokenizer.

    `vocab_size`: the largest id plus one. `bos_id`: id that begins a text, if there is one. `eos_ids`: ids that end a
    reply. `special_ids`: ids of special tokens. `chat_template`: the template for chats without tools, if any.

    Arguments: `codec`: encodes and decodes. `special_tokens`: name (`bos_token`, ...) → token. `eos_ids`: the
    checkpoint's end-of-sequence ids. `chat_templates`: name → Jinja text; `tool_use` for chats with tools, else
    `default`.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        special_tokens: Mapping[str, str],
        eos_ids: Sequence[int],
        chat_templates: Mapping[str, str],
    ) -> None:
        self._codec = codec
        self._special_tokens = dict(special_tokens)
        self._chat_templates = dict(chat_templates)
        self.vocab_size = codec.size
        self.special_ids = codec.special_ids
        self.chat_template = self._chat_templates.get("default")
        self.bos_id = self._named_id("bos_token")
        named_eos = self._named_id("eos_token")
        ends = [*eos_ids, *([] if named_eos is None else [named_eos]), *self._turn_ends()]
        self.eos_ids = tuple(dict.fromkeys(ends))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. The names of special tokens in it become these tokens.

        `add_special_tokens`: add the tokens that the model expects around a text, such as BOS. Raises `InvalidRequest`
        if `text` cannot be encoded as UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text has half of a surrogate pair at character {error.start}, which is no text.", "prompt"
            ) from error
        return self._codec.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Bytes that are not UTF-8 become U+FFFD. Unknown ids have no text."""
        return self._codec.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, which may be a part of a character. b"" if the id is unknown."""
        return self._codec.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as readable text. Parts of characters become U+FFFD."""
        return self._codec.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_id(self, token: str) -> int | None:
        """Id of `token`, or None."""
        return self._codec.id_of(token)

    def detokenizer(self, *, skip_special_tokens: bool = True, continues_text: bool = False) -> Detokenizer:
        """A new incremental detokenizer. `continues_text`: see `TextStream`."""
        return self._codec.detokenizer(skip_special_tokens=skip_special_tokens, continues_text=continues_text)

    def template_for(self, *, tools: bool) -> str | None:
        """The checkpoint's template for chats with or without tools, if there is one."""
        return (self._chat_templates.get("tool_use") if tools else None) or self.chat_template

    def render_chat(
        self, messages: Any, /, *, template: str | None = None, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text of a chat. Arguments and errors are those of `apply_chat_template`."""
        if template is None:
            template = self.template_for(tools=bool(variables.get("tools")))
        if template is None:
            raise InvalidRequest(
                "this model has no chat template, so it cannot take messages; give one as template, or a text.",
                "messages",
            )
        return render_chat(
            template,
            messages,
            self._special_tokens,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )

    def apply_chat_template(
        self, messages: Any, /, *, template: str | None = None, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Ids of a chat's prompt.

        `messages`: list of {"role", "content"}; content is a string or a list of text parts. `template`: Jinja text
        that replaces the checkpoint's template. `add_generation_prompt`: end with the tokens that begin the reply.
        `variables`: further variables of the template, such as `tools` or `enable_thinking`.
        Raises `InvalidRequest` with param `messages` if there is no template, or it cannot render these messages.
        """
        prompt = self.render_chat(messages, template=template, add_generation_prompt=add_generation_prompt, **variables)
        try:
            # The template has written the special tokens itself.
            return self.encode(prompt, add_special_tokens=False)
        except InvalidRequest as error:
            raise InvalidRequest(str(error), "messages") from error

    def _named_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._codec.id_of(token)

    def _turn_ends(self) -> list[int]:
        templates = "".join(self._chat_templates.values())
        ids = [self._codec.id_of(token) for token in _TURN_ENDS if token in templates]
        return [i for i in ids if i is not None and i in self.special_ids]


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer in `path`: a directory with tokenizer files, or a `.gguf` file.

    Raises `ModelError` with the reasons if no tokenizer can be read.
    """
    location = Path(path).expanduser()
    if location.is_dir():
        from allotrope.text.directory_tokenizer import load_directory_tokenizer

        return load_directory_tokenizer(location)
    if location.is_file() and location.suffix == ".gguf":
        from allotrope.text.gguf_tokenizer import load_gguf_tokenizer

        return load_gguf_tokenizer(location)
    reason = "a directory or a .gguf file is needed" if location.exists() else "there is no such file or directory"
    raise ModelError(f"cannot load a tokenizer from {path}", [reason])
