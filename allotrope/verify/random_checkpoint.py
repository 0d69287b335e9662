"""A checkpoint of random weights for any config, in the released layout, so that both sides read the same files.

Weights are drawn per tensor name, of a size at which logits are spread and no norm, bias or sink is neutral: what a
model forgets to add or multiply must show.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from allotrope.architectures.registry import Architecture, read_draft, read_spec
from allotrope.checkpoint.checkpoint import open_checkpoint
from allotrope.checkpoint.weights import Rule
from allotrope.engine.memory import available_memory
from allotrope.errors import ConfigError, ModelError
from allotrope.layers.build import Build
from allotrope.layers.model_spec import ModelSpec
from allotrope.layers.parallel import Parallel, placement_of
from allotrope.verify.random_draft import draft_head
from allotrope.verify.transformers_model import class_and_config, quiet

# Sub-models that a text does not run through are made with one layer each, under whatever name their depth has.
_DEPTHS = ("num_hidden_layers", "depth", "num_layers", "vt_num_hidden_layers")
# What makes a recurrent state decay. It is drawn so that a state remembers tens of tokens: one that forgets at once is
# not put to the test, and leaves outputs near zero, which a norm then blows up.
_DECAYS = ("A_log", "dt_bias")
# Bytes a parameter takes while both sides hold it in fp32, with some room.
_BYTES_PER_PARAMETER = 10


def write_random(config: Mapping[str, Any], directory: Path, layers: int | None, seed: int) -> list[str]:
    """Write `directory`: config.json with only the first `layers` layers, and random weights.

    Returns remarks on what is not as in `config`. Raises ConfigError if there is too little memory, ModelError if
    Transformers has no such model or its files would not be in the released layout.
    """
    remarks = []
    kept = {key: value for key, value in config.items() if key != "quantization_config"}
    if len(kept) != len(config):
        remarks.append("weights are random numbers, not quantized ones: quantization_config is left out")
    if layers is not None:
        kept = first_layers(kept, layers)
    text = kept.get("text_config", {})
    if "tie_word_embeddings" in text:
        # Transformers goes by the wrapper's value, which has a default of its own.
        kept.setdefault("tie_word_embeddings", text["tie_word_embeddings"])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(kept))
    with quiet():
        kept = _make(kept, directory, seed)
    (directory / "config.json").write_text(json.dumps(kept, indent=1))
    _check_or_rewrite(kept, directory, seed)
    return [*remarks, *_add_draft_head(directory, seed)]


def first_layers(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """`config` with its first `count` layers: the number, and every list that has an entry for each layer.

    Raises ConfigError if there are fewer.
    """
    if isinstance(config.get("text_config"), dict):
        return {**config, "text_config": first_layers(config["text_config"], count)}
    old = config.get("num_hidden_layers")
    if not isinstance(old, int) or not 1 <= count <= old:
        raise ConfigError(f"bad options: layers={count}; the model has num_hidden_layers={old}.")
    # What follows the entries of the layers belongs to draft layers behind them, and stays.
    cut = {
        key: value[:count] + value[old:] if isinstance(value, list) and len(value) >= old else value
        for key, value in config.items()
    }
    return cut | {"num_hidden_layers": count}


def _make(config: dict[str, Any], directory: Path, seed: int) -> dict[str, Any]:
    """Write weights by way of Transformers. Returns `config` with towers of one layer."""
    try:
        cls, described = class_and_config(config, directory)
        config = _low_towers(config, described)
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in cls(described).parameters())
        need, free = parameters * _BYTES_PER_PARAMETER, available_memory()
        if need > free:
            raise ConfigError(
                f"{parameters / 1e9:.1f} billion random weights need {need / 1e9:.0f} GB on both sides together; "
                f"{free / 1e9:.0f} GB are free. Keep fewer with --layers."
            )
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            # Layers of other libraries, where they are installed, are made on a GPU.
            model = cls(described).float().cpu()
    except (ConfigError, ModelError):
        raise
    except Exception as error:
        # The border to another library, as in `transformers_model`.
        raise ModelError("Transformers cannot make the model", [f"{type(error).__name__}: {error}"]) from error
    state = model.state_dict()
    seen: set[int] = set()
    for name, tensor in state.items():
        if tensor.numel() and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            tensor.copy_(draw(name, tensor, seed, _sibling_experts(name, state)))
    model.save_pretrained(str(directory))
    return config


def _low_towers(config: dict[str, Any], described: Any) -> dict[str, Any]:
    """Set the depth of every sub-model but the text's to 1, in the config and in Transformers' view of it."""
    towers = {}
    for name in getattr(described, "sub_configs", {}):
        tower = getattr(described, name, None)
        found = [depth for depth in _DEPTHS if hasattr(tower, depth)]
        if name != "text_config" and tower is not None and found:
            for depth in found:
                setattr(tower, depth, 1)
            towers[name] = {**(config.get(name) or {}), **dict.fromkeys(found, 1)}
    return config | towers


def draw(name: str, like: torch.Tensor, seed: int, experts: int = 0) -> torch.Tensor:
    """Random values for the tensor `name`, around what it holds where it is a vector.

    `like`: gives shape and dtype. `experts`: for a table of integers, the number that its entries stay below.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    shape = like.shape
    if not like.is_floating_point():
        order = torch.rand((*shape[:-1], max(experts, shape[-1])), generator=generator).argsort(-1)
        return order[..., : shape[-1]].to(like.dtype).contiguous()
    values = torch.randn(shape, generator=generator)
    if name.endswith(_DECAYS):
        return (0.75 * values - 1.5).to(like.dtype)
    if like.dim() < 2:
        return (like.float() + 0.25 * values).to(like.dtype)
    gain = 4.0 if "embed" in name or "head" in name else 1.4
    return (values * gain / math.sqrt(shape[-1])).to(like.dtype)


