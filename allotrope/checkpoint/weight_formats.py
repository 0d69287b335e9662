"""Which weights of a checkpoint are quantized, and how: its `quantization_config`, read once for all who ask.

The memory plan, dummy weights and the loader read one `WeightFormats`. Owns the words of each producer's config. It
must not read a tensor, and knows no architecture.

Sources: `quantization_config` as written by Transformers (fp8, fbgemm_fp8, mxfp4), compressed-tensors, AMD Quark and
NVIDIA ModelOpt, and as read by vLLM's `model_executor/layers/quantization`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allotrope.errors import ModelError
from allotrope.ops.matmul.fp8 import Fp8
from allotrope.ops.matmul.gguf import GGUF_BLOCKS
from allotrope.ops.matmul.int4 import Int4
from allotrope.ops.matmul.mxfp4 import FP4_GROUP, MXFP4
from allotrope.ops.matmul.weight import Format

EVERY = "*"
# No producer quantizes these, named in the config or not.
_NEVER = re.compile(r"(^|\.)(embed|embed_tokens|lm_head|head|gate|shared_expert_gate|router|weights_proj|conv1d)$")
_ONLINE_PLAIN = r"re:.*\.(in_proj_ba|in_proj_a|in_proj_b|b_proj|f_a_proj|f_b_proj|g_a_proj|g_b_proj|proj)$"
_EXPERTS = r"re:.*\.experts(\.|$)"
# Where configs list what is not quantized.
_EXCLUSIONS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude", "exclude_modules")
_TAKE = "Take a release in FP8, MXFP4, INT4 of compressed-tensors or bf16"
_REFUSED = {
    "awq": f"AWQ stores 4-bit integers with zero points, which no product of this version multiplies. {_TAKE}",
    "gptq": f"GPTQ stores integers with zero points, which no product of this version multiplies. {_TAKE}",
    "bitsandbytes": f"bitsandbytes' types are not read. {_TAKE}",
}


@dataclass(frozen=True)
class Scheme:
    """How one weight is stored. `block`: rows and inputs that share an FP8 scale, () for a scale per row or tensor."""

    format: Format
    block: tuple[int, ...] = ()


@dataclass(frozen=True)
class WeightFormats:
    """`groups`: patterns of modules and their scheme, the first match decides. `excluded`: modules that stay plain.

    `has_int4`: whether some are 4-bit integers.
    """

    method: str
    groups: tuple[tuple[tuple[str, ...], Scheme | None], ...]
    excluded: tuple[str, ...] = ()
    has_int4: bool = False

    def scheme(self, name: str) -> Scheme | None:
        """How the weight `name` of the checkpoint is stored, None for a plain one. A stack of experts has one name."""
        module = name.removesuffix(".weight")
        if _NEVER.search(module) or _names(self.excluded, module):
            return None
        return next((scheme for patterns, scheme in self.groups if _names(patterns, module)), None)

    def quantizes(self, scheme: Scheme, inputs: int, *, inputs_first: bool = False) -> bool:
        """Whether a weight of so many inputs is in its scheme: on load, one that is not whole groups stays plain, and
        so does one that is stored with the inputs before the outputs."""
        whole = scheme.format.name == "fp8" or inputs % FP4_GROUP == 0
        return self.method != ONLINE or (whole and not inputs_first)

    def block(self, name: str) -> tuple[int, ...]:
        """Rows and inputs that share a scale of the FP8 weight `name`."""
        blocks = [one.block for _, one in self.groups if one is not None and one.format.name == "fp8"]
        if len(set(blocks)) > 1:
            found = self.scheme(name)
            if found is not None and found.format.name == "fp8":
                return found.block
        # Where the stored tensor is FP8 and the config does not say so, it is in blocks as the others are.
        return blocks[0] if blocks else ()


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config's statement of how weights are quantized, {} for none."""
    stated = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if stated and not isinstance(stated, Mapping):
        raise ModelError("config.json", [f"quantization_config={stated!r} (needs an object)"])
    return dict(stated or {})


def weight_formats(config: Mapping[str, Any], source: str) -> WeightFormats | None:
    """What `config` says; None for a checkpoint that is not quantized. `source`: of the checkpoint, for messages.

    Raises ModelError with the reason for a quantization that is not known.
    """
    stated = quantization_of(config)
    if not stated:
        return None
    method = str(stated.get("quant_method"))
    if method == ONLINE:
        return WeightFormats(method, tuple(_read_online(stated)))
    if method not in _READERS:
        allowed = f"quant_method={method!r} is not supported (allowed: {', '.join(_READERS)})"
        raise ModelError(source, [f"{allowed}: {_REFUSED[method]}" if method in _REFUSED else allowed])
    try:
        groups = _READERS[method](stated)
        excluded = _excluded(stated)
        _check_patterns((*excluded, *(target for targets, _ in groups for target in targets)))
    except _UnknownFormat as error:
        raise ModelError(source, [f"quant_method={method!r}: {error}"]) from error
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        raise ModelError(
            source, [f"quant_method={method!r}: quantization_config is not as it has to be: {error}"]
        ) from error
    text = config.get("text_config") or {}
    if "fp4" in (config.get("expert_dtype"), text.get("expert_dtype")):
        groups = [((_EXPERTS,), _MXFP4), *groups]
    kinds = {scheme.format.name for _, scheme in groups if scheme is not None}
    return WeightFormats(method, tuple(groups), excluded, "int4" in kinds)


