"""Transformers' own model of a checkpoint: the reference. The only module here that loads that library."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from allotrope.checkpoint.gguf_keys import ROPE_FACTORS
from allotrope.errors import ModelError
from allotrope.gguf_file import GgufFile
from allotrope.verify.hooks import Place, TopkSelection, hooked
from allotrope.verify.plain_files import dequantized_file, plain_files


@dataclass(frozen=True)
class Trace:
    """What happened to one sample of F tokens. `hidden`: place -> [F, width]. `selections`: layer -> top-k calls."""

    hidden: dict[Place, torch.Tensor]
    selections: dict[int, list[TopkSelection]]


class TransformersModel:
    """A checkpoint in Transformers, by its plain implementations and without a cache. `layers`: its decoder layers.
    `around`: entered around every pass. `dequantized`: whether a GGUF file was written out plain for it.
    """

    dequantized = False

    def __init__(self, model: Any, count: int) -> None:
        self.model = model
        self.layers = find_layers(model, count)
        self.around: AbstractContextManager[Any] = nullcontext()

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[F, vocabulary] fp32 logits after each token of `ids`."""
        with quiet(), self.around:
            found: torch.Tensor = self.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()
        return found

    def trace(self, ids: Sequence[int]) -> tuple[torch.Tensor, Trace]:
        """Logits, and what happened on the way to them."""
        with hooked(list(self.layers)) as hooks:
            logits = self.logits(ids)
        hidden = {place: found.reshape(len(ids), -1) for place, found in hooks.hidden.items()}
        return logits, Trace(hidden, hooks.selections(len(ids)))

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @property
    def parameters(self) -> int:
        """How many numbers it holds."""
        return sum(parameter.numel() for parameter in self.model.parameters())


@torch.inference_mode()
def find_layers(model: nn.Module, count: int) -> nn.ModuleList:
    """The list of `count` modules that a text runs through; of several, the outermost. Raises ModelError for none."""
    lists = [
        (name.count("."), found)
        for name, found in model.named_modules()
        if isinstance(found, nn.ModuleList) and len(found) == count
    ]
    ran: set[int] = set()
    handles = [found[0].register_forward_hook(lambda *_, i=i: ran.add(i)) for i, (_, found) in enumerate(lists)]
    model(input_ids=torch.tensor([[9, 10]]), use_cache=False)
    for handle in handles:
        handle.remove()
    used = sorted((lists[i] for i in ran), key=lambda entry: entry[0])
    if not used:
        raise ModelError(
            f"cannot look into {type(model).__name__}", [f"it has no list of {count} layers that a text runs through"]
        )
    return used[0][1]


def class_and_config(config: Mapping[str, Any], directory: Path) -> tuple[Any, Any]:
    """The class of Transformers that a config.json names, or that belongs to its type; and `directory`'s config.json
    as that class reads it.

    Raises ModelError if this version has none.
    """
    import transformers

    described = transformers.AutoConfig.from_pretrained(str(directory), local_files_only=True)
    cls = _class_of(config, described)
    own = cls.config_class
    if own.model_type == config.get("model_type") and not isinstance(described, own):
        # Another library in this process has put a class of its choice in the place of Transformers'.
        described = own.from_pretrained(str(directory), local_files_only=True)
    return cls, described


def _class_of(config: Mapping[str, Any], described: Any) -> Any:
    import transformers

    for name in config.get("architectures") or []:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        found = auto._model_mapping.get(type(described), None)
        if found is not None:
            return found
    raise ModelError(
        "Transformers cannot run the model",
        [f"version {transformers.__version__} has none of architectures={config.get('architectures')!r}"],
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing of what Transformers prints, progress bars and advice, stands among our own lines; errors are raised."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)


def load_transformers(path: Path, config: Mapping[str, Any], dtype: torch.dtype, layers: int) -> TransformersModel:
    """Load `path`, a directory or a .gguf file, with `config` in place of its config.json.

    Quantized weights become plain ones in `dtype`. A GGUF file that Transformers does not read, or whose factors of
    rotation it overlooks, is written out plain for it. Raises ModelError if Transformers refuses the model, or would
    fill in a weight that it did not find.
    """
    if path.is_file():
        if ROPE_FACTORS not in GgufFile(str(path)).tensors:
            with contextlib.suppress(ModelError):
                return _load(path, config, dtype, layers)
        with dequantized_file(path, config) as (directory, plain):
            model = _load(directory, plain, dtype, layers)
        model.dequantized = True
        return model
    return _load(path, config, dtype, layers)


def _load(path: Path, config: Mapping[str, Any], dtype: torch.dtype, layers: int) -> TransformersModel:
    import transformers

    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager", "experts_implementation": "eager"}
    options |= {"local_files_only": True, "output_loading_info": True}
    with quiet(), contextlib.ExitStack() as stack:
        path, config = stack.enter_context(plain_files(path, config))
        config = _in_words_of_all_releases(config)
        dequantized = _dequantized(config)
        options |= dequantized
        try:
            if path.is_file():
                cls, options["gguf_file"], path = transformers.AutoModelForCausalLM, path.name, path.parent
            else:
                path = stack.enter_context(_with_config(path, config))
                cls, _ = class_and_config(config, path)
            model, info = cls.from_pretrained(str(path), **options)
            if dequantized:
                # Some releases leave experts that were in 4 bits in bf16, whatever type is asked for.
                for parameter in model.parameters():
                    parameter.data = parameter.data.to(dtype)
            found = TransformersModel(model.eval(), layers)
        except ModelError:
            raise
        except Exception as error:
            # The border to another library: it may raise anything, and none of it is ours to mend.
            raise ModelError("Transformers cannot run the model", [f"{type(error).__name__}: {error}"]) from error
    _refuse_gaps(found, info)
    return found


@contextmanager
def _with_config(directory: Path, config: Mapping[str, Any]) -> Iterator[Path]:
    """`directory` as it would be with `config` as its config.json."""
    if json.loads((directory / "config.json").read_text()) == config:
        yield directory
        return
    with tempfile.TemporaryDirectory() as scratch:
        for file in directory.iterdir():
            (Path(scratch) / file.name).symlink_to(file.resolve())
        (Path(scratch) / "config.json").unlink()
        (Path(scratch) / "config.json").write_text(json.dumps(config))
        yield Path(scratch)


def _in_words_of_all_releases(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Until 5.18, MiniMax-M2's `rotary_dim` is overlooked, and all of each head is rotated."""
    if "rotary_dim" in config and "head_dim" in config:
        return {"partial_rotary_factor": config["rotary_dim"] / config["head_dim"], **config}
    return config


def _dequantized(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options that make a quantized checkpoint compute in full precision."""
    if (config.get("quantization_config") or {}).get("quant_method") != "mxfp4":
        return {}
    from transformers import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)}


def _refuse_gaps(found: TransformersModel, info: Mapping[str, Any]) -> None:
    """Weights that Transformers made up would make the comparison worthless; those of other towers do not matter."""
    stem = next(name for name, module in found.model.named_modules() if module is found.layers).rpartition(".")[0]
    names = [str(name) for kind in ("missing_keys", "mismatched_keys") for name in info.get(kind) or ()]
    gaps = sorted(name for name in names if name.startswith(f"{stem}."))
    if gaps:
        more = f" and {len(gaps) - 5} more" if len(gaps) > 5 else ""
        raise ModelError(
            "Transformers cannot be the reference",
            [f"it found no weights for {', '.join(gaps[:5])}{more}, and would make some up"],
        )
