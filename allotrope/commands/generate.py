"""`allotrope generate`: continue prompts and print the texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from allotrope.commands.sampling import SamplingOptions
from allotrope.config import EngineConfig
from allotrope.errors import RequestsFailed

if TYPE_CHECKING:
    from allotrope.llm import RequestOutput


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
    failure: RequestsFailed | None = None
    outputs: list[RequestOutput | None]
    try:
        outputs = [*model.llm.generate(prompts, params)]
    except RequestsFailed as error:
        failure, outputs = error, error.outputs
    for text, output in zip(prompt, outputs, strict=True):
        if output is not None:
            print(f"{text!r}: {output.outputs[0].text!r}")
    if failure is not None:
        raise failure
