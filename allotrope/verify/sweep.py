"""One prompt of every length, eagerly and through graphs, against the engine's own references: no length may turn.

The reference computes in fp32 on rows of the type that the engine keeps, with the readable backends of attention and of
every other operation. How far rounding alone goes is what the same backends come to in the engine's type, length by
length.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from allotrope.attention.registry import FAMILIES
from allotrope.config import EngineConfig
from allotrope.engine.engine import Engine
from allotrope.engine.load_plan import LoadPlan, resolve_load_plan
from allotrope.errors import ConfigError
from allotrope.ops.registry import registered_ops
from allotrope.request import Request, SamplingParams
from allotrope.verify.prompts import draw_prompts, usable_ids

LENGTHS = tuple(length for power in range(4, 14) for length in (2**power - 1, 2**power, 2**power + 1))
"""15, 16, 17, 31, ... 8193."""

# Of the error that rounding makes at a length or at the middle one, whichever is more: what an engine may have.
_ROUNDING = 3.0
# Relative error that is never too much: another order of summation in fp32.
_FLOOR = 1e-4
# Rows of each prompt that are compared, besides those of the tokens after it.
_LAST = 32


Errors = dict[str, dict[int, float]]
"""Way -> length -> error."""


@dataclass(frozen=True)
class LengthError:
    """`way`: "eager" or "graphs". `error`, `noise`: median over rows of the logits' relative RMS error."""

    length: int
    way: str
    error: float
    noise: float
    allowed: float

    @property
    def wrong(self) -> bool:
        return not self.error <= self.allowed


class Forced:
    """An `Observer` that keeps the last rows of each prompt's logits, and feeds given tokens if there are some."""

    def __init__(self, tokens: dict[str, list[int]] | None = None) -> None:
        self.given = tokens
        self.tokens: dict[str, list[int]] = {}
        self.rows: dict[str, list[torch.Tensor]] = {}

    def logits(self, request_id: str, index: int, start: int, logits: torch.Tensor) -> None:
        rows = self.rows.setdefault(request_id, [])
        rows.append(logits[-_LAST:].float().cpu())
        if len(logits) > 1:
            # Of a prompt that came in chunks, the end of the last one is kept.
            del rows[:-1]

    def token(self, request_id: str, index: int, chosen: int) -> int:
        so_far = self.tokens.setdefault(request_id, [])
        so_far.append(max(chosen, 0) if self.given is None else self.given[request_id][len(so_far)])
        return so_far[-1]


def sweep(config: EngineConfig, new_tokens: int, log: Callable[[str], None] = lambda text: None) -> list[LengthError]:
    """Run every length that fits; a length that comes out wrong counts by the middle one of three prompts, because a
    pick that falls the other way is the prompt's and not the length's. Raises ConfigError if no length fits.
    """
    load_plan = resolve_load_plan(config)
    if config.dtype == "auto":
        config = dataclasses.replace(config, dtype="float32")
    room = min(load_plan.max_model_len, max(LENGTHS) + new_tokens)
    lengths = [length for length in LENGTHS if length + new_tokens <= room]
    if not lengths:
        raise ConfigError(f"max_model_len={load_plan.max_model_len} leaves no length to sweep; {LENGTHS[0]} is needed.")
    config = dataclasses.replace(config, max_model_len=room, max_num_seqs=1)
    errors = _errors(config, load_plan, lengths, new_tokens, config.seed, log)
    usual = statistics.median(errors["noise"].values())

    def compared(errors: Errors, length: int, way: str) -> LengthError:
        noise = errors["noise"][length]
        return LengthError(length, way, errors[way][length], noise, _FLOOR + _ROUNDING * max(noise, usual))

    found = [compared(errors, length, way) for way in errors if way != "noise" for length in lengths]
    again = sorted({one.length for one in found if one.wrong})
    if not again:
        return found
    log(f"again with other prompts: lengths {', '.join(map(str, again))}")
    more = [_errors(config, load_plan, again, new_tokens, config.seed + i, log) for i in (1, 2)]

    def middle(first: LengthError) -> LengthError:
        if first.length not in again:
            return first
        three = [first, *(compared(errors, first.length, first.way) for errors in more)]
        return sorted(three, key=lambda one: one.error / one.allowed)[1]

    return [middle(one) for one in found]


