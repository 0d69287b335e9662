"""Multi-token-prediction layers made by hand from Transformers' decoder layers, and checkpoints that have them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import TinyCheckpoint, draw_weight
from torch import nn


@dataclass
class MtpOracle:
    """`tiny`: the model. `layer`: Transformers' `MtpLayer` beside it. `rope_kind`: of its rotation, or None."""

    tiny: TinyCheckpoint
    layer: Any
    rope_kind: str | None

    @torch.inference_mode()
    def hidden(self, ids: Sequence[int]) -> torch.Tensor:
        """[L, hidden] of the model after its final norm."""
        return self.tiny.model.get_decoder()(torch.tensor([list(ids)]), use_cache=False).last_hidden_state[0]

    @torch.inference_mode()
    def following(self, hidden: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        """[L, hidden] of the layer. `ids`: of each row, the token after it."""
        model, n = self.tiny.model, len(ids)
        # The layer's rows count from 1, as its tokens do: only distances matter.
        positions = torch.arange(1, n + 1)[None]
        embedded = model.get_input_embeddings()(torch.tensor([list(ids)]))
        kind = {} if self.rope_kind is None else {"layer_type": self.rope_kind}
        rotation = model.get_decoder().rotary_emb(embedded, position_ids=positions, **kind)
        window = getattr(self.layer.config, "sliding_window", None) if self.rope_kind else None
        return self.layer(embedded, hidden[None], rotation, _causal(n, window), positions, None)[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[L, vocabulary] of what `following` returned."""
        return self.tiny.model.lm_head(hidden).float()


@dataclass
class StreamMtpOracle:
    """As `MtpOracle`, of DeepSeek V4. `parts`: the modules around Transformers' decoder layer, and that layer."""

    tiny: TinyCheckpoint
    parts: nn.ModuleDict

    @torch.inference_mode()
    def hidden(self, ids: Sequence[int]) -> torch.Tensor:
        """[L, N * hidden] residual streams of the model before they are joined."""
        seen = []
        decoder = self.tiny.model.get_decoder()
        hook = decoder.hc_head.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
        decoder(torch.tensor([list(ids)]), use_cache=False)
        hook.remove()
        return seen[0][0].flatten(1)

    @torch.inference_mode()
    def following(self, hidden: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        """[L, N * hidden] of the layer. `ids`: of each row, the token after it."""
        model, parts, n = self.tiny.model, self.parts, len(ids)
        decoder = model.get_decoder()
        token = parts["e_proj"](parts["enorm"](model.get_input_embeddings()(torch.tensor(list(ids)))))
        streams = parts["h_proj"](parts["hnorm"](hidden.unflatten(1, (decoder.config.hc_mult, -1)))) + token[:, None]
        positions = torch.arange(1, n + 1)[None]
        rotation = {"main": decoder.rotary_emb(streams, position_ids=positions, layer_type="main")}
        after = parts["block"](
            streams[None],
            input_ids=torch.tensor([list(ids)]),
            position_embeddings=rotation,
            position_ids=positions,
            attention_mask=_causal(n, decoder.config.sliding_window),
            past_key_values=None,
        )
        return after[0].flatten(1)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[L, vocabulary] of what `following` returned."""
        model, parts = self.tiny.model, self.parts
        streams = hidden.unflatten(1, (model.config.hc_mult, -1))[None]
        return model.lm_head(parts["norm"](parts["hc_head"](streams)))[0].float()


def _causal(n: int, window: int | None) -> torch.Tensor:
    """[1, 1, n, n] zeros where a row sees another. `window`: rows that it sees, its own among them."""
    before = torch.arange(n)[:, None] - torch.arange(n)
    seen = (before >= 0) & (before < (window or n))
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]


def with_stream_mtp(tiny: TinyCheckpoint, released: Callable[[str], str], seed: int = 7) -> StreamMtpOracle:
    """Draw DeepSeek V4's multi-token-prediction layer and add its tensors to the checkpoint `tiny`.

    `released`: Transformers' name of a tensor in a layer to the released one.
    """
    decoder = tiny.model.get_decoder()
    config = copy.deepcopy(decoder.config)
    config.layer_types, config.mlp_layer_types = ["sliding_attention"], ["moe"]
    hidden, norm = config.hidden_size, type(decoder.norm)
    parts = nn.ModuleDict(
        {name: norm(hidden, eps=config.rms_norm_eps) for name in ("enorm", "hnorm", "norm")}
        | {name: nn.Linear(hidden, hidden, bias=False) for name in ("e_proj", "h_proj")}
        | {"hc_head": type(decoder.hc_head)(config), "block": type(decoder.layers[-1])(config, 0)}
    ).eval()
    added = {"mtp.0.emb.tok_emb.weight": torch.ones(2), "mtp.0.head.weight": torch.ones(2)}
    with torch.no_grad():
        for name, tensor in parts.state_dict().items():
            tensor.copy_(draw_weight(name, tensor.shape, seed))
            inner = released(name.replace("block.", "model.layers.0.")).removeprefix("layers.0.")
            added["mtp.0." + inner.replace("hc_head.hc_", "hc_head_")] = tensor.clone()
    path = Path(tiny.directory) / "model.safetensors"
    save_file(load_file(path) | added, path, metadata={"format": "pt"})
    return StreamMtpOracle(tiny, parts)


def with_mtp(
    tiny: TinyCheckpoint,
    changes: Mapping[str, Any],
    rename: Callable[[str], str],
    *,
    rope_kind: str | None = None,
    offset: float = 0.0,
    seed: int = 7,
) -> MtpOracle:
    """Draw a multi-token-prediction layer and add its tensors to the checkpoint `tiny`.

    `changes`: what the config says of a model of this one layer. `rename`: name in `MtpLayer` to the released one.
    `offset`: 1 where norms multiply by 1 + w.
    """
    from transformers.modeling_layers import MtpLayer

    decoder = tiny.model.get_decoder()
    config = copy.deepcopy(decoder.config)
    for key, value in {"num_hidden_layers": 1, **changes}.items():
        setattr(config, key, value)
    norm = type(decoder.norm)
    layer = MtpLayer(config, type(decoder.layers[-1]), norm, 0).eval()
    # Layers that share top-k indices return them too.
    layer.mtp_block.register_forward_hook(lambda _, __, out: out[0] if isinstance(out, tuple) else out)
    added = {}
    with torch.no_grad():
        for name, tensor in layer.state_dict().items():
            tensor.copy_(draw_weight(name, tensor.shape, seed))
            if "norm" in name and tensor.dim() == 1:
                tensor -= offset
            added[rename(name)] = tensor.clone()
    path = Path(tiny.directory) / "model.safetensors"
    save_file(load_file(path) | added, path, metadata={"format": "pt"})
    return MtpOracle(tiny, layer, rope_kind)


def deepseek_names(prefix: str) -> Callable[[str], str]:
    """The layout of DeepSeek V3. `prefix`: of the layer's names, with the last dot."""

    def rename(name: str) -> str:
        return prefix + name.replace("post_norm.", "shared_head.norm.").removeprefix("mtp_block.")

    return rename


def qwen_names(name: str) -> str:
    """The layout of Qwen3-Next."""
    if name.startswith("mtp_block."):
        return "mtp.layers.0." + name.removeprefix("mtp_block.")
    part, _, kind = name.partition(".")
    parts = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
    return f"mtp.{parts[part]}.{kind}"
