"""Generate without a server: some prompts together, then an answer to a chat message.

python examples/offline.py MODEL
"""

from __future__ import annotations

import sys

from allotrope import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "The first ten prime numbers are"]


def main(model: str) -> None:
    """Load `model` and print what it says."""
    llm = LLM(model)
    greedy = SamplingParams(temperature=0, max_tokens=24)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, greedy), strict=True):
        print(f"{prompt}|{output.outputs[0].text}")

    answer = llm.chat([{"role": "user", "content": "Name three colours."}], greedy).outputs[0]
    print(f"\n{answer.text}\n({len(answer.token_ids)} tokens, ended by {answer.finish_reason})")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
