"""Writes the compiled code of every kernel specialization, and compares what two trees compile to.

    python bench/compiled_code.py --chip sm_90 --chip gfx942 --chip gfx950 OUT
    python bench/compiled_code.py --compare BEFORE AFTER

OUT/<chip>/<hash>.txt is PTX for NVIDIA and AMDGCN for AMD, without debug information, comments and names. So two trees
that differ only by names, comments and line numbers write the same files. OUT/<chip>/index.json leads from a
specialization's name to its hash. No device is needed and nothing is launched. The tree is the one that `import
allotrope` finds: set PYTHONPATH. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import hashlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "index.json"

LAUNCH_METADATA = (
    "num_warps",
    "num_ctas",
    "cluster_dims",
    "shared",
    "tmem_size",
    "global_scratch_size",
    "global_scratch_align",
    "profile_scratch_size",
    "profile_scratch_align",
    "launch_cooperative_grid",
    "launch_pdl",
    "tensordesc_meta",
)
"""Facts that a launch needs beside the code, by their names in Triton's metadata. A dump states them above the code."""


def specializations(chip: str, modules: Sequence[str]) -> list[Any]:
    """The specializations of `modules` (all if empty) for a chip, each with a unique `name`."""
    from allotrope.kernels.chip import CHIPS
    from allotrope.kernels.registry import every_specialization

    return every_specialization(CHIPS[chip], modules or None)


def compile_for(specialization: Any, chip: str) -> None:
    """Compile for a chip that need not be here. The result lands in Triton's cache."""
    from allotrope.kernels.aot import compile_for_chip
    from allotrope.kernels.chip import CHIPS

    compile_for_chip(specialization, CHIPS[chip])


@dataclass(frozen=True)
class Outcome:
    """One compilation. `record`: Triton's metadata as one line of JSON, then the assembly; empty after an `error`."""

    name: str
    record: str = ""
    error: str = ""


@functools.cache
def _specializations(chip: str, modules: tuple[str, ...]) -> list[Any]:
    return specializations(chip, modules)


def names(chip: str, modules: tuple[str, ...]) -> list[str]:
    """Names in the order of `compiled`. Raises ValueError for a name that occurs twice."""
    result = [one.name for one in _specializations(chip, modules)]
    if twice := sorted({name for name in result if result.count(name) > 1}):
        raise ValueError(f"{chip}: names of several specializations: {', '.join(twice)}")
    return result


def package_folder() -> str:
    """Where the compiled tree lies."""
    import allotrope

    return str(Path(allotrope.__file__ or "").parent)


def compiled(chip: str, modules: tuple[str, ...], index: int) -> Outcome:
    """Compile the specialization at `index` into an empty cache, and read the cache."""
    from triton import knobs

    one = _specializations(chip, modules)[index]
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        try:
            compile_for(one, chip)
            (assembly,) = [path for ext in ("ptx", "amdgcn") for path in Path(folder).rglob(f"*.{ext}")]
        except Exception as error:
            return Outcome(one.name, error=f"{type(error).__name__}: {error}")
        metadata = json.loads(assembly.with_suffix(".json").read_text())
        return Outcome(one.name, f"{json.dumps(metadata)}\n{assembly.read_text()}")


def normalized(record: str) -> str:
    """An outcome's record without debug information, comments and names."""
    head, _, assembly = record.partition("\n")
    metadata = json.loads(head)
    nvidia = metadata["target"]["backend"] == "cuda"
    launch = [f"{key}: {json.dumps(metadata[key])}" for key in LAUNCH_METADATA if key in metadata]
    code = "\n".join(_without_debug(assembly.splitlines(), "//" if nvidia else ";"))
    lines = _without_idle_labels(_without_names(code).splitlines())
    return "\n".join([*launch, "", *lines, ""])


