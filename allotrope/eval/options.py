"""What may be asked of an evaluation, as flags with one line of help each. It must not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from allotrope.config import option
from allotrope.errors import refuse_options
from allotrope.eval.tasks import TASKS
from allotrope.output_files import file_reasons, plot_reasons

ModeName = Literal["cold", "warm", "chunked", "preempted", "two-ranks", "speculated"]
MODES: tuple[ModeName, ...] = get_args(ModeName)
MEASURES = ("text", *TASKS)


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """What is measured, what it is compared with, and where the figures go."""

    tasks: str | None = option(f"What to measure, comma-separated, of {', '.join(MEASURES)}; default: all.", None)
    items: int = option("Items of each task and each length; chunks of the text.", 128)
    lengths: str = option(
        "Prompt lengths in bytes, comma-separated; item i has i mod 64 bytes more. Recall runs at all of them, other "
        "tasks at the shortest.",
        "320,1024",
    )
    modes: str = option(f"Execution modes, comma-separated, of {', '.join(MODES)}; or all.", "cold")
    text: Path | None = option("Text file for perplexity; default: the help topics of Python's own `pydoc`.", None)
    text_length: int = option("Tokens of a chunk of the text; those of its second half count.", 512)
    baseline: str | None = option(
        "What to compare with: 'transformers', which runs the same items in float32 on a CPU, or a file that --json "
        "wrote; default: the first mode.",
        None,
    )
    reference: str | None = option("Model that Transformers runs in place of MODEL.", None)
    json: Path | None = option("Also write all figures to this file.", None)
    plot: Path | None = option("Also draw them to this PNG file.", None)

    def __post_init__(self) -> None:
        wrong = file_reasons("json", self.json) + plot_reasons("plot", self.plot)
        if self.items < 2:
            wrong.append(f"items={self.items}; at least 2 are needed for an interval")
        if self.text_length < 32:
            wrong.append(f"text_length={self.text_length}; at least 32 tokens are needed")
        for name, value, known in (("tasks", self.tasks, MEASURES), ("modes", self.modes, (*MODES, "all"))):
            unknown = sorted(set(_words(value)) - set(known))
            if unknown:
                wrong.append(f"{name}={value!r} names {', '.join(unknown)}; allowed: {', '.join(known)}")
            elif value is not None and not _words(value):
                wrong.append(f"{name}={value!r} names nothing; allowed: {', '.join(known)}")
        lengths = _words(self.lengths)
        if not lengths or not all(word.isdecimal() and int(word) >= 1 for word in lengths):
            wrong.append(f"lengths={self.lengths!r}; numbers of bytes above 0, such as 320,1024, are needed")
        if self.reference is not None and self.baseline != "transformers":
            wrong.append(f"reference={self.reference!r} needs --baseline transformers")
        stored = self.baseline not in (None, "transformers")
        if stored and not Path(str(self.baseline)).is_file():
            wrong.append(f"baseline={self.baseline!r}; 'transformers' or a file that --json wrote is needed")
        if self.text is not None and not self.text.is_file():
            wrong.append(f"text={str(self.text)!r} is no file")
        if self.text is not None and "text" not in self.named_tasks():
            wrong.append(f"text={str(self.text)!r} is not read: tasks={self.tasks!r} leave text out")
        refuse_options(wrong)

    def named_tasks(self) -> list[str]:
        """The measures asked for, in the order in which they are printed."""
        asked = _words(self.tasks)
        return [name for name in MEASURES if not asked or name in asked]

    def named_modes(self) -> list[ModeName]:
        """The modes asked for, in the order in which they run."""
        asked = _words(self.modes)
        return [name for name in MODES if "all" in asked or name in asked]

    def named_lengths(self) -> list[int]:
        """The lengths asked for, ascending."""
        return sorted({int(word) for word in _words(self.lengths)})


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]