def _excluded(stated: Mapping[str, Any]) -> tuple[str, ...]:
    """What stays as it is."""
    lists = {key: _modelopt(stated).get(key) or [] for key in _EXCLUSIONS}
    for key, entries in lists.items():
        if not isinstance(entries, list | tuple) or not all(isinstance(entry, str) for entry in entries):
            raise _UnknownFormat(f"{key}={entries!r} (needs a list of names)")
    return tuple(entry for entries in lists.values() for entry in entries)


def _check_patterns(entries: Sequence[str]) -> None:
    for entry in entries:
        if entry.startswith("re:"):
            try:
                re.compile(entry[3:])
            except re.error as error:
                raise _UnknownFormat(f"{entry!r} is no regular expression: {error}") from error


ONLINE = "online"
"""`quant_method` of a plain checkpoint whose weights are quantized while they are loaded."""


def online_statement(scheme: str, *, blocks: bool) -> dict[str, Any]:
    """The `quantization_config` of a plain checkpoint that is quantized on load. `scheme`: "fp8", "int8" or "int4".
    `blocks`: in blocks of GGUF, which a CPU multiplies, where the scheme has such."""
    return {"quant_method": ONLINE, "scheme": scheme, "blocks": blocks}


class _UnknownFormat(Exception):
    """A config's format that is not read; the text is the reason."""


_Groups = list[tuple[tuple[str, ...], Scheme | None]]
_MXFP4 = Scheme(MXFP4)
_OF_TENSOR, _OF_ROW = Scheme(Fp8(0, rows=0)), Scheme(Fp8(0))


def _of_block(block: Any) -> Scheme:
    if isinstance(block, str):
        block = block.split("x")
    try:
        rows, inputs = (int(size) for size in block)
    except (TypeError, ValueError) as error:
        raise _UnknownFormat(f"blocks of {block!r} (needs two numbers: rows and inputs)") from error
    if min(rows, inputs) < 1:
        raise _UnknownFormat(f"blocks of {block!r} (needs at least 1 row and 1 input)")
    return Scheme(Fp8(inputs, rows=rows), (rows, inputs))


def _read_fp8(stated: Mapping[str, Any]) -> _Groups:
    block = stated.get("weight_block_size")
    return [((EVERY,), _of_block(block) if block else _OF_TENSOR)]


def _read_fbgemm(stated: Mapping[str, Any]) -> _Groups:
    return [((EVERY,), _OF_ROW)]


def _read_mxfp4(stated: Mapping[str, Any]) -> _Groups:
    return [((_EXPERTS,), _MXFP4)]


def _read_online(stated: Mapping[str, Any]) -> _Groups:
    """FP8 in blocks as DeepSeek's, INT4 in groups of 128; blocks of GGUF have groups of 32."""
    plain = {"fp8": Scheme(Fp8(128, rows=128), (128, 128)), "int4": Scheme(Int4(128))}
    blocks = {"int8": Scheme(GGUF_BLOCKS["q8_0"]), "int4": Scheme(GGUF_BLOCKS["q4_0"])}
    found = {**plain, **blocks} if stated["blocks"] else {**blocks, **plain}
    # Gates of the delta rule are a few rows, on which all others depend.
    return [((_ONLINE_PLAIN,), None), ((EVERY,), found[str(stated["scheme"])])]


