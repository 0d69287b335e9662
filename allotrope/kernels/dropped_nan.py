"""Instructions of a compiled kernel that would turn what is not a number into one, by the line that they come from.

Owns: how Triton's IR, PTX and AMDGCN spell such a maximum or minimum. Must not know: what a kernel computes.

PTX has both kinds, the other one with `.NaN` in its name. On AMD's chips before gfx950 none keeps NaN: there a select
follows, by a compare of the number with itself. The compiler's line marks say which source line, and which callers,
an instruction comes from; where it has moved one it marks line 0, and only the IR before that still knows the line.
From Triton 3.8 on PTX says the next caller only, and each caller's own once: where a line has several callers, any of
them may be meant, and again only the IR knows.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

_IR = re.compile(r"(?:arith\.(?:max|min)numf|tt\.clampf .*propagateNan = none).*loc\((#loc\d*)\)$")
_IR_PLACE = re.compile(r"^(#loc\d*) = loc\((.*)\)$", re.MULTILINE)
_PTX = re.compile(r"^\s*(?:@\S+\s+)?(?:max|min)\.(?![\w.]*NaN)[\w.]*\b(?:f16|f16x2|bf16|bf16x2|f32|f64)\s")
_AMD = re.compile(r"^\s*v_(?:pk_)?(?:max|min|max3|min3|med3|maxmin|minmax)_(?:f16|bf16|f32|f64)\w*\s+(.*)$")
_MARK = re.compile(r"^\s*\.loc\s+(\d+ \d+ \d+)?(?:.*?inlined_at (\d+ \d+ \d+))?.*?(?://|;) ?(.*)$")
_LOST = re.compile(r"^\S*:0(?::|$| @)")
_SELECT = re.compile(r"^\s*(?:v_cmpx?_(?:[uo]|class)_f|v_cndmask)")


def dropping(ir: str, assembly: str, nvidia: bool, allowed: Sequence[Any]) -> list[str]:
    """Where NaN is dropped, each line once: "file:line @[ caller:line ]" and the instruction.

    `ir`: of Triton, `assembly`: PTX or AMDGCN, both with line marks. `allowed`: jitted functions that may.
    """
    spared = re.compile("|".join(re.escape(place) for one in allowed for place in _places(one)))
    min_max = _min_max_of_ptx if nvidia else _min_max_of_amd
    found = {mark: text for mark, text in min_max(_marked(assembly)) if not _LOST.match(mark)}
    found |= _min_max_of_ir(ir)
    return [f"{mark}: {' '.join(text.split())}" for mark, text in found.items() if not spared.search(mark)]


def _places(function: Any) -> Iterator[str]:
    """How marks name a function's lines."""
    lines, first = inspect.getsourcelines(function.fn)
    name = Path(inspect.getsourcefile(function.fn) or "").name
    return (f"{name}:{first + i}:" for i in range(len(lines)))


def _min_max_of_ir(ir: str) -> dict[str, str]:
    """Text by mark of every operation that drops NaN."""
    places = dict(_IR_PLACE.findall(ir))

    def chain(name: str) -> str:
        text = places.get(name, name)
        files = re.sub(r'"[^"]*?([^"/]+)":(\d+):(\d+)', r"\1:\2:\3", text)
        return re.sub(r"#loc\d*", lambda inner: chain(inner[0]), files)

    given = ((_IR.search(line), line) for line in ir.splitlines())
    return {chain(one[1]): line for one, line in given if one}


def _marked(assembly: str) -> Iterator[tuple[str, str]]:
    """Every line of the assembly with the mark that stands above it, and all the callers that it may have."""
    mark = "no line"
    # By place, in order: what it is called, and all that it may have been called from.
    known: dict[str, dict[str, None]] = {}
    for line in assembly.splitlines():
        if marked := _MARK.match(line):
            place, caller, mark = marked[1], marked[2], marked[3].strip()
            above = known.get(caller, {}) if caller else {}
            if place:
                known.setdefault(place, {}).update({mark: None} | above)
            if caller:
                mark = f"{mark} @[ {', '.join(above)} ]"
        yield mark, line


def _min_max_of_ptx(marked: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Mark and text of every instruction that drops NaN."""
    return ((mark, line) for mark, line in marked if _PTX.match(line))


def _min_max_of_amd(marked: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Mark and text of those of lines that have no select. One that only makes a number quiet drops nothing.

    The select of one number may stand far behind it, and be made of a compare of another form of the number: what can
    be held is that the line has any.
    """
    found, selects = {}, set()
    for mark, line in marked:
        if _SELECT.match(line):
            selects.add(mark)
        elif text := _AMD.match(line):
            _, *operands = (one.strip() for one in text[1].split(","))
            if len(operands) != 2 or operands[0] != operands[1]:
                found[mark] = line
    return ((mark, line) for mark, line in found.items() if mark not in selects)