def _sibling_experts(name: str, shapes: Mapping[str, torch.Tensor]) -> int:
    """Rows of the smallest matrix in the same module: what a table of expert numbers counts."""
    stem = name.rpartition(".")[0]
    rows = [t.shape[0] for other, t in shapes.items() if other.rpartition(".")[0] == stem and t.is_floating_point()]
    return min(rows, default=0)


def _check_or_rewrite(config: Mapping[str, Any], directory: Path, seed: int) -> None:
    """Leave files whose names our rules know; else write them anew under names that the rules expect."""
    checkpoint = open_checkpoint(str(directory))
    architecture, spec = read_spec(checkpoint.config, checkpoint.source)
    rules = [(rule.pattern(), rule.source) for rule in architecture.rules(spec)]
    renamed = {name: _known_name(name, rules) for name in checkpoint.headers()}
    if all(name == known for name, known in renamed.items()):
        return
    if None not in renamed.values():
        drawn = {known: checkpoint.read(name) for name, known in renamed.items() if known is not None}
    else:
        tensors = dict(_released(architecture, spec, next(name for name, known in renamed.items() if known is None)))
        drawn = {name: draw(name, like, seed, _sibling_experts(name, tensors)) for name, like in tensors.items()}
    for file in directory.glob("model*.safetensors*"):
        file.unlink()
    save_file(drawn, directory / "model.safetensors", metadata={"format": "pt"})


def _add_draft_head(directory: Path, seed: int) -> list[str]:
    """Draw the tensors of the draft head that the config names. Returns a remark where they cannot be made."""
    checkpoint = open_checkpoint(str(directory))
    architecture, spec = read_spec(checkpoint.config, checkpoint.source)
    draft = read_draft(checkpoint.config, checkpoint.source)
    if draft is None:
        return []
    tensors = draft_head(architecture, spec, draft, checkpoint.headers())
    if not tensors:
        return ["no layer is like that of the draft head, which is left out"]
    drawn = {name: draw(name, like, seed) for name, like in tensors.items()}
    file, index = "model-draft.safetensors", directory / "model.safetensors.index.json"
    save_file(drawn, directory / file, metadata={"format": "pt"})
    listed: dict[str, Any] = {"weight_map": dict.fromkeys(checkpoint.headers(), "model.safetensors")}
    if index.exists():
        listed = json.loads(index.read_text())
    listed["weight_map"] |= dict.fromkeys(drawn, file)
    index.write_text(json.dumps(listed))
    return []


def _known_name(name: str, rules: Sequence[tuple[re.Pattern[str], str]]) -> str | None:
    """`name`, or else without its first part, or with one part called as in a rule; None if no rule knows any of it.

    Transformers does not always undo all of its own renaming when it writes.
    """
    for known in (name, name.partition(".")[2]):
        if any(pattern.fullmatch(known) for pattern, _ in rules):
            return known
    parts = name.split(".")
    for pattern, source in rules:
        words = source.split(".")
        for i, word in enumerate(words):
            changed = ".".join([*parts[:i], word, *parts[i + 1 :]])
            if len(words) == len(parts) and pattern.fullmatch(changed):
                return changed
    return None


def _released(architecture: Architecture, spec: ModelSpec, strange: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint in the released layout, by turning the rules around.

    Raises ModelError where a rule changes values and so cannot be turned around.
    """
    build = Build(torch.float32, torch.float32, torch.device("meta"), Parallel())
    model = architecture.decoder(spec, build)
    rules = [rule for rule in architecture.rules(spec) if rule.target is not None]
    for target, parameter in model.named_parameters():
        placement = placement_of(parameter)
        for section in placement.sections:
            rule, placeholders = _rule_for(rules, target, section.name, strange)
            shape = list(parameter.shape)
            shape[placement.dim + bool(placement.experts)] = section.size
            center = 1.0 if "norm" in target else 0.0
            if rule.expert is None:
                yield rule.source.format(**placeholders), torch.full(shape, center, dtype=parameter.dtype)
                continue
            for expert in range(placement.experts):
                name = rule.source.format(**{**placeholders, rule.expert: expert})
                yield name, torch.full(shape[1:], center, dtype=parameter.dtype)


def _rule_for(rules: Sequence[Rule], target: str, section: str, strange: str) -> tuple[Rule, dict[str, str]]:
    for rule in rules:
        assert rule.target is not None
        match = Rule(rule.target, None).pattern().fullmatch(target)
        if match and rule.section == section and rule.transform is None:
            return rule, match.groupdict()
    raise ModelError(
        "cannot write random weights",
        [f"Transformers writes {strange}, which is not a released name, and no rule says where {target} is kept"],
    )
