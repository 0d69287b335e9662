"""Talk to a running server with the official client: a streamed chat answer, then a plain completion.

allotrope serve MODEL
python examples/openai_client.py [URL]
"""

from __future__ import annotations

import sys

from openai import APIConnectionError, OpenAI


def main(url: str) -> None:
    """Ask the first model that the server at `url` lists."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id

    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Name three colours."}],
        temperature=0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n({chunk.usage.completion_tokens} tokens)")

    completion = client.completions.create(model=model, prompt="Once upon a time", temperature=0, max_tokens=16)
    print(f"\nOnce upon a time|{completion.choices[0].text}")


if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    try:
        main(address)
    except APIConnectionError:
        sys.exit(f"cannot reach {address}. Is the server running? Start it with: allotrope serve MODEL")
