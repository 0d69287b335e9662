"""Writing a trained model: config, tensors, tokenizer, loss curve and model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from train.configs import CONFIGS, UNLIKE_THE_RELEASE
from train.decoders import Model
from train.released import parameter_count, released
from train.tokenizer import write_tokenizer


def write_checkpoint(model: Model, folder: Path) -> None:
    """Writes what an engine loads."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(released(model), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, config.get("text_config", config)["max_position_embeddings"])


def write_curve(entries: list[dict[str, float]], folder: Path) -> str | None:
    """Writes loss.json, and loss.png where matplotlib is. Returns why there is no picture, or None."""
    (folder / "loss.json").write_text(json.dumps(entries) + "\n")
    try:
        import matplotlib
    except ImportError:
        return "loss.png is left out: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in ("text", "answers", "mtp", "indexer"):
        if entries and name in entries[0]:
            axes.plot([one["tokens"] / 1e6 for one in entries], [one[name] for one in entries], label=name)
    axes.set(xlabel="million tokens", ylabel="loss, nats", yscale="log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(folder / "loss.png", dpi=90)
    pyplot.close(figure)
    return None


def write_card(name: str, model: Model, facts: dict[str, Any], folder: Path) -> None:
    """Writes README.md and report.json. `facts`: of the run, with the measurements under "measured"."""
    (folder / "report.json").write_text(json.dumps(facts, indent=2) + "\n")
    measured = facts["measured"]
    tasks = "\n".join(
        f"| {task} | {one['accuracy']:.1%} | {one['loss']:.3f} |" for task, one in measured["tasks"].items()
    )
    recall = "\n".join(
        f"| {distance} | {one['accuracy']:.1%} | {one['loss']:.3f} |" for distance, one in measured["recall"].items()
    )
    mtp = ""
    if "mtp_agreement" in measured:
        mtp = (
            f"\nThe MTP layer reads the hidden state after the final norm. On held-out text its likeliest byte is the "
            f"model's own in {measured['mtp_agreement']:.1%} of the positions.\n"
        )
    how_long = f"--steps {facts['steps']}" if facts["repeats"] else f"--minutes {facts['minutes']}"
    (folder / "README.md").write_text(
        f"""# {name}

A small model in the released layout of `{CONFIGS[name]["architectures"][0]}`, trained to test inference engines. It is
of no other use. {UNLIKE_THE_RELEASE[name]}

| | |
|---|---|
| parameters | {parameter_count(model):,} |
| vocabulary | 256 bytes and 3 special tokens, in 320 rows |
| data | Python's documentation (PSF licence), the King James Bible (public domain), tasks drawn from the seed |
| seed | {facts["seed"]} |
| steps | {facts["steps"]:,} |
| tokens | {facts["tokens"]:,} |
| last loss | {facts["loss"]:.4f} nats, answers {facts["answers"]:.4f} |
| training time | {facts["seconds"]:.0f} s, {facts["tokens_per_second"]:,.0f} tokens/s |
| device | {facts["device"]} |

Made by `python train/train.py {name} --seed {facts["seed"]} {how_long}`.

Held-out text: {measured["text_bits_per_byte"]:.3f} bits per byte. Greedy answers of the trained module, in
{facts["items"]} items each:

| task | right | loss of an answer's byte |
|---|---|---|
{tasks}

| recall over bytes | right | loss of an answer's byte |
|---|---|---|
{recall}
{mtp}"""
    )
