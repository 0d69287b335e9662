"""A tiny model in the format of Hermes and Qwen3 that says what the last word of a conversation names."""

from __future__ import annotations

from pathlib import Path

from scripted_model import write_scripted_model

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
ARGUMENTS = {"city": "Paris", "days": 2}
SCRIPTS = {
    "plain": "Good morning, friend.",
    "weather": CALL,
    "ponder": "<think>\nThey greet me. I greet them.\n</think>\n\nGood evening!",
    "ponder-weather": "<think>\nI must look it up.\n</think>\n\nOne moment, please.\n" + CALL.replace("Paris", "Rome"),
    "both": CALL.replace("Paris", "Lima") + "\n" + CALL.replace("Paris", "Oslo"),
    "sunny": "It is sunny there.",
    "broken": '<tool_call>\n{"name": "get_weather", "arguments": {"city": \n</tool_call> and so on',
    "nonsense": "<tool_call>no JSON at all</tool_call> indeed",
    "unknown": '<tool_call>{"name": "no_such_tool", "arguments": {}}</tool_call>',
    "think-weather": "<think>\nLook!\n</think>\n\n" + CALL.replace("Paris", "Bonn"),
    "think-person": '<think>\nOf whom?\n</think>\n\n{"name": "Ida", "age": 35}',
    "person": '{"name": "Ada", "age": 36}',
    "make-person": '<tool_call>{"name": "Person", "arguments": {"name": "Eve", "age": 37}}</tool_call>',
    "final-result": '<tool_call>{"name": "final_result", "arguments": {"name": "Kim", "age": 38}}</tool_call>',
    "struck": "An <s>old</s> word.",
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "<|{{ messages[-1].content.split()[-1] }}|>"
    # Behind this, there is no script.
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def write_scripted_chat(directory: Path) -> Path:
    """Write the model into `directory`; returns it."""
    taken: set[str] = set()
    scripts = {f"<|{name}|>": _pieces(text, taken) for name, text in SCRIPTS.items()}
    return write_scripted_model(directory, scripts, TEMPLATE)


def _pieces(text: str, taken: set[str]) -> list[str]:
    """`text` in pieces of some characters, none of them `taken`, which they join."""
    pieces = _split(text, taken, 0)
    assert pieces is not None
    taken.update(pieces)
    return pieces


def _split(text: str, taken: set[str], turn: int) -> list[str] | None:
    """As `_pieces`, or None if there are none. `turn`: decides which length is tried first."""
    if not text:
        return []
    for length in (*(2 + (turn + extra) % 5 for extra in range(5)), *range(7, 40)):
        piece = text[:length]
        if piece not in taken and (rest := _split(text[length:], taken | {piece}, turn + 1)) is not None:
            return [piece, *rest]
    return None