def _read_compressed(stated: Mapping[str, Any]) -> _Groups:
    sparse = (stated.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense":
        raise _UnknownFormat(f"sparsity_config format={sparse!r} is not supported (allowed: dense)")
    transforms = (stated.get("transform_config") or {}).get("config_groups") or {}
    places = {str(one.get("location")) for group in transforms.values() for one in group.get("apply") or ()}
    if online := sorted(places - {"weight_input", "weight_output"}):
        raise _UnknownFormat(
            f"transform_config transforms at {', '.join(online)}, and activations are not transformed "
            f"(allowed: weight_input, weight_output, which stored weights include). {_TAKE}"
        )
    groups: _Groups = []
    for group in (stated.get("config_groups") or {}).values():
        # A class of modules means all of them: others are not quantized.
        targets = [EVERY if target == "Linear" else str(target) for target in group.get("targets") or ()]
        weights = group.get("weights")
        if weights:
            scheme = _compressed_scheme(weights, group.get("format") or stated.get("format"))
            groups += [((target,), scheme) for target in targets]
    # As compressed-tensors does: a name goes before a regular expression, and that before a class.
    return sorted(groups, key=lambda one: 2 if one[0] == (EVERY,) else int(one[0][0].startswith("re:")))


def _compressed_scheme(weights: Mapping[str, Any], form: object) -> Scheme:
    kind, strategy = (weights.get("type"), weights.get("num_bits")), weights.get("strategy")
    run, order = weights.get("group_size"), weights.get("actorder")
    if kind == ("float", 8) and form in ("float-quantized", "naive-quantized", None):
        if strategy == "block":
            return _of_block(weights.get("block_structure"))
        found = {"tensor": _OF_TENSOR, "channel": _OF_ROW}.get(str(strategy))
        if found is not None:
            return found
    symmetric = bool(weights.get("symmetric", True)) and order in (None, "static", "weight")
    if kind == ("int", 4) and form == "pack-quantized" and strategy in ("group", "channel") and symmetric:
        return Scheme(Int4(int(run or 0) if strategy == "group" else 0))
    raise _UnknownFormat(
        f"weights of type={kind[0]!r}, num_bits={kind[1]!r}, strategy={strategy!r}, group_size={run!r}, "
        f"symmetric={weights.get('symmetric')!r}, actorder={order!r}, format={form!r} are not supported "
        "(allowed: float-quantized of 8 bits by tensor, channel or block; pack-quantized of 4 bits, symmetric, "
        f"by group or channel). {_TAKE}"
    )


def _read_quark(stated: Mapping[str, Any]) -> _Groups:
    groups: _Groups = []
    for pattern, layer in (stated.get("layer_quant_config") or {}).items():
        groups.append(((str(pattern),), _quark_scheme((layer or {}).get("weight"))))
    if stated.get("layer_type_quant_config"):
        raise _UnknownFormat(f"layer_type_quant_config={stated['layer_type_quant_config']!r} is not supported")
    return [*groups, ((EVERY,), _quark_scheme((stated.get("global_quant_config") or {}).get("weight")))]


def _quark_scheme(weight: Any) -> Scheme | None:
    if weight is None:
        return None
    stages = weight if isinstance(weight, list) else [weight]
    one = stages[0]
    kind, scheme, run = one.get("dtype"), one.get("qscheme"), one.get("group_size")
    if len(stages) == 1:
        if (kind, scheme, run) == ("fp4", "per_group", FP4_GROUP) and one.get("scale_format", "e8m0") == "e8m0":
            return _MXFP4
        if kind == "fp8_e4m3" and scheme in ("per_tensor", "per_channel"):
            return _OF_TENSOR if scheme == "per_tensor" else _OF_ROW
    raise _UnknownFormat(
        f"weights of {len(stages)} stage(s), dtype={kind!r}, qscheme={scheme!r}, group_size={run!r}, "
        f"scale_format={one.get('scale_format')!r} are not supported (allowed: fp8_e4m3 per_tensor or per_channel, "
        f"fp4 per_group of {FP4_GROUP} with scale_format e8m0). {_TAKE}"
    )


def _modelopt(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The statement itself, with the values of ModelOpt's older nesting."""
    inner = stated.get("quantization")
    return {**stated, **inner} if isinstance(inner, Mapping) else dict(stated)


def _read_modelopt(stated: Mapping[str, Any]) -> _Groups:
    algorithm = str(_modelopt(stated).get("quant_algo", "")).upper()
    found = {"FP8": _OF_TENSOR, "FP8_PER_CHANNEL_PER_TOKEN": _OF_ROW, "FP8_PB_WO": _of_block((128, 128))}
    if algorithm not in found:
        raise _UnknownFormat(f"quant_algo={algorithm!r} is not supported (allowed: {', '.join(found)}). {_TAKE}")
    return [((EVERY,), found[algorithm])]


_READERS: dict[str, Callable[[Mapping[str, Any]], _Groups]] = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm,
    "compressed-tensors": _read_compressed,
    "quark": _read_quark,
    "modelopt": _read_modelopt,
    "mxfp4": _read_mxfp4,
}
FP8_METHODS = tuple(method for method in _READERS if method != "mxfp4")
"""Methods whose weights have their own names, with scales beside them."""


def _names(entries: tuple[str, ...], module: str) -> bool:
    """Whether a module, or one around it, is listed: by name, its end, a pattern, or "re:" and a regular expression."""
    around = [module[: match.start()] for match in re.finditer(r"\.|$", module)]
    for entry in entries:
        if entry.startswith("re:"):
            if re.match(entry[3:], module):
                return True
        elif any(fnmatch.fnmatchcase(name, entry) or name.endswith("." + entry) for name in around):
            return True
    return False
