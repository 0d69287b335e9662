"""Writes a tiny model whose answers are known: a token has one successor, and the prompt's last one begins a script.

The embedding is the identity, the layer adds nothing, and the output layer maps each token to its successor. A token of
a script is a piece of text. The chat template ends a prompt with the token of the script that fits the conversation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_model import CONFIG, trained_tokenizer
from tokenizers import AddedToken

REASONING = ("The user asks. ", "I know it.")
PLAIN = ("Hello", " there", ", friend", ".")
CALL = ('{"name": "get_weather", "arguments": ', '{"city": ', '"Paris"', "}}")
ARGUMENTS = {"city": "Paris"}
AFTER = ("It is", " sunny in", " Paris", " today.")
JSON = ('{"name"', ': "Ada"', ', "age"', ": 36}")
PERSON = {"name": "Ada", "age": 36}
# First token, and what follows it.
SCRIPTS: dict[str, tuple[str, ...]] = {
    "<|plain|>": PLAIN,
    "<|ponder|>": ("<think>", *REASONING, "</think>", *(f"{text}" for text in ("So", ": hello", " again.", " Bye."))),
    "<|call|>": ("<tool_call>", *CALL, "</tool_call>"),
    "<|after|>": AFTER,
    "<|json|>": JSON,
}
PONDERED = "So: hello again. Bye."
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% set last = messages[-1] %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if last.role == 'tool' %}<|after|>{% elif tools %}<|call|>{% elif 'json' in last.content %}<|json|>"
    "{% elif 'think' in last.content or enable_thinking %}<|ponder|>{% else %}<|plain|>{% endif %}{% endif %}"
)


def write_scripted_model(
    directory: Path, scripts: Mapping[str, Sequence[str]] = SCRIPTS, template: str = TEMPLATE
) -> Path:
    """Write config, tokenizer and weights into `directory`; returns it.

    `scripts`: first token -> the pieces of text that follow it, of which each is in one script.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = trained_tokenizer()
    starts, pieces = list(scripts), dict.fromkeys(piece for script in scripts.values() for piece in script)
    tokenizer.add_special_tokens([AddedToken(start, special=True, normalized=False) for start in starts])
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in pieces])
    tokenizer.save(str(directory / "tokenizer.json"))
    described = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(described))
    size = tokenizer.get_vocab_size()
    hidden = (size + 63) // 64 * 64
    config = CONFIG | {
        "vocab_size": size,
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "max_position_embeddings": 2048,
    }
    (directory / "config.json").write_text(json.dumps(config))
    successors = dict.fromkeys(range(size), tokenizer.token_to_id("</s>"))
    for start, script in scripts.items():
        for token, after in pairwise(map(tokenizer.token_to_id, (start, *script))):
            successors[token] = after
    save_file(_weights(config, successors), directory / "model.safetensors")
    return directory


def _weights(config: dict[str, int], successors: dict[int, int]) -> dict[str, torch.Tensor]:
    size, hidden, inner = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    shared = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    head = torch.zeros(size, hidden)
    for token, after in successors.items():
        head[after, token] = 1.0
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (shared, hidden),
        "self_attn.v_proj": (shared, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    weights = {f"model.layers.0.{name}.weight": torch.zeros(shape) for name, shape in layer.items()}
    norms = ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm")
    return {
        **weights,
        **{f"{name}.weight": torch.ones(hidden) for name in norms},
        "model.embed_tokens.weight": torch.eye(size, hidden),
        "lm_head.weight": head,
    }
