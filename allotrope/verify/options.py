"""What may be asked of a verification, as flags with one line of help each. It must not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from allotrope.config import option
from allotrope.errors import refuse_options
from allotrope.output_files import file_reasons, plot_reasons

Against = Literal["auto", "stored", "transformers"]
ModeName = Literal["whole", "chunked-1", "chunked-3", "chunked-64", "cached", "batched", "graphs", "preempted"]
MODES: tuple[ModeName, ...] = get_args(ModeName)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What is compared with what, and where the findings go."""

    against: Against = option(
        "What counts as right: outputs stored beside the model, or Transformers; 'auto' takes stored ones if any.",
        "auto",
    )
    reference: str | None = option("Model that Transformers runs in place of MODEL.", None)
    random: bool = option("Draw random weights from MODEL's config; MODEL may also be an architecture's name.", False)
    layers: int | None = option("Layers that --random keeps, the first ones; default: all.", None)
    modes: str | None = option(f"Modes to run, comma-separated, of {', '.join(MODES)}; default: all.", None)
    lengths: str | None = option("Prompt lengths, comma-separated; default: around every boundary of the layers.", None)
    longest: int = option("Longest prompt that is made; boundaries beyond it are named as not crossed.", 1100)
    new_tokens: int = option("Tokens that follow each prompt, one by one.", 8)
    sweep: bool = option(
        "In place of all this: one prompt of each length from 15 to 8193 around powers of two, eagerly and through "
        "graphs, against the engine's own reference backends.",
        False,
    )
    thorough: bool = option("Run every prompt in the slow modes too, not only some.", False)
    json: Path | None = option("Also write all figures to this file.", None)
    plot: Path | None = option("Also draw the error by layer to this PNG file.", None)

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={value}; at least 1 is needed"
            for name, value in (("layers", self.layers), ("longest", self.longest), ("new_tokens", self.new_tokens))
            if value is not None and value < 1
        ]
        wrong += file_reasons("json", self.json) + plot_reasons("plot", self.plot)
        if self.layers is not None and not self.random:
            wrong.append(f"layers={self.layers} needs --random: a checkpoint's own layers are not left out")
        if self.reference is not None and (self.random or self.against == "stored"):
            wrong.append(f"reference={self.reference!r} needs a checkpoint of its own, held against Transformers")
        named = [name for name in ("modes", "lengths", "reference") if getattr(self, name) is not None]
        if self.sweep and (named or self.random or self.against != "auto"):
            given = [*named, *["random"] * self.random, *["against"] * (self.against != "auto")]
            wrong.append(f"sweep=True has lengths and a reference of its own; leave out {', '.join(given)}")
        if self.random and self.against == "stored":
            wrong.append("random=True has no stored outputs; allowed with it: --against auto, transformers")
        unknown = sorted(set(self.named_modes()) - set(MODES))
        if unknown:
            wrong.append(f"modes={self.modes!r} names {', '.join(unknown)}; allowed: {', '.join(MODES)}")
        if not all(word.strip().isdecimal() and int(word) > 0 for word in _words(self.lengths)):
            wrong.append(f"lengths={self.lengths!r}; numbers above 0, such as 1,16,17, are needed")
        refuse_options(wrong)

    def named_modes(self) -> list[str]:
        """The modes asked for; `chunked` stands for all chunk sizes."""
        asked = [word.strip() for word in _words(self.modes)] or list(MODES)
        wide = [name for word in asked for name in (MODES if word == "chunked" else (word,))]
        return [name for name in dict.fromkeys(wide) if "chunked" not in asked or name in asked or "chunked-" in name]

    def named_lengths(self) -> list[int]:
        """The prompt lengths asked for; empty where they are to be found."""
        return sorted({int(word) for word in _words(self.lengths)})


def _words(text: str | None) -> list[str]:
    return [word for word in (text or "").split(",") if word.strip()]
