"""Hold the samples of `lm_eval --log_samples` to an expected share: exit status 0 if they reach it, 1 if not.

    python examples/lm_eval/gate.py --expect 0.9538 --of 1319 --filter strict-match out/*/samples_gsm8k_*.jsonl

Several files are several samples of the same questions: a question counts with the mean of its samples.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from allotrope.eval.intervals import Estimate, ratio, wilson


def measure(files: Sequence[Path], metric: str, chosen: str | None) -> tuple[Estimate, int]:
    """The share of right answers with its 95 % interval, and the number of answers.

    One answer a question: Wilson's interval. Several: that of a mean over questions, for samples of one question are
    not independent. `chosen`: the filter of lm_eval; None where a task has one.
    """
    shares: dict[tuple[str, int], list[float]] = defaultdict(list)
    filters = set()
    for file in files:
        # A task in several files is sampled again; another task has questions of its own.
        task = file.name.removeprefix("samples_").rpartition("_")[0]
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            filters.add(row.get("filter"))
            if chosen in (None, row.get("filter")):
                shares[task, row["doc_id"]].append(float(row[metric]))
    if chosen is None and len(filters) > 1:
        raise SystemExit(f"the samples have the filters {', '.join(map(str, sorted(filters)))}; choose one by --filter")
    if not shares:
        raise SystemExit(
            f"there is no sample with filter={chosen!r}; there are: {', '.join(map(str, sorted(filters)))}"
        )
    if others := {value for one in shares.values() for value in one} - {0.0, 1.0}:
        raise SystemExit(
            f"{metric} has values such as {min(others):g}; only 0 and 1 are answers that are wrong or right"
        )
    counts = {len(one) for one in shares.values()}
    if len(counts) > 1:
        raise SystemExit(f"questions have {min(counts)} to {max(counts)} samples; each needs as many")
    (samples,) = counts
    means = [math.fsum(one) / samples for one in shares.values()]
    estimate = wilson(round(sum(means)), len(means)) if samples == 1 else ratio(means, [1.0] * len(means))
    return estimate, samples * len(means)


def reaches(found: Estimate, expected: Estimate) -> bool:
    """Whether `found` is not below `expected` by more than chance: the bounds on the sides that face each other add up
    as independent errors do.
    """
    slack = math.hypot(found.high - found.value, expected.value - expected.low)
    return found.value >= expected.value - slack


def main() -> int:
    """Print both shares and what follows. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="samples_*.jsonl of one run, or of several")
    parser.add_argument("--expect", type=float, required=True, help="published share, such as 0.9538")
    parser.add_argument("--of", type=int, required=True, help="number of answers that it is the share of")
    parser.add_argument("--metric", default="exact_match")
    parser.add_argument("--filter", default=None, help="filter of lm_eval, such as strict-match")
    options = parser.parse_args()
    found, answers = measure(options.files, options.metric, options.filter)
    expected = wilson(round(options.expect * options.of), options.of)
    passed = reaches(found, expected)
    print(f"found    {found.value:.4f} [{found.low:.4f}, {found.high:.4f}] of {answers} answers")
    print(f"expected {options.expect:.4f} [{expected.low:.4f}, {expected.high:.4f}] of {options.of} answers")
    print("PASS: not below by more than chance" if passed else "FAIL: below by more than chance")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