def _without_debug(lines: Iterable[str], comment: str) -> Iterator[str]:
    """Code lines without comments, debug sections and line numbers."""
    in_debug = False
    for line in lines:
        line = line.partition(comment)[0].rstrip()
        if re.match(r"\s*\.section\s+\.debug_", line):
            # PTX puts a section in braces, on one line if it is empty. AMDGCN ends it where the next one begins.
            in_debug = "}" not in line
        elif in_debug and line.strip() == "}":
            in_debug = False
        elif in_debug and not re.match(r"\s*\.(section|text|data|bss|amdgpu_metadata)\b", line):
            continue
        elif line and not re.match(r"\s*\.(loc|file|ident|cfi_\w+)\b", line):
            in_debug = False
            yield line


def _without_names(code: str) -> str:
    """Functions and their parameters are numbered in their order. Names in AMD's metadata become one word."""
    defined = re.findall(r"\.(?:entry|func)\s+(?:\(.*?\)\s*)?([\w$]+)|\.type\s+([\w$.]+),@function", code)
    for number, found in enumerate(dict.fromkeys(map("".join, defined))):
        # `.L` stands before what LLVM derives from a function of this module alone.
        own = rf"(?<![\w$.])(\.L)?{re.escape(found)}(?=(?:_param_\d+|_retval\d*)?(?![\w$]))"
        code = re.sub(own, rf"\g<1>function_{number}", code)
    return re.sub(r"^([\s-]*\.name:\s+).*", r"\1name", code, flags=re.MULTILINE)


def _without_idle_labels(lines: Sequence[str]) -> list[str]:
    """Without the labels that only debug information reads. Temporary labels are numbered in their order."""
    label = re.compile(r"([.$]L\w+):")
    read = {word for line in lines if not label.fullmatch(line) for word in re.findall(r"[.$\w]+", line)}
    kept = [line for line in lines if (found := label.fullmatch(line)) is None or found[1] in read]
    numbers: dict[str, int] = {}
    temporary = re.compile(r"(\.Ltmp|\$L__tmp)\d+")
    return [temporary.sub(lambda m: f"{m[1]}{numbers.setdefault(m[0], len(numbers))}", line) for line in kept]


def write(records: Mapping[str, str], folder: Path) -> None:
    """Normalize the records of one chip into `folder`, by hash, with an index by name."""
    folder.mkdir(parents=True, exist_ok=True)
    index = {}
    for name, record in records.items():
        text = normalized(record)
        index[name] = hashlib.sha256(text.encode()).hexdigest()[:32]
        (folder / f"{index[name]}.txt").write_text(text)
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def write_raw(records: Mapping[str, str], folder: Path) -> None:
    """Write the records of one chip as Triton leaves them."""
    folder.mkdir(parents=True, exist_ok=True)
    index = {name: f"{number:03}.txt" for number, name in enumerate(records)}
    for name, file in index.items():
        (folder / file).write_text(records[name])
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def read_raw(folder: Path) -> dict[str, str]:
    """What `write_raw` wrote."""
    index = json.loads((folder / INDEX).read_text())
    return {name: (folder / file).read_text() for name, file in index.items()}


def chips_of(dump: Path) -> list[str]:
    """Chips in a dump. Raises FileNotFoundError where there is none."""
    if chips := sorted(path.parent.name for path in dump.glob(f"*/{INDEX}")):
        return chips
    raise FileNotFoundError(f"{dump} holds no dump: no */{INDEX} in it")


@dataclass(frozen=True)
class Comparison:
    """One chip in two dumps. `renamed`: pairs of equal code under two names. `changed`: names of both dumps whose code
    is in one dump only. `removed`, `added`: names of one dump whose code is in that dump only.
    """

    same: list[str]
    renamed: list[tuple[str, str]]
    changed: list[str]
    removed: list[str]
    added: list[str]

    @property
    def equal(self) -> bool:
        return not (self.changed or self.removed or self.added)


