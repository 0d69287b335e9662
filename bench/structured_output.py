"""Whether answers hold to schemas, which schemas are refused, and what the masks cost.

    python bench/structured_output.py                            the sample of schemas, then the cost at 64 requests
    python bench/structured_output.py --schemas DIR              every .json file below a folder
    python bench/structured_output.py --cost-only --device cuda  the cost alone, on a GPU

A random model answers each schema at temperature 1, with a bias towards tokens that close what is open; every finished
answer is held against its schema by `jsonschema`. The schemas that are refused are set beside those that llguidance
refuses by itself. See docs/structured_output.md.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jsonschema

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from allotrope.errors import InvalidRequest  # noqa: E402
from allotrope.llm import LLM  # noqa: E402
from allotrope.request import Grammar, Request, SamplingParams  # noqa: E402

SAMPLE = ROOT / "bench" / "data" / "json_schemas.jsonl.gz"
# In the middle of a text, one of thousands of tokens closes it: without a bias a random model never would.
CLOSING, BIAS = ('"', "}", "]", '"}', '"]', '",'), 6.0
SPACES, SPACE_BIAS = (" ", "\n", "\t", "\r"), -4.0
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "small": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
    "large": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}


@dataclass
class Figures:
    """What became of the schemas. `refused`, `invalid`, `lost`: name -> reason."""

    schemas: int = 0
    finished: int = 0
    unfinished: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    invalid: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    refused_alone: int = 0
    lost: dict[str, str] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """The figures in words."""
        taken = self.schemas - len(self.refused)
        yield f"{self.schemas} schemas: {taken} taken, {len(self.refused)} refused"
        yield f"{self.finished} answers finished, of which {self.finished - len(self.invalid)} validate; "
        yield f"{self.unfinished} ended by their length, {len(self.failed)} failed"
        yield f"llguidance alone refuses {self.refused_alone}; of what it takes, {len(self.lost)} are refused here"
        for title, found in (("invalid", self.invalid), ("failed", self.failed), ("refused here alone", self.lost)):
            for name, reason in found.items():
                yield f"  {title}: {name}: {reason}"
        kinds = Counter(reason.partition("supported: ")[2][:90] for reason in self.refused.values())
        for reason, count in kinds.most_common(20):
            yield f"  refused {count:4d}: {reason}"


def read_schemas(path: Path) -> list[tuple[str, Any]]:
    """Name and schema of each line of a compressed file, or of each .json file below a folder."""
    if path.is_dir():
        return [(str(one.relative_to(path)), json.loads(one.read_text())) for one in sorted(path.rglob("*.json"))]
    with gzip.open(path, "rt") as lines:
        return [(row["name"], row["schema"]) for row in map(json.loads, lines)]


def write_model(directory: Path, shape: str, vocab_size: int, schemas: Sequence[tuple[str, Any]]) -> Path:
    """A random model whose tokenizer is trained on the text of schemas, for load_format="dummy"."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((json.dumps(schema) for _, schema in schemas), trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": vocab_size,
        "num_key_value_heads": SHAPES[shape]["num_attention_heads"] // 4 or 1,
        "attention_bias": False,
        "mlp_bias": False,
        **SHAPES[shape],
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def closing_bias(llm: LLM) -> dict[int, float]:
    """A bias towards the tokens that close texts, objects and lists, and against white space."""
    bias = {}
    for texts, value in ((CLOSING, BIAS), (SPACES, SPACE_BIAS)):
        ids = [llm.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        bias |= {one[0]: value for one in ids if len(one) == 1}
    return bias


def check_schemas(llm: LLM, schemas: Sequence[tuple[str, Any]], max_tokens: int = 600) -> Figures:
    """Answer each schema once and validate what is finished."""
    figures = Figures(schemas=len(schemas))
    alone = _AloneCompiler(llm)
    params = SamplingParams(temperature=1.0, max_tokens=max_tokens, logit_bias=closing_bias(llm))
    asked = []
    for name, schema in schemas:
        grammar = Grammar("json_schema", json.dumps(schema))
        refused_alone = alone.refuses(grammar.source)
        figures.refused_alone += refused_alone
        try:
            llm.engine.compile_grammar(grammar).result()
        except InvalidRequest as error:
            figures.refused[name] = str(error)
            if not refused_alone:
                figures.lost[name] = str(error)
            continue
        asked.append((name, schema, replace(params, grammar=grammar, seed=len(asked))))
    batch = 64
    for first in range(0, len(asked), batch):
        part = asked[first : first + batch]
        for (name, schema, _), (text, reason) in zip(part, _answers(llm, [one[2] for one in part]), strict=True):
            if reason == "stop":
                figures.finished += 1
                if fault := _fault(text, schema):
                    figures.invalid[name] = fault
            elif reason == "length":
                figures.unfinished += 1
            else:
                figures.failed[name] = reason
    return figures


def _answers(llm: LLM, params: Sequence[SamplingParams]) -> list[tuple[str, str]]:
    """Text and end of each answer; of one that failed, the reason in place of its end."""
    ids: dict[str, list[int]] = {str(i): [] for i in range(len(params))}
    ends: dict[str, str] = {}
    for i, own in enumerate(params):
        llm.engine.add(Request(request_id=str(i), prompt_ids=(0, 9), params=own, eos_ids=llm.engine.limits.eos_ids))
    while llm.engine.has_work():
        for output in llm.engine.step():
            ids[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                ends[output.request_id] = output.error or output.finish_reason
    return [(llm.tokenizer.decode(ids[name]), ends[name]) for name in ids]


def _fault(text: str, schema: Any) -> str | None:
    try:
        validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return " ".join(str(error).split())[:160]
    return None


class _AloneCompiler:
    """llguidance as it is, without the limits of this package."""

    def __init__(self, llm: LLM) -> None:
        from allotrope.grammars.llguidance_backend import LLGuidanceBackend
        from allotrope.grammars.vocabulary import read_vocabulary

        limits = llm.engine.limits
        self._tokenizer = LLGuidanceBackend(read_vocabulary(llm.tokenizer, limits.vocab_size, limits.eos_ids)).tokenizer

    def refuses(self, source: str) -> bool:
        """Whether the schema `source` does not compile."""
        from llguidance import LLMatcher

        try:
            return bool(LLMatcher(self._tokenizer, LLMatcher.grammar_from_json_schema(source), log_level=0).is_error())
        except ValueError:
            return True


def endless(schemas: Sequence[tuple[str, Any]], count: int, llm: LLM) -> list[Grammar]:
    """Grammars whose outputs never end: lists of a thousand answers each."""
    found: list[Grammar] = []
    for _, schema in schemas:
        if len(found) == count or "$ref" in json.dumps(schema):
            continue
        grammar = Grammar("json_schema", json.dumps({"type": "array", "items": schema, "minItems": 1000}))
        try:
            llm.engine.compile_grammar(grammar).result()
        except InvalidRequest:
            continue
        found.append(grammar)
    return [found[i % len(found)] for i in range(count)]


def measure_cost(
    llm: LLM, schemas: Sequence[tuple[str, Any]], requests: int, steps: int, rounds: int
) -> dict[str, Any]:
    """Median seconds of a decode step of `requests` requests: free, and each held to a schema of its own.

    The processor's seconds beside them are those of all threads, which a busy machine does not stretch.
    """
    free = SamplingParams(temperature=1.0, max_tokens=steps + 8, ignore_eos=True, logit_bias=closing_bias(llm))
    held = [replace(free, grammar=grammar) for grammar in endless(schemas, requests, llm)]
    seconds: dict[str, list[float]] = {"free": [], "held": []}
    work: dict[str, list[float]] = {"free": [], "held": []}
    for number in range(rounds):
        for name, params in (("free", [free] * requests), ("held", held)):
            ids = [f"{name}-{number}-{i}" for i in range(requests)]
            for i, (request_id, own) in enumerate(zip(ids, params, strict=True)):
                seeded = replace(own, seed=i)
                llm.engine.add(Request(request_id=request_id, prompt_ids=(0, 9 + i), params=seeded, eos_ids=(1,)))
            for _ in range(4):
                llm.engine.step()
            for _ in range(steps):
                began, worked = time.perf_counter(), time.process_time()
                outputs = llm.engine.step()
                if len(outputs) == requests:
                    seconds[name].append(time.perf_counter() - began)
                    work[name].append(time.process_time() - worked)
            llm.engine.abort(ids)
            llm.engine.step()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    cpu = {name: statistics.median(values) for name, values in work.items()}
    return {
        "requests": requests,
        "steps": {name: len(values) for name, values in seconds.items()},
        "tpot_free_ms": round(1e3 * medians["free"], 3),
        "tpot_held_ms": round(1e3 * medians["held"], 3),
        "cost": round(medians["held"] / medians["free"] - 1, 4),
        "cpu_free_ms": round(1e3 * cpu["free"], 3),
        "cpu_held_ms": round(1e3 * cpu["held"], 3),
    }


def main() -> None:
    """Run what the command line asks for and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=Path, default=SAMPLE, help="a .jsonl.gz file, or a folder of .json files")
    parser.add_argument("--count", type=int, help="take this many schemas")
    parser.add_argument("--backend", choices=("llguidance", "xgrammar"), default="llguidance")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="model of the cost; default: small, large on a GPU")
    parser.add_argument("--vocab-size", type=int, help="of the model of the cost; default: 32768, 151936 on a GPU")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cost-only", action="store_true")
    parser.add_argument("--validity-only", action="store_true")
    options = parser.parse_args()
    schemas = read_schemas(options.schemas)[: options.count]
    on_gpu = options.device != "cpu"
    common: dict[str, Any] = {
        "load_format": "dummy",
        "device": options.device,
        "structured_outputs_backend": options.backend,
        "max_num_seqs": max(64, options.requests),
        "threads": options.threads,
    }
    with tempfile.TemporaryDirectory() as folder:
        if not options.cost_only:
            directory = write_model(Path(folder) / "tiny", "tiny", 512, schemas)
            llm = LLM(str(directory), dtype="float32", **common)
            print("\n".join(check_schemas(llm, schemas).lines()), flush=True)
            llm.close()
        if not options.validity_only:
            shape = options.shape or ("large" if on_gpu else "small")
            vocab_size = options.vocab_size or (151936 if on_gpu else 32768)
            directory = write_model(Path(folder) / shape, shape, vocab_size, schemas)
            llm = LLM(str(directory), dtype="bfloat16" if on_gpu else "float32", max_model_len=1024, **common)
            print(json.dumps(measure_cost(llm, schemas, options.requests, options.steps, options.rounds)))
            llm.close()


if __name__ == "__main__":
    main()
