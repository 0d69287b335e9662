"""Trains one model and writes its checkpoint, loss curve and model card.

    python train/train.py gpt_oss --out /tmp/models/gpt_oss
    python train/train.py gpt_oss --minutes 1 --seed 1 --out /tmp/models/gpt_oss

A number of steps repeats a run, on a GPU up to the rounding of its sums; a time does not. Rows are drawn first, if
`--rows` has none; `train/all.py` draws them once for all models.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from train import text
from train.checkpoint import write_card, write_checkpoint, write_curve
from train.configs import CONFIGS, STEPS
from train.data import drawn_count, read_rows, write_rows
from train.measure import measure
from train.models import build
from train.released import parameter_count, round_to_released
from train.trainer import Schedule, Trainer

TEXT, ROWS = Path(".cache/train/text.xz"), Path(".cache/train/rows")
# Bytes of the rows of each length that are drawn; a long run reads rows again.
DRAWN = {256: 20_000_000, 512: 40_000_000, 2048: 60_000_000, 4096: 40_000_000, 16384: 60_000_000}


def row_counts(schedule: Schedule, minutes: float | None, steps: int) -> dict[int, int]:
    """Rows of each length that a run reads from. A short run needs fewer, and a long one reads them again."""
    counts = {}
    for length in schedule.lengths:
        size = DRAWN.get(length, 10_000_000)
        size = min(size, steps * schedule.tokens) if minutes is None else int(min(1.0, minutes / 7) * size)
        counts[length] = max(64, size // length)
    return counts


def draw_missing(folder: Path, path: Path, counts: dict[int, int], seed: int) -> None:
    """Draws the rows that `folder` lacks."""
    missing = {length: count for length, count in counts.items() if drawn_count(folder, length) < count}
    if missing:
        begun = time.perf_counter()
        write_rows(path, folder, missing, seed, len(os.sched_getaffinity(0)))
        print(f"drew rows {missing} in {time.perf_counter() - begun:.0f} s", flush=True)


def parse(args: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(CONFIGS))
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="default: of `train.configs.STEPS`")
    parser.add_argument("--minutes", type=float, help="of training, in place of --steps; measuring comes after it")
    parser.add_argument("--text", type=Path, default=TEXT, help="of `python -m train.text`")
    parser.add_argument("--rows", type=Path, default=ROWS, help="folder of rows, one in it for each seed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--items", type=int, default=64, help="measured per task and distance")
    parser.add_argument("--longest", type=int, default=16384, help="bytes of the longest rows")
    parser.add_argument("--tokens", type=int, default=Schedule.tokens, help="of a step")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    return parser.parse_args(args)


def main(command: list[str] | None = None) -> None:
    args = parse(command)
    schedule = Schedule(tokens=args.tokens).at_most(args.longest)
    rows, steps = args.rows / f"seed{args.seed}", args.steps or STEPS[args.model]
    counts = row_counts(schedule, args.minutes, steps)
    draw_missing(rows, args.text, counts, args.seed)
    model = build(args.model, seed=args.seed).to(args.device)
    print(f"{args.model}: {parameter_count(model):,} parameters", flush=True)
    on_gpu = torch.device(args.device).type == "cuda"
    trainer = Trainer(model, read_rows(rows, counts), schedule, args.seed, on_gpu and not args.eager)
    begun = time.perf_counter()
    planned = None if args.minutes else steps
    log = trainer.run(args.minutes, planned, 20, lambda line: print(line, flush=True))
    seconds, steps, tokens = time.perf_counter() - begun, trainer.step_count, trainer.tokens_seen
    # Its graphs hold memory that measuring may need.
    del trainer
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    round_to_released(model)
    measured = measure(model, text.read(args.text, held_out=True), args.items, max(schedule.lengths))
    write_checkpoint(model, args.out)
    if reason := write_curve(log.entries, args.out):
        print(reason)
    facts = {
        "model": args.model,
        "seed": args.seed,
        "minutes": args.minutes,
        "repeats": args.minutes is None,
        "parameters": parameter_count(model),
        "steps": steps,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "loss": log.entries[-1]["next"],
        "answers": log.entries[-1]["answers"],
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "items": args.items,
        "measured": measured,
    }
    write_card(args.model, model, facts, args.out)
    print(f"wrote {args.out}", flush=True)


if __name__ == "__main__":
    main()