def compare(before: Mapping[str, str], after: Mapping[str, str]) -> Comparison:
    """Match two indexes by name and hash first, then what is left by hash, each entry once."""
    same = [name for name, code in before.items() if after.get(name) == code]
    left = {name: code for name, code in after.items() if before.get(name) != code}
    renamed, lost = [], []
    for name, code in before.items():
        if after.get(name) == code:
            continue
        match = next((other for other, others_code in left.items() if others_code == code), None)
        if match is None:
            lost.append(name)
        else:
            del left[match]
            renamed.append((name, match))
    changed = [name for name in lost if name in left]
    removed = [name for name in lost if name not in left]
    return Comparison(same, renamed, changed, removed, [name for name in left if name not in changed])


def report(before: Path, after: Path) -> int:
    """Print the comparison of two dumps by chip; 1 where their code differs."""
    chips = chips_of(before)
    status = 0
    if others := sorted(set(chips) ^ set(chips_of(after))):
        print(f"in one dump only: {', '.join(others)}")
        status = 1
    for chip in [chip for chip in chips if chip not in others]:
        indexes = [(dump, json.loads((dump / chip / INDEX).read_text())) for dump in (before, after)]
        found = compare(*(index for _, index in indexes))
        print(
            f"{chip}: {len(found.same) + len(found.renamed)} equal ({len(found.renamed)} of them under another name), "
            f"{len(found.changed)} changed, {len(found.removed)} only before, {len(found.added)} only after"
        )
        old, new = ({name: dump / chip / f"{code}.txt" for name, code in index.items()} for dump, index in indexes)
        for pair in found.renamed:
            print(f"  renamed: {pair[0]} -> {pair[1]}")
        for name in found.changed:
            print(f"  changed: {name}: diff {old[name]} {new[name]}")
        for name in found.removed:
            print(f"  only before: {name}: {old[name]}")
        for name in found.added:
            print(f"  only after: {name}: {new[name]}")
        status |= not found.equal
    return status


def dump(chips: Sequence[str], modules: tuple[str, ...], out: Path, raw: Path | None, processes: int) -> int:
    """Compile and write; 1 where a specialization does not compile."""
    status = 0
    # A fresh interpreter for each process: Triton decides at import whether kernels are compiled or interpreted.
    os.environ.pop("TRITON_INTERPRET", None)
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, spawn) as pool:
        print(f"compiling {pool.submit(package_folder).result()}", flush=True)
        for chip in chips:
            begin = time.monotonic()
            count = len(pool.submit(names, chip, modules).result())
            made = list(pool.map(functools.partial(compiled, chip, modules), range(count)))
            records = {one.name: one.record for one in made if not one.error}
            if raw is not None:
                write_raw(records, raw / chip)
            write(records, out / chip)
            for one in made:
                if one.error:
                    print(f"  {one.name} does not compile: {one.error}", file=sys.stderr)
                    status = 1
            print(f"{chip}: {len(records)} of {count} specializations, {time.monotonic() - begin:.0f} s", flush=True)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT", help="folder of the dump; new or empty")
    parser.add_argument("--chip", action="append", help="sm_90, gfx942, ...; may be repeated")
    parser.add_argument("--module", action="append", default=[], help="only this module's kernels; may be repeated")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: one for each core")
    parser.add_argument("--raw", type=Path, metavar="DIR", help="keep what Triton wrote there too")
    parser.add_argument("--from-raw", type=Path, metavar="DIR", help="normalize an earlier --raw; compile nothing")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"), help="compare two dumps")
    args = parser.parse_args(argv)
    if args.compare:
        return report(*args.compare)
    if args.out is None or not (args.chip or args.from_raw):
        parser.error("give --chip and OUT, --from-raw and OUT, or --compare")
    if args.out.exists() and any(args.out.iterdir()):
        parser.error(f"{args.out} is not empty: an earlier dump would be mixed with this one")
    if args.from_raw:
        for chip in chips_of(args.from_raw):
            write(read_raw(args.from_raw / chip), args.out / chip)
        return 0
    return dump(args.chip, tuple(args.module), args.out, args.raw, args.processes)


if __name__ == "__main__":
    sys.exit(main())