def _errors(
    config: EngineConfig,
    load_plan: LoadPlan,
    lengths: Sequence[int],
    new_tokens: int,
    seed: int,
    log: Callable[[str], None],
) -> Errors:
    """One prompt of each length in every way, "noise" among them."""
    ids = usable_ids(load_plan.checkpoint.config, load_plan.spec.vocab_size)
    drawn = draw_prompts(ids, lengths, seed)
    families = sorted({spec.family for spec in load_plan.specs})
    slow = ",".join(f"{name}={FAMILIES[name].backends[-1].name}" for name in families)
    ops = sorted({choice.op for choice in load_plan.build.chooser.choices} & set(registered_ops()))
    references = {
        "attention_backend": slow,
        "op_backend": ",".join(f"{name}={registered_ops()[name].backends[-1].name}" for name in ops),
        "cuda_graphs": False,
    }
    stored = config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    ways: dict[str, dict[str, Any]] = {
        "reference": {**references, "dtype": "float32", "kv_cache_dtype": stored},
        "noise": references,
        "eager": {"cuda_graphs": False},
        "graphs": {"cuda_graphs": True},
    }
    if load_plan.build.device.type != "cuda":
        del ways["graphs"]
    rows: dict[str, dict[str, list[torch.Tensor]]] = {}
    tokens: dict[str, list[int]] | None = None
    for way, options in ways.items():
        log(f"running: {way}")
        recorder = Forced(tokens)
        _run(dataclasses.replace(config, **options), drawn, new_tokens, recorder)
        rows[way] = recorder.rows
        tokens = tokens or recorder.tokens
    want = rows.pop("reference")
    return {way: {n: _error(found[f"{n}"], want[f"{n}"]) for n in lengths} for way, found in rows.items()}


def _run(config: EngineConfig, drawn: Sequence[tuple[int, ...]], new_tokens: int, recorder: Forced) -> None:
    engine = Engine(config, observer=recorder)
    try:
        engine.capture_all()
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        for prompt in drawn:
            engine.add(Request(request_id=f"{len(prompt)}", prompt_ids=prompt, params=params))
            while engine.has_work():
                engine.step()
            engine.reset_prefix_cache()
    finally:
        engine.close()


def _error(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Median over rows of |got - want| / |want - its mean|: of the prompt's rows or of those behind it, the larger.

    The first of `got` and `want` has the prompt's rows. Infinite where something is no number.
    """
    medians = []
    for part in (slice(0, 1), slice(1, None)):
        mine, theirs = torch.cat([*got[part]]), torch.cat([*want[part]])
        off = (mine - theirs).norm(dim=-1) / (theirs - theirs.mean(-1, keepdim=True)).norm(dim=-1)
        medians.append(float(off.nan_to_num(nan=torch.inf).median()))
    return max(medians)


def sweep_lines(found: Sequence[LengthError]) -> list[str]:
    """A table for people: a line per length, a column per way."""
    ways = list(dict.fromkeys(one.way for one in found))
    lines = [f"{'length':>7}  {'rounding':>9}  {'allowed':>9}" + "".join(f"  {way:>9}" for way in ways)]
    for length in dict.fromkeys(one.length for one in found):
        here = [one for one in found if one.length == length]
        cells = "".join(f"  {one.error:9.1e}{' WRONG' if one.wrong else ''}" for one in here)
        lines.append(f"{length:>7}  {here[0].noise:9.1e}  {here[0].allowed:9.1e}{cells}")
    wrong = [one for one in found if one.wrong]
    lines.append(f"WRONG at {len(wrong)} lengths" if wrong else "PASS: no length turns")
    return lines
