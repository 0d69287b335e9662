"""`allotrope generate`: continue prompts and print the texts."""

from __future__ import annotations

from typing import Annotated

import typer

from allotrope.commands.sampling import SamplingOptions
from allotrope.config import EngineConfig


def generate(
    engine: EngineConfig,
    sampling: SamplingOptions,
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", help="Prompt; may be given several times.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each prompt into the model's chat template as a user message.")
    ] = False,
) -> None:
    """Continue each PROMPT with MODEL. One prompt streams; several run together and are printed in their order."""
    from allotrope.commands.local import LocalModel

    model = LocalModel(engine)
    if chat:
        model.check_chats("Leave --chat out.")
    if len(prompt) == 1:
        message = [{"role": "user", "content": prompt[0]}]
        for piece in model.stream_unparsed(message, sampling) if chat else model.continue_text(prompt[0], sampling):
            print(piece, end="", flush=True)
        print()
        return
    tokenizer = model.llm.tokenizer
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)
        for text in prompt
    ]
    params = [model.params(ids, sampling) for ids in prompts]
    for text, output in zip(prompt, model.llm.generate(prompts, params), strict=True):
        print(f"{text!r}: {output.outputs[0].text!r}")
