"""Speculative decoding under test: models of every kind of attention, drafts that are right at a given rate."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from engine.watching import Watch, engine, request

from allotrope.architectures.eagle3 import tiny_eagle3
from allotrope.architectures.registry import ARCHITECTURES, find_architecture, read_spec
from allotrope.config import EngineConfig
from allotrope.engine.drafting import Drafting, ModelDrafting, Wanted
from allotrope.engine.engine import Engine
from allotrope.engine.load_plan import resolve_load_plan
from allotrope.engine.sequence import Sequence as EngineSequence
from allotrope.ops.draft_rows import AcceptedDrafts
from allotrope.request import Request, SamplingParams, SequenceOutput
from allotrope.speculative_config import SpeculativeConfig

LOADED = {"load_format": "dummy", "device": "cpu", "max_num_seqs": 8, "max_model_len": 192}
_UNUSED = SpeculativeConfig(method="ngram", num_speculative_tokens=1, adaptive=False)
_WINDOWED = ("DeepseekV4ForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM", "MiMoV2FlashForCausalLM")
RATES = {"none": 0.0, "some": 0.6, "all": 1.0}
"""Scripted drafts: the probability that one is right."""


@functools.cache
def directory(name: str) -> Path:
    """The folder of a tiny config of the architecture `name`, with a draft head if there is one; in the folder `eagle3`
    in it, one of an EAGLE3 head, and in `draft_model` one of a model of another architecture with its vocabulary."""
    architecture = find_architecture({"architectures": [name]}, "")
    folder = Path(mkdtemp())
    config = (architecture.tiny_draft or architecture.tiny)()
    (folder / "config.json").write_text(json.dumps(config))
    if drafts(name, "eagle3"):
        (folder / "eagle3").mkdir()
        _, spec = read_spec(config, name)
        (folder / "eagle3" / "config.json").write_text(json.dumps(tiny_eagle3(spec)))
    _, spec = read_spec(config, name)
    (folder / "draft_model").mkdir()
    (folder / "draft_model" / "config.json").write_text(json.dumps(small_model(name, spec.vocab_size)))
    return folder


def small_model(target: str, vocab_size: int) -> dict[str, Any]:
    """A tiny draft model for the architecture `target`: with windows where that has none."""
    name = "LlamaForCausalLM" if target in _WINDOWED else "Gemma3ForCausalLM"
    config = find_architecture({"architectures": [name]}, "").tiny()
    return config | {"vocab_size": vocab_size}


def drafts(name: str, kind: str) -> bool:
    """Whether there are drafts of a `kind` (see `speculating`) for models of the architecture `name`."""
    architecture = find_architecture({"architectures": [name]}, "")
    method = kind.partition("-")[0]
    if method == "eagle3":
        return architecture.decoder.one_stream
    return method != "mtp" or architecture.tiny_draft is not None


@functools.cache
def families(name: str) -> frozenset[str]:
    """The attention families of the architecture `name`."""
    plan = resolve_load_plan(EngineConfig(model=str(directory(name)), dtype="float32", **LOADED))
    return frozenset(spec.family for spec in plan.specs)


def _signature(name: str) -> frozenset[tuple[Any, ...]]:
    """What decides how the engine treats the layers of `name`: families, kinds of cache groups and options."""
    plan = resolve_load_plan(EngineConfig(model=str(directory(name)), dtype="float32", **LOADED))
    options = ("sinks", "channel_decay", "values_are_keys")
    specs = {(spec.family, *(bool(getattr(spec, one, False)) for one in options)) for spec in plan.specs}
    return frozenset({*specs, *((group.kind, group.window is not None) for group in plan.groups)})


@functools.cache
def models() -> tuple[str, ...]:
    """One architecture of each kind that the engine treats in its own way, one with a draft head if there is any."""
    chosen: dict[frozenset[tuple[Any, ...]], str] = {}
    for name in sorted(ARCHITECTURES, key=lambda name: not drafts(name, "mtp")):
        chosen.setdefault(_signature(name), name)
    return tuple(chosen.values())


class Scripted(Drafting):
    """Drafts from known outputs, each right with the probability `rate`. `expected`: tokens by request and sequence, as
    `drain` names them."""

    def __init__(self, expected: Mapping[str, Sequence[int]], rate: float, max_drafts: int) -> None:
        super().__init__(_UNUSED, max_drafts, 1 << 10, 0)
        self._expected, self._rate = expected, rate

    def propose(self, wanted: Sequence[Wanted]) -> None:
        for seq, most in wanted:
            seq.drafts = self.script(seq, seq.output_len)[: max(0, most)]

    def script(self, seq: EngineSequence, output_len: int) -> list[int]:
        """What is drafted behind the first `output_len` tokens of `seq`."""
        chance = random.Random(f"{_name(seq)} {output_len}")
        right = self._expected.get(_name(seq), ())[output_len:][: self.max_drafts]
        return [token if chance.random() < self._rate else (token + 1) % 300 for token in right]


class Head:
    """The head of a running engine. `drafted`: its drafts by sequence and number of output tokens.

    `script`: what it drafts in their place, for whom its tokens are random.
    """

    def __init__(self, running: Engine, script: Scripted | None) -> None:
        self.drafted: dict[tuple[str, int], list[int]] = {}
        drafting: Any = running._loop._drafting
        model = running._executor.worker.draft_model  # type: ignore[attr-defined]
        passes_of_head = running._executor.worker.model_runner.drafts.passes  # type: ignore[attr-defined]
        inner, inner_count = model.greedy, passes_of_head.count_accepted
        # Passes so far, and per sequence its output tokens and the drafts of its last step that count.
        passes = {"behind": 0}
        lens: list[int] = []
        counted: dict[EngineSequence, int] = {}

        def accept(*args: Any) -> AcceptedDrafts:
            found: AcceptedDrafts = inner_count(*args)
            passes["behind"] = 0
            lens.clear()
            for seq, count in zip(drafting._drafted_for, found.accepted.tolist(), strict=False):
                unread = counted[seq] if seq.unread_drafts else 0
                lens.append(seq.output_len + unread + count)
                counted[seq] = count
            return found

        def greedy(hidden: torch.Tensor) -> torch.Tensor:
            found = inner(hidden)
            behind = passes["behind"]
            passes["behind"] += 1
            counts = drafting._counts
            for i, (seq, output_len) in enumerate(zip(drafting._drafted_for[: len(found)], lens, strict=False)):
                own = self.drafted.setdefault((_name(seq), output_len), [])
                if len(own) == behind < counts[i]:
                    own.append(int(found[i]))
                if script is not None and behind < len(scripted := script.script(seq, output_len)):
                    found[i] = scripted[behind]
            return found

        passes_of_head.count_accepted, model.greedy = accept, greedy


class Overridden(ModelDrafting):
    """Scripted drafts in place of those of a model, whose passes run all the same."""

    def __init__(self, running: Engine, script: Scripted) -> None:
        lookahead = running._load_plan.lookahead
        super().__init__(_UNUSED, script.max_drafts, 1 << 10, 0, lookahead=lookahead, on_gpu=False)
        self._script = script
        executor: Any = running._executor
        run_drafts = executor.run_drafts

        def noted(token_ids: torch.Tensor, *, shared: bool) -> Any:
            found = run_drafts(token_ids, shared=shared)
            self._accepted = found.accepted.tolist()
            return found

        executor.run_drafts = noted

    def place(self, next_tokens: torch.Tensor) -> None:
        super().place(next_tokens)
        for seq, most, accepted in zip(self._drafted_for, self._counts, self._accepted, strict=True):
            seq.drafts, seq.draft_indices = self._script.script(seq, seq.output_len + accepted)[:most], ()


def _name(seq: EngineSequence) -> str:
    return seq.request.request_id if seq.index == 0 else f"{seq.request.request_id}#{seq.index}"


def speculative_config(model: Path, method: str, k: int) -> str:
    """The option with which drafts of `method` are made, up to `k` of a sequence. Lookups match single tokens."""
    options = {"method": method, "num_speculative_tokens": k, "adaptive": False}
    if method == "ngram":
        options |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    if method in ("eagle3", "draft_model"):
        options["model"] = str(model / method)
    return json.dumps(options)


def speculating(
    model: Path, kind: str, k: int, expected: Mapping[str, Sequence[int]], watch: Watch | None = None, **options: Any
) -> Engine:
    """An engine with drafts of a `kind`: a method, a rate by which scripted ones are right, or both: `mtp-some`."""
    method, _, rate = kind.rpartition("-") if kind.rpartition("-")[2] in RATES else (kind, "", "")
    running = engine(
        model, watch, **{**LOADED, "speculative_config": speculative_config(model, method or "ngram", k), **options}
    )
    script = Scripted(expected, RATES[rate], k) if rate else None
    loop: Any = running._loop
    if script is not None and not method:
        loop._drafting = loop._lookups = running._drafting = script  # type: ignore[assignment]
    elif script is not None and running._executor.ranks > 1:
        # The other ranks keep what their heads draft.
        loop._drafting = loop._draft_model = running._drafting = Overridden(running, script)
    elif method not in ("ngram", "suffix"):
        running.head = Head(running, script)  # type: ignore[attr-defined]
    return running


def mixed_requests() -> list[Request]:
    """Greedy and seeded ones, short and long; outputs of few different tokens, so that lookups find some of them."""
    few = tuple(range(9, 15))
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.8, max_tokens=18, seed=1, allowed_token_ids=few, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=22, allowed_token_ids=few, ignore_eos=True),
        SamplingParams(temperature=0.9, max_tokens=8, seed=3, n=3, top_p=0.9, ignore_eos=True),
        SamplingParams(temperature=0.7, max_tokens=16, seed=4, repetition_penalty=1.2, ignore_eos=True),
    ]
    chance = random.Random(5)
    lengths = (1, 5, 33, 50, 17)
    return [
        request(f"r{i}", [i + 2, *(chance.randrange(9, 20) for _ in range(length - 1))], one)
        for i, (length, one) in enumerate(zip(lengths, params, strict=True))
    ]


def several_at_once(found: Sequence[SequenceOutput]) -> int:
    """Steps of sequences that gave more than one token: drafts were accepted."""
    return sum(len(one.token_ids) > 1 for one in found)
